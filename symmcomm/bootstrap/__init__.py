"""How the ranks find each other. The one thing a bootstrap can do is to gather a few bytes from all ranks."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from symmcomm.bootstrap.single import SingleBootstrap
from symmcomm.bootstrap.store import StoreBootstrap, connect_group, connect_launched
from symmcomm.env import Launch
from symmcomm.errors import BootstrapError

__all__ = ["Bootstrap", "SingleBootstrap", "StoreBootstrap", "connect"]


class Bootstrap(Protocol):
    """A control plane between the ranks: slow, and always there.

    Attributes:
        name: what it goes through, for ``symmcomm doctor``.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Collective: every rank's payload, by rank. Any length, different on each rank.

        Raises:
            PeerTimeoutError: the first rank whose payload did not come within ``timeout_s`` seconds.
            BootstrapError: the way to the other ranks broke.
        """
        ...

    def close(self) -> None:
        """Lets go of what this bootstrap holds. Local, and harmless when repeated."""
        ...


def connect(group: dist.ProcessGroup | None, timeout_s: float, launch: Launch | None = None) -> Bootstrap:
    """Finds the other ranks; collective, and each call gives a bootstrap of its own.

    In this order: the ``group`` given, torch.distributed's default group if it is initialised, RANK and WORLD_SIZE
    (torchrun, or a plain TCP store), mpirun, a world of one.

    Args:
        launch: what the launcher said; by default read from the environment.

    Raises:
        BootstrapError: the environment contradicts itself, or the way to the other ranks cannot be opened.
        ArgumentError: the caller is not a member of ``group``.
        PeerTimeoutError: a rank did not come within ``timeout_s`` seconds.
    """
    if group is not None:
        return connect_group(group)
    if dist.is_available() and dist.is_initialized():
        return connect_group(dist.group.WORLD)
    launch = launch or Launch.from_env()
    if launch.rank is not None or launch.world_size is not None:
        rank, world_size = _checked(launch)
        return SingleBootstrap() if world_size == 1 else connect_launched(rank, world_size, launch, timeout_s)
    if launch.mpi is not None and (launch.mpi_world_size or 1) > 1:
        from symmcomm.bootstrap.mpi import connect_mpi

        return connect_mpi(launch, timeout_s)
    return SingleBootstrap()


def _checked(launch: Launch) -> tuple[int, int]:
    """Rank and world size, if the launch variables make sense together."""
    rank, world_size = launch.rank, launch.world_size
    if world_size is None:
        raise BootstrapError(f"RANK={rank} is set, but WORLD_SIZE is not")
    if rank is None:
        raise BootstrapError(f"WORLD_SIZE={world_size} is set, but RANK is not")
    if world_size < 1:
        raise BootstrapError(f"WORLD_SIZE={world_size} is not positive")
    if not 0 <= rank < world_size:
        raise BootstrapError(f"RANK={rank} is not in 0..{world_size - 1} (WORLD_SIZE={world_size})")
    if world_size > 1 and not launch.master_addr:
        raise BootstrapError(f"WORLD_SIZE={world_size} needs MASTER_ADDR, which is {launch.master_addr!r}")
    if world_size > 1 and launch.master_port is None:
        raise BootstrapError(f"WORLD_SIZE={world_size} needs MASTER_PORT, which is not set")
    if world_size > 1 and not 0 < (launch.master_port or 0) < 1 << 16:
        raise BootstrapError(f"MASTER_PORT={launch.master_port} is not in 1..65535")
    return rank, world_size
