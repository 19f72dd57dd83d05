"""Send and receive: a queue of NUM_MESSAGE_SLOTS chunks for each pair of ranks and lane, in the receiver's heap.

CTA b is lane b, on both sides, for a message of any size: chunk k of the data, of ``chunk_bytes``, belongs to lane k
mod NUM_MESSAGE_LANES, and each lane has at least one chunk, be it empty. A lane's chunks are numbered from 1 on over
all messages of the pair, in a private counter on either side; number n lies in slot n mod NUM_MESSAGE_SLOTS:

    sender                                            receiver
    waits until ``taken`` has come to n - NUM_SLOTS
    writes the header and the chunk into the slot
    stores n to the receiver's ``sent`` (release)  →  waits until ``sent`` has come to n (acquire)
                                                      copies the chunk out
    ``taken``                                      ←  stores n to the sender's ``taken`` (release)

A CTA barrier lies before each of these stores and after each wait, so one thread waits and signals for all. A slot is
written again only when its chunk was copied out, which ``taken`` says. Words have one writer and only grow (compared by
a signed difference), so nothing is reset, a graph can be replayed, and other kernels in between change nothing: no
channel is used. Small messages leave the sender before they are received; larger ones as the receiver takes them.

The header tells the bytes of the message. A receiver that expects another number gives up at once, with a record, on
all lanes: the queues of the two are out of step from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, begin, block, thread
from symmcomm.kernels.gpu.copy import clip, copy_bytes
from symmcomm.kernels.gpu.primitives import agree, give_up, load, pick, signal, store, wait
from symmcomm.schedule.layout_gpu import NUM_MESSAGE_LANES, NUM_MESSAGE_SLOTS, Layout, MessageLayout, Phase


@dataclass(frozen=True)
class Lane:
    """The CTA's lane between this rank and a peer; put together while a kernel is traced."""

    ctx: Context
    layout: MessageLayout

    def counter(self, peer: Any, taken: bool) -> Any:
        """Address of the number of the last chunk sent to the peer, or taken from it."""
        lane = self._index(peer) + int(taken) * self.layout.world_size * NUM_MESSAGE_LANES
        return self.ctx.peer_address(self.ctx.rank, self.layout.counters + 4 * lane)

    def sent(self, sender: Any, receiver: Any) -> Any:
        """Address of the word that the sender signals."""
        return self.ctx.peer_address(receiver, self.layout.sent + 4 * self._index(sender))

    def taken(self, sender: Any, receiver: Any) -> Any:
        """Address of the word that the receiver signals."""
        return self.ctx.peer_address(sender, self.layout.taken + 4 * self._index(receiver))

    def header(self, sender: Any, receiver: Any, number: Any) -> Any:
        """Address of the header of the chunk of that number."""
        return self.ctx.peer_address(receiver, self.layout.headers + 8 * self._slot(sender, number))

    def slot(self, sender: Any, receiver: Any, number: Any) -> Any:
        """Address of the chunk of that number."""
        offset = self.layout.slots + Int64(self._slot(sender, number)) * self.layout.chunk_bytes
        return self.ctx.peer_address(receiver, offset)

    def offset(self, chunk: Any) -> Any:
        """Where in the data the lane's chunk begins."""
        return (Int64(chunk) * NUM_MESSAGE_LANES + block()) * self.layout.chunk_bytes

    def num_chunks(self, num_bytes: Any) -> Any:
        """Chunks of the lane, of data with that many bytes; at least one."""
        in_all = (num_bytes + (self.layout.chunk_bytes - 1)) // self.layout.chunk_bytes
        num = Int32((in_all + (NUM_MESSAGE_LANES - 1 - block())) // NUM_MESSAGE_LANES)
        return pick(num > 0, num, Int32(1))

    def _index(self, peer: Any) -> Any:
        return Int32(peer) * NUM_MESSAGE_LANES + block()

    def _slot(self, sender: Any, number: Any) -> Any:
        return self._index(sender) * NUM_MESSAGE_SLOTS + Int32(number & Uint32(NUM_MESSAGE_SLOTS - 1))


@cute.jit
def _await(ctx: cutlass.Constexpr, word: Int64, number: Uint32, peer: Int32, phase: cutlass.Constexpr) -> Any:
    """Thread 0 waits for the CTA. False on all threads: it gave up."""
    met = Boolean(True)
    if thread() == 0:
        met = wait(ctx.state, ctx.rank, word, number, peer, block(), Int32(phase))
    return agree(met)


@cute.jit
def _signal(word: Int64, number: Uint32) -> None:
    """Thread 0 signals what all threads of the CTA did."""
    cute.arch.sync_threads()
    if thread() == 0:
        signal(word, number)


@dataclass(frozen=True, kw_only=True)
class Message:
    """The kernel of one side. Attributes: ``sends`` which side, ``threads`` a CTA, ``vectors`` a thread has in flight.
    Launched with NUM_MESSAGE_LANES CTAs."""

    world_size: int
    sends: bool
    threads: int = 512
    vectors: int = 4

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int32(0))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, tensor: Int64, num_bytes: Int64, peer: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``tensor``: address of ``num_bytes`` that go to, or come from, the peer."""
        kernel = self.kernel(base, stride, rank, tensor, num_bytes, peer)
        kernel.launch(grid=(NUM_MESSAGE_LANES, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensor: Int64, num_bytes: Int64, peer: Int32) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        lane = Lane(ctx, MessageLayout.create(self.world_size))
        counter = lane.counter(peer, not self.sends)
        number = load(counter)[0]
        num = lane.num_chunks(num_bytes)
        if begin(ctx, block())[0]:
            chunk, met = Int32(0), Boolean(True)
            while chunk < num and met:
                if cutlass.const_expr(self.sends):
                    met = self._send(lane, number + 1 + Uint32(chunk), tensor, num_bytes, peer, chunk)
                else:
                    met = self._receive(lane, number + 1 + Uint32(chunk), tensor, num_bytes, peer, chunk)
                chunk += 1
            cute.arch.sync_threads()
            if thread() == 0:
                store(counter, [number + Uint32(num)])

    @cute.jit
    def _send(
        self, lane: cutlass.Constexpr, number: Uint32, source: Int64, num_bytes: Int64, peer: Int32, chunk: Int32
    ) -> Any:
        """One chunk. False: the receiver did not make room."""
        ctx, at = lane.ctx, lane.offset(chunk)
        met = _await(ctx, lane.taken(ctx.rank, peer), number - Uint32(NUM_MESSAGE_SLOTS), peer, Phase.room)
        if met:
            size = clip(num_bytes - at, lane.layout.chunk_bytes)
            slot = lane.slot(ctx.rank, peer, number)
            copy_bytes(slot, source + at, size, Int64(thread()), Int64(self.threads), self.vectors)
            if thread() == 0:
                store(lane.header(ctx.rank, peer, number), [num_bytes])
            _signal(lane.sent(ctx.rank, peer), number)
        return met

    @cute.jit
    def _receive(
        self, lane: cutlass.Constexpr, number: Uint32, target: Int64, num_bytes: Int64, peer: Int32, chunk: Int32
    ) -> Any:
        """One chunk. False: it did not come, or belongs to a message of another size."""
        ctx, at = lane.ctx, lane.offset(chunk)
        met = _await(ctx, lane.sent(peer, ctx.rank), number, peer, Phase.message)
        if met:
            comes = load(lane.header(peer, ctx.rank, number), Int64, semantics="relaxed")[0]
            met = comes == num_bytes
            if met:
                size = clip(num_bytes - at, lane.layout.chunk_bytes)
                slot = lane.slot(peer, ctx.rank, number)
                copy_bytes(target + at, slot, size, Int64(thread()), Int64(self.threads), self.vectors)
                _signal(lane.taken(peer, ctx.rank), number)
            elif thread() == 0:
                give_up(
                    ctx.state, ctx.rank, peer, block(), Uint32(num_bytes), Uint32(comes), Int32(Phase.size)
                )
        return met
