"""All-reduce of small tensors, symmetric or not, in cells that carry their own flag (see ``cells``).

**LL**: every rank sends all of its tensor to all, and reduces what it gets.

**LL two-shot**: cells of slice p go to rank p, which reduces them and sends the result to all, in cells of the next
epoch. Those go where cells of two epochs before were, and their receiver has answered at this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu import cells as ll
from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class AllReduceLL:
    """The LL kernel. Attributes: ``threads`` a CTA, ``cells`` a thread; a CTA's cells must fit ``ll_slot_bytes``.
    Launch with ``grid`` = ⌈bytes / 8 / (threads · cells)⌉ CTAs."""

    dtype: DType
    op: Op
    world_size: int
    arch: int
    threads: int
    cells: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source`` and ``result``: addresses of ``count`` elements, which may be the same."""
        kernel = self.kernel(base, stride, rank, source, result, count)
        kernel.launch(grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        reduction = Reduction(self.dtype, self.op, self.world_size, self.arch)
        itemsize, num_bytes = self.dtype.itemsize, count * self.dtype.itemsize
        first, step = ll.first_byte(self.threads, self.cells), self.threads * ll.PAYLOAD_BYTES
        # In flight together with the loads of begin().
        own = [ll.load_payload(source, first + k * step, num_bytes, itemsize) for k in range(self.cells)]
        in_order, epoch = begin(ctx, block())
        epoch += 1
        if in_order:
            for k in cutlass.range_constexpr(self.cells):
                if first + k * step < num_bytes:
                    for hop in cutlass.range_constexpr(1, self.world_size):
                        ll.send(ctx, epoch, ctx.neighbour(hop), k * self.threads + thread(), own[k])
            got, arrived = ll.receive(ctx, epoch, first, num_bytes, None, self.threads, self.cells)
            if arrived:
                for k in cutlass.range_constexpr(self.cells):
                    ordered = ll.in_rank_order(rank, own[k], got, k, self.cells, self.world_size)
                    ll.store_payload(result, first + k * step, num_bytes, itemsize, reduction.reduce(ordered))
            end(ctx, block(), epoch)


@dataclass(frozen=True, kw_only=True)
class AllReduceLLTwoShot:
    """The LL two-shot kernel. Attributes as of ``AllReduceLL``. Launch with ``grid`` = ⌈``slice_bytes`` / 8 /
    (threads · cells)⌉ CTAs."""

    dtype: DType
    op: Op
    world_size: int
    arch: int
    threads: int
    cells: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source`` and ``result``: addresses of ``count`` elements, which may be the same."""
        kernel = self.kernel(base, stride, rank, source, result, count)
        kernel.launch(grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        num_bytes, per_rank = count * self.dtype.itemsize, slice_bytes(count * self.dtype.itemsize, self.world_size)
        first, step = ll.first_byte(self.threads, self.cells), self.threads * ll.PAYLOAD_BYTES
        own = [self._read(ctx, source, per_rank, first + k * step, num_bytes) for k in range(self.cells)]
        in_order, epoch = begin(ctx, block())
        if in_order:
            for k in cutlass.range_constexpr(self.cells):
                if first + k * step < per_rank:
                    for hop in cutlass.range_constexpr(1, self.world_size):
                        ll.send(ctx, epoch + 1, ctx.neighbour(hop), k * self.threads + thread(), own[k][hop])
            got, arrived = ll.receive(ctx, epoch + 1, first, per_rank, None, self.threads, self.cells)
            if arrived:
                self._distribute(ctx, epoch + 2, [words[0] for words in own], got, result, num_bytes, per_rank)
            end(ctx, block(), epoch + 2)

    def _read(self, ctx: Context, source: Any, per_rank: Any, at: Any, num_bytes: Any) -> list[Any]:
        """The words at that byte of this rank's slice and of those of the ranks after it."""
        starts = [Int64(ctx.neighbour(hop)) * per_rank for hop in range(self.world_size)]
        return [ll.load_payload(source, start + at, num_bytes, self.dtype.itemsize) for start in starts]

    @cute.jit
    def _distribute(
        self, ctx: cutlass.Constexpr, epoch: Uint32, own: cutlass.Constexpr, got: cutlass.Constexpr, result: Int64,
        num_bytes: Int64, per_rank: Int64,
    ) -> None:  # fmt: skip
        """Reduces this rank's cells, sends them to all, and stores those of all slices."""
        reduction = Reduction(self.dtype, self.op, self.world_size, self.arch)
        first, step = ll.first_byte(self.threads, self.cells), self.threads * ll.PAYLOAD_BYTES
        itemsize, world_size = self.dtype.itemsize, self.world_size
        reduced = [
            reduction.reduce(ll.in_rank_order(ctx.rank, own[k], got, k, self.cells, world_size))
            for k in range(self.cells)
        ]
        for k in cutlass.range_constexpr(self.cells):
            if first + k * step < per_rank:
                for hop in cutlass.range_constexpr(1, world_size):
                    ll.send(ctx, epoch, ctx.neighbour(hop), k * self.threads + thread(), reduced[k])
                ll.store_payload(result, ctx.rank * per_rank + first + k * step, num_bytes, itemsize, reduced[k])
        results, arrived = ll.receive(ctx, epoch, first, per_rank, None, self.threads, self.cells)
        if arrived:
            for index, peer in enumerate(ll.senders(ctx)):
                for k in cutlass.range_constexpr(self.cells):
                    if peer != ctx.rank and first + k * step < per_rank:
                        words = ll.payload(results, index, k, self.cells)
                        ll.store_payload(result, peer * per_rank + first + k * step, num_bytes, itemsize, words)


def slice_bytes(num_bytes: Any, world_size: int) -> Any:
    """Bytes of a rank's slice, the last ones' excepted: a multiple of 16."""
    return (num_bytes + (16 * world_size - 1)) // (16 * world_size) * 16
