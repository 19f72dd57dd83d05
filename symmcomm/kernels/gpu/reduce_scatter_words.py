"""Reduce-scatter or all-reduce of floats, of any tensors: part p goes to rank p as words that announce themselves (see
``unflagged``), which it reduces with its own, in rank order.

Beside LL cells a quarter less goes over the link; beside the staged kernel nothing is signalled, so nobody waits until
a store has arrived. It takes as many turns as the parts have pieces.

The output may be any part of the input: in each turn a thread has the same place in all parts, and has loaded it from
all of them, as it sends AHEAD turns before, when it writes there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu import unflagged
from symmcomm.kernels.gpu.access import VECTOR_BYTES, load_vectors, store_vectors
from symmcomm.kernels.gpu.cells import remind
from symmcomm.kernels.gpu.context import begin, block, end, thread
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.registers import keep, kept_in, registers
from symmcomm.kernels.gpu.signatures import ReducingTensors


@dataclass(frozen=True, kw_only=True)
class WordsOfParts(unflagged.Job):
    """The job. A turn of all CTAs is a piece of each part."""

    reduction: Reduction
    source: Any
    result: Any
    count: Any

    @property
    def per_vector(self) -> int:
        """Elements."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def num_turns(self) -> Any:
        """Of this CTA, at least one."""
        size, num_vectors = self.threads * self.vectors, Int32((self.count + (self.per_vector - 1)) // self.per_vector)
        pieces = (num_vectors + (size - 1)) // size
        return (pieces - block() + (cute.arch.grid_dim()[0] - 1)) // cute.arch.grid_dim()[0]

    def indices(self, turn: Any) -> list[Any]:
        """The thread's vectors of a part."""
        first = (Int64(turn) * cute.arch.grid_dim()[0] + block()) * (self.threads * self.vectors)
        return [first + (k * self.threads + thread()) for k in range(self.vectors)]

    def live(self, turn: Any) -> list[Any]:
        """See ``unflagged.Job``."""
        return [index * self.per_vector < self.count for index in self.indices(turn)]

    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """See ``unflagged.Job``."""
        size = self.dtype.itemsize
        part = self.source if self.same else self.source + Int64(self.ctx.neighbour(hop)) * (self.count * size)
        return load_vectors(size, part, self.count, self.indices(turn))

    @cute.jit
    def take(self, turn: Int32, going: Boolean) -> Any:
        """Reduces."""
        own, (epoch, places) = self.load(0, turn), self.slot(turn)
        if going:
            got, going = unflagged.receive(self.ctx, epoch, places, self.live(turn))
            if going:
                came = [unflagged.vectors_of(self.ctx, got, k, self.vectors) for k in range(self.vectors)]
                sums = [self.reduction.reduce(self.ctx.in_rank_order(own[k], came[k])) for k in range(self.vectors)]
                store_vectors(self.dtype.itemsize, self.result, self.count, self.indices(turn), sums)
        return going


@dataclass(frozen=True, kw_only=True)
class ReduceScatterWords(ReducingTensors):
    """The kernel, for floats of at most four bytes. ``source``: ``world_size`` parts of ``count`` elements, or if all
    parts are the ``same`` that one, which makes it an all-reduce; ``result``: ``count`` elements.

    Attributes: ``vectors`` of 16 bytes a thread and turn; a CTA's must fit ``words_slot_bytes``. No CTA may be without
    any. ``slots``: 0 if there is one turn, 1 if all turns fit one slot, 2 if they may need several. At most
    NUM_WORDS_CHANNELS CTAs, of as many threads as there are ranks or more."""

    vectors: int
    slots: int = 0
    same: bool = False

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        job = WordsOfParts(
            ctx=ctx, epoch=None, dtype=self.dtype, threads=self.threads, vectors=self.vectors, same=self.same,
            reduction=self.reduction, source=source, result=result, count=count,
        )  # fmt: skip
        fetched = registers(4 * job.num_fetched, Uint32)
        keep(fetched, job.fetch(Int32(0)))  # in flight together with the loads of begin()
        in_order, epoch = begin(ctx, block())
        if in_order:
            remind(ctx, epoch)
            epoch += 1
            moving = replace(job, epoch=epoch)
            if cutlass.const_expr(self.slots == 0):
                moving.send(kept_in(fetched, job.num_fetched, 4), Int32(0), True)
                moving.take(Int32(0), True)
            else:
                epoch = unflagged.run(ctx, epoch, job.num_turns, fetched, moving, True, self.slots > 1)
            end(ctx, block(), epoch)
