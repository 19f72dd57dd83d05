"""The norm kernels, alone and fused with collectives, with all ranks in one process on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from local_cases import DELAY_NS, WORLDS, assert_same, torch_dtype, unlikely, world_of
from norm_cases import EPS, POISON, Problem, assert_poison_left, guarded
from torch import Tensor

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout, Phase
from symmcomm.schedule.select_norm import Form, RowLaunch
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = pytest.mark.parametrize("dtype", select_norm.DTYPES, ids=lambda d: d.name)
SCATTER = pytest.mark.parametrize("scatter", [False, True], ids=["all_reduce", "reduce_scatter"])
DTYPE_OF = {
    1: DType.bfloat16, 2: DType.bfloat16, 3: DType.float16, 4: DType.float32, 5: DType.bfloat16, 8: DType.float16,
}  # fmt: skip
"""Most tests of a world keep to one, and to a bias: what to compile is what takes time here."""
ROWS = [(1, 1), (1, 7), (3, 8), (5, 100), (7, 64), (2, 1000), (4, 2880), (133, 512), (9, 8192), (2, 12300), (1, 32768)]
WHOLE_VECTORS = [(rows, hidden) for rows, hidden in ROWS if hidden % 8 == 0]
TEAMS = ((2, 1, 16), (32, 1, 4), (128, 2, 1), (512, 2, 1), (1024, 8, 1))
"""Threads a row, vectors a thread, rows at a time."""
HEADS = ((1, 8, 1, 0), (5, 3, 2, 0), (37, 32, 8, 0), (3, 2, 1, 1))  # tokens, queries', keys', shift
LOADED: set[object] = set()
"""Kernels that start at once (see ``testing.local_world``)."""
EXCHANGED = [(1, 8), (1, 8192), (3, 64), (5, 1000), (2, 7), (17, 512), (6, 2880), (1, 4200), (1, 8440), (301, 96)]
EXCHANGED += [(40, 4096)]


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


def norm_alone(problem: Problem, grid: int = 0, **how: object) -> Tensors:
    """By the smallest of TEAMS that holds a row, and ``grid`` CTAs or as many as there is work for."""
    from symmcomm.kernels.gpu import norm_instances

    world, vectors = world_of(2), select_norm.row_vectors(problem.hidden, problem.dtype)
    tensors = Tensors.create(problem, **how)  # type: ignore[arg-type]
    threads, unroll, rows = next(team for team in TEAMS if team[0] * team[1] >= vectors)
    shape = RowLaunch(form=None, grid=grid or -(-problem.rows // rows), threads=threads, unroll=unroll, rows=rows)
    kernel = norm_instances.rms_norm(
        shape, problem.dtype, world.arch_number, aligned=tensors.aligned(), residual=problem.with_residual,
        bias=problem.with_bias, quantize=bool(how.get("quantize")),
    )  # fmt: skip
    compiled(world, kernel)(tensors.arguments(), shape.grid, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return tensors


@DTYPES
def test_rms_norm(dtype: DType) -> None:
    ways: list[dict[str, object]] = [{}, {"gap": 8}, {"in_place": True}]
    for seed, (rows, hidden) in enumerate(ROWS if dtype is DType.bfloat16 else WHOLE_VECTORS):
        problem = Problem(dtype, rows, hidden, seed=seed, with_bias=True)
        more: list[dict[str, object]] = [{"gap": 3, "shift": 1}] if dtype is DType.bfloat16 else []
        for how in ways + more:
            norm_alone(problem, **how).check(f"{dtype.name} {rows}×{hidden} {how}")


def test_options_of_rms_norm() -> None:
    """Neither residual nor bias; single elements of 4 bytes; float8 of float32."""
    norm_alone(Problem(DType.float16, 9, 2000, with_residual=False)).check("no residual, no bias")
    norm_alone(Problem(DType.float16, 9, 200, with_residual=False)).check("no residual, no bias, a warp a row")
    problem = Problem(DType.float32, 5, 1000, with_bias=True, weight_bias=1.0)
    for how in ({"shift": 1}, {"quantize": True}):
        norm_alone(problem, **how).check(f"float32 {how}")


def test_rms_norm_with_few_ctas() -> None:
    """Many rows a CTA, of teams of a part of a warp, of one, and of several."""
    for hidden in (16, 256, 2048, 8192, 32768):
        problem = Problem(DType.bfloat16, 301, hidden, with_bias=True, weight_bias=1.0)
        norm_alone(problem, 3).check(f"{hidden} in threes")
        norm_alone(problem, 3, quantize=True).check(f"{hidden} in threes, float8")


@DTYPES
@pytest.mark.parametrize("head_dim", select_norm.HEAD_DIMS)
def test_qk_norm(dtype: DType, head_dim: int) -> None:
    from symmcomm.kernels.gpu import norm_instances
    from symmcomm.kernels.gpu.norm import QKNormArguments

    world, kind = world_of(2), torch_dtype(dtype)
    many = ((1001, 16, 17, 0),) if dtype is DType.bfloat16 else ()  # two tokens at a time
    for tokens, query_heads, key_heads, shift in (*(HEADS if head_dim == 64 else HEADS[:-1]), *many):
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


def lamport_shapes(world: LocalWorld, rows: int) -> list[RowLaunch]:
    """A cluster a row, as long as there is room; of two, a CTA a row too. Fewer CTAs than rows, which take turns."""
    clusters = ((8, 128), (1, 256)) if world.world_size == 2 else ((8, 128),)
    if world.arch_number < 90:
        clusters = ((1, 256),)
    found = [
        RowLaunch(form=Form.lamport, grid=rows * cluster, threads=threads, unroll=1, cluster=cluster)
        for cluster, threads in clusters
        if rows * cluster <= world.num_sms
    ]
    slot = Layout.create(world.world_size).lamport_slot_bytes // 16
    for grid, threads in ((2, 128), (world.num_sms, 256)):
        if grid < rows and -(-rows // grid) * threads <= slot:
            found.append(RowLaunch(form=Form.lamport, grid=grid, threads=threads, unroll=1))
    return found


def staged_shapes(world: LocalWorld, rows: int, dtype: DType) -> list[RowLaunch]:
    """As it is chosen for rows of 16 KiB, few and many; with short rows side by side; in three pieces. All by as many
    CTAs as there are, or by two."""
    size = world.world_size
    found = [
        select_norm.staged_shape(many, (16 << 10) // dtype.itemsize, dtype, size, world.num_sms)
        for many in ((1000, 10_000) if size == 2 else (1000,))
    ]
    form, unroll = Form.staged, 2 if size <= 4 else 1
    found.append(RowLaunch(form=form, grid=1, threads=64, unroll=unroll, rows=3))
    found.append(RowLaunch(form=form, grid=1, threads=352, unroll=1, pieces=3))
    if size == 2:
        found.append(RowLaunch(form=form, grid=1, threads=8, unroll=2, rows=4))
    shapes = []
    for number, shape in enumerate(shape for shape in found if shape is not None):
        wanted = max(1, -(-rows // shape.rows))
        shapes.append(replace(shape, grid=min(wanted, world.num_sms if (rows + number) % 2 else 2)))
    return shapes


def shapes_of(world: LocalWorld, problem: Problem, scatter: bool) -> list[RowLaunch]:
    """Those that hold a row."""
    rows = select_norm.part_rows(problem.rows, world.world_size) if scatter else problem.rows
    vectors = select_norm.row_vectors(problem.hidden, problem.dtype)
    found = lamport_shapes(world, rows) + staged_shapes(world, rows, problem.dtype)
    return [shape for shape in found if shape.threads * shape.unroll * shape.cluster * shape.pieces >= vectors]


@SCATTER
@pytest.mark.parametrize("world_size", WORLDS)
def test_exchange_norm(world_size: int, scatter: bool) -> None:
    """Rows dense and apart, results in the place of arguments; of two ranks, too, rows that are no whole vectors, and
    one rank whose rows start on boundaries and one whose do not, which take different kernels."""
    world, dtype = world_of(world_size), DTYPE_OF[world_size]
    ways: list[dict[str, object]] = [{}, {"gap": 8}, {"in_place": not scatter}]
    ways += [{"shifts": (0, 1)}] if world_size == 2 else []
    for seed, (rows, hidden) in enumerate(EXCHANGED):
        if hidden % 8 and world_size != 2:
            continue
        problem = Problem(dtype, rows, hidden, world_size, seed, with_bias=True)
        for number, shape in enumerate(shapes_of(world, problem, scatter)):
            how = ways[(seed + number) % len(ways)]
            tensors = exchange(world, problem, shape, scatter, **how)
            what = f"{shape} {dtype.name} {rows}×{hidden} {how}"
            for rank, mine in enumerate(tensors):
                mine.check(f"rank {rank}: {what}", part_of(problem, rank, scatter))
                if not scatter:
                    assert_same(mine.output.flatten(), tensors[0].output.flatten(), f"ranks agree: {what}")


@SCATTER
@pytest.mark.parametrize("world_size", WORLDS)
def test_staged_norms_with_a_late_rank(world_size: int, scatter: bool) -> None:
    """Call upon call, of fewer and of more chunks than there are slots, while one rank starts late each time."""
    world, dtype = world_of(world_size), DTYPE_OF[world_size]
    sizes = ((3, 512), (world_size * 29, 1000), (1, 2048), (world_size * 7, 2000), (world_size * 12, 64))
    for late in range(world_size):
        calls = []
        for seed, (rows, hidden) in enumerate(sizes):
            problem = Problem(dtype, rows, hidden, world_size, 10 * late + seed, with_bias=True)
            fitting = [shape for shape in shapes_of(world, problem, scatter) if shape.form is Form.staged]
            shape = fitting[(seed + late) % len(fitting)]
            calls.append((problem, shape, exchange_call(world, problem, shape, scatter)))
        world.put(late, at.DELAY_NS, DELAY_NS)
        run_all(world, [(kernels, arguments) for _, _, (_, kernels, arguments) in calls])
        world.put(late, at.DELAY_NS, 0)
        for problem, shape, (tensors, _, _) in calls:
            for rank, one in enumerate(tensors):
                what = f"rank {rank}, rank {late} late: {shape} {problem.rows}×{problem.hidden}"
                one.check(what, part_of(problem, rank, scatter))


@SCATTER
@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange_norm_to_float8(world_size: int, scatter: bool) -> None:
    world = world_of(world_size)
    for rows, hidden in ((1, 4096), (7, 96), (12, 1001 if world_size == 2 else 1008)):
        problem = Problem(DTYPE_OF[world_size], rows, hidden, world_size, with_bias=True, weight_bias=1.0)
        shapes = shapes_of(world, problem, scatter)
        forms = {shape.form: shape for shape in reversed(shapes)}
        for shape in forms.values():
            for rank, mine in enumerate(exchange(world, problem, shape, scatter, quantize=True)):
                mine.check(f"rank {rank}: {shape} {rows}×{hidden}", part_of(problem, rank, scatter))


@DTYPES
def test_words_of_ones(dtype: DType) -> None:
    """NaN with all bits set, in a word of its own, beside a number, and everywhere: it comes as NaN, and arrives."""
    world, bits = world_of(2), {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    problem = Problem(dtype, 3, 256, 2, with_bias=True)
    problem.bias.zero_()
    for rank, (first, last) in enumerate(((0, 2), (3, 4))):
        problem.sources[rank].view(bits)[0, first:last] = -1
    problem.sources[0].view(bits)[1] = -1
    problem.sources[0][2], problem.sources[1][2], problem.residual[2] = -0.0, -0.0, -0.0
    for shape in (*lamport_shapes(world, 3)[:1], staged_shapes(world, 3, dtype)[0]):
        for mine in exchange(world, problem, shape):
            assert_same(mine.new_residual.flatten(), problem.new_residual.flatten(), str(shape))
            assert bool(mine.output[:2].isnan().all())
            assert bool((mine.output[2] == 0).all())


@DTYPES
def test_vectors_that_would_be_taken_for_nothing(dtype: DType) -> None:
    """All of them, and zeros with a sign."""
    world = world_of(2)
    problem = Problem(dtype, 3, 256, 2, with_bias=True)
    problem.bias.zero_()
    for rank, source in enumerate(problem.sources):
        source.copy_(unlikely(source.nbytes, rank).view(source.dtype).view_as(source))
    problem.sources[0][2], problem.sources[1][2], problem.residual[2] = -0.0, -0.0, -0.0
    for shape in (*lamport_shapes(world, 3)[:1], staged_shapes(world, 3, dtype)[0]):
        for mine in exchange(world, problem, shape):
            assert_same(mine.new_residual.flatten(), problem.new_residual.flatten(), str(shape))
            assert bool((mine.output[2] == 0).all())


# Kernels of one world differ in how rows come together only, so one dtype is enough for the second of them.
ACCURATE = [(2, dtype, form) for dtype in select_norm.DTYPES for form in (Form.lamport, Form.staged)]
ACCURATE += [*((4, dtype, Form.staged) for dtype in select_norm.DTYPES), (4, DTYPE_OF[4], Form.lamport)]


@pytest.mark.parametrize(("world_size", "dtype", "form"), ACCURATE, ids=lambda x: getattr(x, "name", x))
def test_accuracy(world_size: int, dtype: DType, form: Form) -> None:
    """No further from float64 than the separate steps in float32, in the mean square of 64 rows and less. Of float32
    both round alike, so which of them is nearer is chance: then the mean over rows may be three of its own standard
    deviations above zero."""
    world = world_of(world_size)
    rows, worse = world.num_sms // 8, []
    for seed in range(8):
        problem = Problem(dtype, rows, 4096, world_size, seed, with_bias=True)
        shape = (lamport_shapes(world, rows) if form is Form.lamport else staged_shapes(world, rows, dtype))[0]
        output, exact = exchange(world, problem, shape)[0].output, problem.exact
        ours, theirs = ((y.double() - exact).square().mean(-1) for y in (output, problem.separately))
        worse.append(ours - theirs)
    by_row = torch.cat(worse)
    margin = 3 * float(by_row.std()) / len(by_row) ** 0.5 if dtype is DType.float32 else 0.0
    assert float(by_row.mean()) <= margin, (float(by_row.mean()), margin)


@dataclass
class Symmetric:
    """Tensors at the same offsets of all ranks' heaps."""

    world: LocalWorld
    problem: Problem
    quantize: bool
    pitch: int
    start: int = 0
    offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = first = self.world.data + self.start + 256
        for name in ("source", "output", "new_residual", "scales"):
            self.offsets[name] = place
            place += -(-max(1, self.problem.rows) * self.pitch * 4 // 256) * 256 + 256
        for rank in range(self.world.world_size):
            self.world.bytes(rank, first, place - first).fill_(POISON)
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
    kernels, arguments, verify = direct_call(world, problem, shape, variant, gap)
    run(world, kernels, arguments)
    verify()


def direct_call(
    world: LocalWorld, problem: Problem, shape: RowLaunch, variant: str, gap: int = 0, start: int = 0
) -> tuple[list[object], list[tuple[object, ...]], Callable[[], None]]:
    """All ranks' kernels and arguments, and a look at what they left, with tensors from ``start`` on in the heaps."""
    from symmcomm.kernels.gpu import norm_instances

    how: dict[str, bool] = dict(VARIANTS[variant])
    in_place, quantize = how.pop("in_place", False), how.get("quantize", False)
    reduce, gather, replicate = how.get("reduce", True), how.get("gather", True), how.get("replicate", False)
    pitch = problem.hidden + gap
    heaps, kind = Symmetric(world, problem, quantize, pitch, start), torch_dtype(problem.dtype)
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
    normed = problem
    if not reduce:  # rank r's rows are its own
        normed = replace(problem, world_size=1)
        normed.sources = [torch.cat([own for _, own in ordinary])]
        normed.residual, normed.weight, normed.bias = problem.residual, problem.weight, problem.bias

    def verify() -> None:
        for rank, (mine, _) in enumerate(ordinary):
            what = f"rank {rank}: {variant} {shape} {problem.rows}×{normed.hidden} gap {gap}"
            part = part_of(problem, rank, True, world.world_size)
            new = heaps.rows(rank, "new_residual") if replicate else mine.new_residual
            if not gather:
                normed.check(mine.output, new, what, part)
                continue
            if normed.with_residual:
                assert_same(new.flatten(), normed.new_residual[slice(None) if replicate else part].flatten(), what)
            name = "source" if in_place else "output"
            if quantize:
                scales = world.tensor(rank, heaps.offsets["scales"], normed.rows, torch.float32)
                normed.check_float8(heaps.rows(rank, name, torch.float8_e4m3fn), scales, what)
            else:
                normed.check(heaps.rows(rank, name), None, what)

    return [kernel] * world.world_size, given, verify


def direct_shape(rows: int, world_size: int, max_ctas: int, batch: int = 1) -> RowLaunch:
    grid = max(1, min(select_norm.part_rows(rows, world_size), max_ctas))
    return RowLaunch(form=Form.direct, grid=grid, threads=512, unroll=2 if batch == 1 else 1, rows=batch)


@pytest.mark.parametrize(
    ("world_size", "variant"),
    [(size, variant) for size in (1, *WORLDS) for variant in VARIANTS if size in (2, 3, 8) or variant == "replicate"],
)
def test_direct_norm(world_size: int, variant: str) -> None:
    world, dtype = world_of(world_size), DTYPE_OF[world_size]
    for seed, (rows, hidden) in enumerate([(1, 8), (3, 4096), (2 * world_size, 64), (33, 1008), (7, 7), (64, 2880)]):
        problem = Problem(dtype, rows, hidden, world_size, seed, variant != "no_residual", with_bias=True)
        aligned = select_norm.are_aligned(hidden, dtype)
        for max_ctas in (1, 16) if aligned or world_size == 2 else ():
            direct(world, problem, direct_shape(rows, world_size, max_ctas), variant, gap=[0, 16, 32][seed % 3])
        if aligned and world_size == 2 and variant in ("gather", "replicate"):
            direct(world, problem, direct_shape(rows, world_size, 4, batch=2), variant, gap=0)


@pytest.mark.parametrize("form", list(Form), ids=lambda f: f.name)
def test_a_rank_that_does_not_come(form: Form) -> None:
    from symmcomm.kernels.gpu import norm_instances

    world = LocalWorld(2, 8 << 20, timeout_s=0.2)
    problem = Problem(DType.bfloat16, 2, 8192, 2, with_bias=True)
    mine = Tensors.create(problem)
    if form is Form.direct:
        shape = direct_shape(2, 2, 16)
        kernel: object = norm_instances.direct_norm(shape, problem.dtype, 2, world.arch_number, aligned=True, bias=True)
        others = {"source": world.data, "output": world.data + (1 << 20)}
        given: tuple[object, ...] = (0, mine.arguments(**others), shape.grid)
    else:
        shape = (lamport_shapes(world, 2) if form is Form.lamport else staged_shapes(world, 2, problem.dtype))[0]
        kernel = norm_instances.exchange_norm(shape, problem.dtype, 2, world.arch_number, aligned=True, bias=True)
        given = (mine.arguments(), shape.grid)
    world.launch(compiled(world, kernel), [given], ranks=[0])
    record = world.record(0)
    assert record is not None
    assert (record.rank, record.peer) == (0, 1)
    assert record.phase == (Phase.data if form is Form.lamport else Phase.enter)
    world.launch(compiled(world, kernel), [given], ranks=[0])  # barred: it returns at once
