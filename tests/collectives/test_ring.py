"""Rings on the CPU: every world, dtype and operation against the plan's own order, late ranks, bad input, faults."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from placements import PLACEMENTS, Arena, communicator
from torch import Tensor

import symmcomm
from symmcomm import ArgumentError, Communicator, MismatchError, PeerTimeoutError, PlanError, RingMode, TopologyError
from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.windows import slice_start
from symmcomm.schedule.cost import plan_of
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.schedule.machines import nvlink, pcie
from symmcomm.schedule.plan import KEEP, Plan, all_reduce_of
from symmcomm.schedule.ring import Order, direct, ring_1d, ring_2d
from symmcomm.testing.faults import delayed
from symmcomm.testing.oracle import bounds, check_bits, make_input
from symmcomm.testing.plan_oracle import emulate_plan
from symmcomm.testing.spawn import run_ranks

PAIRS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]
SMALL = {"SYMMCOMM_STAGING_BYTES": "1"}
DOMAINS = {4: (2, 2), 6: (2, 2, 2), 8: (4, 4), 9: (3, 3, 3), 12: (4, 4, 4), 15: (5, 5, 5), 16: (8, 8)}


def in_parts(tensor: Tensor, starts: list[int]) -> list[Tensor]:
    return [tensor[first:last] for first, last in zip(starts, [*starts[1:], len(tensor)], strict=True)]


def expected(comm: Communicator, plan: Plan, inputs: list[Tensor], starts: list[int], dtype: DType, op: Op) -> Tensor:
    """All segments, to the bit; and within the bounds of any order of the sum (a product's partial results may leave
    the range of its accumulator in one order and not in another, so it has none)."""
    result = torch.cat(emulate_plan(plan, [in_parts(tensor, starts) for tensor in inputs], dtype, op))
    if dtype.is_floating_point and comm.world_size > 1 and op is not Op.prod:
        allowed = bounds(inputs, dtype, op)
        wide, limit = result.to(torch.float64), torch.finfo(result.dtype).max
        near = (wide - allowed.reference).abs() <= allowed.tolerance
        near |= (allowed.reference.abs() + allowed.tolerance > limit) & (wide.abs() >= limit)
        assert bool((near | ~allowed.valid).all()), f"{plan.name}: {dtype.name} {op.name} is out of bounds"
    return result


def check_pair(comm: Communicator, arena: Arena, mode: RingMode | Plan, dtype: DType, op: Op, count: int) -> None:
    """Both collectives, in two placements, with inputs of ``count`` elements in all."""
    plan = mode if isinstance(mode, Plan) else plan_of(mode, comm.topology)
    world_size, rank = comm.world_size, comm.rank
    what = f"{plan.name}, {dtype.name} {op.name} × {count}, {world_size} ranks"
    part = count // world_size
    inputs = [make_input(r, part * world_size, dtype, seed=count + op) for r in range(world_size)]
    result = expected(comm, plan, inputs, [part * r for r in range(world_size)], dtype, op)
    own = slice(part * rank, part * (rank + 1))
    for in_place in (False, True):
        tensor = arena.place(inputs[rank], PLACEMENTS[(count + in_place) % 4])
        output = tensor[own] if in_place else arena.blank(part, tensor.dtype, "ordinary")
        comm.reduce_scatter_tensor(output, tensor, op.name, ring_mode=mode)
        check_bits(output, result[own], f"reduce_scatter {what}")
        arena.check(what)
    inputs = [make_input(r, count, dtype, seed=count + op) for r in range(world_size)]
    starts = [slice_start(count, world_size, r, dtype.itemsize) for r in range(world_size)]
    whole = all_reduce_of(plan)
    result = expected(comm, plan, inputs, starts, dtype, op)
    tensor = arena.place(inputs[rank], PLACEMENTS[count % 4])
    comm.all_reduce(tensor, op.name, ring_mode=whole if isinstance(mode, Plan) else mode)
    check_bits(tensor, result, f"all_reduce {what}")
    arena.check(what)


def pairs_for(world_size: int) -> list[tuple[DType, Op]]:
    """All up to 4 ranks; then every third; from 9 on one operation for each dtype, in turn."""
    if world_size <= 4:
        return PAIRS
    if world_size <= 8:
        return PAIRS[world_size % 3 :: 3]
    ops = {dtype: [op for op in Op if supports(dtype, op)] for dtype in DType}
    return [(dtype, ops[dtype][(dtype + world_size) % len(ops[dtype])]) for dtype in DType]


def check_world() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    topology = pcie(DOMAINS.get(world_size, (world_size,)))
    with symmcomm.init(topology=topology) as comm:
        arena = Arena(comm, 256 << 10)
        modes = [RingMode.Ring1D, *([RingMode.Ring2D] if world_size in DOMAINS else [])]
        sizes = (0, 1, 63, 1000, 4099)
        for idx, (dtype, op) in enumerate(pairs_for(world_size)):
            for mode in modes:
                check_pair(comm, arena, mode, dtype, op, sizes[idx % 5])
        for mode in modes:  # many chunks, through the smallest staging memory
            check_pair(comm, arena, mode, DType.float32, Op.sum, 50_001)
            check_pair(comm, arena, mode, DType.int8, Op.avg, 30_001)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16])
def test_worlds(world_size: int) -> None:
    run_ranks(check_world, world_size, timeout_s=250, env=SMALL)


def check_forms() -> None:
    with symmcomm.init(topology=pcie((4, 4))) as comm:
        arena = Arena(comm, 256 << 10)
        forms = [
            ring_1d(comm.topology, pull=True), ring_2d(comm.topology, pull=True),
            ring_2d(comm.topology, order=Order.exchange), direct(comm.topology),
        ]  # fmt: skip
        for plan in forms:
            for dtype, count in ((DType.float32, 20_011), (DType.float8_e4m3fn, 8_003), (DType.float16, 7)):
                check_pair(comm, arena, plan, dtype, Op.sum, count)
        plan = ring_2d(comm.topology, both_directions=True)
        inputs = [make_input(r, 8 * 3000, DType.bfloat16, 5, awkward=False) for r in range(8)]
        parts = [in_parts(tensor, [3000 * r for r in range(8)]) for tensor in inputs]
        lanes = [emulate_plan(plan, parts, DType.bfloat16, Op.sum, lane)[comm.rank] for lane in (0, 1)]
        outputs = [torch.empty(3000, dtype=torch.bfloat16) for _ in range(3)]
        for output in outputs:
            comm.reduce_scatter_tensor(output, inputs[comm.rank], ring_mode=plan)
        assert bool(((outputs[0] == lanes[0]) | (outputs[0] == lanes[1])).all())
        for output in outputs[1:]:
            check_bits(output, outputs[0], "the same bits on every run")


def test_forms() -> None:
    """Pull, pairwise exchange, the direct exchange as a plan, both directions at once."""
    run_ranks(check_forms, 8, timeout_s=120, env=SMALL)


def check_late_ranks(world_size: int) -> None:
    with symmcomm.init(topology=pcie(DOMAINS[world_size])) as comm:
        for mode in (RingMode.Ring1D, RingMode.Ring2D):
            for late in range(world_size):
                x = torch.arange(world_size * 3000.0) + comm.rank
                total = torch.arange(world_size * 3000.0) * world_size + sum(range(world_size))
                with delayed(comm, 0.002 if comm.rank == late else 0.0):
                    output = torch.empty(3000)
                    comm.reduce_scatter_tensor(output, x, ring_mode=mode)
                    check_bits(output, total[3000 * comm.rank : 3000 * (comm.rank + 1)], f"rank {late} is late")
                    comm.all_reduce(x, ring_mode=mode, num_blocks=3)
                    check_bits(x, total, f"rank {late} is late")
                    comm.all_reduce(x)  # other collectives use the same staging memory
                    check_bits(x, total * world_size, f"rank {late} is late")


@pytest.mark.parametrize("world_size", [4, 9])
def test_late_ranks(world_size: int) -> None:
    run_ranks(check_late_ranks, world_size, world_size, timeout_s=100, env=SMALL)


def check_signals_wrap() -> None:
    with symmcomm.init() as comm:
        field = ctypes.c_int64.from_address(comm.ctx + 8 * c.STEP_EPOCH)
        for start in ((1 << 30) - 3, (1 << 31) - 3, (1 << 32) - 3):
            for word in range(comm.world_size):
                address = comm.heap.own_address + comm.layout.steps + 64 * word
                ctypes.c_uint32.from_address(address).value = start & 0xFFFFFFFF
            field.value = start
            comm.barrier()
            for step in range(6):
                x = torch.full((500,), float(comm.rank + step))
                comm.all_reduce(x, ring_mode=RingMode.Ring1D)
                assert x.tolist() == [float(3 + 3 * step)] * 500
            silent = comm.heap.own_address + comm.layout.steps + 64 * ((comm.rank + 1) % 3)
            behind = ctypes.c_uint32.from_address(silent).value
            assert (behind - start) & 0xFFFFFFFF >= 3, "the word of a rank that never sends here is up to date"


def test_signals_wrap_around() -> None:
    run_ranks(check_signals_wrap, 3)


# Selection.


def check_selection() -> None:
    with symmcomm.init(topology=pcie((2, 2))) as comm:
        mode, least = comm.ring_from
        assert mode is RingMode.Ring2D
        part = least // 4 // 4
        inputs = [make_input(r, 4 * part, DType.float32, 3, awkward=False) for r in range(4)]
        plan = plan_of(RingMode.Ring2D, comm.topology)
        result = emulate_plan(plan, [in_parts(t, [part * r for r in range(4)]) for t in inputs], DType.float32, Op.sum)
        output, straight = torch.empty(part), torch.empty(part)
        comm.reduce_scatter_tensor(output, inputs[comm.rank])
        check_bits(output, result[comm.rank], "the ring is what reduce_scatter_tensor uses")
        comm.reduce_scatter_tensor(straight, inputs[comm.rank], ring_mode=RingMode.All2All)
        assert not torch.equal(straight, output), "the sums have another order"
        child = comm.split(comm.rank // 2)
        assert child is not None
        assert child.topology.levels == (((0, 1),),)
        assert child.ring_from[0] is RingMode.All2All
        child.close()


def test_selection_on_several_numa_nodes() -> None:
    run_ranks(check_selection, 4)


def check_flat() -> None:
    with symmcomm.init() as comm:
        assert comm.ring_from[0] is RingMode.All2All


def test_one_numa_node_needs_no_ring() -> None:
    run_ranks(check_flat, 2)


def check_file(path: str) -> None:
    with symmcomm.init() as comm:
        assert comm.topology.levels == (((0, 1), (2, 3)),)
        assert comm.topology.links == pcie((2, 2)).links


def test_a_topology_from_a_file(tmp_path: Path) -> None:
    import json

    path = tmp_path / "machine.json"
    path.write_text(json.dumps(pcie((2, 2)).to_json()))
    run_ranks(check_file, 4, str(path), env={"SYMMCOMM_TOPOLOGY": str(path)})


# Bad input.


def check_bad_input() -> None:
    with symmcomm.init(topology=nvlink(3)) as comm:
        x, y = torch.ones(6), torch.ones(2)
        with pytest.raises(TopologyError, match="needs 1 levels of groups, the topology has 0"):
            comm.reduce_scatter_tensor(y, x, ring_mode=RingMode.Ring2D)
        with pytest.raises(ArgumentError, match="ring_mode='ring1d' is not a RingMode"):
            comm.all_reduce(x, ring_mode="ring1d")  # type: ignore[arg-type]
        for num_blocks in (-1, 1 << 13, True, 2.0):
            with pytest.raises(ArgumentError, match="num_blocks="):
                comm.all_reduce(x, ring_mode=RingMode.Ring1D, num_blocks=num_blocks)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="num_blocks=2 is for rings"):
            comm.all_reduce(x, num_blocks=2)
        plan = ring_1d(nvlink(3))
        with pytest.raises(PlanError, match="is no all-reduce"):
            comm.all_reduce(x, ring_mode=plan)
        with pytest.raises(PlanError, match="is for 4 ranks, the communicator has 3"):
            comm.reduce_scatter_tensor(y, x, ring_mode=ring_1d(nvlink(4)))
        wrong = replace(plan, steps=tuple(tuple(s for s in steps if s.target != KEEP) for steps in plan.steps))
        with pytest.raises(PlanError, match="never waited for"):
            comm.reduce_scatter_tensor(y, x, ring_mode=wrong)
        modes = [RingMode.Ring1D, RingMode.Ring1D, None]
        with pytest.raises(MismatchError, match=r"ring_mode is .*Ring1D.* on rank|ring_mode is none on rank"):
            comm.all_reduce(x, ring_mode=modes[comm.rank])
        with pytest.raises(MismatchError, match=r"num_blocks is 1 on rank .*, 2 on rank|num_blocks is 2"):
            comm.all_reduce(x, ring_mode=RingMode.Ring1D, num_blocks=1 + comm.rank // 2)
        with pytest.raises(MismatchError, match="count is"):
            comm.all_reduce(torch.ones(3 + comm.rank), ring_mode=RingMode.Ring1D)
        comm.all_reduce(x, ring_mode=RingMode.Ring1D)
        assert x.tolist() == [3.0] * 6


def test_bad_input() -> None:
    run_ranks(check_bad_input, 3)


def check_worlds_differ() -> None:
    with pytest.raises(TopologyError, match="the topology is for 5 ranks, there are 2"):
        symmcomm.init(topology=nvlink(5))


def check_topologies_differ() -> None:
    with pytest.raises(MismatchError, match="the topology's checksum is"):
        symmcomm.init(topology=nvlink(2) if os.environ["RANK"] == "0" else pcie((1, 1)))


def test_topologies_that_do_not_fit() -> None:
    run_ranks(check_worlds_differ, 2)
    run_ranks(check_topologies_differ, 2)


def check_a_late_peer_is_named() -> None:
    with communicator("staged") as comm:
        x = torch.ones(3000)
        comm.all_reduce(x, ring_mode=RingMode.Ring1D)
        if comm.rank == 1:
            with delayed(comm, 3.0), pytest.raises(symmcomm.PeerError):
                comm.all_reduce(x, ring_mode=RingMode.Ring1D)
            return
        with comm.deadline(0.5), pytest.raises(PeerTimeoutError) as caught:
            comm.all_reduce(x, ring_mode=RingMode.Ring1D)
        assert caught.value.rank == 1


def test_a_late_peer_is_named() -> None:
    run_ranks(check_a_late_peer_is_named, 3, env=SMALL)
