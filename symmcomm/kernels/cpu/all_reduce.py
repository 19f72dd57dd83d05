"""All-reduce, and reduce to one rank (``root`` ≥ 0: only the root's tensor changes).

**One-shot** (small, or two ranks): each rank copies its tensor into its slot, in chunks; barrier; each reduces all
ranks' slots into its tensor. The next chunk is in its slot and signalled before that, so the barriers cost no time.

**Two-shot in place** (all tensors symmetric, at whatever offsets): barrier; rank r reduces slice r of all tensors and
writes it into slice r of all tensors; barrier. Nobody but rank r touches slice r between the two, so no copy is needed;
the second barrier makes the results visible and ends the reading.

**Two-shot staged**: a pipeline over chunks with one barrier a step. Before barrier e a rank copies the slices of chunk
k into its lanes e to those who reduce them, and reduces its slice of chunk k - 1, which peers hold in their lanes e -
1, into the result half of slot e; after e it collects the reduced slices of chunk k - 1. By the rules of reuse (see
``barrier``) the lanes of e - 1 stay as they are until then. A symmetric tensor among ordinary ones is read in place:
its owner writes chunk k - 1 only after barrier e, when all have read it. Of sizes that ordinary tensors would do one-
shot the chunks are then in slots, whole.

(Reading ordinary tensors out of their processes, as collectives that only move data do, was measured and is slower
here: both directions at once pay for the pages that the kernel looks up.)

The order of the sum is that of the ranks in all of them, and one rank computes each element (or all compute it alike),
so the bits are the same on every rank and for every path. Which path is taken follows from the size and from what all
ranks announce, so all take the same.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import arrive, await_peers, meet, sync
from symmcomm.kernels.cpu.primitives import call_5, load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import (
    IN_LANE,
    STAGED,
    note_sources,
    own_lane,
    own_slot,
    slice_start,
    source_of,
    window,
)

_TILE_BYTES = 32 << 10  # reduced and sent on while still in the first-level cache


@njit(cache=True, nogil=True)
def _reduce(ctx: int, function: int, destination: int, count: int) -> None:
    """Reduces the addresses collected in ADDRESSES, in rank order."""
    call_5(function, destination, c.get(ctx, c.ADDRESSES), c.get(ctx, c.WORLD_SIZE), count, c.get(ctx, c.TILE))


@njit(cache=True, nogil=True)
def _copy_in(ctx: int, epoch: int, chunk: int, count: int, itemsize: int, whole: bool) -> None:
    """Copies a chunk into the epoch's slot (``whole``), or each other rank's slice of it into the lane to that rank."""
    if whole:
        memcpy(own_slot(ctx, epoch), chunk, count * itemsize)
        return
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        start = slice_start(count, world_size, peer, itemsize) * itemsize
        end = slice_start(count, world_size, peer + 1, itemsize) * itemsize
        memcpy(own_lane(ctx, epoch, peer), chunk + start, end - start)


@njit(cache=True, nogil=True)
def _one_shot(ctx: int, tensor: int, count: int, itemsize: int, per_chunk: int, function: int, root: int) -> int:
    rank, addresses = c.get(ctx, c.RANK), c.get(ctx, c.ADDRESSES)
    for at in range(0, count, per_chunk):
        epoch, chunk, following = c.get(ctx, c.EPOCH), tensor + at * itemsize, at + per_chunk
        if following < count:
            n = min(per_chunk, count - following)
            _copy_in(ctx, epoch + 1, tensor + following * itemsize, n, itemsize, True)
            arrive(ctx)
        if root < 0 or rank == root:
            for peer in range(c.get(ctx, c.WORLD_SIZE)):
                store_i64(addresses + 8 * peer, c.slot(ctx, epoch, peer))
            store_i64(addresses + 8 * rank, chunk)
            _reduce(ctx, function, chunk, min(per_chunk, count - at))
        if following < count and not await_peers(ctx, epoch + 1):
            return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def _in_place(ctx: int, count: int, itemsize: int, function: int, root: int) -> int:
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    addresses, sources = c.get(ctx, c.ADDRESSES), c.get(ctx, c.SOURCES)
    holder = rank if root < 0 else root
    start, end = slice_start(count, world_size, rank, itemsize), slice_start(count, world_size, rank + 1, itemsize)
    step = _TILE_BYTES // itemsize
    for at in range(start, end, step):
        n = min(step, end - at)
        for peer in range(world_size):
            store_i64(addresses + 8 * peer, c.peer_address(ctx, peer, load_i64(sources + 8 * peer) + at * itemsize))
        result = load_i64(addresses + 8 * holder)
        _reduce(ctx, function, result, n)
        for hop in range(1, world_size if root < 0 else 1):
            memcpy(load_i64(addresses + 8 * ((rank + hop) % world_size)), result, n * itemsize)
    return c.OK if sync(ctx) else c.STOPPED


@njit(cache=True, nogil=True)
def _reduce_slice(
    ctx: int, epoch: int, tensor: int, at: int, count: int, itemsize: int, function: int, whole: bool
) -> None:
    """Own slice of the chunk at element ``at``, held by the peers since ``epoch``, into the next slot's result half."""
    rank, world_size, addresses = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.ADDRESSES)
    start, end = slice_start(count, world_size, rank, itemsize), slice_start(count, world_size, rank + 1, itemsize)
    for peer in range(world_size):
        in_slot = start * itemsize if whole else IN_LANE
        store_i64(addresses + 8 * peer, window(ctx, peer, epoch, in_slot, (at + start) * itemsize))
    store_i64(addresses + 8 * rank, tensor + (at + start) * itemsize)
    result = own_slot(ctx, epoch + 1) + c.get(ctx, c.SLOT_BYTES) // 2
    _reduce(ctx, function, result + start * itemsize, end - start)


@njit(cache=True, nogil=True)
def _collect(ctx: int, epoch: int, chunk: int, count: int, itemsize: int) -> None:
    """All ranks' slices of the chunk, out of the result halves of the epoch's slots."""
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for hop in range(world_size):
        peer = (rank + hop) % world_size
        start = slice_start(count, world_size, peer, itemsize) * itemsize
        end = slice_start(count, world_size, peer + 1, itemsize) * itemsize
        result = c.slot(ctx, epoch, peer) + c.get(ctx, c.SLOT_BYTES) // 2
        memcpy(chunk + start, result + start, end - start)


@njit(cache=True, nogil=True)
def _staged(
    ctx: int, tensor: int, count: int, itemsize: int, per_chunk: int, source: int, function: int, root: int, whole: bool
) -> int:
    takes = root < 0 or c.get(ctx, c.RANK) == root
    for at in range(0, count, per_chunk):
        epoch, following = c.get(ctx, c.EPOCH), at + per_chunk
        if source == STAGED and following < count:
            n = min(per_chunk, count - following)
            _copy_in(ctx, epoch + 1, tensor + following * itemsize, n, itemsize, whole)
        n = min(per_chunk, count - at)
        _reduce_slice(ctx, epoch, tensor, at, n, itemsize, function, whole)
        if not sync(ctx):
            return c.STOPPED
        if takes:
            _collect(ctx, epoch + 1, tensor + at * itemsize, n, itemsize)
    return c.OK


@njit(cache=True, nogil=True)
def _all_reduce(ctx: int, call: int, tensor: int, count: int, itemsize: int, function: int, root: int) -> int:
    num_bytes = count * itemsize
    small = num_bytes <= c.get(ctx, c.ONE_SHOT_BYTES)
    source = source_of(ctx, tensor, False) if num_bytes >= c.get(ctx, c.IN_PLACE_BYTES) else STAGED
    per_chunk = min(c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES) // 2) // itemsize
    if source == STAGED:
        _copy_in(ctx, c.get(ctx, c.EPOCH) + 1, tensor, min(per_chunk, count), itemsize, small)
    status = meet(ctx, call, count, source, 0)
    if status != c.OK:
        return status
    num_symmetric, _, num_staged = note_sources(ctx, c.get(ctx, c.EPOCH), -1)
    if num_staged == 0:
        return _in_place(ctx, count, itemsize, function, root)
    if small and num_symmetric == 0:
        return _one_shot(ctx, tensor, count, itemsize, per_chunk, function, root)
    return _staged(ctx, tensor, count, itemsize, per_chunk, source, function, root, small)


@njit(cache=True, nogil=True)
def all_reduce(ctx: int, reduction: int, tensor: int, count: int) -> int:
    """Reduces ``count`` elements at ``tensor`` over all ranks, as the ``reduction`` (see ``reduce``) says."""
    if not c.enter(ctx):
        return c.REFUSED
    call, itemsize, function = load_i64(reduction), load_i64(reduction + 8), load_i64(reduction + 16)
    root = load_i64(reduction + 24)
    if c.get(ctx, c.WORLD_SIZE) == 1:
        return c.leave(ctx, c.OK)
    return c.leave(ctx, _all_reduce(ctx, call, tensor, count, itemsize, function, root))
