"""All-reduce or reduce-scatter of many rows, residual and RMSNorm in one kernel, of any tensors.

Formulas in ``norm_row``; slots, signals and when a slot may be filled again: ``staged``. A chunk is ``rows``
neighbouring rows, one for each team of the CTA, or one of several ``pieces`` of a row that is longer than a slot. A
rank pushes its rows into all peers' staging memory, adds up what they have pushed and its own in rank order, adds the
residual, and norms: so all ranks come to the same bits. That is one shot, which sends world_size - 1 times the data:
between two ranks as much as any all-reduce must send, and nothing has to be sent back.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉, and only those are sent
to it. Rows that are missing in the last parts have chunks of nothing: all ranks have the same number.

The steps are those of ``staged``, in another order. Step k: push chunk k + AHEAD, take chunk k, hear of chunk k + 1,
signal chunk k + AHEAD. Each still comes after what it needs: a push of chunk j after signal j - AHEAD was heard, signal
j after chunk j - AHEAD was taken. And signal j awaits signal j - 1 and none later: so no ranks wait for each other.
What it gains: a signal is sent when everything before it has arrived, and the warp that sends it waits for that; but
no barrier lies between the signal and the next push. What a step pushes and takes is loaded before that signal, so that
the other warps have it at hand: the link has work, and what comes by it is not waited for behind the stores.

Outputs may be the inputs: a row has been pushed before it is written, and is read by the threads that write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from symmcomm.kernels.gpu.access import load_or_zero
from symmcomm.kernels.gpu.barrier import arrive
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Parts, Rows, placeholders
from symmcomm.kernels.gpu.primitives import pick, store
from symmcomm.kernels.gpu.registers import keep, kept_in, registers
from symmcomm.kernels.gpu.staged import hear
from symmcomm.kernels.gpu.team import Team
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import AHEAD, VECTOR_BYTES, Layout

_WEIGHTS = 4  # vectors that registers hold beside a row
Words = list[list[Any]]
"""A thread's vectors, each four words."""


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """The rows on their way. A thread has the same vectors of each row, ``vectors`` of a piece."""

    ctx: Context
    rows: Rows
    num_teams: int
    pieces: int
    vectors: int
    scatter: bool

    @property
    def parts(self) -> Parts:
        return Parts(ctx=self.ctx, num_rows=self.rows.arguments.rows, scatter=self.scatter)

    @property
    def turns(self) -> Any:
        """Rows that each team of the CTA has, with missing ones."""
        before, step = block() * self.num_teams, cute.arch.grid_dim()[0] * self.num_teams
        left = self.parts.part_rows - before
        return pick(left > 0, (left + (step - 1)) // step, Int32(0))

    def row(self, turn: Any) -> Any:
        """The team's row of that turn, in a part."""
        return (turn * cute.arch.grid_dim()[0] + block()) * self.num_teams + thread() // self.rows.team.threads

    def row_of(self, hop: int, turn: Any) -> tuple[Any, Any]:
        """That row in the part of the rank ``hop`` further on, as ``Parts.locate`` gives it."""
        return self.parts.locate(hop, self.row(turn))

    @property
    def outgoing(self) -> list[int]:
        """How far on the ranks are whose parts differ, the own one excepted."""
        return list(range(1, self.ctx.world_size)) if self.scatter else [0] * (self.ctx.world_size > 1)

    def places(self, piece: Any) -> list[tuple[Any, Any]]:
        """The thread's vectors of a piece: each one's index in the row, and its place in a slot."""
        threads = self.rows.team.threads
        team, lane = thread() // threads, thread() % threads
        return [
            ((piece * self.vectors + v) * threads + lane, (team * self.vectors + v) * threads + lane)
            for v in range(self.vectors)
        ]

    def load(self, address: Any, pitch: Any, number: Any, exists: Any, piece: Any) -> Words:
        """The thread's vectors of a piece of a row of a tensor."""
        row = address + Int64(number) * pitch
        return [self.rows.access.load(row, index, exists) for index, _ in self.places(piece)]

    def source(self, hop: int, turn: Any, piece: Any) -> Words:
        """Of this rank's input, in the part of the rank ``hop`` further on."""
        given = self.rows.arguments
        return self.load(given.source, given.source_pitch, *self.row_of(hop, turn), piece)

    def fetch(self, chunk: Any) -> Words:
        """The thread's vectors of a chunk for the peers; zeros where there is none."""
        turn, piece = chunk // self.pieces, chunk % self.pieces
        return [words for hop in self.outgoing for words in self.source(hop, turn, piece)]

    def send(self, fetched: Words, chunk: Any, number: Any) -> None:
        """Stores them into the peers' slots of that number."""
        ctx, turn, piece = self.ctx, chunk // self.pieces, chunk % self.pieces
        for hop in range(1, ctx.world_size):
            slot, part = ctx.staging_slot(ctx.neighbour(hop), block(), number, ctx.rank), hop if self.scatter else 0
            _, exists = self.row_of(part, turn)
            first = (hop - 1) * self.vectors if self.scatter else 0
            for v, (index, place) in enumerate(self.places(piece)):
                here = exists & self.rows.access.inside(index)
                store(slot + Int64(place) * VECTOR_BYTES, fetched[first + v], when=here)

    def receive(self, turn: Any, piece: int, number: Any) -> Words:
        """The thread's vectors of a piece of the team's row: of this rank, of its residual, and of ``ctx.senders``."""
        ctx, given, loaded = self.ctx, self.rows.arguments, self.source(0, turn, piece)
        _, exists = self.row_of(0, turn)
        loaded += self.load(given.residual, given.residual_pitch, self.row(turn), exists, piece)
        for peer in ctx.senders:
            slot = ctx.staging_slot(ctx.rank, block(), number, peer)
            for index, place in self.places(piece):
                here = exists & self.rows.access.inside(index) & (peer != ctx.rank)
                loaded.append(load_or_zero(slot + Int64(place) * VECTOR_BYTES, VECTOR_BYTES, here, "relaxed"))
        return loaded

    def add(self, turn: Any, piece: int, loaded: Words) -> list[list[Any]]:
        """The values t of the thread's vectors of a piece, from what ``receive`` gave; the new residual is stored."""
        given, math, num = self.rows.arguments, self.rows.math, self.vectors
        _, exists = self.row_of(0, turn)
        new, values = given.new_residual + Int64(self.row(turn)) * given.new_residual_pitch, []
        for v, (index, _) in enumerate(self.places(piece)):
            ranks = self.ctx.in_rank_order(loaded[v], loaded[2 * num + v :: num])
            added, rounded = math.add_residual(math.sum_of(ranks), loaded[num + v])
            self.rows.access.store(new, index, rounded, exists)
            values.append(added)
        return values

    def write(self, values: list[list[Any]], turn: Any) -> None:
        """Norms and stores the team's row. The weight is loaded before the sum is known: what is acquired empties the
        L1 cache, so it comes from the L2."""
        given, row, indices = self.rows.arguments, Int64(self.row(turn)), self.rows.indices
        _, exists = self.row_of(0, turn)
        output, scale = given.output + row * given.output_pitch, given.scales + row * 4
        weights = self.rows.weights(indices) if self.rows.held is None and len(indices) <= _WEIGHTS else None
        self.rows.write(values, exists, turn * self.rows.turns, [output], [scale], weights=weights)

    @cute.jit
    def run(self, epoch: Uint32, turns: Int32, outgoing: cutlass.Constexpr) -> None:
        """All chunks. ``outgoing``: registers that hold what ``fetch`` gives of the first."""
        size, num = self.rows.math.per_vector * self.vectors, len(self.outgoing) * self.vectors
        num_in = (2 + len(self.ctx.senders)) * self.vectors
        values, incoming = registers(self.pieces * size, Float32), registers(4 * num_in, Uint32)
        chunk, total = Int32(0), turns * self.pieces
        while chunk < AHEAD and chunk < total:
            self.send(kept_in(outgoing, num, 4), chunk, epoch + Uint32(chunk))
            keep(outgoing, self.fetch(chunk + 1))
            arrive(self.ctx, block(), epoch + 1 + Uint32(chunk))
            chunk += 1
        turn, met = Int32(0), hear(self.ctx, epoch, Int32(0))
        keep(incoming, self.receive(turn, 0, epoch))
        while turn < turns and met:
            for piece in cutlass.range_constexpr(self.pieces):
                chunk = turn * self.pieces + piece
                later = chunk + AHEAD
                if met:
                    self.send(kept_in(outgoing, num, 4), later, epoch + Uint32(later))
                    keep(values, self.add(turn, piece, kept_in(incoming, num_in, 4)), piece * size)
                    if cutlass.const_expr(piece == self.pieces - 1):
                        self.write(kept_in(values, self.pieces * self.vectors, self.rows.math.per_vector), turn)
                    keep(outgoing, self.fetch(later + 1))
                    if chunk + 1 < total:
                        met = hear(self.ctx, epoch, chunk + 1)
                    following = turn + (piece + 1) // self.pieces
                    keep(incoming, self.receive(following, (piece + 1) % self.pieces, epoch + Uint32(chunk + 1)))
                    if met and later < total:
                        arrive(self.ctx, block(), epoch + 1 + Uint32(later))
            turn += 1


@dataclass(frozen=True, kw_only=True)
class AllReduceNormStaged:
    """The kernel. Attributes:

        threads: a row: a power of two up to 32, or whole warps.
        rows: a chunk; ``threads · rows`` make a CTA of whole warps, at least ``world_size`` threads.
        vectors: of 16 bytes a thread and chunk; ``16 · threads · rows · vectors`` fit ``staging_slot_bytes``.
        pieces: chunks that hold a row, ``threads · vectors`` each; 1 unless ``rows`` is.
        scatter: see above. aligned, bias, quantize, pdl: as of ``RMSNorm``.
    """

    dtype: DType
    world_size: int
    arch: int
    threads: int
    rows: int
    vectors: int
    pieces: int
    aligned: bool
    scatter: bool = False
    bias: bool = False
    quantize: bool = False
    pdl: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), placeholders(), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments, grid: Int32, stream: cuda.CUstream
    ) -> None:
        """``grid``: at most NUM_STAGED_CHANNELS, and CTAs that fit the device at once; the same on all ranks. With
        ``scatter`` all tensors but the source hold the rank's part."""
        self.kernel(base, stride, rank, tensors).launch(
            grid=(grid, 1, 1), block=(self.threads * self.rows, 1, 1), min_blocks_per_mp=1, use_pdl=self.pdl,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        indices = [thread() % self.threads + v * self.threads for v in range(self.pieces * self.vectors)]
        team = Team.create(self.threads, num_teams=self.rows)
        rows = Rows.create(math, team, indices, self.aligned, self.bias, tensors)
        job = RowExchange(
            ctx=ctx, rows=rows, num_teams=self.rows, pieces=self.pieces, vectors=self.vectors, scatter=self.scatter
        )
        outgoing = registers(4 * len(job.outgoing) * self.vectors, Uint32)
        after_previous_kernel(self.pdl)
        keep(outgoing, job.fetch(Int32(0)))
        in_order, epoch = begin(ctx, block())
        turns = job.turns
        if in_order and turns > 0:
            job.run(epoch, turns, outgoing)
            end(ctx, block(), epoch + Uint32(turns * self.pieces))
