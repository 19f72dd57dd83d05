"""Reduce-scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmcomm.collectives.all_reduce import prepared
from symmcomm.collectives.arguments import prepare_pair
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
    if prepare_pair(self, Kind.reduce_scatter_tensor, output, input, 1, self.world_size) is None:
        return self.gpu_side.reduce_scatter_tensor(output, input, op)
    block = prepared(self, Kind.reduce_scatter_tensor, input.dtype, op)
    status = self.kernels.reduce_scatter(self.ctx, block, output.data_ptr(), input.data_ptr(), output.numel())
    if status:
        self.fail(status)
