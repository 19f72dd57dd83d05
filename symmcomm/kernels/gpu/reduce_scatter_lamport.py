"""Reduce-scatter or all-reduce of any tensors: part p goes to rank p by the Lamport protocol (``lamport``), which
reduces it with its own, in rank order.

Beside LL cells a quarter less goes over the link; beside the staged kernel hardly anything is signalled, and nobody
waits until a store has arrived.

The output may be any part of the input: in each turn a thread has the same place in all parts, and has loaded it from
all of them, as it sends AHEAD turns before, when it writes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from symmcomm.kernels.gpu import lamport
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.lamport_parts import InTurns, PartsInTurns
from symmcomm.kernels.gpu.signatures import ReducingTensors


@dataclass(frozen=True, kw_only=True)
class SumsOfParts(PartsInTurns):
    """The job."""

    reduction: Reduction
    source: Any
    result: Any

    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """See ``lamport.Job``."""
        part = self.source if self.same else self.source + Int64(self.ctx.neighbour(hop)) * self.num_bytes
        return self.load_part(part, turn, Boolean(True))

    @cute.jit
    def take(self, turn: Int32, going: Boolean) -> Any:
        """Reduces."""
        own = self.load(0, turn)
        if going:
            got, going = lamport.receive(self, turn, self.live(turn))
            if going:
                came = [lamport.vectors_of(self.ctx, got, k, self.vectors) for k in range(self.vectors)]
                sums = [self.reduction.reduce(self.ctx.in_rank_order(own[k], came[k])) for k in range(self.vectors)]
                self.store_part(self.result, turn, sums, Boolean(True))
        return going


@dataclass(frozen=True, kw_only=True)
class ReduceScatterLamport(InTurns, ReducingTensors):
    """The kernel. ``source``: ``world_size`` parts of ``count`` elements, or if all parts are the ``same`` that one,
    which makes it an all-reduce; ``result``: ``count`` elements."""

    same: bool = False

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        job = SumsOfParts(
            ctx=ctx, epoch=None, threads=self.threads, vectors=self.vectors, same=self.same,
            num_bytes=count * self.dtype.itemsize, granule=self.granule,
            reduction=self.reduction, source=source, result=result,
        )  # fmt: skip
        lamport.carry_out(job, self.slots)
