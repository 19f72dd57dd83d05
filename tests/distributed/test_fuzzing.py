"""Random calls give on symm what they give on gloo."""

from __future__ import annotations

import pytest
from fuzzing import fuzz

from symmcomm.testing.spawn import run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_hundred_calls(world_size: int) -> None:
    run_ranks(fuzz, world_size, 100, 1, timeout_s=200)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_thousand_calls(world_size: int) -> None:
    run_ranks(fuzz, world_size, 2000, 2, timeout_s=280)
