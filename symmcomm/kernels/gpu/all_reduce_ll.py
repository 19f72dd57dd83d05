"""LL two-shot: an all-reduce of tensors, symmetric or not, in cells that carry their own flag (see ``cells``).

Cells of slice p go to rank p, which reduces them and sends the result to all, in cells of the next epoch. Those go
where cells of two epochs before were, and their receiver has answered at this one.

In one shot (every rank sends its whole tensor to all): ``reduce_scatter.ReduceScatterLL`` with parts that are all
``same``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu import cells as ll
from symmcomm.kernels.gpu.context import begin, block, end, thread
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.signatures import ReducingTensors


@dataclass(frozen=True, kw_only=True)
class AllReduceLLTwoShot(ReducingTensors):
    """The kernel. ``source`` and ``result``: ``count`` elements, which may be the same.

    Attributes: ``cells`` a thread; a CTA's cells must fit ``ll_slot_bytes``. Launch with as many CTAs as a slice
    (``slice_bytes``) has parts of ``cells`` rows."""

    cells: int

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        cells = ll.Cells(self.threads, self.cells, self.dtype.itemsize)
        slices = Slices(self.world_size, source, result, count * self.dtype.itemsize)
        first, step = cells.first_byte(), cells.row_bytes
        own = [
            [slices.load(ctx.neighbour(hop), first + k * step, cells) for hop in range(self.world_size)]
            for k in range(self.cells)
        ]
        in_order, epoch = begin(ctx, block())
        if in_order:
            ll.remind(ctx, epoch)
            got, arrived = ll.exchange(ctx, cells, epoch + 1, first, slices.num_bytes, own)
            if arrived:
                self._distribute(ctx, cells, slices, epoch + 2, [words[0] for words in own], got)
            end(ctx, block(), epoch + 2)

    @cute.jit
    def _distribute(
        self, ctx: cutlass.Constexpr, cells: cutlass.Constexpr, slices: cutlass.Constexpr, epoch: Uint32,
        own: cutlass.Constexpr, got: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """Reduces this rank's cells, sends them to all, and stores those of all slices."""
        reduction, first, step = self.reduction, cells.first_byte(), cells.row_bytes
        reduced = [reduction.reduce(ll.in_rank_order(ctx, cells, own[k], got, k)) for k in range(self.cells)]
        for k in cutlass.range_constexpr(self.cells):
            if first + k * step < slices.num_bytes:
                for hop in cutlass.range_constexpr(1, self.world_size):
                    ll.send(ctx, epoch, ctx.neighbour(hop), k * self.threads + thread(), reduced[k])
                slices.store(ctx.rank, first + k * step, cells, reduced[k])
        results, arrived = ll.receive(ctx, cells, epoch, first, slices.num_bytes, None)
        if arrived:
            for index, peer in enumerate(ctx.senders):
                for k in cutlass.range_constexpr(self.cells):
                    if peer != ctx.rank:
                        slices.store(peer, first + k * step, cells, ll.words_of(cells, results, index, k))


@dataclass(frozen=True)
class Slices:
    """The slices of an all-reduce from ``source`` to ``result``, of ``total`` bytes."""

    world_size: int
    source: Any
    result: Any
    total: Any

    @property
    def num_bytes(self) -> Any:
        """Of a slice, the last ones excepted."""
        return slice_bytes(self.total, self.world_size)

    def load(self, index: Any, at: Any, cells: ll.Cells) -> list[Any]:
        """A cell's words at that byte of a slice."""
        return ll.load_words(self.source, *self._place(index, at), cells)

    def store(self, index: Any, at: Any, cells: ll.Cells, words: list[Any]) -> None:
        """Stores a cell's words at that byte of a slice, as far as the slice goes."""
        ll.store_words(self.result, *self._place(index, at), cells, words)

    def _place(self, index: Any, at: Any) -> tuple[Any, Any]:
        """Where it is in the tensor, and where the slice ends there."""
        start, num_bytes = Int64(index) * self.num_bytes, self.num_bytes
        stop = start + num_bytes
        return start + at, pick(stop < self.total, stop, self.total)


def slice_bytes(num_bytes: Any, world_size: int) -> Any:
    """Bytes of a rank's slice, the last ones' excepted: a multiple of 16."""
    return (num_bytes + (16 * world_size - 1)) // (16 * world_size) * 16
