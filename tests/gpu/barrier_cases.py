"""A kernel that has barriers inside: what its threads write before one, other ranks' threads read after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.barrier import multicast_sync, ring_sync, swap_sync, sync
from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.primitives import load, pick, sleep, store
from symmcomm.schedule.layout_gpu import Layout, Phase

THREADS = 128
TURNS = 20
OTHER = 37
"""A thread reads what the one that many further on wrote, of another warp."""
LAG_NS = 10_000


@dataclass(frozen=True, kw_only=True)
class PassOn:
    """In each turn every thread writes a word into its rank's heap, always in the same place, and reads one of each
    peer. A barrier lies after the writes, and one after the reads. Before both, warps lag behind the first one, whose
    threads signal: so a barrier that did not wait for all of the CTA would be noticed.

    Attributes: ``algorithm`` and ``protocol`` as ``Barrier`` has them. One CTA.
    """

    world_size: int
    algorithm: str
    protocol: str

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, offset: Int64, found: Int64, stream: cuda.CUstream
    ) -> None:
        """``offset``: of the words in each rank's heap. ``found``: address of a row of words for each turn and hop;
        row 0, hop 0 becomes what the last barrier returned to each thread."""
        kernel = self.kernel(base, stride, rank, offset, found)
        kernel.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, offset: Int64, found: Int64) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        in_order, epoch = begin(ctx, block())
        if in_order:
            turn, met = Int32(0), Boolean(True)
            while turn < TURNS and met:
                sleep(Int64(thread() // 32) * LAG_NS)
                word = Uint32(rank * TURNS + turn) * Uint32(THREADS) + Uint32(thread())
                store(ctx.peer_address(rank, offset) + Int64(thread()) * 4, [word])
                met = self._sync(ctx, epoch + 1)
                if met:
                    sleep(Int64(thread() // 32) * LAG_NS)
                    self._read(ctx, offset, found, turn)
                    met = self._sync(ctx, epoch + 2)
                epoch += 2
                turn += 1
            store(found + Int64(thread()) * 4, [pick(met, Uint32(1), Uint32(0))])
            end(ctx, block(), epoch)

    @cute.jit
    def _sync(self, ctx: cutlass.Constexpr, epoch: Uint32) -> Any:
        met = Boolean(True)
        if cutlass.const_expr(self.protocol == "cas"):
            met = swap_sync(ctx, block(), self.algorithm == "ring", False)
        elif cutlass.const_expr(self.protocol == "multicast"):
            met = multicast_sync(ctx, Int64(0), False, False)
        elif cutlass.const_expr(self.algorithm == "ring"):
            met = ring_sync(ctx, False)
        else:
            met = sync(ctx, block(), epoch, Phase.enter, False)
        return met

    @cute.jit
    def _read(self, ctx: cutlass.Constexpr, offset: Int64, found: Int64, turn: Int32) -> None:
        other = (thread() + OTHER) % THREADS
        for hop in cutlass.range_constexpr(1, self.world_size):
            word = load(ctx.peer_address(ctx.neighbour(hop), offset) + Int64(other) * 4)[0]
            row = turn * self.world_size + hop
            store(found + (Int64(row) * THREADS + Int64(thread())) * 4, [word])


def nothing_found(world_size: int) -> torch.Tensor:
    """For one rank's ``found``, on the CPU."""
    return torch.full((TURNS, world_size, THREADS), -1, dtype=torch.int32)


def what_is_found(world_size: int, rank: int) -> torch.Tensor:
    """By that rank, if all went well."""
    expected = nothing_found(world_size)
    threads = (torch.arange(THREADS, dtype=torch.int32) + OTHER) % THREADS
    for turn in range(TURNS):
        for hop in range(1, world_size):
            expected[turn, hop] = ((rank + hop) % world_size * TURNS + turn) * THREADS + threads
    expected[0, 0] = 1
    return expected
