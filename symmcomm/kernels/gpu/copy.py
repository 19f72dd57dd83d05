"""Copies by all threads of some CTAs, of any number of bytes between any addresses.

Units are as wide as both addresses allow (16 bytes, 4 or 1); the rest goes byte by byte.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from symmcomm.kernels.gpu.context import Context
from symmcomm.kernels.gpu.elements import load_vector, store_vector
from symmcomm.kernels.gpu.multimem_instructions import multimem_st
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.sweep import places, sweep


@cute.jit
def copy_bytes(
    target: Int64, source: Int64, num_bytes: Int64, first: Int64, step: Int64, vectors: cutlass.Constexpr
) -> None:
    """Units ``first``, ``first + step``, … of ``num_bytes`` (none if negative), ``vectors`` in flight."""
    both = target | source
    done = Int64(0)
    if (both & 15) == 0:
        done = num_bytes & ~15
        _sweep(target, source, done >> 4, first, step, vectors, 16, False)
    elif (both & 3) == 0:
        done = num_bytes & ~3
        _sweep(target, source, done >> 2, first, step, vectors, 4, False)
    _sweep(target + done, source + done, num_bytes - done, first, step, 1, 1, False)


@cute.jit
def copy_to_ranks(
    ctx: cutlass.Constexpr, target: Int64, source: Int64, pitch: Int64, num_bytes: Int64, first: Int64, step: Int64,
    vectors: cutlass.Constexpr,
) -> None:  # fmt: skip
    """``num_bytes`` from ``source + peer · pitch`` to offset ``target`` of every peer's heap, the own one included. All
    get a batch before anybody gets the next, so that the local copy hides behind the link."""
    bits = ctx.peer_address(ctx.rank, target) | source | pitch  # strides are multiples of pages
    done = Int64(0)
    if (bits & 15) == 0:
        done = num_bytes & ~15
        _sweep_ranks(ctx, target, source, pitch, done >> 4, first, step, vectors, 16)
    elif (bits & 3) == 0:
        done = num_bytes & ~3
        _sweep_ranks(ctx, target, source, pitch, done >> 2, first, step, vectors, 4)
    _sweep_ranks(ctx, target + done, source + done, pitch, num_bytes - done, first, step, 1, 1)


def _sweep_ranks(
    ctx: Context, target: Any, source: Any, pitch: Any, num: Any, first: Any, step: Any, vectors: int, unit: int
) -> None:
    sweep(num, first, step, vectors, partial(_batch_to_ranks, ctx, target, source, pitch, num, step, vectors, unit))


@cute.jit
def _batch_to_ranks(
    ctx: cutlass.Constexpr, target: Int64, source: Int64, pitch: Int64, num: Int64, step: Int64,
    vectors: cutlass.Constexpr, unit: cutlass.Constexpr, i: Int64,
) -> None:  # fmt: skip
    for hop in cutlass.range(1, ctx.world_size + 1, unroll=1):
        peer = ctx.neighbour(hop)
        place, origin = ctx.peer_address(peer, target), source + Int64(peer) * pitch
        if place != origin:
            _batch(place, origin, num, step, vectors, unit, False, i)


def multicast_vectors(target: Any, source: Any, num: Any, first: Any, step: Any, vectors: int) -> None:
    """Of ``num`` units of 16 bytes; ``target`` is a multicast address."""
    _sweep(target, source, num, first, step, vectors, 16, True)


def _sweep(
    target: Any, source: Any, num: Any, first: Any, step: Any, vectors: int, unit: int, switch: bool
) -> None:
    sweep(num, first, step, vectors, partial(_batch, target, source, num, step, vectors, unit, switch))


def _batch(target: Any, source: Any, num: Any, step: Any, vectors: int, unit: int, switch: bool, i: Any) -> None:
    """Units i, i + step, …: all loads first, so that they are in flight together."""
    here = places(0, num, i, step, vectors, unit)
    loaded = [load_vector(source + at, unit, semantics="relaxed", when=live) for at, live in here]
    for (at, live), words in zip(here, loaded, strict=True):
        if switch:
            multimem_st(target + at, words, when=live)
        else:
            store_vector(target + at, words, unit, when=live)


def clip(num_bytes: Any, most: Any) -> Any:
    """``num_bytes``, but at least 0 and at most ``most``."""
    positive = pick(num_bytes > Int64(0), num_bytes, Int64(0))
    return pick(positive < Int64(most), positive, Int64(most))
