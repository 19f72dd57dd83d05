"""What ``gpu_norm.py`` measures: fused norms, norms alone, and the separate steps, each with a check of its result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import Call, Rank, capability, on_stream
from torch import Tensor

from symmcomm.kernels.gpu import norm_instances
from symmcomm.kernels.gpu.compile import compiled
from symmcomm.kernels.gpu.norm import QKNormArguments
from symmcomm.kernels.gpu.norm_row import NormArguments
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout
from symmcomm.schedule.select_norm import Form, RowLaunch

EPS = 1e-5
BF16 = torch.bfloat16


def rms_norm(values: Tensor, weight: Tensor) -> Tensor:
    """In float32."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(values.dtype)


def are_close(ours: Tensor, wanted: Tensor, rounded: float = 0.0) -> bool:
    """Within a step of bfloat16, and ``rounded`` beside: of what was rounded before the norm."""
    return torch.allclose(ours.float(), wanted.float(), rtol=2**-7, atol=2**-13 + rounded)


def add_and_norm(total: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What follows an all-reduce when nothing is fused."""
    new = total + residual
    return rms_norm(new, weight), new


@cache
def compiled_add_and_norm() -> Callable[..., tuple[Tensor, Tensor]]:
    """By torch.compile, once for any number of rows from two on."""
    made: Callable[..., tuple[Tensor, Tensor]] = torch.compile(add_and_norm)
    return made


@dataclass
class Problem:
    """Tokens to be reduced and normed, bf16, on one rank; ``sources`` what the other ranks put in, too."""

    rank: Rank
    tokens: int
    hidden: int
    sources: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device, size = self.rank.heap.device, self.rank.world_size
        generator = torch.Generator(device).manual_seed(self.tokens + self.hidden)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(BF16)

        self.sources = [normal(self.tokens, self.hidden) for _ in range(size)]
        self.residual, self.weight = normal(self.tokens, self.hidden), normal(self.hidden)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output of float32 values, rounded at the end; the new residual of the separate steps."""
        total = self.sources[0].float()
        for source in self.sources[1:]:
            total = total + source.float()
        output = rms_norm(total + self.residual.float(), self.weight).to(BF16)
        return output, total.to(BF16) + self.residual

    def part(self) -> slice:
        first, num = select_norm.slice_rows(self.tokens, self.rank.world_size, self.rank.rank)
        return slice(first, first + num)


@dataclass
class Case:
    """A call; its tensors; and what ``fill`` puts in before it."""

    call: Call
    source: Tensor
    output: Tensor
    new_residual: Tensor
    residual: Tensor
    rounds_as_we_do: bool = True

    def rows_of(self, problem: Problem) -> slice:
        """That this rank has of the residual."""
        return slice(None) if len(self.residual) == problem.tokens else problem.part()

    def came_right(self, problem: Problem) -> bool:
        """Whether the call has left what it must; peers round in between."""
        output, new = problem.expected()
        rows, part = slice(None) if len(self.output) == problem.tokens else problem.part(), self.rows_of(problem)
        right = are_close(self.output, output[rows], 0.0 if self.rounds_as_we_do else 2**-4)
        if self.rounds_as_we_do:
            return right and torch.equal(self.new_residual, new[part])
        return right and are_close(self.new_residual, new[part], 2**-4)

    def is_right(self, problem: Problem, meet: Callable[[], None]) -> bool:
        """One call, compared. Collective."""
        self.source.copy_(problem.sources[problem.rank.rank])
        self.residual.copy_(problem.residual[self.rows_of(problem)])
        torch.cuda.synchronize()
        meet()
        self.call()
        torch.cuda.synchronize()
        right = self.came_right(problem)
        meet()
        for tensor in (self.source, self.residual):
            tensor.zero_()
        torch.cuda.synchronize()
        meet()
        return right


def arguments(
    problem: Problem, source: int, residual: int, new_residual: int, output: int, weight: Tensor
) -> NormArguments:
    """Of dense rows; integers are addresses or offsets."""
    pitch: Any = problem.hidden * 2
    given: list[Any] = [source, pitch, residual, pitch, new_residual, pitch, output, pitch, 0, weight.data_ptr(), 0]
    return NormArguments(*given, problem.tokens, problem.hidden, EPS, 0.0)  # type: ignore[arg-type]


def fused(problem: Problem, shape: RowLaunch, pdl: bool = False, scatter: bool = False) -> Case:
    """All-reduce and norm (or with ``scatter`` reduce-scatter and norm) of ordinary tensors; the residual in place."""
    rank, (arch, number) = problem.rank, capability()
    source = torch.zeros_like(problem.sources[0])
    residual = torch.zeros_like(problem.residual[problem.part()] if scatter else problem.residual)
    output, weight = torch.zeros_like(residual), problem.weight.clone()
    kernel = norm_instances.exchange_norm(
        shape, DType.bfloat16, rank.world_size, number, aligned=True, scatter=scatter, pdl=pdl
    )
    tensors = (source, residual, residual, output)
    given: Any = arguments(problem, *[t.data_ptr() for t in tensors], weight)
    function: Any = compiled(kernel, arch)
    call = on_stream(function, rank.base, rank.stride, rank.rank, given, shape.grid, keep=(*tensors, weight))
    return Case(call, source, output, residual, residual)


def direct(problem: Problem, shape: RowLaunch, start: int = 0) -> Case:
    """The kernel on symmetric memory: the output goes over the source, ``start`` bytes into the heap; the residual is
    sharded."""
    rank, (arch, number) = problem.rank, capability()
    num_bytes = problem.tokens * problem.hidden * 2
    offset: Any = rank.data + start
    place = rank.heap[offset : offset + num_bytes].view(BF16).view(problem.tokens, problem.hidden)
    weight = problem.weight.clone()
    residual = torch.zeros_like(problem.residual[problem.part()])
    kernel = norm_instances.direct_norm(shape, DType.bfloat16, rank.world_size, number, aligned=True)
    given: Any = arguments(problem, offset, residual.data_ptr(), residual.data_ptr(), offset, weight)
    function: Any = compiled(kernel, arch)
    call = on_stream(function, rank.base, rank.stride, rank.rank, 0, given, shape.grid, keep=(residual, weight))
    return Case(call, place, place, residual, residual)


def separate(problem: Problem, compile_: bool) -> Case:
    """NCCL's all-reduce, then add and norm."""
    source, residual = torch.zeros_like(problem.sources[0]), torch.zeros_like(problem.residual)
    output, new, weight = torch.zeros_like(source), torch.zeros_like(source), problem.weight.clone()
    function = compiled_add_and_norm() if compile_ else add_and_norm
    if compile_ and problem.tokens > 1:
        for tensor in (source, residual):
            torch._dynamo.mark_dynamic(tensor, 0)  # type: ignore[attr-defined]
    found: list[Tensor] = [output, new]

    def call() -> None:
        dist.all_reduce(source)
        found[:] = function(source, residual, weight)

    case = Case(call, source, output, new, residual, rounds_as_we_do=False)

    def call_and_keep() -> None:
        call()
        case.output, case.new_residual = found

    case.call = call_and_keep
    return case


class FlashInfer:
    """flashinfer's trtllm all-reduce with norm. Its workspace is torch's symmetric memory, whose multicast is off by
    the variable of ``FORBID_MULTICAST``; its other back ends need multicast, and are not called."""

    def __init__(self, rank: Rank, most_tokens: int, hidden: int) -> None:
        import flashinfer.comm.trtllm_ar as trtllm

        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        self.module, self.most_tokens = trtllm, most_tokens
        self.kept = trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank.rank, rank.world_size, most_tokens, hidden, group=dist.group.WORLD
        )

    def case(self, problem: Problem, oneshot: bool, pdl: bool) -> Case:
        """One of its two algorithms; float32 sums, which are rounded once."""
        source, residual = torch.zeros_like(problem.sources[0]), torch.zeros_like(problem.residual)
        output, new, weight = torch.zeros_like(source), torch.zeros_like(source), problem.weight.clone()
        call = partial(
            self.module.trtllm_allreduce_fusion, allreduce_in=source, world_size=problem.rank.world_size,
            world_rank=problem.rank.rank, token_num=problem.tokens, hidden_dim=problem.hidden,
            workspace_ptrs=self.kept[1], launch_with_pdl=pdl, trigger_completion_at_end=False, fp32_acc=True,
            pattern_code=self.module.AllReduceFusionPattern.kARResidualRMSNorm, use_oneshot=oneshot,
            allreduce_out=None, residual_in=residual, residual_out=new, norm_out=output, quant_out=None,
            scale_out=None, rms_gamma=weight, rms_eps=EPS, scale_factor=None, layout_code=None,
        )  # fmt: skip
        return Case(call, source, output, new, residual, rounds_as_we_do=False)


def norm_alone(
    rows: int, hidden: int, shape: RowLaunch, source: Tensor, output: Tensor, weight: Tensor, pdl: bool = False
) -> Call:
    """RMSNorm of dense bf16 rows."""
    arch, number = capability()
    kernel = norm_instances.rms_norm(shape, DType.bfloat16, number, aligned=True, pdl=pdl)
    pitch: Any = hidden * 2
    given: list[Any] = [source.data_ptr(), pitch, 0, 0, 0, 0, output.data_ptr(), pitch, 0, weight.data_ptr(), 0]
    whole: Any = NormArguments(*given, rows, hidden, EPS, 0.0)  # type: ignore[arg-type]
    function: Any = compiled(kernel, arch)
    return on_stream(function, whole, shape.grid, keep=(source, output, weight))


def qk_norm(
    query: Tensor, key: Tensor, weight: Tensor, outputs: tuple[Tensor, Tensor], num_sms: int, **changes: int
) -> Call:
    """QK-norm of dense ``(tokens, heads, head_dim)``, as it is chosen but for some attributes of the kernel."""
    (arch, number), head_dim = capability(), query.shape[2]
    shape = select_norm.qk_norm_shape(query.shape[0], query.shape[1] + key.shape[1], head_dim, DType.bfloat16, num_sms)
    kernel = norm_instances.qk_norm(shape, DType.bfloat16, head_dim, number, aligned=True)
    kernel = replace(kernel, **changes)  # type: ignore[arg-type]
    places: list[Any] = []
    for tensor in (query, key, *outputs):
        places += [tensor.data_ptr(), tensor.stride(0) * 2, head_dim * 2]
    weights: list[Any] = [weight.data_ptr(), weight.data_ptr()]
    counts: list[Any] = [query.shape[0], query.shape[1], key.shape[1], EPS, 0.0]
    function: Any = compiled(kernel, arch)
    given: Any = QKNormArguments(*places, *weights, *counts)
    return on_stream(function, given, keep=(query, key, weight, *outputs))


def shapes_to_try(tokens: int, hidden: int, world_size: int, num_sms: int) -> list[RowLaunch]:
    """Lamport and staged shapes that could be the best."""
    found: list[RowLaunch] = []
    vectors, layout = hidden * 2 // 16, Layout.create(world_size)
    for cluster in (1, 2, 4, 8):
        for unroll in (1, 2, 4):
            threads = vectors // unroll // cluster
            fits = 64 <= threads <= 1024 and threads * unroll <= layout.lamport_slot_bytes // 16
            if fits and tokens * cluster <= num_sms:
                found.append(
                    RowLaunch(form=Form.lamport, grid=tokens * cluster, threads=threads, unroll=unroll, cluster=cluster)
                )
    for unroll, rows, pieces in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 2, 1), (1, 1, 2)):
        threads = vectors // (unroll * pieces)
        fits = threads * rows <= 1024 and threads * rows * unroll <= layout.staging_slot_bytes // 16
        for grid in (64, 96, 128) if fits and tokens >= 64 else ():
            if rows == 1 or tokens >= rows * grid:
                grid = min(grid, -(-tokens // rows))
                found.append(
                    RowLaunch(form=Form.staged, grid=grid, threads=threads, unroll=unroll, rows=rows, pieces=pieces)
                )
    return list(dict.fromkeys(found))


def shape_name(shape: RowLaunch) -> str:
    kind = shape.form.name if shape.form else "norm"
    counts = (("k", shape.cluster), ("r", shape.rows), ("p", shape.pieces))
    more = "".join(f" {letter}{count}" for letter, count in counts if count > 1)
    return f"{kind} {shape.grid}x{shape.threads} u{shape.unroll}{more}"
