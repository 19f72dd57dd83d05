"""An input of its own for every taker: all-to-all with even or uneven parts, and scatter (one sends).

Unless all parts are equal, what a rank sends to each peer (bytes and offset in its input) lies in its SPLITS table, of
the parity of the opening barrier; takers copy their entries out before they arrive at the next one (rule of reuse, see
``barrier``). Where parts are uneven they also compare them with what they expect, and a second barrier carries the
verdicts, so that all ranks see a mismatch. Data then moves as in ``all_gather``, with a lane to each taker in place of
the slot.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import VOTE, arrive, await_peers, describe, described, meet, sync
from symmcomm.kernels.cpu.primitives import load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import (
    IN_LANE,
    STAGED,
    choose_copy,
    copy_out,
    fetch,
    note_sources,
    own_lane,
    source_of,
)

UNEVEN = -1


@njit(cache=True, nogil=True)
def _split(ctx: int, sender: int, epoch: int, taker: int) -> int:
    """Address of the sender's (bytes, offset) for the taker."""
    world_size = c.get(ctx, c.WORLD_SIZE)
    index = (epoch & 1) * world_size + taker
    return c.peer_address(ctx, sender, c.get(ctx, c.SPLITS) + 16 * index)


@njit(cache=True, nogil=True)
def _fill_even(ctx: int, count: int, output: int) -> None:
    """The tables of equal parts from and to all, which lie one after the other: nobody need be told of them."""
    rank, incoming = c.get(ctx, c.RANK), c.get(ctx, c.INCOMING)
    outgoing, targets = c.get(ctx, c.OUTGOING), c.get(ctx, c.TARGETS)
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        store_i64(outgoing + 16 * peer, count)
        store_i64(outgoing + 16 * peer + 8, peer * count)
        store_i64(incoming + 16 * peer, count)
        store_i64(incoming + 16 * peer + 8, rank * count)
        store_i64(targets + 8 * peer, output + peer * count)


@njit(cache=True, nogil=True)
def _largest_part(ctx: int) -> int:
    """Most bytes that this rank sends to one peer."""
    largest = 0
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        largest = max(largest, load_i64(c.get(ctx, c.OUTGOING) + 16 * peer))
    return largest


@njit(cache=True, nogil=True)
def _publish(ctx: int, epoch: int) -> None:
    """Copies this rank's (bytes, offset) pairs into its table."""
    rank, splits = c.get(ctx, c.RANK), c.get(ctx, c.OUTGOING)
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        split = _split(ctx, rank, epoch, peer)
        store_i64(split, load_i64(splits + 16 * peer))
        store_i64(split + 8, load_i64(splits + 16 * peer + 8))


@njit(cache=True, nogil=True)
def _note_incoming(ctx: int, epoch: int) -> int:
    """Keeps what each sender published for this rank; returns the largest part of all ranks."""
    rank, incoming, largest = c.get(ctx, c.RANK), c.get(ctx, c.INCOMING), 0
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        split = _split(ctx, peer, epoch, rank)
        store_i64(incoming + 16 * peer, load_i64(split))
        store_i64(incoming + 16 * peer + 8, load_i64(split + 8))
        largest = max(largest, described(ctx, epoch, peer, VOTE))
    return largest


@njit(cache=True, nogil=True)
def _agree(ctx: int, call: int, source: int) -> int:
    """The second barrier of an uneven call: each rank votes 0, or 1 + the sender whose bytes it did not expect, and
    then tells both numbers in place of count and source."""
    incoming, expected = c.get(ctx, c.INCOMING), c.get(ctx, c.EXPECTED)
    vote, awaited, sent = 0, UNEVEN, source
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        if load_i64(incoming + 16 * peer) != load_i64(expected + 8 * peer):
            vote, awaited, sent = 1 + peer, load_i64(expected + 8 * peer), load_i64(incoming + 16 * peer)
    describe(ctx, call, awaited, sent, vote)
    if not sync(ctx):
        return c.STOPPED
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        if described(ctx, c.get(ctx, c.EPOCH), peer, VOTE) != 0:
            return c.mismatch(ctx, peer, c.IN_VOTES)
    return c.OK


@njit(cache=True, nogil=True)
def _copy_in(ctx: int, epoch: int, tensor: int, at: int, area: int) -> None:
    """Bytes ``at`` and on of each other rank's part into the epoch's lane to it."""
    splits = c.get(ctx, c.OUTGOING)
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        num_bytes = min(area, load_i64(splits + 16 * peer) - at)
        if num_bytes > 0:
            memcpy(own_lane(ctx, epoch, peer), tensor + load_i64(splits + 16 * peer + 8) + at, num_bytes)


@njit(cache=True, nogil=True)
def _take(ctx: int, epoch: int, at: int, area: int, sender: int) -> bool:
    """Bytes ``at`` and on of what each peer has for this rank, to where TARGETS says. False: some were not read."""
    rank, world_size, targets = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.TARGETS)
    incoming = c.get(ctx, c.INCOMING)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        if sender >= 0 and peer != sender:
            continue
        num_bytes = min(area, load_i64(incoming + 16 * peer) - at)
        in_tensor, target = load_i64(incoming + 16 * peer + 8) + at, load_i64(targets + 8 * peer) + at
        if num_bytes > 0 and not fetch(ctx, peer, epoch, IN_LANE, in_tensor, target, num_bytes):
            return False
    return True


@njit(cache=True, nogil=True)
def _keep(ctx: int, tensor: int, at: int, area: int, sender: int) -> None:
    """Bytes ``at`` and on of what this rank has for itself, to where TARGETS says."""
    rank = c.get(ctx, c.RANK)
    part = c.get(ctx, c.INCOMING) + 16 * rank
    num_bytes, source = min(area, load_i64(part) - at), tensor + load_i64(part + 8) + at
    target = load_i64(c.get(ctx, c.TARGETS) + 8 * rank) + at
    if (sender < 0 or rank == sender) and num_bytes > 0 and target != source:
        copy_out(ctx, target, source, num_bytes)


@njit(cache=True, nogil=True)
def _direct(ctx: int, tensor: int, largest: int, sender: int) -> int:
    """All of it out of the senders' tensors, and the closing barrier, whose signals travel while own data are kept."""
    if not _take(ctx, c.get(ctx, c.EPOCH), 0, largest, sender):
        return c.STOPPED
    closing = arrive(ctx)
    _keep(ctx, tensor, 0, largest, sender)
    return c.OK if await_peers(ctx, closing) else c.STOPPED


@njit(cache=True, nogil=True)
def _all_to_all(ctx: int, call: int, tensor: int, count: int, sender: int, output: int) -> int:
    even = count != UNEVEN and sender < 0
    largest = count if even else _largest_part(ctx)
    # Peers cannot read in place what this rank overwrites.
    in_place = even and output == tensor
    single = largest >= c.get(ctx, c.SINGLE_COPY_BYTES)
    if choose_copy(ctx, largest * c.get(ctx, c.WORLD_SIZE) if sender < 0 else largest):
        single = False
    source = STAGED if in_place else source_of(ctx, tensor, single)
    stages = source == STAGED and (sender < 0 or c.get(ctx, c.RANK) == sender)
    budget = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES))
    area = max(64, budget // c.get(ctx, c.WORLD_SIZE) // 64 * 64)
    epoch = c.get(ctx, c.EPOCH) + 1
    if stages and count != UNEVEN:
        _copy_in(ctx, epoch, tensor, 0, area)
    if not even:
        _publish(ctx, epoch)
    status = meet(ctx, call, count, source, largest)
    if status != c.OK:
        return status
    if not even:
        largest = _note_incoming(ctx, epoch)
    num_symmetric, num_private, num_staged = note_sources(ctx, epoch, sender)
    if count == UNEVEN:
        if stages:
            _copy_in(ctx, epoch + 1, tensor, 0, area)
        status = _agree(ctx, call, source)
        if status != c.OK:
            return status
    if num_staged == 0:
        return _direct(ctx, tensor, largest, sender)
    for at in range(0, largest, area):
        epoch, following = c.get(ctx, c.EPOCH), at + area
        if following < largest:
            if stages:
                _copy_in(ctx, epoch + 1, tensor, following, area)
            arrive(ctx)
        if not _take(ctx, epoch, at, area, sender):
            return c.STOPPED
        _keep(ctx, tensor, at, area, sender)
        if following < largest and not await_peers(ctx, epoch + 1):
            return c.STOPPED
    if num_symmetric + num_private > 0 and not sync(ctx):
        return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def all_to_all(ctx: int, call: int, tensor: int, count: int, sender: int, output: int) -> int:
    """Moves the part that each sender (a rank, or -1 for all) has for this rank to TARGETS[sender].

    ``count`` is the bytes of every part, or UNEVEN; the scratch tables hold what goes and comes: OUTGOING pairs (bytes,
    offset from ``tensor``) a taker, EXPECTED bytes a sender, TARGETS addresses. Where all send equal parts, which lie
    one after the other at ``tensor`` and at ``output``, the tables are filled here.
    """
    if not c.enter(ctx):
        return c.REFUSED
    if count != UNEVEN and sender < 0:
        _fill_even(ctx, count, output)
    return c.leave(ctx, _all_to_all(ctx, call, tensor, count, sender, output))
