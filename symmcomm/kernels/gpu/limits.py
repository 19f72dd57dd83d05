"""Kernels that show what the hardware can do, for the floor that the benchmark compares with; no collective.

``Empty`` does nothing: launched back to back, it takes what a launch takes.

**Ping-pong.** Rank 0 signals rank 1 (release, system scope), rank 1 waits (acquire) and signals back, ``rounds`` times
in one kernel: a round is two ways. Words count up from ``start``, so one pair of words serves call after call if each
starts where the last one ended. The others do nothing.

**Push.** Every rank copies its own bytes into the next rank's heap, all at once: with two ranks both directions of the
link are busy. There is no barrier in it: who launches it makes sure that nobody uses the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, thread
from symmcomm.kernels.gpu.copy import copy_bytes
from symmcomm.kernels.gpu.primitives import signal, wait
from symmcomm.kernels.gpu.sweep import first_unit, num_units
from symmcomm.schedule.layout_gpu import Layout, Phase


@dataclass(frozen=True, kw_only=True)
class Empty:
    """One CTA of one warp that returns at once."""

    world_size: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0))

    @cute.jit
    def __call__(self, base: Int64, stride: Int64, rank: Int32, stream: cuda.CUstream) -> None:
        """The arguments are those that every kernel has."""
        self.kernel().launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class PingPong:
    """Signals between ranks 0 and 1, to and fro."""

    world_size: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int32(0), Int32(0))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, word: Int64, start: Int32, rounds: Int32, stream: cuda.CUstream
    ) -> None:
        """``word``: the offset of 4 bytes in each rank's heap, which hold ``start``."""
        self.kernel(base, stride, rank, word, start, rounds).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, word: Int64, start: Int32, rounds: Int32) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        if thread() == 0 and rank < 2:
            self._play(ctx, word, Uint32(start), rounds)

    @cute.jit
    def _play(self, ctx: cutlass.Constexpr, word: Int64, epoch: Uint32, rounds: Int32) -> None:
        peer = Int32(1) - ctx.rank
        own, other = ctx.peer_address(ctx.rank, word), ctx.peer_address(peer, word)
        met, left = Boolean(True), rounds
        while left > 0:
            epoch += 1
            left -= 1
            if ctx.rank == 0:
                signal(other, epoch)
            met = wait(ctx.state, ctx.rank, own, epoch, peer, Int32(0), Int32(Phase.data))
            if met:
                if ctx.rank == 1:
                    signal(other, epoch)
            else:
                left = Int32(0)


@dataclass(frozen=True, kw_only=True)
class Push:
    """Bytes into the next rank's heap. Attributes: ``threads`` a CTA, ``vectors`` a thread has in flight."""

    world_size: int
    threads: int
    vectors: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, target: Int64, num_bytes: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source``: an address; ``target``: an offset from the start of each rank's heap."""
        kernel = self.kernel(base, stride, rank, source, target, num_bytes)
        kernel.launch(grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, target: Int64, num_bytes: Int64
    ) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        place = ctx.peer_address(ctx.neighbour(1 % self.world_size), target)
        copy_bytes(place, source, num_bytes, first_unit(self.threads), num_units(self.threads), self.vectors)
