"""The norm kernels, alone and fused with collectives, with all ranks in one process on one GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from local_cases import DELAY_NS, WORLDS, assert_same, torch_dtype, world_of
from norm_cases import EPS, Problem, assert_poison_left, guarded
from torch import Tensor

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Phase
from symmcomm.schedule.select_norm import Form, RowLaunch
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = pytest.mark.parametrize("dtype", select_norm.DTYPES, ids=lambda d: d.name)
SHAPES = [(1, 1), (1, 7), (3, 8), (5, 100), (7, 64), (2, 1000), (4, 2880), (133, 512), (9, 8192), (2, 12300)]
SHAPES += [(1, 32768)]
HEADS = ((1, 8, 1, 0), (5, 3, 2, 0), (37, 32, 8, 0), (1001, 16, 17, 0), (3, 2, 1, 1))  # tokens, queries', keys', shift
LOADED: set[object] = set()
"""Kernels that start at once (see ``testing.local_world``)."""
EXCHANGED = [(1, 8), (1, 8192), (3, 64), (5, 1000), (2, 7), (17, 512), (6, 2880), (1, 12300), (301, 96), (40, 4096)]


@dataclass
class Tensors:
    """A rank's tensors, and what goes to a kernel of them."""

    problem: Problem
    source: Tensor
    residual: Tensor
    new_residual: Tensor
    output: Tensor
    scales: Tensor

    @classmethod
    def create(
        cls, problem: Problem, rank: int = 0, part: slice = slice(None), *, quantize: bool = False, gap: int = 0,
        shift: int = 0, in_place: bool = False,
    ) -> Tensors:  # fmt: skip
        """Ordinary ones; ``part``: of all tensors but the source."""
        kind, rows, hidden = torch_dtype(problem.dtype), problem.rows, problem.hidden
        mine = len(range(rows)[part])
        source = guarded(rows, hidden, kind, hidden + gap, shift)
        source.copy_(problem.sources[rank])
        residual = guarded(mine, hidden, kind, hidden + 2 * gap, shift)
        residual.copy_(problem.residual[part])
        out_kind = torch.float8_e4m3fn if quantize else kind
        output = source if in_place else guarded(mine, hidden, out_kind, hidden + gap, shift)
        new_residual = residual if in_place else guarded(mine, hidden, kind, hidden + gap, shift)
        return cls(problem, source, residual, new_residual, output, guarded(1, mine, torch.float32)[0])

    def aligned(self) -> bool:
        rows = [self.source, self.residual, self.new_residual, self.output]
        numbers = [n for t in rows for n in (t.data_ptr(), t.stride(0) * t.itemsize)]
        numbers += [self.problem.weight.data_ptr(), self.problem.bias.data_ptr()]
        return select_norm.are_aligned(self.problem.hidden, self.problem.dtype, *numbers)

    def arguments(self, **others: int) -> tuple[int | float, ...]:
        from symmcomm.kernels.gpu.norm_row import NormArguments

        def pitch(tensor: Tensor) -> int:
            return tensor.stride(0) * tensor.itemsize

        given = NormArguments(
            self.source.data_ptr(), pitch(self.source), self.residual.data_ptr(), pitch(self.residual),
            self.new_residual.data_ptr(), pitch(self.new_residual), self.output.data_ptr(), pitch(self.output),
            self.scales.data_ptr(), self.problem.weight.data_ptr(), self.problem.bias.data_ptr(), self.problem.rows,
            self.problem.hidden, EPS, self.problem.weight_bias,
        )  # fmt: skip
        return given._replace(**others)  # type: ignore[arg-type]

    def check(self, what: str, part: slice = slice(None)) -> None:
        if self.output.dtype is torch.float8_e4m3fn:
            self.problem.check_float8(self.output, self.scales, what, part)
        else:
            new = self.new_residual if self.problem.with_residual else None
            self.problem.check(self.output, new, what, part)
        for tensor in (self.source, self.residual, self.new_residual, self.output):
            assert_poison_left(tensor)


def compiled(world: LocalWorld, kernel: object) -> Callable[..., None]:
    from symmcomm.kernels.gpu import compile as module

    return module.compiled(kernel, world.arch)  # type: ignore[arg-type]


def run(world: LocalWorld, kernels: list[object], arguments: list[tuple[object, ...]]) -> None:
    """Launches a kernel a rank, and waits; nobody may have given up."""
    run_all(world, [(kernels, arguments)])


def run_all(world: LocalWorld, calls: list[tuple[list[object], list[tuple[object, ...]]]]) -> None:
    """Launches a kernel a rank for each call, and waits at the end; nobody may have given up."""
    for kernels, arguments in calls:
        for kernel, given in zip(kernels, arguments, strict=True):
            if kernel not in LOADED:
                LOADED.add(kernel)
                world.load(compiled(world, kernel), *given)
    torch.cuda.synchronize()
    for kernels, arguments in calls:
        for rank, (kernel, given) in enumerate(zip(kernels, arguments, strict=True)):
            compiled(world, kernel)(world.base, world.stride, rank, *given, world.streams[rank].cuda_stream)
    torch.cuda.synchronize()
    assert [world.record(rank) for rank in range(world.world_size)] == [None] * world.world_size


def norm_alone(problem: Problem, shape: RowLaunch | None = None, **how: object) -> Tensors:
    from symmcomm.kernels.gpu import norm_instances

    world = world_of(2)
    quantize = bool(how.get("quantize"))
    tensors = Tensors.create(problem, **how)  # type: ignore[arg-type]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shape = shape or select_norm.norm_shape(problem.rows, problem.hidden, problem.dtype, num_sms)
    kernel = norm_instances.rms_norm(
        shape, problem.dtype, world.arch_number, aligned=tensors.aligned(), residual=problem.with_residual,
        bias=problem.with_bias, quantize=quantize,
    )  # fmt: skip
    compiled(world, kernel)(tensors.arguments(), shape.grid, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return tensors


@DTYPES
def test_rms_norm(dtype: DType) -> None:
    for seed, (rows, hidden) in enumerate(SHAPES):
        problem = Problem(dtype, rows, hidden, seed=seed, with_residual=bool(seed % 3), with_bias=bool(seed % 2))
        for how in ({}, {"gap": 8}, {"gap": 3, "shift": 1}, {"in_place": True}, {"quantize": True}):
            norm_alone(problem, **how).check(f"{dtype.name} {rows}×{hidden} {how}")  # type: ignore[arg-type]


def test_rms_norm_with_few_ctas() -> None:
    """Many rows a CTA, of teams of one warp, of half a warp, and of several."""
    for hidden, threads, rows in ((64, 8, 8), (128, 16, 4), (256, 32, 2), (4096, 256, 1), (32768, 1024, 1)):
        problem = Problem(DType.bfloat16, 301, hidden, weight_bias=1.0)
        unroll = hidden // 8 // threads
        shape = RowLaunch(form=None, grid=3, threads=threads, unroll=unroll, rows=rows)
        norm_alone(problem, shape).check(f"{hidden} in threes")
        norm_alone(problem, shape, quantize=True).check(f"{hidden} in threes, float8")


@DTYPES
@pytest.mark.parametrize("head_dim", select_norm.HEAD_DIMS)
def test_qk_norm(dtype: DType, head_dim: int) -> None:
    from symmcomm.kernels.gpu import norm_instances
    from symmcomm.kernels.gpu.norm import QKNormArguments

    world, kind = world_of(2), torch_dtype(dtype)
    for tokens, query_heads, key_heads, shift in HEADS:
        heads, problems = (query_heads, key_heads), []
        packed = guarded(tokens, (query_heads + 2 * key_heads) * head_dim, kind, None, shift)  # with values behind
        before, first, outputs, pitches = packed.clone(), 0, [], []
        for seed, num in enumerate(heads):
            problem = Problem(dtype, tokens * num, head_dim, seed=seed, with_residual=False, weight_bias=1.0)
            packed[:, first : first + num * head_dim] = problem.sources[0].view(tokens, num * head_dim)
            problems.append(problem)
            outputs.append(guarded(tokens * num, head_dim, kind, None, shift))
            pitches += [packed.data_ptr() + first * kind.itemsize]
            first += num * head_dim
        wide, narrow = packed.stride(0) * kind.itemsize, head_dim * kind.itemsize
        given = QKNormArguments(
            pitches[0], wide, narrow, pitches[1], wide, narrow,
            outputs[0].data_ptr(), query_heads * narrow, narrow, outputs[1].data_ptr(), key_heads * narrow, narrow,
            problems[0].weight.data_ptr(), problems[1].weight.data_ptr(), tokens, query_heads, key_heads, EPS, 1.0,
        )  # fmt: skip
        shape = select_norm.qk_norm_shape(tokens, sum(heads), head_dim, dtype, 132)
        kernel = norm_instances.qk_norm(shape, dtype, head_dim, world.arch_number, aligned=shift == 0)
        compiled(world, kernel)(given, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for problem, output in zip(problems, outputs, strict=True):
            problem.check(output, None, f"{dtype.name} {head_dim} {tokens} tokens, {heads} heads, shift {shift}")
            assert_poison_left(output)
        values = slice(first, None)
        assert_same(packed[:, values].flatten(), before[:, values].flatten(), "what lies behind the keys")


def exchange(
    world: LocalWorld, problem: Problem, shape: RowLaunch, scatter: bool = False, **how: object
) -> list[Tensors]:
    """All-reduce or reduce-scatter and norm, on all ranks."""
    tensors, kernels, arguments = exchange_call(world, problem, shape, scatter, **how)
    run(world, kernels, arguments)
    return tensors


def exchange_call(
    world: LocalWorld, problem: Problem, shape: RowLaunch, scatter: bool, **how: object
) -> tuple[list[Tensors], list[object], list[tuple[object, ...]]]:
    """All ranks' tensors, kernels and arguments."""
    from symmcomm.kernels.gpu import norm_instances

    shifts = how.pop("shifts", None)
    parts = [part_of(problem, rank, scatter) for rank in range(world.world_size)]
    tensors = [
        Tensors.create(problem, rank, part, **(how | ({"shift": shifts[rank % 2]} if shifts else {})))  # type: ignore
        for rank, part in enumerate(parts)
    ]
    kernels: list[object] = [
        norm_instances.exchange_norm(
            shape, problem.dtype, world.world_size, world.arch_number, aligned=mine.aligned(), scatter=scatter,
            bias=problem.with_bias, quantize=bool(how.get("quantize")),
        )
        for mine in tensors
    ]  # fmt: skip
    return tensors, kernels, [(mine.arguments(), shape.grid) for mine in tensors]


def part_of(problem: Problem, rank: int, scatter: bool, world_size: int = 0) -> slice:
    if not scatter:
        return slice(None)
    first, num = select_norm.slice_rows(problem.rows, world_size or problem.world_size, rank)
    return slice(first, first + num)


def shapes_of(world: LocalWorld, problem: Problem, scatter: bool) -> list[RowLaunch]:
    """LL as it is chosen, and with a CTA a row, where it has room; and ``staged_shapes``."""
    size, hidden, dtype = world.world_size, problem.hidden, problem.dtype
    rows = select_norm.part_rows(problem.rows, size) if scatter else problem.rows
    found = [select_norm.ll_shape(rows, hidden, dtype, size, world.num_sms, arch) for arch in (world.arch_number, 80)]
    few = [shape for shape in found if shape is not None]
    return list(dict.fromkeys([*few, *staged_shapes(world, rows, hidden, dtype)]))


def staged_shapes(world: LocalWorld, rows: int, hidden: int, dtype: DType) -> list[RowLaunch]:
    """As it is chosen; by two CTAs; with rows side by side; and in three pieces, by one CTA."""
    chosen = select_norm.staged_shape(rows, hidden, dtype, world.world_size, world.num_sms)
    if chosen is None:
        return []
    room, vectors = world.layout.staging_slot_bytes // 16, select_norm.row_vectors(hidden, dtype)
    found = [chosen, replace(chosen, grid=min(2, chosen.grid))]
    if chosen.threads % 32 == 0 and 3 * chosen.threads * chosen.unroll <= room and chosen.threads <= 320:
        found.append(replace(chosen, grid=min(2, -(-rows // 3)), rows=3))
    third = -(-vectors // 96) * 32
    if vectors > 64 and third <= min(room, 512):
        found.append(replace(chosen, grid=1, threads=third, unroll=1, rows=1, pieces=3))
    return found


@pytest.mark.parametrize("scatter", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("world_size", [1, *WORLDS])
def test_exchange_norm(world_size: int, scatter: bool) -> None:
    world = world_of(world_size)
    for seed, (rows, hidden) in enumerate(EXCHANGED if world_size == 2 else EXCHANGED[world_size % 2 :: 2]):
        dtype = select_norm.DTYPES[seed % 3]
        problem = Problem(dtype, rows, hidden, world_size, seed, with_bias=bool(seed % 2))
        for number, shape in enumerate(shapes_of(world, problem, scatter)):
            how: dict[str, object] = [{}, {"gap": 3, "shifts": (0, 1)}, {"in_place": not scatter}][(seed + number) % 3]
            tensors = exchange(world, problem, shape, scatter, **how)
            what = f"{shape} {dtype.name} {rows}×{hidden} {how}"
            for rank, mine in enumerate(tensors):
                mine.check(f"rank {rank}: {what}", part_of(problem, rank, scatter))
                if not scatter:
                    assert_same(mine.output.flatten(), tensors[0].output.flatten(), f"ranks agree: {what}")


@pytest.mark.parametrize("scatter", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_staged_norms_with_a_late_rank(world_size: int, scatter: bool) -> None:
    """Call upon call, of fewer and of more chunks than there are slots, while one rank starts late each time."""
    world = world_of(world_size)
    for late in range(world_size):
        calls = []
        for seed, (rows, hidden) in enumerate(((3, 512), (world_size * 29, 1000), (1, 4096), (world_size * 7, 4096))):
            problem = Problem(select_norm.DTYPES[(seed + late) % 3], rows, hidden, world_size, 10 * late + seed)
            mine = select_norm.part_rows(rows, world_size) if scatter else rows
            shape = staged_shapes(world, mine, hidden, problem.dtype)[seed % 2]
            calls.append((problem, shape, exchange_call(world, problem, shape, scatter)))
        world.put(late, at.DELAY_NS, DELAY_NS)
        run_all(world, [(kernels, arguments) for _, _, (_, kernels, arguments) in calls])
        world.put(late, at.DELAY_NS, 0)
        for problem, shape, (tensors, _, _) in calls:
            for rank, one in enumerate(tensors):
                what = f"rank {rank}, rank {late} late: {shape} {problem.rows}×{problem.hidden}"
                one.check(what, part_of(problem, rank, scatter))


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange_norm_to_float8(world_size: int) -> None:
    world = world_of(world_size)
    for rows, hidden in ((1, 8192), (7, 96), (12, 1001)):
        problem = Problem(DType.bfloat16, rows, hidden, world_size, with_bias=True, weight_bias=1.0)
        for scatter in (False, True):
            for shape in shapes_of(world, problem, scatter):
                for rank, mine in enumerate(exchange(world, problem, shape, scatter, quantize=True)):
                    mine.check(f"rank {rank}: {shape} {rows}×{hidden}", part_of(problem, rank, scatter))


@DTYPES
def test_words_of_ones(dtype: DType) -> None:
    """NaN with all bits set, in a word of its own, beside a number, and everywhere: it comes as NaN, and arrives."""
    world, bits = world_of(2), {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    problem = Problem(dtype, 3, 256, 2)
    for rank, (first, last) in enumerate(((0, 2), (3, 4))):
        problem.sources[rank].view(bits)[0, first:last] = -1
    problem.sources[0].view(bits)[1] = -1
    problem.sources[0][2], problem.sources[1][2], problem.residual[2] = -0.0, -0.0, -0.0
    for shape in shapes_of(world, problem, False):
        for mine in exchange(world, problem, shape):
            assert_same(mine.new_residual.flatten(), problem.new_residual.flatten(), str(shape))
            assert bool(mine.output[:2].isnan().all())
            assert bool((mine.output[2] == 0).all())


@pytest.mark.parametrize("form", [Form.ll, Form.staged], ids=lambda f: f.name)
@pytest.mark.parametrize("world_size", [2, 4])
@DTYPES
def test_accuracy(world_size: int, dtype: DType, form: Form) -> None:
    """Closer to float64 than the separate steps in float32, in the mean square."""
    world = world_of(world_size)
    rows = world.num_sms // 8 * 8
    problem = Problem(dtype, rows, 4096, world_size)
    shape = select_norm.ll_shape(rows, 4096, dtype, world_size, world.num_sms, world.arch_number)
    if form is Form.staged:
        shape = select_norm.staged_shape(rows, 4096, dtype, world_size, world.num_sms)
    assert shape is not None
    output = exchange(world, problem, shape)[0].output
    exact = problem.exact
    ours, theirs = ((y.double() - exact).square().mean() for y in (output, problem.separately))
    assert float(ours) <= float(theirs), (float(ours), float(theirs))


@dataclass
class Symmetric:
    """Tensors at the same offsets of all ranks' heaps."""

    world: LocalWorld
    problem: Problem
    quantize: bool
    pitch: int
    offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = self.world.data + 256
        for name in ("source", "output", "new_residual", "scales"):
            self.offsets[name] = place
            place += -(-max(1, self.problem.rows) * self.pitch * 4 // 256) * 256 + 256
        for rank in range(self.world.world_size):
            self.world.bytes(rank, self.world.data, place - self.world.data).fill_(0x5A)
            self.rows(rank, "source").copy_(self.problem.sources[rank])

    def rows(self, rank: int, name: str, kind: torch.dtype | None = None) -> Tensor:
        kind, rows = kind or torch_dtype(self.problem.dtype), self.problem.rows
        flat = self.world.tensor(rank, self.offsets[name], rows * self.pitch, kind)
        return flat.view(rows, self.pitch)[:, : self.problem.hidden]


VARIANTS = {
    "gather": {}, "replicate": {"replicate": True}, "keep": {"gather": False}, "only_gather": {"reduce": False},
    "no_residual": {"residual": False}, "in_place": {"in_place": True}, "float8": {"quantize": True},
}  # fmt: skip


def direct(world: LocalWorld, problem: Problem, shape: RowLaunch, variant: str, gap: int) -> None:
    """The kernel on symmetric memory, on all ranks, and a look at what it left."""
    from symmcomm.kernels.gpu import norm_instances

    how: dict[str, bool] = dict(VARIANTS[variant])
    in_place, quantize = how.pop("in_place", False), how.get("quantize", False)
    reduce, gather, replicate = how.get("reduce", True), how.get("gather", True), how.get("replicate", False)
    pitch = problem.hidden + gap
    heaps, kind = Symmetric(world, problem, quantize, pitch), torch_dtype(problem.dtype)
    aligned = select_norm.are_aligned(problem.hidden, problem.dtype, pitch if quantize else pitch * kind.itemsize)
    kernel = norm_instances.direct_norm(
        shape, problem.dtype, world.world_size, world.arch_number, aligned=aligned, bias=problem.with_bias, **how
    )  # fmt: skip
    given, ordinary, out_bytes = [], [], 1 if quantize else kind.itemsize
    for rank in range(world.world_size):
        part = slice(None) if replicate else part_of(problem, rank, True)
        mine = Tensors.create(problem, rank, part, quantize=quantize and not gather)
        own = problem.sources[rank][part_of(problem, rank, True)].contiguous()
        ordinary.append((mine, own))
        others: dict[str, int] = {}
        others["source"] = heaps.offsets["source"] if reduce else own.data_ptr()
        others["source_pitch"] = (pitch if reduce else problem.hidden) * kind.itemsize
        if gather:
            others |= {"output": heaps.offsets["source" if in_place else "output"], "output_pitch": pitch * out_bytes}
            others["scales"] = heaps.offsets["scales"]
        if replicate:
            others |= {"new_residual": heaps.offsets["new_residual"], "new_residual_pitch": pitch * kind.itemsize}
        given.append((0, mine.arguments(**others), shape.grid))
    run(world, [kernel] * world.world_size, given)
    if not reduce:  # rank r's rows are its own
        pieces = [problem.sources[r][part_of(problem, r, True)] for r in range(world.world_size)]
        problem = replace(problem, world_size=1)
        problem.sources, problem.residual = [torch.cat(pieces)], ordinary[0][0].problem.residual
        problem.weight, problem.bias = ordinary[0][0].problem.weight, ordinary[0][0].problem.bias
    for rank, (mine, _) in enumerate(ordinary):
        what = f"rank {rank}: {variant} {shape} {problem.rows}×{problem.hidden} gap {gap}"
        part = part_of(problem, rank, True, world.world_size)
        new = heaps.rows(rank, "new_residual") if replicate else mine.new_residual
        if not gather:
            problem.check(mine.output, new, what, part)
            continue
        if problem.with_residual:
            assert_same(new.flatten(), problem.new_residual[slice(None) if replicate else part].flatten(), what)
        name = "source" if in_place else "output"
        if quantize:
            scales = world.tensor(rank, heaps.offsets["scales"], problem.rows, torch.float32)
            problem.check_float8(heaps.rows(rank, name, torch.float8_e4m3fn), scales, what)
        else:
            problem.check(heaps.rows(rank, name), None, what)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", [1, *WORLDS])
def test_direct_norm(world_size: int, variant: str) -> None:
    world = world_of(world_size)
    shapes = [(1, 8), (3, 8192), (2 * world_size, 64), (33, 1000), (7, 7), (64, 2880)]
    for seed, (rows, hidden) in enumerate(shapes if world_size == 2 else shapes[world_size % 2 :: 2]):
        dtype = select_norm.DTYPES[(seed + world_size) % 3]
        problem = Problem(dtype, rows, hidden, world_size, seed, variant != "no_residual", with_bias=bool(seed % 2))
        part = select_norm.part_rows(rows, world_size)
        for max_ctas in (1, 16):
            shape = select_norm.direct_shape(part, hidden, dtype, world_size, world.num_sms, max_ctas)
            direct(world, problem, shape, variant, gap=[0, 8, 3][seed % 3])


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_kinds_of_calls_in_one_stream(world_size: int) -> None:
    """LL, staged and direct kernels in any order, with late ranks: words, slots and pads are not mixed up."""
    world, chance = world_of(world_size), random.Random(world_size)
    for turn in range(40):
        problem = Problem(DType.bfloat16, chance.choice((1, 2, 5, 9)), chance.choice((64, 512, 4096)), world_size, turn)
        late = chance.randrange(world_size)
        world.put(late, at.DELAY_NS, DELAY_NS if turn % 4 == 0 else 0)
        kind, scatter = chance.randrange(3), chance.random() < 0.5
        if kind == 2:
            part = select_norm.part_rows(problem.rows, world_size)
            shape = select_norm.direct_shape(part, problem.hidden, problem.dtype, world_size, 16)
            direct(world, problem, shape, "gather", 0)
        else:
            shape = chance.choice(shapes_of(world, problem, scatter))
            for rank, mine in enumerate(exchange(world, problem, shape, scatter)):
                mine.check(f"turn {turn} rank {rank} {shape}", part_of(problem, rank, scatter))
        world.put(late, at.DELAY_NS, 0)


@pytest.mark.parametrize("form", list(Form), ids=lambda f: f.name)
def test_a_rank_that_does_not_come(form: Form) -> None:
    from symmcomm.kernels.gpu import norm_instances

    world = LocalWorld(2, 8 << 20, timeout_s=0.2)
    problem = Problem(DType.bfloat16, 2, 8192, 2)
    mine = Tensors.create(problem)
    if form is Form.direct:
        shape = select_norm.direct_shape(1, 8192, problem.dtype, 2, world.num_sms)
        kernel: object = norm_instances.direct_norm(shape, problem.dtype, 2, world.arch_number, aligned=True)
        others = {"source": world.data, "output": world.data + (1 << 20)}
        given: tuple[object, ...] = (0, mine.arguments(**others), shape.grid)
    else:
        found = select_norm.ll_shape(2, 8192, problem.dtype, 2, world.num_sms, world.arch_number)
        if form is Form.staged:
            found = select_norm.staged_shape(2, 8192, problem.dtype, 2, world.num_sms)
        assert found is not None
        shape = found
        kernel = norm_instances.exchange_norm(shape, problem.dtype, 2, world.arch_number, aligned=mine.aligned())
        given = (mine.arguments(), shape.grid)
    world.launch(compiled(world, kernel), [given], ranks=[0])
    record = world.record(0)
    assert record is not None
    assert (record.rank, record.peer) == (0, 1)
    assert record.phase == (Phase.data if form is Form.ll else Phase.enter)
    world.launch(compiled(world, kernel), [given], ranks=[0])  # barred: it returns at once
