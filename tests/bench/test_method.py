"""Which method the options ask for on which machine, and the floor that figures are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.floor import Floor
from symmcomm.bench.method import ON_CPUS, Device, Machine, Method, Timing, choose, num_ranks
from symmcomm.errors import ArgumentError
from symmcomm.schedule.dtypes import DType, Op

NONE, ONE, TWO = (Machine(num_gpus=0, obstacle="torch finds no GPU here"), Machine(num_gpus=1), Machine(num_gpus=2))
GRAPH = Method(device=Device.cuda, timing=Timing.graph)


def chosen(machine: Machine, **options: Any) -> Method:
    """What options that are not named leave to their defaults."""
    given: dict[str, Any] = {
        "device": None, "timing": None, "cold_l2": False, "share_gpu": False, "virtual_ranks": 0,
    } | options  # fmt: skip
    return choose(machine, **given)


def test_the_device_follows_from_the_machine_and_the_options() -> None:
    assert chosen(NONE) == ON_CPUS
    assert chosen(ONE) == ON_CPUS, "one GPU has nobody to talk to"
    assert chosen(TWO) == GRAPH
    assert chosen(TWO, device=Device.cpu) == ON_CPUS
    assert chosen(Machine(num_gpus=2, obstacle="no CuTe DSL")) == ON_CPUS
    assert chosen(ONE, virtual_ranks=4).virtual_ranks == 4
    assert chosen(ONE, share_gpu=True).device is Device.cuda
    assert chosen(TWO, timing=Timing.eager).timing is Timing.eager


BAD_CHOICES = [
    (NONE, {"device": Device.cuda}, "--device cuda: torch finds no GPU here"),
    (NONE, {"virtual_ranks": 2}, "--virtual-ranks: torch finds no GPU here"),
    (TWO, {"device": Device.cpu, "cold_l2": True}, "--cold-l2 is for GPUs, and --device is cpu"),
    (TWO, {"cold_l2": True, "timing": Timing.eager}, "--cold-l2 needs --timing graph"),
    (TWO, {"virtual_ranks": 2, "share_gpu": True}, "--virtual-ranks and --share-gpu exclude each other"),
]


@pytest.mark.parametrize(("machine", "options", "message"), BAD_CHOICES)
def test_what_excludes_each_other_is_named(machine: Machine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        chosen(machine, **options)


def test_ranks() -> None:
    shared, virtual = chosen(ONE, share_gpu=True), chosen(ONE, virtual_ranks=3)
    assert num_ranks(GRAPH, TWO, None, None) == 2
    assert num_ranks(GRAPH, TWO, 1, None) == 1
    assert num_ranks(GRAPH, TWO, None, 2) == 2
    assert num_ranks(shared, ONE, None, None) == 2
    assert num_ranks(shared, TWO, 8, None) == 8
    assert num_ranks(virtual, ONE, None, None) == num_ranks(virtual, ONE, 3, None) == 3
    with pytest.raises(ArgumentError, match="4 ranks on 2 GPUs: --share-gpu"):
        num_ranks(GRAPH, TWO, 4, None)
    with pytest.raises(ArgumentError, match="4 ranks on 2 GPUs: --share-gpu"):
        num_ranks(GRAPH, TWO, None, 4)
    with pytest.raises(ArgumentError, match="--nproc 2 and --virtual-ranks 3 differ"):
        num_ranks(virtual, ONE, 2, None)
    with pytest.raises(ArgumentError, match="a launcher started 2"):
        num_ranks(virtual, ONE, None, 2)


@pytest.mark.parametrize("method", [ON_CPUS, GRAPH, chosen(TWO, timing=Timing.eager, share_gpu=True)], ids=str)
def test_a_method_travels_as_json(method: Method) -> None:
    assert Method.from_json(method.to_json()) == method


def test_calls_of_a_round() -> None:
    assert [ON_CPUS.calls(seconds) for seconds in (1.0, 1e-3, 0.0)] == [3, 20, 50_000]
    assert [GRAPH.calls(seconds) for seconds in (1e-3, 1e-4, 2e-6)] == [3, 10, 50]
    assert [chosen(TWO, timing=Timing.eager).calls(seconds) for seconds in (1e-2, 1e-4, 2e-6)] == [3, 50, 300]


def test_headings() -> None:
    assert str(chosen(TWO, cold_l2=True)) == "CUDA graphs, cold L2"
    assert "4 VIRTUAL ranks on one GPU (no link in between)" in str(chosen(ONE, virtual_ranks=4))
    assert str(chosen(TWO, share_gpu=True, timing=Timing.eager)) == "eager calls, ranks share GPUs"


FLOOR = Floor(launch_us=0.64, signal_us=1.22, bandwidth=364.0)


def case(collective: Collective, size_bytes: int, world_size: int) -> Case:
    return Case(
        collective=collective, size_bytes=size_bytes, dtype=DType.bfloat16, op=Op.sum, world_size=world_size
    )


@pytest.mark.parametrize(
    ("collective", "world_size", "wire"),
    [
        (Collective.all_reduce, 2, 32e6), (Collective.all_reduce, 4, 48e6), (Collective.reduce_scatter, 2, 16e6),
        (Collective.all_gather, 4, 24e6), (Collective.all_to_all, 2, 16e6), (Collective.broadcast, 4, 32e6),
        (Collective.barrier, 2, 0),
    ],
)  # fmt: skip
def test_floor(collective: Collective, world_size: int, wire: float) -> None:
    size = 0 if collective is Collective.barrier else 32_000_000
    assert FLOOR.us(case(collective, size, world_size)) == pytest.approx(0.64 + 1.22 + wire / 364e3)


def test_one_rank_is_floored_by_its_launch() -> None:
    assert FLOOR.us(case(Collective.all_reduce, 1 << 20, 1)) == 0.64


def test_the_slowest_rank_gives_the_floor() -> None:
    one = {"launch_us": 0.6, "signal_us": 1.3, "bandwidth": 360.0}
    other = {"launch_us": 0.7, "signal_us": 1.2, "bandwidth": 370.0}
    floor = Floor.of_ranks([one, other])
    assert floor == Floor(0.7, 1.3, 360.0)
    assert "0.70 us launch + 1.30 us signal + size x factor / 360 GB/s" in str(floor)
    assert Floor.of_ranks([{}, {}]) is None
