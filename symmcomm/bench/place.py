"""Where a process of the benchmark works: which ranks it is, what they measure with, and how they are timed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from symmcomm import init
from symmcomm.bench.implementations import (
    OWN,
    RING,
    Call,
    Implementation,
    Symm,
    SymmRing,
    gloo,
    mpi_implementation,
)
from symmcomm.bench.method import Device, Method
from symmcomm.bench.timer import Answer, HostTimer, Timer
from symmcomm.bootstrap import Bootstrap
from symmcomm.env import Settings


class Place(Protocol):
    """What ``bench.rank`` needs of a device.

    Attributes:
        ranks: those that this process is: one, unless ranks are virtual.
        implementations: by name, for each of these ranks.
    """

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def implementations(self) -> Sequence[dict[str, Implementation]]: ...

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An ordinary tensor."""
        ...

    def run(self, calls: Sequence[Call]) -> None:
        """Makes one call of each rank, and waits until all are done."""
        ...

    def timer(self, calls: Sequence[Call]) -> Timer:
        """Times calls, one of each rank."""
        ...

    def describe(self) -> Answer:
        """What the ranks run on; ``right``: whether a first all-reduce gave the right sum."""
        ...

    def limits(self) -> Answer:
        """What ``Floor.of_ranks`` takes. Collective."""
        ...

    def close(self) -> None:
        """Lets go of everything; collective."""
        ...


def make_place(names: Sequence[str], relay: Bootstrap, method: Method) -> Place:
    """The place of this process. Collective."""
    if method.device is Device.cpu:
        return CpuPlace(names, relay)
    from symmcomm.bench.gpu_place import GpuPlace
    from symmcomm.bench.virtual_place import VirtualPlace

    return VirtualPlace(names, method) if method.virtual_ranks else GpuPlace(names, relay, method)


class CpuPlace:
    """A rank on the CPU."""

    def __init__(self, names: Sequence[str], relay: Bootstrap) -> None:
        torch.set_num_threads(1)
        self.ranks = (relay.rank,)
        self._relay = relay
        self._comm = init() if set(names) & {*OWN, RING} else None
        self.implementations = ({name: self._make(name) for name in names},)

    def _make(self, name: str) -> Implementation:
        if name in (*OWN, RING):
            assert self._comm is not None
            return SymmRing(self._comm, symmetric=False) if name == RING else Symm(self._comm, name == "symm_heap")
        if name == "gloo":
            join_torch(self._relay, "gloo")
            return gloo()
        return mpi_implementation()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Place."""
        return torch.zeros(numel, dtype=dtype)

    def run(self, calls: Sequence[Call]) -> None:
        """See Place."""
        calls[0]()

    def timer(self, calls: Sequence[Call]) -> Timer:
        """See Place."""
        return HostTimer(calls[0])

    def describe(self) -> Answer:
        """See Place."""
        if self._comm is None:
            return {}
        ranks = torch.full((1000,), float(self._relay.rank))
        self._comm.all_reduce(ranks)
        total = sum(range(self._relay.world_size))
        return {"bootstrap": self._comm.bootstrap_name, "right": bool((ranks == total).all())}

    def limits(self) -> Answer:
        """See Place. Nothing is measured on CPUs: a cache line's way depends on where the system puts the ranks."""
        return {}

    def close(self) -> None:
        """See Place."""
        if self._comm is not None:
            self._comm.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def join_torch(relay: Bootstrap, backend: str, device: torch.device | None = None) -> None:
    """torch's default process group, over a store of its own that rank 0 serves. Collective."""
    timeout = timedelta(seconds=Settings.from_env().timeout_s)
    rank, world_size = relay.rank, relay.world_size
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout) if rank == 0 else None
    port = int(relay.all_gather(str(store.port if store else 0).encode(), timeout.total_seconds())[0])
    store = store or TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )
