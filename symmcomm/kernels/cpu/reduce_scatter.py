"""Reduce-scatter: rank r ends with part r of the sum of all inputs, ``count`` elements.

Staged: one barrier a step. Before barrier e a rank copies chunk k of every other rank's part into its lane e to it;
after e it fills the lanes e + 1, arrives at e + 1, and then reduces its own part's chunk k out of the peers' lanes e
(rule of reuse, see ``barrier``). Symmetric inputs: barrier, reduce out of the peers' tensors, barrier, so that nobody
changes an input that is still read.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import arrive, await_peers, meet, sync
from symmcomm.kernels.cpu.primitives import call_5, load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import IN_LANE, STAGED, note_sources, own_lane, source_of, window


@njit(cache=True, nogil=True)
def _copy_in(ctx: int, epoch: int, tensor: int, at: int, per_chunk: int, count: int, itemsize: int) -> None:
    """Chunk at element ``at`` of each other rank's part into the epoch's lane to it."""
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        chunk = tensor + (peer * count + at) * itemsize
        memcpy(own_lane(ctx, epoch, peer), chunk, min(per_chunk, count - at) * itemsize)


@njit(cache=True, nogil=True)
def _reduce_scatter(ctx: int, call: int, output: int, tensor: int, count: int, itemsize: int, function: int) -> int:
    rank, world_size, addresses = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.ADDRESSES)
    budget = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES))
    source = source_of(ctx, tensor, False)
    per_chunk = max(64, budget // world_size // 64 * 64) // itemsize
    if source == STAGED:
        _copy_in(ctx, c.get(ctx, c.EPOCH) + 1, tensor, 0, per_chunk, count, itemsize)
    status = meet(ctx, call, count, source, 0)
    if status != c.OK:
        return status
    num_symmetric, _, num_staged = note_sources(ctx, c.get(ctx, c.EPOCH), -1)
    if num_staged == 0:
        per_chunk = max(count, 1)
    for at in range(0, count, per_chunk):
        epoch, n = c.get(ctx, c.EPOCH), min(per_chunk, count - at)
        more = num_staged > 0 and at + per_chunk < count
        if more:
            if source == STAGED:
                _copy_in(ctx, epoch + 1, tensor, at + per_chunk, per_chunk, count, itemsize)
            arrive(ctx)
        in_tensor = (rank * count + at) * itemsize
        for peer in range(world_size):
            store_i64(addresses + 8 * peer, window(ctx, peer, epoch, IN_LANE, in_tensor))
        store_i64(addresses + 8 * rank, tensor + in_tensor)
        call_5(function, output + at * itemsize, addresses, world_size, n, c.get(ctx, c.TILE))
        if more and not await_peers(ctx, epoch + 1):
            return c.STOPPED
    if num_symmetric > 0 and not sync(ctx):
        return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def reduce_scatter(ctx: int, reduction: int, output: int, tensor: int, count: int) -> int:
    """Reduces part ``rank`` of the ``world_size`` × ``count`` elements at ``tensor`` into ``output``, as the
    ``reduction`` (see ``reduce``) says."""
    if not c.enter(ctx):
        return c.REFUSED
    call, itemsize, function = load_i64(reduction), load_i64(reduction + 8), load_i64(reduction + 16)
    if c.get(ctx, c.WORLD_SIZE) == 1:
        if output != tensor:
            memcpy(output, tensor, count * itemsize)
        return c.leave(ctx, c.OK)
    return c.leave(ctx, _reduce_scatter(ctx, call, output, tensor, count, itemsize, function))
