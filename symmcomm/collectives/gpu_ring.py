"""Reduce-scatter and all-reduce of GPU tensors by ring schedules, or by a schedule of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from symmcomm.collectives.call import Kind, parse_reduction
from symmcomm.collectives.ring import checked_plan
from symmcomm.errors import ArgumentError, PlanError
from symmcomm.kernels.gpu.ring import Ring
from symmcomm.memory.cuda_driver import capturing
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.ring_gpu import pack, ring_shape

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives

_LINE_BYTES = 128  # segments of an all-reduce are whole lines, the last ones shorter or empty


def by_ring(
    gpu: GpuCollectives,
    kind: Kind,
    output: torch.Tensor,
    input: torch.Tensor,
    op: object,
    mode: RingMode | Plan | None,
    num_blocks: int,
) -> bool:
    """Enqueues the call by a plan; ``num_blocks`` is its number of CTAs. False, and nothing done, if the mode is the
    direct exchange. Raises what ``collectives.ring.checked_plan`` does."""
    call = gpu.prepared(_prepare, gpu, kind, *parse_reduction(input.dtype, op), input.numel(), mode, num_blocks)
    if call is _direct:
        return False
    call(output, input)
    return True


def _direct(output: torch.Tensor, input: torch.Tensor) -> None:
    """Stands for the direct exchange."""


def _prepare(
    gpu: GpuCollectives, kind: Kind, dtype: DType, op: Op, total: int, mode: RingMode | Plan | None, num_blocks: int
) -> Callable[..., None]:
    """``total``: elements of the input."""
    found = gpu.ring_tables.get((kind, mode))
    plan = checked_plan(kind, mode, num_blocks, gpu.topology, gpu.world_size) if found is None else found[0]
    if plan is None or total == 0 or gpu.world_size == 1:
        return _direct
    per_line = _LINE_BYTES // dtype.itemsize
    part = total // gpu.world_size
    if plan.gathers:
        part = -(-total // (gpu.world_size * per_line)) * per_line
    shape = ring_shape(plan, part * dtype.itemsize, dtype, op, gpu.num_sms, num_blocks)
    if shape.chunk_bytes == 0 or shape.max_sources > shape.threads:
        raise PlanError(f"{plan.name} needs {plan.num_slots} slots: more than a channel's staging memory has")
    if found is None:
        if capturing():
            raise ArgumentError("a ring's table cannot be uploaded in a capture: make one such call before it")
        found = plan, torch.tensor(pack(plan, gpu.rank), dtype=torch.int32).to(gpu.device)
        gpu.ring_tables[kind, mode] = found
    kernel = Ring(
        dtype=dtype, op=op, world_size=gpu.world_size, arch=gpu.arch_number, shape=replace(shape, grid=1)
    )
    function, run, rows = gpu.compiled(kernel), gpu.run, found[1].data_ptr()
    pitch, item = part * dtype.itemsize, dtype.itemsize
    sizes = (total * item, pitch, pitch if plan.gathers else 0, shape.grid)

    def call(output: torch.Tensor, input: torch.Tensor) -> None:
        run(function, rows, input.data_ptr(), output.data_ptr(), *sizes)

    return call
