"""Probes on a fake machine: what they find, and that they neither raise nor leave anything behind."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import INVALID, FakeDriver, Machine

from symmcomm import probe_gpu
from symmcomm.doctor_gpu import examine_gpus
from symmcomm.env import Settings
from symmcomm.probe_gpu import probe_driver, probe_facts
from symmcomm.schedule.topology_gpu import GpuFacts, decide_provider


def name_of(number: int) -> str:
    return str(uuid.UUID(bytes=bytes([number] * 16)))


class FakeNvml:
    """Three GPUs: the first two joined by 4 links, the third out of reach."""

    NVML_NVLINK_MAX_LINKS, NVML_P2P_STATUS_OK = 18, 0
    NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = 1, 2

    def __init__(self) -> None:
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return [f"GPU-{name_of(number)}" for number in range(3)].index(name)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return f"GPU-{name_of(handle)}".encode()

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, index: int) -> int:  # noqa: N802
        if handle == other:
            raise ValueError("invalid argument")
        return 0 if {handle, other} == {0, 1} else 4

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= 6:
            raise ValueError("no such link")
        return int(link < 4)


def test_facts_of_a_machine_where_everything_works() -> None:
    driver, nvml = FakeDriver(Machine(), num_devices=2), FakeNvml()
    facts = probe_facts(0, Settings(), driver, nvml)
    assert facts.device.works
    assert (facts.name, facts.compute_capability, facts.num_sms) == ("Fake GPU", (9, 0), 132)
    assert facts.uuid == name_of(0)
    assert facts.granularity_bytes == 2 << 20
    assert "by a descriptor, mapped twice, written and read" in facts.cuda_vmm.reason
    assert "by a fabric handle" in facts.fabric.reason
    assert facts.cuda_ipc.works
    assert {peer: attempt.works for peer, attempt in facts.peers.items()} == {name_of(1): True, name_of(2): False}
    assert facts.links == {name_of(1): 4, name_of(2): 0}
    assert nvml.opened == 0
    assert (driver.mappings, driver.reservations, driver.machine.memories) == ({}, {}, {})
    assert not [name for name in driver.calls if name.startswith("cuMulticast")]
    assert GpuFacts.from_json(facts.to_json()) == facts
    assert decide_provider([facts]).provider == "cuda_vmm"


def test_attributes_are_hints_and_attempts_decide() -> None:
    machine = Machine(attributes={"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0})
    driver = FakeDriver(machine)
    driver.failures["cuMemExportToShareableHandle"] = (0, INVALID)  # as where no IMEX channel is present
    facts = probe_facts(0, Settings(), driver, FakeNvml())
    assert facts.cuda_vmm == (False, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED reads 0")
    assert facts.fabric == (False, "CudaError: cuMemExportToShareableHandle failed: CUDA_ERROR_INVALID_VALUE")
    assert decide_provider([facts]).provider == "cuda_ipc"


def test_no_call_that_fails_makes_a_probe_raise_or_leak() -> None:
    calls = FakeDriver(Machine())
    probe_facts(0, Settings(), calls, FakeNvml())
    for name in sorted(set(calls.calls) - {"cuCtxPopCurrent", "cuMemUnmap", "cuMemAddressFree", "cuMemFree"}):
        for number in range(calls.calls.count(name)):
            driver = FakeDriver(Machine())
            driver.failures[name] = (number, INVALID)
            facts = probe_facts(0, Settings(), driver, FakeNvml())
            assert isinstance(facts, GpuFacts)
            if name not in ("cuCtxSynchronize", "cuCtxPushCurrent", "cuMemRelease"):  # there the driver itself is lost
                assert not driver.mappings, (name, number)


def test_without_nvml_the_driver_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise OSError("no NVML")

    facts = probe_facts(0, Settings(), FakeDriver(Machine(), num_devices=2), Broken())
    assert list(facts.peers) == [name_of(1)]
    assert (facts.links, facts.mig, facts.fabric_domain) == ({}, False, "")


def test_a_disagreement_between_two_mappings_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDriver, "_cuMemsetD32", lambda *_: None)
    facts = probe_facts(0, Settings(), FakeDriver(Machine()), FakeNvml())
    assert "wrote 0x53594d4d through one mapping, read 0x0" in facts.cuda_vmm.reason


@pytest.mark.parametrize(("hip", "cuda", "reason"), [("6.2", None, "built for ROCm"), (None, None, "without CUDA")])
def test_torch_of_another_vendor_is_named(monkeypatch: pytest.MonkeyPatch, hip: Any, cuda: Any, reason: str) -> None:
    monkeypatch.setattr(probe_gpu.torch, "version", SimpleNamespace(hip=hip, cuda=cuda))
    assert reason in probe_driver().reason
    assert list(examine_gpus(Settings()).attempts) == ["CUDA driver"]
    assert not probe_facts(0, Settings()).device.works
