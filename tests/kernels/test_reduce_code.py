"""The reductions' machine code holds packed instructions, and their conversions round as torch does, exhaustively."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from numba import njit
from torch import Tensor

from symmcomm.kernels.cpu.context import TILE_ELEMENTS
from symmcomm.kernels.cpu.elements import load, store
from symmcomm.kernels.cpu.reduce import build, reduction
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import (
    awkward_values,
    check_bits,
    check_reduction,
    emulate,
    make_input,
    narrow,
    torch_dtype,
)

NARROW = [DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.float8_e5m2]
PAIRS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]

# The code.

_MEANING_FOR_BOOL = {Op.sum: Op.bor, Op.max: Op.bor, Op.prod: Op.band, Op.min: Op.band}
# Mnemonics of a packed operation on floats, on integers. Max and min may be a comparison and a choice.
_X86 = {
    Op.sum: ("v?addp[hsd]", "v?padd[bwdq]"), Op.prod: ("v?mulp[hsd]", "v?pmul.*|v?pmadd.*"),
    Op.max: ("v?(max|cmp.*)p[hsd]", "v?pmax.*|v?pcmpgt.*"), Op.min: ("v?(min|cmp.*)p[hsd]", "v?pmin.*|v?pcmpgt.*"),
    Op.band: ("", "v?pand[dq]?|v?andp[sd]"), Op.bor: ("", "v?por[dq]?|v?orp[sd]"),
    Op.bxor: ("", "v?pxor[dq]?|v?xorp[sd]"),
}  # fmt: skip
_ARM = {
    Op.sum: ("fadd", "add|[su]addw2?|[su]addl2?"), Op.prod: ("fmul", "mul|[su]mull2?|mla"),
    Op.max: ("fmax.*|fcm.*", "[su]max|cm.*"), Op.min: ("fmin.*|fcm.*", "[su]min|cm.*"),
    Op.band: ("", "and"), Op.bor: ("", "orr"), Op.bxor: ("", "eor"),
}  # fmt: skip
_MNEMONICS, _VECTOR, _JUMP = {
    "x86_64": (_X86, r"%?[xyz]mm\d", r"\s+j[a-z]+\s+(\.?\w+)"),
    "aarch64": (_ARM, r"\b[vz]\d+\.\d*[bhsd]\b", r"\s+(?:b\.?[a-z]*|t?cbn?z\s+\w+,)\s+(\.?\w+)"),
}[platform.machine()]
_LOOPS = 4  # in ``build``: of two sources; of many, the first two, those between, and the last


def innermost_loops(assembly: str) -> Iterator[list[str]]:
    """Lines from a label to a jump back to it, without such a loop inside."""
    lines, labels, last_start = assembly.splitlines(), {}, -1
    for at, line in enumerate(lines):
        if label := re.match(r"(\.?\w+):", line):
            labels[label[1]] = at
        elif (jump := re.match(_JUMP, line)) and (start := labels.get(jump[1], -1)) > last_start:
            last_start = at
            yield lines[start : at + 1]


def is_packed(line: str, mnemonics: str) -> bool:
    instruction = re.match(r"\s+(\S+)\s+(.*)", line)
    return bool(instruction and re.fullmatch(mnemonics, instruction[1]) and re.search(_VECTOR, instruction[2]))


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.name)
def test_loops_are_vectorised(dtype: DType) -> None:
    scalar = []
    for op in (op for op in Op if supports(dtype, op)):
        meaning = _MEANING_FOR_BOOL.get(op, op) if dtype is DType.bool else op
        on_floats, on_integers = _MNEMONICS[Op.sum if meaning is Op.avg else meaning]
        mnemonics = on_floats if dtype.is_floating_point else on_integers
        assembly = build(int(dtype), int(op), dtype.itemsize, cached=False)._library.get_asm_str()
        packed = sum(any(is_packed(line, mnemonics) for line in loop) for loop in innermost_loops(assembly))
        # No instruction set divides packed integers: the loop that finishes an average of them may stay scalar.
        if packed < _LOOPS - (op is Op.avg and not dtype.is_floating_point):
            scalar.append(f"{op.name}: {packed} loops with packed {mnemonics}")
    if platform.machine() == "aarch64" and dtype is DType.int64:  # Neon has no product of 64-bit lanes
        scalar = [words for words in scalar if not words.startswith("prod")]
    assert not scalar, f"{dtype.name}: {scalar}"


# The results.


@cache
def function(dtype: DType, op: Op) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(reduction(dtype, op))


def reduce(sources: list[Tensor], dtype: DType, op: Op, destination: Tensor | None = None) -> Tensor:
    """Calls the compiled reduction."""
    output = torch.empty_like(sources[0]) if destination is None else destination
    addresses = torch.tensor([source.data_ptr() for source in sources])
    tile = torch.empty(TILE_ELEMENTS, dtype=torch.int64)
    function(dtype, op)(output.data_ptr(), addresses.data_ptr(), len(sources), output.numel(), tile.data_ptr())
    return output


def all_patterns(dtype: DType) -> Tensor:
    bits = 8 * dtype.itemsize
    numbers = torch.arange(1 << bits, dtype=torch.int32) - (1 << (bits - 1))
    return numbers.to({8: torch.int8, 16: torch.int16}[bits]).view(torch_dtype(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("num", [2, 3])
def test_every_pattern_survives(dtype: DType, zero: float, num: int) -> None:
    values = all_patterns(dtype)
    zeros = torch.full(values.shape, zero).to(values.dtype)
    for first in (True, False):
        sources = [values, *[zeros] * (num - 1)] if first else [*[zeros] * (num - 1), values]
        got = reduce(sources, dtype, Op.sum)
        check_bits(got, emulate(sources, dtype, Op.sum), f"{dtype.name} + {zero}")
        # A sum with a zero is the number itself: an independent statement, which needs no emulation.
        same = values.float() == got.float()
        assert (same | values.float().isnan()).all()
        assert (values.float().isnan() == got.float().isnan()).all()


@pytest.mark.parametrize("dtype", [DType.float8_e4m3fn, DType.float8_e5m2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", [Op.sum, Op.avg, Op.max, Op.min, Op.prod], ids=lambda op: op.name)
def test_every_pair_of_8_bit_floats(dtype: DType, op: Op) -> None:
    values = all_patterns(dtype)
    sources = [values.repeat_interleave(256), values.repeat(256)]
    check_reduction(reduce(sources, dtype, op), sources, dtype, op, f"{dtype.name} {op.name}")


@pytest.mark.parametrize("op", [op for op in Op if supports(DType.int8, op)], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [DType.int8, DType.uint8], ids=lambda dtype: dtype.name)
def test_every_pair_of_8_bit_integers(dtype: DType, op: Op) -> None:
    values = torch.arange(256).to(torch_dtype(dtype))
    sources = [values.repeat_interleave(256), values.repeat(256)]
    check_reduction(reduce(sources, dtype, op), sources, dtype, op, f"{dtype.name} {op.name}")


def rounder(dtype: int) -> Callable[[int, int, int], None]:
    """Compiles a loop that rounds float32 to ``dtype`` by the library's own store."""
    float32, op = int(DType.float32), int(Op.sum)

    @njit
    def convert(source, destination, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            store(destination, i, load(source, i, float32, op), dtype, op)

    return convert


def ties(dtype: DType) -> Tensor:
    """Halfway between neighbours of the dtype, and the float32 just below and above; so at the edges of its range."""
    values = all_patterns(dtype).float()
    values = values[values.isfinite()].unique()
    if dtype is DType.bfloat16:  # the largest two of each sign are further apart than float32 can halve
        values = values[values.abs() < 1e38]
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.tensor([447.0, 448, 463.9, 464, 464.1, 61439, 61440, 61441, 65519, 65520])
    points = torch.cat([values, middles, edges, -edges])
    infinity = torch.tensor(float("inf"))
    return torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)
def test_rounding_of_float32(dtype: DType) -> None:
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randint(-(2**31), 2**31, (2_000_000,), generator=generator).to(torch.int32).view(torch.float32)
    scales = 2.0 ** torch.randint(-30, 20, (1_000_000,), generator=generator)
    scaled = torch.randn(1_000_000, generator=generator) * scales
    values = torch.cat([patterns, scaled, ties(dtype), torch.tensor(awkward_values(DType.float32))]).contiguous()
    got = torch.empty(values.shape, dtype=torch_dtype(dtype))
    rounder(int(dtype))(values.data_ptr(), got.data_ptr(), values.numel())
    check_bits(got, narrow(values, dtype), f"float32 to {dtype.name}")


@pytest.mark.parametrize("num", [2, 3, 4, 9])
def test_tiles_and_shared_buffers(num: int) -> None:
    """Counts around the tile of accumulators; the destination may be any of the sources."""
    for dtype, op in PAIRS:
        for count in (1, TILE_ELEMENTS - 1, TILE_ELEMENTS, TILE_ELEMENTS + 1, 2 * TILE_ELEMENTS + 5):
            sources = [make_input(rank, count, dtype, count) for rank in range(num)]
            expected, what = emulate(sources, dtype, op), f"{dtype.name} {op.name} × {count} of {num}"
            check_bits(reduce(sources, dtype, op), expected, what)
            into = (count + op) % num
            check_bits(reduce(sources, dtype, op, destination=sources[into]), expected, f"{what}, into source {into}")
