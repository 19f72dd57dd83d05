"""A rank on a GPU, driven through the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm import init
from symmcomm.bench import nvshmem_calls
from symmcomm.bench.gpu_floor import PUSH_BYTES, measure_limits
from symmcomm.bench.gpu_peers import Nccl, NcclSymm, Refused, TorchSymmMem, nccl_version
from symmcomm.bench.gpu_timing import Lane, gpu_timer, l2_flush
from symmcomm.bench.implementations import OWN, RING, Call, Implementation, Symm, SymmRing
from symmcomm.bench.method import Method
from symmcomm.bench.place import join_torch
from symmcomm.bench.timer import Answer, Timer
from symmcomm.bootstrap import Bootstrap
from symmcomm.env import Launch, Settings

_OF_NCCL = ("nccl", "nccl_symm", "torch_one_shot", "torch_two_shot")
_SHARED = "NCCL and torch's symmetric memory want a GPU for each rank, and ranks share one here"


class GpuPlace:
    """A process with a GPU, which is that of its local rank; one stream for everything."""

    def __init__(self, names: Sequence[str], relay: Bootstrap, method: Method) -> None:
        self.ranks = (relay.rank,)
        self._relay, self._method = relay, method
        local = Launch.from_env().local_rank
        self.device = torch.device("cuda", (relay.rank if local is None else local) % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        settings = Settings.from_env()
        settings = replace(settings, share_gpu=settings.share_gpu or method.share_gpu)
        self.comm = init(device=self.device, settings=settings)
        assert self.comm.gpu is not None
        self.gpu = self.comm.gpu
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lanes = (Lane(stream, self.gpu.barrier),)
        torch.cuda.set_stream(stream)
        self._flush = l2_flush(self.device)
        self._reason = self._shared_reason()
        self.implementations = ({name: self._make(name) for name in names},)
        self.run([self._lanes[0].align])  # compiled before anything is timed

    def _shared_reason(self) -> str:
        """Why peers cannot run; empty if they can."""
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return "" if len(set(self.comm.all_gather_bytes(uuid.encode()))) == self.comm.world_size else _SHARED

    def _make(self, name: str) -> Implementation:
        device, meet = self.device, self.comm.barrier
        if name in OWN:
            return Symm(self.comm, symmetric=name == "symm_heap")
        if name == RING:
            return SymmRing(self.comm, symmetric=False)
        if self._reason:
            return Refused(self._reason)
        if name == "nvshmem":
            return nvshmem_calls.implementation(self.comm, device)
        if name in _OF_NCCL and not dist.is_initialized():
            join_torch(self._relay, "nccl", device)
        if name in ("nccl", "nccl_symm"):
            return (Nccl if name == "nccl" else NcclSymm)(device, meet)
        return TorchSymmMem(name.removeprefix("torch_"), device, meet)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Place."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def run(self, calls: Sequence[Call]) -> None:
        """See Place."""
        calls[0]()
        torch.cuda.synchronize()

    def timer(self, calls: Sequence[Call]) -> Timer:
        """See Place."""
        return gpu_timer(self._method, self._lanes, calls, self._flush)

    def describe(self) -> Answer:
        """See Place."""
        ranks = torch.full((1000,), float(self._relay.rank), device=self.device)
        self.run([partial(self.comm.all_reduce, ranks)])
        total = sum(range(self._relay.world_size))
        right = bool((ranks == total).all())
        path = self.gpu.choice.provider
        return {"bootstrap": self.comm.bootstrap_name, "right": right, "path": path} | gpu_facts(self.device)

    def limits(self) -> Answer:
        """See Place."""
        target = self.comm.empty(PUSH_BYTES, dtype=torch.uint8, device=self.device)
        word = self.comm.empty(4, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize()
        offsets = self.gpu.offset_of(word), self.gpu.offset_of(target)
        found = measure_limits([self.gpu], self._lanes, *offsets, self.comm.barrier)
        self.comm.free(word)
        self.comm.free(target)
        return found

    def close(self) -> None:
        """See Place."""
        torch.cuda.synchronize()
        self.comm.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def gpu_facts(device: torch.device) -> Answer:
    """What the figures depend on."""
    properties = torch.cuda.get_device_properties(device)
    versions = {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl_version()))}
    return {
        "gpu": properties.name, "uuid": str(properties.uuid)[:8], "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size, "versions": versions,
    }
