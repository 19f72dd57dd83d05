"""Reduce-scatter, all-gather, broadcast, scatter and all-to-all with all ranks in one process on one GPU; and all kinds
of calls, those of all-reduce too, in one stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from local_cases import (
    COUNTS,
    DATA_BYTES,
    DELAY_NS,
    MARGIN,
    PATIENCE_S,
    PERIOD,
    POISON,
    WORLDS,
    Place,
    assert_same,
    granule_of,
    inputs,
    one_deadline,
    reduced,
    repeated,
    torch_dtype,
    unlikely,
    world_of,
)
from torch import Tensor

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Phase
from symmcomm.schedule.select_gpu import Algorithm, Launch
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SMALL_CHUNKS = Launch(algorithm=Algorithm.staged, grid=3, threads=64, unroll=2, chunk_bytes=512)
DEADLINE_S = 1.0
BYTES = (1, 2, 8, 15, 16, 24, 1000, 4096, 33333)


@dataclass
class Call:
    """A compiled kernel, each rank's arguments, and what is right afterwards."""

    function: Callable[..., None]
    arguments: list[tuple[int, ...]]
    verify: Callable[[], None]


def run(world: LocalWorld, call: Call) -> None:
    world.launch(call.function, call.arguments)
    assert [world.record(rank) for rank in range(world.world_size)] == [None] * world.world_size
    call.verify()


def compiled(world: LocalWorld, kernel: object) -> Callable[..., None]:
    from symmcomm.kernels.gpu import compile as module

    return module.compiled(kernel, world.arch)  # type: ignore[arg-type]


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (min(num_bytes, PERIOD),), generator=generator, dtype=torch.uint8)
    return repeated(values, num_bytes)


MOVES = ("all_gather", "broadcast", "all_to_all", "scatter")
MOVE_ALGORITHMS = (Algorithm.ll, Algorithm.lamport, Algorithm.push, Algorithm.pull, Algorithm.staged)
SLOTS = Launch(algorithm=Algorithm.lamport, grid=2, threads=64, unroll=1, slots=2)


def move_shape(world: LocalWorld, algorithm: Algorithm, part: int) -> Launch:
    """Staged where LL has no room."""
    if algorithm in (Algorithm.push, Algorithm.pull):
        return select_gpu.direct_shape(part, world.num_sms, algorithm)
    shape: Launch | None = None
    if algorithm is Algorithm.ll:
        shape = select_gpu.ll_shape(part, world.world_size, world.num_sms)
    if algorithm is Algorithm.lamport:
        shape = select_gpu.lamport_shape(part, world.world_size, world.num_sms)
    return shape or select_gpu.staged_shape(part, world.world_size, world.num_sms)


def move(
    world: LocalWorld, kind: str, shape: Launch, part: int, *, seed: int = 0, start: int = 0,
    shifts: tuple[int, int] = (0, 0), in_place: bool = False, data: Callable[[int, int], Tensor] = random_bytes,
) -> Call:  # fmt: skip
    """A call that moves parts of ``part`` bytes, of what ``data`` gives for a number of bytes and a seed."""
    from symmcomm.kernels.gpu import instances

    size, same = world.world_size, kind in ("all_gather", "broadcast")
    root = seed % size if kind in ("broadcast", "scatter") else -1
    push, pull = shape.algorithm is Algorithm.push, shape.algorithm is Algorithm.pull
    whole = part if kind in ("broadcast", "scatter") else part * size
    target = Place(world, whole, push or (pull and in_place), start, shifts[1])
    sends = part if same else part * size
    source = target if in_place else Place(world, sends, pull, start + whole + 4096, shifts[0])
    sent = [data(sends, 1000 * seed + rank) for rank in range(size)]
    skips = [rank * part if in_place and kind == "all_gather" else 0 for rank in range(size)]
    source.fill(sent, skips)
    arguments = []
    for rank in range(size):
        origin = (source.offset if pull else source.address(rank)) + skips[rank]
        place = target.offset if push else target.address(rank)
        pitches = (0 if same else part, 0 if root >= 0 else part)
        extra = (0,) if push else ()
        arguments.append((*extra, origin, pitches[0], place, pitches[1], part, root, shape.grid))

    def verify() -> None:
        found = target.read()
        for rank in range(size):
            if root >= 0:
                expected = sent[root] if same else sent[root][rank * part : (rank + 1) * part]
            elif same:
                expected = torch.cat(sent)
            else:
                expected = torch.cat([s[rank * part : (rank + 1) * part] for s in sent])
            what = f"{kind} {shape.algorithm.name} W={size} part={part} shifts={shifts} root={root} rank {rank}"
            assert_same(found[rank], expected, what)
        source.read()

    granule = granule_of(part, *(number for each in arguments for number in each[-7:-3]))
    return Call(compiled(world, instances.all_gather(shape, size, same, granule=granule)), arguments, verify)


@pytest.mark.parametrize("algorithm", MOVE_ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_moves(world_size: int, kind: str, algorithm: Algorithm) -> None:
    world = world_of(world_size)
    for seed, part in enumerate(BYTES):
        shape = move_shape(world, algorithm, part)
        run(world, move(world, kind, shape, part, seed=seed))
        run(world, move(world, kind, shape, part, seed=seed + 1, shifts=[(1, 0), (0, 4), (3, 3)][seed % 3]))
        if algorithm is Algorithm.staged:
            run(world, move(world, kind, SMALL_CHUNKS, part, seed=seed))


@pytest.mark.parametrize("algorithm", MOVE_ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_moves_in_place(world_size: int, kind: str, algorithm: Algorithm) -> None:
    if algorithm is Algorithm.pull or (kind == "all_to_all" and algorithm is Algorithm.push):
        pytest.skip("peers would read what is written")
    world = world_of(world_size)
    for seed, part in enumerate(BYTES):
        for shape in (move_shape(world, algorithm, part), SMALL_CHUNKS):
            run(world, move(world, kind, shape, part, seed=seed, in_place=True))


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_moves_in_turns(world_size: int, kind: str) -> None:
    """More than a slot holds, a late rank, and vectors that would be taken for nothing."""
    world = world_of(world_size)
    for seed, (part, shift, late) in enumerate(((70_000, 0, None), (300_000, 0, 1), (600_001, 3, 0), (600_004, 4, 1))):
        for shape in (SLOTS, replace(SLOTS, unroll=2)) if world_size <= 4 else (SLOTS,):
            if late is not None:
                world.put(late, at.DELAY_NS, DELAY_NS)
            data = unlikely if seed % 2 else random_bytes
            in_place = kind != "scatter" and seed == 1
            run(world, move(world, kind, shape, part, seed=seed, shifts=(shift, shift), in_place=in_place, data=data))
            if late is not None:
                world.put(late, at.DELAY_NS, 0)


@pytest.mark.parametrize("kind", [*MOVES, "sum"])
def test_ranks_may_have_kernels_for_other_alignments(kind: str) -> None:
    """What goes between them is the same."""
    from symmcomm.kernels.gpu import instances

    world, part = world_of(3), 300_000
    for shape in (replace(SLOTS, grid=30, slots=1), SLOTS):
        if kind == "sum":
            call = scatter_sum(world, shape, DType.bfloat16, Op.sum, part // 2)
            make: Callable[..., object] = partial(instances.reduce_scatter, shape, DType.bfloat16, Op.sum, 3, 90)
        else:
            call = move(world, kind, shape, part, seed=1)
            make = partial(instances.all_gather, shape, 3, kind in ("all_gather", "broadcast"))
        functions = [compiled(world, make(granule=granule)) for granule in (16, 4, 1)]
        for rank, arguments in enumerate(call.arguments):
            world.load(functions[rank], *arguments)
        torch.cuda.synchronize()
        for rank, arguments in enumerate(call.arguments):
            functions[rank](world.base, world.stride, rank, *arguments, world.streams[rank].cuda_stream)
        torch.cuda.synchronize()
        assert [world.record(rank) for rank in range(3)] == [None] * 3
        call.verify()


@pytest.mark.parametrize("kind", MOVES)
def test_epochs_wrap_around(kind: str) -> None:
    world = LocalWorld(3, 1 << 20, PATIENCE_S)
    world.set_epochs((1 << 32) - 6)
    for seed in range(6):
        for algorithm, part in ((Algorithm.ll, 1000), (Algorithm.lamport, 1000), (Algorithm.staged, 1000)):
            run(world, move(world, kind, move_shape(world, algorithm, part), part, seed=seed))
        run(world, move(world, kind, replace(SLOTS, grid=1), 200_000, seed=seed))
    assert 0 < world.epoch(0, 0) < 100


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_shape_that_is_chosen(world_size: int) -> None:
    world = world_of(world_size)
    most = DATA_BYTES // (2 * world_size) - 8192  # the source and the target may both lie in the heap
    for exponent in (8, 12, 15, 17, 18, 19, 20, 21, 22):
        part = (1 << exponent) - 16
        if part > most:
            break
        for symmetric in ((False, False), (True, False), (False, True)):
            shape = select_gpu.choose_all_gather(part, world_size, world.num_sms, *symmetric)
            run(world, move(world, "all_to_all", shape, part, seed=exponent))
        shape = select_gpu.choose_reduce_scatter(part, DType.bfloat16, world_size, world.num_sms)
        run(world, scatter_sum(world, shape, DType.bfloat16, Op.sum, part // 2))


def sum_shape(world: LocalWorld, algorithm: Algorithm, dtype: DType, count: int) -> Launch:
    part, size = count * dtype.itemsize, world.world_size
    if algorithm is Algorithm.pull:
        return select_gpu.direct_shape(part, world.num_sms, algorithm, dtype, size)
    shape: Launch | None = None
    if algorithm is Algorithm.ll:
        shape = select_gpu.ll_shape(part, size, world.num_sms, itemsize=dtype.itemsize)
    if algorithm is Algorithm.lamport:
        shape = select_gpu.lamport_shape(part, size, world.num_sms)
    return shape or select_gpu.staged_shape(part, size, world.num_sms, dtype)


def scatter_sum(
    world: LocalWorld, shape: Launch, dtype: DType, op: Op, count: int, *, seed: int = 0, start: int = 0,
    shift: int = 0, in_place: int | None = None,
) -> Call:  # fmt: skip
    """A reduce-scatter. ``in_place``: the output is the input's part that many ranks on from the own one."""
    from symmcomm.kernels.gpu import instances

    size, pull, part = world.world_size, shape.algorithm is Algorithm.pull, count * dtype.itemsize
    parts = inputs(dtype, op, size, count * size, seed)
    source = Place(world, part * size, pull, start, shift * dtype.itemsize)
    output = Place(world, part, False, 0, shift * dtype.itemsize)
    source.fill(parts)
    arguments, skips = [], [(rank + (in_place or 0)) % size * part for rank in range(size)]
    for rank, skip in enumerate(skips):
        origin = (0, source.offset) if pull else (source.address(rank),)
        result = output.address(rank) if in_place is None else source.address(rank) + skip
        arguments.append((*origin, result, count, shape.grid))

    def verify() -> None:
        expected, given, found = reduced(parts, dtype, op), source.read(), output.read()
        for rank, skip in enumerate(skips):
            got = found[rank] if in_place is None else given[rank, skip : skip + part]
            what = f"{shape.algorithm.name} {dtype.name} {op.name} W={size} n={count} shift={shift} rank {rank}"
            mine = expected[rank * count : (rank + 1) * count]
            assert_same(got.view(torch_dtype(dtype)), mine, what)

    granule = granule_of(part, *(address for each in arguments for address in each[:2]))
    kernel = instances.reduce_scatter(shape, dtype, op, size, world.arch_number, granule=granule)
    return Call(compiled(world, kernel), arguments, verify)


SUM_ALGORITHMS = pytest.mark.parametrize(
    "algorithm", [Algorithm.ll, Algorithm.lamport, Algorithm.pull, Algorithm.staged], ids=lambda a: a.name
)
PAIRS = [(dtype, Op.sum) for dtype in DType] + [(DType.bfloat16, Op.avg)]
SOME_WORLDS = [(DType.bfloat16, size) for size in WORLDS] + [(DType.float8_e4m3fn, 5), (DType.float64, 8)]


@SUM_ALGORITHMS
@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_reduce_scatter_of_every_type(algorithm: Algorithm, dtype: DType, op: Op) -> None:
    world = world_of(2)
    for count, shift in ((1, 0), (1000, 0), (1000, 1), (4099, 0)):
        run(world, scatter_sum(world, sum_shape(world, algorithm, dtype, count), dtype, op, count, shift=shift))


@SUM_ALGORITHMS
@pytest.mark.parametrize(("dtype", "world_size"), SOME_WORLDS)
def test_reduce_scatter_in_worlds(algorithm: Algorithm, world_size: int, dtype: DType) -> None:
    world = world_of(world_size)
    for seed, count in enumerate(COUNTS):
        shape = sum_shape(world, algorithm, dtype, count)
        run(world, scatter_sum(world, shape, dtype, Op.sum, count, seed=seed))
        run(world, scatter_sum(world, shape, dtype, Op.sum, count, seed=seed, in_place=0))
        if algorithm is not Algorithm.pull:
            run(world, scatter_sum(world, shape, dtype, Op.sum, count, seed=seed, in_place=1))
        if algorithm is Algorithm.staged:
            run(world, scatter_sum(world, SMALL_CHUNKS, dtype, Op.sum, count, seed=seed, in_place=1))
    if algorithm is Algorithm.lamport:
        many = Launch(algorithm=algorithm, grid=2, threads=32, unroll=2, slots=2)
        for in_place in (None, 0, 1):  # more turns than slots hold
            run(world, scatter_sum(world, many, dtype, Op.sum, 300_000, seed=9, in_place=in_place))


def uneven(
    world: LocalWorld, shape: Launch, splits: list[list[int]], *, seed: int = 0,
    wrong: dict[tuple[int, int], int] | None = None,
) -> Call:  # fmt: skip
    """``splits[r][p]``: bytes from r to p. ``wrong[r, p]``: what r awaits from p instead; nothing is verified then."""
    from symmcomm.kernels.gpu import instances

    size = world.world_size
    sent = [random_bytes(sum(row), 100 * seed + rank) for rank, row in enumerate(splits)]
    columns = [[splits[r][rank] for r in range(size)] for rank in range(size)]
    for (rank, peer), num_bytes in (wrong or {}).items():
        columns[rank][peer] = num_bytes
    arguments, targets, keep = [], [], []
    for rank in range(size):
        source, target = sent[rank].cuda(), torch.full((sum(columns[rank]) + MARGIN,), POISON, dtype=torch.uint8).cuda()
        there, here = splits[rank], columns[rank]
        rows = zip(there, [0, *accumulate(there)], here, [0, *accumulate(here)], strict=False)
        table = torch.tensor(list(rows), dtype=torch.int64).cuda()
        keep += [source, table]
        targets.append(target)
        arguments.append((source.data_ptr(), target.data_ptr(), table.data_ptr(), shape.grid))

    def verify() -> None:
        assert keep
        for rank in range(size):
            parts = []
            for peer in range(size):
                first = sum(splits[peer][:rank])
                parts.append(sent[peer][first : first + splits[peer][rank]])
            expected = torch.cat([*parts, torch.full((MARGIN,), POISON, dtype=torch.uint8)])
            assert_same(targets[rank].cpu(), expected, f"uneven {splits} rank {rank}")

    return Call(compiled(world, instances.all_to_all_uneven(shape, size)), arguments, verify)


def random_splits(world_size: int, most: int, rng: random.Random) -> list[list[int]]:
    return [[rng.choice((0, rng.randrange(most), 16 * rng.randrange(most // 16))) for _ in range(world_size)]
            for _ in range(world_size)]  # fmt: skip


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_all_to_all(world_size: int) -> None:
    world, rng = world_of(world_size), random.Random(world_size)
    for seed, most in enumerate((32, 1000, 20000, 300000)):
        for shape in (select_gpu.uneven_shape(world_size, world.num_sms), SMALL_CHUNKS):
            run(world, uneven(world, shape, random_splits(world_size, most, rng), seed=seed))
    run(world, uneven(world, SMALL_CHUNKS, [[0] * world_size] * world_size))


@pytest.mark.parametrize("world_size", [2, 4])
def test_splits_that_disagree(world_size: int) -> None:
    world = LocalWorld(world_size, 1 << 20, PATIENCE_S)
    splits = [[1000] * world_size for _ in range(world_size)]
    call = uneven(world, SMALL_CHUNKS, splits, wrong={(1, 0): 900})
    world.launch(call.function, call.arguments)
    for rank, peer, expected, seen in ((0, 1, 1000, 900), (1, 0, 900, 1000)):
        record = world.record(rank)
        assert record is not None
        assert (record.phase, record.rank, record.peer) == (Phase.splits, rank, peer)
        assert (record.expected, record.seen) == (expected, seen)
    assert [world.record(rank) for rank in range(2, world_size)] == [None] * (world_size - 2)
    world.records.zero_()
    for rank in range(2):
        world.bytes(rank, at.FAILED, 4).zero_()
    run(world, uneven(world, SMALL_CHUNKS, splits))


def test_what_came_first_is_recorded() -> None:
    """A complaint stays when a wait gives up later, which bars further kernels all the same."""
    world = LocalWorld(2, 1 << 20, DEADLINE_S)
    call = uneven(world, SMALL_CHUNKS, [[1000] * 2] * 2, wrong={(1, 0): 900})
    world.launch(call.function, call.arguments)
    complaint = world.record(0)
    assert complaint is not None
    assert complaint.phase == Phase.splits
    with one_deadline(DEADLINE_S):
        world.launch(call.function, call.arguments, ranks=[0])
        world.launch(call.function, call.arguments, ranks=[0])
    assert world.record(0) == complaint
    assert int(world.bytes(0, at.FAILED, 4).view(torch.int32)) == at.GAVE_UP


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_uneven_all_to_all_waits_for_the_late_one(world_size: int) -> None:
    world, rng = world_of(world_size), random.Random(world_size)
    for late in range(world_size):
        world.put(late, at.DELAY_NS, DELAY_NS)
        try:
            for shape in (select_gpu.uneven_shape(world_size, world.num_sms), SMALL_CHUNKS):
                run(world, uneven(world, shape, random_splits(world_size, 20_000, rng), seed=late))
        finally:
            world.put(late, at.DELAY_NS, 0)


def any_call(world: LocalWorld, rng: random.Random, start: int, seed: int) -> Call:
    """A call of any kind and size, with buffers of its own."""
    size = rng.choice((1, 40, 1000, 9000, 30000))
    part = rng.randrange(1, size + 1)
    kind = rng.choice((*MOVES, "sum", "sum", "uneven", "all_reduce", "all_reduce"))
    if kind == "uneven":
        return uneven(world, SMALL_CHUNKS, random_splits(world.world_size, size + 16, rng), seed=seed)
    if kind == "sum":
        algorithm = rng.choice((Algorithm.ll, Algorithm.lamport, Algorithm.lamport, Algorithm.pull, Algorithm.staged))
        shape = smaller(rng, sum_shape(world, algorithm, DType.bfloat16, part))
        shape, part = longer(world, rng, shape, part)
        return scatter_sum(world, shape, DType.bfloat16, Op.sum, part, seed=seed, start=start)
    if kind == "all_reduce":
        return all_reduce(world, rng, part, start, seed)
    algorithm = rng.choice(MOVE_ALGORITHMS)
    shape = smaller(rng, move_shape(world, algorithm, part))
    shape, part = longer(world, rng, shape, part, itemsize=1)
    return move(world, kind, shape, part, seed=seed, start=start)


def smaller(rng: random.Random, shape: Launch) -> Launch:
    """The shape, or one with more and smaller chunks, if it has any."""
    small = replace(SMALL_CHUNKS, algorithm=shape.algorithm)
    return rng.choice((shape, small)) if shape.chunk_bytes else shape


def longer(world: LocalWorld, rng: random.Random, shape: Launch, count: int, itemsize: int = 2) -> tuple[Launch, int]:
    """The shape, for so many elements; or, of Lamport kernels, a CTA alone that takes turns in up to four slots."""
    if shape.algorithm is not Algorithm.lamport or rng.random() < 0.3:
        return shape, count
    slot = world.layout.lamport_slot_bytes
    threads = min(512, slot // (2 * 2 * 16) // 32 * 32)  # of two vectors; a slot holds two turns at least
    return replace(shape, grid=1, threads=threads, unroll=2, slots=2), rng.randrange(1, 4 * slot // itemsize)


def all_reduce(world: LocalWorld, rng: random.Random, count: int, start: int, seed: int) -> Call:
    import test_local_world as other

    dtype, size = DType.bfloat16, world.world_size
    shape = smaller(rng, other.shape_of(world, rng.choice(other.ALL_REDUCE), dtype, count))
    shape, count = longer(world, rng, shape, count)
    place = Place(world, count * 2, True, start)
    parts = inputs(dtype, Op.sum, size, count, seed)
    place.fill(parts)
    address: list[tuple[int, ...]] = [(place.address(rank),) * 2 for rank in range(size)]
    if shape.algorithm is Algorithm.two_shot:
        address = [(0, place.offset)] * size

    def verify() -> None:
        expected = reduced(parts, dtype, Op.sum)
        for rank, got in enumerate(place.read()):
            assert_same(got.view(torch.bfloat16), expected, f"{shape} n={count} rank {rank}")

    arguments = [(*a, count, shape.grid) for a in address]
    return Call(other.kernel(world, shape, dtype, Op.sum, arguments), arguments, verify)


@pytest.mark.parametrize(("world_size", "late"), [(2, False), (2, True), (3, True), (4, False), (5, False), (8, True)])
def test_all_kinds_of_calls_back_to_back(world_size: int, late: bool) -> None:
    """120 calls in flight at once: nothing waits on the host between them."""
    world, rng = LocalWorld(world_size, 150 << 20, PATIENCE_S), random.Random(10 * world_size + late)
    calls = [any_call(world, rng, i * (700 << 10), i) for i in range(120)]
    if late:  # one rank is always behind
        world.put(rng.randrange(world_size), at.DELAY_NS, DELAY_NS // 20)
    torch.cuda.synchronize()
    for call in calls:
        for rank, arguments in enumerate(call.arguments):
            call.function(world.base, world.stride, rank, *arguments, world.streams[rank].cuda_stream)
    torch.cuda.synchronize()
    assert [world.record(rank) for rank in range(world_size)] == [None] * world_size
    for call in calls:
        call.verify()


@pytest.mark.parametrize("kind", [*MOVES, "sum"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_wait_for_the_late_one(world_size: int, kind: str) -> None:
    world = world_of(world_size)
    for late in range(world_size):
        world.put(late, at.DELAY_NS, DELAY_NS)
        try:
            for algorithm in MOVE_ALGORITHMS:
                if kind == "sum":
                    algorithm = Algorithm.ll if algorithm is Algorithm.push else algorithm
                    shape = sum_shape(world, algorithm, DType.bfloat16, 1000)
                    run(world, scatter_sum(world, shape, DType.bfloat16, Op.sum, 1000))
                else:
                    run(world, move(world, kind, move_shape(world, algorithm, 1000), 1000, seed=late))
        finally:
            world.put(late, at.DELAY_NS, 0)


@pytest.mark.parametrize(
    ("kind", "root"), [*((kind, 2) for kind in (*MOVES, "uneven", "sum")), ("broadcast", 0), ("scatter", 0)]
)
@pytest.mark.parametrize("algorithm", MOVE_ALGORITHMS, ids=lambda a: a.name)
def test_a_missing_peer_is_named(kind: str, algorithm: Algorithm, root: int) -> None:
    world = LocalWorld(3, 1 << 20, DEADLINE_S)
    if kind == "uneven":
        call = uneven(world, SMALL_CHUNKS, [[1000] * 3] * 3)
    elif kind == "sum":
        algorithm = Algorithm.pull if algorithm is Algorithm.push else algorithm
        call = scatter_sum(world, sum_shape(world, algorithm, DType.bfloat16, 1000), DType.bfloat16, Op.sum, 1000)
    else:
        call = move(world, kind, move_shape(world, algorithm, 1000), 1000, seed=root)  # the root, if there is one
    launch_without_the_last(world, call)
    assert float(torch.ones(1000, device="cuda").sum()) == 1000  # the context lives


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
@pytest.mark.parametrize("algorithm", [Algorithm.ll, Algorithm.lamport], ids=lambda a: a.name)
def test_a_missing_root_is_awaited_once_whatever_the_size(algorithm: Algorithm, kind: str) -> None:
    """One thread awaits the only byte; that which awaits the root's signal must not begin when that one gives up."""
    world = LocalWorld(3, 1 << 20, DEADLINE_S)
    launch_without_the_last(world, move(world, kind, move_shape(world, algorithm, 1), 1, seed=2))


def launch_without_the_last(world: LocalWorld, call: Call) -> None:
    """Every other rank names it, after one deadline."""
    missing = world.world_size - 1
    world.load(call.function, *call.arguments[0])
    with one_deadline(DEADLINE_S):
        world.launch(call.function, call.arguments, ranks=range(missing))
    for rank in range(missing):
        record = world.record(rank)
        assert record is not None
        assert (record.rank, record.peer) == (rank, missing)
