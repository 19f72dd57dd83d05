"""Threads of one or several CTAs that combine a number each: sums and maxima over a row.

Within a warp by shuffles; over warps through shared memory, of all CTAs of the cluster if there are several. All
threads combine the warps' numbers in the same order, so they all come to the same bits, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import inline_ptx

from symmcomm.kernels.gpu.primitives import warp_reduce


def add(x: Any, y: Any) -> Any:
    """For ``Team.combine``."""
    return x + y


def largest(x: Any, y: Any) -> Any:
    """For ``Team.combine``; propagates NaN."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def tree(values: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """``combine`` of all, pair by pair: short chains, small rounding errors."""
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(values) & ~1 :]
    return values[0]


@dataclass(frozen=True, kw_only=True)
class Team:
    """The threads that share a row: ``threads`` of a CTA (a power of two up to 32, or whole warps) in each of
    ``cluster`` CTAs. ``scratch``: shared memory for ``scratch_size`` floats, unless they are part of one warp."""

    threads: int
    cluster: int = 1
    scratch: Any = None

    @property
    def num_warps(self) -> int:
        return -(-self.threads // 32)

    @property
    def scratch_size(self) -> int:
        return 2 * self.num_warps * self.cluster

    def combine(self, value: Any, how: Callable[[Any, Any], Any], turn: Any) -> Any:
        """``how`` of the threads' values (of which 0 changes nothing), the same bits on all of them. All call it, with
        a ``turn`` that is one more each time: the halves of ``scratch`` alternate, so one barrier a time is enough."""
        value = warp_reduce(value, how, min(self.threads, 32))
        if self.scratch_size == 2:
            return value
        return _over_warps(value, how, Int32(turn), self)


@cute.jit
def _over_warps(value: Float32, how: cutlass.Constexpr, turn: Int32, team: cutlass.Constexpr) -> Any:
    num, warp, lane = team.num_warps * team.cluster, cute.arch.warp_idx(), cute.arch.lane_idx()
    half = (turn & 1) * num
    if cutlass.const_expr(team.cluster == 1):
        if lane == 0:
            team.scratch[half + warp] = value
        cute.arch.sync_threads()
    else:
        place = half + cute.arch.block_idx_in_cluster() * team.num_warps + warp
        if lane < team.cluster:
            store_in_cluster(team.scratch.iterator + place, lane, value)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if cutlass.const_expr(num <= 8):
        return tree([team.scratch[half + i] for i in range(num)], how)
    # Registers hold a row: so not all at once.
    rest = Float32(0.0)
    for i in cutlass.range_constexpr(0, num, 32):
        if i + lane < num:
            rest = how(rest, team.scratch[half + i + lane])
    return warp_reduce(rest, how)


def store_in_cluster(pointer: Any, cta: Any, value: Any) -> None:
    """Stores a float at the same place of the shared memory of a CTA of the cluster."""
    code = (
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, {$r0}, {$r1};\nst.shared::cluster.f32 [there], {$r2};\n}"
    )
    inline_ptx(code, read_only_args=[Uint32(pointer.toint()), Uint32(cta), value])


def shared_scratch(threads: int, cluster: int = 1) -> Any:
    """Shared memory for a ``Team``; None where it needs none."""
    size = Team(threads=threads, cluster=cluster).scratch_size
    if size == 2:
        return None
    pointer = cute.arch.alloc_smem(Float32, size, alignment=16)
    return cute.make_tensor(pointer, cute.make_layout(size))
