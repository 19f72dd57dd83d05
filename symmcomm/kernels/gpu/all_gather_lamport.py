"""The calls in the table of ``all_gather``, between any tensors: parts go by the Lamport protocol (``lamport``),
and their takers store them where they belong.

In place is fine, for an all-to-all too: in each turn a thread has the same place in all parts, and has loaded it from
all of them, as it sends AHEAD turns before, when it writes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from symmcomm.kernels.gpu import lamport
from symmcomm.kernels.gpu.lamport_parts import InTurns, PartsInTurns
from symmcomm.kernels.gpu.signatures import MovingParts


@dataclass(frozen=True, kw_only=True)
class MovedParts(PartsInTurns):
    """The job."""

    source: Any
    source_pitch: Any
    target: Any
    target_pitch: Any

    def leaves(self, peer: Any) -> Any:
        """Address of what goes to the peer."""
        return self.source if self.same else self.source + Int64(peer) * self.source_pitch

    def arrives(self, peer: Any) -> Any:
        """Address of what comes from the peer."""
        return self.target + Int64(peer) * self.target_pitch

    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """See ``lamport.Job``."""
        return self.load_part(self.leaves(self.ctx.neighbour(hop)), turn, self.sent_by(self.ctx.rank))

    @cute.jit
    def take(self, turn: Int32, going: Boolean) -> Any:
        """Stores what has come, and what stays, unless it is in its place."""
        ctx = self.ctx
        stays, place = self.leaves(ctx.rank), self.arrives(ctx.rank)
        moves = self.sent_by(ctx.rank) & (stays != place)
        own = self.load_part(stays, turn, moves)
        if going:
            got, going = lamport.receive(self, turn, self.live(turn))
            if going:
                self.store_part(place, turn, own, moves)
                for index, peer in enumerate(ctx.senders):
                    came = [lamport.vectors_of(ctx, got, k, self.vectors)[index] for k in range(self.vectors)]
                    self.store_part(self.arrives(peer), turn, came, self.sent_by(peer) & (peer != ctx.rank))
        return going


@dataclass(frozen=True, kw_only=True)
class AllGatherLamport(InTurns, MovingParts):
    """The kernel. ``same``: all takers get the same (the source pitch is 0)."""

    same: bool

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, source_pitch: Int64, target: Int64,
        target_pitch: Int64, num_bytes: Int64, sender: Int32,
    ) -> None:  # fmt: skip
        ctx = self.enter(base, stride, rank)
        job = MovedParts(
            ctx=ctx, epoch=None, threads=self.threads, vectors=self.vectors, same=self.same, sender=sender,
            num_bytes=num_bytes, granule=self.granule,
            source=source, source_pitch=source_pitch, target=target, target_pitch=target_pitch,
        )  # fmt: skip
        lamport.carry_out(job, self.slots)
