"""Threads of one or several CTAs that combine a number each: sums and maxima over a row.

Within a warp by shuffles; over warps through shared memory, of all CTAs of the cluster if there are several. All
threads combine the warps' numbers in the same order, so they all come to the same bits, on every rank. A CTA of a
cluster ends once the numbers of all have come, so nobody writes into its shared memory any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
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
    ``cluster`` CTAs; or, in one CTA, one of ``num_teams`` that combine at the same time.

    ``scratch``: shared memory for ``scratch_size`` floats, unless they are part of one warp. ``barriers``: two
    mbarriers in shared memory, where there are several CTAs; then there are at most two turns.
    """

    threads: int
    cluster: int = 1
    num_teams: int = 1
    scratch: Any = None
    barriers: Any = None

    @classmethod
    def create(cls, threads: int, cluster: int = 1, num_teams: int = 1) -> Team:
        """With the shared memory that it needs."""
        team = cls(threads=threads, cluster=cluster, num_teams=num_teams)
        if team.is_one_warp:
            return team
        pointer = cute.arch.alloc_smem(Float32, team.scratch_size, alignment=16)
        scratch = cute.make_tensor(pointer, cute.make_layout(team.scratch_size))
        barriers = cute.arch.alloc_smem(Int64, 2, alignment=16) if cluster > 1 else None
        return replace(team, scratch=scratch, barriers=barriers)

    @property
    def num_warps(self) -> int:
        return -(-self.threads // 32)

    @property
    def is_one_warp(self) -> bool:
        return self.num_warps * self.cluster == 1

    @property
    def scratch_size(self) -> int:
        return 2 * self.num_warps * self.cluster * self.num_teams

    def combine(self, value: Any, how: Callable[[Any, Any], Any], turn: Any) -> Any:
        """``how`` of the threads' values (of which 0 changes nothing), the same bits on all of them. All call it, with
        a ``turn`` that is one more each time: the halves of ``scratch`` alternate, so one barrier a time is enough."""
        value = warp_reduce(value, how, min(self.threads, 32))
        if self.is_one_warp:
            return value
        if self.cluster == 1:
            return _over_warps(value, how, Int32(turn), self)
        return _over_cluster(value, how, turn, self)


@cute.jit
def _over_warps(value: Float32, how: cutlass.Constexpr, turn: Int32, team: cutlass.Constexpr) -> Any:
    half, scratch, warp = (turn & 1) * (team.num_warps * team.num_teams), team.scratch, cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        scratch[half + warp] = value
    cute.arch.sync_threads()
    return _combined(how, half + warp // team.num_warps * team.num_warps, team)


@cute.jit
def _over_cluster(value: Float32, how: cutlass.Constexpr, turn: cutlass.Constexpr, team: cutlass.Constexpr) -> Any:
    """Every warp stores its value at all CTAs; their mbarriers count the bytes. Nothing waits for stores to memory."""
    half = turn * team.num_warps * team.cluster
    place = half + cute.arch.block_idx_in_cluster() * team.num_warps + cute.arch.warp_idx()
    lane = cute.arch.lane_idx()
    if lane < team.cluster:
        bits = value.bitcast(Int32)
        cute.arch.store_async_dsmem(team.scratch.iterator + place, bits, team.barriers + turn, lane)
    cute.arch.mbarrier_wait(team.barriers + turn, 0)
    return _combined(how, Int32(half), team)


def _combined(how: Callable[[Any, Any], Any], first: Any, team: Team) -> Any:
    """``how`` of what the team's warps left from ``first`` on, in the same order on all threads."""
    num = team.num_warps * team.cluster
    if num <= 8:
        return tree([team.scratch[first + i] for i in range(num)], how)
    return _by_lanes(how, first, num, team)  # registers hold a row: so not all at once


@cute.jit
def _by_lanes(how: cutlass.Constexpr, first: Int32, num: cutlass.Constexpr, team: cutlass.Constexpr) -> Any:
    """Each lane combines every 32nd; then the warp's."""
    rest, lane = Float32(0.0), cute.arch.lane_idx()
    for i in cutlass.range_constexpr(0, num, 32):
        if i + lane < num:
            rest = how(rest, team.scratch[first + i + lane])
    return warp_reduce(rest, how)


@cute.jit
def enter_cluster(team: cutlass.Constexpr) -> None:
    """Prepares the mbarriers, and says so. All threads of the CTA, first of all; then ``cluster_wait`` before
    ``combine``: a CTA's shared memory may be written once that one has started."""
    if cute.arch.thread_idx()[0] == 0:
        for turn in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(team.barriers + turn, 1)
        cute.arch.mbarrier_init_fence()
        for turn in cutlass.range_constexpr(2):
            cute.arch.mbarrier_arrive_and_expect_tx(team.barriers + turn, 4 * team.num_warps * team.cluster)
    cute.arch.cluster_arrive()
