"""Element types and reductions, and which goes with which. Pure Python; ``collectives.call`` maps torch's names."""

from __future__ import annotations

import builtins
from enum import IntEnum


class DType(IntEnum):
    """Element types that can be reduced. Values are stable: they travel in call descriptors."""

    float32 = 0
    float64 = 1
    float16 = 2
    bfloat16 = 3
    float8_e4m3fn = 4
    float8_e5m2 = 5
    int8 = 6
    int16 = 7
    int32 = 8
    int64 = 9
    uint8 = 10
    bool = 11

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _ITEMSIZE[self]

    @property
    def is_floating_point(self) -> builtins.bool:
        return self <= DType.float8_e5m2


_ITEMSIZE = dict(zip(DType, (4, 8, 2, 2, 1, 1, 1, 2, 4, 8, 1, 1), strict=True))


class Op(IntEnum):
    """Reductions, named as in ``torch.distributed.ReduceOp``."""

    sum = 0
    avg = 1
    max = 2
    min = 3
    prod = 4
    band = 5
    bor = 6
    bxor = 7


def supports(dtype: DType, op: Op) -> bool:
    """Whether ``op`` has a meaning for ``dtype``: bitwise needs integers (or bool), bool has no average."""
    if op >= Op.band:
        return not dtype.is_floating_point
    return not (dtype is DType.bool and op is Op.avg)


def partial_dtype(dtype: DType, op: Op) -> DType:
    """The type in which partial results lose nothing: what adds up or multiplies needs its accumulator, what picks or
    masks, and integers that wrap, do not."""
    if dtype.is_floating_point:
        return DType.float32 if dtype.itemsize < 4 and op in (Op.sum, Op.avg, Op.prod) else dtype
    return DType.int64 if op is Op.avg else dtype
