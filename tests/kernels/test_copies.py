"""The copy past the caches: every alignment, and lengths about those at which it changes its steps."""

from __future__ import annotations

import numpy as np
import pytest

from symmcomm.kernels.cpu.primitives import memcpy_past_caches

ROOM, GUARD = 4096, 0xA5


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 255, 256, 257, 319, 320, 321, 1000, 3000])
def test_copy_past_caches(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, ROOM, dtype=np.uint8)
    target = np.empty(ROOM, dtype=np.uint8)
    for at, start in [(at, 3 * at % 67) for at in range(130)]:
        target[:] = GUARD
        memcpy_past_caches(target.ctypes.data + at, source.ctypes.data + start, num_bytes)
        assert (target[at : at + num_bytes] == source[start : start + num_bytes]).all()
        assert (target[:at] == GUARD).all()
        assert (target[at + num_bytes :] == GUARD).all()
