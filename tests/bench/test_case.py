"""Sizes, counts and bandwidth factors: the arithmetic of nccl-tests."""

from __future__ import annotations

import pytest

from symmcomm.bench.case import Case, Collective, cases
from symmcomm.errors import ArgumentError
from symmcomm.schedule.dtypes import DType, Op


def make(collective: Collective, size_bytes: int = 1024, world_size: int = 4) -> Case:
    return Case(
        collective=collective, size_bytes=size_bytes, dtype=DType.float32, op=Op.sum, world_size=world_size
    )


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        (Collective.all_reduce, 1.5), (Collective.reduce_scatter, 0.75), (Collective.all_gather, 0.75),
        (Collective.all_to_all, 0.75), (Collective.gather, 0.75), (Collective.scatter, 0.75), (Collective.broadcast, 1),
        (Collective.reduce, 1), (Collective.send_recv, 1),
    ],
)  # fmt: skip
def test_bus_factor(collective: Collective, factor: float) -> None:
    assert make(collective).bus_factor == factor


@pytest.mark.parametrize(
    ("collective", "count", "given", "got"),
    [
        (Collective.all_reduce, 256, (256, 256), (256, 256)), (Collective.reduce_scatter, 64, (256, 256), (64, 64)),
        (Collective.all_gather, 64, (64, 64), (256, 256)), (Collective.all_to_all, 64, (256, 256), (256, 256)),
        (Collective.gather, 64, (64, 64), (256, 0)), (Collective.scatter, 64, (256, 0), (64, 64)),
        (Collective.send_recv, 256, (256, 256), (256, 256)),
    ],
)  # fmt: skip
def test_counts(collective: Collective, count: int, given: tuple[int, int], got: tuple[int, int]) -> None:
    case = make(collective)
    assert case.count == count
    assert (case.input_numel(0), case.input_numel(3)) == given
    assert (case.output_numel(0), case.output_numel(3)) == got


def sizes(collective: Collective, begin: int, end: int, factor: float, dtype: DType, world_size: int) -> list[int]:
    return [case.size_bytes for case in cases(collective, begin, end, factor, dtype, Op.sum, world_size)]


def test_sizes_grow_by_the_factor() -> None:
    assert sizes(Collective.all_reduce, 1024, 8192, 2, DType.float32, 4) == [1024, 2048, 4096, 8192]
    assert sizes(Collective.all_reduce, 1024, 5000, 2, DType.float32, 4) == [1024, 2048, 4096]


def test_sizes_are_whole_elements_of_every_rank() -> None:
    assert sizes(Collective.all_reduce, 1002, 1002, 2, DType.float32, 3) == [1000]
    assert sizes(Collective.all_gather, 1000, 1000, 2, DType.float32, 3) == [996]
    assert sizes(Collective.all_gather, 1, 8, 2, DType.float64, 2) == [16], "never nothing, and no size twice"


def test_a_barrier_has_one_size() -> None:
    assert sizes(Collective.barrier, 1, 1 << 20, 2, DType.float32, 2) == [0]


@pytest.mark.parametrize(
    ("begin", "end", "factor", "named"),
    [(2048, 1024, 2, "2048"), (0, 8, 2, "from 0"), (8, 16, 1, "factor 1"), (1, 1 << 20, 1.001, "1000 sizes")],
)
def test_no_sequence_of_sizes(begin: int, end: int, factor: float, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        sizes(Collective.all_reduce, begin, end, factor, DType.float32, 2)


def test_json_round_trip() -> None:
    case = make(Collective.reduce)
    assert Case.from_json(case.to_json()) == case
