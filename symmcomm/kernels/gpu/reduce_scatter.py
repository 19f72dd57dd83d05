"""Reduce-scatter: rank r ends with part r of the sum of all inputs, in rank order.

**LL** (small; any tensors): part p goes to rank p in cells that carry their own flag (see ``cells``), which it reduces
with its own. In place is fine: a thread has read its place in all parts before it writes.

**Words** (not as small; any tensors): ``reduce_scatter_lamport``.

**Staged** (large; any tensors): the parts are pushed in chunks into the peers' staging memory (see ``staged``), where
each rank reduces them, its own part straight from the input. The output may be any part of the input: a CTA pushes a
chunk of all parts before it writes there. Stores over a link are faster than loads, and this takes no barrier.

**Pull** (the input symmetric, at the same offset on all ranks): barrier; rank r reduces part r out of all inputs;
barrier, as an input may change once its rank's kernel is done. With ``multimem`` the switch reduces; the order of its
sum is its own. The output may be part r of the input.

All are all-reduces in one shot if all parts are the ``same``.

**Pull, the same parts**: every rank reads all of every input, so a rank may not write its result, which replaces its
input, before all have read that. Each thread holds what it reduces in registers over the second barrier, then stores
it. The barrier is the channel's: as grids agree, unit i of any input is read by thread i of the grid on each rank, and
written by thread i of its own rank, in CTAs of one channel. It ends the reading, as its release orders the loads of all
threads of the CTA before the signal; and nobody reads what is stored behind it in the same call: the next kernel of the
stream does, for which this one is done. With ``multimem`` each rank fetches each element, in an order that the switch
may choose for each anew: floats of three ranks and more need not agree in their last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu import cells as ll
from symmcomm.kernels.gpu.all_to_all import Exchange, Parts
from symmcomm.kernels.gpu.barrier import sync
from symmcomm.kernels.gpu.context import begin, block, end
from symmcomm.kernels.gpu.copy import clip
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.reduce import Addresses, reduce_bytes, reduced_units, store_units
from symmcomm.kernels.gpu.signatures import Reducing, ReducingTensors
from symmcomm.kernels.gpu.staged import chunk_offset, run
from symmcomm.kernels.gpu.sweep import first_unit, num_units, places
from symmcomm.schedule.dtypes import Op
from symmcomm.schedule.layout_gpu import Phase


@dataclass(frozen=True, kw_only=True)
class ReduceScatterLL(ReducingTensors):
    """The LL kernel. ``source``: ``world_size`` parts of ``count`` elements, or if all parts are the ``same`` that one,
    which makes it an all-reduce; ``result``: ``count`` elements.

    Attributes: ``cells`` a thread; a CTA's cells must fit ``ll_slot_bytes``. Launch with as many CTAs as the part has
    parts of ``cells`` rows."""

    cells: int
    same: bool = False

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        cells = ll.Cells(self.threads, self.cells, self.dtype.itemsize)
        num_bytes, first, step = count * self.dtype.itemsize, cells.first_byte(), cells.row_bytes
        pitch = None if self.same else num_bytes
        # In flight together with the loads of begin().
        own = [ll.load_parts(ctx, cells, source, pitch, first + k * step, num_bytes) for k in range(self.cells)]
        in_order, epoch = begin(ctx, block())
        if in_order:
            ll.remind(ctx, epoch)
            epoch += 1
            got, arrived = ll.exchange(ctx, cells, epoch, first, num_bytes, own)
            if arrived:
                for k in cutlass.range_constexpr(self.cells):
                    words = self.reduction.reduce(ll.in_rank_order(ctx, cells, own[k][0], got, k))
                    ll.store_words(result, first + k * step, num_bytes, cells, words)
            end(ctx, block(), epoch)


@dataclass(frozen=True, kw_only=True)
class ReduceIncoming(Exchange):
    """The job of the pipeline: parts go out; those that come in are reduced with the own one, into ``targets``.

    Attributes: ``own`` and ``targets`` addresses of this rank's part and of what it becomes, ``own_bytes`` of it.
    """

    reduction: Reduction
    own: Any
    own_bytes: Any
    targets: tuple[Any, ...]

    @property
    def num_reduced(self) -> int:
        """Vectors of each source that a thread reduces at once: ``vectors``, but few where numbers of 8 bytes are
        divided, which takes registers of its own. For several targets, as in a push, there are enough."""
        divides = self.reduction.op is Op.avg and self.reduction.dtype.itemsize == 8
        return min(self.vectors, 2) if divides and len(self.targets) == 1 else self.vectors

    @cute.jit
    def take(self, chunk: Int32, number: Uint32, team: cutlass.Constexpr) -> None:
        """Reduces the CTA's chunk."""
        ctx, at = self.ctx, chunk_offset(chunk, self.chunk_bytes)
        slots = [ctx.staging_slot(ctx.rank, block(), number, peer) for peer in range(ctx.world_size)]
        where = Addresses(
            sources=tuple(pick(ctx.rank == peer, self.own + at, slot) for peer, slot in enumerate(slots)),
            targets=tuple(target + at for target in self.targets),
        )
        size = clip(self.own_bytes - at, self.chunk_bytes)
        reduce_bytes(self.reduction, where, size, team.index, Int64(team.num), self.num_reduced)


@dataclass(frozen=True, kw_only=True)
class ReduceScatterStaged(ReducingTensors):
    """The staged kernel. ``source``: ``world_size`` parts of ``count`` elements, or if all parts are the ``same`` that
    one, which makes it an all-reduce in one shot; ``result``: ``count`` elements, which may be one of the parts.

    Attributes: ``vectors`` of each source a thread has in flight, ``chunk_bytes`` of a part at a time: a multiple of
    16, at most the layout's ``staging_slot_bytes``. At most NUM_STAGED_CHANNELS CTAs."""

    vectors: int
    chunk_bytes: int
    same: bool = False

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        num_bytes = count * self.dtype.itemsize
        pitch = Int64(0) if self.same else num_bytes
        parts = Parts(
            rank=rank, source=source, source_pitch=pitch, target=result, target_pitch=Int64(0),
            num_bytes=num_bytes, sender=None,
        )  # fmt: skip
        job = ReduceIncoming(
            ctx=ctx, parts=parts, chunk_bytes=self.chunk_bytes, threads=self.threads, vectors=self.vectors,
            reduction=self.reduction, own=source + rank * pitch, own_bytes=num_bytes, targets=(result,),
        )  # fmt: skip
        run(ctx, num_bytes, job)


@dataclass(frozen=True, kw_only=True)
class ReduceScatterPull(Reducing):
    """The pull kernel. Attributes: ``vectors`` of each source a thread has in flight, ``multimem`` whether the switch
    reduces; then ``multicast_base`` must be one. ``same``: see there; the part and the output must be whole vectors on
    16-byte boundaries. Launch that with as many CTAs as the part has parts of ``vectors`` rows."""

    vectors: int
    multimem: bool = False
    same: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, source: Int64, output: Int64,
        count: Int64, grid: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source``: offset of ``world_size`` parts of ``count`` elements from the start of each rank's heap, or of
        one if all are the ``same``; ``output``: address of ``count`` elements."""
        self.launch(self.kernel(base, stride, rank, multicast_base, source, output, count), grid, stream)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, source: Int64, output: Int64, count: Int64
    ) -> None:
        ctx = self.enter(base, stride, rank)
        in_order, epoch = begin(ctx, block())
        if in_order:
            if sync(ctx, block(), epoch + 1, Phase.enter, True):
                num_bytes = count * self.dtype.itemsize
                at = source + (Int64(0) if self.same else rank * num_bytes)
                where = Addresses(
                    sources=tuple(ctx.peer_address(peer, at) for peer in range(self.world_size)),
                    targets=(output,),
                    multicast_source=multicast_base + at if self.multimem else None,
                )
                first, step = first_unit(self.threads), num_units(self.threads)
                if cutlass.const_expr(self.same):
                    here = places(Int64(0), num_bytes >> 4, first, step, self.vectors, 16, first_is_there=False)
                    reduced = list(reduced_units(self.reduction, where, here, 16))
                    sync(ctx, block(), epoch + 2, Phase.leave, False)
                    store_units(self.reduction, where, here, 16, reduced)
                else:
                    reduce_bytes(self.reduction, where, num_bytes, first, step, self.vectors)
                    sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)
