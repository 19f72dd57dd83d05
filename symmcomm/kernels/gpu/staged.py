"""The staged pipeline: large data of any tensors, pushed in chunks through slots of the peers' staging memory.

CTA b sends its chunks k = 0, 1, … to every peer, AHEAD of them before it takes the first. Step k: wait for the peers'
signal k + 1 - AHEAD (at least 0), push chunk k + AHEAD, take chunk k, signal k + 1. Signal 0 follows the first AHEAD
chunks, signal j chunk j + AHEAD - 1 and all takes up to j - 1. Stores over a link are faster than loads, and the wait
of a step is for what the peers did a step before: so latency hides behind the transfer.

Signal k + 1 - AHEAD says two things. Chunk k has been pushed. And the peer has taken all chunks up to k - AHEAD, so
chunk k + AHEAD may go into that one's slot, as there are DEPTH = 2 · AHEAD slots.

Chunks are numbered on from call to call: with the channel's epoch e when the kernel starts, chunk k has number e + k
(its slot is that mod DEPTH) and signal j is epoch e + 1 + j; a kernel with n chunks ends at epoch e + n. So the first
chunks of the next kernel, up to number e + n + AHEAD - 1, need that those up to e + n - AHEAD - 1 were taken; with
n > AHEAD the last signal waited for said so. Else that was signal 0: the peer has started the kernel, so it has
finished those before, and the slots of this one's n chunks are not needed yet. Likewise, if other kernels came in
between: on every channel that they use a rank hears from all peers, which then have finished this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.barrier import arrive, meet
from symmcomm.kernels.gpu.context import block
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.schedule.layout_gpu import AHEAD, Phase


class Job(Protocol):
    """What moves. All threads of the CTA call; addresses and sizes are values of the running kernel."""

    def push(self, chunk: Any, number: Any) -> None:
        """Sends the CTA's ``chunk`` to all peers, into the slot of that number; nothing where the data has ended."""

    def take(self, chunk: Any, number: Any) -> None:
        """Uses what the peers have sent."""


@dataclass(frozen=True)
class Lane:
    """Which chunks are the CTA's, of ``chunk_bytes`` each, and in whose slots of staging memory. Attributes: ``index``
    of ``num`` lanes, which take chunks in turn; ``channel`` of the slots."""

    index: Any
    num: Any
    channel: Any
    chunk_bytes: int

    def offset(self, chunk: Any) -> Any:
        """Where in the data the lane's ``chunk`` starts."""
        return (Int64(chunk) * self.num + self.index) * self.chunk_bytes

    def num_chunks(self, num_bytes: Any) -> Any:
        """Chunks of the lane, of data with ``num_bytes``."""
        before, round_bytes = Int64(self.index) * self.chunk_bytes, Int64(self.num) * self.chunk_bytes
        rounds = (num_bytes - before + (round_bytes - 1)) // round_bytes
        return Int32(pick(num_bytes > before, rounds, Int64(0)))


@cute.jit
def start(ctx: cutlass.Constexpr, epoch: Uint32, job: cutlass.Constexpr) -> None:
    """Pushes the first chunks. ``epoch``: the channel's when the kernel started."""
    for chunk in cutlass.range_constexpr(AHEAD):
        job.push(Int32(chunk), epoch + Uint32(chunk))
    arrive(ctx, block(), epoch + 1)


@cute.jit
def hear(ctx: cutlass.Constexpr, epoch: Uint32, chunk: Int32) -> Any:
    """Waits until a chunk is there, and the slot of the one AHEAD of it is free."""
    signal = pick(chunk < AHEAD, Int32(0), chunk - (AHEAD - 1))
    phase = pick(chunk < AHEAD, Int32(Phase.enter), Int32(Phase.data))
    return meet(ctx, block(), epoch + 1 + Uint32(signal), phase)


@cute.jit
def proceed(ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, job: cutlass.Constexpr) -> Any:
    """All ``num`` steps after ``start``, the same number on all ranks. False: some wait gave up."""
    chunk, met = Int32(0), Boolean(True)
    while chunk < num and met:
        met = hear(ctx, epoch, chunk)
        if met:
            if chunk + AHEAD < num:
                job.push(chunk + AHEAD, epoch + Uint32(chunk + AHEAD))
            job.take(chunk, epoch + Uint32(chunk))
            if chunk + AHEAD < num:
                arrive(ctx, block(), epoch + 2 + Uint32(chunk))
        chunk += 1
    return met
