"""All-reduce or reduce-scatter of a few rows, residual and RMSNorm in one kernel, without flags and barriers.

Formulas in ``norm_row``; ``unflagged`` says how data announces itself. A row is shared by a cluster of CTAs, each of
which is a channel and holds ``threads · vectors`` vectors of it. Every rank sends its row to all, adds up what it gets
in rank order, and norms it: so all ranks come to the same bits. The CTAs of a cluster exchange their sums of squares
through shared memory (see ``team``). All threads take part in that, whatever has happened: a rank that gave up has rows
of no elements.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉: row i of all parts is
exchanged by cluster i. Rows that are missing in the last parts are exchanged as zeros, as on each channel all ranks
must hear from all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu import unflagged
from symmcomm.kernels.gpu.cells import remind
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Rows, placeholders
from symmcomm.kernels.gpu.primitives import pick
from symmcomm.kernels.gpu.team import Team, enter_cluster
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class AllReduceNormLL:
    """The kernel. Attributes: ``threads`` a CTA (whole warps), ``vectors`` of 16 bytes a thread, ``cluster`` CTAs a row
    (1 below sm_90): together they hold a row, and a CTA's must fit ``words_slot_bytes``. ``aligned``, ``bias``,
    ``quantize``, ``pdl`` as of ``RMSNorm``."""

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
        """``grid``: rows, with ``scatter`` of a part, times ``cluster``. Tensors are ordinary; with ``scatter`` all but
        the source hold the rank's part."""
        self.kernel(base, stride, rank, tensors).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            min_blocks_per_mp=1, use_pdl=self.pdl, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments) -> None:
        team = self._team()
        ctx, row = Context(base, stride, rank, Layout.create(self.world_size)), block() // self.cluster
        inside = [k * self.threads + thread() for k in range(self.vectors)]
        first = block() % self.cluster * (self.threads * self.vectors)
        rows = self._rows(tensors, team, [first + i for i in inside])
        after_previous_kernel(self.pdl)
        own = [self._own(ctx, rows, row, hop) for hop in (range(self.world_size) if self.scatter else (0,))]
        exists = self._number(ctx, tensors, row, 0) < tensors.rows
        old = tensors.residual + Int64(row) * tensors.residual_pitch
        residual = [rows.access.load(old, i, exists) for i in rows.indices]
        in_order, epoch = begin(ctx, block())
        if in_order:
            remind(ctx, epoch)
        epoch += 1
        live = [in_order & rows.access.inside(i) for i in rows.indices]
        outgoing = [[unflagged.inverted(vector, self.dtype) for vector in vectors] for vectors in own]
        for k in cutlass.range_constexpr(self.vectors):
            for hop in cutlass.range_constexpr(1, self.world_size):
                vector = outgoing[hop if self.scatter else 0][k]
                unflagged.send(ctx, epoch, ctx.neighbour(hop), inside[k], vector, live[k])
        got, arrived = unflagged.receive(ctx, epoch, inside, live)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        self._norm(ctx, rows, row, own[0], got, residual, live, exists & arrived & in_order)
        if in_order:
            end(ctx, block(), epoch)

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

    def _number(self, ctx: Context, tensors: NormArguments, row: Any, hop: int) -> Any:
        """Which row of the source is row ``row`` of the part that goes ``hop`` ranks on."""
        if not self.scatter:
            return row
        return ctx.neighbour(hop) * ((tensors.rows + (self.world_size - 1)) // self.world_size) + row

    def _own(self, ctx: Context, rows: Rows, row: Any, hop: int) -> list[list[Any]]:
        """The thread's vectors of that row; zeros if there is no such row."""
        tensors = rows.arguments
        number = self._number(ctx, tensors, row, hop)
        source = tensors.source + Int64(number) * tensors.source_pitch
        return [rows.access.load(source, i, number < tensors.rows) for i in rows.indices]

    def _norm(
        self, ctx: Context, rows: Rows, row: Any, own: list[list[Any]], got: Any, residual: list[list[Any]],
        live: list[Any], kept: Any,
    ) -> None:  # fmt: skip
        """Reduces, adds, and norms; stores it if ``kept``."""
        tensors, math = rows.arguments, rows.math
        target = tensors.new_residual + Int64(row) * tensors.new_residual_pitch
        values = []
        for k, index in enumerate(rows.indices):
            ordered = [
                [pick(live[k], word, Uint32(0)) for word in vector]  # what is not live has not been received
                for vector in ctx.in_rank_order(own[k], unflagged.vectors_of(ctx, got, k, self.vectors))
            ]
            added, rounded = math.add_residual(math.sum_of(ordered), residual[k])
            rows.access.store(target, index, rounded, kept)
            values.append(added)
        output, scale = tensors.output + Int64(row) * tensors.output_pitch, tensors.scales + Int64(row) * 4
        rows.write(values, kept, 0, [output], [scale])
