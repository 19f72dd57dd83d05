"""The oracle accepts what is right and counts what is not."""

from __future__ import annotations

import pytest
import torch

from symmcomm.bench import oracle
from symmcomm.bench.case import Case, Collective, cases
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import bounds, torch_dtype

WORLD = 3
REDUCTIONS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]


def make(collective: Collective, size_bytes: int, dtype: DType = DType.float32, op: Op = Op.sum) -> Case:
    return cases(collective, size_bytes, size_bytes, 2, dtype, op, WORLD)[0]


def inputs(case: Case) -> list[torch.Tensor]:
    """What every rank gives."""
    given = [torch.empty(case.input_numel(rank), dtype=torch_dtype(case.dtype)) for rank in range(WORLD)]
    for rank, tensor in enumerate(given):
        oracle.fill(tensor, case, rank)
    return given


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_sources_fit_the_dtype(dtype: DType, op: Op) -> None:
    source = oracle.source(dtype, op, 2)
    assert torch.equal(source.to(torch_dtype(dtype)).to(source.dtype), source)
    assert not torch.equal(source, oracle.source(dtype, op, 1))


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating_point], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", [Op.sum, Op.avg, Op.prod])
def test_sources_are_where_the_bounds_hold(dtype: DType, op: Op) -> None:
    sources = [oracle.source(dtype, op, rank).to(torch_dtype(dtype)) for rank in range(64)]
    assert bounds(sources, dtype, op).valid.all()
    if dtype.itemsize > 1:
        assert bounds(sources, dtype, op, accumulator=dtype).valid.all()


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.float16])
@pytest.mark.parametrize("op", [Op.sum, Op.prod])
def test_plain_arithmetic_is_within_the_tolerance(dtype: DType, op: Op) -> None:
    case = make(Collective.all_reduce, 200_000, dtype, op)
    total, *others = inputs(case)
    for other in others:
        total = total + other if op is Op.sum else total * other
    segments = oracle.expected(case, 0)
    assert oracle.num_wrong(total, segments) == 0
    total[-7:] *= 1.5
    assert oracle.num_wrong(total, segments) == 7


def test_integers_wrap() -> None:
    case = make(Collective.all_reduce, 1000, DType.int8, Op.prod)
    one, two, three = inputs(case)
    assert oracle.num_wrong(one * two * three, oracle.expected(case, 1)) == 0


def test_average_of_integers_truncates() -> None:
    values = [oracle.source(DType.int32, Op.avg, rank) for rank in range(WORLD)]
    expected, _ = oracle.reduction(DType.int32, Op.avg, WORLD)
    assert torch.equal(expected, (sum(values) / WORLD).trunc().to(torch.int64))  # type: ignore[union-attr]


def outputs(case: Case) -> list[torch.Tensor]:
    """What every rank must get, put together in another way than the oracle does."""
    given, count = inputs(case), case.count
    match case.collective:
        case Collective.reduce_scatter:
            return list(torch.stack(given).double().sum(0).float().chunk(WORLD))
        case Collective.all_gather | Collective.gather:
            return [torch.cat(given)] * WORLD
        case Collective.all_to_all:
            return [torch.cat([part[rank * count :][:count] for part in given]) for rank in range(WORLD)]
        case Collective.scatter:
            return list(given[0].chunk(WORLD))
        case Collective.send_recv:
            return [given[rank - 1] for rank in range(WORLD)]
        case _:
            return [given[0]] * WORLD


@pytest.mark.parametrize("collective", sorted({*Collective} - {Collective.all_reduce, Collective.barrier}))
@pytest.mark.parametrize("size_bytes", [12, 1000, 300_000])
def test_expected_of_every_collective(collective: Collective, size_bytes: int) -> None:
    case = make(collective, size_bytes)
    got = outputs(case) if collective is not Collective.reduce else [torch.stack(inputs(case)).sum(0)] * WORLD
    for rank in range(WORLD):
        segments = oracle.expected(case, rank)
        if collective in (Collective.reduce, Collective.gather) and rank > 0:
            assert not segments
            continue
        assert sum(segment.count for segment in segments) == case.output_numel(rank)
        assert oracle.num_wrong(got[rank], segments) == 0
        if size_bytes >= 1000:
            assert oracle.num_wrong(got[rank].roll(1), segments) > case.output_numel(rank) // 2


def test_nan_and_poison_are_wrong() -> None:
    case = make(Collective.all_reduce, 1000)
    tensor = torch.full((250,), torch.nan)
    assert oracle.num_wrong(tensor, oracle.expected(case, 0)) == 250
    oracle.poison(tensor)
    assert oracle.num_wrong(tensor, oracle.expected(case, 0)) == 250
