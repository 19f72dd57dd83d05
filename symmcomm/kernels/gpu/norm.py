"""RMSNorm of rows on one GPU, with the residual added first where there is one; and QK-norm, of many short rows.

Formulas in ``norm_row``. A CTA takes every grid-th row (or group of rows), reads each once, and keeps it in registers
between the sum and the output; the weight stays in registers throughout. Outputs may be the inputs: a thread has read
its vectors of all of them before it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from symmcomm.kernels.gpu.context import after_previous_kernel, block, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Rows, inverse_root, placeholders
from symmcomm.kernels.gpu.primitives import opaque, pick
from symmcomm.kernels.gpu.team import Team, add, tree
from symmcomm.schedule.dtypes import DType


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """The kernel. Attributes:

        threads: that share a row: a power of two up to 32, or whole warps.
        rows: of a CTA at a time; 1 if a row has more than a warp.
        vectors: of 16 bytes a thread: ``threads · vectors`` must hold a row.
        aligned: all rows of all tensors are whole 16-byte vectors at 16-byte boundaries (float8 output: at boundaries
            of what a vector becomes).
        residual, bias, quantize: whether there are; see ``norm_row``.
        pdl: launched with programmatic dependent launch (sm_90 up): the weight must be older than the kernel before.
    """

    dtype: DType
    arch: int
    threads: int
    rows: int
    vectors: int
    aligned: bool
    residual: bool = False
    bias: bool = False
    quantize: bool = False
    pdl: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (placeholders(), Int32(1))

    @cute.jit
    def __call__(self, tensors: NormArguments, grid: Int32, stream: cuda.CUstream) -> None:
        """Any ``grid``."""
        self.kernel(tensors).launch(
            grid=(grid, 1, 1), block=(self.threads * self.rows, 1, 1), use_pdl=self.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: NormArguments) -> None:
        math = Math(dtype=self.dtype, world_size=1, arch=self.arch, quantize=self.quantize)
        indices = [thread() % self.threads + v * self.threads for v in range(self.vectors)]
        rows = Rows.create(math, Team.create(self.threads), indices, self.aligned, self.bias, tensors)
        after_previous_kernel(self.pdl)
        first, turn = block() * self.rows, Int32(0)
        while first < opaque(Int64(tensors.rows)):
            row = first + thread() // self.threads  # past the last one a team goes along
            live = row < tensors.rows
            output = tensors.output + Int64(row) * tensors.output_pitch
            scale = tensors.scales + Int64(row) * 4
            rows.write(self._values(rows, row, live), live, turn, [output], [scale])
            first += cute.arch.grid_dim()[0] * self.rows
            turn += rows.turns

    def _values(self, rows: Rows, row: Any, live: Any) -> list[list[Any]]:
        """The values t of the thread's vectors; the new residual is stored. As many loads in flight as fit."""
        tensors, math, access = rows.arguments, rows.math, rows.access
        source = tensors.source + Int64(row) * tensors.source_pitch
        old = tensors.residual + Int64(row) * tensors.residual_pitch
        new = tensors.new_residual + Int64(row) * tensors.new_residual_pitch
        values, batch = [], 2 if self.threads > 512 else 4
        for some in (rows.indices[v : v + batch] for v in range(0, self.vectors, batch)):
            loaded = [access.load(source, i, live) for i in some]
            olds = [access.load(old, i, live) for i in some] if self.residual else []
            sums = [math.sum_of([words]) for words in loaded]
            for i, x, r in zip(some, sums, olds, strict=False):
                t, rounded = math.add_residual(x, r)
                access.store(new, i, rounded, live)
                values.append(t)
            if not self.residual:
                values += sums
        return values


class QKNormArguments(NamedTuple):
    """Addresses of the first head; pitches are bytes from token to token and from head to head."""

    query: Int64
    query_pitch: Int64
    query_head_pitch: Int64
    key: Int64
    key_pitch: Int64
    key_head_pitch: Int64
    query_output: Int64
    query_output_pitch: Int64
    query_output_head_pitch: Int64
    key_output: Int64
    key_output_pitch: Int64
    key_output_head_pitch: Int64
    query_weight: Int64
    key_weight: Int64
    tokens: Int32
    query_heads: Int32
    key_heads: Int32
    eps: Float32
    weight_bias: Float32


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """RMSNorm of every head of queries and keys in one launch: ``head_dim`` elements over ``lanes`` threads of a warp,
    ``vectors`` each. A team of lanes has one head, of ``tokens`` tokens, all their loads in flight together.

    Attributes: ``warps`` a CTA; ``aligned`` and ``pdl`` as of ``RMSNorm``.
    """

    dtype: DType
    arch: int
    head_dim: int
    lanes: int
    vectors: int
    tokens: int
    warps: int
    aligned: bool
    pdl: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        zeros: list[Any] = [Int64(0)] * 14 + [Int32(0)] * 3 + [Float32(0.0)] * 2
        return (QKNormArguments(*zeros),)

    @cute.jit
    def __call__(self, tensors: QKNormArguments, stream: cuda.CUstream) -> None:
        """As many CTAs as there are heads and tokens for."""
        teams = 32 * self.warps // self.lanes
        heads, tokens = tensors.query_heads + tensors.key_heads, tensors.tokens
        self.kernel(tensors).launch(
            grid=((tokens + (self.tokens - 1)) // self.tokens, (heads + (teams - 1)) // teams, 1),
            block=(32 * self.warps, 1, 1), use_pdl=self.pdl, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: QKNormArguments) -> None:
        math = Math(dtype=self.dtype, world_size=1, arch=self.arch)
        access, t = math.access(self.aligned, Int32(self.head_dim)), tensors
        indices = [thread() % self.lanes + v * self.lanes for v in range(self.vectors)]
        head = cute.arch.block_idx()[1] * (32 * self.warps // self.lanes) + thread() // self.lanes
        is_query = head < t.query_heads
        number = Int64(pick(is_query, head, head - t.query_heads))
        weight = pick(is_query, t.query_weight, t.key_weight)
        source = pick(is_query, t.query, t.key) + number * pick(is_query, t.query_head_pitch, t.key_head_pitch)
        pitch = pick(is_query, t.query_pitch, t.key_pitch)
        tokens = [block() * self.tokens + k for k in range(self.tokens)]
        live = [(head < t.query_heads + t.key_heads) & (token < t.tokens) for token in tokens]
        weights = [w for i in indices for w in access.load(weight, i, live[0])]
        after_previous_kernel(self.pdl)
        loaded = [
            [access.load(source + Int64(token) * pitch, i, here) for i in indices]
            for token, here in zip(tokens, live, strict=True)
        ]
        output = pick(is_query, t.query_output, t.key_output)
        output += number * pick(is_query, t.query_output_head_pitch, t.key_output_head_pitch)
        pitch = pick(is_query, t.query_output_pitch, t.key_output_pitch)
        for words, here, token in zip(loaded, live, tokens, strict=True):
            values = [math.sum_of([w]) for w in words]
            squares = [tree([x * x for x in vector], add) for vector in values]
            total = Team(threads=self.lanes).combine(tree(squares, add), add, 0)
            inverse = inverse_root(total, self.head_dim, t.eps)
            for v, (i, vector) in enumerate(zip(indices, values, strict=True)):
                scaled = math.normalised(vector, inverse, [weights[4 * v : 4 * v + 4]], t.weight_bias)
                access.store(output + Int64(token) * pitch, i, math.narrow(scaled), here)
