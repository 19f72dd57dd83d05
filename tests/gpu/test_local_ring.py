"""The ring kernel with all ranks in one process on one GPU: plans, types and sizes to the bit, late ranks, other
kernels in between, epochs that wrap around, and a rank that never comes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from local_cases import DELAY_NS, Place, assert_same, inputs, torch_dtype, world_of
from torch import Tensor

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.schedule.layout_gpu import Phase
from symmcomm.schedule.machines import pcie
from symmcomm.schedule.plan import Plan, all_reduce_of
from symmcomm.schedule.ring import Order, direct, ring_1d, ring_2d
from symmcomm.schedule.ring_gpu import RingShape, pack, ring_shape
from symmcomm.schedule.select_gpu import Algorithm, Launch
from symmcomm.testing.local_world import LocalWorld
from symmcomm.testing.plan_oracle import emulate_plan

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DOMAINS = {4: (2, 2), 6: (3, 3), 8: (4, 4)}
DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)


@cache
def plan_for(world_size: int, kind: str) -> Plan:
    topology = pcie(DOMAINS.get(world_size, (world_size,)))
    match kind:
        case "1d":
            return ring_1d(topology)
        case "2d":
            return ring_2d(topology)
        case "pull":
            return ring_2d(topology, pull=True)
        case "both":
            return ring_1d(topology, both_directions=True)
        case "exchange":
            return ring_2d(topology, order=Order.exchange)
        case _:
            return direct(topology)


@cache
def tables(plan: Plan) -> list[Tensor]:
    return [torch.tensor(pack(plan, rank), dtype=torch.int32, device="cuda") for rank in range(plan.world_size)]


def small(shape: RingShape) -> RingShape:
    """Many chunks of few bytes, on few CTAs."""
    return replace(shape, grid=min(shape.grid, 3), threads=64, vectors=1, chunk_bytes=min(shape.chunk_bytes, 512))


@dataclass
class Run:
    """One call on all ranks of a world; tensors are at odd places between poison, in place or not."""

    world: LocalWorld
    plan: Plan
    dtype: DType
    op: Op
    count: int
    shape: RingShape
    shift: int = 0
    in_place: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        size, item = self.world.world_size, self.dtype.itemsize
        if self.plan.gathers:
            self.part, total = -(-self.count // (size * 16)) * 16, self.count
        else:
            self.part, total = self.count, size * self.count
        self.parts = inputs(self.dtype, self.op, size, max(total, 1), self.seed)
        self.parts = [values[:total] for values in self.parts]
        self.given, self.total = Place(self.world, total * item, False, 0, self.shift * item), total
        self.given.fill(self.parts)
        self.apart = Place(self.world, self.part * item, False) if not (self.plan.gathers or self.in_place) else None

    def arguments(self, rank: int) -> tuple[int, ...]:
        item, given = self.dtype.itemsize, self.given.address(rank)
        inside = 0 if self.plan.gathers else rank * self.part * item
        result = self.apart.address(rank) if self.apart else given + inside
        return (
            tables(self.plan)[rank].data_ptr(), given, result,
            self.total * item, self.part * item, self.part * item if self.plan.gathers else 0, self.shape.grid,
        )  # fmt: skip

    def function(self) -> Any:
        from symmcomm.kernels.gpu.compile import compiled
        from symmcomm.kernels.gpu.ring import Ring

        kernel = Ring(
            dtype=self.dtype, op=self.op, world_size=self.world.world_size, arch=self.world.arch_number,
            shape=replace(self.shape, grid=1),
        )  # fmt: skip
        return compiled(kernel, self.world.arch)

    def go(self) -> None:
        size = self.world.world_size
        self.world.launch(self.function(), [self.arguments(rank) for rank in range(size)])
        assert [self.world.record(rank) for rank in range(size)] == [None] * size
        self.verify()

    def expected(self) -> Tensor:
        """All segments; a plan of two lanes sums them in two orders, which take turns."""
        size = self.world.world_size
        starts = [min(rank * self.part, self.total) for rank in range(size + 1)]
        cut = [[values[a:b] for a, b in pairwise(starts)] for values in self.parts]
        whole = WHOLE[self.dtype.itemsize]
        lanes = [
            torch.cat([part.view(whole) for part in emulate_plan(self.plan, cut, self.dtype, self.op, lane)])
            for lane in range(self.plan.num_lanes)
        ]
        in_part = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
        lane_of = in_part * self.dtype.itemsize // self.shape.chunk_bytes % self.plan.num_lanes
        return torch.where(lane_of == 0, lanes[0], lanes[-1]).view(torch_dtype(self.dtype))

    def verify(self) -> None:
        expected, kind, given = self.expected(), torch_dtype(self.dtype), self.given.read()
        apart = self.apart.read().view(kind) if self.apart else None
        what = f"{self.plan.name}, {self.dtype.name} {self.op.name} × {self.count}, {self.world.world_size} ranks"
        for rank, whole in enumerate(given.view(kind)):
            own = slice(None) if self.plan.gathers else slice(rank * self.part, (rank + 1) * self.part)
            result = whole[own] if apart is None else apart[rank]
            assert_same(result, expected[own], f"{what}, rank {rank}")


def check(world_size: int, kind: str, dtype: DType, op: Op, counts: tuple[int, ...], whole: bool = False) -> None:
    world, plan = world_of(world_size), plan_for(world_size, kind)
    plan = whole_of(plan) if whole else plan
    shape = small(ring_shape(plan, 1 << 20, dtype, op, world.num_sms))
    for idx, count in enumerate(counts):
        Run(world, plan, dtype, op, count, shape, shift=idx % 3, in_place=bool(idx % 2), seed=idx).go()


@cache
def whole_of(plan: Plan) -> Plan:
    return all_reduce_of(plan)


def op_for(dtype: DType, number: int) -> Op:
    """Sums for floats, an average of integers, and in turn all others."""
    ops = [op for op in Op if supports(dtype, op)]
    return ops[number % len(ops)]


@DTYPES
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_worlds(world_size: int, dtype: DType) -> None:
    op = Op.sum if world_size in (2, 4) else op_for(dtype, world_size)
    check(world_size, "1d", dtype, op, (1, 7, 64, 1000, 4099))


@DTYPES
def test_averages(dtype: DType) -> None:
    """Partial sums are wider than elements."""
    check(4, "2d", dtype, Op.avg if supports(dtype, Op.avg) else Op.sum, (3, 1000, 4096))


@pytest.mark.parametrize("kind", ["2d", "pull", "both", "exchange", "direct"])
@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_forms(world_size: int, kind: str, whole: bool) -> None:
    for dtype in (DType.float32, DType.bfloat16):
        check(world_size, kind, dtype, Op.sum, (5, 4099, 20_000), whole)


@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("dtype", [DType.float32, DType.float8_e5m2, DType.bool], ids=lambda d: d.name)
def test_all_reduce(world_size: int, dtype: DType) -> None:
    check(world_size, "1d", dtype, Op.sum, (1, 17, 1000, 30_001), whole=True)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_shape_that_is_chosen(world_size: int) -> None:
    world, plan = world_of(world_size), plan_for(world_size, "1d")
    for dtype in (DType.bfloat16, DType.float32):
        for count in (1 << 10, (1 << 20) // world_size + 8, (3 << 20) // world_size):
            shape = ring_shape(plan, count * dtype.itemsize, dtype, Op.sum, world.num_sms)
            Run(world, plan, dtype, Op.sum, count, shape).go()


@pytest.mark.parametrize(("world_size", "kind"), [(3, "1d"), (4, "2d"), (8, "pull")])
def test_late_ranks(world_size: int, kind: str) -> None:
    world, plan = world_of(world_size), plan_for(world_size, kind)
    shape = small(ring_shape(plan, 1 << 20, DType.bfloat16, Op.sum, world.num_sms))
    for late in range(world_size):
        world.put(late, at.DELAY_NS, DELAY_NS)
        for form in (plan, whole_of(plan)):
            fit = small(ring_shape(form, 1 << 20, DType.bfloat16, Op.sum, world.num_sms))
            Run(world, form, DType.bfloat16, Op.sum, 9001, fit if form is not plan else shape, seed=late).go()
        world.put(late, at.DELAY_NS, 0)


def staged_call(world: LocalWorld, count: int, seed: int) -> tuple[Any, list[tuple[int, ...]], Any]:
    """A direct reduce-scatter through the same staging memory."""
    from symmcomm.kernels.gpu import instances
    from symmcomm.kernels.gpu.compile import compiled

    shape = Launch(algorithm=Algorithm.staged, grid=3, threads=64, unroll=2, chunk_bytes=512)
    size = world.world_size
    function = compiled(instances.reduce_scatter(shape, DType.int32, Op.sum, size, world.arch_number), world.arch)
    parts = inputs(DType.int32, Op.sum, size, size * count, seed)
    given = [part.cuda() for part in parts]
    results = [torch.zeros(count, dtype=torch.int32, device="cuda") for _ in range(size)]

    def verify() -> None:
        total = sum(part.to(torch.int64) for part in parts).to(torch.int32)  # type: ignore[union-attr]
        for rank, result in enumerate(results):
            assert_same(result.cpu(), total[rank * count : (rank + 1) * count], f"staged, {count}")

    arguments = [(g.data_ptr(), r.data_ptr(), count, 3) for g, r in zip(given, results, strict=True)]
    return function, arguments, (verify, given)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_back_to_back_with_others(world_size: int) -> None:
    """Rings and direct kernels in one stream, with no host in between: none writes what another may still read."""
    world, chosen = world_of(world_size), random.Random(world_size)
    kinds = ["1d", "both", *(["2d", "pull"] if world_size in DOMAINS else [])]
    for attempt in range(4):
        calls: list[tuple[Any, list[tuple[int, ...]], Any]] = []
        for number in range(10):
            if chosen.random() < 0.4:
                function, arguments, (verify, keep) = staged_call(world, chosen.choice([1, 130, 1000, 3000]), number)
                calls.append((function, arguments, (verify, keep)))
                continue
            plan = plan_for(world_size, chosen.choice(kinds))
            plan = whole_of(plan) if chosen.random() < 0.3 else plan
            shape = small(ring_shape(plan, 1 << 20, DType.int32, Op.sum, world.num_sms))
            run = Run(world, plan, DType.int32, Op.sum, chosen.choice([3, 100, 700, 2000, 5001]), shape, seed=number)
            calls.append((run.function(), [run.arguments(rank) for rank in range(world_size)], (run.verify, run)))
        torch.cuda.synchronize()
        late = attempt % world_size
        world.put(late, at.DELAY_NS, DELAY_NS // 10)
        torch.cuda.synchronize()
        for function, arguments, _ in calls:
            for rank in range(world_size):
                stream = world.streams[rank].cuda_stream
                function(world.base, world.stride, rank, *arguments[rank], stream)
        torch.cuda.synchronize()
        world.put(late, at.DELAY_NS, 0)
        assert [world.record(rank) for rank in range(world_size)] == [None] * world_size
        for _, _, (verify, _keep) in calls:
            verify()


def test_epochs_wrap_around() -> None:
    world, plan = world_of(3), plan_for(3, "1d")
    shape = small(ring_shape(plan, 1 << 20, DType.float32, Op.sum, world.num_sms))
    for start in ((1 << 31) - 5, (1 << 32) - 5):
        world.set_epochs(start)
        torch.cuda.synchronize()
        for seed in range(4):
            Run(world, plan, DType.float32, Op.sum, 2000, shape, seed=seed).go()
            words = [world.bytes(r, world.layout.pads, 4 * 3).view(torch.int32).tolist() for r in range(3)]
            epochs = [world.epoch(rank, 0) for rank in range(3)]
            assert len(set(epochs)) == 1
            for rank, pad in enumerate(words):
                assert all(word & 0xFFFFFFFF == epochs[0] for peer, word in enumerate(pad) if peer != rank)


def test_a_rank_that_never_comes() -> None:
    world = LocalWorld(3, 4 << 20, timeout_s=1.0)
    plan = plan_for(3, "1d")
    shape = small(ring_shape(plan, 1 << 20, DType.float32, Op.sum, world.num_sms))
    run = Run(world, plan, DType.float32, Op.sum, 4000, shape)
    world.launch(run.function(), [run.arguments(rank) for rank in range(3)], ranks=[0, 1])
    record = world.record(0)  # its predecessor is rank 2
    assert record is not None
    assert (record.peer, record.phase) == (2, Phase.enter)
    other = world.record(1)
    assert other is not None
    assert other.peer == 0
    assert float(torch.ones(2, device="cuda").sum()) == 2.0
