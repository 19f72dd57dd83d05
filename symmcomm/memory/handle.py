"""The handle of a symmetric tensor: all ranks' copies of it, and signals. Named as torch's SymmetricMemory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from symmcomm.errors import ArgumentError
from symmcomm.memory.signals import NUM_CHANNELS

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


class SymmetricHandle:
    """What ``Communicator.rendezvous`` returns.

    Attributes:
        rank, world_size: of the communicator.
        buffer_size: bytes of the tensor.
        buffer_ptrs: address in this process of every rank's copy.
        signal_pad_ptrs: address of every rank's pad of 32-bit words, ``pad[channel * world_size + sender]``.
        multicast_ptr: 0; multicast is a matter of GPUs.
    """

    multicast_ptr = 0

    def __init__(self, comm: Communicator, offset: int, buffer_size: int) -> None:
        self._comm, self._offset = comm, offset
        self.rank, self.world_size, self.buffer_size = comm.rank, comm.world_size, buffer_size
        starts = [comm.heap.base + peer * comm.heap.stride for peer in range(self.world_size)]
        self.buffer_ptrs = [start + offset for start in starts]
        self.signal_pad_ptrs = [start + comm.layout.signal_pad for start in starts]
        self._device_arrays = np.array([self.buffer_ptrs, self.signal_pad_ptrs], dtype=np.int64)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address of ``buffer_ptrs`` as int64, for kernels."""
        return int(self._device_arrays[0].ctypes.data)

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address of ``signal_pad_ptrs`` as int64, for kernels."""
        return int(self._device_arrays[1].ctypes.data)

    @property
    def signal_pad_size(self) -> int:
        """Bytes of a signal pad."""
        return NUM_CHANNELS * self.world_size * 4

    def _view(self, rank: int, offset: int, limit: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._comm.check_open()
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank={rank} is no rank of this communicator (0..{self.world_size - 1})")
        num_bytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
        if num_bytes > limit:
            raise ArgumentError(f"sizes={tuple(sizes)} of {dtype} need {num_bytes} bytes, {limit} are there")
        if num_bytes == 0:
            return torch.empty(tuple(sizes), dtype=dtype)
        return torch.frombuffer(self._comm.heap.buffer(rank, offset, num_bytes), dtype=dtype).view(tuple(sizes))

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """The rank's copy as a tensor of ``sizes``, starting ``storage_offset`` elements in."""
        skip = storage_offset * dtype.itemsize
        return self._view(rank, self._offset + skip, self.buffer_size - skip, sizes, dtype)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] | None = None, dtype: torch.dtype = torch.uint32, storage_offset: int = 0
    ) -> torch.Tensor:
        """The rank's signal pad as a tensor; by default all of it."""
        skip = storage_offset * dtype.itemsize
        sizes = [(self.signal_pad_size - skip) // dtype.itemsize] if sizes is None else sizes
        return self._view(rank, self._comm.layout.signal_pad + skip, self.signal_pad_size - skip, sizes, dtype)

    def _check_channel(self, channel: int) -> None:
        if not 0 <= channel < NUM_CHANNELS:
            raise ArgumentError(f"channel={channel} is not in 0..{NUM_CHANNELS - 1}")

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Barrier of all ranks on a channel. ``timeout_ms`` of 0 means SYMMCOMM_TIMEOUT_S."""
        self._check_channel(channel)
        with self._comm.deadline(timeout_ms / 1000 or None):
            if status := self._comm.kernels.swap_barrier(self._comm.ctx, channel, 0):
                self._comm.fail(status)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals ``dst_rank`` on a channel, once it has taken this rank's last signal there."""
        self._signal(self._comm.kernels.put_signal, dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for ``src_rank``'s signal on a channel and takes it."""
        self._signal(self._comm.kernels.wait_signal, src_rank, channel, timeout_ms)

    def _signal(self, kernel: object, peer: int, channel: int, timeout_ms: int) -> None:
        self._check_channel(channel)
        if not 0 <= peer < self.world_size:
            raise ArgumentError(f"rank={peer} is no rank of this communicator (0..{self.world_size - 1})")
        self._comm.check_open()
        with self._comm.deadline(timeout_ms / 1000 or None):
            if status := kernel(self._comm.ctx, channel, peer):  # type: ignore[operator]
                self._comm.fail(status)
