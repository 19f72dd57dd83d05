"""All-reduce and reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmcomm.collectives.arguments import check_rank, check_tensor
from symmcomm.collectives.call import Kind, encode, parse_reduction
from symmcomm.kernels.cpu.reduce import reduction

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


def prepare(self: Communicator, kind: Kind, dtype: torch.dtype, op: object, root: int = -1) -> tuple[int, int, int]:
    """(call word, itemsize, address of the reduction) of a reducing call, compiled on its first use."""
    own_dtype, own_op = parse_reduction(dtype, op)
    prepared = encode(kind, dtype, own_op, root), own_dtype.itemsize, reduction(own_dtype, own_op)
    self.prepared[kind, dtype, op, root] = prepared
    return prepared


def all_reduce(self: Communicator, tensor: torch.Tensor, op: object = "sum") -> None:
    """Replaces ``tensor`` on every rank by the reduction of all ranks' tensors. The same bits on every rank.

    Symmetric tensors (``Communicator.empty``) are reduced in place; others go through staging buffers in chunks.

    Args:
        tensor: contiguous CPU tensor, any shape, the same element count and dtype on all ranks.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"prod"``, for integers and bool ``"band"``, ``"bor"``,
            ``"bxor"``; or a ``torch.distributed.ReduceOp``. Floats of 16 and 8 bits accumulate in float32, in rank
            order.

    Raises:
        ArgumentError, DTypeError: on the calling rank. MismatchError: on all ranks. PeerError: a rank did not come.
    """
    try:
        call, itemsize, function = self.prepared[Kind.all_reduce, tensor.dtype, op, -1]
    except (KeyError, AttributeError, TypeError):
        check_tensor(tensor, "tensor")
        call, itemsize, function = prepare(self, Kind.all_reduce, tensor.dtype, op)
    if not (tensor.is_contiguous() and tensor.is_cpu and isinstance(tensor, torch.Tensor)):
        check_tensor(tensor, "tensor")
    address = tensor.data_ptr()
    source = address - self.heap_address
    if not 0 <= source < self.heap_bytes:
        source = -1
    status = self.all_reduce_entry(self.ctx, call, address, tensor.numel(), itemsize, source, function, -1)
    if status:
        self.fail(status)


def reduce(self: Communicator, tensor: torch.Tensor, dst: int, op: object = "sum") -> None:
    """As ``all_reduce``, but only rank ``dst`` gets the result; the other ranks' tensors keep their values."""
    check_tensor(tensor, "tensor")
    check_rank(self, dst, "dst")
    prepared = self.prepared.get((Kind.reduce, tensor.dtype, op, dst))
    call, itemsize, function = prepared or prepare(self, Kind.reduce, tensor.dtype, op, dst)
    address, source = self.locate(tensor)
    status = self.kernels.all_reduce(self.ctx, call, address, tensor.numel(), itemsize, source, function, dst)
    if status:
        self.fail(status)
