"""``monitored_barrier``: names the ranks that did not come. Messages as in gloo, whose call it stands in for."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from symmcomm.errors import PeerError, PeerTimeoutError, WaitTimeoutError

if TYPE_CHECKING:
    from symmcomm.distributed.point_to_point import Mailbox


def monitored_barrier(mailbox: Mailbox, number: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Rank 0 waits for a message of each rank, then answers all.

    Args:
        number: of this barrier in the group; keeps a rank that is late apart from the next barrier.
        wait_all_ranks: whether rank 0 goes on after the first rank that is missing, to name all of them.

    Raises:
        PeerTimeoutError: on rank 0 with the missing ranks' names, on the others because rank 0 did not answer.
    """
    rank, deadline = mailbox.comm.rank, time.monotonic() + timeout_s
    token = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if rank != 0:
        mailbox.send(token, 0, number, internal=True).wait()
        if not _comes(mailbox, 0, number, deadline):
            raise PeerTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                "from rank 0. Please check rank 0 logs for faulty rank.",
                0,
            )
        return
    missing = []
    for peer in range(1, mailbox.comm.world_size):
        if not wait_all_ranks and time.monotonic() >= deadline:
            raise PeerTimeoutError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {round(timeout_s * 1000)} ms; rank {peer} and "
                "those after it were not waited for",
                peer,
            )
        if not _comes(mailbox, peer, number, deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    if missing:
        names = ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))
        raise PeerTimeoutError(
            f"[Rank 0]: {names} failed to pass monitoredBarrier in {round(timeout_s * 1000)} ms", missing[0]
        )
    for peer in range(1, mailbox.comm.world_size):
        mailbox.send(token, peer, number, internal=True).wait()


def _comes(mailbox: Mailbox, peer: int, number: int, deadline: float) -> bool:
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        token = torch.empty(1, dtype=torch.uint8, device="cpu")
        return mailbox.receive(token, peer, number, internal=True).wait(timedelta(seconds=left_s))
    except (WaitTimeoutError, PeerError):
        return False
