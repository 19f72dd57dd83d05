"""Why peers on GPUs refuse, and what NVSHMEM is asked for; nothing runs on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from symmcomm.bench import gpu_peers, nvshmem_calls
from symmcomm.bench.case import Case, Collective
from symmcomm.bench.gpu_peers import NcclSymm, Refused, TorchSymmMem
from symmcomm.bench.implementations import Buffers
from symmcomm.bench.nvshmem_calls import Nvshmem
from symmcomm.schedule.dtypes import DType, Op

CPU = torch.device("cpu")


def case(
    collective: Collective = Collective.all_reduce, dtype: DType = DType.bfloat16, op: Op = Op.sum, size: int = 1024
) -> Case:
    return Case(collective=collective, size_bytes=size, dtype=dtype, op=op, world_size=2)


@pytest.fixture
def _a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(WORLD=SimpleNamespace(group_name="0"))
    monkeypatch.setattr(gpu_peers, "dist", SimpleNamespace(group=group))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.mark.usefixtures("_a_group")
def test_torch_has_sums_of_two_dtypes() -> None:
    peer = TorchSymmMem("two_shot", CPU, print)
    assert peer.refusal(case()) is None
    assert "one- and two-shot forms of all_reduce only" in (peer.refusal(case(Collective.all_gather)) or "")
    assert "no sum of float16" in (peer.refusal(case(dtype=DType.float16)) or "")
    assert "no max of bfloat16" in (peer.refusal(case(op=Op.max)) or "")
    assert "multiple of 4 bytes" in (peer.refusal(case(size=1022)) or "")


@pytest.mark.usefixtures("_a_group")
def test_windows_need_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = NcclSymm(CPU, print)
    monkeypatch.setattr(gpu_peers, "nccl_version", lambda: (2, 26, 2))
    assert peer.refusal(case()) == "NCCL 2.26.2 has no symmetric windows (2.27 and later have)"
    monkeypatch.setattr(gpu_peers, "nccl_version", lambda: (2, 28, 9))
    assert peer.refusal(case()) is None
    assert peer.refusal(case(op=Op.bxor, dtype=DType.int32)) == "nccl has no bxor for int32"
    assert peer.refusal(case(Collective.all_to_all, DType.float8_e4m3fn)) is None, "bytes are moved"


class FakeComm:
    """Two ranks, of which this is 1."""

    rank, world_size = 1, 2

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload and b"\7" * len(payload), payload]


class FakeCore:
    """``nvshmem.core``: says what it was asked for."""

    def __init__(self) -> None:
        self.Teams = SimpleNamespace(TEAM_WORLD="world")
        self.asked: list[tuple[Any, ...]] = []
        self.identity = SimpleNamespace(_data=np.zeros(2, dtype=np.int64))

    def get_unique_id(self, empty: bool) -> Any:
        assert empty, "rank 0 alone makes one"
        return self.identity

    def bytetensor(self, shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.asked.append((name, arguments, named))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    fake = FakeCore()
    cuda_core: Any = ModuleType("cuda.core")
    cuda_core.Device = lambda index: SimpleNamespace(set_current=lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.core", cuda_core)
    monkeypatch.setitem(sys.modules, "nvshmem.core", fake)
    monkeypatch.setattr(nvshmem_calls.importlib.util, "find_spec", lambda name: object())
    for name in ("NVSHMEM_DISABLE_NVLS", "SYMMCOMM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "1")
    return fake


def made() -> Any:
    return nvshmem_calls.implementation(FakeComm(), CPU)  # type: ignore[arg-type]


def test_nvshmem_says_why_it_is_not_measured(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    assert made().refusal(case()) == "it is measured with NVSHMEM_DISABLE_NVLS=1 only"
    monkeypatch.setattr(nvshmem_calls.importlib.util, "find_spec", lambda name: None)
    assert made().refusal(case()) == "nvshmem4py is not installed (extra: nvshmem)"


def test_nvshmem_that_cannot_be_loaded_is_refused_on_all_ranks(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    peer = made()
    assert isinstance(peer, Refused)
    assert "nvshmem4py cannot be imported on rank" in (peer.refusal(case()) or "")


def test_nvshmem_is_asked_for_the_right_call(core: FakeCore) -> None:
    peer = made()
    assert isinstance(peer, Nvshmem)
    assert core.identity._data.tobytes() == b"\7" * 16, "rank 0's identity"
    assert core.asked.pop()[2]["initializer_method"] == "uid"
    names = {
        Collective.all_reduce: "reduce", Collective.reduce_scatter: "reducescatter", Collective.all_gather: "fcollect",
        Collective.all_to_all: "alltoall", Collective.broadcast: "broadcast",
    }  # fmt: skip
    for collective, name in names.items():
        of_case = case(collective)
        assert peer.refusal(of_case) is None
        buffers = peer.buffers(of_case, lambda: pytest.fail("it has memory of its own"))
        assert (buffers.input.numel(), buffers.output.numel()) == (of_case.input_numel(1), of_case.output_numel(1))
        peer.call(of_case, buffers)()
        found, (team, got, given, *op), _ = core.asked.pop()
        assert (found, team) == (name, "world")
        assert (got.data_ptr(), given.data_ptr()) == (buffers.output.data_ptr(), buffers.input.data_ptr())
        assert op == (["sum"] if collective.reduces else [])
        peer.release()
        assert [name for name, *_ in core.asked] == ["free_tensor"] * (1 if collective.in_place else 2)
        core.asked.clear()
    assert peer.refusal(case(Collective.gather)) == "nvshmem4py has no gather"
    assert peer.refusal(case(op=Op.prod)) == "nvshmem4py has no prod of bfloat16"


def test_a_refused_peer_is_never_called() -> None:
    peer = Refused("not here")
    assert peer.refusal(case()) == "not here"
    with pytest.raises(AssertionError, match="not here"):
        peer.call(case(), Buffers(torch.zeros(1), torch.zeros(1)))
