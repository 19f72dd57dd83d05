"""All-reduce: each rank ends with ``x[0] ∘ x[1] ∘ … ∘ x[world_size - 1]``, in that order and with the same bits.

**LL**, for small tensors: see ``all_reduce_ll``.

**Two-shot** (large; symmetric, at the same offset on all ranks). Barrier; rank r reduces slice r of all tensors and
writes it into slice r of all tensors; barrier. Nobody but rank r touches slice r between the two, and one thread reads
a vector from everywhere before it writes it; so it works in place. The second barrier ends the reading and makes the
results visible: a rank's kernel is done when all its channels have passed. With ``multimem`` the switch reduces and
distributes; the order of its sum is its own, but one rank fetches each element, so the bits still agree.

Large ordinary tensors are copied into symmetric memory first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from symmcomm.kernels.gpu.all_gather import first_unit, num_units
from symmcomm.kernels.gpu.all_reduce_ll import slice_bytes
from symmcomm.kernels.gpu.barrier import sync
from symmcomm.kernels.gpu.context import Context, begin, block, end
from symmcomm.kernels.gpu.copy import clip
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.reduce import Addresses, reduce_bytes
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout, Phase


@dataclass(frozen=True, kw_only=True)
class AllReduceTwoShot:
    """The two-shot kernel. Attributes: ``threads`` a CTA, ``vectors`` a thread has in flight (of each rank's tensor),
    ``multimem`` whether the switch reduces; then ``multicast_base`` must be one."""

    dtype: DType
    op: Op
    world_size: int
    arch: int
    threads: int
    vectors: int
    multimem: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, offset: Int64, count: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``offset``: of ``count`` elements from the start of each rank's heap."""
        kernel = self.kernel(base, stride, rank, multicast_base, offset, count)
        kernel.launch(grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, offset: Int64, count: Int64
    ) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        in_order, epoch = begin(ctx, block())
        if in_order:
            if sync(ctx, block(), epoch + 1, Phase.enter, True):
                num_bytes = count * self.dtype.itemsize
                per_rank = slice_bytes(num_bytes, self.world_size)
                at = per_rank * rank
                tensors = [ctx.peer_address(ctx.neighbour(hop), offset + at) for hop in range(self.world_size)]
                where = Addresses(
                    sources=tuple(ctx.peer_address(peer, offset + at) for peer in range(self.world_size)),
                    targets=tuple(tensors),
                    multicast_source=multicast_base + offset + at if self.multimem else None,
                    multicast_target=multicast_base + offset + at if self.multimem else None,
                )
                reduction = Reduction(self.dtype, self.op, self.world_size, self.arch)
                first, step = first_unit(self.threads), num_units(self.threads)
                reduce_bytes(reduction, where, clip(num_bytes - at, per_rank), first, step, self.vectors)
                sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)
