"""Which algorithm and which sizes: pure functions of what all ranks know alike, so that all choose alike.

``admits`` says what can be done, ``choose`` what should be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the CPU kernels are told; sizes are bytes.

    Attributes:
        one_shot_bytes: the largest all-reduce of ordinary tensors done one-shot.
        in_place_bytes: the least all-reduce that reads symmetric tensors in place instead of copying them first.
        single_copy_bytes: the least part that collectives that only move data read out of an ordinary tensor itself.
        pipelined_bytes: the least broadcast that is staged again, as sender and takers then work at the same time.
        stream_bytes: the least output of a collective that only moves data that is written past the caches.
        chunk_bytes: what one step of a pipeline moves.
        spins: polls before a waiting rank yields its core.
        yields: times it yields before it sleeps.
    """

    one_shot_bytes: int
    in_place_bytes: int
    single_copy_bytes: int
    pipelined_bytes: int
    stream_bytes: int
    chunk_bytes: int
    spins: int
    yields: int


NEVER = 1 << 62
"""A size that no call has."""


def admits(chunk_bytes: int, slot_bytes: int) -> bool:
    """Whether a chunk fits half a staging slot; the other half takes its result."""
    return chunk_bytes <= slot_bytes // 2


def choose(world_size: int, num_cores: int, slot_bytes: int, single_copy: bool, spin: int = -1) -> Tuning:
    """Tuning for ``world_size`` ranks that share ``num_cores`` cores, with staging slots of ``slot_bytes``.

    One-shot moves world_size - 1 times the data between cores and needs one barrier a step; two-shot moves it twice and
    needs two, so with two ranks one-shot always wins. With a core for each rank a barrier costs little, and small
    chunks stay in the second-level cache. With fewer cores a barrier costs a round of context switches: then the fewest
    steps win. A rank that waits, with a core, polls some 5 µs, then yields for some 1 ms, for the system may have put
    it on the core of the peer it waits for, and only then sleeps: to be woken takes longer than to move a megabyte.
    A single copy by the kernel (``single_copy``: whether it may be done) costs a system call and a look-up of pages,
    and spares the traffic of staging.
    """
    crowded = world_size > num_cores
    one_shot = (64 << 10) if crowded else max(1 << 10, (512 << 10) // world_size**2)
    chunk = slot_bytes // 2 if crowded else 128 << 10
    while not admits(chunk, slot_bytes):
        chunk //= 2
    return Tuning(
        one_shot_bytes=NEVER if world_size == 2 else one_shot,
        in_place_bytes=8 << 10,
        single_copy_bytes=(16 << 10) if single_copy else NEVER,
        pipelined_bytes=NEVER if crowded else 2 << 20,
        stream_bytes=16 << 20,
        chunk_bytes=chunk,
        spins=min(spin, 1_000_000) if spin >= 0 else (20 if crowded else 100),
        yields=20 if crowded else 2000,
    )
