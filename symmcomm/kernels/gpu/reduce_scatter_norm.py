"""Reduce-scatter, residual, RMSNorm and all-gather of rows on symmetric memory, in one kernel, as TokenWeave has it.

Formulas in ``norm_row``. Rank r has rows r · c up to (r + 1) · c, c = ⌈rows / world_size⌉. Barrier; it fetches them
from all ranks' sources and adds them up in rank order, adds the residual, norms, and writes the rows into all ranks'
outputs; barrier. Nobody but rank r touches its rows between the two, and a thread has read its vectors of a row
everywhere before it writes them: so outputs may be the sources. The first barrier says that the peers' sources are
there and their outputs free, the second ends the reading and makes what was written visible: a rank's kernel is done
when all its channels have passed. As few CTAs as one likes do it, so it can run beside a matrix product.

Parts of it: without ``reduce`` the source is the rank's own rows, anywhere (norm and all-gather); without ``gather``
the output is (reduce-scatter and norm). The residual is the rank's own rows, and stays sharded; with ``replicate`` it
is all rows, and the new one is written to all ranks. With ``multimem`` the switch reduces and distributes: its sum
arrives rounded, and the order of it is its own, but one rank fetches each element, so ranks still agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from symmcomm.kernels.gpu import multimem as switch
from symmcomm.kernels.gpu.barrier import sync
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.multimem_instructions import multimem_st
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Rows, placeholders
from symmcomm.kernels.gpu.primitives import opaque, pick
from symmcomm.kernels.gpu.team import Team
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import VECTOR_BYTES, Layout, Phase


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rank's rows, with the addresses of a running kernel."""

    ctx: Context
    rows: Rows
    multicast_base: Any
    first: Any
    num: Any
    reduce: bool
    gather: bool
    residual: bool
    replicate: bool
    multimem: bool

    def addresses(self, offset: Any, row: Any, pitch: Any) -> list[Any]:
        """Of a row on all ranks, this one first: their stores start at different peers."""
        ctx = self.ctx
        return [ctx.peer_address(ctx.neighbour(hop), offset + Int64(row) * pitch) for hop in range(ctx.world_size)]

    def load(self, row: Any, live: Any) -> tuple[list[list[list[Any]]], list[list[Any]]]:
        """The vectors of the rank's row from all sources, in rank order, and of its residual: all in flight."""
        given, access, indices = self.rows.arguments, self.rows.access, self.rows.indices
        number = self.first + row
        if self.reduce and self.multimem:
            address = self.multicast_base + given.source + Int64(number) * given.source_pitch
            sums = [
                switch.ld_reduce(
                    self.rows.math.reduction, address + Int64(i) * VECTOR_BYTES, VECTOR_BYTES,
                    when=live & access.inside(i),
                )
                for i in indices
            ]  # fmt: skip
            loaded = [[words] for words in sums]
        elif self.reduce:
            sources = [
                self.ctx.peer_address(peer, given.source + Int64(number) * given.source_pitch)
                for peer in range(self.ctx.world_size)
            ]
            loaded = [[access.load(source, i, live, "relaxed") for source in sources] for i in indices]
        else:
            own = given.source + Int64(row) * given.source_pitch
            loaded = [[access.load(own, i, live)] for i in indices]
        if not self.residual:
            return loaded, []
        old = given.residual + Int64(number if self.replicate else row) * given.residual_pitch
        return loaded, [access.load(old, i, live) for i in indices]

    def finish(self, row: Any, live: Any, turn: Any, loaded: list[list[list[Any]]], old: list[list[Any]]) -> None:
        """Adds, norms and stores the rank's row."""
        given, math = self.rows.arguments, self.rows.math
        number = self.first + row
        sums = [math.sum_of(ranks) for ranks in loaded]
        if self.multimem and self.reduce:  # where there is no such vector, there are no zeros either
            inside = [live & self.rows.access.inside(i) for i in self.rows.indices]
            sums = [[pick(here, x, Float32(0.0)) for x in vector] for here, vector in zip(inside, sums, strict=True)]
        values = sums
        if self.residual:
            added = [math.add_residual(x, r) for x, r in zip(sums, old, strict=True)]
            values = [t for t, _ in added]
            self._store_residual(row, live, [words for _, words in added])
        multicast = None
        if self.gather:
            outputs, scales = self.addresses(given.output, number, given.output_pitch), []
            if math.quantize:
                scales = self.addresses(given.scales, number, Int64(4))
            elif self.multimem:
                multicast = self.multicast_base + given.output + Int64(number) * given.output_pitch
        else:
            outputs = [given.output + Int64(row) * given.output_pitch]
            scales = [given.scales + Int64(row) * 4]
        self.rows.write(values, live, turn, outputs, scales, multicast)

    def _store_residual(self, row: Any, live: Any, vectors: list[list[Any]]) -> None:
        given, access, number = self.rows.arguments, self.rows.access, self.first + row
        if self.replicate and self.multimem:
            address = self.multicast_base + given.new_residual + Int64(number) * given.new_residual_pitch
            for i, words in zip(self.rows.indices, vectors, strict=True):
                multimem_st(address + Int64(i) * VECTOR_BYTES, words, when=live & access.inside(i))
            return
        targets = [given.new_residual + Int64(row) * given.new_residual_pitch]
        if self.replicate:
            targets = self.addresses(given.new_residual, number, given.new_residual_pitch)
        for target in targets:
            for i, words in zip(self.rows.indices, vectors, strict=True):
                access.store(target, i, words, live)


@dataclass(frozen=True, kw_only=True)
class ReduceScatterNorm:
    """The kernel. Attributes:

        threads: a CTA, whole warps. vectors: of 16 bytes a thread, ``threads · vectors`` hold a row.
        batch: rows that a CTA has in flight.
        reduce, gather, residual, replicate: see above; ``replicate`` asks for ``reduce`` and ``gather``.
        multimem: whether the switch moves data; ``aligned`` rows only, and ``multicast_base`` must be one.
        aligned, bias, quantize, pdl: as of ``RMSNorm``; rows must start on the same boundaries on all ranks.
    """

    dtype: DType
    world_size: int
    arch: int
    threads: int
    vectors: int
    batch: int
    aligned: bool
    reduce: bool = True
    gather: bool = True
    residual: bool = True
    replicate: bool = False
    bias: bool = False
    quantize: bool = False
    multimem: bool = False
    pdl: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), placeholders(), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, tensors: NormArguments, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """Offsets from the start of each rank's heap are: ``source`` with ``reduce``, ``output`` and ``scales`` with
        ``gather``, ``new_residual`` with ``replicate``. ``grid``: CTAs that fit the device at once."""
        self.kernel(base, stride, rank, multicast_base, tensors).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, use_pdl=self.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, multicast_base: Int64, tensors: NormArguments) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        indices = [thread() + v * self.threads for v in range(self.vectors)]
        rows = Rows.create(math, Team.create(self.threads), indices, self.aligned, self.bias, tensors)
        per_rank = (tensors.rows + (self.world_size - 1)) // self.world_size
        first = rank * per_rank
        left = tensors.rows - first
        shard = Shard(
            ctx=ctx, rows=rows, multicast_base=multicast_base, first=first, num=pick(left < per_rank, left, per_rank),
            reduce=self.reduce, gather=self.gather, residual=self.residual, replicate=self.replicate,
            multimem=self.multimem,
        )  # fmt: skip
        after_previous_kernel(self.pdl)
        in_order, epoch = begin(ctx, block())
        if in_order:
            if sync(ctx, block(), epoch + 1, Phase.enter, True):
                self._all(shard)
                sync(ctx, block(), epoch + 2, Phase.leave, False)
            end(ctx, block(), epoch + 2)

    @cute.jit
    def _all(self, shard: cutlass.Constexpr) -> None:
        """The CTA's share of the rank's rows, ``batch`` at a time."""
        row, turn, step = Int64(block()), Int32(0), cute.arch.grid_dim()[0]
        while row < opaque(Int64(shard.num)):
            self._batch(shard, row, turn, step)
            row += self.batch * step
            turn += self.batch * shard.rows.turns

    def _batch(self, shard: Shard, row: Any, turn: Any, step: Any) -> None:
        those = [Int32(row) + k * step for k in range(self.batch)]
        loaded = [shard.load(i, i < shard.num) for i in those]
        for k, (i, (words, old)) in enumerate(zip(those, loaded, strict=True)):
            shard.finish(i, i < shard.num, turn + k * shard.rows.turns, words, old)
