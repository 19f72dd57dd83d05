"""Numba kernels, one family a file. ``load()`` compiles them all (or reads Numba's cache) and returns their entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

Entry = Callable[..., int]
"""A compiled function of int64 arguments, called past Numba's dispatcher, which would cost as much as the kernel."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Entries of the kernels; arguments and meaning stand with each kernel. All return a status of ``context``."""

    all_to_all_barrier: Entry
    ring_barrier: Entry
    swap_barrier: Entry
    put_signal: Entry
    wait_signal: Entry
    all_reduce: Entry
    reduce_scatter: Entry
    ring: Entry
    all_gather: Entry
    all_to_all: Entry
    send: Entry
    receive: Entry
    probe: Entry
    room: Entry


def _entry(kernel: Any, num_args: int) -> Entry:
    from numba import types

    signature = (types.int64,) * num_args
    kernel.compile(signature)
    entry: Entry = kernel.overloads[signature].entry_point
    return entry


@cache
def load() -> Kernels:
    """Compiles everything (10 to 20 s), or loads it from Numba's cache (below a second). The first rank of a machine
    does it by ``compile_once``."""
    from symmcomm.kernels.cpu import all_gather, all_reduce, all_to_all, barrier, point_to_point, reduce_scatter, ring

    return Kernels(
        all_to_all_barrier=_entry(barrier.all_to_all_barrier, 2),
        ring_barrier=_entry(barrier.ring_barrier, 1),
        swap_barrier=_entry(barrier.swap_barrier, 3),
        put_signal=_entry(barrier.put_signal, 3),
        wait_signal=_entry(barrier.wait_signal, 3),
        all_reduce=_entry(all_reduce.all_reduce, 4),
        reduce_scatter=_entry(reduce_scatter.reduce_scatter, 5),
        ring=_entry(ring.ring, 6),
        all_gather=_entry(all_gather.all_gather, 8),
        all_to_all=_entry(all_to_all.all_to_all, 6),
        send=_entry(point_to_point.send, 5),
        receive=_entry(point_to_point.receive, 5),
        probe=_entry(point_to_point.probe, 3),
        room=_entry(point_to_point.room, 2),
    )
