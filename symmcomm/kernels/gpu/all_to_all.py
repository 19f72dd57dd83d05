"""An input of its own for every taker: all-to-all with even or uneven parts, and scatter (one sends).

Even parts go as in ``all_gather``, whose kernels take the distance between the parts for the takers.

**Staged**, for even parts where ``all_gather_lamport`` does not fit or pay; it serves all-gather and broadcast too:
every rank pushes chunks of its parts into the peers' staging memory, which they copy out (see ``staged``).
In place is fine if the parts are even: a CTA pushes a chunk of all parts before it writes there.

**Uneven**: the same, with a table of the parts in the rank's memory that only the rank itself reads; so it may be
computed on the GPU. As no rank knows all sizes, each tells every peer with its first chunks what it sends there, what
it awaits from there, and its largest part. The largest of all gives the number of chunks that all agree on. Where a
pair of ranks disagrees, both leave a record, and what moves between them is undefined; nobody hangs, and later calls
are fine. The grid must not follow from sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.copy import clip, copy_bytes
from symmcomm.kernels.gpu.primitives import complain, load, pick, store
from symmcomm.kernels.gpu.signatures import MovingParts, Placed
from symmcomm.kernels.gpu.staged import chunk_offset, hear, num_chunks, proceed, run, start
from symmcomm.schedule.layout_gpu import AHEAD, PART_BYTES, Phase


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Equal parts: what goes to peer p starts at ``source + p · source_pitch``, what comes from p at ``target + p ·
    target_pitch``. ``sender``: the only rank that sends; negative or None: all."""

    rank: Any
    source: Any
    source_pitch: Any
    target: Any
    target_pitch: Any
    num_bytes: Any
    sender: Any

    def outgoing(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of what goes to the peer."""
        return self.source + Int64(peer) * self.source_pitch, self._bytes_of(self.rank)

    def incoming(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of what comes from the peer."""
        return self.target + Int64(peer) * self.target_pitch, self._bytes_of(peer)

    def _bytes_of(self, peer: Any) -> Any:
        if self.sender is None:
            return self.num_bytes
        return pick((self.sender < 0) | (self.sender == peer), self.num_bytes, Int64(0))


@dataclass(frozen=True, kw_only=True)
class TableOfParts:
    """Parts of any size. ``table``: address of a row for each peer, {bytes and offset of what goes there, bytes and
    offset of what comes from there}; offsets are from ``source`` and ``target``, in bytes."""

    table: Any
    source: Any
    target: Any

    def outgoing(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of what goes to the peer."""
        num_bytes, offset = load(self.table + Int64(peer) * PART_BYTES, Int64, num=2)
        return self.source + offset, num_bytes

    def incoming(self, peer: Any) -> tuple[Any, Any]:
        """Address and bytes of what comes from the peer."""
        num_bytes, offset = load(self.table + Int64(peer) * PART_BYTES + 16, Int64, num=2)
        return self.target + offset, num_bytes


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The job of the pipeline: parts go out, and come in."""

    ctx: Context
    parts: Any
    chunk_bytes: int
    threads: int
    vectors: int

    @cute.jit
    def push(self, chunk: Int32, number: Uint32, team: cutlass.Constexpr) -> None:
        """Sends the CTA's chunk of each part."""
        ctx, at = self.ctx, chunk_offset(chunk, self.chunk_bytes)
        for hop in cutlass.range(1, ctx.world_size, unroll=1):
            peer = ctx.neighbour(hop)
            address, num_bytes = self.parts.outgoing(peer)
            slot = ctx.staging_slot(peer, block(), number, ctx.rank)
            size = clip(num_bytes - at, self.chunk_bytes)
            copy_bytes(slot, address + at, size, team.index, Int64(team.num), self.vectors)

    @cute.jit
    def take(self, chunk: Int32, number: Uint32, team: cutlass.Constexpr) -> None:
        """Copies out what has come, and the part that stays."""
        ctx, at = self.ctx, chunk_offset(chunk, self.chunk_bytes)
        for hop in cutlass.range(ctx.world_size, unroll=1):
            peer = ctx.neighbour(hop)
            target, num_bytes = self.parts.incoming(peer)
            kept, kept_bytes = self.parts.outgoing(peer)
            origin = pick(hop == 0, kept + at, ctx.staging_slot(ctx.rank, block(), number, peer))
            num_bytes = pick((hop == 0) & (kept_bytes < num_bytes), kept_bytes, num_bytes)
            size = clip(num_bytes - at, self.chunk_bytes)
            if origin != target + at:
                copy_bytes(target + at, origin, size, team.index, Int64(team.num), self.vectors)


@dataclass(frozen=True, kw_only=True)
class AllToAllStaged(MovingParts):
    """Equal parts through staging memory; all-gather if the source pitch is 0, scatter or broadcast with a sender.

    Attributes: ``vectors`` a thread has in flight, ``chunk_bytes`` of a part at a time: a multiple of 16, at most the
    layout's ``staging_slot_bytes``. At most NUM_STAGED_CHANNELS CTAs.
    """

    vectors: int
    chunk_bytes: int

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, source_pitch: Int64, target: Int64,
        target_pitch: Int64, num_bytes: Int64, sender: Int32,
    ) -> None:  # fmt: skip
        ctx = self.enter(base, stride, rank)
        parts = Parts(
            rank=rank, source=source, source_pitch=source_pitch, target=target, target_pitch=target_pitch,
            num_bytes=num_bytes, sender=sender,
        )  # fmt: skip
        job = Exchange(
            ctx=ctx, parts=parts, chunk_bytes=self.chunk_bytes, threads=self.threads, vectors=self.vectors
        )
        run(ctx, num_bytes, job)


@dataclass(frozen=True, kw_only=True)
class AllToAllUneven(Placed):
    """Parts of any size through staging memory. Attributes as in ``AllToAllStaged``."""

    vectors: int
    chunk_bytes: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), *[Int64(0)] * 3, Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, target: Int64, table: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``table``: see ``TableOfParts``, 16-byte aligned. ``source`` and ``target`` must not overlap."""
        self.launch(self.kernel(base, stride, rank, source, target, table), grid, stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, source: Int64, target: Int64, table: Int64) -> None:
        ctx = self.enter(base, stride, rank)
        parts = TableOfParts(table=table, source=source, target=target)
        job = Exchange(
            ctx=ctx, parts=parts, chunk_bytes=self.chunk_bytes, threads=self.threads, vectors=self.vectors
        )
        in_order, epoch = begin(ctx, block())
        if in_order:
            largest = self._publish(ctx, epoch, table)
            num = Int32(AHEAD)
            start(ctx, epoch, num, job)
            if hear(ctx, epoch, Int32(0)):
                num = self._agree(ctx, epoch, table, largest)
                proceed(ctx, epoch, num, job, True)
            end(ctx, block(), epoch + Uint32(num))

    @cute.jit
    def _publish(self, ctx: cutlass.Constexpr, epoch: Uint32, table: Int64) -> Any:
        """Thread p tells peer p. Returns the largest part that this rank sends."""
        largest = Int64(0)
        for peer in cutlass.range(self.world_size, unroll=1):
            num_bytes = load(table + Int64(peer) * PART_BYTES, Int64)[0]
            largest = pick(num_bytes > largest, num_bytes, largest)
        peer = thread()
        if peer < self.world_size:
            row = table + Int64(peer) * PART_BYTES
            split = ctx.split(peer, block(), epoch, ctx.rank)
            store(split, [load(row, Int64)[0], load(row + 16, Int64)[0]])
            store(split + 16, [largest])
        return largest

    @cute.jit
    def _agree(self, ctx: cutlass.Constexpr, epoch: Uint32, table: Int64, largest: Int64) -> Any:
        """The number of chunks on this channel, at least the AHEAD that all have sent. Thread p complains if peer p
        sees a part otherwise."""
        for hop in cutlass.range(1, self.world_size, unroll=1):
            split = ctx.split(ctx.rank, block(), epoch, ctx.neighbour(hop))
            theirs = load(split + 16, Int64, semantics="relaxed")[0]
            largest = pick(theirs > largest, theirs, largest)
        peer = thread()
        if peer < self.world_size:
            row = table + Int64(peer) * PART_BYTES
            sends, awaits = load(row, Int64)[0], load(row + 16, Int64)[0]
            comes, taken = load(ctx.split(ctx.rank, block(), epoch, peer), Int64, num=2, semantics="relaxed")
            if comes != awaits:
                self._complain(ctx, peer, awaits, comes)
            elif taken != sends:
                self._complain(ctx, peer, sends, taken)
        num = num_chunks(largest, self.chunk_bytes)
        return pick(num > AHEAD, num, Int32(AHEAD))

    def _complain(self, ctx: Context, peer: Any, expected: Any, seen: Any) -> None:
        complain(ctx.state, ctx.rank, peer, block(), Uint32(expected), Uint32(seen), Int32(Phase.splits))
