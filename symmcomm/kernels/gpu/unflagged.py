"""Words that announce themselves: floats pushed to a peer that sees by their bits that they have come. No flags, no
barrier, and nothing on the link but the data.

What goes out is each 32-bit word inverted; a slot is zero wherever nothing has arrived. Only a word of ones would be
zero inverted. In float32, and in several smaller floats, that is NaN, and another NaN is sent in its place. So a
receiver polls until no word is zero, each of which is one access of the memory model; then it stores zeros there.

When may a slot be filled again? Slots alternate with the parity of the channel's epoch, and rank r fills p's at epoch e
once r's kernel of epoch e - 1 is done. In it every CTA received something from p that p sent at e - 1, and p sent that
after its kernels before were done, with all that they read and cleared at that parity. As for ``cells`` that is said of
kernels: it asks of every kernel that on each channel it uses all ranks hear from all.

A kernel may take ``turns``: each sends the CTA's share of turn t + AHEAD, and takes what the peers have sent of turn t.
So ranks keep in step, and what is polled does not wait behind all that this SM sends. What does not fit a slot goes on
in that of the next epoch. Then more has to be said while the kernel runs, as no end of a kernel lies between what a
thread has received and what it sends into the next slot. A CTA signals the epoch before its own when it starts, for all
that its rank's kernels before have cleared, and each of its own after the last turn in that slot, for what its threads
have. Before the first turn in the slot of epoch e, and at the end for the epoch that would come, it waits for the
signal e - 2 of all peers: release and acquire, at system scope. (That number may have come from a kernel before; then
it was sent after the last one that used the slot.) It was sent long ago, if a slot holds several turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.access import VECTOR_BYTES
from symmcomm.kernels.gpu.barrier import announce, arrive, meet
from symmcomm.kernels.gpu.context import Context, block, thread
from symmcomm.kernels.gpu.primitives import give_up, load, overdue, pick, store
from symmcomm.kernels.gpu.registers import keep, kept_in
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import CHANNEL_WORDS_BYTES, Phase

AHEAD = 1
"""Turns that are sent before the first is taken."""

_ONES = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Job:
    """What moves, in turns: of each a thread has ``vectors``.

    Attributes: ``epoch`` of the first slot (None: not known yet). ``dtype`` of the words. ``same``: all peers get the
    same.
    """

    ctx: Context
    epoch: Any
    dtype: DType
    threads: int
    vectors: int
    same: bool

    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """The thread's vectors for the rank ``hop`` further on (that all get the ``same`` included); zeros beyond the
        data."""
        raise NotImplementedError

    def live(self, turn: Any) -> list[Any]:
        """Which of them are sent and awaited: on all ranks alike."""
        raise NotImplementedError

    def take(self, turn: Any, going: Any) -> Any:
        """Uses what the peers have sent, if ``going``. Whether to go on: that, and all came."""
        raise NotImplementedError

    @property
    def slot_turns(self) -> int:
        """Turns that fit a slot."""
        return self.ctx.layout.words_slot_bytes // (self.threads * self.vectors * VECTOR_BYTES)

    def places(self, turn: Any) -> list[Any]:
        """The thread's in a slot, of that turn in it."""
        return [(turn * self.vectors + k) * self.threads + thread() for k in range(self.vectors)]

    def slot(self, turn: Any) -> tuple[Any, list[Any]]:
        """The turn's epoch, and the thread's places in the slot."""
        places = self.places(turn % self.slot_turns)
        return self.epoch + Uint32(turn // self.slot_turns), places

    @property
    def outgoing(self) -> range:
        """How far on the ranks are for whom something else is loaded."""
        return range(1) if self.same else range(1, self.ctx.world_size)

    @property
    def num_fetched(self) -> int:
        """Vectors that ``fetch`` gives."""
        return len(self.outgoing) * self.vectors

    def fetch(self, turn: Any) -> list[list[Any]]:
        """The thread's vectors for the peers."""
        return [vector for hop in self.outgoing for vector in self.load(hop, turn)]

    def send(self, vectors: list[list[Any]], turn: Any, going: Any) -> None:
        """Sends what ``fetch`` gave, if ``going``."""
        ctx, words = self.ctx, [inverted(vector, self.dtype) for vector in vectors]
        epoch, places = self.slot(turn)
        for hop in range(1, ctx.world_size):
            first = 0 if self.same else (hop - 1) * self.vectors
            for vector, place, live in zip(words[first:], places, self.live(turn), strict=False):
                send(ctx, epoch, ctx.neighbour(hop), place, vector, going & live)


@cute.jit
def run(
    ctx: cutlass.Constexpr, epoch: Uint32, num: Int32, fetched: cutlass.Constexpr, job: cutlass.Constexpr,
    going: Boolean, slots: cutlass.Constexpr = False,
) -> Any:  # fmt: skip
    """``num`` turns from ``epoch`` on, idle ones from when a thread is not ``going``: a wait gave up. ``fetched``: what
    ``job.fetch`` has given of the first, as ``keep`` keeps it. ``slots``: whether they may need several. Returns the
    last epoch."""
    turn, index, size = Int32(-AHEAD), Uint32(0), job.slot_turns
    if cutlass.const_expr(slots):  # noqa: SIM102, the inner one is for the GPU
        if num > size:
            announce(ctx, block(), epoch - 1)
    while turn < num:
        later = turn + AHEAD
        if later < num:
            if cutlass.const_expr(slots):  # noqa: SIM102, the inner one is for the GPU
                if later % size == 0 and later > 0:
                    going = meet(ctx, block(), epoch + Uint32(later // size - 2), Int32(Phase.room), going)
            job.send(kept_in(fetched, job.num_fetched, 4), later, going)
            keep(fetched, job.fetch(later + 1))
        if turn >= 0:
            going = job.take(turn, going)
            if cutlass.const_expr(slots):  # noqa: SIM102, the inner one is for the GPU
                if (turn + 1) % size == 0 and turn + 1 < num:
                    arrive(ctx, block(), epoch + Uint32(turn // size))
        turn += 1
    if cutlass.const_expr(slots):
        index = Uint32((num - 1) // size)
        if num > size:
            meet(ctx, block(), epoch + index - 1, Int32(Phase.room), going)
    return epoch + index


def slot(ctx: Context, peer: Any, epoch: Any, sender: Any) -> Any:
    """Where ``sender`` puts the CTA's words for that epoch, in the peer's heap."""
    index = Int32(epoch & Uint32(1)) * Int32(ctx.world_size) + Int32(sender)
    in_channel = index * Int32(ctx.layout.words_slot_bytes)
    offset = Int64(ctx.layout.words) + Int64(block()) * CHANNEL_WORDS_BYTES + Int64(in_channel)
    return ctx.peer_address(peer, offset)


def inverted(words: list[Any], dtype: DType) -> list[Any]:
    """Words as they go out."""
    nan = Uint32({4: 0x80000000, 2: 0x80008000, 1: 0x80808080}[dtype.itemsize])
    flipped = [word ^ Uint32(_ONES) for word in words]
    return [pick(word == 0, nan, word) for word in flipped]


def send(ctx: Context, epoch: Any, peer: Any, index: Any, vector: list[Any], when: Any) -> None:
    """Stores a vector, ``inverted`` already, into this rank's slot at the peer, where ``when`` is true."""
    address = slot(ctx, peer, epoch, ctx.rank) + Int64(index) * VECTOR_BYTES
    store(address, vector, semantics="relaxed", when=when)


@cute.jit
def receive(ctx: cutlass.Constexpr, epoch: Uint32, indices: cutlass.Constexpr, live: cutlass.Constexpr) -> Any:
    """The vectors ``indices`` of all ``ctx.senders``, as far as they are ``live``, and whether all came; then they are
    cleared.

    ``vectors_of`` reads them; undefined where not live.
    """
    ranks = ctx.senders
    num = len(ranks) * len(indices)
    got = cute.make_rmem_tensor((4 * num,), Uint32)
    places = [slot(ctx, ctx.rank, epoch, peer) + Int64(i) * VECTOR_BYTES for peer in ranks for i in indices]
    wanted = [here & (peer != ctx.rank) for peer in ranks for here in live]
    tries, since, late, missing = Int32(0), Int64(0), Boolean(False), Boolean(True)
    while missing and not late:
        missing = Boolean(False)
        for i in cutlass.range_constexpr(num):
            got[4 * i], got[4 * i + 1], got[4 * i + 2], got[4 * i + 3] = load(places[i], num=4, semantics="relaxed")
        for i in cutlass.range_constexpr(num):
            missing = missing | (wanted[i] & _incomplete(got, i))
        tries += 1
        late, since = overdue(ctx.state, tries, since)
    if missing:
        for i in cutlass.range_constexpr(num):
            if wanted[i] & _incomplete(got, i):
                give_up(ctx.state, ctx.rank, ranks[i // len(indices)], block(), epoch, epoch - 1, Int32(Phase.data))
    else:
        for i in cutlass.range_constexpr(num):
            store(places[i], [Uint32(0)] * 4, when=wanted[i])
    return got, missing == Boolean(False)


def _incomplete(got: Any, i: int) -> Any:
    """Whether a word of the i-th vector has not come."""
    return (got[4 * i] == 0) | (got[4 * i + 1] == 0) | (got[4 * i + 2] == 0) | (got[4 * i + 3] == 0)


def vectors_of(ctx: Context, got: Any, k: int, vectors: int) -> list[list[Any]]:
    """The k-th vector, of ``vectors``, of each of ``ctx.senders``."""
    firsts = [4 * (sender * vectors + k) for sender in range(len(ctx.senders))]
    return [[got[first + i] ^ Uint32(_ONES) for i in range(4)] for first in firsts]
