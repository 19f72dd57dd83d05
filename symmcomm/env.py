"""Every environment variable of symmcomm: typed, documented, and read in this file only.

``Settings.from_env()`` is called once per communicator, so that a variable set before ``symmcomm.init()`` counts and
importing the package reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from symmcomm.errors import ArgumentError

MAX_TIMEOUT_S = 2_000_000
"""About 23 days. Sockets and poll(2) count milliseconds in 31 bits."""

MAX_SPIN = (1 << 31) - 1

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``"64M"`` -> 67108864. Units K, M, G, T are powers of 1024; an optional ``B`` or ``iB`` is allowed."""
    lowered = text.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = (lowered[:-1], lowered[-1]) if lowered[-1:] in _UNITS and lowered else (lowered, "")
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        raise ArgumentError(f"{text!r} is not a size: expected a number with an optional unit K, M, G or T") from None
    if not (size.is_integer() and size >= 0):  # neither are infinity and NaN
        raise ArgumentError(f"{text!r} is not a whole, non-negative number of bytes")
    return int(size)


def _parse_bool(text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off"):
        return False
    raise ArgumentError(f"{text!r} is not a boolean: expected 0 or 1")


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ArgumentError(f"{text!r} is not a number of seconds") from None
    if not seconds > 0:
        raise ArgumentError(f"{text!r} is not a positive number of seconds")
    if seconds > MAX_TIMEOUT_S:
        raise ArgumentError(f"{text!r} is more than {MAX_TIMEOUT_S} seconds: every wait has a deadline")
    return seconds


def _parse_polls(text: str) -> int:
    try:
        polls = int(text)
    except ValueError:
        raise ArgumentError(f"{text!r} is not a whole number of polls") from None
    if not -1 <= polls <= MAX_SPIN:
        raise ArgumentError(f"{text!r} is not in -1..{MAX_SPIN}")
    return polls


def _parse_gpu_memory(text: str) -> str:
    choices = ("auto", "cuda_vmm", "fabric", "cuda_ipc")
    if text not in choices:
        raise ArgumentError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _variable(name: str, parse: Any, default: Any, doc: str) -> Any:
    return field(default=default, metadata={"name": name, "parse": parse, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of all ``SYMMCOMM_*`` variables, as the README lists them."""

    timeout_s: float = _variable(
        "SYMMCOMM_TIMEOUT_S", _parse_seconds, 300.0, "deadline of every wait for a peer, in seconds; at most 2 million"
    )
    heap_max_bytes: int = _variable(
        "SYMMCOMM_HEAP_MAX_BYTES",
        parse_bytes,
        16 << 30,
        "address space reserved per rank: the most that one rank's symmetric heap can grow to",
    )
    staging_bytes: int = _variable(
        "SYMMCOMM_STAGING_BYTES",
        parse_bytes,
        20 << 20,
        "buffer per rank through which ordinary (non-symmetric) CPU tensors pass",
    )
    single_copy: bool = _variable(
        "SYMMCOMM_SINGLE_COPY", _parse_bool, True,
        "0 forbids that ranks read each other's ordinary tensors (process_vm_readv); they are staged then",
    )
    pin: bool = _variable("SYMMCOMM_PIN", _parse_bool, False, "1 pins each rank to one CPU core")
    spin: int = _variable(
        "SYMMCOMM_SPIN", _parse_polls, -1, "polls before a waiting rank yields its core; -1 chooses by ranks and cores"
    )
    gpu_memory: str = _variable(
        "SYMMCOMM_GPU_MEMORY",
        _parse_gpu_memory,
        "auto",
        "how GPUs share memory: auto takes the first that works of cuda_vmm, fabric, cuda_ipc",
    )
    share_gpu: bool = _variable("SYMMCOMM_SHARE_GPU", _parse_bool, False, "1 lets several ranks use one GPU")
    check: bool = _variable(
        "SYMMCOMM_CHECK",
        _parse_bool,
        False,
        "1 compares each call on GPU tensors among the ranks before it is launched, for debugging: MismatchError where "
        "ranks disagree",
    )
    tuning: str = _variable(
        "SYMMCOMM_TUNING",
        str,
        "~/.cache/symmcomm/tuning.json",
        "table of sizes at which GPU kernels change, written by symmcomm tune",
    )
    disable_multicast: bool = _variable(
        "SYMMCOMM_DISABLE_MULTICAST",
        _parse_bool,
        False,
        "1 forbids NVLink multicast; so do NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1, "
        "NVSHMEM_DISABLE_NVLS=1",
    )
    topology: str = _variable(
        "SYMMCOMM_TOPOLOGY", str, "", "file (TOML or JSON) that says what joins the ranks; else it is discovered"
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads the variables. Raises ArgumentError naming the variable whose value does not parse."""
        environ = os.environ if environ is None else environ
        values = {}
        for f in fields(cls):
            text = environ.get(f.metadata["name"])
            if not text:  # as if it were not set
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                raise ArgumentError(f"{f.metadata['name']}: {error}") from None
        return cls(**values)

    def variables(self) -> list[tuple[str, Any, str]]:
        """(name, value in force, what it does), one per variable."""
        return [(f.metadata["name"], getattr(self, f.name), f.metadata["doc"]) for f in fields(self)]


def ask_for_hardware_queues() -> None:
    """Has CUDA, if it has not started yet, give each of 32 streams a hardware queue, unless the user has said how many:
    of two streams that share one, the second waits for the first, and ranks of one process wait for each other.

    A context then has 128 channels instead of 20, and takes 0.5 s to make instead of 0.1; some 13 processes have such
    contexts on a GPU at a time, and the next is told that there is no memory (H200, driver 580)."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def ranks_of_tests_are_for_gpus() -> bool:
    """Whether SYMMCOMM_PRELOAD=gpu: see ``testing.preload``."""
    return os.environ.get("SYMMCOMM_PRELOAD") == "gpu"


_MULTICAST_PERMITS = {
    "SYMMCOMM_DISABLE_MULTICAST": ("", "0", "false", "no", "off"),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("", "0", "false", "no", "off"),
    "NCCL_NVLS_ENABLE": ("", "1", "2", "true", "yes", "on"),
    "NVSHMEM_DISABLE_NVLS": ("", "0", "false", "no", "off"),
}
"""Variables that speak about NVLink multicast, each with the values that leave it allowed."""


def multicast_vetoes(environ: Mapping[str, str] | None = None) -> list[str]:
    """The variables that forbid NVLink multicast in this process, as ``NAME=value``.

    What one of the four libraries was told holds for all: a machine where NCCL must not use multicast is one where
    nobody must. A value that is not clearly a permission forbids.
    """
    environ = os.environ if environ is None else environ
    return [
        f"{name}={environ[name]}"
        for name, permits in _MULTICAST_PERMITS.items()
        if name in environ and environ[name].strip().lower() not in permits
    ]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher told this process through its environment. ``None`` where it said nothing."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    master_addr: str | None
    master_port: int | None
    mpi: str | None
    """Which MPI launcher's variables are set (``"Open MPI"``, ``"MPICH"``), with no statement about mpi4py."""
    mpi_world_size: int | None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Reads torchrun's variables (``RANK`` …) and those of Open MPI's and MPICH's ``mpirun``."""
        environ = os.environ if environ is None else environ

        def number(name: str) -> int | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return int(text)
            except ValueError:
                raise ArgumentError(f"{name}={text!r} is not a whole number") from None

        mpi, size = None, None
        if "OMPI_COMM_WORLD_SIZE" in environ:
            mpi, size = "Open MPI", number("OMPI_COMM_WORLD_SIZE")
        elif "PMI_SIZE" in environ:
            mpi, size = "MPICH", number("PMI_SIZE")
        local = next((n for n in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") if n in environ), None)
        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number(local) if local else None,
            master_addr=environ.get("MASTER_ADDR"),
            master_port=number("MASTER_PORT"),
            mpi=mpi,
            mpi_world_size=size,
        )
