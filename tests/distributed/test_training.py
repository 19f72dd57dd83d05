"""All parallelisms of torch give on symm what they give on gloo."""

from __future__ import annotations

import warnings

import pytest
import training

from symmcomm.testing.spawn import run_ranks


def compare(names: list[str]) -> None:
    """Each scenario on the one backend, then on the other, in one process, so that all else is the same."""
    warnings.simplefilter("ignore")
    results: list[dict[str, training.Results]] = []
    for backend in ("gloo", "symm"):
        with training.process_group(backend):
            results.append({name: training.SCENARIOS[name]() for name in names})
    training.check_same(*results)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", training.FAMILIES)
def test_as_gloo(family: str, world_size: int) -> None:
    """A family shares its processes: to import what it trains with takes longer than the training."""
    names = [name for name in training.SCENARIOS if name.startswith(training.FAMILIES[family])]
    run_ranks(compare, world_size, names, timeout_s=240)


def test_every_scenario_has_a_family() -> None:
    beginnings = tuple(beginning for family in training.FAMILIES.values() for beginning in family)
    assert all(name.startswith(beginnings) for name in training.SCENARIOS)
