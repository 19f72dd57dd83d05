"""Elements of any type: 32-bit words widened into accumulators, combined, rounded and packed again.

Everything here is straight-line code, put together while a kernel is traced, for one ``Reduction`` (element type,
operation, number of ranks, architecture). A *vector* is a list of ``Uint32`` words: 4 for the 16-byte fast path, 3 for
an LL cell (2 for elements of 8 bytes), and for a single element one word with zeros above it (two for 64-bit types); so
the fast path and the path of single elements are the same code and give the same bits.

Accumulators: float32 for floats of 16 and 8 bits, int32 for integers below 32 bits (int64 for all integers in ``avg``),
else the type itself. Bitwise operations, and all of bool's, work on whole words. Rounding is to nearest even as torch
casts; float8_e4m3fn saturates at ±448. max and min propagate NaN.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Float64, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from symmcomm.kernels.gpu.primitives import join, load, load_narrow, pick, split, store, store_narrow
from symmcomm.schedule.dtypes import DType, Op

_BOOL_OPS = {Op.sum: Op.bor, Op.max: Op.bor, Op.prod: Op.band, Op.min: Op.band}
_HAS_FLOAT8 = 89  # architecture from which cvt knows 8-bit floats


@dataclass(frozen=True)
class Reduction:
    """``round(finish(x[0] ∘ x[1] ∘ … ∘ x[world_size - 1]))``, in rank order. ``arch`` as in ``sm_<arch>``."""

    dtype: DType
    op: Op
    world_size: int
    arch: int

    @property
    def packed(self) -> bool:
        """Whether the words are combined as they are."""
        return self.dtype is DType.bool or self.op >= Op.band

    def widen(self, words: list[Any]) -> list[Any]:
        """Accumulators of the words' elements."""
        if self.packed or self.dtype is DType.float32:
            return list(words) if self.packed else [w.bitcast(Float32) for w in words]
        if self.dtype.itemsize == 8:
            values = [join(words[i], words[i + 1]) for i in range(0, len(words), 2)]
            return [v.bitcast(Float64) for v in values] if self.dtype is DType.float64 else values
        per_word = 4 // self.dtype.itemsize
        if self.dtype.is_floating_point:
            halves = _bfloat16_words if self.dtype is DType.bfloat16 else _float16_words
            if per_word == 2:
                return [x for w in words for x in halves(w)]
            return [x for w in words for x in _widen_float8(w, self.dtype, self.arch)]
        wide = Int64 if self.op is Op.avg else Int32
        return [wide(_field(w, i, self.dtype)) for w in words for i in range(per_word)]

    def combine(self, x: list[Any], y: list[Any]) -> list[Any]:
        """``op`` of two lists of accumulators."""
        op = _BOOL_OPS.get(self.op, self.op) if self.dtype is DType.bool else self.op
        return [_combine(op, self.dtype, a, b) for a, b in zip(x, y, strict=True)]

    def finish(self, values: list[Any]) -> list[Any]:
        """For ``avg``, divided by the number of ranks: floats before they are rounded, integers towards zero."""
        if self.op is not Op.avg:
            return values
        if self.dtype.is_floating_point:
            return [_divide(v, self.world_size) for v in values]
        return [_truncating_divide(v, self.world_size) for v in values]

    def narrow(self, values: list[Any]) -> list[Any]:
        """Words of the elements that accumulators round to."""
        if self.packed:
            return values
        if self.dtype is DType.float32:
            return [v.bitcast(Uint32) for v in values]
        if self.dtype.itemsize == 8:
            return [w for v in values for w in split(v.bitcast(Int64))]
        per_word = 4 // self.dtype.itemsize
        groups = [values[i : i + per_word] for i in range(0, len(values), per_word)]
        if self.dtype in (DType.float16, DType.bfloat16):
            kind = "f16x2" if self.dtype is DType.float16 else "bf16x2"
            return [_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", Uint32, *pair) for pair in groups]
        if self.dtype.is_floating_point:
            return [_narrow_float8(four, self.dtype, self.arch) for four in groups]
        return [_pack(group, self.dtype.itemsize) for group in groups]

    def reduce(self, vectors: list[list[Any]]) -> list[Any]:
        """The result's words from the ranks' words, in rank order."""
        total = self.widen(vectors[0])
        for vector in vectors[1:]:
            total = self.combine(total, self.widen(vector))
        return self.narrow(self.finish(total))


def load_vector(address: Any, num_bytes: int, *, semantics: str = "weak", when: Any = None) -> list[Any]:
    """``num_bytes`` (1, 2, 4, 8 or 16, and aligned to that) as words; undefined where ``when`` is false."""
    if num_bytes < 4:
        return [load_narrow(address, num_bytes, when=when)]
    return list(load(address, num=num_bytes // 4, semantics=semantics, when=when))


def store_vector(address: Any, words: list[Any], num_bytes: int, *, when: Any = None) -> None:
    """Stores ``num_bytes`` (1, 2, 4, 8 or 16, and aligned to that) of the words."""
    if num_bytes < 4:
        store_narrow(address, words[0], num_bytes, when=when)
    else:
        store(address, words[: num_bytes // 4], when=when)


def _ptx(code: str, kind: Any, *args: Any) -> Any:
    return inline_ptx(code, write_only_types=[kind], read_only_args=list(args))


def _field(word: Any, index: int, dtype: DType) -> Any:
    """Element ``index`` of a word, sign-extended unless the type has no sign."""
    bits = 8 * dtype.itemsize
    if bits == 32:
        return Int32(word)
    if dtype is DType.uint8:
        return Int32((word >> Uint32(bits * index)) & Uint32(0xFF))
    return Int32(word << Uint32(32 - bits * (index + 1))) >> Int32(32 - bits)


def _pack(values: list[Any], itemsize: int) -> Any:
    word = Uint32(values[0])
    if itemsize == 4:
        return word
    mask = Uint32((1 << 8 * itemsize) - 1)
    word = word & mask
    for i, value in enumerate(values[1:], 1):
        word = word | ((Uint32(value) & mask) << Uint32(8 * itemsize * i))
    return word


def _bfloat16_words(word: Any) -> list[Any]:
    return [(word << Uint32(16)).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)]


def _float16_words(word: Any) -> list[Any]:
    code = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
        "cvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;\n}"
    )
    return list(inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[word]))


def _widen_float8(word: Any, dtype: DType, arch: int) -> list[Any]:
    """Four floats. float8_e5m2 is the upper byte of a float16; float8_e4m3fn, moved to a float16's place, is 2⁸ too
    small but for its NaN."""
    if dtype is DType.float8_e5m2:
        even, odd = (word & Uint32(0x00FF00FF)) << Uint32(8), word & Uint32(0xFF00FF00)
        (a, c), (b, d) = _float16_words(even), _float16_words(odd)
        return [a, b, c, d]
    if arch >= _HAS_FLOAT8:
        code = (
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
            "cvt.rn.f16x2.e4m3x2 {$w0}, low;\ncvt.rn.f16x2.e4m3x2 {$w1}, high;\n}"
        )
        pairs = inline_ptx(code, write_only_types=[Uint32, Uint32], read_only_args=[word])
        return [x for pair in pairs for x in _float16_words(pair)]
    out = []
    for i in range(4):
        byte = (word >> Uint32(8 * i)) & Uint32(0xFF)
        magnitude = byte & Uint32(0x7F)
        half = ((byte & Uint32(0x80)) << Uint32(8)) | (magnitude << Uint32(7))
        value = _float16_words(half)[0] * Float32(256.0)
        out.append(pick(magnitude == Uint32(0x7F), Float32(float("nan")), value))
    return out


def _narrow_float8(values: list[Any], dtype: DType, arch: int) -> Any:
    """A word from four floats. The hardware saturates; float8_e5m2 must become infinite from 61440 on, halfway between
    its largest finite number and the next step."""
    if arch < _HAS_FLOAT8:
        form = (3, 7, 0x43E00000, 0x7E) if dtype is DType.float8_e4m3fn else (2, 15, 0x47700000, 0x7C)
        return _pack([_float_to_8bit(v, *form) for v in values], 1)
    kind = "e4m3x2" if dtype is DType.float8_e4m3fn else "e5m2x2"
    code = (
        f"{{\n.reg .b16 low, high;\ncvt.rn.satfinite.{kind}.f32 low, {{$r1}}, {{$r0}};\n"
        f"cvt.rn.satfinite.{kind}.f32 high, {{$r3}}, {{$r2}};\nmov.b32 {{$w0}}, {{low, high}};\n}}"
    )
    word = _ptx(code, Uint32, *values)
    if dtype is DType.float8_e4m3fn:
        return word
    for i, value in enumerate(values):  # 0x7b, the largest finite number, one up
        bits = value.bitcast(Uint32) & Uint32(0x7FFFFFFF)
        infinite = (bits >= Uint32(0x47700000)) & (bits <= Uint32(0x7F800000))
        word = word + pick(infinite, Uint32(1 << 8 * i), Uint32(0))
    return word


def _float_to_8bit(value: Any, mantissa_bits: int, bias: int, overflow_from: int, overflow: int) -> Any:
    """The byte that a float rounds to; see ``kernels.cpu.elements``, whose twin this is."""
    drop = 23 - mantissa_bits
    bits = value.bitcast(Uint32)
    magnitude = bits & Uint32(0x7FFFFFFF)
    odd = (magnitude >> Uint32(drop)) & Uint32(1)
    rounded = magnitude + Uint32((1 << (drop - 1)) - 1) + odd
    normal = (rounded - Uint32((127 - bias) << 23)) >> Uint32(drop)
    magic = Float32(2.0 ** (24 - bias - mantissa_bits))
    subnormal = (magnitude.bitcast(Float32) + magic).bitcast(Uint32) - magic.bitcast(Uint32)
    out = pick(magnitude < Uint32((127 - bias + 1) << 23), subnormal, normal)
    out = pick(magnitude >= Uint32(overflow_from), Uint32(overflow), out)
    out = pick(magnitude > Uint32(0x7F800000), Uint32(0x7F), out)
    return out | ((bits >> Uint32(24)) & Uint32(0x80))


def _combine(op: Op, dtype: DType, x: Any, y: Any) -> Any:
    if op in (Op.sum, Op.avg):
        return x + y
    if op is Op.prod:
        return x * y
    if op is Op.band:
        return x & y
    if op is Op.bor:
        return x | y
    if op is Op.bxor:
        return x ^ y
    name = "max" if op is Op.max else "min"
    if isinstance(x, Float32):
        return _ptx(f"{name}.NaN.f32 {{$w0}}, {{$r0}}, {{$r1}};", Float32, x, y)
    if isinstance(x, Float64):
        best = _ptx(f"{name}.f64 {{$w0}}, {{$r0}}, {{$r1}};", Float64, x, y)  # of a number and a NaN: the number
        return pick((x != x) | (y != y), Float64(float("nan")), best)
    return pick(x > y if op is Op.max else x < y, x, y)


def _divide(value: Any, world_size: int) -> Any:
    """Correctly rounded; the divisor is a PTX literal of its bits."""
    if isinstance(value, Float64):
        literal = "0d" + struct.pack(">d", float(world_size)).hex()
        return _ptx(f"div.rn.f64 {{$w0}}, {{$r0}}, {literal};", Float64, value)
    literal = "0f" + struct.pack(">f", float(world_size)).hex()
    return _ptx(f"div.rn.f32 {{$w0}}, {{$r0}}, {literal};", Float32, value)


def _truncating_divide(value: Any, world_size: int) -> Any:
    """int64 by a constant. Division of magnitudes: it does not depend on which way the DSL rounds negative ones."""
    unsigned = cutlass.Uint64
    magnitude = pick(value < Int64(0), unsigned(Int64(0) - value), unsigned(value))
    quotient = Int64(_ptx("div.u64 {$w0}, {$r0}, {$r1};", unsigned, magnitude, unsigned(world_size)))
    return pick(value < Int64(0), Int64(0) - quotient, quotient)
