"""What a reduction must give: the exact bits, and bounds around the float64 result.

**Exact.** ``emulate`` accumulates in rank order in the accumulator type and rounds once, with torch on the CPU: the
result must match bit for bit (any NaN for NaN).

**Bounds**, from first principles, not from the code under test. Let u_acc and u_dtype be the unit roundoffs (half the
distance of 1 to the next number) of accumulator and dtype, x the ranks' elements, γ_n = n·u_acc / (1 − n·u_acc), η half
the dtype's smallest subnormal and η_acc half the accumulator's. Recursive summation (Higham, Accuracy and Stability of
Numerical Algorithms, 4.2) has W − 1 roundings, and sums do not underflow; one rounding to the dtype follows::

    sum    |err| ≤ γ_{W−1} Σ|x| · (1 + u_dtype) + u_dtype |Σx| + η
    avg    |err| ≤ (γ_W Σ|x| / W + η_acc) · (1 + u_dtype) + u_dtype |Σx| / W + η
    prod   |err| ≤ (γ_{W−1} |Πx| + W η_acc) · (1 + u_dtype) + u_dtype |Πx| + η    if all partial products are normal
    max, min, all of integers: exact

Where dtype is its own accumulator nothing is rounded at the end: u_dtype and η are 0. float64 has no wider reference:
the reference obeys the same bound, so twice the bound separates the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symmcomm.schedule.dtypes import DType, Op

_E4M3_MAX = 448.0
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.float64}
_AWKWARD_SHARE = 0.15


class Bounds(NamedTuple):
    """Elementwise: where ``valid``, a result may differ from ``reference`` (float64) by at most ``tolerance``."""

    reference: Tensor
    tolerance: Tensor
    valid: Tensor


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers of the same size. All NaN of a float become one, so that equal means NaN = NaN."""
    if tensor.is_floating_point():
        nan = torch.tensor(float("nan"), dtype=torch.float32).to(tensor.dtype)
        tensor = torch.where(_wide(tensor).isnan(), nan, tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])


# Inputs.


def awkward_values(dtype: DType) -> list[float | int]:
    """Values at the edges of the dtype: NaN, infinities, signed zeros, subnormals, extremes."""
    if dtype is DType.bool:
        return [0, 1]
    if not dtype.is_floating_point:
        low, high = torch.iinfo(torch_dtype(dtype)).min, torch.iinfo(torch_dtype(dtype)).max
        return [low, high, low + 1, high - 1, 0, 1, -1 if low else 2]
    limits = torch.finfo(torch_dtype(dtype))
    subnormal = limits.smallest_normal * limits.eps
    edges = [limits.max, limits.smallest_normal, subnormal, 3 * subnormal, 1.0, 0.0]
    infinities = [] if dtype is DType.float8_e4m3fn else [float("inf"), float("-inf")]
    return [*edges, *(-edge for edge in edges), *infinities, float("nan")]


def make_input(rank: int, count: int, dtype: DType, seed: int, awkward: bool = True) -> Tensor:
    """``count`` elements of ``dtype``, a function of the arguments alone; about one in seven is an awkward value."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    kind = torch_dtype(dtype)
    if dtype.is_floating_point:
        wide = torch.float64 if dtype is DType.float64 else torch.float32
        values = torch.randn(count, generator=generator, dtype=wide).to(kind)
    else:
        low, high = (0, 2) if dtype is DType.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
        values = torch.randint(low, high, (count,), generator=generator, dtype=torch.int64).to(kind)
    if awkward and count:
        edges = torch.tensor(awkward_values(dtype), dtype=torch.float64 if dtype.is_floating_point else torch.int64)
        picks = edges.to(kind)[torch.randint(0, len(edges), (count,), generator=generator)]
        values = torch.where(torch.rand(count, generator=generator) < _AWKWARD_SHARE, picks, values)
    return values


# The exact bits.


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def narrow(accumulator: Tensor, dtype: DType) -> Tensor:
    """Rounds an accumulator to the dtype, to nearest even; float8_e4m3fn saturates (torch before 2.13 makes NaN of it),
    integers wrap."""
    if dtype is DType.float8_e4m3fn:
        accumulator = accumulator.clamp(-_E4M3_MAX, _E4M3_MAX)
    if dtype is DType.bool:
        accumulator = accumulator != 0
    return accumulator.to(torch_dtype(dtype))


def _larger(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x > y) | (x != x), x, y)


def _smaller(x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x < y) | (x != x), x, y)


_COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.sum: operator.add, Op.avg: operator.add, Op.prod: operator.mul, Op.max: _larger, Op.min: _smaller,
    Op.band: operator.and_, Op.bor: operator.or_, Op.bxor: operator.xor,
}  # fmt: skip
_OF_BOOL = {Op.sum: Op.bor, Op.max: Op.bor, Op.prod: Op.band, Op.min: Op.band}


def emulate(inputs: Sequence[Tensor], dtype: DType, op: Op) -> Tensor:
    """The reduction of the ranks' ``inputs`` with the bits that the library promises, as ``dtype``."""
    if len(inputs) == 1:
        return inputs[0].clone()
    total = widen(inputs[0], dtype)
    for tensor in inputs[1:]:
        total = combine_accumulators(total, widen(tensor, dtype), dtype, op)
    return finish_accumulator(total, len(inputs), dtype, op)


def widen(tensor: Tensor, dtype: DType) -> Tensor:
    """Elements as accumulators."""
    return _wide(tensor) if dtype.is_floating_point else tensor.to(torch.int64)


def combine_accumulators(x: Tensor, y: Tensor, dtype: DType, op: Op) -> Tensor:
    """``op`` of two accumulators."""
    return _COMBINE[_OF_BOOL.get(op, op) if dtype is DType.bool else op](x, y)


def finish_accumulator(total: Tensor, num: int, dtype: DType, op: Op) -> Tensor:
    """The result, as ``dtype``, from the accumulator of ``num`` ranks' elements."""
    if op is Op.avg:
        total = total / num if dtype.is_floating_point else torch.div(total, num, rounding_mode="trunc")
    return narrow(total, dtype)


# Bounds.


def bounds(inputs: Sequence[Tensor], dtype: DType, op: Op, accumulator: DType | None = None) -> Bounds:
    """The float64 result of a float reduction and how far from it the library's may be (formulas: this module).

    With an ``accumulator`` of its own: how far that of any implementation may be which rounds partial results to it. To
    average, it may scale its terms first, by a rounded 1 / W: γ_{W+1} in place of γ_W, and W underflows. The unit
    roundoff times W + 1 must be below 1.

    Not valid where an input is not finite, or where a partial result comes near the accumulator's limits.
    """
    world_size = len(inputs)
    info = torch.finfo(torch_dtype(dtype))
    own = DType.float64 if dtype is DType.float64 else DType.float32
    acc = torch.finfo(torch_dtype(own if accumulator is None else accumulator))
    rounds = info.bits != acc.bits
    u_acc, u_dtype = acc.eps / 2, info.eps / 2 if rounds else 0.0
    eta_acc, eta = acc.smallest_normal * acc.eps / 2, info.smallest_normal * info.eps / 2 if rounds else 0.0
    x = torch.stack([tensor.to(torch.float64) for tensor in inputs])
    magnitude, valid = x.abs().sum(0), x.isfinite().all(0)

    def gamma(n: int) -> float:
        return n * u_acc / (1 - n * u_acc)

    if op in (Op.max, Op.min):
        return Bounds(x.amax(0) if op is Op.max else x.amin(0), torch.zeros_like(magnitude), valid)
    if op is Op.prod:
        partial = x.cumprod(0)
        normal = (partial.abs() < acc.max / 2) & ((partial.abs() > acc.smallest_normal) | (partial == 0))
        exact = partial[-1]
        before = gamma(world_size - 1) * exact.abs() + world_size * eta_acc
        # A zero partial product may be one that float64 lost; it is exact where a factor is zero.
        valid = valid & normal.all(0) & ((exact != 0) | (x == 0).any(0))
    else:
        exact = x.sum(0)
        before = gamma(world_size - 1) * magnitude
        valid = valid & (magnitude < acc.max / 2)
        if op is Op.avg:
            more = 0 if accumulator is None else 1
            before = gamma(world_size + more) * magnitude / world_size + world_size**more * eta_acc
            exact = exact / world_size
    tolerance = before * (1 + u_dtype) + u_dtype * exact.abs() + eta
    return Bounds(exact, tolerance * (2 if dtype is DType.float64 else 1), valid)


def _outside(got: Tensor, allowed: Bounds, dtype: DType) -> Tensor:
    """Elements outside the bounds. What may round beyond the largest number may also be infinite, or saturate."""
    limit = torch.finfo(torch_dtype(dtype)).max
    value = got.to(torch.float64)
    low, high = allowed.reference - allowed.tolerance, allowed.reference + allowed.tolerance
    inside = (value >= low) & (value <= high)
    inside |= (high > limit) & (value >= limit) | (low < -limit) & (value <= -limit)
    return allowed.valid & ~inside


# Checks.


def check_bits(got: Tensor, expected: Tensor, what: str, *, signed_zeros: bool = True) -> None:
    """Raises AssertionError, with the first differing element, unless the tensors have the same bits (NaN = NaN).

    Without ``signed_zeros``, 0 and -0 are the same: which of them is the maximum, IEEE 754 left open until 2019, torch
    does, and processors differ.
    """
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype is expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    got, expected = got.contiguous().view(-1), expected.contiguous().view(-1)
    if torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        return
    differ = bits(got) != bits(expected)
    if not signed_zeros:
        differ &= (got.to(torch.float64) != 0) | (expected.to(torch.float64) != 0)
    wrong = differ.nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {got.numel()} elements differ, the first at {at}: "
            f"{got[at].item()!r}, expected {expected[at].item()!r}"
        )


def check_reduction(got: Tensor, inputs: Sequence[Tensor], dtype: DType, op: Op, what: str) -> None:
    """Raises AssertionError unless ``got`` is the reduction of ``inputs``: its bits, and within the bounds."""
    check_bits(got, emulate(inputs, dtype, op), what, signed_zeros=op not in (Op.max, Op.min))
    if not dtype.is_floating_point or len(inputs) == 1:
        return
    allowed = bounds(inputs, dtype, op)
    wrong = _outside(got, allowed, dtype).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {got.numel()} elements are out of bounds, the first at {at}: "
            f"{got[at].item()!r}, expected {allowed.reference[at].item()!r} ± {allowed.tolerance[at].item():.3g}"
        )
