"""All-reduce and reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from symmcomm.collectives.arguments import check_rank, check_tensor, gpu_of
from symmcomm.collectives.call import Kind, encode, parse_reduction
from symmcomm.kernels.cpu.reduce import reduction

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


def all_reduce(self: Communicator, tensor: torch.Tensor, op: object = "sum") -> None:
    """Replaces ``tensor`` on every rank by the reduction of all ranks' tensors. The same bits on every rank.

    Symmetric tensors (``Communicator.empty``) are reduced in place; others go through staging buffers in chunks.

    Args:
        tensor: contiguous, any shape, the same element count and dtype on all ranks.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"prod"``, for integers and bool ``"band"``, ``"bor"``,
            ``"bxor"``; or a ``torch.distributed.ReduceOp``. Floats of 16 and 8 bits accumulate in float32, in rank
            order.

    Raises:
        ArgumentError, DTypeError: on the calling rank. MismatchError: on all ranks. PeerError: a rank did not come.
    """
    try:
        block = self.all_reductions[tensor.dtype, op]
        fit = tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg()
    except (AttributeError, KeyError, TypeError, RuntimeError):
        fit = False
    if not fit:
        if (gpu := gpu_of(self, tensor, "tensor")) is not None:
            return gpu.all_reduce(tensor, op)
        check_tensor(tensor, "tensor")
        block = prepare(self, Kind.all_reduce, tensor.dtype, op)
        self.all_reductions[tensor.dtype, op] = block
    status = self.all_reduce_entry(self.ctx, block, tensor.data_ptr(), tensor.numel())
    if status:
        self.fail(status)


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
