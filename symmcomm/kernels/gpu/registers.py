"""Registers of a thread that last from one step of a loop to the next, for a kernel's lists of numbers."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def registers(num: int, kind: Any) -> Any:
    """That many of a kind."""
    return cute.make_rmem_tensor((max(1, num),), kind)


def keep(kept: Any, vectors: list[list[Any]], first: int = 0) -> None:
    """Moves the numbers into such registers."""
    for i, number in enumerate(number for vector in vectors for number in vector):
        kept[first + i] = number


def kept_in(kept: Any, num: int, size: int) -> list[list[Any]]:
    """``num`` vectors of ``size`` numbers, as ``keep`` left them."""
    return [[kept[v * size + i] for i in range(size)] for v in range(num)]
