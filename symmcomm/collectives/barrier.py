"""Barriers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from symmcomm.collectives.call import Kind
from symmcomm.errors import ArgumentError

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_HOST_CHANNEL = 0  # of the compare-and-swap pads
_NO_DEADLINE = nullcontext()


def barrier(
    self: Communicator, *, algorithm: str = "all_to_all", protocol: str = "epoch", timeout_s: float | None = None
) -> None:
    """Returns once every rank has called it; what ranks wrote before is then visible to all.

    Args:
        algorithm: ``"all_to_all"`` (one round, every rank signals every rank) or ``"ring"`` (world_size - 1 rounds,
            neighbours only).
        protocol: ``"epoch"`` (words count up, nothing is reset) or ``"cas"`` (compare-and-swap, as foreign kernels do).
        timeout_s: deadline in seconds, in place of SYMMCOMM_TIMEOUT_S.

    Raises:
        PeerTimeoutError, PeerDiedError, PeerAbortedError: a rank did not come.
    """
    if algorithm not in ("all_to_all", "ring"):
        raise ArgumentError(f"algorithm={algorithm!r} is none of 'all_to_all', 'ring'")
    if protocol not in ("epoch", "cas"):
        raise ArgumentError(f"protocol={protocol!r} is none of 'epoch', 'cas'")
    with self.deadline(timeout_s) if timeout_s is not None else _NO_DEADLINE:
        if protocol == "cas":
            status = self.kernels.swap_barrier(self.ctx, _HOST_CHANNEL, algorithm == "ring")
        elif algorithm == "ring":
            status = self.kernels.ring_barrier(self.ctx)
        else:
            status = self.kernels.all_to_all_barrier(self.ctx, Kind.barrier)
        if status:
            self.fail(status)
