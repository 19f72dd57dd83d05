"""Messages, barriers and signals on a GPU."""

from __future__ import annotations

import torch

from symmcomm.checks import check_rank
from symmcomm.collectives.gpu_memory import GpuMemory
from symmcomm.errors import ArgumentError
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.point_to_point import Message
from symmcomm.kernels.gpu.swap_signal import SwapSignal

_HOST_CHANNEL = 0  # of the compare-and-swap pads


class GpuMessages(GpuMemory):
    """See ``GpuCollectives``, which adds the collectives."""

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Sends ``tensor`` to rank ``dst``. Messages of a pair arrive in the order sent; small ones leave the stream
        before they are received. A receiver that expects another number of bytes gets MismatchError, and the
        communicator is finished."""
        self._message(tensor, dst, "dst", True)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receives rank ``src``'s next message into ``tensor``, of as many bytes as were sent."""
        self._message(tensor, src, "src", False)

    def _message(self, tensor: torch.Tensor, peer: int, name: str, sends: bool) -> None:
        address = self.address_of(tensor, "tensor")
        check_rank(self, peer, name)
        if peer == self.rank:
            raise ArgumentError(f"{name}={peer} is the calling rank itself")
        self.launch(Message(world_size=self.world_size, sends=sends), address, tensor.nbytes, peer)

    def barrier(
        self, *, algorithm: str = "all_to_all", protocol: str = "epoch", timeout_s: float | None = None
    ) -> None:
        """What is enqueued behind it on the current stream runs once all ranks have come to theirs. Arguments as of
        ``Communicator.barrier``, which holds up the host instead."""
        if algorithm not in ("all_to_all", "ring"):
            raise ArgumentError(f"algorithm={algorithm!r} is none of 'all_to_all', 'ring'")
        if protocol not in ("epoch", "cas"):
            raise ArgumentError(f"protocol={protocol!r} is none of 'epoch', 'cas'")
        kernel = Barrier(world_size=self.world_size, arch=self.arch_number, algorithm=algorithm, protocol=protocol)
        with self.deadline(timeout_s):
            self.launch(kernel, 0, _HOST_CHANNEL)

    def swap_barrier(self, channel: int, timeout_s: float | None) -> None:
        """Compare-and-swap barrier of all ranks on a channel."""
        kernel = Barrier(world_size=self.world_size, arch=self.arch_number, protocol="cas")
        with self.deadline(timeout_s):
            self.launch(kernel, 0, channel)

    def swap_signal(self, channel: int, peer: int, put: bool, timeout_s: float | None) -> None:
        """Puts a signal to the peer once it has taken the last one, or waits for one of it and takes it."""
        with self.deadline(timeout_s):
            self.launch(SwapSignal(world_size=self.world_size, puts=put), channel, peer)
