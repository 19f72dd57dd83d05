"""The SYMMCOMM_* variables: what does not parse is an error that names the variable and the value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from symmcomm import ArgumentError, Settings
from symmcomm.env import MAX_TIMEOUT_S, parse_bytes

BAD = [
    ("SYMMCOMM_TIMEOUT_S", "soon", "not a number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "0", "not a positive number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "nan", "not a positive number of seconds"),
    ("SYMMCOMM_TIMEOUT_S", "inf", "more than 2000000 seconds"),
    ("SYMMCOMM_TIMEOUT_S", "1e300", "more than 2000000 seconds"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "much", "not a size"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "inf", "not a whole, non-negative number of bytes"),
    ("SYMMCOMM_HEAP_MAX_BYTES", "nan", "not a whole, non-negative number of bytes"),
    ("SYMMCOMM_STAGING_BYTES", "1e400", "not a whole, non-negative number of bytes"),
    ("SYMMCOMM_STAGING_BYTES", "0.3", "not a whole, non-negative number of bytes"),
    ("SYMMCOMM_STAGING_BYTES", "-1", "not a whole, non-negative number of bytes"),
    ("SYMMCOMM_SPIN", "often", "not a whole number of polls"),
    ("SYMMCOMM_SPIN", "-7", r"not in -1\.\."),
    ("SYMMCOMM_SPIN", "99999999999", r"not in -1\.\."),
    ("SYMMCOMM_PIN", "2", "not a boolean"),
    ("SYMMCOMM_GPU_MEMORY", "shared", "none of auto"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD)
def test_bad_value(name: str, text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: '{text}' is {words}"):
        Settings.from_env({name: text})


@pytest.mark.parametrize("name", [name for name, _, _ in Settings().variables()])
def test_empty_is_as_unset(name: str) -> None:
    assert Settings.from_env({name: ""}) == Settings()


def test_largest_time_fits_what_waits() -> None:
    """``poll`` takes milliseconds as a C int."""
    assert Settings.from_env({"SYMMCOMM_TIMEOUT_S": str(MAX_TIMEOUT_S)}).timeout_s * 1000 < 1 << 31


def test_the_readme_lists_the_variables() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    rows = re.findall(r"^\| `(SYMMCOMM_\w+)` \|(.*?)\| (.*) \|$", text, re.MULTILINE)
    assert [(name, words.replace("`", "")) for name, _, words in rows] == [
        (name, words) for name, _, words in Settings().variables()
    ]
    assert Settings.from_env({name: default.strip() for name, default, _ in rows}) == Settings()


@pytest.mark.parametrize(("text", "size"), [("64M", 64 << 20), ("1.5KiB", 1536), ("16g", 16 << 30), ("0", 0)])
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
