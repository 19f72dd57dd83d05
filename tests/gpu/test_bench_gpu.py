"""``symmcomm bench`` and ``symmcomm doctor`` on real GPUs: what they write is whole and right. Multicast stays off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from symmcomm.bench.case import Collective, cases
from symmcomm.bench.method import Device, Method, Timing
from symmcomm.bench.run import start_teams
from symmcomm.bench.timing import measure
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.testing.launch import launch_command

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="no CUDA device")]
NEEDS_TWO = pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU only")
FORBID_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "SYMMCOMM_DISABLE_MULTICAST": "1",
}  # fmt: skip
OWN = ["symm", "symm_heap"]
WAYS = {
    "virtual_ranks": Method(device=Device.cuda, timing=Timing.graph, virtual_ranks=2),
    "processes": Method(device=Device.cuda, timing=Timing.graph, share_gpu=NUM_GPUS < 2),
}
SIZES = ["-b", "1K", "-e", "16M", "-f", "128"]  # 1 KiB, 128 KiB, 16 MiB


@pytest.fixture(autouse=True)
def _no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FORBID_MULTICAST.items():
        monkeypatch.setenv(name, value)


def symmcomm(*arguments: str) -> str:
    done = launch_command([sys.executable, "-m", "symmcomm", *arguments], timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bench(path: Path, *arguments: str) -> dict[str, Any]:
    said = symmcomm("bench", *arguments, "-d", "bfloat16", "--device", "cuda", "--rounds", "3", "--json", str(path))
    assert "# floor = " in said
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["floor"]["launch_us"] > 0
    assert content["floor"]["bandwidth"] > 1
    return content


@NEEDS_TWO
@pytest.mark.alone
def test_a_run_with_peers(tmp_path: Path) -> None:
    names = ["nccl", "nccl_symm", "torch_one_shot", "torch_two_shot", "nvshmem"]
    content = bench(tmp_path / "run.json", "all_reduce", *SIZES, "--peers", ",".join(names))
    results = content["results"]
    assert [(entry["size_bytes"], entry["implementation"]) for entry in results] == [
        (1024 * 128**step, name) for step in range(3) for name in OWN + names
    ]
    for entry in results:
        measured = entry["implementation"] in (*OWN, "nccl", "torch_two_shot")
        assert entry["wrong"] == 0 if measured else entry["wrong"] in (0, None), entry
        if entry["wrong"] is None:
            assert entry["refusal"]
            continue
        assert entry["time_us"] > 0.5 * entry["floor_us"], "faster than the floor by half: it was not measured right"
        assert entry["host_us"] is None
    assert content["floor"]["launch_us"] < 20
    assert 0 < content["floor"]["signal_us"] < 100
    assert len(content["machine"]["gpus"]) == content["machine"]["ranks"] == 2
    assert content["method"] == {
        "device": "cuda", "timing": "graph", "cold_l2": False, "virtual_ranks": 0, "share_gpu": False,
    }  # fmt: skip


@NEEDS_TWO
def test_eager_calls(tmp_path: Path) -> None:
    arguments = ("broadcast", "-b", "64K", "-e", "64K", "--timing", "eager", "--peers", "nccl")
    results = bench(tmp_path / "run.json", *arguments)["results"]
    assert [(entry["implementation"], entry["wrong"]) for entry in results] == [(name, 0) for name in [*OWN, "nccl"]]
    assert all(entry["time_us"] >= entry["host_us"] > 0 for entry in results)


@NEEDS_TWO
@pytest.mark.alone
def test_cold_l2(tmp_path: Path) -> None:
    for cold in bench(tmp_path / "run.json", "all_reduce", "-b", "16M", "-e", "16M", "--cold-l2")["results"]:
        assert cold["wrong"] == 0
        assert cold["time_us"] > 0.8 * cold["floor_us"], "the flush is taken off, and no more than it"


@pytest.mark.alone
def test_virtual_ranks_are_labelled(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    content = bench(path, "all_reduce", *SIZES, "--virtual-ranks", "4", "--peers", "nccl")
    assert content["floor"]["launch_us"] < 20
    found = [(entry["implementation"], entry["wrong"]) for entry in content["results"]]
    assert found == 3 * [("symm", 0), ("symm_heap", 0), ("nccl", None)]
    assert "nccl: n/a, virtual ranks run symmcomm's kernels only" in content["notes"]
    assert content["method"]["virtual_ranks"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_collective(way: str) -> None:
    """Between virtual ranks, and between processes that share a GPU where there is one only. One team measures all: it
    takes longer to start than to measure."""
    method = WAYS[way]
    (team,) = start_teams([], 2, {}, method)
    try:
        for collective in Collective:
            if collective is Collective.barrier and method.virtual_ranks:
                continue  # they have one host
            for case in cases(collective, 64 << 10, 1 << 20, 16, DType.bfloat16, Op.sum, 2):
                symm, symm_heap = measure([team], case, 3, lambda _: None, method)
                assert (symm.wrong, len(symm.round_us)) == (0, 3), symm
                assert symm_heap.wrong == 0 or symm_heap.refusal, symm_heap
        team.close()
    finally:
        team.kill()


def test_the_doctor_sees_the_gpus() -> None:
    found = json.loads(symmcomm("doctor", "--json", "--device", "cuda", "--nproc", str(min(NUM_GPUS, 2))))
    assert len(found["gpus"]["devices"]) == NUM_GPUS
    assert found["paths"]["GPU memory"]["status"] == "possible"
    assert found["paths"]["multicast"]["reason"].startswith("forbidden by SYMMCOMM_DISABLE_MULTICAST=1")
    assert found["paths"]["NVLink multicast"]["status"] == "refused"
    assert found["ranks"]["status"] == "possible", found["ranks"]["reason"]
    assert "GPU memory by" in found["ranks"]["reason"]
