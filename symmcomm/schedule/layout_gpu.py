"""Where state, pads, the protocols' areas and staging lie at the start of every rank's heap on a GPU. Pure functions of
the world size, so an offset is enough to reach a peer's pad, and a kernel holds the offsets as constants.

The first part is private to the rank: peers neither read nor write it. Everything must be zero when a communicator is
made, but for the fields that its host writes. Nothing is ever reset, but Lamport areas by who takes from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

NUM_CHANNELS = 192
"""CTAs that a kernel can have: one channel a CTA, and no GPU up to sm_100 has more SMs."""
NUM_SWAP_CHANNELS = 64
"""Channels of the compare-and-swap pad, as in torch's symmetric memory: ``pad[channel * world_size + sender]``."""
CHANNEL_LL_BYTES = 128 << 10
"""LL memory of a channel: ``[parity of the epoch][sender][16-byte cells]``."""
LL_CELL_BYTES = 16
NUM_STAGED_CHANNELS = 128
"""CTAs that a staged kernel can have."""
CHANNEL_STAGING_BYTES = 256 << 10
"""Staging memory of a channel: ``[number of the chunk mod DEPTH][sender][bytes]``."""
AHEAD = 2
"""Chunks that a staged kernel sends before it takes the first one."""
DEPTH = 2 * AHEAD
"""Slots for chunks; a power of two, as 32-bit chunk numbers wrap around."""
NUM_LAMPORT_CHANNELS = 128
"""CTAs that a kernel of vectors that announce themselves can have."""
CHANNEL_LAMPORT_BYTES = 512 << 10
"""Memory of a channel for such vectors: ``[parity of the epoch][sender][16-byte vectors]``."""
VECTOR_BYTES = 16
"""What a thread loads or stores at once."""
MOST_VECTORS = 32
"""That announce themselves a thread may await at once, of all ranks: it has a bit of a word for each."""
SPLIT_BYTES = 32
"""Three i64 that go with the first chunk of an uneven all-to-all; see ``kernels.gpu.all_to_all``."""

# Private state, byte offsets in the own heap.
FAILED = 0  # u32: 0, GAVE_UP or COMPLAINED; a Record tells what came first
RECORD = 8  # i64, address of this rank's Record in pinned host memory
TIMEOUT_NS = 16  # i64, deadline of a wait
DELAY_NS = 24  # i64, fault injection: CTA 0 sleeps that long before its first signal
RING_EPOCH = 32  # u32, rounds of the ring barrier
MULTICAST_EPOCH = 36  # u32, multicast barriers
EPOCHS = 128  # u32[NUM_CHANNELS], each advanced by its CTA alone

GAVE_UP = 1  # a wait passed its deadline; from now on kernels return at once
COMPLAINED = 2  # the call was wrong; kernels go on

_PAGE_BYTES = 4096
_LINE_BYTES = 128


class Phase(IntEnum):
    """What a kernel was waiting for when its deadline passed."""

    enter = 1
    """The peer had not launched the kernel."""
    leave = 2
    """The peer had launched the kernel but not finished its part."""
    data = 3
    """Payload of the peer."""
    ring = 4
    """The previous rank's round."""
    put = 5
    """The receiver had not taken the last compare-and-swap signal."""
    take = 6
    """The sender's compare-and-swap signal."""
    splits = 7
    """Nothing: the peer sends or awaits another number of bytes (``seen``) than this rank (``expected``)."""
    room = 8
    """That the receiver takes what was sent before, and clears its place."""
    message = 9
    """The sender's message."""
    size = 10
    """Nothing: the sender's message has another number of bytes (``seen``) than the receiver's (``expected``)."""


@dataclass(frozen=True)
class Record:
    """A wait that gave up, or a complaint, whichever came first: eight 32-bit words in pinned host memory, ``valid``
    stored last."""

    valid: int
    rank: int
    peer: int
    channel: int
    expected: int
    seen: int
    phase: int

    NUM_WORDS = 8


@dataclass(frozen=True)
class Layout:
    """Byte offsets from the start of a rank's heap.

    Attributes:
        pads: epochs that peers signal, ``u32[channel][sender]``, a channel on lines of its own.
        pad_bytes: from one channel's pad to the next.
        ring: the one word that the previous rank of the ring writes.
        count: the word that all ranks add to in a multicast barrier.
        swap_pad: ``u32[NUM_SWAP_CHANNELS][sender]``.
        ll: LL areas, CHANNEL_LL_BYTES a channel.
        ll_slot_bytes: what one sender may fill of a channel's LL area at one epoch.
        splits: ``[staged channel][number of the chunk mod DEPTH][sender]``, SPLIT_BYTES each.
        staging: CHANNEL_STAGING_BYTES a staged channel.
        staging_slot_bytes: a chunk of one sender; a multiple of 128.
        lamport: CHANNEL_LAMPORT_BYTES each of the NUM_LAMPORT_CHANNELS; 0 wherever nothing has arrived (see
            ``kernels.gpu.lamport``).
        lamport_slot_bytes: what one sender may fill of a channel's at one epoch.
        escapes: a byte for each vector there, in the same order.
        data: the end of it all, where the ``MessageLayout`` follows.
    """

    world_size: int
    pads: int
    pad_bytes: int
    ring: int
    count: int
    swap_pad: int
    ll: int
    ll_slot_bytes: int
    splits: int
    staging: int
    staging_slot_bytes: int
    lamport: int
    lamport_slot_bytes: int
    escapes: int
    data: int

    @classmethod
    def create(cls, world_size: int) -> Layout:
        """The layout for ``world_size`` ranks."""
        pads = _PAGE_BYTES
        pad_bytes = _align_up(4 * world_size, _LINE_BYTES)
        ring = pads + NUM_CHANNELS * pad_bytes
        count = ring + _LINE_BYTES
        swap_pad = count + _LINE_BYTES
        ll = _align_up(swap_pad + NUM_SWAP_CHANNELS * world_size * 4, _PAGE_BYTES)
        splits = ll + NUM_CHANNELS * CHANNEL_LL_BYTES
        staging = _align_up(splits + NUM_STAGED_CHANNELS * DEPTH * world_size * SPLIT_BYTES, _PAGE_BYTES)
        lamport = staging + NUM_STAGED_CHANNELS * CHANNEL_STAGING_BYTES
        escapes = lamport + NUM_LAMPORT_CHANNELS * CHANNEL_LAMPORT_BYTES
        return cls(
            world_size=world_size,
            pads=pads,
            pad_bytes=pad_bytes,
            ring=ring,
            count=count,
            swap_pad=swap_pad,
            ll=ll,
            ll_slot_bytes=CHANNEL_LL_BYTES // (2 * world_size) // _LINE_BYTES * _LINE_BYTES,
            splits=splits,
            staging=staging,
            staging_slot_bytes=CHANNEL_STAGING_BYTES // (DEPTH * world_size) // _LINE_BYTES * _LINE_BYTES,
            lamport=lamport,
            lamport_slot_bytes=CHANNEL_LAMPORT_BYTES // (2 * world_size) // _LINE_BYTES * _LINE_BYTES,
            escapes=escapes,
            data=escapes + NUM_LAMPORT_CHANNELS * CHANNEL_LAMPORT_BYTES // VECTOR_BYTES,
        )


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


NUM_MESSAGE_LANES = 32
"""CTAs of a send or receive, each with a queue of its own."""
NUM_MESSAGE_SLOTS = 4
"""Chunks in a queue; a power of two, as 32-bit chunk numbers wrap around."""
PART_BYTES = 32
"""What a rank notes of what it sends to a peer and takes from it: four i64."""
_MESSAGE_BYTES = 16 << 20
_LARGEST_CHUNK = 32 << 10


@dataclass(frozen=True)
class MessageLayout:
    """Where the queues of messages (``kernels.gpu.point_to_point``) and, behind them, the parts of an uneven all-to-all
    (``kernels.gpu.all_to_all``) lie, as byte offsets in a rank's heap.

    Attributes:
        counters: private, chunks sent to and taken from each peer: ``u32[sent, taken][peer][lane]``.
        sent: chunks that each peer has sent here, which it signals: ``u32[sender][lane]``.
        taken: chunks of this rank that each peer has taken, which it signals: ``u32[receiver][lane]``.
        headers: bytes of the message to which a chunk belongs: ``i64[sender][lane][slot]``.
        slots: the chunks, ``chunk_bytes`` each: ``[sender][lane][slot]``.
        parts: private, PART_BYTES for each peer.
        end: of it all; from here on the heap is free for tensors.
    """

    world_size: int
    counters: int
    sent: int
    taken: int
    headers: int
    slots: int
    chunk_bytes: int
    parts: int
    end: int

    @classmethod
    def create(cls, world_size: int) -> MessageLayout:
        """The layout for ``world_size`` ranks, behind the ``Layout``."""
        lanes = world_size * NUM_MESSAGE_LANES
        counters = Layout.create(world_size).data
        sent = counters + _align_up(2 * lanes * 4, _LINE_BYTES)
        taken = sent + _align_up(lanes * 4, _LINE_BYTES)
        headers = taken + _align_up(lanes * 4, _LINE_BYTES)
        slots = _align_up(headers + lanes * NUM_MESSAGE_SLOTS * 8, _PAGE_BYTES)
        share = _MESSAGE_BYTES // (lanes * NUM_MESSAGE_SLOTS) // _LINE_BYTES * _LINE_BYTES
        chunk_bytes = max(_LINE_BYTES, min(_LARGEST_CHUNK, share))
        parts = _align_up(slots + lanes * NUM_MESSAGE_SLOTS * chunk_bytes, _PAGE_BYTES)
        return cls(
            world_size=world_size,
            counters=counters,
            sent=sent,
            taken=taken,
            headers=headers,
            slots=slots,
            chunk_bytes=chunk_bytes,
            parts=parts,
            end=_align_up(parts + world_size * PART_BYTES, _PAGE_BYTES),
        )


def ll_words(itemsize: int) -> int:
    """Words of data in an LL cell, beside the flag; elements of 8 bytes are not divided among cells."""
    return 2 if itemsize == 8 else 3
