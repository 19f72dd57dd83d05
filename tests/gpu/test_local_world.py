"""All ranks in one process on one GPU. Results are compared bit by bit with the same sum in rank order on the CPU, and
that one, within the rounding of the type, with float64."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from local_cases import (
    COUNTS,
    DELAY_NS,
    PATIENCE_S,
    WORLDS,
    Place,
    assert_close_to_float64,
    assert_same,
    bits,
    granule_of,
    inputs,
    one_deadline,
    reduced,
    torch_dtype,
    unlikely,
    world_of,
)
from torch import Tensor

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.schedule.layout_gpu import Phase
from symmcomm.schedule.select_gpu import Algorithm, Launch
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Buffers(Place):
    """What is reduced in place, ``shift`` elements off a boundary."""

    def __init__(
        self, world: LocalWorld, dtype: DType, count: int, symmetric: bool, shift: int = 0, start: int = 0
    ) -> None:
        super().__init__(world, count * dtype.itemsize, symmetric, start, shift * dtype.itemsize)
        self.kind, self.count = torch_dtype(dtype), count

    def results(self) -> list[Tensor]:
        """All ranks', on the CPU."""
        return [row.view(self.kind) for row in self.read()]


Arguments = list[tuple[int, ...]]
CHUNKED = (Algorithm.one_shot, Algorithm.push, Algorithm.staged)
ALL_REDUCE = (Algorithm.ll, Algorithm.lamport, Algorithm.ll_two_shot, Algorithm.two_shot, *CHUNKED)
NEED_SYMMETRIC = (Algorithm.two_shot, Algorithm.push, Algorithm.pull)


def kernel(world: LocalWorld, shape: Launch, dtype: DType, op: Op, given: Arguments):  # type: ignore[no-untyped-def]
    """The compiled all-reduce of that shape, for such arguments of all ranks."""
    from symmcomm.kernels.gpu import instances
    from symmcomm.kernels.gpu.compile import compiled

    granule = granule_of(given[0][-2] * dtype.itemsize, *(address for each in given for address in each[:2]))
    made = instances.all_reduce(shape, dtype, op, world.world_size, world.arch_number, granule=granule)
    return compiled(made, world.arch)


def shape_of(world: LocalWorld, algorithm: Algorithm, dtype: DType, count: int) -> Launch:
    """Two-shot where LL has no room: a rank of eight on one device has few SMs."""
    num_bytes, size, num_sms = count * dtype.itemsize, world.world_size, world.num_sms
    part = select_gpu.slice_bytes(num_bytes, size)
    shape: Launch | None = None
    match algorithm:
        case Algorithm.ll:
            shape = select_gpu.ll_shape(num_bytes, size, num_sms, itemsize=dtype.itemsize)
        case Algorithm.lamport:
            shape = select_gpu.lamport_shape(num_bytes, size, num_sms)
        case Algorithm.ll_two_shot:
            shape = select_gpu.ll_shape(part, size, num_sms, algorithm, dtype.itemsize)
        case Algorithm.push | Algorithm.staged | Algorithm.one_shot:
            sent = num_bytes if algorithm is Algorithm.one_shot else part
            shape = select_gpu.staged_shape(sent, size, num_sms, dtype, algorithm)
    return shape or select_gpu.two_shot_shape(num_bytes, dtype, size, num_sms)


def arguments(buffers: Buffers, shape: Launch) -> Arguments:
    """In place, for all ranks."""
    if shape.algorithm is Algorithm.two_shot:
        return [(0, buffers.offset, buffers.count, shape.grid)] * buffers.world.world_size
    addresses = [buffers.address(rank) for rank in range(buffers.world.world_size)]
    if shape.algorithm is Algorithm.pull:
        return [(0, buffers.offset, address, buffers.count, shape.grid) for address in addresses]
    return [(address, address, buffers.count, shape.grid) for address in addresses]


def check(
    algorithm: Algorithm, dtype: DType, op: Op, world_size: int, count: int, shift: int = 0, shape: Launch | None = None
) -> None:
    """One all-reduce in place, compared on all ranks."""
    world = world_of(world_size)
    shape = shape or shape_of(world, algorithm, dtype, count)
    buffers = Buffers(world, dtype, count, shape.algorithm in NEED_SYMMETRIC, shift)
    parts = inputs(dtype, op, world_size, count, seed=shift)
    buffers.fill(parts)
    world.launch(kernel(world, shape, dtype, op, arguments(buffers, shape)), arguments(buffers, shape))
    expected = reduced(parts, dtype, op)
    assert [world.record(rank) for rank in range(world_size)] == [None] * world_size
    for rank, result in enumerate(buffers.results()):
        what = f"{algorithm.value} {dtype.name} {op.name} W={world_size} n={count} shift={shift} rank {rank}"
        assert_same(result, expected, what)
    assert_close_to_float64(expected, parts, dtype, op)


ALGORITHMS = pytest.mark.parametrize("algorithm", ALL_REDUCE, ids=lambda a: a.name)
EITHER = (Algorithm.ll, Algorithm.two_shot)
ALL_PAIRS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]
SOME_WORLDS = [(DType.bfloat16, size) for size in WORLDS] + [
    (DType.float32, 3),
    (DType.float8_e4m3fn, 5),
    (DType.int64, 8),
]


def algorithm_of(dtype: DType, op: Op) -> Algorithm:
    """Compiling takes most of the time, and all kernels reduce by the same code (``Reduction``): so one of them."""
    return Algorithm.two_shot if op in (Op.sum, Op.avg) else EITHER[(dtype + op) % 2]


@pytest.mark.parametrize(("dtype", "op"), ALL_PAIRS, ids=lambda x: x.name)
def test_every_type_and_operation(dtype: DType, op: Op) -> None:
    algorithm = algorithm_of(dtype, op)
    for count in (1, 7, 1000, 4099):
        check(algorithm, dtype, op, 2, count)
    check(algorithm, dtype, op, 2, 1000, shift=1)


@ALGORITHMS
@pytest.mark.parametrize(("dtype", "world_size"), SOME_WORLDS)
def test_worlds(algorithm: Algorithm, world_size: int, dtype: DType) -> None:
    for count in COUNTS:
        check(algorithm, dtype, Op.sum, world_size, count)
        check(algorithm, dtype, Op.sum, world_size, count, shift=3)


@pytest.mark.parametrize("algorithm", [*CHUNKED, Algorithm.lamport], ids=lambda a: a.name)
@pytest.mark.parametrize("world_size", WORLDS)
def test_many_chunks(algorithm: Algorithm, world_size: int) -> None:
    """More than there are slots for, also with a late rank."""
    world = world_of(world_size)
    for count, late in ((1, None), (255, 0), (1024, 1), (4099, 0), (20000, None), (66666, 1), (600_000, 0)):
        grid = 4 if algorithm is not Algorithm.lamport else min(4, -(-count * 2 // (64 * 2 * 16)))  # each has a turn
        shape = Launch(
            algorithm=algorithm, grid=grid, threads=64, unroll=2, chunk_bytes=512, slots=1 + (count > 20000)
        )  # fmt: skip
        for shift in (0, 3):
            if late is not None:
                world.put(late, at.DELAY_NS, DELAY_NS)
            check(algorithm, DType.bfloat16, Op.sum, world_size, count, shift=shift, shape=shape)
            if late is not None:
                world.put(late, at.DELAY_NS, 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_launched_early(world_size: int) -> None:
    """A kernel that takes its place before the last one has ended; all on the device at once, as the grid is small."""
    from symmcomm.kernels.gpu import instances
    from symmcomm.kernels.gpu.compile import compiled

    world, count = world_of(world_size), 3000
    if world.arch_number < 90:
        pytest.skip("programmatic dependent launch begins with sm_90")
    shape = Launch(algorithm=Algorithm.ll, grid=8, threads=128, unroll=1)
    kernel = instances.all_reduce(shape, DType.float32, Op.sum, world_size, world.arch_number, early=True)
    function = compiled(kernel, world.arch)
    parts = inputs(DType.float32, Op.sum, world_size, count)
    buffers, calls = Buffers(world, DType.float32, count, False), 40
    buffers.fill(parts)
    torch.cuda.synchronize()
    for _ in range(calls):
        for rank, of_rank in enumerate(arguments(buffers, shape)):
            function(world.base, world.stride, rank, *of_rank, world.streams[rank].cuda_stream)
    torch.cuda.synchronize()
    for _ in range(calls):
        parts = [reduced(parts, DType.float32, Op.sum)] * world_size
    for rank, result in enumerate(buffers.results()):
        assert_same(result, parts[0], f"early, rank {rank}")


def test_pads_keep_up_with_cells() -> None:
    """After 2³¹ epochs of LL alone a barrier must not take the words of its pad for new ones."""
    world = LocalWorld(2, 1 << 20, PATIENCE_S)
    world.set_epochs((1 << 20) - 1)
    shape, buffers = shape_of(world, Algorithm.ll, DType.float32, 8), Buffers(world, DType.float32, 8, False)
    function = kernel(world, shape, DType.float32, Op.sum, arguments(buffers, shape))
    for _ in range(2):
        world.launch(function, arguments(buffers, shape))
    for rank in range(2):
        pad = world.bytes(rank, world.layout.pads + 4 * (1 - rank), 4).view(torch.int32)
        assert int(pad) == 1 << 20


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_shape_that_is_chosen(world_size: int) -> None:
    for exponent in range(8, 24):
        count = (1 << exponent) // 2 + 5
        world = world_of(world_size)
        shape = select_gpu.choose(2 * count, DType.bfloat16, world_size, world.num_sms)
        check(shape.algorithm, DType.bfloat16, Op.sum, world_size, count)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_one_shot_in_place_by_peers(world_size: int) -> None:
    """The all-reduce of the switch in one shot, with peers looped over: one wave, with a late rank and without."""
    world, pairs = world_of(world_size), [(DType.bfloat16, Op.sum), (DType.int32, Op.max), (DType.float64, Op.avg)]
    sizes = ((64, 1, 1), (64, 1, 200), (64, 3, 500), (128, 2, 1000), (256, 1, 1024))
    for late in (None, 0, world_size - 1):
        if late is not None:
            world.put(late, at.DELAY_NS, DELAY_NS)
        try:
            for dtype, op in pairs if late is None else pairs[:1]:
                for threads, unroll, vectors in sizes:
                    grid = -(-vectors // (threads * unroll))
                    shape = Launch(algorithm=Algorithm.pull, grid=grid, threads=threads, unroll=unroll)
                    check(Algorithm.pull, dtype, op, world_size, vectors * 16 // dtype.itemsize, shape=shape)
        finally:
            if late is not None:
                world.put(late, at.DELAY_NS, 0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_one_shot_in_place_back_to_back(world_size: int) -> None:
    """A rank may be a call ahead: what it stores, its peers have read before."""
    world, count, num_calls = world_of(world_size), 8 * 1000, 20
    shape = Launch(algorithm=Algorithm.pull, grid=16, threads=128, unroll=1)
    buffers = Buffers(world, DType.int32, count, True)
    parts = inputs(DType.int32, Op.sum, world_size, count)
    buffers.fill(parts)
    given = arguments(buffers, shape)
    function = kernel(world, shape, DType.int32, Op.sum, given)
    world.put(world_size - 1, at.DELAY_NS, DELAY_NS // 20)
    try:
        torch.cuda.synchronize()
        for _ in range(num_calls):
            for rank, each in enumerate(given):
                function(world.base, world.stride, rank, *each, world.streams[rank].cuda_stream)
        torch.cuda.synchronize()
    finally:
        world.put(world_size - 1, at.DELAY_NS, 0)
    assert [world.record(rank) for rank in range(world_size)] == [None] * world_size
    expected = parts
    for _ in range(num_calls):
        expected = [reduced(expected, DType.int32, Op.sum)] * world_size
    for rank, result in enumerate(buffers.results()):
        assert_same(result, expected[rank], f"after {num_calls} calls, W={world_size} rank {rank}")


@pytest.mark.parametrize("algorithm", [Algorithm.ll, Algorithm.lamport, Algorithm.ll_two_shot], ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_every_type(algorithm: Algorithm, dtype: DType) -> None:
    for count in (1, 7, 1000, 4099):
        check(algorithm, dtype, Op.sum, 2, count)
    check(algorithm, dtype, Op.sum, 2, 1000, shift=1)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_floating_point], ids=lambda d: d.name)
@pytest.mark.parametrize("op", [Op.sum, Op.max, Op.min], ids=lambda o: o.name)
def test_special_values(dtype: DType, op: Op) -> None:
    algorithm = algorithm_of(dtype, op)
    kind = torch_dtype(dtype)
    info = torch.finfo(kind)
    special = torch.tensor(
        [0.0, -0.0, float("nan"), float("inf"), -float("inf"), info.max, info.min, info.tiny, info.tiny / 2, 1.0],
        dtype=torch.float64,
    ).to(kind)
    size = len(special)
    parts = [special.repeat(size), special.repeat_interleave(size)]
    world = world_of(2)
    buffers = Buffers(world, dtype, size * size, algorithm in NEED_SYMMETRIC)
    buffers.fill(parts)
    shape = shape_of(world, algorithm, dtype, size * size)
    world.launch(kernel(world, shape, dtype, op, arguments(buffers, shape)), arguments(buffers, shape))
    zero = lambda t: torch.where(t.to(torch.float64) == 0, torch.zeros_like(t), t)  # max(0, -0) may be either
    expected = reduced(parts, dtype, op)
    first, second = buffers.results()
    assert torch.equal(bits(first), bits(second))
    assert_same(zero(first), zero(expected), f"{algorithm.name} {dtype.name} {op.name}")


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_floating_point and d.itemsize <= 4], ids=lambda d: d.name)
def test_words_of_ones(dtype: DType) -> None:
    """NaN, in every place of a vector."""
    world, size, count = world_of(2), dtype.itemsize, 64 // dtype.itemsize
    buffers, shape = Buffers(world, dtype, count, False), select_gpu.lamport_shape(64, 2, world.num_sms)
    assert shape is not None
    given = arguments(buffers, shape)
    for place in range(16):
        parts = inputs(dtype, Op.sum, 2, count, seed=place)
        parts[place % 2].view(torch.uint8)[4 * place : 4 * place + 4] = 0xFF
        buffers.fill(parts)
        world.launch(kernel(world, shape, dtype, Op.sum, given), given)
        for rank, result in enumerate(buffers.results()):
            assert world.record(rank) is None
            assert_same(result, reduced(parts, dtype, Op.sum), f"word {place} of {size} bytes each")


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.int32, DType.uint8, DType.float64], ids=lambda d: d.name)
@pytest.mark.parametrize("world_size", [2, 5])
def test_vectors_that_would_be_taken_for_nothing(world_size: int, dtype: DType) -> None:
    """All of them, in all turns and slots."""
    world, count = world_of(world_size), 70_000 // dtype.itemsize
    buffers = Buffers(world, dtype, count, False)
    for grid, slots in ((128, 0), (4, 1), (1, 2)):
        shape = Launch(algorithm=Algorithm.lamport, grid=grid, threads=64, unroll=1 if slots == 0 else 2, slots=slots)
        parts = [unlikely(count * dtype.itemsize, seed).view(torch_dtype(dtype)) for seed in range(world_size)]
        buffers.fill(parts)
        given = arguments(buffers, shape)
        world.launch(kernel(world, shape, dtype, Op.max, given), given)
        for rank, result in enumerate(buffers.results()):
            assert world.record(rank) is None
            assert_same(result, reduced(parts, dtype, Op.max), f"{shape} rank {rank}")


@ALGORITHMS
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_wait_for_the_late_one(algorithm: Algorithm, world_size: int) -> None:
    world = world_of(world_size)
    for late in range(world_size):
        world.put(late, at.DELAY_NS, DELAY_NS)
        try:
            check(algorithm, DType.bfloat16, Op.sum, world_size, 1000)
        finally:
            world.put(late, at.DELAY_NS, 0)


@ALGORITHMS
def test_epochs_wrap_around(algorithm: Algorithm) -> None:
    world = LocalWorld(3, 1 << 20, PATIENCE_S)
    world.set_epochs((1 << 32) - 6)
    parts = inputs(DType.float32, Op.sum, 3, 1000)
    buffers = Buffers(world, DType.float32, 1000, algorithm in NEED_SYMMETRIC)
    shape = shape_of(world, algorithm, DType.float32, 1000)
    function = kernel(world, shape, DType.float32, Op.sum, arguments(buffers, shape))
    for _ in range(12):
        buffers.fill(parts)
        world.launch(function, arguments(buffers, shape))
        for result in buffers.results():
            assert_same(result, reduced(parts, DType.float32, Op.sum), "wrap-around")
    assert 0 < world.epoch(0, 0) < 100


@ALGORITHMS
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_missing_peer_is_named(algorithm: Algorithm, world_size: int) -> None:
    deadline_s = 1.0
    world = LocalWorld(world_size, 1 << 20, deadline_s)
    missing = world_size - 1
    buffers = Buffers(world, DType.float32, 1000, algorithm in NEED_SYMMETRIC)
    shape = shape_of(world, algorithm, DType.float32, 1000)
    function = kernel(world, shape, DType.float32, Op.sum, arguments(buffers, shape))
    start = time.monotonic()
    world.launch(function, arguments(buffers, shape), ranks=range(missing))
    assert 0.75 * deadline_s < time.monotonic() - start < 5 * deadline_s
    for rank in range(missing):
        record = world.record(rank)
        assert record is not None
        assert (record.rank, record.peer) == (rank, missing)
        assert record.phase == (Phase.enter if algorithm in (Algorithm.two_shot, *CHUNKED) else Phase.data)
        assert record.channel < shape.grid
        assert record.seen == 0
    assert float(torch.ones(1000, device="cuda").sum()) == 1000  # the context lives
    start = time.monotonic()
    world.launch(function, arguments(buffers, shape), ranks=range(missing))
    assert time.monotonic() - start < 0.5 * deadline_s  # and nobody waits a second time


def test_a_missing_peer_is_awaited_once_whatever_the_slots() -> None:
    deadline_s = 1.0
    world = LocalWorld(2, 1 << 20, deadline_s)
    shape = Launch(algorithm=Algorithm.lamport, grid=1, threads=512, unroll=2, slots=2)
    buffers = Buffers(world, DType.bfloat16, 12 * world.layout.lamport_slot_bytes // 2, False)
    function = kernel(world, shape, DType.bfloat16, Op.sum, arguments(buffers, shape))
    start = time.monotonic()
    world.launch(function, arguments(buffers, shape), ranks=[0])
    assert 0.75 * deadline_s < time.monotonic() - start < 5 * deadline_s
    record = world.record(0)
    assert record is not None
    assert (record.rank, record.peer, record.phase) == (0, 1, Phase.data)


BARRIERS = [
    ("all_to_all", "epoch", Phase.enter), ("ring", "epoch", Phase.ring), ("all_to_all", "cas", Phase.take),
    ("ring", "cas", Phase.take), ("all_to_all", "multicast", Phase.enter),
]  # fmt: skip


def barrier(world: LocalWorld, algorithm: str, protocol: str):  # type: ignore[no-untyped-def]
    from symmcomm.kernels.gpu.barrier import Barrier
    from symmcomm.kernels.gpu.compile import compiled

    kernel = Barrier(world_size=world.world_size, arch=world.arch_number, algorithm=algorithm, protocol=protocol)
    return compiled(kernel, world.arch)


@pytest.mark.parametrize(("algorithm", "protocol", "phase"), BARRIERS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_barriers(world_size: int, algorithm: str, protocol: str, phase: Phase) -> None:
    world, in_order = LocalWorld(world_size, 1 << 20, PATIENCE_S), [None] * world_size
    function = barrier(world, algorithm, protocol)
    channel = [(0, 3)] * world_size
    for _ in range(50):
        for rank in range(world_size):
            function(world.base, world.stride, rank, 0, 3, world.streams[rank].cuda_stream)
    torch.cuda.synchronize()
    assert [world.record(rank) for rank in range(world_size)] == in_order
    for late in range(world_size):
        world.put(late, at.DELAY_NS, DELAY_NS)
        torch.cuda.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in world.streams]
        for rank, (before, after) in enumerate(events):
            before.record(world.streams[rank])
            function(world.base, world.stride, rank, *channel[rank], world.streams[rank].cuda_stream)
            after.record(world.streams[rank])
        torch.cuda.synchronize()
        world.put(late, at.DELAY_NS, 0)
        assert [world.record(rank) for rank in range(world_size)] == in_order  # who gave up once waits no more
        # From when the late one was launched: the host may have launched others after it.
        waited = [events[late][0].elapsed_time(after) for _, after in events]
        assert min(waited) > 0.8 * DELAY_NS / 1e6, waited


@pytest.mark.parametrize(("algorithm", "protocol", "phase"), BARRIERS)
def test_a_barrier_names_who_is_missing(algorithm: str, protocol: str, phase: Phase) -> None:
    """And nobody waits for longer than one deadline, in however many rounds."""
    deadline_s = 1.0
    world = LocalWorld(3, 1 << 20, deadline_s)
    function = world.load(barrier(world, algorithm, protocol), 0, 3)
    with one_deadline(deadline_s):
        world.launch(function, [(0, 3)] * 3, ranks=[0, 1])
    first = world.record(0)
    assert first is not None
    assert first.phase == phase
    if protocol != "multicast":  # a count does not tell whose share is missing
        assert first.peer == 2


@pytest.mark.parametrize(("algorithm", "protocol", "phase"), BARRIERS)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_barriers_inside_a_kernel(
    world_size: int, algorithm: str, protocol: str, phase: Phase, tmp_path: Path
) -> None:
    """Other threads of other ranks see what was written before; or all threads are told that somebody is missing."""
    from barrier_cases import PassOn, nothing_found, what_is_found

    from symmcomm.kernels.gpu.compile import compiled

    world, deadline_s = LocalWorld(world_size, 1 << 20, PATIENCE_S), 1.0
    kernel = PassOn(world_size=world_size, algorithm=algorithm, protocol=protocol)
    function = world.load(compiled(kernel, world.arch, tmp_path), world.data, 0)  # the cache knows no test's sources
    found = [nothing_found(world_size).cuda() for _ in range(world_size)]
    arguments = [(world.data, each.data_ptr()) for each in found]
    for late in (None, *range(world_size)):
        for each in found:
            each.fill_(-1)
        if late is not None:
            world.put(late, at.DELAY_NS, DELAY_NS)
        world.launch(function, arguments)
        if late is not None:
            world.put(late, at.DELAY_NS, 0)
        for rank in range(world_size):
            assert world.record(rank) is None
            assert torch.equal(found[rank].cpu(), what_is_found(world_size, rank)), f"rank {rank}, {late} was late"
    for rank, each in enumerate(found):
        each.fill_(-1)
        world.put(rank, at.TIMEOUT_NS, int(deadline_s * 1e9))
    with one_deadline(deadline_s):
        world.launch(function, arguments, ranks=range(world_size - 1))
    expected = nothing_found(world_size)
    expected[0, 0] = 0
    for rank in range(world_size - 1):
        record = world.record(rank)
        assert record is not None
        assert record.rank == rank
        assert torch.equal(found[rank].cpu(), expected)


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_graph_can_be_replayed(world_size: int) -> None:
    world = LocalWorld(world_size, 1 << 20, PATIENCE_S)
    parts = inputs(DType.float32, Op.sum, world_size, 1000)
    graphs = []
    plans = []
    for i, algorithm in enumerate(ALL_REDUCE):
        buffers = Buffers(world, DType.float32, 1000, algorithm in NEED_SYMMETRIC, start=i << 16)
        shape = shape_of(world, algorithm, DType.float32, 1000)
        function = kernel(world, shape, DType.float32, Op.sum, arguments(buffers, shape))
        world.launch(function, arguments(buffers, shape))  # loads the module, which capture does not allow
        plans.append((buffers, function, arguments(buffers, shape)))
    for rank in range(world_size):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=world.streams[rank]):
            for _, function, of_ranks in plans:
                function(world.base, world.stride, rank, *of_ranks[rank], world.streams[rank].cuda_stream)
        graphs.append(graph)
    for _ in range(5):
        for buffers, _, _ in plans:
            buffers.fill(parts)
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(world.streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        for buffers, _, _ in plans:
            for result in buffers.results():
                assert_same(result, reduced(parts, DType.float32, Op.sum), "replay")
