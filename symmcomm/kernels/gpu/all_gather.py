"""All-gather: part p of the output is rank p's input; and what moves the same way. Every kernel takes the distance
between the parts of its source for the takers, 0 if all get the same, and ``sender``, the only rank that sends, or -1:

    ============  =============  =============  ==========
    call          source pitch   target pitch   sender
    ============  =============  =============  ==========
    all-gather    0              bytes          -1
    broadcast     0              0              root
    all-to-all    bytes          bytes          -1
    scatter       bytes          0              root
    ============  =============  =============  ==========

**LL** (small; any tensors): cells carry their own flag (see ``cells``). In place is fine: a thread has read its place
in all parts before it writes. With one sender ranks would hear from it alone, so there they also signal all peers, at
the start, and wait for all, at the end, unless cells have not come: a rank waits for one deadline, not for two.

**Push** (the target symmetric, at the same offset on all ranks): barrier, as peers may still use their targets; every
rank stores its part into all targets; barrier. With ``multimem`` the switch distributes.

**Pull** (the source symmetric): barrier; every rank loads its parts from all sources; barrier, as a source may change
once its rank's kernel is done. No rank writes but into its own target, which must not overlap any source that is read.

Any tensors that are not small: ``all_gather_lamport``. Where that does not fit: ``all_to_all.AllToAllStaged``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from symmcomm.kernels.gpu import cells as ll
from symmcomm.kernels.gpu.barrier import arrive, meet, sync
from symmcomm.kernels.gpu.context import begin, block, end, thread
from symmcomm.kernels.gpu.copy import copy_bytes, copy_to_ranks, multicast_vectors
from symmcomm.kernels.gpu.signatures import MovingParts, Placed
from symmcomm.kernels.gpu.sweep import first_unit, num_units
from symmcomm.schedule.layout_gpu import Phase


@dataclass(frozen=True, kw_only=True)
class AllGatherLL(MovingParts):
    """The LL kernel.

    Attributes: ``same`` whether all takers get the same (the source pitch is 0), ``cells`` a thread; a CTA's cells must
    fit ``ll_slot_bytes``. Launch with as many CTAs as a part has parts of ``cells`` rows."""

    same: bool
    cells: int

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, source_pitch: Int64, target: Int64,
        target_pitch: Int64, num_bytes: Int64, sender: Int32,
    ) -> None:  # fmt: skip
        ctx = self.enter(base, stride, rank)
        cells = ll.Cells(self.threads, self.cells, 1)
        first, step = cells.first_byte(), cells.row_bytes
        pitch = None if self.same else source_pitch
        own = [ll.load_parts(ctx, cells, source, pitch, first + k * step, num_bytes) for k in range(self.cells)]
        in_order, epoch = begin(ctx, block())
        if in_order:
            ll.remind(ctx, epoch)
            epoch += 1
            if sender >= 0:
                arrive(ctx, block(), epoch)
            if sender < 0 or sender == rank:
                for k in cutlass.range_constexpr(self.cells):
                    if first + k * step < num_bytes:
                        for hop in cutlass.range_constexpr(1, self.world_size):
                            ll.send(ctx, epoch, ctx.neighbour(hop), k * self.threads + thread(), own[k][hop])
                        ll.store_words(target + rank * target_pitch, first + k * step, num_bytes, cells, own[k][0])
            got, arrived = ll.receive(ctx, cells, epoch, first, num_bytes, sender)
            if arrived:
                for index, peer in enumerate(ctx.senders):
                    if peer != rank and (sender < 0 or sender == peer):
                        for k in cutlass.range_constexpr(self.cells):
                            words = ll.words_of(cells, got, index, k)
                            ll.store_words(target + peer * target_pitch, first + k * step, num_bytes, cells, words)
            if sender >= 0:
                meet(ctx, block(), epoch, Int32(Phase.enter), arrived)
            end(ctx, block(), epoch)


@dataclass(frozen=True, kw_only=True)
class AllGatherPush(Placed):
    """The push kernel. Attributes: ``vectors`` a thread has in flight, ``multimem`` whether the switch distributes;
    then ``multicast_base`` must be one, and the source pitch 0."""

    vectors: int
    multimem: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), *[Int64(0)] * 6, Int32(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, source: Int64, source_pitch: Int64,
        target: Int64, target_pitch: Int64, num_bytes: Int64, sender: Int32, grid: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source``: an address; ``target``: an offset from the start of each rank's heap."""
        kernel = self.kernel(
            base, stride, rank, multicast_base, source, source_pitch, target, target_pitch, num_bytes, sender
        )
        self.launch(kernel, grid, stream)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, source: Int64, source_pitch: Int64,
        target: Int64, target_pitch: Int64, num_bytes: Int64, sender: Int32,
    ) -> None:  # fmt: skip
        ctx = self.enter(base, stride, rank)
        in_order, epoch = begin(ctx, block())
        if in_order:
            if sync(ctx, block(), epoch + 1, Phase.enter, True):
                if sender < 0 or sender == rank:
                    self._push(ctx, multicast_base, source, source_pitch, target + rank * target_pitch, num_bytes)
                sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)

    @cute.jit
    def _push(
        self, ctx: cutlass.Constexpr, multicast_base: Int64, source: Int64, source_pitch: Int64, target: Int64,
        num_bytes: Int64,
    ) -> None:  # fmt: skip
        first, step, done = first_unit(self.threads), num_units(self.threads), Int64(0)
        if cutlass.const_expr(self.multimem):  # noqa: SIM102, the inner one is for the GPU
            if ((multicast_base | target | source) & 15) == 0:
                done = num_bytes & ~15
                multicast_vectors(multicast_base + target, source, done >> 4, first, step, self.vectors)
        copy_to_ranks(
            ctx, target + done, source + done, source_pitch, num_bytes - done, first, step, self.vectors
        )


@dataclass(frozen=True, kw_only=True)
class AllGatherPull(MovingParts):
    """The pull kernel. ``source``: an offset from the start of each rank's heap; ``target``: an address. Attributes:
    ``vectors`` a thread has in flight."""

    vectors: int

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, source_pitch: Int64, target: Int64,
        target_pitch: Int64, num_bytes: Int64, sender: Int32,
    ) -> None:  # fmt: skip
        ctx = self.enter(base, stride, rank)
        in_order, epoch = begin(ctx, block())
        if in_order:
            if sync(ctx, block(), epoch + 1, Phase.enter, True):
                for hop in cutlass.range(self.world_size, unroll=1):
                    peer = ctx.neighbour(hop)
                    origin = ctx.peer_address(peer, source + rank * source_pitch)
                    place, wanted = target + peer * target_pitch, Boolean(sender < 0) | (sender == peer)
                    if wanted and origin != place:
                        first, step = first_unit(self.threads), num_units(self.threads)
                        copy_bytes(place, origin, num_bytes, first, step, self.vectors)
                sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)
