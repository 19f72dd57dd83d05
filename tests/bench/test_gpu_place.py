"""A rank of the benchmark on a fake GPU: the flow of a run, without figures that mean anything."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.implementations import Buffers
from symmcomm.bench.method import Device, Method, Timing
from symmcomm.errors import PeerTimeoutError
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout, MessageLayout

pytest.importorskip("cutlass")

import fake_gpu

from symmcomm.bench.rank import Ranks
from symmcomm.kernels.gpu.limits import Empty, Push

GRAPH = Method(device=Device.cuda, timing=Timing.graph)
METHODS = [
    GRAPH, Method(device=Device.cuda, timing=Timing.eager),
    Method(device=Device.cuda, timing=Timing.graph, cold_l2=True),
]


def case(collective: Collective = Collective.all_reduce, size_bytes: int = 4096) -> Case:
    return Case(collective=collective, size_bytes=size_bytes, dtype=DType.bfloat16, op=Op.sum, world_size=1)


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return fake_gpu.install(monkeypatch)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_run_on_a_gpu(made: list[Any], method: Method) -> None:
    ranks = Ranks(["symm", "symm_heap"], method)
    (answer,) = ranks.ask({"do": "describe"})
    assert (answer["gpu"], answer["path"], answer["right"]) == ("Fake GPU", "cuda_vmm", True)
    for name in ("symm", "symm_heap"):
        for collective in (Collective.all_reduce, Collective.all_gather, Collective.scatter):
            prepare = {"do": "prepare", "implementation": name, "case": case(collective).to_json()}
            assert ranks.ask(prepare) == [{"wrong": 0}]
        (answer,) = ranks.ask({"do": "time", "implementation": name, "iterations": 3})
        if method.timing is Timing.eager:
            assert answer["seconds"] >= answer["host_seconds"] > 0
        else:
            assert answer["seconds"] == pytest.approx(0 if method.cold_l2 else 1e-3)
    assert made[0].gpu.launched[0] == ("barrier",), "compiled before anything is timed"
    ranks.close()


def test_limits_are_asked_for_in_graphs(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from symmcomm.bench import gpu_floor

    monkeypatch.setattr(gpu_floor, "torch", fake_gpu.FakeTorch())
    monkeypatch.setattr(gpu_floor, "PUSH_BYTES", 1 << 20)
    ranks = Ranks(["symm"], GRAPH)
    (limits,) = ranks.ask({"do": "limits"})
    assert limits["launch_us"] == pytest.approx(3000 / 200)
    assert limits["signal_us"] == 0, "there is nobody to signal"
    assert limits["bandwidth"] == pytest.approx((1 << 20) / (3e-3 / 4 - 3e-3 / 200) / 1e9)
    kernels = [type(kernel) for kernel, *_ in made[0].gpu.launched]
    assert kernels.count(Empty) == 201
    assert kernels.count(Push) == 5
    ranks.close()


def test_cold_calls_come_behind_a_flush_and_a_barrier() -> None:
    from symmcomm.bench.gpu_timing import ColdTimer, Lane

    done: list[str] = []
    lane = Lane(stream=None, align=lambda: done.append("align"))  # type: ignore[arg-type]
    timer = ColdTimer([lane], [lambda: done.append("call")], lambda: done.append("flush"))
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu.install(patch)
        timer.time(2)
    graph = ["flush", "align", "call"] * 2
    without = ["flush", "align"] * 2
    assert done == [*graph, "align", *without, "align", "align", "align"]


def test_an_error_of_a_peer_is_a_refusal_and_an_error_of_ours_is_none(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from symmcomm.bench.gpu_place import GpuPlace
    from symmcomm.bench.implementations import Symm

    class Broken(Symm):
        def call(self, case: Case, buffers: Any) -> Any:
            raise RuntimeError("NCCL error: unhandled")

    monkeypatch.setattr(GpuPlace, "_make", lambda self, name: Broken(self.comm, symmetric=False))
    ranks = Ranks(["nccl", "symm"], GRAPH)
    prepare = {"do": "prepare", "implementation": "nccl", "case": case().to_json()}
    assert ranks.ask(prepare) == [{"refusal": "RuntimeError: NCCL error: unhandled"}]
    with pytest.raises(RuntimeError, match="unhandled"):
        ranks.ask(prepare | {"implementation": "symm"})
    made[0].close()


def test_a_virtual_rank_has_what_the_calls_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the launch, on memory of the CPU."""
    from symmcomm.bench import virtual_place
    from symmcomm.bench.virtual_place import VirtualRank, VirtualSymm

    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(virtual_place, "compiled", lambda kernel, arch: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(VirtualRank, "run", lambda self, function, *arguments: function(*arguments))
    stride = MessageLayout.create(2).end + (8 << 20)
    memory = torch.zeros(2 * stride, dtype=torch.uint8)
    world = SimpleNamespace(
        world_size=2, base=memory.data_ptr(), stride=stride, layout=Layout.create(2), num_sms=66, arch="sm_90a",
        arch_number=90, records=torch.zeros(2, 8, dtype=torch.int32),
        bytes=lambda rank, offset, count: memory[rank * stride + offset :][:count],
    )  # fmt: skip
    world.record = lambda rank: "a record"
    rank = VirtualRank(world, 1, torch.device("cpu"))  # type: ignore[arg-type]
    rank.ordinal = torch.zeros(1).get_device()
    for symmetric in (False, True):
        symm = VirtualSymm(rank, symmetric)
        for collective in sorted({*Collective} - {Collective.barrier}):
            for size_bytes in (1 << 10, 2 << 20):
                of_case = replace(case(collective, size_bytes), world_size=2)
                assert symm.refusal(of_case) is None
                buffers = symm.buffers(of_case, lambda of=of_case: Buffers.allocate(of, 1, zeros))
                if symmetric and collective not in (Collective.gather, Collective.scatter):
                    assert rank.symmetric_offset(buffers.input) >= 0
                launched.clear()
                symm.call(of_case, buffers)()
                assert launched, (collective, size_bytes)
                symm.release()
    assert "do not fit into a virtual rank" in (symm.refusal(case(size_bytes=1 << 30)) or "")
    world.records[1][0] = 1
    with pytest.raises(PeerTimeoutError, match="virtual rank 1"):
        rank.check()
