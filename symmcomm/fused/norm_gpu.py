"""Runs a norm on a GPU: chooses the kernel, prepares it once for what all ranks know alike, and launches it on torch's
current stream. Nothing is compared between ranks here: arguments must agree, and a tensor be symmetric (as
``collectives.gpu_memory`` counts it) on all ranks or on none.

Rows that a rank norms for all are written at all ranks where outputs are symmetric, by one kernel; else they are
normed into this rank's part of the output and gathered. With ``max_ctas`` no kernel has more CTAs, but for torch's own:
copies, where parts are uneven or outputs lie apart; and but for the reduce-scatter of rows that no kernel here holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from symmcomm.collectives.call import parse_dtype
from symmcomm.collectives.gpu import GpuCollectives
from symmcomm.fused.call import Call, Heads, Task
from symmcomm.kernels.gpu import norm_instances
from symmcomm.kernels.gpu.compile import architecture, compiled
from symmcomm.kernels.gpu.norm import QKNormArguments
from symmcomm.kernels.gpu.norm_row import NormArguments
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import Form, RowLaunch, are_aligned

_MAX_PREPARED = 4096  # kernels kept with their grids; sizes that never come again must not fill the memory
_PDL_FROM = 90
Prepared = tuple[Callable[..., None], int]
"""A compiled kernel and its grid."""
_choose_all_reduce = lru_cache(maxsize=_MAX_PREPARED)(select_norm.choose_all_reduce_norm)
_choose_reduce_scatter = lru_cache(maxsize=_MAX_PREPARED)(select_norm.choose_reduce_scatter_norm)


@lru_cache(maxsize=64)
def _device_of(index: int) -> tuple[str, int, int]:
    """(architecture, its number, SMs) of a GPU."""
    facts = torch.cuda.get_device_properties(index)
    return architecture((facts.major, facts.minor)), 10 * facts.major + facts.minor, facts.multi_processor_count


@lru_cache(maxsize=_MAX_PREPARED)
def _rows_alone(
    rows: int, hidden: int, dtype: DType, index: int, residual: bool, options: tuple[bool, ...]
) -> Prepared:
    (arch, number, num_sms), (aligned, bias, quantize, pdl) = _device_of(index), options
    shape = select_norm.norm_shape(rows, hidden, dtype, num_sms)
    kernel = norm_instances.rms_norm(
        shape, dtype, number, aligned=aligned, residual=residual, bias=bias, quantize=quantize, pdl=pdl
    )
    return compiled(kernel, arch), shape.grid


@lru_cache(maxsize=_MAX_PREPARED)
def _exchange(
    shape: RowLaunch, dtype: DType, world_size: int, index: int, scatter: bool, options: tuple[bool, ...]
) -> Prepared:
    """All-reduce or reduce-scatter and norm, of any tensors."""
    (arch, number, _), (aligned, bias, quantize, pdl) = _device_of(index), options
    kernel = norm_instances.exchange_norm(
        shape, dtype, world_size, number, aligned=aligned, scatter=scatter, bias=bias, quantize=quantize, pdl=pdl
    )
    return compiled(kernel, arch), shape.grid


@lru_cache(maxsize=_MAX_PREPARED)
def _direct(
    rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int, max_ctas: int, index: int,
    parts: tuple[bool, bool, bool], options: tuple[bool, ...],
) -> Prepared:  # fmt: skip
    """The kernel on symmetric memory; ``parts``: reduce, residual, replicate."""
    (arch, number, _), (aligned, bias, quantize, pdl) = _device_of(index), options
    part = select_norm.part_rows(rows, world_size)
    shape = select_norm.direct_shape(part, hidden, dtype, world_size, num_sms, max_ctas)
    kernel = norm_instances.direct_norm(
        shape, dtype, world_size, number, aligned=aligned, reduce=parts[0], residual=parts[1], replicate=parts[2],
        bias=bias, quantize=quantize, pdl=pdl,
    )  # fmt: skip
    return compiled(kernel, arch), shape.grid


def _options(task: Task, index: int, early: bool) -> tuple[bool, ...]:
    """aligned, bias, quantize, pdl (if asked for, and the kernel may start ``early``). An offset is aligned as its
    address is: heaps start at whole pages."""
    itemsize = task.dtype.itemsize
    scale = itemsize if task.scaled else 1  # a vector becomes so much shorter in float8
    aligned = are_aligned(
        task.hidden, parse_dtype(task.dtype), task.input, task.input_pitch, task.residual, task.residual_pitch,
        task.new_residual, task.new_residual_pitch, task.out * scale, task.out_pitch * scale, task.weight, task.bias,
    )  # fmt: skip
    return aligned, task.bias != 0, task.scaled, task.pdl and early and _device_of(index)[1] >= _PDL_FROM


def _may_start_early(gpu: GpuCollectives, shape: RowLaunch, rows: int) -> bool:
    """Whether a kernel with peers may take its place while the last one runs: one that is small, of as many clusters as
    rows, and has a GPU for each rank. Else a CTA that waits could take the place that a peer's kernel needs."""
    return gpu.early and shape.form is Form.lamport and rows * shape.cluster == shape.grid


def _arguments(task: Task) -> NormArguments:
    given: list[Any] = [
        task.input, task.input_pitch, task.residual, task.residual_pitch, task.new_residual, task.new_residual_pitch,
        task.out, task.out_pitch, task.scales, task.weight, task.bias, task.rows, task.hidden, task.eps,
        task.weight_bias,
    ]  # fmt: skip
    return NormArguments(*given)


def norm_rows(call: Call, max_ctas: int | None = None) -> None:
    """Without peers: ``task.rows`` rows."""
    task, index = call.task, call.input.get_device()
    if task.rows == 0:
        return
    has_residual, zeros = task.residual != 0, None
    if task.new_residual and not has_residual:
        zeros = _without_residual(call)
    key = (task.rows, task.hidden, parse_dtype(task.dtype), index, task.residual != 0, _options(task, index, True))
    function, grid = _rows_alone(*key)
    with torch.cuda.device(index):
        function(_arguments(task), min(grid, max_ctas or grid), torch.cuda.current_stream().cuda_stream)
    del zeros


def _without_residual(call: Call) -> torch.Tensor:
    """Has a row of zeros added, so that the sum is kept; returns it, to live until the launch."""
    zeros = torch.zeros(call.task.hidden, dtype=call.dtype, device=call.device)
    call.task.residual, call.task.residual_pitch = zeros.data_ptr(), 0
    return zeros


def all_reduce(gpu: GpuCollectives, call: Call) -> None:
    """All rows on every rank."""
    task = call.task
    if gpu.world_size == 1:
        return norm_rows(call)
    if task.rows == 0:
        return gpu.check()
    places = [_offset(gpu, call, tensor) for tensor in (call.input, call.new_residual, call.out)]
    places += [_offset(gpu, call, call.scales)] if call.scales is not None else []
    facts = (task.rows, task.hidden, parse_dtype(task.dtype), gpu.world_size, gpu.num_sms)
    shape = _choose_all_reduce(*facts, gpu.arch_number, min(places) >= 0, gpu.whole_vectors)
    if shape is None:
        return _norm_then_gather(gpu, call, gpu.num_sms, True, True)
    zeros = _without_residual(call) if task.residual == 0 else None
    options = _options(task, gpu.ordinal, _may_start_early(gpu, shape, task.rows))
    if shape.form is Form.direct:
        task.input, task.new_residual, task.out = places[:3]
        task.scales = places[3] if task.scaled else 0
        function, grid = _direct(*facts, gpu.num_sms, gpu.ordinal, (True, True, True), options)
        gpu.run(function, 0, _arguments(task), grid)
    else:
        function, grid = _exchange(shape, *facts[2:4], gpu.ordinal, False, options)
        gpu.run(function, _arguments(task), grid)
    del zeros


def reduce_scatter(gpu: GpuCollectives, call: Call, max_ctas: int) -> None:
    """This rank's rows."""
    task = call.task
    if gpu.world_size == 1:
        return norm_rows(call)
    if task.rows == 0:
        return gpu.check()
    facts = (task.rows, task.hidden, parse_dtype(task.dtype), gpu.world_size, min(gpu.num_sms, max_ctas))
    shape = _choose_reduce_scatter(*facts, gpu.arch_number, gpu.whole_vectors)
    if shape is None:
        return _reduce_scatter_then_norm(gpu, call, max_ctas)
    zeros = _without_residual(call) if task.residual == 0 else None
    rows = select_norm.part_rows(task.rows, gpu.world_size)
    options = _options(task, gpu.ordinal, _may_start_early(gpu, shape, rows))
    function, grid = _exchange(shape, *facts[2:4], gpu.ordinal, True, options)
    gpu.run(function, _arguments(task), grid)
    del zeros


def _reduce_scatter_then_norm(gpu: GpuCollectives, call: Call, max_ctas: int) -> None:
    """Rows that ``choose_reduce_scatter_norm`` has no kernel for: the sum, rounded, and then its norm. Missing rows of
    the last parts are zeros, so that parts are equal."""
    task, part = call.task, select_norm.part_rows(call.task.rows, gpu.world_size)
    given = call.input.reshape(task.rows, task.hidden).contiguous()
    if task.rows < part * gpu.world_size:
        given = torch.cat([given, given.new_zeros(part * gpu.world_size - task.rows, task.hidden)])
    own = given.new_empty(part, task.hidden)
    gpu.reduce_scatter_tensor(own, given)
    task.input, task.input_pitch = own.data_ptr(), own.stride(0) * own.itemsize
    _norm_own(gpu, call, max_ctas)


def _norm_own(gpu: GpuCollectives, call: Call, max_ctas: int) -> None:
    """This rank's rows, without peers."""
    task = call.task
    rows, (_, task.rows) = task.rows, select_norm.slice_rows(task.rows, gpu.world_size, gpu.rank)
    norm_rows(call, max_ctas)
    task.rows = rows


def gather(gpu: GpuCollectives, call: Call, max_ctas: int, reduces: bool) -> None:
    """All rows on every rank, each normed by its owner: of the sum of all inputs if it ``reduces``, else of this rank's
    own."""
    task = call.task
    if gpu.world_size == 1:
        return norm_rows(call)
    if task.rows == 0:
        return gpu.check()
    source = _offset(gpu, call, call.input) if reduces else task.input
    places = [_offset(gpu, call, tensor) for tensor in (call.out, call.scales) if tensor is not None]
    if min(source, *places) >= 0:
        zeros = _without_residual(call) if task.residual == 0 and task.new_residual else None
        options = _options(task, gpu.ordinal, False)
        facts = (task.rows, task.hidden, parse_dtype(task.dtype), gpu.world_size, gpu.num_sms, max_ctas, gpu.ordinal)
        function, grid = _direct(*facts, (reduces, task.residual != 0, False), options)
        task.input, task.out = source, places[0]
        task.scales = places[1] if task.scaled else 0
        gpu.run(function, 0, _arguments(task), grid)
        del zeros
    else:
        _norm_then_gather(gpu, call, max_ctas, reduces, False)


def _norm_then_gather(gpu: GpuCollectives, call: Call, max_ctas: int, reduces: bool, replicates: bool) -> None:
    """Of ordinary tensors: this rank's rows into its part of the output, then an all-gather. If it ``replicates``, the
    residual is whole, too, and gathered."""
    task, size, rank = call.task, gpu.world_size, gpu.rank
    part = select_norm.part_rows(task.rows, size)
    wholes = [call.out.view(task.rows, task.hidden)] + ([] if call.scales is None else [call.scales.view(-1, 1)])
    wholes += [call.new_residual.view(task.rows, task.hidden)] if replicates else []
    targets = [
        whole if task.rows == part * size and whole.is_contiguous() else whole.new_empty(part * size, whole.shape[1])
        for whole in wholes
    ]
    owns = [target[rank * part : (rank + 1) * part] for target in targets]
    task.out, task.out_pitch = owns[0].data_ptr(), owns[0].stride(0) * owns[0].itemsize
    task.scales = owns[1].data_ptr() if task.scaled else 0
    if replicates:
        task.residual += min(rank * part, task.rows) * task.residual_pitch
        task.new_residual, task.new_residual_pitch = owns[-1].data_ptr(), owns[-1].stride(0) * owns[-1].itemsize
    if reduces:
        reduce_scatter(gpu, call, max_ctas)
    else:
        _norm_own(gpu, call, max_ctas)
    for whole, target, own in zip(wholes, targets, owns, strict=True):
        gpu.all_gather_into_tensor(target.view(torch.uint8), own.view(torch.uint8), max_ctas)
        if target is not whole:
            whole.copy_(target[: task.rows])


def _offset(gpu: GpuCollectives, call: Call, tensor: torch.Tensor) -> int:
    """Heap offset of a tensor that is symmetric on all ranks, else -1."""
    if call.batch_offset >= 0:  # of input and output alike
        return call.batch_offset
    return gpu.symmetric_offset(tensor) if tensor.is_contiguous() else -1


@lru_cache(maxsize=_MAX_PREPARED)
def _heads(
    tokens: int, heads: int, head_dim: int, dtype: DType, index: int, aligned: bool, pdl: bool
) -> Callable[..., None]:
    arch, number, num_sms = _device_of(index)
    shape, pdl = select_norm.qk_norm_shape(tokens, heads, head_dim, dtype, num_sms), pdl and number >= _PDL_FROM
    return compiled(norm_instances.qk_norm(shape, dtype, head_dim, number, aligned=aligned, pdl=pdl), arch)


def qk_norm(q: Heads, k: Heads, pdl: bool = False) -> None:
    """Both in one launch; heads of other sizes than HEAD_DIMS as rows of two."""
    tokens, task = max(q.tokens.num, k.tokens.num), q.task
    if task.hidden not in select_norm.HEAD_DIMS:
        for heads in (q, k):
            _as_rows(heads)
        return
    if tokens == 0:
        return
    places: list[Any] = []
    for heads in (q, k):
        places += [heads.task.input, heads.tokens.pitch, heads.task.input_pitch]
    for heads in (q, k):
        places += [heads.task.out, heads.out_tokens.pitch, heads.task.out_pitch]
    places += [q.task.weight, k.task.weight]
    index, dtype = q.out.get_device(), parse_dtype(task.dtype)
    aligned = are_aligned(task.hidden, dtype, *places)
    function = _heads(tokens, task.rows + k.task.rows, task.hidden, dtype, index, aligned, pdl)
    counts: list[Any] = [tokens, task.rows, k.task.rows, task.eps, task.weight_bias]
    with torch.cuda.device(index):
        function(QKNormArguments(*places, *counts), torch.cuda.current_stream().cuda_stream)


def _as_rows(heads: Heads) -> None:
    """Through contiguous copies."""
    call = Call(heads.source.contiguous(), heads.weight_tensor, None, heads.task.eps, heads.task.weight_bias)
    result = call.add_out(None, call.shape, None)
    norm_rows(call)
    heads.out.copy_(result)
