"""Values of the SYMMCOMM_* variables that do not parse: an error that names the variable and the value."""

from __future__ import annotations

import pytest

from symmcomm import ArgumentError, Settings
from symmcomm.env import MAX_TIMEOUT_S, parse_bytes

BAD = [
    ("SYMMCOMM_TIMEOUT_S", "soon", "no number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "", "no number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "0", "no positive number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "nan", "no positive number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "inf", "more than 2000000 seconds"),
    ("SYMMCOMM_TIMEOUT_S", "1e300", "more than 2000000 seconds"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "much", "no size"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "inf", "no whole, non-negative number of bytes"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "nan", "no whole, non-negative number of bytes"),
    ("SYMMCOMM_STAGING_BYTES", "1e400", "no whole, non-negative number of bytes"),
    ("SYMMCOMM_STAGING_BYTES", "0.3", "no whole, non-negative number of bytes"),
    ("SYMMCOMM_GPU_STAGING_BYTES", "-1", "no whole, non-negative number of bytes"),
    ("SYMMCOMM_SPIN", "often", "no whole number of polls"),
    ("SYMMCOMM_SPIN", "-7", r"not in -1\.\."),
    ("SYMMCOMM_SPIN", "99999999999", r"not in -1\.\."),
    ("SYMMCOMM_PIN", "2", "no boolean"),
    ("SYMMCOMM_GPU_MEMORY", "shared", "none of auto"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD)
def test_bad_value(name: str, text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: '{text}' is {words}"):
        Settings.from_env({name: text})


def test_largest_time_fits_what_waits() -> None:
    """``poll`` takes milliseconds as a C int."""
    assert Settings.from_env({"SYMMCOMM_TIMEOUT_S": str(MAX_TIMEOUT_S)}).timeout_s * 1000 < 1 << 31


@pytest.mark.parametrize(("text", "size"), [("64M", 64 << 20), ("1.5KiB", 1536), ("16g", 16 << 30), ("0", 0)])
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
