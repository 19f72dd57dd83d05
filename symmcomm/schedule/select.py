"""Which algorithm and which sizes: pure functions of what all ranks know alike, so that all choose alike.

``admits`` says what can be done, ``choose`` what should be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the CPU kernels are told.

    Attributes:
        one_shot_bytes: the largest all-reduce done one-shot.
        chunk_bytes: what one step of a pipeline moves.
        spins: polls before a waiting rank yields its core.
        yields: times it yields before it sleeps.
    """

    one_shot_bytes: int
    chunk_bytes: int
    spins: int
    yields: int


def admits(one_shot_bytes: int, slot_bytes: int) -> bool:
    """Whether a one-shot all-reduce of that size fits a staging slot."""
    return one_shot_bytes <= slot_bytes


def choose(world_size: int, num_cores: int, slot_bytes: int, spin: int = -1) -> Tuning:
    """Tuning for ``world_size`` ranks that share ``num_cores`` cores, with staging slots of ``slot_bytes``.

    One-shot reads world_size times the data and needs one barrier; two-shot reads it twice and needs two. With a core
    for each rank a barrier costs little, and small chunks stay in the second-level cache. With fewer cores a barrier
    costs a round of context switches: then the fewest steps win.
    """
    crowded = world_size > num_cores
    one_shot = (64 << 10) if crowded else max(1 << 10, (16 << 10) // world_size)
    while not admits(one_shot, slot_bytes):
        one_shot //= 2
    return Tuning(
        one_shot_bytes=one_shot,
        chunk_bytes=slot_bytes // 2 if crowded else min(128 << 10, slot_bytes // 2),
        spins=spin if spin >= 0 else (20 if crowded else 1000),
        yields=20,
    )
