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
        reduced_single_copy_bytes: the least all-reduce of ordinary tensors that reads them out of their processes.
        single_copy_bytes: the least part that other collectives read so.
        chunk_bytes: what one step of a pipeline moves; no less than ``one_shot_bytes``.
        spins: polls before a waiting rank yields its core.
        yields: times it yields before it sleeps.
    """

    one_shot_bytes: int
    in_place_bytes: int
    reduced_single_copy_bytes: int
    single_copy_bytes: int
    chunk_bytes: int
    spins: int
    yields: int


NEVER = 1 << 62


def admits(one_shot_bytes: int, slot_bytes: int) -> bool:
    """Whether a one-shot all-reduce of that size fits half a staging slot, as the pipeline's first chunk does."""
    return one_shot_bytes <= slot_bytes // 2


def choose(world_size: int, num_cores: int, slot_bytes: int, single_copy: bool, spin: int = -1) -> Tuning:
    """Tuning for ``world_size`` ranks that share ``num_cores`` cores, with staging slots of ``slot_bytes``.

    One-shot reads world_size times the data and needs one barrier; two-shot reads it twice and needs two. With a core
    for each rank a barrier costs little, and small chunks stay in the second-level cache. With fewer cores a barrier
    costs a round of context switches: then the fewest steps win. A single copy by the kernel (``single_copy``: whether
    it may be done) costs a system call and a look-up of pages, and spares the traffic of staging.
    """
    crowded = world_size > num_cores
    one_shot = (64 << 10) if crowded else max(1 << 10, (512 << 10) // world_size**2)
    while not admits(one_shot, slot_bytes):
        one_shot //= 2
    chunk = slot_bytes // 2 if crowded else min(max(128 << 10, one_shot), slot_bytes // 2)
    return Tuning(
        one_shot_bytes=one_shot,
        in_place_bytes=8 << 10,
        reduced_single_copy_bytes=(4 << 20) if single_copy else NEVER,
        single_copy_bytes=(32 << 10) if single_copy else NEVER,
        chunk_bytes=chunk,
        spins=spin if spin >= 0 else (20 if crowded else 1000),
        yields=20,
    )
