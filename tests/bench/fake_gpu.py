"""A GPU that is none: torch's CUDA functions as the benchmark calls them, over tensors on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from symmcomm import Communicator, Settings, init
from symmcomm.bench import gpu_place, gpu_timing

PROPERTIES = SimpleNamespace(
    name="Fake GPU", uuid="0", multi_processor_count=4, total_memory=1 << 30, L2_cache_size=1 << 10
)


class FakeEvent:
    """Time passes by 3 ms from one record to the next."""

    now = 0.0

    def record(self) -> None:
        FakeEvent.now += 3.0
        self.at = FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeGraph:
    """Counts its replays."""

    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


class FakeGpuSide:
    """The GPU side of a communicator, carried out by its CPU side. Launches are noted, not made."""

    device, num_sms, arch_number = torch.device("cpu"), 4, 90
    choice = SimpleNamespace(provider="cuda_vmm")

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, kernel: Any, *arguments: int) -> None:
        self.launched.append((kernel, *arguments))

    def barrier(self) -> None:
        self.launch("barrier")

    def offset_of(self, tensor: torch.Tensor) -> int:
        return 4096

    def synchronize(self) -> None:
        """Nothing runs."""

    def close(self, agree: bool) -> None:
        """Nothing is held."""


@contextlib.contextmanager
def _as_it_is(*_: Any, **__: Any) -> Iterator[None]:
    yield


class FakeTorch:
    """torch, but for its GPUs."""

    cuda = SimpleNamespace(
        CUDAGraph=FakeGraph, Event=lambda enable_timing: FakeEvent(),
        Stream=lambda device: SimpleNamespace(device=device),
        _sleep=lambda cycles: None, device_count=lambda: 1, get_device_properties=lambda device: PROPERTIES,
        graph=_as_it_is, nccl=SimpleNamespace(version=lambda: (2, 28, 9)), set_device=lambda device: None,
        set_stream=lambda stream: None, stream=_as_it_is, synchronize=lambda: None,
    )  # fmt: skip

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(monkeypatch: Any) -> list[Communicator]:
    """From now on GPU places work on the fake; the communicators that they make are listed."""
    made: list[Communicator] = []

    def fake_init(*, device: torch.device, settings: Settings) -> Communicator:
        comm = init(settings=settings)
        comm.gpu = FakeGpuSide(comm)  # type: ignore[assignment]
        made.append(comm)
        return comm

    for module in (gpu_place, gpu_timing):
        monkeypatch.setattr(module, "torch", FakeTorch())
    monkeypatch.setattr(gpu_place, "init", fake_init)
    monkeypatch.setattr(gpu_place, "nccl_version", lambda: (2, 28, 9))
    return made
