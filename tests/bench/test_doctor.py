"""The doctor's probes: they try, they never raise, they say why."""

from __future__ import annotations

import io
import os

import pytest
from rich.console import Console

from symmcomm import doctor
from symmcomm.doctor import PROBES, Probe, Status, examine, probe_memfd, probe_multicast, tables


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_gives_a_status_and_a_reason(name: str) -> None:
    probe = PROBES[name]()
    assert isinstance(probe.status, Status)
    assert probe.reason


@pytest.mark.parametrize("name", ["memfd", "descriptor passing", "abstract sockets", "pidfd", "futex", "Numba cache"])
def test_what_symmcomm_needs_is_possible_here(name: str) -> None:
    assert PROBES[name]().status is Status.possible


def test_an_error_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(f"no {name} here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert probe_memfd() == Probe(Status.refused, "PermissionError: no symmcomm-doctor here")


@pytest.mark.parametrize(
    "variable",
    [
        "SYMMCOMM_DISABLE_MULTICAST=1", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NCCL_NVLS_ENABLE=0",
        "NVSHMEM_DISABLE_NVLS=1",
    ],
)
def test_multicast_names_the_variable_that_forbids_it(variable: str) -> None:
    name, value = variable.split("=")
    assert probe_multicast({name: value}) == Probe(Status.refused, f"forbidden by {variable}")
    assert probe_multicast({name: str(1 - int(value))}).status is not Status.refused


def test_ranks_agree() -> None:
    diagnosis = examine(nproc=2)
    assert diagnosis.ranks is not None
    assert diagnosis.healthy, diagnosis.ranks.reason
    assert "2 ranks agree: bootstrap TCP store" in diagnosis.ranks.reason
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables(diagnosis):
        console.print(table)
    assert "2 ranks agree" in console.export_text()


def test_ranks_that_fail_make_the_doctor_unhappy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    probe = doctor.probe_ranks(2)
    assert probe.status is Status.refused
    assert "rank 0" in probe.reason
