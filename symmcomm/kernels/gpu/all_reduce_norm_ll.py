"""All-reduce or reduce-scatter of rows, residual and RMSNorm in one kernel, without flags and barriers.

Formulas in ``norm_row``; ``unflagged`` says how data announces itself. A row is shared by a cluster of CTAs, each of
which is a channel and holds ``threads · vectors`` vectors of it. Every rank sends its row to all, adds up what it gets
in rank order, and norms it: so all ranks come to the same bits. The CTAs of a cluster exchange their sums of squares
through shared memory (see ``team``). All threads take part in that, whatever has happened: those of a rank that gave up
keep nothing. CTAs that are alone with their rows take one after the other, in turns.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉: row i of all parts is
exchanged by the same CTAs. Rows that are missing in the last parts are exchanged as zeros, as on each channel all ranks
must hear from all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from symmcomm.kernels.gpu import unflagged
from symmcomm.kernels.gpu.access import VECTOR_BYTES
from symmcomm.kernels.gpu.cells import remind
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Rows, placeholders
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.registers import keep, registers
from symmcomm.kernels.gpu.team import Team, enter_cluster
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class WordsOfRows:
    """The job: a row a turn. A thread has ``vectors`` of it."""

    ctx: Context
    epoch: Any
    rows: Rows
    threads: int
    vectors: int
    cluster: int
    scatter: bool

    @property
    def tensors(self) -> NormArguments:
        return self.rows.arguments

    @property
    def part_rows(self) -> Any:
        """Rows that every rank gets, the last ranks' excepted."""
        size = self.ctx.world_size
        return (self.tensors.rows + (size - 1)) // size if self.scatter else self.tensors.rows

    @property
    def num_turns(self) -> Any:
        """Of this CTA."""
        clusters = cute.arch.grid_dim()[0] // self.cluster
        return (self.part_rows - block() // self.cluster + (clusters - 1)) // clusters

    def row(self, turn: Any) -> Any:
        """In a part."""
        return turn * (cute.arch.grid_dim()[0] // self.cluster) + block() // self.cluster

    def row_of(self, hop: int, turn: Any) -> tuple[Any, Any]:
        """Of the part that goes ``hop`` ranks on: its number in the source, and whether there is one."""
        row = self.row(turn)
        number = self.ctx.neighbour(hop) * self.part_rows + row if self.scatter else row
        return number, (row < self.part_rows) & (number < self.tensors.rows)

    @property
    def outgoing(self) -> range:
        """How far on the ranks are whose parts differ, the own one excepted."""
        return range(1, self.ctx.world_size) if self.scatter else range(1)

    def source(self, hop: int, turn: Any) -> list[list[Any]]:
        """The thread's vectors of that row; zeros if there is no such row."""
        number, exists = self.row_of(hop, turn)
        row = self.tensors.source + Int64(number) * self.tensors.source_pitch
        return [self.rows.access.load(row, i, exists) for i in self.rows.indices]

    @property
    def slot_turns(self) -> int:
        """See ``unflagged.Job``."""
        return self.ctx.layout.words_slot_bytes // (self.threads * self.vectors * VECTOR_BYTES)

    def places(self, turn: Any) -> list[Any]:
        """The thread's, in slots."""
        return [(turn * self.vectors + k) * self.threads + thread() for k in range(self.vectors)]

    @property
    def num_fetched(self) -> int:
        """See ``unflagged.Job``."""
        return len(self.outgoing) * self.vectors

    def fetch(self, turn: Any) -> list[list[Any]]:
        """See ``unflagged.Job``."""
        return [vector for hop in self.outgoing for vector in self.source(hop, turn)]

    def send(self, vectors: list[list[Any]], turn: Any, going: Any) -> None:
        """See ``unflagged.Job``. What is missing in the last parts goes as zeros."""
        ctx, outgoing = self.ctx, [unflagged.inverted(vector, self.rows.math.dtype) for vector in vectors]
        for hop in range(1, ctx.world_size):
            first = (hop - 1) * self.vectors if self.scatter else 0
            for vector, place, i in zip(outgoing[first:], self.places(turn), self.rows.indices, strict=False):
                live = going & self.rows.access.inside(i)
                unflagged.send(ctx, self.epoch, ctx.neighbour(hop), place, vector, live)

    @cute.jit
    def take(self, turn: Int32, going: Boolean) -> Any:
        """Reduces, adds, and norms; nothing of it is kept once a wait gave up."""
        own, exists = self.source(0, turn), self.row_of(0, turn)[1]
        old = self.tensors.residual + Int64(self.row(turn)) * self.tensors.residual_pitch
        residual = [self.rows.access.load(old, i, exists) for i in self.rows.indices]
        live = [going & self.rows.access.inside(i) for i in self.rows.indices]
        got, arrived = unflagged.receive(self.ctx, self.epoch, self.places(turn), live)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        going = going & arrived
        self._norm(turn, own, got, residual, live, exists & going)
        return going

    def _norm(
        self, turn: Any, own: list[list[Any]], got: Any, residual: list[list[Any]], live: list[Any], kept: Any
    ) -> None:
        tensors, math, row = self.tensors, self.rows.math, Int64(self.row(turn))
        target, values = tensors.new_residual + row * tensors.new_residual_pitch, []
        for k, index in enumerate(self.rows.indices):
            ordered = [
                [pick(live[k], word, Uint32(0)) for word in vector]  # what is not live has not been received
                for vector in self.ctx.in_rank_order(own[k], unflagged.vectors_of(self.ctx, got, k, self.vectors))
            ]
            added, rounded = math.add_residual(math.sum_of(ordered), residual[k])
            self.rows.access.store(target, index, rounded, kept)
            values.append(added)
        output, scale = tensors.output + row * tensors.output_pitch, tensors.scales + row * 4
        number = turn * self.rows.turns if self.cluster == 1 else 0
        self.rows.write(values, kept, number, [output], [scale])


@dataclass(frozen=True, kw_only=True)
class AllReduceNormLL:
    """The kernel. Attributes: ``threads`` a CTA (whole warps), ``vectors`` of 16 bytes a thread, ``cluster`` CTAs a row
    (1 below sm_90): together they hold a row. What a CTA holds of all its rows must fit ``words_slot_bytes``; of
    several, only if ``cluster`` is 1. ``aligned``, ``bias``, ``quantize``, ``pdl`` as of ``RMSNorm``."""

    dtype: DType
    world_size: int
    arch: int
    threads: int
    vectors: int
    cluster: int
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
        """``grid``: at most NUM_WORDS_CHANNELS, and no CTA may be without a row (with ``scatter`` of a part). Tensors
        are ordinary; with ``scatter`` all but the source hold the rank's part."""
        self.kernel(base, stride, rank, tensors).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            min_blocks_per_mp=1, use_pdl=self.pdl, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments) -> None:
        team = self._team()
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        first = block() % self.cluster * (self.threads * self.vectors)
        rows = self._rows(tensors, team, [first + k * self.threads + thread() for k in range(self.vectors)])
        job = WordsOfRows(
            ctx=ctx, epoch=None, rows=rows, threads=self.threads, vectors=self.vectors, cluster=self.cluster,
            scatter=self.scatter,
        )  # fmt: skip
        fetched = registers(4 * job.num_fetched, Uint32)
        after_previous_kernel(self.pdl)
        keep(fetched, job.fetch(Int32(0)))
        in_order, epoch = begin(ctx, block())
        if in_order:
            remind(ctx, epoch)
        job = replace(job, epoch=epoch + 1)
        unflagged.run(ctx, epoch + 1, job.num_turns, fetched, job, in_order)
        if in_order:
            end(ctx, block(), epoch + 1)

    def _team(self) -> Team:
        team = Team.create(self.threads, self.cluster)
        if self.cluster > 1:
            enter_cluster(team)
        return team

    def _rows(self, tensors: NormArguments, team: Team, indices: list[Any]) -> Rows:
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        access = math.access(self.aligned, tensors.hidden)
        rows = Rows(math=math, team=team, access=access, arguments=tensors, indices=indices, bias=self.bias)
        return replace(rows, held=rows.weights(indices))
