"""The allocator by example, and against a model that only knows which bytes are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symmcomm.errors import ArgumentError
from symmcomm.memory.allocator import Allocator


def grown(num_bytes: int) -> Allocator:
    allocator = Allocator()
    allocator.grow(num_bytes)
    return allocator


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_equals() -> None:
    allocator = grown(4096)
    a, _, c, _, e, _ = (allocator.allocate(size) for size in (768, 256, 512, 256, 512, 256))
    for offset in (a, c, e):
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(300) == c
    assert allocator.allocate(300) == e
    assert allocator.allocate(300) == a


def state(allocator: Allocator) -> tuple[object, ...]:
    """What decides the offsets from here on."""
    return allocator.alignment, allocator.capacity, dict(allocator._blocks)


def test_no_room_is_none_and_changes_nothing() -> None:
    allocator = grown(1024)
    before = state(allocator)
    assert allocator.allocate(1025) is None
    assert state(allocator) == before
    assert Allocator().allocate(0) is None


def test_growth_joins_the_free_tail() -> None:
    allocator = grown(512)
    assert allocator.allocate(256) == 0
    allocator.grow(512)
    assert (allocator.capacity, allocator.largest_free) == (1024, 768)
    assert allocator.allocate(768) == 256
    allocator.grow(256)
    assert allocator.allocate(1) == 1024


def test_zero_bytes_get_an_offset_of_their_own() -> None:
    allocator = grown(1024)
    assert [allocator.allocate(0), allocator.allocate(0), allocator.allocate(1)] == [0, 256, 512]
    assert allocator.size_of(256) == 256


def test_free_reports_what_is_not_allocated() -> None:
    allocator = grown(1024)
    allocator.allocate(600)
    for offset in (256, 768, -256, 4096):
        with pytest.raises(ArgumentError, match=f"offset={offset} is not allocated"):
            allocator.free(offset)
    allocator.free(0)
    with pytest.raises(ArgumentError, match="offset=0 is not allocated"):
        allocator.free(0)


def test_bad_arguments_name_their_value() -> None:
    with pytest.raises(ArgumentError, match="alignment=48"):
        Allocator(48)
    with pytest.raises(ArgumentError, match="num_bytes=-1"):
        grown(256).allocate(-1)
    for num_bytes in (0, -256, 100):
        with pytest.raises(ArgumentError, match=f"num_bytes={num_bytes} .* alignment 256"):
            Allocator().grow(num_bytes)


# One step: grow by n blocks, allocate n bytes, or free the (n mod live)-th live block.
kinds = st.sampled_from(["grow", "allocate", "allocate", "free"])
steps = st.lists(st.tuples(kinds, st.integers(0, 5000)), max_size=80)


@given(steps, st.sampled_from([1, 16, 256]))
def test_any_sequence_of_calls(sequence: list[tuple[str, int]], alignment: int) -> None:
    allocator, twin = Allocator(alignment), Allocator(alignment)
    live: dict[int, int] = {}
    for kind, number in sequence:
        if kind == "grow":
            for one in (allocator, twin):
                one.grow((number + 1) * alignment)
        elif kind == "allocate":
            room = allocator.largest_free
            offset = allocator.allocate(number)
            assert offset == twin.allocate(number)
            size = max(1, -(-number // alignment)) * alignment
            assert (offset is None) == (size > room)
            if offset is not None:
                assert offset % alignment == 0
                assert 0 <= offset <= allocator.capacity - size
                assert all(offset + size <= other or other + live[other] <= offset for other in live)
                assert allocator.size_of(offset) == size
                live[offset] = size
        elif live:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            allocator.free(offset)
            twin.free(offset)
        assert allocator.used_bytes == sum(live.values())
        assert state(allocator) == state(twin)
    for offset in live:
        allocator.free(offset)
    assert (allocator.used_bytes, allocator.largest_free) == (0, allocator.capacity)
