"""The staged pipeline: large data of any tensors, pushed in chunks through slots of the peers' staging memory. Stores
over a link are faster than loads.

A CTA's warps are three crews, each at its own pace. CTA b's **senders** push its chunks k = 0, 1, … to every peer, its
**takers** use what has come, and its **messenger** signals: whoever signals waits until the stores before have arrived,
so that should be nobody who moves data.

- A sender pushes chunk k once it has heard all peers' signal k - AHEAD (and whatever else the job needs).
- The messenger sends signal k once the senders have pushed chunk k, and the takers taken chunk k - AHEAD.
- A taker takes chunk k once it has heard all peers' signal k and the own senders have pushed chunk k: so a job may
  write where it has read what it sent.

Signal k says two things. Chunk k has been pushed. And the peer has taken all chunks up to k - AHEAD, so chunk k + AHEAD
may go into that one's slot, as there are DEPTH = 2 · AHEAD slots. Signal k awaits peers' signal k - AHEAD, and none
later: so no ranks wait for each other.

How far a warp is, it stores with release into a word of shared memory, which others acquire. What is stored over the
link, or read from a slot, before such a word, the messenger's release at system scope then stands for as well, as the
order of the memory model is transitive. A wait that gives up stops all crews of its CTA.

Chunks are numbered on from call to call: with the channel's epoch e when the kernel starts, chunk k has number e + k
(its slot is that mod DEPTH) and signal k is epoch e + 1 + k; a kernel with n chunks ends at epoch e + n. So the first
chunks of the next kernel, up to number e + n + AHEAD - 1, need that those up to e + n - AHEAD - 1 were taken; with
n > AHEAD the last signal waited for said so. Else that one said at least that the peer has started the kernel, so it
has finished those before, and the slots of this one's n chunks are not needed yet. Likewise, if other kernels came in
between: on every channel that they use a rank hears from all peers, which then have finished this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.primitives import load, pick, signal, store, wait
from symmcomm.schedule.layout_gpu import AHEAD, Phase

_WARP = 32


class Job:
    """What moves. Threads of a team call; addresses and sizes are values of the running kernel.

    Attributes: ``threads`` a crew. ``chunk_bytes`` at most. ``agrees`` whether the number of chunks is not known before
    signal 0 has been heard.
    """

    threads: int
    chunk_bytes: int
    agrees: ClassVar[bool] = False

    def push(self, chunk: Any, number: Any, team: Team) -> None:
        """Sends the CTA's ``chunk`` to all peers, into the slot of that number; nothing where the data has ended."""
        raise NotImplementedError

    def take(self, chunk: Any, number: Any, team: Team) -> None:
        """Uses what the peers have sent."""
        raise NotImplementedError

    def first_taken(self, chunk: Any) -> Any:
        """How many chunks the own takers must have taken before this one is pushed."""
        return Int32(0)

    def agree(self, epoch: Any) -> Any:
        """The number of chunks, at least AHEAD, once signal 0 has been heard."""
        raise NotImplementedError


@dataclass(frozen=True)
class Team:
    """Threads that share a chunk: the calling one's ``index`` of ``num``."""

    index: Any
    num: int


def cta_threads(takers: int, senders: int) -> int:
    """Threads of a CTA with such crews."""
    return takers + senders + _WARP


def chunk_offset(chunk: Any, chunk_bytes: int) -> Any:
    """Where in the data the CTA's ``chunk`` starts."""
    return (Int64(chunk) * cute.arch.grid_dim()[0] + block()) * chunk_bytes


def num_chunks(num_bytes: Any, chunk_bytes: int) -> Any:
    """Chunks of this CTA, of data with ``num_bytes``."""
    before = Int64(block()) * chunk_bytes
    round_bytes = Int64(cute.arch.grid_dim()[0]) * chunk_bytes
    rounds = (num_bytes - before + (round_bytes - 1)) // round_bytes
    return Int32(pick(num_bytes > before, rounds, Int64(0)))


@dataclass(frozen=True, kw_only=True)
class Crews:
    """The crews of a CTA: the first ``takers`` threads, the next ``senders``, and the last warp; all whole warps.

    Attributes: ``epoch`` of the channel when the kernel started; ``words`` address in shared memory: of each taker
    warp's count of chunks, of each sender warp's, and of one that is not 0 once a wait gave up.
    """

    ctx: Context
    epoch: Any
    takers: int
    senders: int
    words: Any

    @classmethod
    def muster(cls, ctx: Context, epoch: Any, takers: int, senders: int) -> Crews:
        """All threads of the CTA call it."""
        num_words = (takers + senders) // _WARP + 1
        words = cute.arch.alloc_smem(Uint32, num_words).toint()
        store(words + 4 * thread(), [Uint32(0)], space="shared", when=thread() < num_words)
        cute.arch.sync_threads()
        return cls(ctx=ctx, epoch=epoch, takers=takers, senders=senders, words=words)

    @property
    def is_taker(self) -> Any:
        return thread() < self.takers

    @property
    def is_sender(self) -> Any:
        return (thread() >= self.takers) & (thread() < self.takers + self.senders)

    @property
    def _taken(self) -> tuple[Any, int]:
        """The takers' words, and how many."""
        return self.words, self.takers // _WARP

    @property
    def _pushed(self) -> tuple[Any, int]:
        """The senders'."""
        return self.words + self.takers // 8, self.senders // _WARP

    @property
    def _stop(self) -> Any:
        """The last one."""
        return self.words + (self.takers + self.senders) // 8

    def may_take(self, chunk: Any) -> Any:
        """Waits, a warp for itself. False: stop."""
        return self._after(chunk, *self._pushed, chunk + 1)

    def may_push(self, chunk: Any, taken: Any = 0) -> Any:
        """Waits, a warp for itself, also until the own takers have taken that many. False: stop."""
        return self._after(chunk - AHEAD, *self._taken, Int32(taken))

    def count(self, chunk: Any) -> None:
        """The calling warp is done with what it takes or pushes of the chunk."""
        cute.arch.sync_warp()
        word, first = self.words + 4 * cute.arch.warp_idx(), cute.arch.lane_idx() == 0
        store(word, [Uint32(chunk + 1)], semantics="release", scope="cta", space="shared", when=first)

    @cute.jit
    def _after(self, chunk: Int32, words: Int32, num_words: cutlass.Constexpr, num: Int32) -> Any:
        """Until all peers' signal ``chunk`` was heard, and a crew's counts have come to ``num``."""
        met = Boolean(True)
        if chunk >= 0:
            met = self._hear(chunk)
        if met:
            met = self._reach(words, num_words, num)
        return met

    @cute.jit
    def _hear(self, chunk: Int32) -> Any:
        """A lane for each peer."""
        ctx, met = self.ctx, Boolean(True)
        phase = pick(chunk == 0, Int32(Phase.enter), Int32(Phase.data))
        for first in cutlass.range_constexpr(0, ctx.world_size, _WARP):
            peer = first + cute.arch.lane_idx()
            if peer < ctx.world_size and peer != ctx.rank:
                word, expected = ctx.pad(ctx.rank, block(), peer), self.epoch + 1 + Uint32(chunk)
                met = met & wait(ctx.state, ctx.rank, word, expected, peer, block(), phase)
        met = _together(met)
        if not met:
            store(self._stop, [Uint32(1)], semantics="relaxed", scope="cta", space="shared")
        return met

    @cute.jit
    def _reach(self, words: Int32, num_words: cutlass.Constexpr, num: Int32) -> Any:
        """A lane for each warp of the crew. All that others wait for here is in turn waited for with a deadline."""
        lane = cute.arch.lane_idx()
        mine = words + 4 * pick(lane < num_words, lane, Int32(0))
        there, stopped = Boolean(num <= 0), Boolean(False)
        while not there and not stopped:
            count = load(mine, semantics="acquire", scope="cta", space="shared")[0]
            stopped = self._stopped()
            there = _together(Int32(count) >= num)
        return there

    def _stopped(self) -> Any:
        """The same on all lanes."""
        word = load(self._stop, semantics="relaxed", scope="cta", space="shared")[0]
        return _together(word == 0) == Boolean(False)

    @cute.jit
    def run(self, num: Int32, job: cutlass.Constexpr) -> Any:
        """A whole pipeline of ``num`` chunks, the same on all ranks; if the job has to agree on it, AHEAD. Returns the
        number that there were, and whether they came to their end."""
        if self.is_taker:
            num = self._take_all(num, job)
        elif self.is_sender:
            num = self._push_all(num, job)
        else:
            num = self.signal_all(num, job)
        return num, self.finish()

    @cute.jit
    def _take_all(self, num: Int32, job: cutlass.Constexpr) -> Any:
        chunk, met = Int32(0), Boolean(True)
        while chunk < num and met:
            met = self.may_take(chunk)
            if cutlass.const_expr(job.agrees):  # before a count: those lead to signals that what is read may go
                num, met = self._agree(num, chunk == 0, met, job)
            if met:
                job.take(chunk, self.epoch + Uint32(chunk), Team(Int64(thread()), self.takers))
                self.count(chunk)
            chunk += 1
        return num

    @cute.jit
    def _push_all(self, num: Int32, job: cutlass.Constexpr) -> Any:
        chunk, met = Int32(0), Boolean(True)
        while chunk < num and met:
            met = self.may_push(chunk, job.first_taken(chunk))
            if met:
                team = Team(Int64(thread() - self.takers), self.senders)
                job.push(chunk, self.epoch + Uint32(chunk), team)
                self.count(chunk)
            chunk += 1
            if cutlass.const_expr(job.agrees):
                num, met = self._agree(num, chunk == AHEAD, met, job)
        return num

    @cute.jit
    def signal_all(self, num: Int32, job: cutlass.Constexpr = None) -> Any:
        """What the messenger does: signals of all chunks."""
        ctx, chunk, met = self.ctx, Int32(0), Boolean(True)
        while chunk < num and met:
            met = self._reach(*self._pushed, chunk + 1)
            if met:
                met = self._reach(*self._taken, chunk + 1 - AHEAD)
            if met:
                for first in cutlass.range_constexpr(0, ctx.world_size, _WARP):
                    peer = first + cute.arch.lane_idx()
                    if peer < ctx.world_size and peer != ctx.rank:
                        signal(ctx.pad(peer, block(), ctx.rank), self.epoch + 1 + Uint32(chunk))
            chunk += 1
            if cutlass.const_expr(job is not None and job.agrees):
                num, met = self._agree(num, chunk == AHEAD, met, job)
        return num

    @cute.jit
    def _agree(self, num: Int32, now: Boolean, met: Boolean, job: cutlass.Constexpr) -> Any:
        """The number of chunks, from ``now`` on what the job says; and whether to go on."""
        if met and now:
            met = self._hear(Int32(0))
            if met:
                num = job.agree(self.epoch)
        return num, met

    def finish(self) -> Any:
        """All threads call it. Whether all crews came to their end."""
        cute.arch.sync_threads()
        return self._stopped() == Boolean(False)


def _together(flag: Any) -> Any:
    """Whether it is so on all lanes; what they did or saw before is seen by all after."""
    met = cute.arch.vote_all_sync(flag)
    cute.arch.sync_warp()
    return met


@cute.jit
def run(ctx: cutlass.Constexpr, num_bytes: Int64, job: cutlass.Constexpr) -> None:
    """A whole kernel: all chunks of data with ``num_bytes``, which is the same on all ranks."""
    in_order, epoch = begin(ctx, block())
    num = num_chunks(num_bytes, job.chunk_bytes)
    if in_order and num > 0:
        Crews.muster(ctx, epoch, job.threads, job.threads).run(num, job)
        end(ctx, block(), epoch + Uint32(num))
