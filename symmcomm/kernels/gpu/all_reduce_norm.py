"""All-reduce or reduce-scatter of rows, residual and RMSNorm in one kernel, by the staged pipeline (see ``staged``).

Formulas in ``norm_row``. CTA b has rows b, b + grid, …; a row is a chunk, or several (``pieces``) where a slot of the
staging memory is smaller. A rank pushes its rows into all peers' staging memory, adds up what they have pushed and its
own in rank order, adds the residual, and norms: so all ranks come to the same bits. That is one shot, which sends
world_size - 1 times the data. With two ranks it is what any all-reduce must send, and nothing has to be sent back.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉, and only those are sent
to it. Rows that are missing in the last parts have chunks of nothing: all ranks have the same number.

A signal says that everything before it has arrived, so who sends one waits for that, while the link runs empty. Hence
a warp of its own, the *signaller*: the workers go on, and leave signal j to it at hardware barrier j mod DEPTH. Do they
come back to that barrier only after it has been there? At step k, where they leave signal k + 1, they have heard signal
k + 1 - AHEAD of the peers; these left it after step k - AHEAD, where they had heard our signal k + 1 - 2 · AHEAD. So
that was sent: the signaller has been at the barrier of signal k + 1 - DEPTH, which is the same.

Tensors are ordinary ones. Outputs may be the inputs: a row has been pushed before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import (
    VECTOR_BYTES,
    Math,
    NormArguments,
    Rows,
    after_previous_kernel,
    load_or_zero,
    placeholders,
)
from symmcomm.kernels.gpu.primitives import pick, signal, store, wait
from symmcomm.kernels.gpu.team import TEAM_BARRIER, Team
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import AHEAD, DEPTH, Layout, Phase

_NOWHERE = 1 << 26  # a vector past the end of any row
_SIGNALLERS = 32  # threads of the signaller
_SIGNAL_BARRIERS = TEAM_BARRIER + 1  # the first of DEPTH


def index_of(inside: Any, piece: Any, piece_vectors: int) -> Any:
    """The index in the row of a piece's vector; past the end of any row if the piece has no such vector."""
    return pick(inside < piece_vectors, Int32(piece * piece_vectors + inside), Int32(_NOWHERE))


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """The job of the pipeline (``staged.Job``), and what becomes of the rows that have come."""

    ctx: Context
    rows: Rows
    pieces: int
    vectors: int  # a thread and piece
    piece_vectors: int
    scatter: bool
    stop: Any  # i32 in shared memory

    @property
    def threads(self) -> int:
        return self.rows.team.threads

    @property
    def part_rows(self) -> Any:
        """Rows that every rank gets, the last ranks' excepted."""
        rows, size = self.rows.arguments.rows, self.ctx.world_size
        return (rows + (size - 1)) // size if self.scatter else rows

    def row_of(self, hop: int, turn: Any) -> tuple[Any, Any]:
        """The CTA's row ``turn`` in the part of the rank ``hop`` further on: its number in the source, and whether
        there is one."""
        row = turn * cute.arch.grid_dim()[0] + block()
        number = self.ctx.neighbour(hop) * self.part_rows + row if self.scatter else row
        return number, (row < self.part_rows) & (number < self.rows.arguments.rows)

    def places(self, piece: Any) -> list[tuple[Any, Any, Any]]:
        """The thread's vectors of a piece: the index in the piece, the one in the row, and whether it is in both."""
        inside = [thread() + u * self.threads for u in range(self.vectors)]
        indices = [index_of(i, piece, self.piece_vectors) for i in inside]
        return [(i, index, self.rows.access.inside(index)) for i, index in zip(inside, indices, strict=True)]

    def load(self, address: Any, pitch: Any, number: Any, exists: Any, piece: Any) -> list[list[Any]]:
        """The thread's vectors of a piece of a row of a tensor."""
        row = address + Int64(number) * pitch
        return [self.rows.access.load(row, index, exists) for _, index, _ in self.places(piece)]

    def source(self, hop: int, turn: Any, piece: Any) -> list[list[Any]]:
        """Of the part of the rank ``hop`` further on."""
        given = self.rows.arguments
        return self.load(given.source, given.source_pitch, *self.row_of(hop, turn), piece)

    def push(self, chunk: Any, number: Any) -> None:
        """Sends the chunk to all peers."""
        ctx, turn, piece = self.ctx, chunk // self.pieces, chunk % self.pieces
        sources = list(range(1, ctx.world_size)) if self.scatter else [0]
        words = {hop: self.source(hop, turn, piece) for hop in sources}
        for hop in range(1, ctx.world_size):
            slot, source = ctx.staging_slot(ctx.neighbour(hop), block(), number, ctx.rank), hop if self.scatter else 0
            _, exists = self.row_of(source, turn)
            for u, (i, _, live) in enumerate(self.places(piece)):
                store(slot + Int64(i) * VECTOR_BYTES, words[source][u], when=exists & live)

    def take(self, own: list[list[Any]], old: list[list[Any]], turn: Any, piece: int, number: Any) -> list[Any]:
        """The values t of the thread's vectors of a piece, one after the other; the new residual is stored."""
        ctx, places, given, math = self.ctx, self.places(piece), self.rows.arguments, self.rows.math
        senders = [Int32(1) - ctx.rank] if ctx.world_size == 2 else [Int32(p) for p in range(ctx.world_size)]
        _, exists = self.row_of(0, turn)
        arrived = [
            [
                load_or_zero(
                    ctx.staging_slot(ctx.rank, block(), number, peer) + Int64(i) * VECTOR_BYTES, VECTOR_BYTES,
                    exists & live & (peer != ctx.rank), "relaxed",
                )
                for peer in senders
            ]
            for i, _, live in places
        ]  # fmt: skip
        new = given.new_residual + Int64(self.row_number(turn)) * given.new_residual_pitch
        values = []
        for u, (_, index, _) in enumerate(places):
            ranks = [
                [
                    pick(ctx.rank == p, mine, theirs)
                    for mine, theirs in zip(own[u], arrived[u][0 if ctx.world_size == 2 else p], strict=True)
                ]
                for p in range(ctx.world_size)
            ]
            added, rounded = math.add_residual(math.sum_of(ranks), old[u])
            self.rows.access.store(new, index, rounded, exists)
            values += added
        return values

    def row_number(self, turn: Any) -> Any:
        """The CTA's row, in tensors of this rank's part."""
        return turn * cute.arch.grid_dim()[0] + block()

    @cute.jit
    def run(self, epoch: Uint32, num_rows: Int32) -> None:
        """The workers' part: all rows of the CTA."""
        given, per_vector = self.rows.arguments, self.rows.math.per_vector
        kept = cute.make_rmem_tensor((self.pieces * self.vectors * per_vector,), Float32)
        turn, met, total = Int32(0), Boolean(True), num_rows * self.pieces
        self.tell_signaller(0)
        for chunk in cutlass.range_constexpr(AHEAD):
            self.push(Int32(chunk), epoch + Uint32(chunk))
        self.hand_over(0)
        while turn < num_rows and met:
            for piece in cutlass.range_constexpr(self.pieces):
                chunk = turn * self.pieces + piece
                own = self.source(0, turn, piece)
                _, exists = self.row_of(0, turn)
                old = self.load(given.residual, given.residual_pitch, self.row_number(turn), exists, piece)
                if met:
                    met = self.hear(epoch, chunk)
                    if not met:
                        self.tell_signaller(1)
                    if met and chunk + AHEAD < total:
                        self.push(chunk + AHEAD, epoch + Uint32(chunk + AHEAD))
                    if met:
                        values = self.take(own, old, turn, piece, epoch + Uint32(chunk))
                        for i, value in enumerate(values):
                            kept[piece * self.vectors * per_vector + i] = value
                    if chunk + AHEAD < total:
                        self.hand_over(chunk + 1)
            if met:
                self.write(kept, turn)
            turn += 1

    @cute.jit
    def hear(self, epoch: Uint32, chunk: Int32) -> Any:
        """``staged.hear`` by the workers."""
        ctx, peer, met = self.ctx, thread(), Boolean(True)
        if peer < ctx.world_size and peer != ctx.rank:
            number = pick(chunk < AHEAD, Int32(0), chunk - (AHEAD - 1))
            phase = pick(chunk < AHEAD, Int32(Phase.enter), Int32(Phase.data))
            word = ctx.pad(ctx.rank, block(), peer)
            met = wait(ctx.state, ctx.rank, word, epoch + 1 + Uint32(number), peer, block(), phase)
        return self.rows.team.agree(met)

    def hand_over(self, number: Any) -> None:
        """Leaves it to the signaller to send a signal, for all that the workers did before."""
        barrier = _SIGNAL_BARRIERS + Int32(number) % DEPTH
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=self.threads + _SIGNALLERS)

    @cute.jit
    def tell_signaller(self, stop: cutlass.Constexpr) -> None:
        """With the next hand-over: whether it is to end."""
        word = self.stop
        if thread() == 0:
            word[0] = Int32(stop)

    @cute.jit
    def send_signals(self, epoch: Uint32, total: Int32) -> None:
        """The signaller's part: signal 0, and one for each chunk but the first AHEAD."""
        ctx, word, number, lane = self.ctx, self.stop, Int32(0), thread() - self.threads
        num, stop = pick(total < AHEAD, Int32(1), total - (AHEAD - 1)), Int32(0)
        while number < num and stop == 0:
            barrier = _SIGNAL_BARRIERS + number % DEPTH
            cute.arch.barrier(barrier_id=barrier, number_of_threads=self.threads + _SIGNALLERS)
            stop = word[0]
            for first in cutlass.range_constexpr(0, ctx.world_size, _SIGNALLERS):
                peer = first + lane
                if peer < ctx.world_size and peer != ctx.rank and stop == 0:
                    signal(ctx.pad(peer, block(), ctx.rank), epoch + 1 + Uint32(number))
            number += 1

    def write(self, kept: Any, turn: Any) -> None:
        """Norms and stores the CTA's row, whose values are ``kept``."""
        given, per_vector = self.rows.arguments, self.rows.math.per_vector
        _, exists = self.row_of(0, turn)
        num = self.pieces * self.vectors
        values = [[kept[v * per_vector + i] for i in range(per_vector)] for v in range(num)]
        row = Int64(self.row_number(turn))
        output, scale = given.output + row * given.output_pitch, given.scales + row * 4
        self.rows.write(values, exists, turn * self.rows.turns, [output], [scale])


@dataclass(frozen=True, kw_only=True)
class AllReduceNormStaged:
    """The kernel. Attributes:

        threads: workers of a CTA, whole warps, at least ``world_size``.
        vectors: of 16 bytes a thread, of each piece. pieces: chunks a row.
        piece_vectors: a chunk, at most ``threads · vectors`` and ``staging_slot_bytes / 16``; ``pieces`` of them hold
            a row, whose length is the same on all ranks.
        scatter: see above. aligned, bias, quantize, pdl: as of ``RMSNorm``.
    """

    dtype: DType
    world_size: int
    arch: int
    threads: int
    vectors: int
    pieces: int
    piece_vectors: int
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
            grid=(grid, 1, 1), block=(self.threads + _SIGNALLERS, 1, 1), min_blocks_per_mp=1, use_pdl=self.pdl,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        team = Team.create(self.threads, named=True)
        rows = Rows.create(math, team, self._indices(), self.aligned, self.bias, tensors)
        job = RowExchange(
            ctx=ctx, rows=rows, pieces=self.pieces, vectors=self.vectors, piece_vectors=self.piece_vectors,
            scatter=self.scatter, stop=cute.make_tensor(cute.arch.alloc_smem(Int32, 1), cute.make_layout(1)),
        )  # fmt: skip
        after_previous_kernel(self.pdl)
        in_order, epoch = begin(ctx, block())
        grid = cute.arch.grid_dim()[0]
        num_rows = (job.part_rows - block() + (grid - 1)) // grid
        if in_order and num_rows > 0:
            if thread() < self.threads:
                job.run(epoch, num_rows)
            else:
                job.send_signals(epoch, num_rows * self.pieces)
            end(ctx, block(), epoch + Uint32(num_rows * self.pieces))

    def _indices(self) -> list[Any]:
        """The thread's vectors of a row: those of its pieces."""
        return [
            index_of(thread() + u * self.threads, piece, self.piece_vectors)
            for piece in range(self.pieces)
            for u in range(self.vectors)
        ]
