"""All-reduce, and reduce to one rank (``root`` ≥ 0: only the root's tensor changes).

**One-shot** (small): each rank copies its tensor into its slot; barrier; each reduces all ranks' slots into its tensor.

**Two-shot in place** (all tensors symmetric, at whatever offsets): barrier; rank r reduces slice r of all tensors and
writes it into slice r of all tensors; barrier. Nobody but rank r touches slice r between the two, so no copy is needed;
the second barrier makes the results visible and ends the reading.

**Two-shot staged** (any tensor is ordinary): a pipeline over chunks with one barrier a step. Before barrier e a rank
copies chunk k into slot e, and reduces its slice of chunk k - 1, which peers hold in slots e - 1, into the result half
of slot e; after e it collects the reduced slices of chunk k - 1. By the rule of two parities (see ``barrier``) the
slots of e - 1 stay as they are until this rank arrives at e. A symmetric tensor among ordinary ones is read in place:
its owner writes chunk k - 1 only after barrier e, when all have read it.

The order of the sum is that of the ranks in all three, and one rank computes each element (or all compute it alike), so
the bits are the same on every rank and for every path.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import meet, sync
from symmcomm.kernels.cpu.primitives import call_5, load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import STAGED, note_sources, own_slot, slice_start, source_of, window

_TILE_BYTES = 32 << 10  # reduced and sent on while still in the first-level cache


@njit(cache=True, nogil=True)
def _reduce(ctx: int, function: int, destination: int, count: int) -> None:
    """Reduces the addresses collected in ADDRESSES, in rank order."""
    call_5(function, destination, c.get(ctx, c.ADDRESSES), c.get(ctx, c.WORLD_SIZE), count, c.get(ctx, c.TILE))


@njit(cache=True, nogil=True)
def _one_shot(ctx: int, call: int, tensor: int, count: int, itemsize: int, function: int, root: int) -> int:
    rank, epoch, addresses = c.get(ctx, c.RANK), c.get(ctx, c.EPOCH) + 1, c.get(ctx, c.ADDRESSES)
    memcpy(own_slot(ctx, epoch), tensor, count * itemsize)
    status = meet(ctx, call, count, STAGED, 0)
    if status != c.OK or (root >= 0 and rank != root):
        return status
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        store_i64(addresses + 8 * peer, c.peer_address(ctx, peer, c.slot_offset(ctx, epoch)))
    store_i64(addresses + 8 * rank, tensor)
    _reduce(ctx, function, tensor, count)
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
def _copy_in(ctx: int, slot: int, chunk: int, count: int, itemsize: int) -> None:
    """Copies a chunk into the slot, but for the slice that this rank reduces itself."""
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    start = slice_start(count, world_size, rank, itemsize) * itemsize
    end = slice_start(count, world_size, rank + 1, itemsize) * itemsize
    memcpy(slot, chunk, start)
    memcpy(slot + end, chunk + end, count * itemsize - end)


@njit(cache=True, nogil=True)
def _reduce_slice(ctx: int, epoch: int, tensor: int, at: int, count: int, itemsize: int, function: int) -> None:
    """Own slice of the chunk at element ``at``, held by the peers since ``epoch``, into the next slot's result half."""
    rank, world_size, addresses = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.ADDRESSES)
    start, end = slice_start(count, world_size, rank, itemsize), slice_start(count, world_size, rank + 1, itemsize)
    for peer in range(world_size):
        where = window(ctx, peer, epoch, start * itemsize, (at + start) * itemsize)
        store_i64(addresses + 8 * peer, where)
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
        result = c.peer_address(ctx, peer, c.slot_offset(ctx, epoch) + c.get(ctx, c.SLOT_BYTES) // 2)
        memcpy(chunk + start, result + start, end - start)


@njit(cache=True, nogil=True)
def _two_shot(ctx: int, call: int, tensor: int, count: int, itemsize: int, function: int, root: int) -> int:
    per_chunk = min(c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES) // 2) // itemsize
    source = source_of(ctx, tensor)
    if source < 0:
        _copy_in(ctx, own_slot(ctx, c.get(ctx, c.EPOCH) + 1), tensor, min(per_chunk, count), itemsize)
    status = meet(ctx, call, count, source, 0)
    if status != c.OK:
        return status
    if note_sources(ctx, c.get(ctx, c.EPOCH), -1)[0] == 0:
        return _in_place(ctx, count, itemsize, function, root)
    takes = root < 0 or c.get(ctx, c.RANK) == root
    for at in range(0, count, per_chunk):
        epoch, following = c.get(ctx, c.EPOCH), at + per_chunk
        if source < 0 and following < count:
            slot, chunk = own_slot(ctx, epoch + 1), tensor + following * itemsize
            _copy_in(ctx, slot, chunk, min(per_chunk, count - following), itemsize)
        n = min(per_chunk, count - at)
        _reduce_slice(ctx, epoch, tensor, at, n, itemsize, function)
        if not sync(ctx):
            return c.STOPPED
        if takes:
            _collect(ctx, epoch + 1, tensor + at * itemsize, n, itemsize)
    return c.OK


@njit(cache=True, nogil=True)
def all_reduce(ctx: int, reduction: int, tensor: int, count: int) -> int:
    """Reduces ``count`` elements at ``tensor`` over all ranks, as the ``reduction`` (see ``reduce``) says."""
    if not c.enter(ctx):
        return c.REFUSED
    call, itemsize, function = load_i64(reduction), load_i64(reduction + 8), load_i64(reduction + 16)
    root = load_i64(reduction + 24)
    if c.get(ctx, c.WORLD_SIZE) == 1:
        return c.leave(ctx, c.OK)
    if count * itemsize <= c.get(ctx, c.ONE_SHOT_BYTES):
        return c.leave(ctx, _one_shot(ctx, call, tensor, count, itemsize, function, root))
    return c.leave(ctx, _two_shot(ctx, call, tensor, count, itemsize, function, root))
