"""The ranks of a script that measures kernels on GPUs: a process each, with a communicator and a clock.

A rank has a GPU of its own, and NCCL for peers; with SYMMCOMM_SHARE_GPU=1 ranks share what there is, without NCCL.
NVLink multicast stays off, whatever the caller has set.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import symmcomm
from symmcomm.bench.gpu_timing import GraphTimer, Lane
from symmcomm.bench.method import FEWEST, Device, Method, Timing
from symmcomm.communicator import Communicator
from symmcomm.env import Launch, Settings
from symmcomm.testing.spawn import free_port

FORBID_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "SYMMCOMM_DISABLE_MULTICAST": "1",
}  # fmt: skip
METHOD = Method(device=Device.cuda, timing=Timing.graph)
Call = Callable[[], object]


@dataclass(frozen=True)
class Rank:
    """One rank. ``lane``: its stream, which is torch's current one, and a barrier. ``data``: offset of symmetric bytes
    in its ``heap``."""

    comm: Communicator
    lane: Lane
    data: int
    heap: Tensor

    @classmethod
    def join(cls, data_bytes: int) -> Rank:
        """Collective."""
        device = torch.device("cuda", (Launch.from_env().local_rank or 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if Settings.from_env().share_gpu:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("nccl", device_id=device)
        comm, stream = symmcomm.init(device=device), torch.cuda.Stream(device)
        torch.cuda.set_stream(stream)
        gpu = comm.gpu_side
        data = gpu.offset_of(comm.empty(data_bytes, dtype=torch.uint8, device=device))
        return cls(comm, Lane(stream, gpu.barrier), data, gpu.heap.tensor(comm.rank, 0, data + data_bytes))

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    @property
    def base(self) -> int:
        """Peer p's heap is at ``base + p · stride``."""
        return self.comm.gpu_side.base

    @property
    def stride(self) -> int:
        return self.comm.gpu_side.stride

    @property
    def has_nccl(self) -> bool:
        return dist.get_backend() == "nccl"

    def meet(self) -> None:
        """All ranks' hosts."""
        self.comm.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's, by way of JSON."""
        return [json.loads(answer) for answer in self.comm.all_gather_bytes(json.dumps(value).encode())]

    def measure(self, calls: dict[str, Call], rounds: int) -> dict[str, float]:
        """Microseconds of each call, timed as ``symmcomm bench`` does (``bench.timing``, ``bench.gpu_timing``): CUDA
        graphs that take turns, the median over the rounds of the slowest rank's time."""
        timers = {name: GraphTimer([self.lane], [call]) for name, call in calls.items()}
        num_calls: dict[str, int] = {}
        for name, call in calls.items():
            call()  # what comes only once
            num_calls[name] = METHOD.calls(max(self.gather(timers[name].time(FEWEST)["seconds"])))
            timers[name].time(num_calls[name])
        times: dict[str, list[float]] = {name: [] for name in calls}
        for round_ in range(rounds):
            for name in list(calls)[:: 1 if round_ % 2 else -1]:
                self.meet()
                times[name].append(timers[name].time(num_calls[name])["seconds"] * 1e6)
        ranks = self.gather(times)
        rounds_of = {name: zip(*(rank[name] for rank in ranks), strict=True) for name in calls}
        return {name: statistics.median(max(of_ranks) for of_ranks in found) for name, found in rounds_of.items()}

    def close(self) -> None:
        """Collective."""
        torch.cuda.synchronize()
        self.comm.close()
        dist.destroy_process_group()


def num_sms() -> int:
    """Of the whole GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def capability() -> tuple[str, int]:
    """For which kernels are compiled, as "sm_90a" and 90."""
    from symmcomm.kernels.gpu.compile import architecture

    major, minor = torch.cuda.get_device_capability()
    return architecture((major, minor)), 10 * major + minor


def on_stream(function: Callable[..., None], *arguments: int, keep: tuple[Tensor, ...] = ()) -> Call:
    """A call on torch's current stream. ``keep``: tensors whose addresses are among the arguments. They must live as
    long as the call does, as what torch allocates in their place would be overwritten."""
    device, raw_stream = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream

    def call(_keep: tuple[Tensor, ...] = keep) -> None:
        function(*arguments, raw_stream(device))

    return call


def on_gpus(function: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """``function(*arguments)`` on so many ranks. Exits if there are not enough GPUs."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < (1 if Settings.from_env().share_gpu else world_size):
        raise SystemExit(f"{world_size} GPUs wanted, {num_gpus} found; with SYMMCOMM_SHARE_GPU=1 ranks share them")
    os.environ.update(FORBID_MULTICAST)  # before any library of the ranks looks
    mp.spawn(_on_rank, (function, world_size, free_port(), arguments), nprocs=world_size)


def _on_rank(rank: int, function: Callable[..., None], world_size: int, port: int, arguments: tuple[Any, ...]) -> None:
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in launch.items()}})
    function(*arguments)
