"""RMSNorm of rows, with what comes before it: the sum of several sources, and of a residual.

    kept = round(round(Σ source) + residual)    the new residual: to the bit what all_reduce, then add give
    t = Σ source + residual                     in float32, never rounded
    out = round(t / √(mean(t²) + eps) · (weight + weight_bias) + bias)

(Zhang and Sennrich 2019, Root Mean Square Layer Normalization; ``weight_bias`` is 1 for Gemma.) Norming the unrounded
t leaves one rounding to the dtype where the separate calls have three, so for 16-bit types the error is the smaller.
As float8_e4m3fn the row is divided by a scale of its own, max |out| / 448 (1 for a row of zeros), before it is rounded.

``add`` takes any piece of a row, from wherever its sources are, and appends t to a row of float32 that stays in the
first- or second-level cache (for float32 the new residual's, where one is kept: it is t); ``normalise`` runs once the
row is whole. So the bits do not depend on how the
data came, and a row may be larger than a staging slot.

Both find their addresses in a **job**, a block of 64-bit fields, one a call. Rows are numbered over all ranks;
addresses are those of row 0, whether or not it is there, pitches the bytes from row to row.
"""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from symmcomm.kernels.compile import compile_once
from symmcomm.kernels.cpu.context import TILE_ELEMENTS
from symmcomm.kernels.cpu.elements import (
    add_square,
    as_float,
    combine,
    larger_magnitude,
    load,
    load_accumulator,
    rounded,
    store,
    store_accumulator,
)
from symmcomm.kernels.cpu.primitives import call_2, call_5, load_i64, store_i64
from symmcomm.kernels.cpu.reduce import accumulate
from symmcomm.schedule.dtypes import DType, Op

CALL, ADD, NORMALISE, ITEMSIZE, ROWS, HIDDEN = 0, 1, 2, 3, 4, 5  # word of the call; entries; row count is all ranks'
INPUT, INPUT_PITCH, RESIDUAL, RESIDUAL_PITCH, KEPT, KEPT_PITCH = 6, 7, 8, 9, 10, 11
OUT, OUT_PITCH, OUT_ITEMSIZE, SCALES, WEIGHT, BIAS = 12, 13, 14, 15, 16, 17  # SCALES: float32 a row, or 0
SOURCES, TILE = 18, 19  # one address a source; HIDDEN float32
EPS, WEIGHT_BIAS = 20, 21  # float64
NUM_GROUPS, INPUT_STEP, OUT_STEP = 22, 23, 24  # of ``norm_rows``: how often ROWS rows; bytes from group to group
FORM = 25  # of the collectives, see ``fused_norm``

WITH_RESIDUAL, KEEPS = 1, 2
"""Parts of ``add`` that a call may lack; KEEPS: the new residual is stored."""

_E4M3_MAX = 448.0
_SUM = int(Op.sum)
_FLOAT32, _FLOAT64 = int(DType.float32), int(DType.float64)


def keeps_exactly(dtype: DType, parts: int) -> bool:
    """Whether the new residual is t, so that no other row of float32 is needed."""
    return dtype is DType.float32 and bool(parts & KEEPS)


@njit(inline="always")  # a function of ``build_add`` could not be cached
def _finish(value, i, tile, kept, residual, dtype, has_residual, keeps, has_tile):  # type: ignore[no-untyped-def]
    """Element i from the sum of its sources: t into the tile, the new residual where it is kept."""
    exact, stored = value, rounded(value, dtype, _SUM)
    if has_residual:
        exact = combine(exact, load(residual, i, dtype, _SUM), dtype, _SUM)
        stored = combine(stored, load(residual, i, dtype, _SUM), dtype, _SUM)
    if has_tile:
        store_accumulator(tile, i, exact, dtype, _SUM)
    if keeps:
        store(kept, i, stored, dtype, _SUM)


def build_add(dtype: int, itemsize: int, parts: int, cached: bool = True) -> Any:
    """Compiles ``add(job, num, row, column, count) -> 0``: ``count`` elements of a row from ``column`` on, the sum of
    the ``num`` (≥ 1) sources at the job's SOURCES, each the address of the element at ``column``."""
    has_residual, keeps = bool(parts & WITH_RESIDUAL), bool(parts & KEEPS)
    has_tile = not keeps_exactly(DType(dtype), parts)

    @cfunc(types.int64(*[types.int64] * 5), cache=cached)
    def add(job, num, row, column, count):  # type: ignore[no-untyped-def]
        sources = load_i64(job + 8 * SOURCES)
        tile = load_i64(job + 8 * TILE) + 4 * column
        at = column * itemsize
        residual = load_i64(job + 8 * RESIDUAL) + row * load_i64(job + 8 * RESIDUAL_PITCH) + at
        kept = load_i64(job + 8 * KEPT) + row * load_i64(job + 8 * KEPT_PITCH) + at
        first = load_i64(sources)
        if num == 1:
            for i in range(count):
                _finish(load(first, i, dtype, _SUM), i, tile, kept, residual, dtype, has_residual, keeps, has_tile)
            return 0
        second = load_i64(sources + 8)
        if num == 2:
            for i in range(count):
                value = combine(load(first, i, dtype, _SUM), load(second, i, dtype, _SUM), dtype, _SUM)
                _finish(value, i, tile, kept, residual, dtype, has_residual, keeps, has_tile)
            return 0
        for start in range(0, count, TILE_ELEMENTS):
            n, part, to = min(TILE_ELEMENTS, count - start), start * itemsize, tile + 4 * start
            last = accumulate(to, sources, num, part, n, dtype, _SUM)
            for i in range(n):
                value = combine(load_accumulator(to, i, dtype, _SUM), load(last, i, dtype, _SUM), dtype, _SUM)
                _finish(value, i, to, kept + part, residual + part, dtype, has_residual, keeps, has_tile)
        return 0

    return add


@njit(inline="always")
def _normal(tile, i, factor, weight, weight_bias, bias, dtype, has_bias):  # type: ignore[no-untyped-def]
    """Element i of the output, in the type of ``factor`` and ``weight_bias``."""
    value = load_accumulator(tile, i, dtype, _SUM) * factor * (load(weight, i, dtype, _SUM) + weight_bias)
    if has_bias:
        value = value + load(bias, i, dtype, _SUM)
    return np.float32(value)


def build_normalise(dtype: int, out_dtype: int, has_bias: bool, from_kept: bool, cached: bool = True) -> Any:
    """Compiles ``normalise(job, row) -> 0``: the row of float32 (``from_kept``: the new residual) into the output, as
    ``out_dtype``."""
    scaled = out_dtype == DType.float8_e4m3fn

    real = types.float64 if dtype == DType.float32 else types.float32  # of the products: one rounding for float32 too

    @cfunc(types.int64(types.int64, types.int64), cache=cached)
    def normalise(job, row):  # type: ignore[no-untyped-def]
        hidden, tile, weight = load_i64(job + 8 * HIDDEN), load_i64(job + 8 * TILE), load_i64(job + 8 * WEIGHT)
        if from_kept:
            tile = load_i64(job + 8 * KEPT) + row * load_i64(job + 8 * KEPT_PITCH)
        out, bias = load_i64(job + 8 * OUT) + row * load_i64(job + 8 * OUT_PITCH), load_i64(job + 8 * BIAS)
        weight_bias = real(load(job, WEIGHT_BIAS, _FLOAT64, _SUM))
        total = np.float32(0.0)
        for i in range(hidden):
            total = add_square(total, load_accumulator(tile, i, dtype, _SUM))
        factor = real(1.0 / sqrt(np.float64(total) / hidden + load(job, EPS, _FLOAT64, _SUM)))
        if not scaled:
            for i in range(hidden):
                store(out, i, _normal(tile, i, factor, weight, weight_bias, bias, dtype, has_bias), out_dtype, _SUM)
            return 0
        largest = types.int32(0)
        for i in range(hidden):
            largest = larger_magnitude(largest, _normal(tile, i, factor, weight, weight_bias, bias, dtype, has_bias))
        scale = as_float(largest) / np.float32(_E4M3_MAX) if largest != 0 else np.float32(1.0)
        store(load_i64(job + 8 * SCALES), row, scale, _FLOAT32, _SUM)
        for i in range(hidden):
            store(out, i, _normal(tile, i, factor, weight, weight_bias, bias, dtype, has_bias) / scale, out_dtype, _SUM)
        return 0

    return normalise


@cache
def add_entry(dtype: DType, parts: int) -> int:
    """Address of the compiled ``add``; it lives as long as the process."""
    return _address(compile_once(lambda: build_add(int(dtype), dtype.itemsize, parts)))


@cache
def normalise_entry(dtype: DType, out_dtype: DType, has_bias: bool, from_kept: bool) -> int:
    """Address of the compiled ``normalise``; it lives as long as the process."""
    return _address(compile_once(lambda: build_normalise(int(dtype), int(out_dtype), has_bias, from_kept)))


def _address(function: Any) -> int:
    _keep.append(function)
    return int(function.address)


_keep: list[Any] = []


@njit(cache=True, nogil=True)
def norm_rows(job: int) -> int:
    """RMSNorm without peers: NUM_GROUPS times ROWS rows at INPUT; e.g. ROWS heads of each token."""
    hidden, add, normalise = load_i64(job + 8 * HIDDEN), load_i64(job + 8 * ADD), load_i64(job + 8 * NORMALISE)
    pitch, sources = load_i64(job + 8 * INPUT_PITCH), load_i64(job + 8 * SOURCES)
    out = load_i64(job + 8 * OUT)
    for group in range(load_i64(job + 8 * NUM_GROUPS)):
        tensor = load_i64(job + 8 * INPUT) + group * load_i64(job + 8 * INPUT_STEP)
        store_i64(job + 8 * OUT, out + group * load_i64(job + 8 * OUT_STEP))
        for row in range(load_i64(job + 8 * ROWS)):
            store_i64(sources, tensor + row * pitch)
            call_5(add, job, 1, row, 0, hidden)
            call_2(normalise, job, row)
    return 0
