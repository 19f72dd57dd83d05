"""Reduce-scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmcomm.collectives.all_reduce import prepare
from symmcomm.collectives.arguments import check_pair
from symmcomm.collectives.call import Kind

if TYPE_CHECKING:
    import torch

    from symmcomm.communicator import Communicator


def reduce_scatter_tensor(self: Communicator, output: torch.Tensor, input: torch.Tensor, op: object = "sum") -> None:
    """Leaves part ``rank`` of the reduction of all inputs in ``output``.

    Args:
        output: contiguous, N elements. It may be part ``rank`` of ``input``.
        input: contiguous, world_size · N elements; if symmetric, peers read it in place.
        op: as for ``all_reduce``.
    """
    check_pair(output, input, 1, self.world_size)
    prepared = self.prepared.get((Kind.reduce_scatter_tensor, input.dtype, op, -1))
    call, itemsize, function = prepared or prepare(self, Kind.reduce_scatter_tensor, input.dtype, op)
    address, source = self.locate(input)
    count = output.numel()
    status = self.kernels.reduce_scatter(self.ctx, call, output.data_ptr(), address, count, itemsize, source, function)
    if status:
        self.fail(status)
