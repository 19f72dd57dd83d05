"""Where the ranks of a collective find each other's data, and how a rank reads it.

What a rank announces as the source of its data, when a collective opens:

- a heap offset: the tensor is symmetric; peers read it where it lies;
- ``private(address)``: an ordinary tensor, large enough that peers read it out of this process's memory, in one copy
  by the kernel (``process_vm_readv``; only where all ranks found at ``init`` that they may);
- STAGED: an ordinary tensor that this rank copies, chunk by chunk, into its slots (what is for all) or lanes (what is
  for one).

The mix may differ from rank to rank: everyone sees all announcements at the opening barrier, so all agree on the number
of steps (one if nothing is staged) and on whether a closing barrier must protect tensors that peers read.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import SOURCE, described
from symmcomm.kernels.cpu.primitives import load_i64, memcpy, memcpy_past_caches, read_process, store_i64

STAGED = -1
IN_LANE = -1
"""In place of an offset in a slot: the data are in the lane to the reading rank."""


@njit(cache=True, nogil=True)
def private(address: int) -> int:
    """The announcement of an ordinary tensor at an address; its own inverse."""
    return -2 - address


@njit(cache=True, nogil=True)
def source_of(ctx: int, address: int, single: bool) -> int:
    """What to announce for data at an address of this process; ``single``: by a single copy if they are private."""
    offset = address - c.peer_address(ctx, c.get(ctx, c.RANK), 0)
    if 0 <= offset < c.get(ctx, c.HEAP_BYTES):
        return offset
    return private(address) if single else STAGED


@njit(cache=True, nogil=True)
def note_sources(ctx: int, epoch: int, root: int) -> tuple[int, int, int]:
    """Keeps what the senders (``root``, or all if negative) announced at the epoch. Returns how many are symmetric,
    private and staged."""
    sources = c.get(ctx, c.SOURCES)
    num_symmetric, num_private, num_staged = 0, 0, 0
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        source = described(ctx, epoch, peer, SOURCE)
        store_i64(sources + 8 * peer, source)
        if root < 0 or peer == root:
            num_symmetric += source >= 0
            num_private += source < STAGED
            num_staged += source == STAGED
    return num_symmetric, num_private, num_staged


@njit(cache=True, nogil=True)
def window(ctx: int, peer: int, epoch: int, in_slot: int, in_tensor: int) -> int:
    """Address of the peer's data after the barrier of ``epoch``: ``in_slot`` bytes into its slot, its lane to this rank
    (IN_LANE), or ``in_tensor`` bytes into its symmetric tensor. 0 for a private one, which has no address here."""
    source = load_i64(c.get(ctx, c.SOURCES) + 8 * peer)
    if source < STAGED:
        return 0
    if source == STAGED:
        if in_slot == IN_LANE:
            return c.lane(ctx, epoch, peer, c.get(ctx, c.RANK))
        return c.slot(ctx, epoch, peer) + in_slot
    return c.peer_address(ctx, peer, source + in_tensor)


@njit(cache=True, nogil=True)
def choose_copy(ctx: int, output_bytes: int) -> bool:
    """Decides whether ``copy_out`` passes the caches by. Returns whether the output is so large that staging it for
    that beats a single copy by the kernel, which goes through the caches."""
    c.put(ctx, c.STREAMS, output_bytes >= c.get(ctx, c.STREAM_BYTES))
    return output_bytes >= 2 * c.get(ctx, c.STREAM_BYTES)


@njit(cache=True, nogil=True)
def copy_out(ctx: int, target: int, source: int, num_bytes: int) -> None:
    """Copies into this rank's output."""
    if c.get(ctx, c.STREAMS) != 0:
        memcpy_past_caches(target, source, num_bytes)
    else:
        memcpy(target, source, num_bytes)


@njit(cache=True, nogil=True)
def fetch(ctx: int, peer: int, epoch: int, in_slot: int, in_tensor: int, target: int, num_bytes: int) -> bool:
    """Copies the peer's data (see ``window``) to an address of this process. False: its memory could not be read."""
    address = window(ctx, peer, epoch, in_slot, in_tensor)
    if address != 0:
        copy_out(ctx, target, address, num_bytes)
        return True
    remote = private(load_i64(c.get(ctx, c.SOURCES) + 8 * peer)) + in_tensor
    if read_process(load_i64(c.get(ctx, c.PIDS) + 8 * peer), remote, target, num_bytes):
        return True
    c.put(ctx, c.WAIT_PEER, peer)  # POLL is not asked: the peer's death, or this, is what ``Watch.stop`` reports
    c.put(ctx, c.WAIT_WORD, 0)
    return False


@njit(cache=True, nogil=True)
def own_slot(ctx: int, epoch: int) -> int:
    """Address of what this rank has for all at the barrier of ``epoch``."""
    return c.slot(ctx, epoch, c.get(ctx, c.RANK))


@njit(cache=True, nogil=True)
def own_lane(ctx: int, epoch: int, peer: int) -> int:
    """Address of what this rank has for the peer at the barrier of ``epoch``."""
    return c.lane(ctx, epoch, c.get(ctx, c.RANK), peer)


@njit(cache=True, nogil=True)
def slice_start(count: int, world_size: int, rank: int, itemsize: int) -> int:
    """First element of the rank's part of ``count``: parts are whole cache lines, the last ones shorter or empty."""
    per_line = 64 // itemsize
    part = -(-count // world_size)
    part = -(-part // per_line) * per_line
    return min(rank * part, count)
