"""Reduce-scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmcomm.collectives.all_reduce import prepared
from symmcomm.collectives.arguments import check_place, prepare_pair
from symmcomm.collectives.call import Kind
from symmcomm.collectives.ring import ring_block
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.plan import Plan

if TYPE_CHECKING:
    import torch

    from symmcomm.communicator import Communicator


def reduce_scatter_tensor(
    self: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    op: object = "sum",
    *,
    ring_mode: RingMode | Plan | None = None,
    num_blocks: int = 0,
) -> None:
    """Leaves part ``rank`` of the reduction of all inputs in ``output``.

    Args:
        output: contiguous, N elements. It may be part ``rank`` of ``input``, else they must lie apart.
        input: contiguous, world_size · N elements; if symmetric, peers read it in place.
        op: as for ``all_reduce``.
        ring_mode: straight from rank to rank, or round which rings; or a reduce-scatter plan (``schedule.plan``). None
            takes what the topology suggests, ``ring_from`` (straight, unless ranks are on several NUMA nodes).
            A ring's sum has another order than the rank order of the direct one; each is the same on every run.
        num_blocks: into how many blocks a ring cuts each part, at least; 0 chooses.
    """
    if prepare_pair(self, Kind.reduce_scatter_tensor, output, input, 1, self.world_size) is None:
        return self.gpu_side.reduce_scatter_tensor(output, input, op, ring_mode=ring_mode, num_blocks=num_blocks)
    source, target, num = input.data_ptr(), output.data_ptr(), output.numel()
    check_place(self, source, target, output.nbytes, "input", "output")
    if ring_mode is None and input.nbytes >= self.ring_from[1]:
        ring_mode = self.ring_from[0]
    if (ring_mode is not None or num_blocks) and (
        block := ring_block(self, Kind.reduce_scatter_tensor, input.dtype, op, ring_mode, num_blocks)
    ):
        status = self.kernels.ring(self.ctx, block, target, source, num, 0)
        if status:
            self.fail(status)
        return
    block = prepared(self, Kind.reduce_scatter_tensor, input.dtype, op)
    status = self.kernels.reduce_scatter(self.ctx, block, target, source, num)
    if status:
        self.fail(status)
