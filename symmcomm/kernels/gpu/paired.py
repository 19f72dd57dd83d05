"""The paired pipeline: as ``staged``, but one CTA sends and another one takes, so that the link is busy meanwhile.

CTA i sends the chunks k = 0, 1, … of lane i to every peer, and CTA num_lanes + i takes what the peers' lane i sends.
Channel i (epoch e when the kernel starts) is signalled by takers and heard by senders, channel num_lanes + i (epoch f)
the other way round, so each word of a pad still has one writer:

    ============  ==============================  ===========================================
    signal        value                           says
    ============  ==============================  ===========================================
    *hello*       e + 1, by takers                this rank's kernel has started
    *taken k*     e + 2 + k, by takers            and has taken chunk k; if k + AHEAD < n
    *finished*    e + 2 + n, by takers            all is stored, wherever; only if asked for
    *pushed k*    f + 1 + k, by senders           chunk k is in the slot of number f + k
    ============  ==============================  ===========================================

With n chunks the channels end at e + 2 + n and f + n. Slots are those of the taker's channel, number mod DEPTH. Before
chunk k a sender hears nothing if k < AHEAD, else *hello* if k < DEPTH, else *taken k - DEPTH*; before it ends, *hello*
and *taken n - 1 - AHEAD* if there is one, or *finished*.

When is a slot free? For k ≥ DEPTH the chunk before in it was k - DEPTH. Below, it is from an earlier kernel. A peer
that was heard in this kernel, as all have been for k ≥ AHEAD, has done with those. For k < AHEAD it had a number below
f - AHEAD. If the kernel that came to f had such a chunk, then all peers had told the sender that it was taken, and if
not, all peers were heard in that one, and had done with those before it. ``staged`` relies on the same and leaves the
same behind, so that both may follow each other.

Both CTAs of a lane read both epochs, and a CTA's is stored when it ends. So each announces that it has read them, and
ends once the other one has: in a word of the rank's private memory, by the final epoch of its channel, which no earlier
kernel has left there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.barrier import arrive, meet
from symmcomm.kernels.gpu.context import block, thread
from symmcomm.kernels.gpu.primitives import agree, give_up, load, overdue, pick, store
from symmcomm.kernels.gpu.staged import Lane, proceed, start
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import AHEAD, DEPTH, Phase


def num_lanes() -> Any:
    """Lanes of the grid."""
    return cute.arch.grid_dim()[0] // 2


def lane() -> Any:
    """The CTA's lane, which is the channel of its sender."""
    return pick(block() < num_lanes(), block(), block() - num_lanes())


def taker() -> Any:
    """The channel of the lane's taker, in whose staging memory the chunks are."""
    return lane() + num_lanes()


def lane_of(paired: bool, chunk_bytes: int) -> Lane:
    """The CTA's lane for jobs, in this pipeline or in the staged one."""
    if not paired:
        return Lane(block(), cute.arch.grid_dim()[0], block(), chunk_bytes)
    return Lane(lane(), num_lanes(), taker(), chunk_bytes)


@cute.jit
def transfer(
    ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, job: cutlass.Constexpr, paired: cutlass.Constexpr
) -> Any:
    """All ``num`` chunks, at least one, in either pipeline; the epoch to which the channel has come, if no wait gave
    up."""
    last = epoch + Uint32(num)
    if cutlass.const_expr(paired):
        run(ctx, epoch, num, job, False)
        last = final_epoch(block(), epoch, num)
    else:
        start(ctx, epoch, job)
        proceed(ctx, epoch, num, job)
    return last


def final_epoch(channel: Any, epoch: Any, num: Any) -> Any:
    """To what a channel comes from an epoch in a kernel with ``num`` chunks."""
    return epoch + Uint32(num) + pick(channel < num_lanes(), Uint32(2), Uint32(0))


@cute.jit
def run(ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, job: cutlass.Constexpr, finish: cutlass.Constexpr) -> Any:
    """This CTA's part of a transfer of ``num`` chunks, at least one and the same number on all ranks.

    ``epoch``: its channel's when the kernel started. ``finish``: what peers' jobs store here is there when the kernel
    ends. False on all threads: some wait gave up.
    """
    partner = lane() + taker() - block()
    other = load(ctx.state + at.EPOCHS + Int64(partner) * 4, semantics="relaxed", scope="gpu")[0]
    cute.arch.sync_threads()
    if thread() == 0:
        store(_read(ctx, block()), [final_epoch(block(), epoch, num)], semantics="release", scope="gpu")
    met = Boolean(True)
    if block() < num_lanes():
        met = _send(ctx, epoch, other, num, job, finish)
    else:
        met = _take(ctx, other, epoch, num, job, finish)
    if met:
        met = _part(ctx, partner, final_epoch(partner, other, num))
    return met


@cute.jit
def _send(
    ctx: cutlass.Constexpr, e: Uint32, f: Uint32, num: Int32, job: cutlass.Constexpr, finish: cutlass.Constexpr
) -> Any:
    chunk, met = Int32(0), Boolean(True)
    while chunk < num and met:
        if chunk >= AHEAD:
            met = meet(ctx, lane(), e + 1 + _count(chunk - DEPTH), Int32(Phase.data))
        if met:
            job.push(chunk, f + Uint32(chunk))
            arrive(ctx, taker(), f + 1 + Uint32(chunk))
        chunk += 1
    if met:
        last = Uint32(num) + 1 if cutlass.const_expr(finish) else _count(num - 1 - AHEAD)
        met = meet(ctx, lane(), e + 1 + last, Int32(Phase.leave))
    return met


def _count(index: Any) -> Any:
    """Of chunks up to that one."""
    return Uint32(pick(index < 0, Int32(0), index + 1))


@cute.jit
def _take(
    ctx: cutlass.Constexpr, e: Uint32, f: Uint32, num: Int32, job: cutlass.Constexpr, finish: cutlass.Constexpr
) -> Any:
    arrive(ctx, lane(), e + 1)
    chunk, met = Int32(0), Boolean(True)
    while chunk < num and met:
        phase = pick(chunk == 0, Int32(Phase.enter), Int32(Phase.data))
        met = meet(ctx, taker(), f + 1 + Uint32(chunk), phase)
        if met:
            job.take(chunk, f + Uint32(chunk))
            if chunk + AHEAD < num:
                arrive(ctx, lane(), e + 2 + Uint32(chunk))
        chunk += 1
    if cutlass.const_expr(finish):  # noqa: SIM102, the inner one is for the GPU
        if met:
            arrive(ctx, lane(), e + 2 + Uint32(num))
    return met


def _read(ctx: Any, channel: Any) -> Any:
    return ctx.state + at.READ + Int64(channel) * 4


@cute.jit
def _part(ctx: cutlass.Constexpr, partner: Int32, last: Uint32) -> Any:
    """Waits until the lane's other CTA has read the epochs."""
    met = Boolean(True)
    if thread() == 0:
        seen = load(_read(ctx, partner), semantics="acquire", scope="gpu")[0]
        tries, since, late = Int32(0), Int64(0), Boolean(False)
        while seen != last and not late:
            tries += 1
            late, since = overdue(ctx.state, tries, since)
            seen = load(_read(ctx, partner), semantics="acquire", scope="gpu")[0]
        met = seen == last
        if not met:
            give_up(ctx.state, ctx.rank, ctx.rank, partner, last, seen, Int32(Phase.enter))
    return agree(met)
