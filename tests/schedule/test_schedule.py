"""Pure decisions: dtypes and operations, sizes, the layout of the control region, slices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symmcomm.kernels.cpu.windows import slice_start
from symmcomm.memory.signals import (
    LINE_BYTES,
    NUM_CHANNELS,
    NUM_LANE_SETS,
    NUM_MESSAGE_SLOTS,
    NUM_SLOTS,
    PAGE_BYTES,
    ControlLayout,
    align_up,
)
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.schedule.select import admits, choose

# dtypes


def test_dtypes_are_torchs() -> None:
    for dtype in DType:
        theirs = getattr(torch, dtype.name)
        assert dtype.itemsize == theirs.itemsize
        assert dtype.is_floating_point == theirs.is_floating_point


def test_what_goes_with_what() -> None:
    arithmetic, bitwise = {Op.sum, Op.avg, Op.max, Op.min, Op.prod}, {Op.band, Op.bor, Op.bxor}
    for dtype in DType:
        expected = arithmetic if dtype.is_floating_point else arithmetic | bitwise
        if dtype is DType.bool:
            expected = expected - {Op.avg}
        assert {op for op in Op if supports(dtype, op)} == expected


def test_numbers_of_dtypes_and_ops_are_stable() -> None:
    """They travel between ranks."""
    assert [(dtype.name, int(dtype)) for dtype in DType][:4] == [
        ("float32", 0), ("float64", 1), ("float16", 2), ("bfloat16", 3),
    ]  # fmt: skip
    assert [op.name for op in sorted(Op)] == ["sum", "avg", "max", "min", "prod", "band", "bor", "bxor"]


# select

WORLDS = st.integers(1, 256)
STAGING = st.integers(0, 1 << 28)


@given(WORLDS, st.integers(1, 512), STAGING, st.booleans(), st.integers(-1, 10**9))
def test_choice_fits(world_size: int, num_cores: int, staging_bytes: int, single_copy: bool, spin: int) -> None:
    slot_bytes = ControlLayout.create(world_size, staging_bytes).slot_bytes
    tuning = choose(world_size, num_cores, slot_bytes, single_copy, spin)
    assert admits(tuning.chunk_bytes, slot_bytes)
    assert tuning.chunk_bytes >= 64  # whole lines
    assert tuning.one_shot_bytes >= 8  # an element, at the least
    if not single_copy:
        assert tuning.single_copy_bytes > 1 << 50
    assert tuning.spins >= 0
    assert tuning.yields >= 0
    if spin >= 0:
        assert tuning.spins <= spin


def test_admits() -> None:
    assert admits(4096, 8192)
    assert not admits(4097, 8192)


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_without_a_core_each_spin_less(world_size: int, num_cores: int) -> None:
    tuning = choose(world_size, num_cores, 4 << 20, True)
    alone = choose(world_size, world_size, 4 << 20, True)
    assert (tuning.spins < alone.spins) == (world_size > num_cores)


# the control region


def regions(layout: ControlLayout) -> list[tuple[str, int, int]]:
    """(name, start, bytes) of everything that is laid out, from what the kernels address."""
    world_size = layout.world_size
    return [
        ("status", layout.status, PAGE_BYTES),
        ("lines", layout.lines, 2 * world_size * LINE_BYTES),
        ("ring", layout.ring, LINE_BYTES),
        ("sent", layout.sent, world_size * LINE_BYTES),
        ("taken", layout.taken, world_size * LINE_BYTES),
        ("splits", layout.splits, 2 * world_size * 16),
        ("signal_pad", layout.signal_pad, 4 * NUM_CHANNELS * world_size),
        ("messages", layout.messages, world_size * NUM_MESSAGE_SLOTS * layout.message_bytes),
        ("staging", layout.staging, NUM_SLOTS * layout.slot_bytes),
        ("lanes", layout.lanes, NUM_LANE_SETS * max(world_size - 1, 1) * layout.lane_bytes),
    ]


@pytest.mark.parametrize("staging_bytes", [0, 1, 65_537, 8 << 20])
def test_regions_do_not_overlap(staging_bytes: int) -> None:
    for world_size in range(1, 257):
        layout = ControlLayout.create(world_size, staging_bytes)
        laid_out = sorted(regions(layout), key=lambda region: region[1])
        for (name, start, size), (following, next_start, _) in pairwise(laid_out):
            assert start + size <= next_start, f"{name} reaches into {following} for {world_size} ranks"
        assert sum(laid_out[-1][1:]) == layout.end
        for name, start, _ in laid_out:
            boundary = PAGE_BYTES if name in ("status", "messages", "staging", "lanes") else LINE_BYTES
            assert start % boundary == 0, f"{name} at {start} for {world_size} ranks"


@given(WORLDS, STAGING)
def test_slots_divide_among_ranks(world_size: int, staging_bytes: int) -> None:
    layout = ControlLayout.create(world_size, staging_bytes)
    assert (NUM_SLOTS + NUM_LANE_SETS) * (layout.slot_bytes + 1) > staging_bytes
    assert layout.slot_bytes // world_size >= LINE_BYTES
    assert layout.slot_bytes // world_size <= layout.lane_bytes <= layout.slot_bytes
    assert world_size > 2 or layout.lane_bytes == layout.slot_bytes  # then a lane serves as slot
    assert layout.slot_bytes % (2 * world_size * LINE_BYTES) == 0
    assert layout.message_bytes > LINE_BYTES
    assert layout.message_bytes % PAGE_BYTES == 0


@given(st.integers(0, 1 << 50), st.sampled_from([1, 2, 64, 4096, 3, 640]))
def test_align_up(value: int, alignment: int) -> None:
    aligned = align_up(value, alignment)
    assert aligned % alignment == 0
    assert value <= aligned < value + alignment


# slices


@given(st.integers(0, 1 << 40), WORLDS, st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_exactly(count: int, world_size: int, itemsize: int) -> None:
    starts = [slice_start.py_func(count, world_size, rank, itemsize) for rank in range(world_size + 1)]
    assert starts[0] == 0
    assert starts[-1] == count
    assert starts == sorted(starts)
    lengths = [end - start for start, end in pairwise(starts)]
    assert max(lengths) <= -(-count // world_size) + 64 // itemsize
    for start in starts[:-1]:
        assert start * itemsize % LINE_BYTES == 0 or start == count  # no line belongs to two ranks


def test_compiled_slices_are_the_same() -> None:
    for count in (0, 1, 63, 64, 65, 1000, 4097, 1 << 33):
        for rank in range(9):
            assert slice_start(count, 8, rank, 2) == slice_start.py_func(count, 8, rank, 2)
