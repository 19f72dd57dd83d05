"""All-reduce and reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from symmcomm.checks import check_rank
from symmcomm.collectives.arguments import check_tensor, gpu_of
from symmcomm.collectives.call import Kind, encode, parse_reduction
from symmcomm.collectives.ring import ring_block
from symmcomm.kernels.cpu.reduce import reduction
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.plan import Plan

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


def prepared(self: Communicator, kind: Kind, dtype: torch.dtype, op: object, root: int = -1) -> int:
    """What ``prepare`` gave for the same call before, or gives now."""
    try:
        return self.reductions[kind, dtype, op, root]
    except (KeyError, TypeError):  # new, or an op that cannot even be looked up
        return prepare(self, kind, dtype, op, root)


def prepare(self: Communicator, kind: Kind, dtype: torch.dtype, op: object, root: int = -1) -> int:
    """Address of what the kernels of a reducing call are told: call word, itemsize, compiled reduction, root. Compiles
    on the first use of a (dtype, op), and is kept in ``reductions``."""
    own_dtype, own_op = parse_reduction(dtype, op)
    call, function = encode(kind, dtype, own_op, root), reduction(own_dtype, own_op)
    block = np.array([call, own_dtype.itemsize, function, root], dtype=np.int64)
    self.blocks.append(block)
    address: int = block.ctypes.data
    self.reductions[kind, dtype, op, root] = address
    return address


def all_reduce(
    self: Communicator,
    tensor: torch.Tensor,
    op: object = "sum",
    *,
    ring_mode: RingMode | Plan | None = None,
    num_blocks: int = 0,
) -> None:
    """Replaces ``tensor`` on every rank by the reduction of all ranks' tensors. The same bits on every rank.

    Symmetric tensors (``Communicator.empty``) are reduced in place; others go through staging buffers in chunks.

    Args:
        tensor: contiguous, any shape, the same element count and dtype on all ranks.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"prod"``, for integers and bool ``"band"``, ``"bor"``,
            ``"bxor"``; or a ``torch.distributed.ReduceOp``. Floats of 16 and 8 bits accumulate in float32, in rank
            order.
        ring_mode, num_blocks: as for ``reduce_scatter_tensor``: reduce-scatter and all-gather round rings; None and
            All2All are the direct algorithms, which are the default on every topology. A plan must be an all-reduce.

    Raises:
        ArgumentError, DTypeError: on the calling rank. MismatchError: on all ranks. PeerError: a rank did not come.
        TopologyError: there are no such rings. PlanError: the plan is wrong.
    """
    if self.gpu is not None and (gpu := gpu_of(self, tensor, "tensor")) is not None:
        return gpu.all_reduce(tensor, op, ring_mode=ring_mode, num_blocks=num_blocks)
    if (ring_mode is not None or num_blocks) and _by_ring(self, tensor, op, ring_mode, num_blocks):
        return
    try:
        block = self.all_reductions[tensor.dtype, op] if tensor.is_cpu else 0
        fit = block and (address := tensor.data_ptr()) and tensor.is_contiguous() and not tensor.is_neg()
    except (AttributeError, KeyError, TypeError, RuntimeError):
        fit = False
    if not fit:
        gpu_of(self, tensor, "tensor")
        check_tensor(tensor, "tensor")
        block = prepared(self, Kind.all_reduce, tensor.dtype, op)
        self.all_reductions[tensor.dtype, op] = block
        address = tensor.data_ptr()
    status = self.all_reduce_entry(self.ctx, block, address, tensor.numel())
    if status:
        self.fail(status)


def _by_ring(
    self: Communicator, tensor: torch.Tensor, op: object, ring_mode: RingMode | Plan | None, num_blocks: int
) -> bool:
    """All-reduce by a plan. False, and nothing done, if the mode is the direct one."""
    gpu_of(self, tensor, "tensor")
    check_tensor(tensor, "tensor")
    block = ring_block(self, Kind.all_reduce, tensor.dtype, op, ring_mode, num_blocks)
    if not block:
        return False
    address = tensor.data_ptr()
    status = self.kernels.ring(self.ctx, block, address, address, tensor.numel(), 1)
    if status:
        self.fail(status)
    return True


def reduce(self: Communicator, tensor: torch.Tensor, dst: int, op: object = "sum") -> None:
    """As ``all_reduce``, but only rank ``dst`` gets the result; the other ranks' tensors keep their values."""
    if (gpu := gpu_of(self, tensor, "tensor")) is not None:
        return gpu.reduce(tensor, dst, op)
    check_tensor(tensor, "tensor")
    check_rank(self, dst, "dst")
    block = prepared(self, Kind.reduce, tensor.dtype, op, dst)
    status = self.kernels.all_reduce(self.ctx, block, tensor.data_ptr(), tensor.numel())
    if status:
        self.fail(status)
