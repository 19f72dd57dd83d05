"""Ring schedules: Flux's tables, right for any topology, and wrong plans are refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from symmcomm.errors import PlanError, TopologyError
from symmcomm.schedule.machines import MACHINES, cluster, nvlink, pcie
from symmcomm.schedule.plan import KEEP, ROW_FIELDS, SOURCE_FIELDS, Plan, Source, Step, all_reduce_of, gather_of
from symmcomm.schedule.ring import Grid, Order, direct, grid_of, ring, ring_1d, ring_2d, stage_tables
from symmcomm.schedule.simulate import simulate

# bytedance/flux, src/gemm_rs/reduce_scatter_topos.hpp: rank_from and rank_to of its two topologies, [stage][rank].
FLUX = {
    Order.ring: (
        [[4, 0, 1, 2, 5, 6, 7, 3], [3, 5, 1, 2, 0, 6, 7, 4], [3, 0, 6, 2, 5, 1, 7, 4], [3, 0, 1, 7, 5, 6, 2, 4]],
        [[1, 2, 3, 7, 0, 4, 5, 6], [4, 2, 3, 0, 7, 1, 5, 6], [1, 5, 3, 0, 7, 4, 2, 6], [1, 2, 6, 0, 7, 4, 5, 3]],
    ),
    Order.exchange: (
        [[4, 0, 1, 2, 5, 6, 7, 3], [1, 5, 3, 0, 7, 4, 2, 6], [3, 0, 6, 2, 5, 1, 7, 4], [1, 2, 3, 7, 0, 4, 5, 6]],
        [[1, 2, 3, 7, 0, 4, 5, 6], [3, 0, 6, 2, 5, 1, 7, 4], [1, 5, 3, 0, 7, 4, 2, 6], [4, 0, 1, 2, 5, 6, 7, 3]],
    ),
}


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("order", list(Order))
def test_fluxs_tables_are_instances(order: Order, pull: bool) -> None:
    plan = ring_2d(pcie((4, 4)), order=order, pull=pull)
    simulate(plan)
    assert stage_tables(plan) == FLUX[order]


def test_fluxs_segments() -> None:
    """In stage s the chains of the two domains end with segments[s], and bring the other domain's counterpart along."""
    plan = ring_2d(pcie((4, 4)))
    for stage, ends in enumerate([[3, 4], [0, 5], [1, 6], [2, 7]]):
        for domain, end in enumerate(ends):
            other = (end + 4) % 8
            kept = [s for s in plan.steps[end] if s.stage == stage and s.target == KEEP]
            crossing = [s for s in plan.steps[end] if s.stage == stage and s.target == other]
            assert [s.segment for s in kept] == [end]
            assert [s.segment for s in crossing] == [other]
            inner = [s for r in range(4 * domain, 4 * domain + 4) for s in plan.steps[r] if s.stage == stage]
            assert {s.segment for s in inner} == {end, other}


@pytest.mark.parametrize("both_directions", [False, True])
@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "72 NVLink"])
def test_all_machines(name: str, pull: bool, both_directions: bool) -> None:
    machine = MACHINES[name]
    plans = [ring_1d(machine, pull=pull, both_directions=both_directions)]
    if machine.levels:
        plans.append(ring_2d(machine, pull=pull, both_directions=both_directions))
    for plan in plans:
        for form in (plan, gather_of(plan), all_reduce_of(plan)):
            simulate(form)


def test_a_large_domain() -> None:
    simulate(ring_1d(MACHINES["72 NVLink"]))


def test_three_levels() -> None:
    plan = ring(grid_of(cluster(4, 4, nodes_per_rack=2), 3))
    simulate(plan)
    simulate(all_reduce_of(plan))
    assert plan.num_sources == 3
    for steps in plan.steps:  # 3 neighbours of 4 · 1 places, 1 of 2 nodes, 1 of 2 racks
        assert [sum(s.level == level and s.target != KEEP for s in steps) for level in range(3)] == [12, 2, 1]


def test_levels_have_slots_of_their_own() -> None:
    plan = ring_2d(pcie((4, 4, 4)))
    for rank in range(12):
        of_level = [{s.slot for _, s in plan.messages() if s.target == rank and s.level == level} for level in (0, 1)]
        assert not of_level[0] & of_level[1]
        assert [len(slots) for slots in of_level] == [9, 2]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Boxes of up to 64 ranks, in any numbering."""
    dims = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple))
    size = 1
    for dim in dims:
        size *= dim
    assume(size <= 64)
    return Grid(dims, tuple(draw(st.permutations(range(size)))))


@settings(max_examples=25, deadline=None)
@given(grids(), st.sampled_from(Order), st.booleans(), st.booleans(), st.sampled_from(["scatter", "gather", "both"]))
def test_any_box(grid: Grid, order: Order, pull: bool, both: bool, form: str) -> None:
    if order is Order.exchange and grid.dims[0] & (grid.dims[0] - 1):
        with pytest.raises(TopologyError, match="exchange order"):
            ring(grid, order=order)
        return
    plan = ring(grid, order=order, pull=pull, both_directions=both)
    make = {"scatter": lambda p: p, "gather": gather_of, "both": all_reduce_of}[form]
    simulate(make(plan))
    assert plan.num_rounds == sum(dim - 1 for dim in grid.dims) + 1
    assert plan.num_slots == plan.num_lanes * (len(grid.ranks) - 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_any_domains(sizes: list[int]) -> None:
    machine = pcie(sizes)
    simulate(ring_1d(machine))
    simulate(direct(machine))
    if len(set(sizes)) == 1:
        simulate(ring_2d(machine))
    else:
        with pytest.raises(TopologyError, match="groups of one size"):
            ring_2d(machine)


def test_what_a_topology_lacks() -> None:
    with pytest.raises(TopologyError, match="needs 1 levels of groups, the topology has 0"):
        ring_2d(nvlink(8))


# Mutations: some sound plans, made wrong.

PLANS = [
    ring_1d(nvlink(5)),
    ring_2d(pcie((4, 4))),
    ring_2d(pcie((2, 2, 2)), pull=True, both_directions=True),
    all_reduce_of(ring_2d(pcie((2, 2)), order=Order.exchange)),
    gather_of(ring_1d(nvlink(4))),
]


def with_steps(plan: Plan, rank: int, steps: list[Step]) -> Plan:
    return replace(plan, steps=(*plan.steps[:rank], tuple(steps), *plan.steps[rank + 1 :]))


@st.composite
def places(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """A plan, a rank, and the number of one of its steps."""
    plan = draw(st.sampled_from(PLANS))
    rank = draw(st.integers(0, plan.world_size - 1))
    return plan, rank, draw(st.integers(0, len(plan.steps[rank]) - 1))


REASON = (
    r"contributions of ranks .* (are missing|a second time)|never gets|never waited for|it waits for signal|deadlock|"
    r"its signal is|brings segment|comes after a step of round|not a peer|may still be read|belongs to level|"
    r"does not hold|not the finished|has kept that|belongs to rank|not loaded alike|finished sum"
)


@settings(max_examples=60, deadline=None)
@given(places())
def test_a_dropped_step_is_noticed(place: tuple[Plan, int, int]) -> None:
    plan, rank, idx = place
    steps = list(plan.steps[rank])
    del steps[idx]
    with pytest.raises(PlanError, match=REASON):
        simulate(with_steps(plan, rank, steps))


@settings(max_examples=60, deadline=None)
@given(places(), st.data())
def test_swapped_steps_are_noticed(place: tuple[Plan, int, int], data: st.DataObject) -> None:
    """Two steps of one round to different ranks may be swapped: then nothing is wrong."""
    plan, rank, idx = place
    steps = list(plan.steps[rank])
    other = data.draw(st.integers(0, len(steps) - 1))
    one_pair = steps[idx].target == steps[other].target != KEEP and other != idx
    assume(steps[idx].round != steps[other].round or one_pair)
    steps[idx], steps[other] = steps[other], steps[idx]
    with pytest.raises(PlanError, match=REASON):
        simulate(with_steps(plan, rank, steps))


@settings(max_examples=60, deadline=None)
@given(places(), st.data())
def test_a_rerouted_step_is_noticed(place: tuple[Plan, int, int], data: st.DataObject) -> None:
    plan, rank, idx = place
    steps = list(plan.steps[rank])
    target = data.draw(st.integers(-1, plan.world_size))
    assume(target != steps[idx].target)
    steps[idx] = replace(steps[idx], target=target)
    with pytest.raises(PlanError):
        simulate(with_steps(plan, rank, steps))


@settings(max_examples=40, deadline=None)
@given(places(), st.data())
def test_another_segment_is_noticed(place: tuple[Plan, int, int], data: st.DataObject) -> None:
    plan, rank, idx = place
    steps = list(plan.steps[rank])
    segment = data.draw(st.integers(0, plan.world_size))
    assume(segment != steps[idx].segment)
    steps[idx] = replace(steps[idx], segment=segment)
    with pytest.raises(PlanError):
        simulate(with_steps(plan, rank, steps))


@settings(max_examples=40, deadline=None)
@given(places())
def test_a_dropped_addition_is_noticed(place: tuple[Plan, int, int]) -> None:
    plan, rank, idx = place
    steps = list(plan.steps[rank])
    assume(steps[idx].own and steps[idx].sources)
    steps[idx] = replace(steps[idx], sources=steps[idx].sources[1:])
    with pytest.raises(PlanError, match=REASON):
        simulate(with_steps(plan, rank, steps))


def test_a_slot_that_may_still_be_read() -> None:
    """Two messages of one pair in one slot: the second may come before the first is read."""
    plan = ring_1d(nvlink(4))
    steps = [replace(step, slot=0) if step.slot == 1 else step for step in plan.steps[0]]
    readers = [
        replace(step, sources=tuple(s._replace(slot=0) if s.slot == 1 else s for s in step.sources))
        for step in plan.steps[1]
    ]
    wrong = with_steps(with_steps(plan, 0, steps), 1, readers)
    with pytest.raises(PlanError, match=r"rank 0, step 1 .* slot 0 of rank 1 may still be read: it holds signal 0"):
        simulate(wrong)


def test_slots_may_be_used_again_once_read() -> None:
    """Rank 1 reads and then answers; so rank 0, which waits for the answer, may use the slot again. Not so rank 1."""

    def plan(slot: int) -> Plan:
        def sends(segment: int, target: int, slot: int, signal: int, at: int) -> Step:
            message = {"target": target, "slot": slot, "signal": signal, "round": at}
            return Step(segment=segment, lane=0, own=True, sources=(), **message)

        def keeps(segment: int, source: Source, own: bool, at: int) -> Step:
            return Step(segment=segment, lane=0, own=own, sources=(source,), target=KEEP, round=at)

        rank_0 = (
            sends(1, 1, 0, 0, 0), keeps(0, Source(1, 0, 0), True, 1), sends(0, 1, 0, 1, 2),
            keeps(1, Source(1, slot, 1), False, 3),
        )  # fmt: skip
        rank_1 = (
            keeps(1, Source(0, 0, 0), True, 1), sends(0, 0, 0, 0, 1), sends(1, 0, slot, 1, 2),
            keeps(0, Source(0, 0, 1), False, 3),
        )  # fmt: skip
        return Plan(
            name="two", world_size=2, num_lanes=1, pull=False, reduces=True, gathers=True, steps=(rank_0, rank_1)
        )

    simulate(plan(1))
    with pytest.raises(PlanError, match=r"rank 1, step 2 .* slot 0 of rank 0 may still be read: it holds signal 0"):
        simulate(plan(0))


def test_a_table_says_it_all() -> None:
    plan = ring_2d(pcie((4, 4)))
    for rank in range(8):
        rows = plan.table(rank)
        assert {len(row) for row in rows} == {len(ROW_FIELDS) + 2 * len(SOURCE_FIELDS)}
        for row, step in zip(rows, plan.steps[rank], strict=True):
            fields = dict(zip(ROW_FIELDS, row, strict=False))
            assert (fields["segment"], fields["target"], fields["num_sources"]) == (
                step.segment, step.target, len(step.sources),
            )  # fmt: skip
            first = dict(zip(SOURCE_FIELDS, row[len(ROW_FIELDS) :], strict=False))
            if step.sources:
                sent = next(s for s in plan.steps[first["sender"]] if (s.target, s.signal) == (rank, first["signal"]))
                assert first["partial"] == bool(sent.sources)
                assert first["slot"] == sent.slot
