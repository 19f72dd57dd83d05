"""Compare-and-swap signals on the host, for ``memory.handle.SymmetricHandle``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


def swap_barrier(self: Communicator, channel: int, timeout_s: float | None) -> None:
    """Barrier of all ranks on a channel."""
    with self.deadline(timeout_s):
        if status := self.kernels.swap_barrier(self.ctx, channel, 0):
            self.fail(status)


def swap_signal(self: Communicator, channel: int, peer: int, put: bool, timeout_s: float | None) -> None:
    """Puts a signal to the peer once it has taken the last one, or waits for one of it and takes it."""
    kernel = self.kernels.put_signal if put else self.kernels.wait_signal
    with self.deadline(timeout_s):
        if status := kernel(self.ctx, channel, peer):
            self.fail(status)
