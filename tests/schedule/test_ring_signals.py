"""The GPU's ring kernel signals early rows late where a plan allows it: nobody waits for ever, and words only grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from symmcomm.schedule.machines import MACHINES, nvlink, pcie
from symmcomm.schedule.plan import KEEP, Plan, all_reduce_of
from symmcomm.schedule.ring import direct, ring_1d, ring_2d
from symmcomm.schedule.ring_gpu import may_defer, num_early

PLANS = {
    "two": ring_1d(nvlink(2)),
    "ring of 7, both ways": ring_1d(nvlink(7), both_directions=True),
    "pull": ring_1d(nvlink(3), pull=True),
    "2D": ring_2d(MACHINES["15 = 3 x 5 PCIe"], both_directions=True),
    "2D all-reduce": all_reduce_of(ring_2d(pcie((2, 2)))),
    "two nodes": ring_1d(MACHINES["2 nodes x 8"]),
    "direct": direct(nvlink(4)),
}


def steps_of(plan: Plan, rank: int, num_chunks: int) -> Iterator[tuple[str, int, int]]:
    """What a CTA of the kernel does, in order: ("wait", sender, epoch) and ("signal", receiver, epoch), from 0 on."""
    steps, first, most = plan.steps[rank], num_early(plan, rank), plan.num_signals
    for iteration in range(num_chunks + 1):
        late = may_defer(plan, rank) and iteration > 0
        for number, step in enumerate(steps):
            chunk = iteration if number < first else iteration - 1
            if not 0 <= chunk < num_chunks:
                continue
            for source in step.sources:
                at = [(s.target, s.signal) for s in plan.steps[source.sender]].index((rank, source.signal))
                early = at < num_early(plan, source.sender)
                yield "wait", source.sender, (chunk + 1 - early) * most + source.signal + 1
            announced = [step] if not (late and number < first) else []
            if late and number == first and iteration < num_chunks:
                announced = [*steps[:first], step]
            for each in announced:
                if each.target != KEEP:
                    yield "signal", each.target, iteration * most + each.signal + 1


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_all_ranks_come_to_their_end(name: str, num_chunks: int) -> None:
    plan = PLANS[name]
    ranks = range(plan.world_size)
    words = {(sender, receiver): 0 for sender in ranks for receiver in ranks}
    going = {rank: list(steps_of(plan, rank, num_chunks)) for rank in ranks}
    moved = True
    while moved:
        moved = False
        for rank, left in going.items():
            while left and (left[0][0] == "signal" or words[left[0][1], rank] >= left[0][2]):
                kind, peer, epoch = left.pop(0)
                moved = True
                if kind == "signal":
                    assert epoch > words[rank, peer], "a word never goes back"
                    words[rank, peer] = epoch
    assert not any(going.values())


@pytest.mark.parametrize("name", PLANS)
def test_rings_defer(name: str) -> None:
    plan = PLANS[name]
    assert all(may_defer(plan, rank) for rank in range(plan.world_size))


def test_who_waits_for_a_late_message_first_does_not_defer() -> None:
    plan = ring_1d(nvlink(4))
    early, first, second, *others = plan.steps[0]
    swapped = replace(plan, steps=((early, second, first, *others), *plan.steps[1:]))
    assert [may_defer(swapped, rank) for rank in range(4)] == [False, True, True, True]
