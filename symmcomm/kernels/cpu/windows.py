"""Where the ranks of a collective find each other's data: in a symmetric tensor itself, or in a staging slot.

A rank whose input is symmetric announces its heap offset; one with an ordinary tensor announces STAGED and copies
chunks into its staging slots. The mix may differ from rank to rank: everyone sees all announcements at the opening
barrier, so all agree on the number of steps (one if nothing is staged) and on whether a closing barrier must protect
tensors that peers read in place.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import SOURCE, described
from symmcomm.kernels.cpu.primitives import load_i64, store_i64

STAGED = -1


@njit(cache=True, nogil=True)
def source_of(ctx: int, address: int) -> int:
    """Heap offset of a tensor of this rank, or STAGED if it lies elsewhere."""
    offset = address - c.peer_address(ctx, c.get(ctx, c.RANK), 0)
    return offset if 0 <= offset < c.get(ctx, c.HEAP_BYTES) else STAGED


@njit(cache=True, nogil=True)
def note_sources(ctx: int, epoch: int, root: int) -> tuple[int, int]:
    """Keeps what the senders (``root``, or all if negative) announced at the epoch. Returns how many are staged, and
    how many are read in place."""
    sources = c.get(ctx, c.SOURCES)
    num_staged, num_in_place = 0, 0
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        source = described(ctx, epoch, peer, SOURCE)
        store_i64(sources + 8 * peer, source)
        if root < 0 or peer == root:
            num_staged += source < 0
            num_in_place += source >= 0
    return num_staged, num_in_place


@njit(cache=True, nogil=True)
def window(ctx: int, peer: int, epoch: int, in_slot: int, in_tensor: int) -> int:
    """Address of the peer's data after the barrier of ``epoch``: ``in_slot`` bytes into its staging slot, or
    ``in_tensor`` bytes into its symmetric tensor."""
    source = load_i64(c.get(ctx, c.SOURCES) + 8 * peer)
    if source < 0:
        return c.peer_address(ctx, peer, c.slot_offset(ctx, epoch) + in_slot)
    return c.peer_address(ctx, peer, source + in_tensor)


@njit(cache=True, nogil=True)
def own_slot(ctx: int, epoch: int) -> int:
    """Address of this rank's staging slot for the barrier of ``epoch``."""
    return c.peer_address(ctx, c.get(ctx, c.RANK), c.slot_offset(ctx, epoch))


@njit(cache=True, nogil=True)
def slice_start(count: int, world_size: int, rank: int, itemsize: int) -> int:
    """First element of the rank's part of ``count``: parts are whole cache lines, the last ones shorter or empty."""
    per_line = 64 // itemsize
    part = -(-count // world_size)
    part = -(-part // per_line) * per_line
    return min(rank * part, count)
