"""All-reduce or reduce-scatter of a few rows, residual and RMSNorm in one kernel and without a barrier, by LL cells.

Formulas in ``norm_row``, cells in ``cells``. A row is shared by a cluster of CTAs, each of which is a channel and holds
``threads · cells`` cells of it. Every rank sends its row to all, adds up what it gets in rank order, and norms it: so
all ranks come to the same bits. The CTAs of a cluster exchange their sums of squares through shared memory, and meet
twice: when all have started (a CTA's shared memory may be written only then), and when all sums are there. All threads
take part in that, whatever has happened: a rank that gave up has rows without bytes.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉: row i of all parts is
exchanged by cluster i. Rows that are missing in the last parts are exchanged as zeros, as on each channel all ranks
must hear from all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from symmcomm.kernels.gpu import cells as ll
from symmcomm.kernels.gpu.context import Context, begin, block, end, thread
from symmcomm.kernels.gpu.elements import store_vector
from symmcomm.kernels.gpu.norm_row import (
    Math,
    NormArguments,
    after_previous_kernel,
    inverse_root,
    magnitude,
    placeholders,
    scale_of,
)
from symmcomm.kernels.gpu.primitives import pick, store
from symmcomm.kernels.gpu.team import Team, add, largest, shared_scratch, tree
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class AllReduceNormLL:
    """The kernel. Attributes: ``threads`` a CTA, ``cells`` a thread, ``cluster`` CTAs a row (1 below sm_90): together
    at least the row's bytes / 8, and a CTA's cells must fit ``ll_slot_bytes``. ``bias``, ``quantize``, ``pdl`` as of
    ``RMSNorm``."""

    dtype: DType
    world_size: int
    arch: int
    threads: int
    cells: int
    cluster: int
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
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        row, row_bytes = block() // self.cluster, Int64(tensors.hidden) * self.dtype.itemsize
        step = self.threads * ll.PAYLOAD_BYTES
        first = Int64(block() % self.cluster) * (self.cells * step) + thread() * ll.PAYLOAD_BYTES
        weights = [self._payloads(tensors.weight, first, row_bytes)]
        if cutlass.const_expr(self.bias):
            weights.append(self._payloads(tensors.bias, first, row_bytes))
        after_previous_kernel(self.pdl)
        own = [self._own(ctx, tensors, row, hop, first, row_bytes) for hop in self._hops()]
        exists = self._number(ctx, tensors, row, 0) < tensors.rows
        old = tensors.residual + Int64(row) * tensors.residual_pitch
        residual = self._payloads(old, first, pick(exists, row_bytes, Int64(0)))
        in_order, epoch = begin(ctx, block())
        epoch += 1
        row_bytes = pick(in_order, row_bytes, Int64(0))
        for k in cutlass.range_constexpr(self.cells):
            if first + k * step < row_bytes:
                for hop in cutlass.range_constexpr(1, self.world_size):
                    payload = own[hop if self.scatter else 0][k]
                    ll.send(ctx, epoch, ctx.neighbour(hop), k * self.threads + thread(), payload)
        got, arrived = ll.receive(ctx, epoch, first, row_bytes, None, self.threads, self.cells)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        place = (first, row_bytes, pick(exists & arrived, row_bytes, Int64(0)))
        self._norm(ctx, tensors, row, place, own[0], got, residual, weights)
        if in_order:
            end(ctx, block(), epoch)

    def _hops(self) -> list[int]:
        """How far on the ranks are whose rows are read here: with ``scatter`` all, else this one."""
        return list(range(self.world_size)) if self.scatter else [0]

    def _number(self, ctx: Context, tensors: NormArguments, row: Any, hop: int) -> Any:
        """Which row of the source is row ``row`` of the part that goes ``hop`` ranks on."""
        if not self.scatter:
            return row
        return ctx.neighbour(hop) * ((tensors.rows + (self.world_size - 1)) // self.world_size) + row

    def _own(self, ctx: Context, tensors: NormArguments, row: Any, hop: int, first: Any, row_bytes: Any) -> list[Any]:
        """The thread's payloads of that row; zeros if there is no such row."""
        number = self._number(ctx, tensors, row, hop)
        num_bytes = pick(number < tensors.rows, row_bytes, Int64(0))
        return self._payloads(tensors.source + Int64(number) * tensors.source_pitch, first, num_bytes)

    def _payloads(self, row: Any, first: Any, num_bytes: Any) -> list[Any]:
        step = self.threads * ll.PAYLOAD_BYTES
        return [ll.load_payload(row, first + k * step, num_bytes, self.dtype.itemsize) for k in range(self.cells)]

    def _norm(
        self, ctx: Context, tensors: NormArguments, row: Any, place: tuple[Any, Any, Any], own: list[Any], got: Any,
        residual: list[Any], weights: list[list[Any]],
    ) -> None:  # fmt: skip
        """Reduces, adds, norms and stores. ``place``: the first byte, the row's bytes, and how many of them are stored
        (0 where the row does not exist or has not arrived)."""
        (first, row_bytes, kept), step = place, self.threads * ll.PAYLOAD_BYTES
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        team = Team(threads=self.threads, cluster=self.cluster, scratch=shared_scratch(self.threads, self.cluster))
        values, new = [], []
        for k in range(self.cells):
            ordered = ll.in_rank_order(ctx.rank, own[k], got, k, self.cells, self.world_size)
            added, rounded = math.add_residual(math.sum_of(ordered), list(residual[k]))
            inside = first + k * step < row_bytes  # past the end cells hold anything
            values.append([pick(inside, t, Float32(0.0)) for t in added])
            new.append(rounded)
        squares = tree([tree([t * t for t in cell], add) for cell in values], add)
        inverse = inverse_root(team.combine(squares, add, 0), tensors.hidden, tensors.eps)
        scaled = [
            math.normalised(cell, inverse, [list(w[k]) for w in weights], tensors.weight_bias)
            for k, cell in enumerate(values)
        ]
        factor = None
        if self.quantize:
            peaks = tree([tree([magnitude(y) for y in cell], largest) for cell in scaled], largest)
            scale, factor = scale_of(team.combine(peaks, largest, 1))
            store(tensors.scales + Int64(row) * 4, [scale.bitcast(Uint32)], when=(first == 0) & (kept > 0))
        target = tensors.new_residual + Int64(row) * tensors.new_residual_pitch
        output = tensors.output + Int64(row) * tensors.output_pitch
        for k in range(self.cells):
            at, words = first + k * step, math.narrow(scaled[k], factor)
            ll.store_payload(target, at, kept, self.dtype.itemsize, new[k])
            if self.quantize:
                num = ll.PAYLOAD_BYTES // self.dtype.itemsize
                _store_float8(output, at // self.dtype.itemsize, kept // self.dtype.itemsize, words[0], num)
            else:
                ll.store_payload(output, at, kept, self.dtype.itemsize, words)


@cute.jit
def _store_float8(row: Int64, at: Int64, hidden: Int64, word: Uint32, num: cutlass.Constexpr) -> None:
    """``num`` elements from the low bytes of a word, up to the row's end."""
    if (row & (num - 1)) == 0 and at + num <= hidden:
        store_vector(row + at, [word], num)
    else:
        for i in cutlass.range_constexpr(num):
            if at + i < hidden:
                store_vector(row + at + i, [word >> Uint32(8 * i)], 1)
