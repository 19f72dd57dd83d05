"""All-reduce or reduce-scatter of rows, residual and RMSNorm in one kernel, without flags and barriers.

Formulas in ``norm_row``; ``lamport`` says how data announces itself. A row is shared by a cluster of CTAs, each of
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

from symmcomm.kernels.gpu import lamport
from symmcomm.kernels.gpu.cells import remind
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Parts, Rows, placeholders
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.registers import keep, registers
from symmcomm.kernels.gpu.team import Team, enter_cluster
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class RowsInTurns(lamport.Job):
    """The job: a row a turn. What is missing in the last parts goes as zeros."""

    rows: Rows
    parts: Parts
    cluster: int

    @property
    def num_turns(self) -> Any:
        """Of this CTA."""
        clusters = cute.arch.grid_dim()[0] // self.cluster
        return (self.parts.part_rows - block() // self.cluster + (clusters - 1)) // clusters

    def row(self, turn: Any) -> Any:
        """In a part."""
        return turn * (cute.arch.grid_dim()[0] // self.cluster) + block() // self.cluster

    def load(self, hop: int, turn: Any) -> list[list[Any]]:
        """See ``lamport.Job``."""
        number, exists = self.parts.locate(hop, self.row(turn))
        row = self.rows.arguments.source + Int64(number) * self.rows.arguments.source_pitch
        return [self.rows.access.load(row, i, exists) for i in self.rows.indices]

    def live(self, turn: Any) -> list[Any]:
        """See ``lamport.Job``."""
        return [self.rows.access.inside(i) for i in self.rows.indices]

    def slot(self, turn: Any) -> tuple[Any, list[Any]]:
        """See ``lamport.Job``: all turns fit one."""
        return self.epoch, self.places(turn)

    @cute.jit
    def take(self, turn: Int32, going: Boolean) -> Any:
        """Reduces, adds, and norms; nothing of it is kept once a wait gave up."""
        given, own, (_, exists) = self.rows.arguments, self.load(0, turn), self.parts.locate(0, self.row(turn))
        old = given.residual + Int64(self.row(turn)) * given.residual_pitch
        residual = [self.rows.access.load(old, i, exists) for i in self.rows.indices]
        live = [going & each for each in self.live(turn)]
        got, arrived = lamport.receive(self, turn, live)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        going = going & arrived
        self._norm(turn, own, got, residual, live, exists & going)
        return going

    def _norm(
        self, turn: Any, own: list[list[Any]], got: Any, residual: list[list[Any]], live: list[Any], kept: Any
    ) -> None:
        tensors, math, row = self.rows.arguments, self.rows.math, Int64(self.row(turn))
        target, values = tensors.new_residual + row * tensors.new_residual_pitch, []
        for k, index in enumerate(self.rows.indices):
            ordered = [
                [pick(live[k], word, Uint32(0)) for word in vector]  # what is not live has not been received
                for vector in self.ctx.in_rank_order(own[k], lamport.vectors_of(self.ctx, got, k, self.vectors))
            ]
            added, rounded = math.add_residual(math.sum_of(ordered), residual[k])
            self.rows.access.store(target, index, rounded, kept)
            values.append(added)
        output, scale = tensors.output + row * tensors.output_pitch, tensors.scales + row * 4
        number = turn * self.rows.turns if self.cluster == 1 else 0
        self.rows.write(values, kept, number, [output], [scale])


@dataclass(frozen=True, kw_only=True)
class AllReduceNormLamport:
    """The kernel. Attributes: ``threads`` a CTA (whole warps), ``vectors`` of 16 bytes a thread, ``cluster`` CTAs a row
    (1 below sm_90): together they hold a row. What a CTA holds of all its rows must fit ``lamport_slot_bytes``; of
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
        """``grid``: at most NUM_LAMPORT_CHANNELS, and no CTA may be without a row (with ``scatter`` of a part). Tensors
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
        job = RowsInTurns(
            ctx=ctx, epoch=None, threads=self.threads, vectors=self.vectors, same=not self.scatter,
            rows=rows, parts=Parts(ctx=ctx, num_rows=tensors.rows, scatter=self.scatter), cluster=self.cluster,
        )  # fmt: skip
        fetched = registers(4 * job.num_fetched, Uint32)
        after_previous_kernel(self.pdl)
        keep(fetched, job.fetch(Int32(0)))
        in_order, epoch = begin(ctx, block())
        if in_order:
            remind(ctx, epoch)
        job = replace(job, epoch=epoch + 1)
        lamport.run(epoch + 1, job.num_turns, fetched, job, in_order)
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
