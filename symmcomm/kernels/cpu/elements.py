"""One element of any type: loaded into its accumulator, combined, rounded and stored. Loops over these vectorise.

Loads carry ``!alias.scope`` and stores ``!noalias`` of one scope: LLVM may assume that a store changes no later load of
the same loop, so that loops over raw addresses vectorise without checks for overlap. It holds because a loop reads
element i of its sources only to write element i of its destination; a destination may be one of the sources, but not
overlap it shifted.

``dtype`` and ``op`` are literals in compiled code, so each instance holds the instructions of one type only.
Accumulators: float32 for floats of 16 and 8 bits, int32 for integers below 32 bits (int64 for all integers in ``avg``),
else the type itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from symmcomm.schedule.dtypes import DType, Op

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()

_STORAGE = {
    DType.float32: _FLOAT, DType.float64: _DOUBLE, DType.float16: _HALF, DType.bfloat16: _I16,
    DType.float8_e4m3fn: _I8, DType.float8_e5m2: _I8, DType.int8: _I8, DType.int16: _I16, DType.int32: _I32,
    DType.int64: _I64, DType.uint8: _I8, DType.bool: _I8,
}  # fmt: skip


def accumulator(dtype: DType, op: Op) -> Any:
    """Numba type in which ``op`` accumulates ``dtype``."""
    if dtype.is_floating_point:
        return types.float64 if dtype is DType.float64 else types.float32
    return types.int64 if dtype is DType.int64 or op is Op.avg else types.int32


def _scope(module: Any) -> Any:
    """The module's one alias scope, as a metadata list."""
    domain = module.add_metadata([ir.MetaDataString(module, "symmcomm")])
    return module.add_metadata([module.add_metadata([ir.MetaDataString(module, "sources"), domain])])


def _select_nan(builder: Any, value: Any, if_nan: Any, otherwise: Any) -> Any:
    return builder.select(builder.fcmp_unordered("uno", value, value), if_nan, otherwise)


def _e4m3fn_to_float(b: Any, byte: Any) -> Any:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f is NaN (OCP 8-bit floating point, E4M3)."""
    bits = b.zext(byte, _I32)
    magnitude = b.and_(bits, _I32(0x7F))
    normal = b.add(b.shl(magnitude, _I32(20)), _I32((127 - 7) << 23))
    subnormal = b.bitcast(b.fmul(b.uitofp(magnitude, _FLOAT), _FLOAT(2.0**-9)), _I32)
    out = b.select(b.icmp_unsigned("<", magnitude, _I32(8)), subnormal, normal)
    out = b.select(b.icmp_unsigned("==", magnitude, _I32(0x7F)), _I32(0x7FC00000), out)
    return b.bitcast(b.or_(out, b.shl(b.and_(bits, _I32(0x80)), _I32(24))), _FLOAT)


def _float_to_8bit(b: Any, value: Any, mantissa_bits: int, bias: int, overflow_from: int, overflow: int) -> Any:
    """Round to nearest even into sign, exponent and mantissa; magnitudes whose bits reach ``overflow_from`` become the
    ``overflow`` byte. Subnormals are rounded by adding a float whose last bit is the format's smallest step."""
    drop = 23 - mantissa_bits
    bits = b.bitcast(value, _I32)
    magnitude = b.and_(bits, _I32(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, _I32(drop)), _I32(1))
    rounded = b.add(b.add(magnitude, _I32((1 << (drop - 1)) - 1)), odd)
    normal = b.lshr(b.sub(rounded, _I32((127 - bias) << 23)), _I32(drop))
    magic = _FLOAT(2.0 ** (24 - bias - mantissa_bits))
    shifted = b.bitcast(b.fadd(b.bitcast(magnitude, _FLOAT), magic), _I32)
    subnormal = b.sub(shifted, b.bitcast(magic, _I32))
    out = b.select(b.icmp_unsigned("<", magnitude, _I32((127 - bias + 1) << 23)), subnormal, normal)
    out = b.select(b.icmp_unsigned(">=", magnitude, _I32(overflow_from)), _I32(overflow), out)
    out = _select_nan(b, value, _I32(0x7F), out)
    return b.trunc(b.or_(out, b.and_(b.lshr(bits, _I32(24)), _I32(0x80))), _I8)


def splat(kind: Any, value: int) -> Any:
    """A constant of an integer type, or of a vector of one."""
    return kind([value] * kind.count) if isinstance(kind, ir.VectorType) else kind(value)


def round_to_bfloat16(b: Any, value: Any, kind: Any = _I32) -> Any:
    """Round to nearest even: the result is the upper half of these bits, the lower one is to be dropped. A NaN stays
    one if the lower half of its bits is 0. ``kind``: of the bits."""
    bits = b.bitcast(value, kind)
    odd = b.and_(b.lshr(bits, splat(kind, 16)), splat(kind, 1))
    return b.add(b.add(bits, splat(kind, 0x7FFF)), odd)


def _float_to_bfloat16(b: Any, value: Any) -> Any:
    """Round to nearest even; a NaN stays one."""
    rounded = round_to_bfloat16(b, value)
    return b.trunc(b.lshr(_select_nan(b, value, _I32(0x7FC00000), rounded), _I32(16)), _I16)


def _widen(b: Any, dtype: DType, raw: Any, acc: Any) -> Any:
    if dtype is DType.bfloat16:
        return b.bitcast(b.shl(b.zext(raw, _I32), _I32(16)), _FLOAT)
    if dtype is DType.float16:
        return b.fpext(raw, _FLOAT)
    if dtype is DType.float8_e5m2:  # the upper byte of a float16
        return b.fpext(b.bitcast(b.shl(b.zext(raw, _I16), _I16(8)), _HALF), _FLOAT)
    if dtype is DType.float8_e4m3fn:
        return _e4m3fn_to_float(b, raw)
    if dtype.is_floating_point or acc.bitwidth == raw.type.width:
        return raw
    wide = _I64 if acc is types.int64 else _I32
    return b.zext(raw, wide) if dtype in (DType.uint8, DType.bool) else b.sext(raw, wide)


def _narrow(b: Any, dtype: DType, value: Any) -> Any:
    if dtype is DType.bfloat16:
        return _float_to_bfloat16(b, value)
    if dtype is DType.float16:
        return b.fptrunc(value, _HALF)
    if dtype is DType.float8_e5m2:  # infinity from 61440, halfway between the largest finite and the next step
        return _float_to_8bit(b, value, 2, 15, 0x47700000, 0x7C)
    if dtype is DType.float8_e4m3fn:  # no infinity: saturates at its largest, 448, as torch from 2.13 and GPUs do
        return _float_to_8bit(b, value, 3, 7, 0x43E00000, 0x7E)
    storage = _STORAGE[dtype]
    return value if value.type == storage else b.trunc(value, storage)


def literals(*args: Any) -> tuple[DType, Op]:
    return DType(args[0].literal_value), Op(args[1].literal_value)


@intrinsic(prefer_literal=True)
def load(typingctx: Any, address: Any, index: Any, dtype: Any, op: Any) -> Any:
    """Element ``index`` at ``address``, as an accumulator."""
    kind, operation = literals(dtype, op)
    acc = accumulator(kind, operation)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _STORAGE[kind].as_pointer()), [args[1]])
        raw = builder.load(pointer, align=1)
        raw.set_metadata("alias.scope", _scope(builder.module))
        return _widen(builder, kind, raw, acc)

    return acc(types.int64, types.int64, dtype, op), codegen


@intrinsic(prefer_literal=True)
def store(typingctx: Any, address: Any, index: Any, value: Any, dtype: Any, op: Any) -> Any:
    """Rounds an accumulator (to nearest even, as torch casts) into element ``index`` at ``address``."""
    kind, operation = literals(dtype, op)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _STORAGE[kind].as_pointer()), [args[1]])
        stored = builder.store(_narrow(builder, kind, args[2]), pointer, align=1)
        stored.set_metadata("noalias", _scope(builder.module))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, accumulator(kind, operation), dtype, op), codegen


def _accumulator_slot(builder: Any, acc: Any, address: Any, index: Any) -> Any:
    llvm = {types.float32: _FLOAT, types.float64: _DOUBLE, types.int32: _I32, types.int64: _I64}[acc]
    return builder.gep(builder.inttoptr(address, llvm.as_pointer()), [index])


@intrinsic(prefer_literal=True)
def load_accumulator(typingctx: Any, address: Any, index: Any, dtype: Any, op: Any) -> Any:
    """Accumulator ``index`` of the tile at ``address``."""
    acc = accumulator(*literals(dtype, op))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_accumulator_slot(builder, acc, args[0], args[1]))
        value.set_metadata("alias.scope", _scope(builder.module))
        return value

    return acc(types.int64, types.int64, dtype, op), codegen


@intrinsic(prefer_literal=True)
def store_accumulator(typingctx: Any, address: Any, index: Any, value: Any, dtype: Any, op: Any) -> Any:
    """Stores accumulator ``index`` of the tile at ``address``."""
    acc = accumulator(*literals(dtype, op))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[2], _accumulator_slot(builder, acc, args[0], args[1]))
        stored.set_metadata("noalias", _scope(builder.module))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, acc, dtype, op), codegen


def _combine_bool(b: Any, op: Op, x: Any, y: Any) -> Any:
    """0 and 1: sum and max are ``or``, prod and min are ``and``."""
    if op in (Op.prod, Op.min, Op.band):
        return b.and_(x, y)
    return b.xor(x, y) if op is Op.bxor else b.or_(x, y)


def combine_float(b: Any, op: Op, x: Any, y: Any) -> Any:
    """max and min propagate NaN, as torch's do."""
    if op in (Op.sum, Op.avg):
        return b.fadd(x, y)
    if op is Op.prod:
        return b.fmul(x, y)
    keep = b.or_(b.fcmp_ordered(">" if op is Op.max else "<", x, y), b.fcmp_unordered("uno", x, x))
    return b.select(keep, x, y)


def _combine_integer(b: Any, op: Op, x: Any, y: Any) -> Any:
    simple = {Op.sum: b.add, Op.avg: b.add, Op.prod: b.mul, Op.band: b.and_, Op.bor: b.or_, Op.bxor: b.xor}
    if op in simple:
        return simple[op](x, y)
    return b.select(b.icmp_signed(">" if op is Op.max else "<", x, y), x, y)


@intrinsic(prefer_literal=True)
def combine(typingctx: Any, x: Any, y: Any, dtype: Any, op: Any) -> Any:
    """``op`` of two accumulators."""
    kind, operation = literals(dtype, op)
    acc = accumulator(kind, operation)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if kind is DType.bool:
            return _combine_bool(builder, operation, args[0], args[1])
        function = combine_float if kind.is_floating_point else _combine_integer
        return function(builder, operation, args[0], args[1])

    return acc(acc, acc, dtype, op), codegen


@intrinsic(prefer_literal=True)
def finish(typingctx: Any, value: Any, num: Any, dtype: Any, op: Any) -> Any:
    """The result from the accumulator of ``num`` ranks' elements: for ``avg`` divided by ``num``, truncated."""
    kind, operation = literals(dtype, op)
    acc = accumulator(kind, operation)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if operation is not Op.avg:
            return args[0]
        if not kind.is_floating_point:
            return builder.sdiv(args[0], args[1])
        return builder.fdiv(args[0], builder.sitofp(args[1], args[0].type))

    return acc(acc, types.int64, dtype, op), codegen


@intrinsic(prefer_literal=True)
def rounded(typingctx: Any, value: Any, dtype: Any, op: Any) -> Any:
    """The accumulator that a stored ``value`` would be loaded as."""
    kind, operation = literals(dtype, op)
    acc = accumulator(kind, operation)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen(builder, kind, _narrow(builder, kind, args[0]), acc)

    return acc(acc, dtype, op), codegen


@intrinsic
def add_square(typingctx: Any, total: Any, value: Any) -> Any:
    """``total + value²`` in float32. A loop over it may sum in any order, hence in vectors; nothing else may."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flags = ("reassoc", "contract")
        return builder.fadd(args[0], builder.fmul(args[1], args[1], flags=flags), flags=flags)

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def larger_magnitude(typingctx: Any, bits: Any, value: Any) -> Any:
    """The larger of ``bits`` and those of |value| in float32, which as whole numbers are ordered as the floats are,
    with NaN above infinity."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[1], _I32), _I32(0x7FFFFFFF))
        return builder.select(builder.icmp_unsigned(">", magnitude, args[0]), magnitude, args[0])

    return types.int32(types.int32, types.float32), codegen


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen
