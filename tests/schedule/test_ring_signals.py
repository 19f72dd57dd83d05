"""The GPU's ring kernel signals early rows late where a plan allows it: nobody waits for ever, and words only grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ring_events import ring_events

from symmcomm.schedule.machines import MACHINES, nvlink, pcie
from symmcomm.schedule.plan import all_reduce_of
from symmcomm.schedule.ring import direct, ring_1d, ring_2d
from symmcomm.schedule.ring_gpu import may_defer

PLANS = {
    "two": ring_1d(nvlink(2)),
    "ring of 7, both ways": ring_1d(nvlink(7), both_directions=True),
    "pull": ring_1d(nvlink(3), pull=True),
    "2D": ring_2d(MACHINES["15 = 3 x 5 PCIe"], both_directions=True),
    "2D all-reduce": all_reduce_of(ring_2d(pcie((2, 2)))),
    "two nodes": ring_1d(MACHINES["2 nodes x 8"]),
    "direct": direct(nvlink(4)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_all_ranks_come_to_their_end(name: str, num_chunks: int) -> None:
    plan = PLANS[name]
    ranks = range(plan.world_size)
    words = {(sender, receiver): 0 for sender in ranks for receiver in ranks}
    going = {rank: [event for event in ring_events(plan, rank, num_chunks) if event.kind != "put"] for rank in ranks}
    moved = True
    while moved:
        moved = False
        for rank, left in going.items():
            while left and (left[0].kind == "signal" or words[left[0].peer, rank] >= left[0].epoch):
                event = left.pop(0)
                moved = True
                if event.kind == "signal":
                    assert event.epoch > words[rank, event.peer], "a word never goes back"
                    words[rank, event.peer] = event.epoch
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
