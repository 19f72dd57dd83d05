"""A row and the threads that share it: residual added, RMS-normalised, rounded. What all norm kernels are made of.

With ``x`` the row (reduced over the ranks in float32, not rounded yet), ``r`` the residual's, ``w`` the weight::

    new residual  s = round(round(x) + r)                what all_reduce, then add leaves, to the bit
    values        t = x + r                              float32: s before any rounding
    output        y = round(t / sqrt(mean(t²) + eps) · (weight_bias + w) + bias)

So ``y`` is rounded once, where the separate kernels round three times. Without a residual ``t`` is ``x``. With
``multimem`` the switch returns ``x`` rounded. Rows of ``quantize`` kernels become float8_e4m3fn: ``scale = max|y| /
448`` (1 for a row of zeros), the output ``round(y / scale)``, of ``y`` in float32.

A thread holds vectors of 16 bytes, the vector ``index`` of a row being its elements from ``index · per_vector`` on.
``aligned`` kernels ask that every row starts on a 16-byte boundary and ends on one; the others move single elements.
Which of the two a rank takes is its own affair: what goes over the links are vectors, filled up with zeros.

Straight-line code, put together while a kernel is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from symmcomm.kernels.gpu.access import Access
from symmcomm.kernels.gpu.context import Context
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.multimem_instructions import multimem_st
from symmcomm.kernels.gpu.primitives import pick, store
from symmcomm.kernels.gpu.team import Team, add, largest, tree
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import VECTOR_BYTES

_FLOAT8_MAX = 448.0


class NormArguments(NamedTuple):
    """What every norm kernel gets. Addresses, or where a kernel says so offsets from the start of each rank's heap;
    pitches are bytes from row to row. What a kernel has no use for is 0."""

    source: Int64
    source_pitch: Int64
    residual: Int64
    residual_pitch: Int64
    new_residual: Int64
    new_residual_pitch: Int64
    output: Int64
    output_pitch: Int64
    scales: Int64  # f32[rows]
    weight: Int64
    bias: Int64
    rows: Int32
    hidden: Int32  # elements a row
    eps: Float32
    weight_bias: Float32


def placeholders() -> NormArguments:
    """For ``compile``."""
    zeros: list[Any] = [Int64(0)] * 11 + [Int32(0)] * 2 + [Float32(0.0)] * 2
    return NormArguments(*zeros)


@dataclass(frozen=True, kw_only=True)
class Math:
    """The formulas above, for lists of values and of their words. ``world_size`` ranks are reduced."""

    dtype: DType
    world_size: int
    arch: int
    quantize: bool = False

    @property
    def reduction(self) -> Reduction:
        return Reduction(self.dtype, Op.sum, self.world_size, self.arch)

    @property
    def per_vector(self) -> int:
        """Elements a vector."""
        return VECTOR_BYTES // self.dtype.itemsize

    def sum_of(self, ranks: list[list[Any]]) -> list[Any]:
        """Float32 sums of the ranks' words, in rank order."""
        total = self.reduction.widen(ranks[0])
        for words in ranks[1:]:
            total = self.reduction.combine(total, self.reduction.widen(words))
        return total

    def add_residual(self, sums: list[Any], residual: list[Any]) -> tuple[list[Any], list[Any]]:
        """The values t, and the words of the new residual."""
        rounded, old = self.reduction.widen(self.reduction.narrow(sums)), self.reduction.widen(residual)
        new = self.reduction.narrow([a + b for a, b in zip(rounded, old, strict=True)])
        return [a + b for a, b in zip(sums, old, strict=True)], new

    def normalised(self, values: list[Any], inverse: Any, weights: list[list[Any]], weight_bias: Any) -> list[Any]:
        """Values y, from the words of the weight and of the bias if there is one."""
        weight, *bias = (self.reduction.widen(words) for words in weights)
        scaled = [value * inverse * (w + weight_bias) for value, w in zip(values, weight, strict=True)]
        return [y + b for y, b in zip(scaled, bias[0], strict=True)] if bias else scaled

    def narrow(self, values: list[Any], factor: Any = None) -> list[Any]:
        """The output's words; with a ``factor`` (of ``quantize``) of float8."""
        if factor is None:
            return self.reduction.narrow(values)
        scaled = [value * factor for value in values]
        scaled += [Float32(0.0)] * (-len(scaled) % 4)
        return Reduction(DType.float8_e4m3fn, Op.sum, 1, self.arch).narrow(scaled)

    @property
    def output_itemsize(self) -> int:
        return 1 if self.quantize else self.dtype.itemsize

    def access(self, aligned: bool, hidden: Any) -> Access:
        """To rows of ``hidden`` elements."""
        return Access(itemsize=self.dtype.itemsize, per_vector=self.per_vector, aligned=aligned, hidden=hidden)


def inverse_root(squares: Any, hidden: Any, eps: Any) -> Any:
    """1 / sqrt(squares / hidden + eps), off by little more than half a unit: the hardware's and one step of Newton's,
    for which its own product is known exactly."""
    code = (
        "{\n.reg .f32 v, r, half, p, low, e, better;\n.reg .pred finite;\nrcp.rn.f32 v, {$r1};\n"
        "fma.rn.f32 v, {$r0}, v, {$r2};\nrsqrt.approx.f32 r, v;\nmul.rn.f32 p, v, r;\nneg.f32 low, p;\n"
        "fma.rn.f32 low, v, r, low;\nneg.f32 p, p;\nfma.rn.f32 e, p, r, 0f3F800000;\nneg.f32 low, low;\n"
        "fma.rn.f32 e, low, r, e;\nmul.rn.f32 half, r, 0f3F000000;\nfma.rn.f32 better, half, e, r;\n"
        "testp.finite.f32 finite, better;\nselp.f32 {$w0}, better, r, finite;\n}"
    )
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[squares, Float32(hidden), eps])


def magnitude(value: Any) -> Any:
    """|value|."""
    return (value.bitcast(Uint32) & Uint32(0x7FFFFFFF)).bitcast(Float32)


def scale_of(amax: Any) -> tuple[Any, Any]:
    """A row's scale, and the factor that divides by it: 448 / amax."""
    some, code = amax != Float32(0.0), "div.rn.f32 {$w0}, {$r0}, {$r1};"
    safe, most = pick(some, amax, Float32(_FLOAT8_MAX)), Float32(_FLOAT8_MAX)
    scale = inline_ptx(code, write_only_types=[Float32], read_only_args=[safe, most])
    return scale, inline_ptx(code, write_only_types=[Float32], read_only_args=[most, safe])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A team and what it does with rows: each thread has the vectors ``indices`` of one.

    ``held``: the words of weight and bias, if registers have room for them from row to row.
    """

    math: Math
    team: Team
    access: Access
    arguments: NormArguments
    indices: list[Any]
    bias: bool
    held: list[list[Any]] | None = None

    @classmethod
    def create(
        cls, math: Math, team: Team, indices: list[Any], aligned: bool, bias: bool, arguments: NormArguments
    ) -> Rows:
        """Rows for a team."""
        rows = cls(
            math=math, team=team, arguments=arguments,
            access=math.access(aligned, arguments.hidden), indices=indices, bias=bias,
        )  # fmt: skip
        return replace(rows, held=rows.weights(indices)) if len(indices) <= 2 else rows

    @property
    def turns(self) -> int:
        """Of the team, a row."""
        return 2 if self.math.quantize else 1

    def weights(self, indices: list[Any]) -> list[list[Any]]:
        """The words of the weight, and of the bias if there is one, for those vectors."""
        given = self.arguments
        addresses = [given.weight, given.bias] if self.bias else [given.weight]
        return [[w for i in indices for w in self.access.load(address, i, given.rows > 0)] for address in addresses]

    def write(
        self, values: list[list[Any]], live: Any, turn: Any, outputs: list[Any], scales: list[Any],
        multicast: Any = None, weights: list[list[Any]] | None = None,
    ) -> None:  # fmt: skip
        """Norms the row whose vectors have the values t. ``outputs``: where it goes; ``scales``: where its scale goes;
        ``multicast``: the multicast address that stands for all outputs, of aligned rows; ``weights``: what the method
        of that name gives, if the caller has it. All of the team call it."""
        weights = weights or self.held
        squares = tree([tree([t * t for t in vector], add) for vector in values], add)
        inverse = inverse_root(self.team.combine(squares, add, turn), self.arguments.hidden, self.arguments.eps)
        scaled = []
        for v, (i, vector) in enumerate(zip(self.indices, values, strict=True)):
            words = [w[4 * v : 4 * v + 4] for w in weights] if weights else self.weights([i])
            scaled.append(self.math.normalised(vector, inverse, words, self.arguments.weight_bias))
            if not self.math.quantize:
                self._store(i, self.math.narrow(scaled[v]), live, outputs, multicast)
        if self.math.quantize:
            peaks = [tree([magnitude(y) for y in vector], largest) for vector in scaled]
            scale, factor = scale_of(self.team.combine(tree(peaks, largest), largest, turn + 1))
            for address in scales:
                store(address, [scale.bitcast(Uint32)], when=live & (self.indices[0] == 0))
            for i, vector in zip(self.indices, scaled, strict=True):
                self._store(i, self.math.narrow(vector, factor), live, outputs, None)

    def _store(self, index: Any, words: list[Any], live: Any, outputs: list[Any], multicast: Any) -> None:
        if multicast is not None:
            multimem_st(multicast + Int64(index) * VECTOR_BYTES, words, when=live & self.access.inside(index))
            return
        target = replace(self.access, itemsize=self.math.output_itemsize)
        for output in outputs:
            target.store(output, index, words, live)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How ``num_rows`` rows of a source are divided among the ranks: all get all, or with ``scatter`` each its part."""

    ctx: Context
    num_rows: Any
    scatter: bool

    @property
    def part_rows(self) -> Any:
        """Rows that every rank gets, the last ranks' excepted."""
        size = self.ctx.world_size
        return (self.num_rows + (size - 1)) // size if self.scatter else self.num_rows

    def locate(self, hop: int, row: Any) -> tuple[Any, Any]:
        """A row of the part of the rank ``hop`` further on: its number in the source, and whether there is one."""
        number = self.ctx.neighbour(hop) * self.part_rows + row if self.scatter else row
        return number, (row < self.part_rows) & (number < self.num_rows)
