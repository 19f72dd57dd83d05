"""The one argument that every kernel takes: the address of a block of 64-bit fields, one a communicator, not shared.

Numba's call overhead grows with the number of arguments, so what does not change from call to call lies here. Field
numbers are module constants, hence literals in compiled code.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu.primitives import compare_and_swap, load_i64, store_i64
from symmcomm.memory.signals import LINE_BYTES, NUM_SLOTS

BASE, STRIDE, RANK, WORLD_SIZE = 0, 1, 2, 3  # flat address space: peer p's heap is at BASE + p·STRIDE
LINES, RING, SENT, TAKEN, SIGNAL_PAD = 4, 5, 6, 7, 8  # offsets of the pads, see memory.signals
MESSAGES, MESSAGE_BYTES, STAGING, SLOT_BYTES, CHUNK_BYTES, ONE_SHOT_BYTES = 9, 10, 11, 12, 13, 14
EPOCH, RING_EPOCH = 15, 16  # how many barriers this rank has entered
SPINS, YIELDS, POLL = 17, 18, 19  # back-off of a wait; address of the function asked when nothing arrives
STATE = 20  # OPEN, or why no call may start
WAIT_PEER, WAIT_EXPECTED, WAIT_WORD, WAIT_SINCE = 21, 22, 23, 24  # what the rank waits for: read by POLL
TILE, ADDRESSES, SOURCES, TARGETS = 25, 26, 27, 28  # scratch: accumulators; one address or offset a peer
CHUNKS_SENT, CHUNKS_TAKEN = 29, 30  # counters of point-to-point chunks, one a peer
DELAY_NS = 31  # fault injection: how long this rank sleeps before each of its signals
MISMATCH_PEER, MISMATCH_PLACE = 32, 33  # who disagrees, and what tells: see IN_OPENING and the following
SPLITS, INCOMING, OUTGOING, EXPECTED = 34, 35, 36, 37  # an all-to-all's table, and its scratch
HEAP_BYTES = 38  # of this rank's part of the address space
# Least sizes read out of tensors themselves: symmetric ones by an all-reduce, ordinary ones where data only move.
IN_PLACE_BYTES, SINGLE_COPY_BYTES = 39, 40
PIPELINED_BYTES = 42  # from here on a call with one sender is staged again
PIDS = 43  # process ids, one a peer
EXPECTED_CALL, EXPECTED_COUNT, SENT_CALL, SENT_COUNT = 44, 45, 46, 47  # of a message that was refused
STEPS, STEP_EPOCH = 48, 49  # offset of the lines of a plan's messages; how many signals plans have taken
LANES, LANE_BYTES = 50, 51  # offset of the lanes, and their size
STREAM_BYTES, STREAMS = 52, 53  # least output that is written past the caches; whether this call's is
NUM_FIELDS = 54

IN_OPENING, IN_VOTES, AS_SENDER, AS_RECEIVER = 0, 1, 2, 3  # lines of the barrier; or EXPECTED_ and SENT_ fields
OPEN, IN_CALL, CLOSED, FAILED, FORKED = 0, 1, 2, 3, 4  # values of STATE
OK, STOPPED, MISMATCH, REFUSED = 0, 1, 2, 3  # what a kernel returns; STOPPED: a wait, by POLL; REFUSED: not OPEN

STOP, GO_ON, RAISED = 0, 1, -1  # what POLL answers; RAISED: this rank itself, as Ctrl-C does, and the call must raise

TILE_ELEMENTS = 2048
"""Accumulators that a reduction of more than two sources keeps in the first-level cache."""


@njit(cache=True, nogil=True)
def get(ctx: int, field: int) -> int:
    return load_i64(ctx + 8 * field)


@njit(cache=True, nogil=True)
def put(ctx: int, field: int, value: int) -> None:
    store_i64(ctx + 8 * field, value)


@njit(cache=True, nogil=True)
def peer_address(ctx: int, peer: int, offset: int) -> int:
    """Where byte ``offset`` of the peer's heap is in this process."""
    return get(ctx, BASE) + peer * get(ctx, STRIDE) + offset


@njit(cache=True, nogil=True)
def line_offset(ctx: int, epoch: int, sender: int) -> int:
    """Offset of the line that ``sender`` writes for barriers of this epoch's parity."""
    return get(ctx, LINES) + ((epoch & 1) * get(ctx, WORLD_SIZE) + sender) * LINE_BYTES


@njit(cache=True, nogil=True)
def slot_offset(ctx: int, epoch: int) -> int:
    """Offset of the staging slot that is written before arriving at ``epoch`` (rule of reuse, see ``barrier``)."""
    return get(ctx, STAGING) + (epoch % NUM_SLOTS) * get(ctx, SLOT_BYTES)


@njit(cache=True, nogil=True)
def lane(ctx: int, epoch: int, sender: int, taker: int) -> int:
    """Address of the lane that ``sender`` writes before arriving at ``epoch``, for ``taker`` alone (rule of reuse of
    lanes, see ``barrier``)."""
    home, other = (sender, taker) if epoch & 2 == 0 else (taker, sender)
    world_size = get(ctx, WORLD_SIZE)
    index = (epoch & 1) * (world_size - 1) + (other - home - 1) % world_size
    return peer_address(ctx, home, get(ctx, LANES) + index * get(ctx, LANE_BYTES))


@njit(cache=True, nogil=True)
def slot(ctx: int, epoch: int, owner: int) -> int:
    """Address of what ``owner`` writes before arriving at ``epoch``, for all: its slot, or the lane to its one peer."""
    if get(ctx, WORLD_SIZE) == 2:
        return lane(ctx, epoch, owner, 1 - owner)
    return peer_address(ctx, owner, slot_offset(ctx, epoch))


@njit(cache=True, nogil=True)
def mismatch(ctx: int, peer: int, place: int) -> int:
    """Notes a disagreement for ``collectives.mismatch``."""
    put(ctx, MISMATCH_PEER, peer)
    put(ctx, MISMATCH_PLACE, place)
    return MISMATCH


@njit(cache=True, nogil=True)
def enter(ctx: int) -> bool:
    """Starts a call. False where the communicator is closed, has failed, was forked, or another thread is in a call."""
    return compare_and_swap(ctx + 8 * STATE, OPEN, IN_CALL) == OPEN


@njit(cache=True, nogil=True)
def leave(ctx: int, status: int) -> int:
    """Ends a call; after a stopped wait the communicator stays refused."""
    put(ctx, STATE, FAILED if status == STOPPED else OPEN)
    return status
