"""The pool's table: first fit against a model, and many threads at once, through the functions that torch calls."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symmcomm.errors import ArgumentError
from symmcomm.memory.pool import MAX_BLOCKS, BlockTable, SymmetricPool

BASE, CAPACITY = 1 << 40, 64 << 10
ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Pool:
    """A table and its functions as torch sees them."""

    def __init__(self, num_bytes: int = CAPACITY) -> None:
        self.table = BlockTable(BASE, num_bytes)
        self._alloc, self._free = ALLOC(self.table.alloc_address), FREE(self.table.free_address)

    def alloc(self, num_bytes: int) -> int:
        return (self._alloc(num_bytes, 0, None) or BASE - 1) - BASE  # -1: no room

    def free(self, offset: int) -> None:
        self._free(BASE + offset, 0, 0, None)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


def first_fit(taken: dict[int, int], size: int) -> int:
    size = max(1, -(-size // 512)) * 512
    offset = 0
    for start, used in sorted(taken.items()):
        if start - offset >= size:
            break
        offset = start + used
    return offset if CAPACITY - offset >= size else -1


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.one_of(st.integers(0, 20_000), st.floats(0, 0.999)), max_size=60))
def test_blocks_are_those_of_first_fit(pool: Pool, steps: list[int | float]) -> None:
    """A whole number allocates; a fraction frees the block at that place among the taken ones."""
    taken: dict[int, int] = {}
    for step in steps:
        if isinstance(step, int):
            expected = first_fit(taken, step)
            assert pool.alloc(step) == expected
            if expected >= 0:
                taken[expected] = max(1, -(-step // 512)) * 512
        elif taken:
            offset = sorted(taken)[int(step * len(taken))]
            del taken[offset]
            pool.free(offset)
        assert {offset: size for offset, size, used in pool.table.blocks() if used} == taken
        holes = [used for _, _, used in pool.table.blocks()]
        assert all(a or b for a, b in itertools.pairwise(holes)), "two holes touch"
    for offset in taken:
        pool.free(offset)
    assert pool.table.blocks() == [(0, CAPACITY, False)]


def test_what_is_no_block_is_not_freed_and_refusals_are_counted() -> None:
    pool = Pool()
    offset = pool.alloc(100)
    for wrong in (offset + 512, offset - 512, 1 << 30):
        pool.free(wrong)
    assert pool.table.used_bytes == 512
    assert pool.alloc(CAPACITY) == -1
    assert pool.alloc(2 * CAPACITY) == -1
    assert pool.table.refused == (2, 2 * CAPACITY)
    pool.free(offset)
    pool.free(offset)
    assert pool.table.blocks() == [(0, CAPACITY, False)]


def test_a_full_table_refuses_to_split_but_serves_what_fits_exactly() -> None:
    pool = Pool(2 * MAX_BLOCKS * 512)
    offsets = [pool.alloc(512) for _ in range(MAX_BLOCKS - 1)]
    assert -1 not in offsets
    assert pool.alloc(512) == -1
    assert pool.alloc((MAX_BLOCKS + 1) * 512) == (MAX_BLOCKS - 1) * 512
    assert len(pool.table.blocks()) == MAX_BLOCKS


def test_threads_get_blocks_of_their_own() -> None:
    pool = Pool(1 << 20)
    owner: dict[int, int] = {}
    clashes: list[int] = []

    def work(name: int) -> None:
        for _ in range(2000):
            offset = pool.alloc(512 * (1 + name))
            if offset < 0:
                continue
            if owner.setdefault(offset, name) != name:
                clashes.append(offset)
            del owner[offset]
            pool.free(offset)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.table.blocks() == [(0, 1 << 20, False)]


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="less than one block"):
        BlockTable(BASE, 100)
    with pytest.raises(ArgumentError, match="memory is on cpu"):
        SymmetricPool(torch.empty(4096, dtype=torch.uint8))
