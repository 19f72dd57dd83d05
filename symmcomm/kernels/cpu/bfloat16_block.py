"""Reduction of two bfloat16 sources, a block at a time, in vector instructions chosen here."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from symmcomm.kernels.cpu.elements import combine_float, literals, round_to_bfloat16, splat
from symmcomm.schedule.dtypes import Op

BFLOAT16_BLOCK = 32
"""Elements of a block: a cache line."""
_AHEAD = 16  # blocks
_I32, _FLOAT = ir.IntType(32), ir.FloatType()


def _prefetch(b: Any, pointer: Any) -> None:
    """Fetches a line into the first-level cache; whatever the address, nothing else happens."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = b.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    b.call(function, [b.bitcast(pointer, byte), _I32(0), _I32(3), _I32(1)])  # to read, of lasting use, data


@intrinsic(prefer_literal=True)
def reduce_bfloat16_block(
    typingctx: Any, destination: Any, first: Any, second: Any, index: Any, num: Any, dtype: Any, op: Any
) -> Any:
    """Block ``index`` of BFLOAT16_BLOCK elements: loads both sources', combines, finishes (``num`` ranks), stores.

    A vector of 32-bit words holds the even elements in the lower halves, the odd ones in the upper: a shift and a mask
    widen them. The vectoriser would spread each element to 32 bits and pack the results again, and these shuffles, of
    which an x86 core does one a cycle, take longer than the rest. NaNs need no care: they are the processor's own or
    come from bfloat16s, so the lower half of their bits is 0, and rounding leaves them as they are.
    """
    _, operation = literals(dtype, op)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, words = builder, ir.VectorType(_I32, BFLOAT16_BLOCK // 2)
        floats, upper_half = ir.VectorType(_FLOAT, words.count), splat(words, 0xFFFF0000)
        pointers = [b.gep(b.inttoptr(address, words.as_pointer()), [args[3]]) for address in args[:3]]
        for pointer in pointers[1:]:
            _prefetch(b, b.gep(pointer, [_I32(_AHEAD)]))
        raw = [b.load(pointer, align=1) for pointer in pointers[1:]]
        even = [b.bitcast(b.shl(word, splat(words, 16)), floats) for word in raw]
        odd = [b.bitcast(b.and_(word, upper_half), floats) for word in raw]
        results = [combine_float(b, operation, *even), combine_float(b, operation, *odd)]
        if operation is Op.avg:
            divisor = b.insert_element(ir.Constant(floats, ir.Undefined), b.sitofp(args[4], _FLOAT), _I32(0))
            divisor = b.shuffle_vector(divisor, divisor, ir.Constant(words, [0] * words.count))
            results = [b.fdiv(result, divisor) for result in results]
        lower, upper = (round_to_bfloat16(b, result, words) for result in results)
        stored = b.or_(b.lshr(lower, splat(words, 16)), b.and_(upper, upper_half))
        b.store(stored, pointers[0], align=1)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, types.int64, types.int64, dtype, op), codegen
