"""``symmcomm doctor``: what was found, which paths are possible, and why the others are refused.

Each ``probe_*`` tries one thing and never raises: an error is the reason of a refusal.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from rich.table import Table

from symmcomm.bench.machine import hardware
from symmcomm.bench.method import ON_CPUS, Method
from symmcomm.bench.mpi_installations import find_mpis
from symmcomm.bench.plot import bytes_text
from symmcomm.bench.report import versions
from symmcomm.bench.team import SpawnedTeam
from symmcomm.doctor_gpu import GpuDiagnosis, examine_gpus, reach_table
from symmcomm.env import Settings, multicast_vetoes
from symmcomm.errors import SymmCommError, in_words
from symmcomm.kernels.cache import gpu_folder
from symmcomm.kernels.compile import cache_folder
from symmcomm.memory import private
from symmcomm.schedule.topology_gpu import Attempt


class Status(StrEnum):
    """What a probe found."""

    possible = "possible"
    refused = "refused"
    absent = "absent"


class Probe(NamedTuple):
    """A status and its reason."""

    status: Status
    reason: str


def _never_raises(probe: Callable[..., Probe]) -> Callable[..., Probe]:
    @functools.wraps(probe)
    def guarded(*args: Any) -> Probe:
        try:
            return probe(*args)
        except Exception as error:  # whatever it is, it is the reason
            return Probe(Status.refused, in_words(error))

    return guarded


@_never_raises
def probe_memfd() -> Probe:
    """Anonymous shared memory that leaves nothing behind: the heap."""
    fd = os.memfd_create("symmcomm-doctor")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as one, mmap.mmap(fd, mmap.PAGESIZE) as other:
            one[:4] = b"symm"
            seen = other[:4]
    finally:
        os.close(fd)
    if seen != b"symm":
        return Probe(Status.refused, "two mappings of one memfd differ")
    return Probe(Status.possible, "written through one mapping, read through another")


@_never_raises
def probe_descriptor_passing() -> Probe:
    """A descriptor, with credentials, over a Unix socket: how ranks come to map each other's memory."""
    server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fd = os.memfd_create("symmcomm-doctor")
    try:
        os.write(fd, b"symm")
        socket.send_fds(server, [b"x"], [fd])
        _, received, _, _ = socket.recv_fds(client, 1, 1)
        seen = os.pread(received[0], 4, 0)
        os.close(received[0])
        pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    finally:
        os.close(fd)
        server.close()
        client.close()
    if seen != b"symm" or pid != os.getpid():
        return Probe(Status.refused, f"descriptor read {seen!r}, peer's pid {pid}, expected b'symm', {os.getpid()}")
    return Probe(Status.possible, "SCM_RIGHTS and SO_PEERCRED over a socket pair")


@_never_raises
def probe_abstract_socket() -> Probe:
    """Unix sockets whose name is no file: ranks meet there."""
    name = f"\0symmcomm-doctor-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen(1)
        client.connect(name)
    return Probe(Status.possible, "bound, listened and connected")


@_never_raises
def probe_pidfd() -> Probe:
    """Descriptors of processes: how the death of a peer is noticed at once."""
    os.close(os.pidfd_open(os.getpid()))
    return Probe(Status.possible, "pidfd_open of this process")


@_never_raises
def probe_futex() -> Probe:
    """Sleeping in the kernel on a shared word, when ranks outnumber cores."""
    number = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
    if number is None:
        return Probe(Status.refused, f"no system call number known for {platform.machine()}")
    libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_uint32(0)
    if libc.syscall(number, ctypes.byref(word), 1, 1, None, None, 0) < 0:  # FUTEX_WAKE of one
        return Probe(Status.refused, os.strerror(ctypes.get_errno()))
    return Probe(Status.possible, f"system call {number}")


@_never_raises
def probe_single_copy() -> Probe:
    """Reading another process's memory: how large ordinary tensors are moved with one copy in place of two."""
    script = "import ctypes\nb = ctypes.create_string_buffer(b'symm')\nprint(ctypes.addressof(b), flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        seen = private.read(child.pid, int(child.stdout.readline()), 4)
        child.kill()
    if seen != b"symm":
        return Probe(Status.refused, f"process_vm_readv read {seen!r} in place of b'symm'")
    return Probe(Status.possible, "process_vm_readv of a child; ranks try each other at init")


@_never_raises
def probe_numba_cache() -> Probe:
    """Where compiled kernels are kept; without it every start compiles for seconds."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return Probe(Status.possible, f"{folder} is writable")


@_never_raises
def probe_gpus() -> Probe:
    """NVIDIA GPUs, through nvidia-ml-py."""
    if importlib.util.find_spec("pynvml") is None:
        return Probe(Status.absent, "nvidia-ml-py is not installed")
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        names = [nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        driver = nvml.nvmlSystemGetDriverVersion()
    finally:
        nvml.nvmlShutdown()
    if not names:
        return Probe(Status.absent, f"driver {driver} reports no GPU")
    return Probe(Status.possible, f"{', '.join(names)}; driver {driver}")


@_never_raises
def probe_cute_dsl() -> Probe:
    """The compiler of the GPU kernels."""
    if importlib.util.find_spec("cutlass") is None:
        return Probe(Status.absent, "nvidia-cutlass-dsl is not installed (extra: cuda)")
    return Probe(Status.possible, f"nvidia-cutlass-dsl is installed; GPU kernels are kept in {gpu_folder()}")


@_never_raises
def probe_multicast(environ: Mapping[str, str] | None = None) -> Probe:
    """NVLink multicast, which any of four variables forbids."""
    if vetoes := multicast_vetoes(environ):
        return Probe(Status.refused, f"forbidden by {', '.join(vetoes)}")
    gpus = probe_gpus()
    if gpus.status is not Status.possible:
        return Probe(Status.absent, f"no GPU: {gpus.reason}")
    return Probe(Status.possible, "no variable forbids it; the driver decides when memory is bound")


PROBES: dict[str, Callable[..., Probe]] = {
    "memfd": probe_memfd,
    "descriptor passing": probe_descriptor_passing,
    "abstract sockets": probe_abstract_socket,
    "pidfd": probe_pidfd,
    "futex": probe_futex,
    "single copy": probe_single_copy,
    "Numba cache": probe_numba_cache,
    "GPUs": probe_gpus,
    "CuTe DSL": probe_cute_dsl,
    "multicast": probe_multicast,
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything the doctor knows.

    Attributes:
        variables: (name, value in force, what it does).
        ranks: how ranks that were started found each other, if any were.
        gpus: what was found on GPUs.
    """

    versions: dict[str, str]
    hardware: dict[str, Any]
    variables: list[tuple[str, Any, str]]
    paths: dict[str, Probe]
    ranks: Probe | None
    gpus: GpuDiagnosis

    @property
    def healthy(self) -> bool:
        """Whether the ranks agreed, if any were started."""
        return self.ranks is None or self.ranks.status is Status.possible

    def to_json(self) -> dict[str, Any]:
        """A dictionary of strings and numbers."""
        return {
            "versions": self.versions, "hardware": self.hardware,
            "variables": [{"name": name, "value": value, "doc": doc} for name, value, doc in self.variables],
            "paths": {name: probe._asdict() for name, probe in self.paths.items()},
            "ranks": self.ranks._asdict() if self.ranks else None, "gpus": self.gpus.to_json(),
        }


def examine(nproc: int | None = None, method: Method = ON_CPUS) -> Diagnosis:
    """Probes everything; with ``nproc``, also starts ranks, on the method's device. Raises ArgumentError for a bad
    SYMMCOMM_* variable."""
    found = {"python": platform.python_version()} | versions()
    if torch.version.cuda is not None:
        found["torch's CUDA"] = torch.version.cuda
    for mpi in find_mpis().values():
        found[mpi.name] = f"{mpi.version} ({mpi.launcher})"
    settings = Settings.from_env()
    gpus = examine_gpus(settings)
    paths = {name: probe() for name, probe in PROBES.items()}
    return Diagnosis(
        versions=found, hardware=hardware(), variables=settings.variables(), gpus=gpus,
        paths=paths | {name: _as_probe(attempt, bool(gpus.facts)) for name, attempt in gpus.attempts.items()},
        ranks=probe_ranks(nproc, method) if nproc else None,
    )


def _as_probe(attempt: Attempt, any_gpus: bool) -> Probe:
    refused = Status.refused if any_gpus else Status.absent
    return Probe(Status.possible if attempt.works else refused, attempt.reason)


@_never_raises
def probe_ranks(nproc: int, method: Method = ON_CPUS) -> Probe:
    """Starts ranks that find each other and reduce once."""
    team = SpawnedTeam("own", ["symm"], nproc, None, Settings.from_env().timeout_s, method)
    try:
        answers = team.ask({"do": "describe"})
        team.close()
    except SymmCommError as error:
        return Probe(Status.refused, str(error))
    finally:
        team.kill()
    names = sorted({answer["bootstrap"] for answer in answers})
    wrong = [rank for rank, answer in enumerate(answers) if not answer["right"]]
    if len(names) > 1 or wrong:
        return Probe(Status.refused, f"ranks found each other by {names}; wrong sums on ranks {wrong}")
    text = f"{nproc} ranks agree: bootstrap {names[0]}, one all-reduce right on all of them"
    path = answers[0].get("path")
    return Probe(Status.possible, f"{text}; GPU memory by {path}" if path else text)


def tables(diagnosis: Diagnosis) -> list[Table]:
    """The diagnosis for a terminal."""
    known = [_pairs("versions", diagnosis.versions), _pairs("hardware", _readable(diagnosis.hardware))]
    variables = Table("variable", "value", "what it does", title="variables in force", title_justify="left", box=None)
    for name, value, doc in diagnosis.variables:
        variables.add_row(name, str(value), doc)
    paths = Table("path", "", "why", title="paths", title_justify="left", box=None)
    probes = diagnosis.paths | ({"ranks": diagnosis.ranks} if diagnosis.ranks else {})
    for name, probe in probes.items():
        style = {Status.possible: "green", Status.refused: "red", Status.absent: "dim"}[probe.status]
        paths.add_row(name, f"[{style}]{probe.status}[/]", probe.reason)
    return [*known, variables, *([reach_table(diagnosis.gpus.facts)] if diagnosis.gpus.facts else []), paths]


def _pairs(title: str, facts: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), str(value))
    return table


def _readable(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removesuffix("_bytes"): bytes_text(value) if name.endswith("_bytes") else value
        for name, value in facts.items()
    }
