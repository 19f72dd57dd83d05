"""The Lamport protocol: data pushed to a peer that sees by its bits that it has come. No flags, no barrier, and nothing
on the link but the data. (TensorRT-LLM and FlashInfer call it so. Theirs gives up the value -0.0 of each element, this
one gives up none.)

A vector of 16 bytes is stored, polled and cleared by single accesses (``store_128``), and a slot is zero wherever
nothing has arrived. So what goes out is the vector xor ``KEY``, which is zero for one vector of 2¹²⁸ alone. That one
goes out as 1, as does the vector that would be 1 anyway, and with a 1 goes a byte, elsewhere: 2 for the one, 3 for the
other. A receiver polls until the vector is not zero; if it is 1, until the byte is not; then it stores zeros there.

When may a slot be filled again? Slots alternate with the parity of the channel's epoch, and rank r fills p's at epoch e
once r's kernel of epoch e - 1 is done. In it every CTA received something from p that p sent at e - 1, and p sent that
after its kernels before were done, with all that they read and cleared at that parity. As for ``cells`` that is said of
kernels: it asks of every kernel that on each channel it uses all ranks hear from all. Where one rank alone sends, each
signals the epoch to all when it starts, and waits for theirs before it ends.

A kernel may take ``turns``: each sends the CTA's share of turn t + AHEAD, and takes what the peers have sent of turn t.
So ranks keep in step, and what is polled does not wait behind all that this SM sends. What does not fit a slot goes on
in that of the next epoch. Then more has to be said while the kernel runs, as no end of a kernel lies between what a
thread has received and what it sends into the next slot. A CTA signals its first epoch when it starts, for all that its
rank's kernels before have cleared, and epoch e + 1 after the last turn in the slot of e, for what its threads have. So
before the first turn in the slot of another epoch e, and at the end for the one that would come, it waits for the
signal e - 1 of all peers: release and acquire, at system scope. It was sent long ago, if a slot holds several turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from symmcomm.kernels.gpu.barrier import announce, arrive, meet
from symmcomm.kernels.gpu.cells import remind
from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.primitives import (
    give_up,
    join,
    load_128,
    load_narrow,
    overdue,
    pick,
    split,
    store_128,
    store_narrow,
)
from symmcomm.kernels.gpu.registers import keep, kept_in, registers
from symmcomm.schedule.layout_gpu import CHANNEL_LAMPORT_BYTES, MOST_VECTORS, VECTOR_BYTES, Phase

AHEAD = 1
"""Turns that are sent before the first is taken."""

KEY = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
"""Four words that are not likely to be somebody's data: digits of the golden ratio."""


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """What moves, in turns: of each a thread has ``vectors``.

    Attributes: ``epoch`` of the first slot (None: not known yet). ``same``: all peers get the same. ``sender``: the
    only rank that sends, if not negative; None: all do.
    """

    ctx: Context
    epoch: Any
    threads: int
    vectors: int
    same: bool
    sender: Any = None

    @abstractmethod
    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """The thread's vectors for the rank ``hop`` further on (that all get the ``same`` included); zeros beyond the
        data."""

    @abstractmethod
    def live(self, turn: Any) -> list[Any]:
        """Which of them are sent and awaited: on all ranks alike."""

    @abstractmethod
    def take(self, turn: Any, going: Any) -> Any:
        """Uses what the peers have sent, if ``going``. Whether to go on: that, and all came."""

    @property
    @abstractmethod
    def num_turns(self) -> Any:
        """Of this CTA, at least one."""

    def sent_by(self, rank: Any) -> Any:
        """Whether that rank sends."""
        return Boolean(True) if self.sender is None else (self.sender < 0) | (self.sender == rank)

    @property
    def slot_turns(self) -> int:
        """Turns that fit a slot."""
        return self.ctx.layout.lamport_slot_bytes // (self.threads * self.vectors * VECTOR_BYTES)

    def places(self, turn: Any) -> list[Any]:
        """The thread's in a slot, of that turn in it; ``threads`` apart."""
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
        ctx, (epoch, places), coded = self.ctx, self.slot(turn), [encoded(vector) for vector in vectors]
        going = going & self.sent_by(ctx.rank)
        for hop in range(1, ctx.world_size):
            first = 0 if self.same else (hop - 1) * self.vectors
            for vector, place, live in zip(coded[first:], places, self.live(turn), strict=False):
                send(ctx, epoch, ctx.neighbour(hop), place, vector, going & live)


@cute.jit
def carry_out(job: cutlass.Constexpr, slots: cutlass.Constexpr) -> None:
    """A whole kernel. ``slots``: 0 if there is one turn, 1 if all turns fit one slot, 2 if they may need several."""
    ctx, fetched = job.ctx, registers(4 * job.num_fetched, Uint32)
    keep(fetched, job.fetch(Int32(0)))  # in flight together with the loads of begin()
    in_order, epoch = begin(ctx, block())
    if in_order:
        remind(ctx, epoch)
        epoch += 1
        known, num, going, signals = replace(job, epoch=epoch), job.num_turns, Boolean(True), Boolean(False)
        if cutlass.const_expr(slots > 1):
            signals = num > job.slot_turns
        if cutlass.const_expr(job.sender is not None):
            signals = signals | (job.sender >= 0)
        if signals:
            announce(ctx, block(), epoch)
        if cutlass.const_expr(slots == 0):
            known.send(kept_in(fetched, job.num_fetched, 4), Int32(0), True)
            going = known.take(Int32(0), going)
        else:
            epoch, going = run(epoch, num, fetched, known, going, slots > 1)
        if signals:
            phase = Int32(Phase.enter)
            if cutlass.const_expr(slots > 1):
                phase = pick(num > job.slot_turns, Int32(Phase.room), phase)
            meet(ctx, block(), epoch, phase, going)
        end(ctx, block(), epoch)


@cute.jit
def run(
    epoch: Uint32, num: Int32, fetched: cutlass.Constexpr, job: cutlass.Constexpr, going: Boolean,
    slots: cutlass.Constexpr = False,
) -> Any:  # fmt: skip
    """``num`` turns from ``epoch`` on, idle ones from when a thread is not ``going``: a wait gave up. ``fetched``: what
    ``job.fetch`` has given of the first, as ``keep`` keeps it. ``slots``: whether they may need several. Returns the
    last epoch, and whether all came."""
    ctx, turn, index, size = job.ctx, Int32(-AHEAD), Uint32(0), job.slot_turns
    while turn < num:
        later = turn + AHEAD
        if later < num:
            if cutlass.const_expr(slots):  # noqa: SIM102, the inner one is for the GPU
                if later % size == 0 and later > 0:
                    going = meet(ctx, block(), epoch + Uint32(later // size - 1), Int32(Phase.room), going)
            job.send(kept_in(fetched, job.num_fetched, 4), later, going)
            keep(fetched, job.fetch(later + 1))
        if turn >= 0:
            going = job.take(turn, going)
            if cutlass.const_expr(slots):  # noqa: SIM102, the inner one is for the GPU
                if (turn + 1) % size == 0 and turn + 1 < num:
                    arrive(ctx, block(), epoch + Uint32(turn // size + 1))
        turn += 1
    if cutlass.const_expr(slots):
        index = Uint32((num - 1) // size)
    return epoch + index, going


def slot(ctx: Context, peer: Any, epoch: Any, sender: Any) -> tuple[Any, Any]:
    """Where ``sender`` puts the CTA's vectors for that epoch, in the peer's heap, and the bytes that go with them."""
    size, parity = ctx.layout.lamport_slot_bytes, Int64(epoch & Uint32(1))
    first = Int64(block()) * (CHANNEL_LAMPORT_BYTES // VECTOR_BYTES) + parity * (ctx.world_size * size // VECTOR_BYTES)
    index = first + Int64(sender) * (size // VECTOR_BYTES)
    vectors = ctx.peer_address(peer, ctx.layout.lamport) + index * VECTOR_BYTES
    return vectors, ctx.peer_address(peer, ctx.layout.escapes) + index


def encoded(vector: list[Any]) -> tuple[list[Any], Any, Any]:
    """A vector as it goes out, whether the byte goes with it, and that byte."""
    words = [word ^ Uint32(key) for word, key in zip(vector, KEY, strict=True)]
    escapes = (words[0] < 2) & ((words[1] | words[2] | words[3]) == 0)
    return [pick(escapes, Uint32(1), words[0]), *words[1:]], escapes, words[0] | Uint32(2)


def send(ctx: Context, epoch: Any, peer: Any, place: Any, coded: tuple[list[Any], Any, Any], when: Any) -> None:
    """Stores a vector, ``encoded`` already, into this rank's slot at the peer, where ``when`` is true."""
    words, escapes, byte = coded
    vectors, bytes_ = slot(ctx, peer, epoch, ctx.rank)
    store_128(vectors + Int64(place) * VECTOR_BYTES, join(*words[:2]), join(*words[2:]), when=when)
    store_narrow(bytes_ + Int64(place), byte, 1, semantics="relaxed", when=when & escapes)


@cute.jit
def receive(job: cutlass.Constexpr, turn: Int32, live: cutlass.Constexpr) -> Any:
    """What ``ctx.senders`` have sent of the turn, as far as it is ``live``, and whether all came. It is cleared then.

    ``vectors_of`` reads the vectors; undefined where not live.
    """
    ctx, ranks, (epoch, places) = job.ctx, job.ctx.senders, job.slot(turn)
    num = len(ranks) * len(places)
    assert num <= MOST_VECTORS, f"{num} vectors a thread and turn"
    got = cute.make_rmem_tensor((2 * num,), Uint64)
    slots = [slot(ctx, ctx.rank, epoch, peer) for peer in ranks]
    vectors = [first + Int64(place) * VECTOR_BYTES for first, _ in slots for place in places]
    wanted = [here & (peer != ctx.rank) & job.sent_by(peer) for peer in ranks for here in live]
    tries, since, late, missing = Int32(0), Int64(0), Boolean(False), Boolean(True)
    while missing and not late:
        missing = Boolean(False)
        for i in cutlass.range_constexpr(num):
            got[2 * i], got[2 * i + 1] = load_128(vectors[i])
        for i in cutlass.range_constexpr(num):
            missing = missing | (wanted[i] & _is(got, i, 0))
        tries += 1
        late, since = overdue(ctx.state, tries, since)
    came, ones = missing == Boolean(False), Uint32(0)
    if missing:
        for i in cutlass.range_constexpr(num):
            if wanted[i] & _is(got, i, 0):
                _give_up(ctx, epoch, ranks[i // len(places)])
    else:
        for i in cutlass.range_constexpr(num):
            store_128(vectors[i], Uint64(0), Uint64(0), when=wanted[i])
            ones |= pick(wanted[i] & _is(got, i, 1), Uint32(1 << i), Uint32(0))
        if ones != 0:
            came, zeros = _which(job, epoch, places[0], ones)
            for i in cutlass.range_constexpr(num):
                got[2 * i] = pick((zeros >> i) & 1 == 1, Uint64(0), got[2 * i])
    return got, came


@cute.jit
def _which(job: cutlass.Constexpr, epoch: Uint32, first: Int32, ones: Uint32) -> Any:
    """Which of the vectors that came as 1, by their numbers' bits in ``ones``, are 0, and whether all their bytes came,
    which then are cleared. ``first``: the thread's first place."""
    ctx, came, zeros = job.ctx, Boolean(True), Uint32(0)
    while ones != 0 and came:
        number = Int32(cute.arch.popc((ones & (~ones + 1)) - 1))
        peer = ctx.senders[0] if ctx.world_size == 2 else number // job.vectors
        place = first + number % job.vectors * job.threads
        address = slot(ctx, ctx.rank, epoch, peer)[1] + Int64(place)
        byte, tries, since, late = Uint32(0), Int32(0), Int64(0), Boolean(False)
        while byte == 0 and not late:
            byte = load_narrow(address, 1, semantics="relaxed")
            tries += 1
            late, since = overdue(ctx.state, tries, since)
        if byte == 0:
            came = Boolean(False)
            _give_up(ctx, epoch, peer)
        store_narrow(address, Uint32(0), 1, semantics="relaxed")
        zeros |= (Uint32(3) - byte) << Uint32(number)
        ones &= ones - 1
    return came, zeros


def _is(got: Any, i: int, value: int) -> Any:
    """Whether the i-th vector is that small number."""
    return (got[2 * i] ^ Uint64(value)) | got[2 * i + 1] == 0


def _give_up(ctx: Context, epoch: Any, peer: Any) -> None:
    give_up(ctx.state, ctx.rank, peer, block(), epoch, epoch - 1, Int32(Phase.data))


def vectors_of(ctx: Context, got: Any, k: int, vectors: int) -> list[list[Any]]:
    """The k-th vector, of ``vectors``, of each of ``ctx.senders``."""
    found = []
    for sender in range(len(ctx.senders)):
        at = 2 * (sender * vectors + k)
        words = [*split(got[at]), *split(got[at + 1])]
        found.append([word ^ Uint32(key) for word, key in zip(words, KEY, strict=True)])
    return found
