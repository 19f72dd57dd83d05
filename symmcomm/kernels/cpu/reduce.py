"""Reduction of several sources into one destination, a function an (element type, operation), called by address.

    destination[i] = round(finish(source[0][i] ∘ source[1][i] ∘ … ∘ source[num - 1][i]))

in that order, whoever computes it: so every rank gets the same bits, whichever algorithm moved the data. Two sources
are combined in one pass. More go through a tile of accumulators that stays in the first-level cache, which keeps the
loops free of a choice by ``num``; the destination tile is written after all sources of it were read, so it may be one
of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, njit, types

from symmcomm.kernels.compile import compile_once
from symmcomm.kernels.cpu.bfloat16_block import BFLOAT16_BLOCK, reduce_bfloat16_block
from symmcomm.kernels.cpu.context import TILE_ELEMENTS
from symmcomm.kernels.cpu.elements import combine, finish, load, load_accumulator, store, store_accumulator
from symmcomm.kernels.cpu.primitives import load_i64
from symmcomm.schedule.dtypes import DType, Op

_SIGNATURE = types.int64(types.int64, types.int64, types.int64, types.int64, types.int64)


@njit(inline="always")  # a function of ``build`` could not be cached
def accumulate(tile, sources, num, at, n, dtype, op):  # type: ignore[no-untyped-def]
    """All but the last of ``num`` (≥ 3) sources, ``n`` elements from byte ``at`` of each on, into the tile. Returns
    where the last one's are."""
    first, second = load_i64(sources) + at, load_i64(sources + 8) + at
    for i in range(n):
        store_accumulator(tile, i, combine(load(first, i, dtype, op), load(second, i, dtype, op), dtype, op), dtype, op)
    for s in range(2, num - 1):
        source = load_i64(sources + 8 * s) + at
        for i in range(n):
            value = combine(load_accumulator(tile, i, dtype, op), load(source, i, dtype, op), dtype, op)
            store_accumulator(tile, i, value, dtype, op)
    return load_i64(sources + 8 * (num - 1)) + at


def build(dtype: int, op: int, itemsize: int, cached: bool = True) -> Any:
    """Compiles ``reduce(destination, sources, num, count, tile) -> 0`` for one type and operation.

    ``sources`` is the address of ``num`` (≥ 2) int64 addresses, ``count`` the elements of each, ``tile`` room for
    TILE_ELEMENTS accumulators.
    """

    in_blocks = dtype == DType.bfloat16

    @cfunc(_SIGNATURE, cache=cached)
    def reduce(destination, sources, num, count, tile):  # type: ignore[no-untyped-def]
        if num == 2:
            first, second, done = load_i64(sources), load_i64(sources + 8), 0
            if in_blocks:
                for i in range(count // BFLOAT16_BLOCK):
                    reduce_bfloat16_block(destination, first, second, i, num, dtype, op)
                done = count // BFLOAT16_BLOCK * BFLOAT16_BLOCK
            for i in range(done, count):
                value = combine(load(first, i, dtype, op), load(second, i, dtype, op), dtype, op)
                store(destination, i, finish(value, num, dtype, op), dtype, op)
            return 0
        for start in range(0, count, TILE_ELEMENTS):
            n = min(TILE_ELEMENTS, count - start)
            at = start * itemsize
            last = accumulate(tile, sources, num, at, n, dtype, op)
            for i in range(n):
                value = combine(load_accumulator(tile, i, dtype, op), load(last, i, dtype, op), dtype, op)
                store(destination + at, i, finish(value, num, dtype, op), dtype, op)
        return 0

    return reduce


@cache
def reduction(dtype: DType, op: Op) -> int:
    """Address of the compiled reduction; it lives as long as the process."""
    function = compile_once(lambda: build(int(dtype), int(op), dtype.itemsize))
    _keep.append(function)
    return int(function.address)


_keep: list[Any] = []
