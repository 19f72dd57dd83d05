"""Barriers between the CTAs that share a channel on all ranks; inside kernels, and as kernels of their own.

**Epoch barrier, all to all** (``sync``). Thread p of a CTA stores the channel's next epoch with release into peer p's
pad, then waits with acquire until its own pad's word of p has come to it. CTA barriers before and after let the threads
speak for the whole CTA. So whatever any thread of channel b wrote or read before, on any rank, happened before whatever
a thread of channel b does after. With kernel boundaries on both sides this makes whole tensors safe: a CTA that runs
means that all earlier kernels of its stream are done, and a kernel is done when all its channels are.

Words only grow (a signed difference is compared, so wrap-around is fine) and each has one writer. A rank that is a
barrier ahead overwrites e by e + 1, which still satisfies a peer that waits for e; it cannot get further, as it needs
that peer's e + 1. Nothing is reset and no atomic crosses a link.

``arrive`` and ``meet`` are its halves, for kernels that work in between.

The other variants are functions for kernels in the same way (``ring_sync``, ``swap_sync``, ``multicast_sync``): the
CTA's threads meet before those signal that signal, and after those have waited that wait, and all get the same answer.
In between, what happened before passes from rank to rank by release and acquire, over as many hops as there are. So
all that any thread of the CTAs that meet did before, on any rank, happened before whatever one does after.

**Ring.** Each rank only signals its successor and waits for its predecessor, world_size - 1 rounds, counted in a word
of its own that is never reset; see ``kernels.cpu.barrier`` for why that is enough. A rank signals round k after it has
acquired its predecessor's round k - 1, so the last round hands on what all others did before.

**Compare-and-swap** (``protocol="cas"``): a word goes 0 → 1 by the sender and 1 → 0 by the receiver, on pads that other
libraries' kernels may share. An early sender waits for the 0. Both sides acquire and release, so signals hand on what
others did as epochs do; it goes all to all, or round the ring in as many rounds.

**Multicast** (``protocol="multicast"``): each rank adds 1 to a word on all ranks by one instruction through the switch
(with ``multimem`` off: one after the other) and waits until its own has come to world_size · epoch. Additions of
different epochs cannot mix: nobody adds for e + 1 before all have added for e. An addition releases, and who acquires
the sum has acquired each of its parts, as nothing but additions lies between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, begin, end, thread
from symmcomm.kernels.gpu.multimem_instructions import multimem_red
from symmcomm.kernels.gpu.primitives import (
    agree,
    load,
    put_signal,
    reduce_add,
    signal,
    store,
    wait,
    wait_signal,
)
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import Layout, Phase


@cute.jit
def arrive(ctx: cutlass.Constexpr, channel: Int32, epoch: Uint32) -> None:
    """Signals the epoch to all peers, on behalf of all that the CTA's threads did before; all of them call it."""
    cute.arch.sync_threads()
    announce(ctx, channel, epoch)


@cute.jit
def announce(ctx: cutlass.Constexpr, channel: Int32, epoch: Uint32) -> None:
    """As ``arrive``, of what the threads did before they met last. A thread that signals waits until all that has left;
    the others go on."""
    peer = thread()
    if peer < ctx.world_size and peer != ctx.rank:
        signal(ctx.pad(peer, channel, ctx.rank), epoch)


@cute.jit
def meet(ctx: cutlass.Constexpr, channel: Int32, epoch: Uint32, phase: Int32, going: Boolean = True) -> Any:
    """Waits for all peers' epoch, on behalf of the CTA. False on all threads: some wait gave up, now or before, as a
    thread that is not ``going`` says. Its warp waits no more: that came here once the last of its threads had given up,
    a whole deadline late. Other warps have waited in the meantime, if they had anything to wait for."""
    met, peer = Boolean(going), thread()
    if cutlass.const_expr(going is not True):
        met = cute.arch.vote_all_sync(met)
    if met and peer < ctx.world_size and peer != ctx.rank:
        met = wait(ctx.state, ctx.rank, ctx.pad(ctx.rank, channel, peer), epoch, peer, channel, phase)
    return agree(met)


@cute.jit
def sync(
    ctx: cutlass.Constexpr, channel: Int32, epoch: Uint32, phase: cutlass.Constexpr, first: cutlass.Constexpr
) -> Any:
    """The channel's barrier of that epoch; all threads of the CTA call it. ``first``: nothing was done before in this
    kernel. False on all threads: some wait gave up."""
    if cutlass.const_expr(not first):
        cute.arch.sync_threads()
    met = Boolean(True)
    peer = thread()
    if peer < ctx.world_size and peer != ctx.rank:
        signal(ctx.pad(peer, channel, ctx.rank), epoch)
        met = wait(ctx.state, ctx.rank, ctx.pad(ctx.rank, channel, peer), epoch, peer, channel, Int32(phase))
    return agree(met)


@cute.jit
def ring_sync(ctx: cutlass.Constexpr, first: cutlass.Constexpr) -> Any:
    """One barrier round the ring, of one CTA a rank, as there is one word; ``first`` and the result as in ``sync``."""
    if cutlass.const_expr(not first):
        cute.arch.sync_threads()
    met = Boolean(True)
    if thread() == 0:
        state, own = ctx.state, ctx.peer_address(ctx.rank, ctx.layout.ring)
        following, previous = ctx.neighbour(1), ctx.neighbour(ctx.world_size - 1)
        epoch = load(state + at.RING_EPOCH)[0]
        for _ in cutlass.range_constexpr(ctx.world_size - 1):
            epoch += 1
            if met:
                signal(ctx.peer_address(following, ctx.layout.ring), epoch)
                met = wait(state, ctx.rank, own, epoch, previous, Int32(0), Int32(Phase.ring))
        store(state + at.RING_EPOCH, [epoch])
    return agree(met)


@cute.jit
def _swap_step(ctx: cutlass.Constexpr, channel: Int32, to: Int32, source: Int32) -> Any:
    """Signals one peer and takes the signal of another. False: it gave up at the first of them that did not come."""
    pad = ctx.layout.swap_pad + 4 * ctx.world_size * channel
    met = put_signal(ctx.state, ctx.rank, ctx.peer_address(to, pad + 4 * ctx.rank), to, channel)
    if met:
        met = wait_signal(ctx.state, ctx.rank, ctx.peer_address(ctx.rank, pad + 4 * source), source, channel)
    return met


@cute.jit
def swap_sync(ctx: cutlass.Constexpr, channel: Int32, ring: cutlass.Constexpr, first: cutlass.Constexpr) -> Any:
    """Compare-and-swap barrier of the CTAs that share the channel: thread p with peer p, or thread 0 round the ring;
    ``first`` and the result as in ``sync``."""
    if cutlass.const_expr(not first):
        cute.arch.sync_threads()
    met = Boolean(True)
    if cutlass.const_expr(ring):
        if thread() == 0:
            for _ in cutlass.range_constexpr(ctx.world_size - 1):
                if met:  # a round that failed is the last: the next ones would wait as long again
                    met = _swap_step(ctx, channel, ctx.neighbour(1), ctx.neighbour(ctx.world_size - 1))
    else:
        if thread() < ctx.world_size and thread() != ctx.rank:
            met = _swap_step(ctx, channel, thread(), thread())
    return agree(met)


@cute.jit
def multicast_sync(
    ctx: cutlass.Constexpr, multicast_base: Int64, multimem: cutlass.Constexpr, first: cutlass.Constexpr
) -> Any:
    """Barrier by counting, of one CTA a rank, as there is one word; ``first`` and the result as in ``sync``."""
    if cutlass.const_expr(not first):
        cute.arch.sync_threads()
    met = Boolean(True)
    if thread() == 0:
        epoch = load(ctx.state + at.MULTICAST_EPOCH)[0] + Uint32(1)
        offset = ctx.layout.count
        if cutlass.const_expr(multimem):
            multimem_red(multicast_base + offset, Uint32(1), "u32")
        else:
            for step in cutlass.range_constexpr(ctx.world_size):
                reduce_add(ctx.peer_address(ctx.neighbour(step), offset), 1, semantics="release")
        expected, own = epoch * Uint32(ctx.world_size), ctx.peer_address(ctx.rank, offset)
        met = wait(ctx.state, ctx.rank, own, expected, Int32(-1), Int32(0), Int32(Phase.enter))
        store(ctx.state + at.MULTICAST_EPOCH, [epoch])
    return agree(met)


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """A kernel that is a barrier and nothing else, one CTA.

    Attributes:
        algorithm: ``"all_to_all"`` or ``"ring"``.
        protocol: ``"epoch"``, ``"cas"`` or ``"multicast"`` (all-to-all only).
        multimem: whether ``multicast_base`` is one; else the multicast protocol loops over the peers.
    """

    world_size: int
    arch: int
    algorithm: str = "all_to_all"
    protocol: str = "epoch"
    multimem: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int32(0))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, channel: Int32, stream: cuda.CUstream
    ) -> None:
        """``channel`` < NUM_CHANNELS (NUM_SWAP_CHANNELS for ``cas``); the ring's epochs and multicast have one."""
        kernel = self.kernel(base, stride, rank, multicast_base, channel)
        kernel.launch(grid=(1, 1, 1), block=(-(-self.world_size // 32) * 32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, channel: Int32) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        in_order, epoch = begin(ctx, channel)
        if in_order:
            if cutlass.const_expr(self.protocol == "cas"):
                swap_sync(ctx, channel, self.algorithm == "ring", True)
            elif cutlass.const_expr(self.protocol == "multicast"):
                multicast_sync(ctx, multicast_base, self.multimem, True)
            elif cutlass.const_expr(self.algorithm == "ring"):
                ring_sync(ctx, True)
            else:
                sync(ctx, channel, epoch + 1, Phase.enter, True)
                end(ctx, channel, epoch + 1)
