"""Reduction of the ranks' data by all threads of some CTAs: targets[t][i] = x[0][i] ∘ … ∘ x[world_size - 1][i].

The order is that of the sources, and fast and slow path give the same bits. One thread reads a unit from all sources
before it writes it, so a target may be one of them. With ``multimem`` the switch reduces and distributes; the order of
its sum is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from symmcomm.kernels.gpu import multimem
from symmcomm.kernels.gpu.elements import Reduction, load_vector, store_vector
from symmcomm.kernels.gpu.sweep import places, sweep


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the data is and goes: an address for each rank and each target.

    ``multicast_source`` stands for all sources, ``multicast_target`` for all targets, where they are not None and the
    switch reduces as we do.
    """

    sources: tuple[Any, ...]
    targets: tuple[Any, ...]
    multicast_source: Any = None
    multicast_target: Any = None

    def are_vectors(self) -> Any:
        """Whether all lie on 16-byte boundaries."""
        bits = Int64(0)
        for address in (*self.sources, *self.targets):
            bits = bits | address
        return (bits & 15) == 0


@cute.jit
def reduce_bytes(
    reduction: cutlass.Constexpr, where: cutlass.Constexpr, num_bytes: Int64, first: Int64, step: Int64,
    vectors: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Units ``first``, ``first + step``, … of the ``num_bytes``: 16 bytes each where all addresses allow it, with
    ``vectors`` of each source in flight, else single elements."""
    done = Int64(0)
    if where.are_vectors():
        done = num_bytes & ~15
    _sweep(reduction, where, Int64(0), done >> 4, first, step, vectors, 16)
    itemsize = reduction.dtype.itemsize
    _sweep(reduction, where, done, (num_bytes - done) // itemsize, first, step, vectors, itemsize)


def _sweep(
    reduction: Reduction, where: Addresses, offset: Any, num: Any, first: Any, step: Any, vectors: int, unit: int
) -> None:
    sweep(num, first, step, vectors, partial(_batch, reduction, where, offset, num, step, vectors, unit))


def _batch(
    reduction: Reduction, where: Addresses, offset: Any, num: Any, step: Any, vectors: int, unit: int, i: Any
) -> None:
    """Units i, i + step, …: all loads first, so that they are in flight together."""
    here = places(offset, num, i, step, vectors, unit)
    store_units(reduction, where, here, unit, reduced_units(reduction, where, here, unit))


def _by_switch(reduction: Reduction, where: Addresses, unit: int) -> bool:
    return where.multicast_source is not None and multimem.form(reduction, unit) is not None


def reduced_units(
    reduction: Reduction, where: Addresses, here: list[tuple[Any, Any]], unit: int
) -> Iterator[list[Any]]:
    """The words of the units at ``here`` (``sweep.places``), reduced. All are loaded before the first is given."""
    if _by_switch(reduction, where, unit):
        yield from [multimem.ld_reduce(reduction, where.multicast_source + at, unit, when=live) for at, live in here]
        return
    loaded = [
        [load_vector(source + at, unit, semantics="relaxed", when=live) for source in where.sources]
        for at, live in here
    ]
    for of_ranks in loaded:
        yield reduction.reduce(of_ranks)


def store_units(
    reduction: Reduction, where: Addresses, here: list[tuple[Any, Any]], unit: int, reduced: Iterable[list[Any]]
) -> None:
    """Stores what ``reduced_units`` gave."""
    for (at, live), words in zip(here, reduced, strict=True):
        if where.multicast_target is not None and _by_switch(reduction, where, unit):
            multimem.st(where.multicast_target + at, words, unit, when=live)
        else:
            for target in where.targets:
                store_vector(target + at, words, unit, when=live)
