"""All parallelisms of torch give on symm what they give on gloo."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import training

from symmcomm.testing.spawn import run_ranks

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def compare(names: list[str]) -> None:
    """Each scenario on the one backend, then on the other, in one process, so that all else is the same."""
    warnings.simplefilter("ignore")
    results: dict[tuple[str, str], list[torch.Tensor]] = {}
    for backend in ("gloo", "symm"):
        dist.init_process_group(backend)
        for name in names:
            results[backend, name] = training.SCENARIOS[name]()
        dist.barrier()
        dist.destroy_process_group()
    for name in names:
        expected, got = results["gloo", name], results["symm", name]
        assert len(expected) == len(got) > 0, name
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if "hook" in name or "mixed" in name else TOLERANCE
        for number, (left, right) in enumerate(zip(expected, got, strict=True)):
            torch.testing.assert_close(right, left, **tolerance, msg=lambda text, n=number, s=name: f"{s} {n}: {text}")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", training.FAMILIES)
def test_as_gloo(family: str, world_size: int) -> None:
    """A family shares its processes: to import what it trains with takes longer than the training."""
    names = [name for name in training.SCENARIOS if name.startswith(training.FAMILIES[family])]
    run_ranks(compare, world_size, names, timeout_s=240)


def test_every_scenario_has_a_family() -> None:
    beginnings = tuple(beginning for family in training.FAMILIES.values() for beginning in family)
    assert all(name.startswith(beginnings) for name in training.SCENARIOS)
