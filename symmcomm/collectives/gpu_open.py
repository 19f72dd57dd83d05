"""How a communicator comes to its GPU side."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from symmcomm.collectives.gpu_compare import compare_calls
from symmcomm.collectives.gpu_memory import NotSharedError
from symmcomm.errors import DeviceError
from symmcomm.probe_gpu import probe_facts
from symmcomm.schedule.topology_gpu import Attempt, GpuFacts, decide_devices, decide_provider

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives
    from symmcomm.communicator import Communicator


def find_facts(comm: Communicator, device: torch.device) -> list[GpuFacts]:
    """Collective. What all ranks know about their GPUs."""
    if torch.version.hip is not None:
        own = GpuFacts(device=Attempt(False, "torch is built for AMD's GPUs; the kernels run on NVIDIA's"))
    elif importlib.util.find_spec("cutlass") is None:
        own = GpuFacts(device=Attempt(False, "CuTe DSL is not installed: install symmcomm with the extra 'cuda'"))
    elif not torch.cuda.is_available():
        own = probe_facts(0, comm.settings)
        if own.device.works:
            own = GpuFacts(device=Attempt(False, f"torch {torch.__version__} finds no GPU"))
    else:
        own = probe_facts(torch.cuda.current_device() if device.index is None else device.index, comm.settings)
    return [GpuFacts.from_json(each) for each in comm.all_gather_bytes(own.to_json())]


def open_gpu(comm: Communicator, facts: Sequence[GpuFacts]) -> GpuCollectives:
    """Collective. The GPU side of a communicator, on memory that is shared in the first way that works. Raises
    DeviceError, on every rank alike, with the reason."""
    devices = decide_devices(facts, comm.settings.share_gpu)
    if not devices.works:
        raise DeviceError(devices.reason)
    from symmcomm.collectives.gpu import GpuCollectives  # needs CuTe DSL

    while (choice := decide_provider(facts, comm.settings.gpu_memory)).provider is not None:
        try:
            gpu = GpuCollectives(comm, list(facts), choice)
            if comm.settings.check:
                compare_calls(gpu)
            return gpu
        except NotSharedError as error:
            failed: dict[str, Any] = {choice.provider: Attempt(False, f"it was tried between the ranks: {error}")}
            facts = [replace(fact, **failed) for fact in facts]
    raise DeviceError(choice.reason)
