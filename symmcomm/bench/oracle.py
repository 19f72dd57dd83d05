"""What each rank puts in, and what must come out; the arithmetic is that of ``testing.oracle``.

Element i of rank r is ``source(r)[i mod PERIOD]``. Reductions are element by element, so the result has the same
period, and the oracle costs one period at any size. PERIOD is a prime: a block in the wrong place does not match.

Tolerance: the bounds there, which hold for sums in any order; or those of a peer that rounds every partial result to
the dtype, where they are wider. No peer reduces 8-bit floats. All but float arithmetic must be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from symmcomm.bench.case import ROOT, Case, Collective
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.testing.oracle import bounds, emulate, torch_dtype

PERIOD = 16_381
_CHUNK = 64 * PERIOD


@dataclass(frozen=True)
class Segment:
    """``count`` elements of an output: one period of values and of tolerances, read from element ``start`` on."""

    values: Tensor
    tolerances: Tensor
    start: int
    count: int


@lru_cache(maxsize=256)
def source(dtype: DType, op: Op, rank: int) -> Tensor:
    """One period of the rank's elements: values that the dtype holds exactly, as float64 or int64."""
    generator = torch.Generator().manual_seed(1 + rank)
    if dtype is DType.bool:
        return torch.randint(0, 2, (PERIOD,), generator=generator)
    if not dtype.is_floating_point:
        low, high = (0, 16) if dtype is DType.uint8 else (-8, 8)
        return torch.randint(low, high, (PERIOD,), generator=generator)
    values = torch.rand(PERIOD, generator=generator, dtype=torch.float64) * 2 - 1
    if op is Op.prod:  # near one, so that no dtype overflows
        values = torch.sign(values) * (1 + values / 10)
    return values.to(torch_dtype(dtype)).to(torch.float64)


@lru_cache(maxsize=16)
def reduction(dtype: DType, op: Op, world_size: int) -> tuple[Tensor, Tensor]:
    """One period of the reduction over all ranks, and of the tolerance."""
    inputs = [source(dtype, op, rank).to(torch_dtype(dtype)) for rank in range(world_size)]
    if not dtype.is_floating_point:
        return emulate(inputs, dtype, op).to(torch.int64), torch.zeros(PERIOD, dtype=torch.float64)
    allowed = bounds(inputs, dtype, op)
    if dtype.itemsize == 1:
        return allowed.reference, allowed.tolerance
    return allowed.reference, allowed.tolerance.maximum(bounds(inputs, dtype, op, accumulator=dtype).tolerance)


def _cycle(period: Tensor, start: int, count: int, device: torch.device) -> Tensor:
    """The periods, read from ``start`` on, that one chunk of ``count`` elements needs."""
    return period.roll(-start % PERIOD).to(device).repeat(-(-min(count, _CHUNK) // PERIOD))


def fill(tensor: Tensor, case: Case, rank: int) -> None:
    """Writes the rank's elements, from element 0 on."""
    cycle = _cycle(source(case.dtype, case.op, rank), 0, tensor.numel(), tensor.device)
    for at in range(0, tensor.numel(), _CHUNK):
        part = tensor[at : at + _CHUNK]
        part.copy_(cycle[: part.numel()])


def poison(tensor: Tensor) -> None:
    """Overwrites what an earlier, right result may have left behind."""
    tensor.view(torch.uint8).fill_(0 if tensor.dtype is torch.bool else 0x5A)


def expected(case: Case, rank: int) -> list[Segment]:
    """What the output of ``rank`` must hold, from its first element on; empty where the output is not defined."""
    exact = torch.zeros(PERIOD, dtype=torch.float64)

    def whole(start: int, count: int) -> list[Segment]:
        return [Segment(*reduction(case.dtype, case.op, case.world_size), start, count)]

    def of(sender: int, start: int, count: int) -> Segment:
        return Segment(source(case.dtype, case.op, sender), exact, start, count)

    ranks, count = range(case.world_size), case.count
    match case.collective:
        case Collective.all_reduce:
            return whole(0, count)
        case Collective.reduce_scatter:
            return whole(rank * count, count)
        case Collective.reduce:
            return whole(0, count) if rank == ROOT else []
        case Collective.all_gather:
            return [of(sender, 0, count) for sender in ranks]
        case Collective.gather:
            return [of(sender, 0, count) for sender in ranks] if rank == ROOT else []
        case Collective.all_to_all:
            return [of(sender, rank * count, count) for sender in ranks]
        case Collective.broadcast:
            return [of(ROOT, 0, count)]
        case Collective.scatter:
            return [of(ROOT, rank * count, count)]
        case Collective.send_recv:
            return [of((rank - 1) % case.world_size, 0, count)]
        case _:
            return []


def num_wrong(output: Tensor, segments: list[Segment]) -> int:
    """Elements of ``output`` outside the tolerance; a NaN is wrong."""
    wrong, position = 0, 0
    for segment in segments:
        values = _cycle(segment.values, segment.start, segment.count, output.device)
        tolerances = _cycle(segment.tolerances, segment.start, segment.count, output.device)
        for at in range(0, segment.count, _CHUNK):
            num = min(_CHUNK, segment.count - at)
            got = output[position + at : position + at + num].to(values.dtype)
            wrong += num - int(((got - values[:num]).abs() <= tolerances[:num]).sum())
        position += segment.count
    return wrong
