"""What the doctor concludes from facts about GPUs that are made up here."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from symmcomm.doctor_gpu import GpuDiagnosis, chosen_path, reach, reach_table
from symmcomm.env import Settings
from symmcomm.probe_gpu import gpu_probes
from symmcomm.schedule.topology_gpu import Attempt, GpuFacts

YES, NO = Attempt(True, "it was tried"), Attempt(False, "CUDA_ERROR_NOT_PERMITTED")
VETO = Attempt(False, "forbidden by NCCL_NVLS_ENABLE=0; MULTICAST_SUPPORTED reads 1")


def fact(ordinal: int, peers: dict[str, Attempt], links: dict[str, int]) -> GpuFacts:
    return GpuFacts(
        device=YES, ordinal=ordinal, uuid=f"{ordinal}" * 8, name="Fake GPU", compute_capability=(9, 0), num_sms=132,
        total_bytes=80 << 30, cuda_vmm=YES, fabric=NO, cuda_ipc=YES, multicast=VETO, peers=peers, links=links,
    )


TWO = [fact(0, {"11111111": YES}, {"11111111": 18}), fact(1, {"00000000": YES}, {"00000000": 18})]


def test_the_path_of_two_gpus_and_what_was_refused() -> None:
    found = chosen_path(TWO, Settings())
    assert found["GPU ranks"] == (True, "2 × Fake GPU")
    assert found["GPU memory"] == (True, "cuda_vmm: it was tried")
    assert found["NVLink"].works
    assert found["NVLink multicast"] == (False, f"rank 0: {VETO.reason}")
    no_vmm = [replace(each, cuda_vmm=NO) for each in TWO]
    found = chosen_path(no_vmm, Settings())
    assert found["GPU memory by cuda_vmm"] == (False, f"rank 0: {NO.reason}")
    assert found["GPU memory by fabric"] == (False, f"rank 0: {NO.reason}")
    assert found["GPU memory"].reason == "cuda_ipc: it was tried"
    assert chosen_path(no_vmm, Settings(gpu_memory="cuda_vmm"))["GPU memory"] == (
        False, f"GPU memory cannot be shared: cuda_vmm: rank 0: {NO.reason}",
    )  # fmt: skip


def test_no_path_without_a_fitting_gpu() -> None:
    assert chosen_path([], Settings()) == {}
    old = [replace(TWO[0], compute_capability=(7, 0))]
    assert "compute capability 7.0, the kernels need 8.0" in chosen_path(old, Settings())["GPU ranks"].reason


def test_how_gpus_reach_each_other() -> None:
    apart = [TWO[0], replace(TWO[1], peers={"00000000": NO}, links={}), replace(TWO[1], uuid="2" * 8, links={})]
    assert reach(TWO) == [["-", "NV18"], ["NV18", "-"]]
    assert reach(apart) == [["-", "NV18", "?"], ["no", "-", "?"], ["P2P", "?", "-"]]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(reach_table(TWO))
    assert "NV18" in console.export_text()


def test_probes_and_json() -> None:
    probes = gpu_probes(TWO)
    assert "sm_90, 132 SMs, 80 GiB" in probes["GPU 1"].reason
    assert probes["GPU 1 fabric"] == NO
    assert probes["GPU 0 to 11111111"].reason.endswith("; 18 NVLinks")
    content = json.loads(json.dumps(GpuDiagnosis(TWO, probes).to_json()))
    assert content["devices"][1]["num_sms"] == 132
    assert content["reach"][0][1] == "NV18"
