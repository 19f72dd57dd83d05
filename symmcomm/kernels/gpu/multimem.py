"""Reductions and stores by the NVLink switch, where its arithmetic is ours.

The switch adds 32- and 64-bit floats and integers, and 16-bit floats in float32; it compares and combines bits of
integers. It knows no product, no integers below 32 bits, adds 8-bit floats in float16 only and does not propagate NaN
in max and min: then ``form`` is None and a kernel loops over the peers, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.multimem_instructions import multimem_ld_reduce, multimem_ld_reduce_64, multimem_st
from symmcomm.schedule.dtypes import DType, Op


@dataclass(frozen=True)
class Form:
    """One ``multimem.ld_reduce``: type, operation, accumulator, and 32-bit words that it fetches."""

    kind: str
    op: str
    acc: str
    num_words: int


_BITWISE = {Op.band: "and", Op.bor: "or", Op.bxor: "xor"}
_BOOL = {Op.sum: "or", Op.max: "or", Op.prod: "and", Op.min: "and"} | _BITWISE


def form(reduction: Reduction, unit: int) -> Form | None:
    """How the switch reduces units of 4, 8 or 16 bytes; None where it does not, or not as we do."""
    dtype, op = reduction.dtype, reduction.op
    if reduction.arch < 90 or unit < 4:
        return None
    if dtype is DType.bool or op in _BITWISE:
        return Form("b32", _BOOL[op], "", 1)
    if op in (Op.sum, Op.avg):
        if dtype is DType.float32:
            return Form("f32", "add", "", 4 if unit == 16 else 1)
        if dtype is DType.float64:
            return Form("f64", "add", "", 2)
        if op is Op.sum and dtype in (DType.float16, DType.bfloat16):
            return Form("f16x2" if dtype is DType.float16 else "bf16x2", "add", "f32", unit // 4)
        if op is Op.sum and dtype in (DType.int32, DType.int64):
            return Form("u32", "add", "", 1) if dtype is DType.int32 else Form("u64", "add", "", 2)
    if op in (Op.max, Op.min) and dtype in (DType.int32, DType.int64):
        return Form("s32" if dtype is DType.int32 else "s64", op.name, "", dtype.itemsize // 4)
    return None


def ld_reduce(reduction: Reduction, address: Any, unit: int, *, when: Any = None) -> list[Any]:
    """The words of a unit at a multicast address, reduced over all ranks; ``form`` must not be None."""
    how = form(reduction, unit)
    assert how is not None
    words: list[Any] = []
    for at in range(0, unit, 4 * how.num_words):
        if how.kind in ("f64", "u64", "s64"):
            words += multimem_ld_reduce_64(address + at, how.kind, how.op, when=when)
        else:
            words += multimem_ld_reduce(address + at, how.kind, how.op, num=how.num_words, acc=how.acc, when=when)
    if reduction.op is Op.avg:
        return reduction.narrow(reduction.finish(reduction.widen(words)))
    return words


def st(address: Any, words: list[Any], unit: int, *, when: Any = None) -> None:
    """Stores a unit of 4, 8 or 16 bytes at that place on every rank."""
    multimem_st(address, words[: unit // 4], when=when)
