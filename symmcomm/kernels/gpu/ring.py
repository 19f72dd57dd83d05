"""Reduce-scatter and all-reduce by a plan: executes the table of any ``schedule.plan.Plan`` that ``simulate`` accepts,
out of device memory (``schedule.ring_gpu.pack``). The twin of ``kernels.cpu.ring``; each CTA is a ring of its own.

**Chunks.** CTA b takes chunks k = 0, 1, … of every segment. In iteration t it takes first the plan's early rows (which
wait for nothing) for chunk t, then all others for chunk t - 1: so the next chunk's first messages are under way while
it waits. Any other rank q that a result at rank r holds a contribution of has begun that chunk. Hence, when r has
finished chunk t - 2 and starts chunk t, every q is in iteration t - 2 or later, so it has finished chunk t - 4, and
there are DEPTH = 4 sets of slots. What ``kernels.gpu.staged`` says of its chunks holds here as well: chunk k of a call
has number e + k and lies in set (e + k) mod DEPTH, a kernel with n chunks ends at an epoch that is e + n mod DEPTH, and
then peers may still read numbers e + n - 2 and e + n - 1 only. So kernels of both kinds may follow each other.

**Signals.** Sender and receiver of a message know its number s among those of the pair in an iteration, and the busiest
pair has K. Message s of iteration t is announced by epoch e + t · K + s + 1 on the sender's word of the receiver's pad.
Words only grow, as a rank sends in the order of its table; at the end of the kernel each rank stores its last epoch on
all peers' pads, so that no word is ever left behind.

A signal waits until the message has left, and the thread that sends it does. So what the early rows send is announced
only after the first late row has been done, where the plan allows that (``ring_gpu.may_defer``), by the same thread and
before that row's own signal: then it has left meanwhile.

**Order of the sum, and types**: as ``kernels.cpu.ring``, to the bit. Partial sums travel in ``partial_dtype``; what is
sent first are elements, so between two ranks nothing is wider than it has to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu.barrier import arrive
from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.copy import clip, copy_bytes
from symmcomm.kernels.gpu.elements import Reduction, load_vector, store_vector
from symmcomm.kernels.gpu.primitives import agree, load, pick, signal, wait
from symmcomm.kernels.gpu.staged import chunk_offset, num_chunks
from symmcomm.kernels.gpu.sweep import places, sweep
from symmcomm.schedule.dtypes import DType, Op, partial_dtype
from symmcomm.schedule.layout_gpu import DEPTH, Layout, Phase
from symmcomm.schedule.ring_gpu import HEADER_WORDS, ROW_WORDS, SOURCE_WORDS, RingShape


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Values of the running kernel: addresses and sizes in bytes, and the table's header."""

    ctx: Context
    epoch: Any
    table: Any
    source: Any
    output: Any
    total: Any
    pitch: Any
    output_pitch: Any
    num_rows: Any
    num_early: Any
    num_signals: Any
    deferred: Any
    num_chunks: Any


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The kernel. Attributes: ``shape`` of the plan and the launch (its ``grid`` is not compiled in)."""

    dtype: DType
    op: Op
    world_size: int
    arch: int
    shape: RingShape

    @property
    def factor(self) -> int:
        """How much wider partial sums are than elements."""
        return partial_dtype(self.dtype, self.op).itemsize // self.dtype.itemsize if self.shape.wide else 1

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), *[Int64(0)] * 6, Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, table: Int64, source: Int64, output: Int64, total: Int64,
        pitch: Int64, output_pitch: Int64, grid: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``table``: address of the packed plan. ``source``: of ``total`` bytes, a segment every ``pitch``, the last
        ones shorter or empty. ``output``: where segments are kept, ``output_pitch`` apart (0 if only one is)."""
        kernel = self.kernel(base, stride, rank, table, source, output, total, pitch, output_pitch)
        kernel.launch(grid=(grid, 1, 1), block=(self.shape.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self, base: Int64, stride: Int64, rank: Int32, table: Int64, source: Int64, output: Int64, total: Int64,
        pitch: Int64, output_pitch: Int64,
    ) -> None:  # fmt: skip
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        in_order, epoch = begin(ctx, block())
        num = num_chunks(pitch, self.shape.chunk_bytes * self.shape.num_lanes)
        if in_order and num > 0:
            num_rows, num_early, num_signals, deferred = load(table, Int32, num=4)
            call = _Call(
                ctx=ctx, epoch=epoch, table=table, source=source, output=output, total=total, pitch=pitch,
                output_pitch=output_pitch, num_rows=num_rows, num_early=num_early, num_signals=num_signals,
                deferred=deferred != 0, num_chunks=num,
            )  # fmt: skip
            iteration, met = Int32(0), Boolean(True)
            while iteration <= num and met:
                met = self._iterate(call, iteration)
                iteration += 1
            used = (num + 1) * num_signals - num
            last = epoch + Uint32(num + (used + (DEPTH - 1)) // DEPTH * DEPTH)
            if met:  # else nobody may take this for a message
                arrive(ctx, block(), last)
            end(ctx, block(), last)

    @cute.jit
    def _iterate(self, call: cutlass.Constexpr, iteration: Int32) -> Any:
        """All rows once. False: some wait gave up."""
        number, met = Int32(0), Boolean(True)
        while number < call.num_rows and met:
            chunk = pick(number < call.num_early, iteration, iteration - 1)
            if (chunk >= 0) & (chunk < call.num_chunks):
                met = self._row(call, number, chunk, iteration)
            number += 1
        return met

    @cute.jit
    def _row(self, call: cutlass.Constexpr, number: Int32, chunk: Int32, iteration: Int32) -> Any:
        """One row for one chunk. False on all threads: some wait gave up."""
        row = self._address(call, number)
        segment, lane, own, target = load(row, Int32, num=4)
        slot, message, num_sources, _ = load(row + 16, Int32, num=4)
        met = self._hear(call, row, num_sources, chunk)
        if met:
            at = chunk_offset(chunk, self.shape.chunk_bytes * self.shape.num_lanes)
            at = at + Int64(lane) * self.shape.chunk_bytes
            start = Int64(segment) * call.pitch
            left = pick(call.total - start < call.pitch, call.total - start, call.pitch)
            size = clip(left - at, self.shape.chunk_bytes)
            mine = call.source + start + at
            kept = call.output + Int64(segment) * call.output_pitch + at
            owner = call.ctx.rank if cutlass.const_expr(self.shape.pull) else target
            goal = pick(target < 0, kept, self._slot(call, owner, chunk, slot))
            if (own == 0) | (num_sources == 0):
                came = self._source(call, row, 0, chunk)
                origin = pick(num_sources == 0, mine, came)
                if origin != goal:
                    copy_bytes(goal, origin, size, Int64(thread()), Int64(self.shape.threads), self.shape.vectors)
            else:
                for idx in cutlass.range_constexpr(len(self.shape.sums)):
                    if (num_sources == self.shape.sums[idx][0]) & ((target < 0) == self.shape.sums[idx][1]):
                        self._add(call, row, chunk, mine, goal, size, self.shape.sums[idx][0], self.shape.sums[idx][1])
            late = call.deferred & (iteration > 0)  # whether the early rows' signals are
            after = late & (number == call.num_early) & (iteration < call.num_chunks)
            now = (target >= 0) & ~(late & (number < call.num_early))
            if now | after:
                cute.arch.sync_threads()
                if thread() == 0:
                    if after:
                        self._signal_early(call, iteration)
                    if now:
                        self._signal(call, target, message, iteration)
        return met

    def _address(self, call: _Call, number: Any) -> Any:
        """Of a row of the table."""
        row_bytes = 4 * (ROW_WORDS + SOURCE_WORDS * self.shape.max_sources)
        return call.table + 4 * HEADER_WORDS + Int64(number) * row_bytes

    def _signal(self, call: _Call, target: Any, message: Any, iteration: Any) -> None:
        epoch = call.epoch + Uint32(iteration * call.num_signals + message + 1)
        signal(call.ctx.pad(target, block(), call.ctx.rank), epoch)

    @cute.jit
    def _signal_early(self, call: cutlass.Constexpr, iteration: Int32) -> None:
        """What all early rows have sent."""
        number = Int32(0)
        while number < call.num_early:
            row = self._address(call, number)
            target, message = load(row + 12, Int32)[0], load(row + 20, Int32)[0]
            if target >= 0:
                self._signal(call, target, message, iteration)
            number += 1

    @cute.jit
    def _hear(self, call: cutlass.Constexpr, row: Int64, num_sources: Int32, chunk: Int32) -> Any:
        """Waits for the row's messages, a thread for each, on behalf of the CTA."""
        ctx, met, idx = call.ctx, Boolean(True), thread()
        if idx < num_sources:
            source = row + 4 * ROW_WORDS + Int64(idx) * (4 * SOURCE_WORDS)
            sender, _, message, _ = load(source, Int32, num=4)
            early = load(source + 16, Int32)[0]
            epoch = call.epoch + Uint32((chunk + 1 - early) * call.num_signals + message + 1)
            phase = pick(chunk == 0, Int32(Phase.enter), Int32(Phase.data))
            met = wait(ctx.state, ctx.rank, ctx.pad(ctx.rank, block(), sender), epoch, sender, block(), phase)
        return agree(met)

    def _slot(self, call: _Call, owner: Any, chunk: Any, slot: Any) -> Any:
        """Address of a slot in the owner's staging memory, in the chunk's set."""
        first = call.ctx.staging_slot(owner, block(), call.epoch + Uint32(chunk), 0)
        return first + Int64(slot) * (self.shape.chunk_bytes * self.factor)

    def _source(self, call: _Call, row: Any, idx: int, chunk: Any) -> Any:
        """Address of what a source of the row has sent."""
        sender, slot = load(row + 4 * (ROW_WORDS + SOURCE_WORDS * idx), Int32, num=2)
        return self._slot(call, sender if self.shape.pull else call.ctx.rank, chunk, slot)

    @cute.jit
    def _add(
        self, call: cutlass.Constexpr, row: Int64, chunk: Int32, own: Int64, goal: Int64, size: Int64,
        num: cutlass.Constexpr, last: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """The row's sum of ``num`` sources and the own part, ``size`` bytes of elements."""
        sources = [self._source(call, row, idx, chunk) for idx in range(num)]
        flags = [load(row + 4 * (ROW_WORDS + SOURCE_WORDS * idx + 3), Int32)[0] != 0 for idx in range(num)]
        flags = [flag if self.shape.wide else None for flag in flags]
        done = Int64(0)
        if ((own | goal) & 15) == 0:
            done = size & ~15
        where = _Where(own=own, goal=goal, sources=sources, flags=flags, last=last)
        self._sweep(where, Int64(0), done >> 4, self.shape.vectors, 16)
        self._sweep(where, done, (size - done) // self.dtype.itemsize, 1, self.dtype.itemsize)

    def _sweep(self, where: _Where, offset: Any, num: Any, vectors: int, unit: int) -> None:
        step = self.shape.threads
        sweep(num, Int64(thread()), step, vectors, partial(self._batch, where, offset, num, vectors, unit))

    def _batch(self, where: _Where, offset: Any, num: Any, vectors: int, unit: int, i: Any) -> None:
        """Units i, i + threads, …: all loads first, so that they are in flight together."""
        here = places(offset, num, i, self.shape.threads, vectors, unit)
        plain = Reduction(self.dtype, self.op, self.world_size, self.arch)
        wide = Reduction(partial_dtype(self.dtype, self.op), self.op, self.world_size, self.arch)
        mine = [load_vector(where.own + at, unit, semantics="relaxed", when=live) for at, live in here]
        came = [
            [self._load(source, flag, at, unit, live) for source, flag in zip(where.sources, where.flags, strict=True)]
            for at, live in here
        ]
        for (at, live), own, of_sources in zip(here, mine, came, strict=True):
            pairs = zip(of_sources, where.flags, strict=True)
            values = [self._widen(plain, wide, words, flag) for words, flag in pairs]
            total = plain.combine(values[0], plain.widen(own))
            for value in values[1:]:
                total = plain.combine(total, value)
            if where.last:
                store_vector(where.goal + at, plain.narrow(plain.finish(total)), unit, when=live)
            elif not self.shape.wide:
                store_vector(where.goal + at, plain.narrow(total), unit, when=live)
            else:
                words, piece = wide.narrow(total), min(16, unit * self.factor)
                for p in range(0, unit * self.factor, piece):
                    store_vector(where.goal + at * self.factor + p, words[p // 4 :], piece, when=live)

    def _load(self, source: Any, flag: Any, at: Any, unit: int, live: Any) -> tuple[list[Any], list[Any]]:
        """Words of a message as elements and as partial sums; only one of the two means anything, see ``flag``."""
        if flag is None:
            return load_vector(source + at, unit, semantics="relaxed", when=live), []
        if unit == 16:  # a slot has room for partial sums, so elements may be read beyond their end
            first = source + pick(flag, at * self.factor, at)
            pieces = [load_vector(first + 16 * p, 16, semantics="relaxed", when=live) for p in range(self.factor)]
            return pieces[0], [word for piece in pieces for word in piece]
        elements = load_vector(source + at, unit, semantics="relaxed", when=~flag)
        return elements, load_vector(source + at * self.factor, unit * self.factor, semantics="relaxed", when=flag)

    def _widen(self, plain: Reduction, wide: Reduction, words: tuple[list[Any], list[Any]], flag: Any) -> list[Any]:
        elements, partial = words
        values = plain.widen(elements)
        if flag is None:
            return values
        sums = wide.widen(partial)  # of a single element: the others of its word mean nothing
        return [pick(flag, p, e) for p, e in zip(sums, values[: len(sums)], strict=True)] + values[len(sums) :]


@dataclass(frozen=True, kw_only=True)
class _Where:
    """Where a sum's data is and goes. ``flags``: whether a source holds partial sums, None where nothing is wider."""

    own: Any
    goal: Any
    sources: list[Any]
    flags: list[Any]
    last: bool
