"""One input, the same for all takers: all-gather (all send, all take), broadcast (one sends), gather (one takes).

Staged: before barrier e a sender copies chunk k into its slot e; after e it fills slot e + 1 and arrives at e + 1, and
then the takers copy chunk k out (rule of reuse, see ``barrier``). Else (symmetric or private input): barrier, takers
copy out of the sender's tensor, barrier, so that no sender changes what is still read.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import arrive, await_peers, meet, sync
from symmcomm.kernels.cpu.primitives import load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import STAGED, choose_copy, copy_out, fetch, note_sources, own_slot, source_of


@njit(cache=True, nogil=True)
def _take(ctx: int, epoch: int, at: int, num_bytes: int, sender: int) -> bool:
    """Copies bytes ``at`` and on of the peers' inputs to where TARGETS says. False: some could not be read."""
    rank, world_size, targets = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.TARGETS)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        if sender >= 0 and peer != sender:
            continue
        if not fetch(ctx, peer, epoch, 0, at, load_i64(targets + 8 * peer) + at, num_bytes):
            return False
    return True


@njit(cache=True, nogil=True)
def _keep(ctx: int, tensor: int, at: int, num_bytes: int, sender: int) -> None:
    """Copies bytes ``at`` and on of this rank's own input to where TARGETS says."""
    rank = c.get(ctx, c.RANK)
    target = load_i64(c.get(ctx, c.TARGETS) + 8 * rank) + at
    if (sender < 0 or rank == sender) and target != tensor + at:
        copy_out(ctx, target, tensor + at, num_bytes)


@njit(cache=True, nogil=True)
def _direct(ctx: int, tensor: int, num_bytes: int, sender: int, takes: bool) -> int:
    """All of it out of the senders' tensors, and the closing barrier, whose signals travel while own data are kept."""
    if takes and not _take(ctx, c.get(ctx, c.EPOCH), 0, num_bytes, sender):
        return c.STOPPED
    closing = arrive(ctx)
    if takes:
        _keep(ctx, tensor, 0, num_bytes, sender)
    return c.OK if await_peers(ctx, closing) else c.STOPPED


@njit(cache=True, nogil=True)
def _all_gather(ctx: int, call: int, tensor: int, num_bytes: int, sender: int, taker: int) -> int:
    rank, single = c.get(ctx, c.RANK), num_bytes >= c.get(ctx, c.SINGLE_COPY_BYTES)
    if choose_copy(ctx, num_bytes if sender >= 0 else num_bytes * c.get(ctx, c.WORLD_SIZE)):
        single = False
    if sender >= 0 and num_bytes >= c.get(ctx, c.PIPELINED_BYTES):
        single = False  # one copies in while the others copy out: faster than copies that wait for nobody
    source = source_of(ctx, tensor, single)
    stages = source == STAGED and (sender < 0 or rank == sender)
    takes = taker < 0 or rank == taker
    per_chunk = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES))
    if stages:
        memcpy(own_slot(ctx, c.get(ctx, c.EPOCH) + 1), tensor, min(per_chunk, num_bytes))
    status = meet(ctx, call, num_bytes, source, 0)
    if status != c.OK:
        return status
    num_symmetric, num_private, num_staged = note_sources(ctx, c.get(ctx, c.EPOCH), sender)
    if num_staged == 0:
        return _direct(ctx, tensor, num_bytes, sender, takes)
    for at in range(0, num_bytes, per_chunk):
        epoch, following = c.get(ctx, c.EPOCH), at + per_chunk
        if following < num_bytes:
            if stages:
                memcpy(own_slot(ctx, epoch + 1), tensor + following, min(per_chunk, num_bytes - following))
            arrive(ctx)
        n = min(per_chunk, num_bytes - at)
        if takes:
            if not _take(ctx, epoch, at, n, sender):
                return c.STOPPED
            _keep(ctx, tensor, at, n, sender)
        if following < num_bytes and not await_peers(ctx, epoch + 1):
            return c.STOPPED
    if num_symmetric + num_private > 0 and not sync(ctx):
        return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def all_gather(
    ctx: int, call: int, tensor: int, num_bytes: int, sender: int, taker: int, output: int, pitch: int
) -> int:
    """Moves ``num_bytes`` at each sender's ``tensor`` to each taker; senders and takers are one rank, or -1 for all.

    What rank p sends goes to ``output + p * pitch``; with an ``output`` of 0, to the address in TARGETS[p].
    """
    if not c.enter(ctx):
        return c.REFUSED
    if output != 0:
        for peer in range(c.get(ctx, c.WORLD_SIZE)):
            store_i64(c.get(ctx, c.TARGETS) + 8 * peer, output + peer * pitch)
    return c.leave(ctx, _all_gather(ctx, call, tensor, num_bytes, sender, taker))
