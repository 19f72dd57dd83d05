"""Where the signal pads, the mailboxes and the staging buffer lie at the start of every rank's heap.

All ranks compute the same layout from the world size, so an offset is enough to reach a peer's pad. Every word that one
rank writes and another polls has a 64-byte line of its own::

    line:  +0 epoch (u32)   +4 sleepers (u32)   +8 call   +16 count   +24 source   +32 vote      (i64 each)

``epoch`` is stored with release by the line's one writer; ``sleepers`` counts readers asleep in a futex on the epoch;
the rest describes the call that the writer has entered, and is written before the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE_BYTES = 64
PAGE_BYTES = 4096
NUM_CHANNELS = 64
"""Channels of the compare-and-swap pads, as in torch's symmetric memory: ``pad[channel * world_size + sender]``."""
WAITING = 24
"""Offset in the status page: 1 + the rank that the owner waits for, 0 while it waits for none."""
NUM_MESSAGE_SLOTS = 4
NUM_SLOTS, NUM_LANE_SETS = 3, 2
"""Staging slots, and sets of lanes; see the rules of reuse in ``kernels.cpu.barrier`` for why so many."""
_MESSAGE_BYTES = 4 << 20


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is no less than ``value``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class ControlLayout:
    """Byte offsets from the start of a rank's heap.

    Attributes:
        status: one page: how this rank fared (``memory.status``); read by peers that wait for it.
        lines: epoch lines, ``[parity of the epoch][sender]``.
        ring: the one line that the previous rank of the ring writes.
        sent, taken: lines of point-to-point messages, ``[peer]``: chunks sent to this rank, chunks taken from it.
        steps: lines of the messages of ring schedules, ``[sender]``.
        splits: what this rank sends to each peer in an all-to-all: ``i64[parity of the epoch][peer][bytes, offset]``.
        signal_pad: the compare-and-swap words, ``u32[NUM_CHANNELS][sender]``.
        messages: chunks on their way out of this rank, ``[peer][NUM_MESSAGE_SLOTS][message_bytes]``.
        staging: NUM_SLOTS slots of ``slot_bytes``, used in turn by the epochs.
        lanes: what the owner and one peer pass to each other: ``[NUM_LANE_SETS][hops to the peer - 1][lane_bytes]``.
        end: bytes of it all.
    """

    world_size: int
    slot_bytes: int
    status: int
    lines: int
    ring: int
    sent: int
    taken: int
    steps: int
    splits: int
    signal_pad: int
    message_bytes: int
    messages: int
    staging: int
    lane_bytes: int
    lanes: int
    end: int

    @classmethod
    def create(cls, world_size: int, staging_bytes: int) -> ControlLayout:
        """The layout for ``world_size`` ranks; ``staging_bytes`` is rounded so that each rank's part is whole lines."""
        lines = PAGE_BYTES
        ring = lines + 2 * world_size * LINE_BYTES
        sent = ring + LINE_BYTES
        taken = sent + world_size * LINE_BYTES
        steps = taken + world_size * LINE_BYTES
        splits = steps + world_size * LINE_BYTES
        signal_pad = align_up(splits + 2 * world_size * 16, LINE_BYTES)
        messages = align_up(signal_pad + NUM_CHANNELS * world_size * 4, PAGE_BYTES)
        budget = _MESSAGE_BYTES // (NUM_MESSAGE_SLOTS * world_size)
        message_bytes = max(2 * PAGE_BYTES, min(128 << 10, budget // PAGE_BYTES * PAGE_BYTES))
        staging = messages + world_size * NUM_MESSAGE_SLOTS * message_bytes
        slot_bytes = align_up(max(staging_bytes // (NUM_SLOTS + NUM_LANE_SETS), 1), 2 * world_size * PAGE_BYTES)
        lanes = staging + NUM_SLOTS * slot_bytes
        peers = max(world_size - 1, 1)
        lane_bytes = slot_bytes // peers // PAGE_BYTES * PAGE_BYTES
        return cls(
            world_size=world_size,
            slot_bytes=slot_bytes,
            status=0,
            lines=lines,
            ring=ring,
            sent=sent,
            taken=taken,
            steps=steps,
            splits=splits,
            signal_pad=signal_pad,
            message_bytes=message_bytes,
            messages=messages,
            staging=staging,
            lane_bytes=lane_bytes,
            lanes=lanes,
            end=lanes + NUM_LANE_SETS * peers * lane_bytes,
        )
