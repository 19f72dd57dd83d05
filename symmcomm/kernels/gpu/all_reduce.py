"""All-reduce: each rank ends with ``x[0] ∘ x[1] ∘ … ∘ x[world_size - 1]``, in that order and with the same bits.

**LL**, for small tensors: ``reduce_scatter.ReduceScatterLL`` with parts that are all ``same``, and ``all_reduce_ll``.

**Two-shot** (large; symmetric, at the same offset on all ranks). Barrier; rank r reduces slice r of all tensors and
writes it into slice r of all tensors; barrier. Nobody but rank r touches slice r between the two, and one thread reads
a vector from everywhere before it writes it; so it works in place. The second barrier ends the reading and makes the
results visible: a rank's kernel is done when all its channels have passed. With ``multimem`` the switch reduces and
distributes; the order of its sum is its own, but one rank fetches each element, so the bits still agree.

**One-shot** (any tensors): every rank pushes all of its tensor, in chunks, into the peers' staging memory, where each
reduces all: ``reduce_scatter.ReduceScatterStaged`` with parts that are all ``same``.

With the switch, and a symmetric tensor: ``reduce_scatter.ReduceScatterPull``, likewise.

**Staged** (any tensors): slices are pushed in chunks into the staging memory of the rank that reduces them (see
``staged``), which keeps the result in its own tensor; then the slices go round through a second pipeline, in the same
chunks, so that a CTA needs no other.

**Push** (the result symmetric, at the same offset on all ranks): the first half of that, but a rank stores its slice
of the result into all tensors at once: that a peer has pushed a chunk to here says that it has started the kernel, and
that this chunk of its tensor is no longer needed. A barrier at the end makes the results visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu.all_reduce_ll import slice_bytes
from symmcomm.kernels.gpu.all_to_all import Exchange
from symmcomm.kernels.gpu.barrier import sync
from symmcomm.kernels.gpu.context import begin, block, end
from symmcomm.kernels.gpu.copy import clip
from symmcomm.kernels.gpu.reduce import Addresses, reduce_bytes
from symmcomm.kernels.gpu.reduce_scatter import ReduceIncoming
from symmcomm.kernels.gpu.signatures import Reducing, ReducingTensors
from symmcomm.kernels.gpu.staged import num_chunks, proceed, start
from symmcomm.kernels.gpu.sweep import first_unit, num_units
from symmcomm.schedule.layout_gpu import Phase


@dataclass(frozen=True, kw_only=True)
class AllReduceTwoShot(Reducing):
    """The two-shot kernel. Attributes: ``vectors`` a thread has in flight (of each rank's tensor), ``multimem`` whether
    the switch reduces; then ``multicast_base`` must be one."""

    vectors: int
    multimem: bool = False

    @property
    def min_ctas(self) -> int:
        """An SM has at most one of a grid. The compiler, left alone, often makes room for more, and spills what it
        holds of many ranks; of more than eight it would hold still more at once."""
        return int(4 < self.world_size <= 8)

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, offset: Int64, count: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``offset``: of ``count`` elements from the start of each rank's heap."""
        self.launch(self.kernel(base, stride, rank, multicast_base, offset, count), grid, stream)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, offset: Int64, count: Int64
    ) -> None:
        ctx = self.enter(base, stride, rank)
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
                first, step = first_unit(self.threads), num_units(self.threads)
                reduce_bytes(self.reduction, where, clip(num_bytes - at, per_rank), first, step, self.vectors)
                sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The parts that an all-reduce moves: slices of ``num_bytes``, one for each rank, of one tensor that ends after
    ``total``. Attributes: ``reduced`` whether this rank's slice goes to all, or each its way to be reduced."""

    rank: Any
    tensor: Any
    num_bytes: Any
    total: Any
    reduced: bool

    def outgoing(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of what goes to the peer."""
        return self.incoming(self.rank if self.reduced else peer)

    def incoming(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of the peer's slice."""
        at = Int64(peer) * self.num_bytes
        return self.tensor + at, clip(self.total - at, self.num_bytes)


@dataclass(frozen=True, kw_only=True)
class AllReduceStaged(ReducingTensors):
    """The push and staged kernels. ``source`` and ``result``: ``count`` elements, which may be the same.

    Attributes: ``symmetric`` whether the result is, in the heap at the same offset on all ranks (push), ``vectors`` of
    each source a thread has in flight, ``chunk_bytes`` of a slice at a time: a multiple of 16, at most the layout's
    ``staging_slot_bytes``. At most NUM_STAGED_CHANNELS CTAs."""

    vectors: int
    chunk_bytes: int
    symmetric: bool

    @property
    def min_ctas(self) -> int:
        """As in ``AllReduceTwoShot``; what goes on beside the reduction needs registers as well."""
        return int(2 < self.world_size <= 8)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        total = count * self.dtype.itemsize
        per_rank = slice_bytes(total, self.world_size)
        slices: dict[str, Any] = {"rank": rank, "num_bytes": per_rank, "total": total}
        parts, results = Slices(**slices, tensor=source, reduced=False), Slices(**slices, tensor=result, reduced=True)
        own, own_bytes = parts.outgoing(rank)
        target, _ = results.outgoing(rank)
        hops = range(self.world_size if self.symmetric else 1)
        common: dict[str, Any] = {"ctx": ctx, "chunk_bytes": self.chunk_bytes, "threads": self.threads}
        common["vectors"] = self.vectors
        job = ReduceIncoming(
            **common, parts=parts, own=own, own_bytes=own_bytes, reduction=self.reduction,
            targets=tuple(target + Int64(ctx.neighbour(hop) - rank) * stride for hop in hops),
        )  # fmt: skip
        in_order, epoch = begin(ctx, block())
        num = num_chunks(per_rank, self.chunk_bytes)
        if in_order and num > 0:
            start(ctx, epoch, num, job)
            met = proceed(ctx, epoch, num, job, not self.symmetric)
            epoch += Uint32(num)
            if met:
                if cutlass.const_expr(self.symmetric):
                    sync(ctx, block(), epoch + 1, Phase.leave, False)
                else:
                    cute.arch.sync_threads()  # other threads have reduced what this one sends
                    back = Exchange(**common, parts=results)
                    start(ctx, epoch, num, back)
                    proceed(ctx, epoch, num, back, True)
            end(ctx, block(), epoch + (Uint32(1) if self.symmetric else Uint32(num)))
