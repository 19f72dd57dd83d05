"""A plan for the GPU's ring kernel: its table in 32-bit words, and the kernel's shape."""

from __future__ import annotations

from dataclasses import dataclass

from symmcomm.schedule.dtypes import DType, Op, partial_dtype
from symmcomm.schedule.layout_gpu import NUM_STAGED_CHANNELS, Layout
from symmcomm.schedule.plan import KEEP, Plan, Step

HEADER_WORDS = 4
"""Rows; rows that wait for nothing and come first; messages of the busiest pair; whether the signals of those first
rows may be late (``may_defer``)."""
ROW_WORDS, SOURCE_WORDS = 8, 8
_CHUNK_BYTES = ((8, 64 << 10), (0, 32 << 10))
"""Bytes of a chunk, and how many of them each CTA must have; a CTA's time for a chunk has a part that is the same for
all sizes, but nothing hides the time for its last one."""
_THREADS = 512


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """A launch of the ring kernel, and what of the plan is compiled into it.

    Attributes:
        grid: CTAs. threads: a CTA. vectors: of each source in flight a thread.
        chunk_bytes: elements of a lane of a segment at a time; a multiple of 16.
        num_lanes, pull: the plan's. max_sources: of a row.
        sums: (number of sources, whether the result stays) of rows that add.
        wide: whether partial sums are wider than elements, and there are any.
    """

    grid: int
    threads: int
    vectors: int
    chunk_bytes: int
    num_lanes: int
    pull: bool
    max_sources: int
    sums: tuple[tuple[int, bool], ...]
    wide: bool


def num_early(plan: Plan, rank: int) -> int:
    """Rows at the start of the rank's table that wait for nothing."""
    steps = plan.steps[rank]
    return next((idx for idx, step in enumerate(steps) if step.sources), len(steps))


def may_defer(plan: Plan, rank: int) -> bool:
    """Whether the rank's early rows may be signalled late: after the next row has been done, for the chunk before. It
    must only wait for early messages. Those of chunk k then follow from those of chunk k - 1 alone, and those of the
    first chunk are not late: so no ranks wait for each other."""
    steps, first = plan.steps[rank], num_early(plan, rank)
    if not 0 < first < len(steps):
        return False
    early = _early_messages(plan)
    return all((source.sender, rank, source.signal) in early for source in steps[first].sources)


def _early_messages(plan: Plan) -> set[tuple[int, int, int]]:
    """(sender, receiver, number) of what early rows send."""
    return {
        (sender, step.target, step.signal)
        for sender, sent in enumerate(plan.steps)
        for step in sent[: num_early(plan, sender)]
        if step.target != KEEP
    }


def pack(plan: Plan, rank: int) -> list[int]:
    """The rank's table: HEADER_WORDS, then for each row {segment, lane, own, target, slot, signal, number of sources,
    0} and ``max_sources`` times {sender, slot, signal, whether partial, whether early at its sender, 0, 0, 0}."""
    steps = plan.steps[rank]
    words = [len(steps), num_early(plan, rank), plan.num_signals, int(may_defer(plan, rank))]
    early = _early_messages(plan)
    for step in steps:
        words += [step.segment, step.lane, int(step.own), step.target, step.slot, step.signal, len(step.sources), 0]
        for source in step.sources:
            key = (source.sender, rank, source.signal)
            words += [source.sender, source.slot, source.signal, int(key in plan.partial), int(key in early), 0, 0, 0]
        words += [0] * (SOURCE_WORDS * (plan.num_sources - len(step.sources)))
    return words


def ring_shape(plan: Plan, part_bytes: int, dtype: DType, op: Op, num_sms: int, num_blocks: int = 0) -> RingShape:
    """The kernel for segments of that size; ``num_blocks`` CTAs, or as many as are good."""
    layout = Layout.create(plan.world_size)
    wide = bool(plan.partial) and partial_dtype(dtype, op) is not dtype
    factor = partial_dtype(dtype, op).itemsize // dtype.itemsize if wide else 1
    room = plan.world_size * layout.staging_slot_bytes // (max(plan.num_slots, 1) * factor)
    most_ctas = min(num_blocks or num_sms, num_sms, NUM_STAGED_CHANNELS)
    fitting = (size for num, size in _CHUNK_BYTES if part_bytes >= num * size * most_ctas * plan.num_lanes)
    chunk_bytes = min(next(fitting), room // 128 * 128)
    threads = min(_THREADS, max(64, chunk_bytes // 16 // 32 * 32))
    sums = {(len(s.sources), s.target == KEEP) for steps in plan.steps for s in steps if _adds(s)}
    most = 4 if plan.num_sources == 1 else 2
    vectors = max(1, min(most // factor if wide else min(most, 2 if dtype.itemsize == 1 else most), 4))
    whole = -(-part_bytes // (chunk_bytes * plan.num_lanes))
    grid = min(most_ctas, max(1, whole))
    return RingShape(
        grid=grid, threads=threads, vectors=min(vectors, max(1, chunk_bytes // (16 * threads))),
        chunk_bytes=chunk_bytes, num_lanes=plan.num_lanes, pull=plan.pull, max_sources=plan.num_sources,
        sums=tuple(sorted(sums)), wide=wide,
    )  # fmt: skip


def _adds(step: Step) -> bool:
    return step.own and bool(step.sources)
