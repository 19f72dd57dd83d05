"""How threads go over units of data: units ``first``, ``first + step``, …, in batches of several in flight."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from symmcomm.kernels.gpu.context import block, thread
from symmcomm.kernels.gpu.primitives import opaque


def first_unit(threads: int) -> Any:
    """The thread's index in the grid."""
    return Int64(block()) * threads + thread()


def num_units(threads: int) -> Any:
    """Threads of the grid."""
    return Int64(cute.arch.grid_dim()[0]) * threads


@cute.jit
def sweep(num: Int64, first: Int64, step: Int64, size: cutlass.Constexpr, batch: cutlass.Constexpr) -> None:
    """``batch(i)`` for each first unit i of ``size`` that are ``step`` apart, as long as it is below ``num``."""
    i = first
    while i < opaque(num):
        batch(i)
        i += size * step


def places(
    offset: Any, num: Any, i: Any, step: Any, size: int, unit: int, first_is_there: bool = True
) -> list[tuple[Any, Any]]:
    """Of each unit of batch i: the byte, from ``offset`` on, and whether it is there. In a ``sweep`` the first always
    is. It then has no predicate, as that would be folded to a literal, which PTX has no form for."""
    first: tuple[Any, Any] = (offset + i * unit, None if first_is_there else i < num)
    return [first, *((offset + (i + u * step) * unit, i + u * step < num) for u in range(1, size))]
