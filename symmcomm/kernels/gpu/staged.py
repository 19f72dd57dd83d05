"""The staged pipeline: large data of any tensors, pushed in chunks through slots of the peers' staging memory.

CTA b sends its chunks k = 0, 1, … to every peer, AHEAD of them before it takes the first, and signal k after chunk k.
Step k: wait for the peers' signal k, push chunk k + AHEAD, take chunk k, signal k + AHEAD. Stores over a link are
faster than loads, and the wait of a step is for what the peers did AHEAD steps before: so latency hides behind the
transfer. If taking uses no link, half of the threads push while the others take (``split``). Then nothing lies between
the last store of a push and its signal, which waits until that store has left. So it is sent in the next step, once
signal k + 1 was heard: by then most has left, and pushing goes on beside it. Signal j awaits signal j - 1 and none
later, so no ranks wait for each other.

Signal k says two things. Chunk k has been pushed. And the peer has taken all chunks up to k - AHEAD, so chunk k + AHEAD
may go into that one's slot, as there are DEPTH = 2 · AHEAD slots.

Chunks are numbered on from call to call: with the channel's epoch e when the kernel starts, chunk k has number e + k
(its slot is that mod DEPTH) and signal k is epoch e + 1 + k; a kernel with n chunks ends at epoch e + n. So the first
chunks of the next kernel, up to number e + n + AHEAD - 1, need that those up to e + n - AHEAD - 1 were taken; with
n > AHEAD the last signal waited for said so. Else that one said at least that the peer has started the kernel, so it
has finished those before, and the slots of this one's n chunks are not needed yet. Likewise, if other kernels came in
between: on every channel that they use a rank hears from all peers, which then have finished this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.barrier import announce, arrive, meet
from symmcomm.kernels.gpu.context import begin, block, end, thread
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.schedule.layout_gpu import AHEAD, Phase


class Job(Protocol):
    """What moves. Threads of a team call; addresses and sizes are values of the running kernel."""

    threads: int
    chunk_bytes: int

    def push(self, chunk: Any, number: Any, team: Team) -> None:
        """Sends the CTA's ``chunk`` to all peers, into the slot of that number; nothing where the data has ended."""

    def take(self, chunk: Any, number: Any, team: Team) -> None:
        """Uses what the peers have sent."""


@dataclass(frozen=True)
class Team:
    """Threads that share a chunk: the calling one's ``index`` of ``num``."""

    index: Any
    num: int


def chunk_offset(chunk: Any, chunk_bytes: int) -> Any:
    """Where in the data the CTA's ``chunk`` starts."""
    return (Int64(chunk) * cute.arch.grid_dim()[0] + block()) * chunk_bytes


def num_chunks(num_bytes: Any, chunk_bytes: int) -> Any:
    """Chunks of this CTA, of data with ``num_bytes``."""
    before = Int64(block()) * chunk_bytes
    round_bytes = Int64(cute.arch.grid_dim()[0]) * chunk_bytes
    rounds = (num_bytes - before + (round_bytes - 1)) // round_bytes
    return Int32(pick(num_bytes > before, rounds, Int64(0)))


@cute.jit
def start(ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, job: cutlass.Constexpr) -> None:
    """Pushes the first of ``num`` chunks. ``epoch``: the channel's when the kernel started."""
    chunk = Int32(0)  # a loop of the kernel, not of its tracing: a push is much code
    while chunk < AHEAD and chunk < num:
        job.push(chunk, epoch + Uint32(chunk), Team(Int64(thread()), job.threads))
        arrive(ctx, block(), epoch + 1 + Uint32(chunk))
        chunk += 1


@cute.jit
def hear(ctx: cutlass.Constexpr, epoch: Uint32, chunk: Int32) -> Any:
    """Waits until a chunk is there, and the slot of the one AHEAD of it is free."""
    phase = pick(chunk == 0, Int32(Phase.enter), Int32(Phase.data))
    return meet(ctx, block(), epoch + 1 + Uint32(chunk), phase)


@cute.jit
def proceed(
    ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, job: cutlass.Constexpr, split: cutlass.Constexpr
) -> Any:
    """All ``num`` steps after ``start``, the same number on all ranks. False: some wait gave up."""
    everybody = Team(Int64(thread()), job.threads)
    chunk, met = Int32(0), Boolean(True)
    while chunk < num and met:
        met = hear(ctx, epoch, chunk)
        if met:
            later = chunk + AHEAD
            if cutlass.const_expr(split):
                if chunk > 0 and later <= num:
                    announce(ctx, block(), epoch + Uint32(later))  # of chunk later - 1
                if later < num:
                    _push_and_take(epoch, chunk, job)
                else:
                    job.take(chunk, epoch + Uint32(chunk), everybody)
            else:
                if later < num:
                    job.push(later, epoch + Uint32(later), everybody)
                job.take(chunk, epoch + Uint32(chunk), everybody)
                if later < num:
                    arrive(ctx, block(), epoch + 1 + Uint32(later))
        chunk += 1
    return met


@cute.jit
def run(ctx: cutlass.Constexpr, num_bytes: Int64, job: cutlass.Constexpr) -> None:
    """A whole kernel: all chunks of data with ``num_bytes``, which is the same on all ranks."""
    in_order, epoch = begin(ctx, block())
    num = num_chunks(num_bytes, job.chunk_bytes)
    if in_order and num > 0:
        start(ctx, epoch, num, job)
        proceed(ctx, epoch, num, job, True)
        end(ctx, block(), epoch + Uint32(num))


@cute.jit
def _push_and_take(epoch: Uint32, chunk: Int32, job: cutlass.Constexpr) -> None:
    half = job.threads // 2
    if thread() < half:
        job.push(chunk + AHEAD, epoch + Uint32(chunk + AHEAD), Team(Int64(thread()), half))
    else:
        job.take(chunk, epoch + Uint32(chunk), Team(Int64(thread() - half), half))
