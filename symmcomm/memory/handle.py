"""The handle of a symmetric tensor: all ranks' copies of it, and signals. Named as torch's SymmetricMemory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from symmcomm.checks import check_rank, check_timeout
from symmcomm.errors import ArgumentError
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.signals import NUM_CHANNELS


class Side(Protocol):
    """What has a symmetric heap and signals on it: a communicator on the host, its GPU side on the GPU."""

    rank: int
    world_size: int
    device: torch.device
    heap: SymmetricHeap
    signal_pad: int
    """Offset of the compare-and-swap words in a heap: ``u32[NUM_CHANNELS][sender]``."""
    multicast_base: int
    """Where all ranks' heaps are at once by NVLink multicast; 0: nowhere."""

    def check_open(self) -> None: ...

    def swap_barrier(self, channel: int, timeout_s: float | None) -> None: ...

    def swap_signal(self, channel: int, peer: int, put: bool, timeout_s: float | None) -> None:
        """Puts a signal to the peer, or takes one of it."""
        ...


class SymmetricHandle:
    """What ``Communicator.rendezvous`` returns. On a GPU, barriers and signals are kernels on torch's current stream.

    Attributes:
        rank, world_size: of the communicator.
        buffer_size: bytes of the tensor.
        buffer_ptrs: address in this process of every rank's copy.
        signal_pad_ptrs: address of every rank's pad of 32-bit words, ``pad[channel * world_size + sender]``.
        multicast_ptr: address of all ranks' copies at once by NVLink multicast; 0 where it is not used.
    """

    def __init__(self, side: Side, offset: int, buffer_size: int) -> None:
        self._side, self._offset = side, offset
        self.rank, self.world_size, self.buffer_size = side.rank, side.world_size, buffer_size
        starts = [side.heap.base + peer * side.heap.stride for peer in range(self.world_size)]
        self.buffer_ptrs = [start + offset for start in starts]
        self.signal_pad_ptrs = [start + side.signal_pad for start in starts]
        self.multicast_ptr = side.multicast_base + offset if side.multicast_base else 0
        self._pointers = torch.tensor([self.buffer_ptrs, self.signal_pad_ptrs], dtype=torch.int64, device=side.device)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address, on the tensor's device, of ``buffer_ptrs`` as int64, for kernels."""
        return self._pointers[0].data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address, on the tensor's device, of ``signal_pad_ptrs`` as int64, for kernels."""
        return self._pointers[1].data_ptr()

    @property
    def signal_pad_size(self) -> int:
        """Bytes of a signal pad."""
        return NUM_CHANNELS * self.world_size * 4

    def _view(
        self, rank: int, start: int, size: int, sizes: Sequence[int] | None, dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        """Part of the ``size`` bytes from ``start`` on in the rank's heap; the rest of them where ``sizes`` is None."""
        self._side.check_open()
        check_rank(self, rank, "rank")
        skip = storage_offset * dtype.itemsize
        if not 0 <= skip <= size:
            raise ArgumentError(f"storage_offset={storage_offset} of {dtype} is not within {size} bytes")
        shape = ((size - skip) // dtype.itemsize,) if sizes is None else tuple(sizes)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > size - skip or min(shape, default=0) < 0:
            raise ArgumentError(f"sizes={shape} of {dtype} need {num_bytes} bytes, {size - skip} are there")
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._side.device)
        return self._side.heap.tensor(rank, start + skip, num_bytes).view(dtype).view(shape)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """The rank's copy as a tensor of ``sizes``, starting ``storage_offset`` elements in."""
        return self._view(rank, self._offset, self.buffer_size, sizes, dtype, storage_offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] | None = None, dtype: torch.dtype = torch.uint32, storage_offset: int = 0
    ) -> torch.Tensor:
        """The rank's signal pad as a tensor; by default all of it."""
        return self._view(rank, self._side.signal_pad, self.signal_pad_size, sizes, dtype, storage_offset)

    def _check_channel(self, channel: int) -> None:
        if not 0 <= channel < NUM_CHANNELS:
            raise ArgumentError(f"channel={channel} is not in 0..{NUM_CHANNELS - 1}")

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Barrier of all ranks on a channel. ``timeout_ms`` of 0 means SYMMCOMM_TIMEOUT_S."""
        self._check_channel(channel)
        self._side.swap_barrier(channel, _seconds(timeout_ms))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals ``dst_rank`` on a channel, once it has taken this rank's last signal there."""
        check_rank(self, dst_rank, "dst_rank")
        self._signal(channel, dst_rank, True, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for ``src_rank``'s signal on a channel and takes it."""
        check_rank(self, src_rank, "src_rank")
        self._signal(channel, src_rank, False, timeout_ms)

    def _signal(self, channel: int, peer: int, put: bool, timeout_ms: int) -> None:
        self._check_channel(channel)
        self._side.check_open()
        self._side.swap_signal(channel, peer, put, _seconds(timeout_ms))


def _seconds(timeout_ms: int) -> float | None:
    if timeout_ms == 0:
        return None
    check_timeout(timeout_ms, "timeout_ms")
    return timeout_ms / 1000
