"""Ranks that are streams of one process on one GPU: symmcomm's kernels without a link, and nothing to compare with."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.gpu_floor import PUSH_BYTES, measure_limits
from symmcomm.bench.gpu_peers import Refused
from symmcomm.bench.gpu_place import gpu_facts
from symmcomm.bench.gpu_timing import Lane, gpu_timer, l2_flush
from symmcomm.bench.implementations import OWN, Call, Implementation, Symm
from symmcomm.bench.method import Method
from symmcomm.bench.timer import Answer, Timer
from symmcomm.collectives.gpu import GpuCollectives
from symmcomm.communicator import Communicator
from symmcomm.env import Settings
from symmcomm.errors import PeerTimeoutError
from symmcomm.kernels.gpu.compile import compiled
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.schedule import select_gpu
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.layout_gpu import MessageLayout
from symmcomm.testing.local_world import LocalWorld

_MOST_BYTES = 4 << 30
_ALIGNMENT = 256


class VirtualRank(GpuCollectives):
    """One rank of a local world, with the collectives of a communicator's GPU side. Its memory is cut out of the heap
    from the bottom up, and given back all at once."""

    def __init__(self, world: LocalWorld, rank: int, device: torch.device) -> None:
        self.local, self.rank, self.world_size, self.device = world, rank, world.world_size, device
        self.gpu, self.ordinal = self, device.index
        self.heap = cast(SymmetricHeap, SimpleNamespace(own_address=world.base + rank * world.stride))
        self.base, self.stride, self.layout = world.base, world.stride, world.layout
        self.num_sms, self.arch, self.arch_number = world.num_sms, world.arch, world.arch_number
        self.messages = MessageLayout.create(world.world_size)
        self._compiled, self._calls, self.thresholds = compiled, {}, select_gpu.DEFAULT
        self.early, self.whole_vectors = False, True  # its ranks share a GPU
        self.ring_from = (RingMode.All2All, sys.maxsize)  # one GPU: never
        self._symmetric: set[tuple[int, int]] = set()
        self._stream = -1
        self._word = ctypes.c_uint32.from_address(world.records[rank].data_ptr())
        self._first = self._next = self.messages.end

    def _change_stream(self, stream: int) -> None:
        """Nothing is to be ordered: the current stream is the rank's own."""
        self._stream = stream

    def check(self) -> None:
        """Raises PeerTimeoutError if a wait gave up."""
        if self._word.value:
            raise PeerTimeoutError(f"virtual rank {self.rank}: {self.local.record(self.rank)}", self.rank)

    def offset_of(self, tensor: Tensor) -> int:
        """Heap offset of the tensor's data, or -1."""
        offset = tensor.data_ptr() - self.base - self.rank * self.stride
        return offset if 0 <= offset < self.stride else -1

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A symmetric tensor, if all ranks ask for it."""
        num_bytes = prod(size) * dtype.itemsize
        tensor = self.local.bytes(self.rank, self._next, num_bytes).view(dtype)
        self._symmetric.add((self._next, num_bytes))
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    @property
    def room(self) -> int:
        """Bytes that ``empty`` has in all."""
        return self.stride - self._first

    def free(self, tensor: Tensor) -> None:
        """Gives everything back."""
        self._symmetric.clear()
        self._next = self._first


class VirtualSymm(Symm):
    """This library on a virtual rank, which has the methods of a communicator that are called here."""

    def __init__(self, rank: VirtualRank, symmetric: bool) -> None:
        super().__init__(cast(Communicator, rank), symmetric)
        self._room = rank.room

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if case.collective is Collective.barrier:
            return "virtual ranks have one host, so none can be late"
        if 2 * case.size_bytes + 2 * _ALIGNMENT > self._room:
            return f"{case.size_bytes} bytes twice do not fit into a virtual rank's {self._room}"
        return super().refusal(case)

    def barrier(self) -> None:
        """There is one process."""


class VirtualPlace:
    """One process, one GPU, many ranks."""

    def __init__(self, names: Sequence[str], method: Method) -> None:
        self._method, settings = method, Settings.from_env()
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.ranks = tuple(range(method.virtual_ranks))
        room = min(torch.cuda.mem_get_info()[0] // (4 * len(self.ranks)), _MOST_BYTES)
        world = LocalWorld(len(self.ranks), MessageLayout.create(len(self.ranks)).end + room, settings.timeout_s)
        self._ranks = [VirtualRank(world, rank, self.device) for rank in self.ranks]
        self._lanes = [Lane(stream, rank.barrier) for rank, stream in zip(self._ranks, world.streams, strict=True)]
        self._flush = l2_flush(self.device)
        self.implementations = [{name: _make(name, rank) for name in names} for rank in self._ranks]
        self.run([lane.align for lane in self._lanes])  # compiled before anything is timed

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See Place."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def run(self, calls: Sequence[Call]) -> None:
        """See Place."""
        torch.cuda.synchronize()  # what was filled is on another stream
        for lane, call in zip(self._lanes, calls, strict=True):
            with lane.current():
                call()
        torch.cuda.synchronize()

    def timer(self, calls: Sequence[Call]) -> Timer:
        """See Place."""
        return gpu_timer(self._method, self._lanes, calls, self._flush)

    def describe(self) -> Answer:
        """See Place."""
        inputs = [torch.full((1000,), float(rank), device=self.device) for rank in self.ranks]
        self.run([partial(rank.all_reduce, each) for rank, each in zip(self._ranks, inputs, strict=True)])
        right = all(bool((each == sum(self.ranks)).all()) for each in inputs)
        return {"bootstrap": "one process", "right": right} | gpu_facts(self.device)

    def limits(self) -> Answer:
        """See Place."""
        targets = [rank.empty(PUSH_BYTES, dtype=torch.uint8, device=self.device) for rank in self._ranks]
        words = [rank.empty(4, dtype=torch.uint8, device=self.device).zero_() for rank in self._ranks]
        torch.cuda.synchronize()
        offsets = self._ranks[0].offset_of(words[0]), self._ranks[0].offset_of(targets[0])
        found = measure_limits(self._ranks, self._lanes, *offsets, torch.cuda.synchronize)
        for rank, target in zip(self._ranks, targets, strict=True):
            rank.free(target)
        return found

    def close(self) -> None:
        """See Place."""
        torch.cuda.synchronize()


def _make(name: str, rank: VirtualRank) -> Implementation:
    if name in OWN:
        return VirtualSymm(rank, symmetric=name == "symm_heap")
    return Refused("virtual ranks run symmcomm's kernels only")
