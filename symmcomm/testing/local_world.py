"""A world of ranks in one process on one GPU: a stream and a heap for each rank, kernels that spin on each other.

All ranks' kernels must be on the device at once. So each has a share of the SMs (``num_sms``), and streams have
hardware queues of their own, if the world is made before CUDA starts. And where two ranks run different kernels, both
must have been loaded (``load``): CUDA loads a kernel when it is first launched, and may wait for what runs then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from symmcomm.env import ask_for_hardware_queues
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import Layout, Record

_HEAP_ALIGNMENT = 2 << 20


class LocalWorld:
    """``world_size`` ranks whose heaps are cut out of one allocation.

    Attributes:
        base: address of rank 0's heap. stride: bytes from one heap to the next.
        data: offset from which a heap is free for tensors.
        num_sms: SMs that each rank may use.
        arch: e.g. ``"sm_90a"``.
    """

    def __init__(self, world_size: int, data_bytes: int, timeout_s: float = 10.0) -> None:
        from symmcomm.kernels.gpu.compile import architecture

        ask_for_hardware_queues()
        self.world_size = world_size
        self.layout = Layout.create(world_size)
        self.data = self.layout.data
        self.stride = -(-(self.data + data_bytes) // _HEAP_ALIGNMENT) * _HEAP_ALIGNMENT
        self.memory = torch.zeros(world_size * self.stride, dtype=torch.uint8, device="cuda")
        self.base = self.memory.data_ptr()
        self.records = torch.zeros(world_size, Record.NUM_WORDS, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(self.memory.device)
        self.num_sms = properties.multi_processor_count // world_size
        self.arch = architecture((properties.major, properties.minor))
        self.arch_number = 10 * properties.major + properties.minor
        for rank in range(world_size):
            self.put(rank, at.RECORD, self.records[rank].data_ptr())
            self.put(rank, at.TIMEOUT_NS, int(timeout_s * 1e9))
        torch.cuda.synchronize()

    def put(self, rank: int, field: int, value: int) -> None:
        """Writes a 64-bit field of a rank's private state."""
        self.bytes(rank, field, 8).view(torch.int64).fill_(value)

    def bytes(self, rank: int, offset: int, num_bytes: int) -> Tensor:
        """Part of a rank's heap."""
        assert 0 <= offset <= offset + num_bytes <= self.stride, "this would be the next rank's heap"
        start = rank * self.stride + offset
        return self.memory[start : start + num_bytes]

    def all_bytes(self, offset: int, num_bytes: int) -> Tensor:
        """Part of all ranks' heaps, a row each: what is copied to or from it is copied at once."""
        first = self.bytes(0, offset, num_bytes)
        return first.as_strided((self.world_size, num_bytes), (self.stride, 1))

    def tensor(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements of a rank's heap; ``offset`` a multiple of the element size."""
        return self.bytes(rank, offset, count * dtype.itemsize).view(dtype)

    def launch(
        self, function: Callable[..., None], arguments: Sequence[Sequence[Any]], ranks: Sequence[int] = ()
    ) -> None:
        """Launches ``function(base, stride, rank, *arguments[rank], stream)`` on all ranks (or some), and waits."""
        torch.cuda.synchronize()
        for rank in ranks or range(self.world_size):
            function(self.base, self.stride, rank, *arguments[rank], self.streams[rank].cuda_stream)
        torch.cuda.synchronize()

    def load(self, function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
        """The function, which from now on starts at once: it has run for a rank that gave up, where it does nothing."""
        failed = int(self.bytes(0, at.FAILED, 4).view(torch.int32))
        self.bytes(0, at.FAILED, 4).view(torch.int32).fill_(at.GAVE_UP)
        self.launch(function, [arguments], ranks=[0])
        self.bytes(0, at.FAILED, 4).view(torch.int32).fill_(failed)
        torch.cuda.synchronize()
        return function

    def record(self, rank: int) -> Record | None:
        """What a wait of the rank that gave up has left."""
        words = [int(word) & 0xFFFFFFFF for word in self.records[rank][:7]]
        return Record(*words) if words[0] else None

    def epoch(self, rank: int, channel: int) -> int:
        """The channel's epoch, as the rank has come to it."""
        return int(self.bytes(rank, at.EPOCHS + 4 * channel, 4).view(torch.int32)) & 0xFFFFFFFF

    def set_epochs(self, epoch: int) -> None:
        """Lets all channels of all ranks start from an epoch, pads included: tests of wrap-around."""
        signed = epoch - (1 << 32) if epoch >= 1 << 31 else epoch
        for rank in range(self.world_size):
            self.bytes(rank, at.EPOCHS, 4 * at.NUM_CHANNELS).view(torch.int32).fill_(signed)
            self.bytes(rank, self.layout.pads, at.NUM_CHANNELS * self.layout.pad_bytes).view(torch.int32).fill_(signed)
