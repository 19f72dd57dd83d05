"""What is chosen can be launched: it fits the device, the channels and the slots, and covers the data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import (
    CHANNEL_LAMPORT_BYTES,
    CHANNEL_LL_BYTES,
    CHANNEL_STAGING_BYTES,
    DEPTH,
    MOST_VECTORS,
    NUM_CHANNELS,
    NUM_LAMPORT_CHANNELS,
    Layout,
    ll_words,
)
from symmcomm.schedule.layout_gpu import NUM_STAGED_CHANNELS as STAGED
from symmcomm.schedule.select_gpu import (
    Algorithm,
    Launch,
    Thresholds,
    by_switch,
    choose,
    choose_all_gather,
    choose_reduce_scatter,
    granule,
    lamport_shape,
    may_start_early,
    switch_shape,
    uneven_shape,
)

WORLDS = (2, 3, 5, 8, 16, 72)


def assert_fits(shape: Launch, part_bytes: int, world_size: int, num_sms: int, itemsize: int = 1) -> None:
    layout = Layout.create(world_size)
    assert 1 <= shape.grid <= min(num_sms, NUM_CHANNELS)
    assert world_size <= shape.threads <= 1024
    if shape.algorithm is Algorithm.ll:
        assert shape.threads * shape.unroll * 16 <= layout.ll_slot_bytes
        assert shape.grid * shape.threads * shape.unroll * 4 * ll_words(itemsize) >= part_bytes
    if shape.algorithm is Algorithm.lamport:
        turn = shape.threads * shape.unroll * 16
        assert shape.grid <= NUM_LAMPORT_CHANNELS
        assert (shape.grid - 1) * turn < part_bytes
        assert turn <= layout.lamport_slot_bytes
        turns = -(-part_bytes // (shape.grid * turn))
        assert turns == 1 or shape.slots > 0
        assert turns * turn <= layout.lamport_slot_bytes or shape.slots == 2
        assert shape.slots < 2 or 2 * turn <= layout.lamport_slot_bytes
        assert world_size * shape.unroll <= MOST_VECTORS
        assert world_size <= 4 or (shape.unroll == 1 and shape.threads < 512)  # registers
    if shape.chunk_bytes:
        assert shape.grid <= STAGED
        assert 0 < shape.chunk_bytes <= layout.staging_slot_bytes
        assert shape.chunk_bytes % 16 == 0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("num_sms", [1, 16, 66, 132, 148])
def test_what_is_chosen_fits(world_size: int, num_sms: int) -> None:
    for exponent in range(31):
        part = (1 << exponent) + exponent
        for dtype in (DType.bfloat16, DType.float8_e4m3fn, DType.float64):
            for symmetric in (True, False):
                shape = choose(part, dtype, world_size, num_sms, symmetric)
                assert_fits(shape, part, world_size, num_sms, dtype.itemsize)
                shape = choose_reduce_scatter(part, dtype, world_size, num_sms, symmetric)
                assert_fits(shape, part, world_size, num_sms, dtype.itemsize)
        for places in ((False, False), (True, False), (False, True)):
            assert_fits(choose_all_gather(part, world_size, num_sms, *places), part, world_size, num_sms)
    assert_fits(uneven_shape(world_size, num_sms), 1, world_size, num_sms)


def test_slots_of_words_hold_two_turns_of_all_ranks_or_none() -> None:
    """Else the second slot would be filled before a rank has heard from its peers; and each thread signals one."""
    for world_size in (2, 8, 9, 16, 17, 64, 72, 128, 129, 300, 1024):
        for part in (1 << 10, 1 << 20, 1 << 30):
            shape = lamport_shape(part, world_size, 132)
            if shape is not None:
                assert_fits(shape, part, world_size, 132)
        assert (shape is not None) == (world_size <= 32)


def test_an_ordinary_tensor_needs_no_heap() -> None:
    any_tensors = (Algorithm.ll, Algorithm.lamport, Algorithm.ll_two_shot, Algorithm.one_shot, Algorithm.staged)
    for exponent in range(31):
        for world_size in WORLDS:
            assert choose_all_gather(1 << exponent, world_size, 132).algorithm in any_tensors
            assert choose_reduce_scatter(1 << exponent, DType.float32, world_size, 132).algorithm in any_tensors
            assert choose(1 << exponent, DType.float32, world_size, 132, False).algorithm in any_tensors


def test_copy_engines_are_chosen_by_who_has_them() -> None:
    for has, expected in ((False, Algorithm.push), (True, Algorithm.copy_engine)):
        assert choose_all_gather(1 << 28, 2, 132, False, True, copy_engine=has).algorithm is expected
        assert choose_all_gather(1 << 28, 2, 132, copy_engine=has).algorithm is Algorithm.lamport


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("num_sms", [1, 16, 132])
def test_what_the_switch_does_fits(world_size: int, num_sms: int) -> None:
    for exponent in range(4, 31):
        for num_bytes in ((1 << exponent), (1 << exponent) + 8):
            for dtype in (DType.bfloat16, DType.int64):
                shape = choose(num_bytes, dtype, world_size, num_sms, multimem=True)
                assert_fits(shape, num_bytes, world_size, num_sms, dtype.itemsize)
                assert shape.multimem
                if shape.algorithm is Algorithm.pull:  # one wave of whole vectors
                    assert num_bytes % 16 == 0
                    assert shape.grid * shape.threads * shape.unroll * 16 >= num_bytes
                else:
                    assert shape.algorithm is Algorithm.two_shot
                shape = choose_reduce_scatter(num_bytes, dtype, world_size, num_sms, multimem=True)
                assert_fits(shape, num_bytes, world_size, num_sms, dtype.itemsize)
                assert (shape.algorithm, shape.multimem) == (Algorithm.pull, True)
            shape = choose_all_gather(num_bytes, world_size, num_sms, multimem=True)
            assert_fits(shape, num_bytes, world_size, num_sms)
            assert (shape.algorithm, shape.multimem) == (Algorithm.push, True)


def test_the_switch_has_one_shot_where_the_order_of_a_sum_cannot_show() -> None:
    one_shot, two_shot = Algorithm.pull, Algorithm.two_shot
    for num_bytes, dtype, world_size, expected in (
        (1 << 20, DType.bfloat16, 2, one_shot), ((1 << 20) + 64, DType.bfloat16, 2, two_shot),
        (1 << 12, DType.bfloat16, 3, two_shot), (1 << 12, DType.float64, 8, two_shot),
        (1 << 16, DType.int32, 8, one_shot), (1 << 17, DType.int32, 8, two_shot),
    ):  # fmt: skip
        assert switch_shape(num_bytes, dtype, world_size, 132).algorithm is expected


def test_the_switch_is_asked_for_what_is_large_and_lies_well() -> None:
    at = Thresholds(multimem_bytes=4096)
    for num_bytes, offset, pitch, expected in (
        (4096, 0, 0, True), (4095, 0, 0, False), (8200, 32, 4112, True), (8200, 32, 4100, False), (4096, 8, 0, False),
    ):  # fmt: skip
        assert by_switch(num_bytes, offset, pitch, at) == expected
    assert not by_switch(1 << 50, 0, 0, Thresholds())


def test_what_is_not_small_needs_no_flags() -> None:
    for dtype in (DType.bfloat16, DType.float8_e5m2, DType.int32, DType.float64):
        for num_bytes, expected in ((1 << 10, Algorithm.ll), (1 << 20, Algorithm.lamport)):
            assert choose(num_bytes, dtype, 2, 132).algorithm is expected
            assert choose_reduce_scatter(num_bytes, dtype, 2, 132).algorithm is expected
            assert choose_all_gather(num_bytes, 2, 132).algorithm is expected


def test_granules_divide_all_numbers() -> None:
    assert [granule(bits) for bits in (0, 48, 8, 4, 6, 7)] == [16, 16, 4, 4, 2, 1]


def test_what_starts_early_is_small() -> None:
    for num_bytes, early in ((1 << 10, True), (1 << 17, True), (1 << 20, True), (1 << 21, False), (1 << 25, False)):
        assert may_start_early(choose(num_bytes, DType.bfloat16, 2, 132), 2) == early
    assert not may_start_early(choose(1 << 17, DType.bfloat16, 2, 132), 2, granule=2)
    for world_size, part, early in (
        (3, 1 << 20, True), (4, 1 << 19, True), (4, 1 << 20, False), (8, 1 << 19, True), (8, 1 << 20, False),
    ):  # fmt: skip
        shape = choose_reduce_scatter(part, DType.bfloat16, world_size, 132)
        assert may_start_early(shape, world_size) == early


def test_thresholds_move_the_choice() -> None:
    at = Thresholds(
        all_reduce_ll_bytes=4096, one_shot_bytes=0, lamport_bytes=1 << 16, ll_bytes=2048, gather_push_bytes=1 << 16,
        pull_bytes=1 << 17,
    )  # fmt: skip
    for num_bytes, expected in ((4096, Algorithm.ll), (4097, Algorithm.two_shot)):
        assert choose(num_bytes, DType.int32, 2, 132, True, replace(at, lamport_bytes=0)).algorithm is expected
    for num_bytes, expected in ((1 << 16, Algorithm.lamport), (1 << 17, Algorithm.two_shot)):
        assert choose(num_bytes, DType.float32, 2, 132, True, at).algorithm is expected
    for part, expected in ((2048, Algorithm.ll), (2049, Algorithm.lamport), (1 << 16, Algorithm.push)):
        assert choose_all_gather(part, 2, 132, False, True, at).algorithm is expected
    for part, expected in ((1 << 16, Algorithm.lamport), (1 << 17, Algorithm.staged)):
        assert choose_all_gather(part, 2, 132, False, False, at).algorithm is expected
    assert choose_all_gather(1 << 17, 2, 132, True, False, at).algorithm is Algorithm.pull
    for part, expected in (((1 << 17) - 1, Algorithm.staged), (1 << 17, Algorithm.pull)):
        assert choose_reduce_scatter(part, DType.float32, 2, 132, True, at).algorithm is expected


@pytest.mark.parametrize("world_size", WORLDS)
def test_areas_of_the_heap_do_not_overlap(world_size: int) -> None:
    layout = Layout.create(world_size)
    assert 2 * world_size * layout.ll_slot_bytes <= CHANNEL_LL_BYTES
    assert DEPTH * world_size * layout.staging_slot_bytes <= CHANNEL_STAGING_BYTES
    starts = [layout.pads, layout.ring, layout.count, layout.swap_pad, layout.ll, layout.splits, layout.staging]
    starts += [layout.lamport, layout.escapes, layout.data]
    assert starts == sorted(starts)
    assert layout.data % 4096 == 0
    assert layout.lamport - layout.staging == STAGED * CHANNEL_STAGING_BYTES
    assert layout.escapes - layout.lamport == NUM_LAMPORT_CHANNELS * CHANNEL_LAMPORT_BYTES
    assert 2 * world_size * layout.lamport_slot_bytes <= CHANNEL_LAMPORT_BYTES
    assert 16 * (layout.data - layout.escapes) == layout.escapes - layout.lamport
