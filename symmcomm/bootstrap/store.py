"""Ranks that share a torch.distributed Store: torchrun's, a process group's, or a TCP store of our own.

The store is polled instead of waited on, so that deadlines are kept, Ctrl-C is seen, and the missing rank has a name.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from symmcomm.bootstrap.host import is_local, listening
from symmcomm.env import Launch
from symmcomm.errors import ArgumentError, BootstrapError, PeerTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CHUNK_BYTES = 4 << 20  # a TCPStore refuses values above 8 MiB
_POLL_S = (0.0002, 0.02)  # first and longest pause between two looks
_LINGER_S = 10.0  # how long the rank that serves the store stays for the others
_COUNT_BYTES = 4

_stores: dict[tuple[str, int, int, int], Store] = {}


class StoreBootstrap:
    """Gathers through keys that are numbered by bootstrap and by call, and deleted by the last reader.

    Args:
        store: shared by exactly the ranks ``0..world_size-1``; they make their bootstraps in the same order.
        serves: this process is the store's server, which must not leave before the others have read.

    Attributes:
        prefix: of its keys, which no other bootstrap on this store has.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, serves: bool = False) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self._store, self._serves = store, serves
        with _store_errors(name):
            number = store.add(f"symmcomm/bootstraps/{rank}", 1)
        self.prefix, self._num_gathers = f"symmcomm/{number}", 0

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See :class:`symmcomm.bootstrap.Bootstrap`. Payloads above 4 MiB go in chunks."""
        deadline = time.monotonic() + timeout_s
        chunks = [payload[at : at + _CHUNK_BYTES] for at in range(0, len(payload), _CHUNK_BYTES)] or [b""]
        with _store_errors(self.name):
            first = self._gather(len(chunks).to_bytes(_COUNT_BYTES, "little") + chunks[0], deadline, timeout_s)
            num_chunks = max(int.from_bytes(part[:_COUNT_BYTES], "little") for part in first)
            payloads = [bytearray(part[_COUNT_BYTES:]) for part in first]
            for chunk in range(1, num_chunks):
                parts = self._gather(chunks[chunk] if chunk < len(chunks) else b"", deadline, timeout_s)
                for whole, part in zip(payloads, parts, strict=True):
                    whole += part
        return [bytes(whole) for whole in payloads]

    def close(self) -> None:
        """Does nothing: the store belongs to the launcher, the group, or the process."""

    def _gather(self, value: bytes, deadline: float, timeout_s: float) -> list[bytes]:
        """One value a rank, each below the store's limit."""
        self._num_gathers += 1
        keys = [f"{self.prefix}/{self._num_gathers}/{rank}" for rank in range(self.world_size)]
        read = f"{self.prefix}/{self._num_gathers}/read"
        self._store.set(keys[self.rank], value)  # type: ignore[arg-type]  # the stub knows str only
        for _ in _pauses(deadline):
            if self._store.check(keys):
                break
        else:
            missing = next((rank for rank, key in enumerate(keys) if not self._store.check([key])), self.rank)
            raise PeerTimeoutError(
                f"rank {self.rank} waited {timeout_s:g} s for rank {missing} of {self.world_size} ({self.name})",
                missing,
            )
        values = [self._store.get(key) for key in keys]
        if self._store.add(read, 1) == self.world_size:
            with contextlib.suppress(RuntimeError):  # the serving rank may leave as soon as all have read
                for key in [*keys, read]:
                    self._store.delete_key(key)
        elif self._serves:
            for _ in _pauses(time.monotonic() + _LINGER_S):
                if not self._store.check([read]):
                    break
        return values


def connect_group(group: dist.ProcessGroup | None) -> StoreBootstrap:
    """Through the store of an existing process group. Raises ArgumentError if the caller is not a member of it."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ArgumentError(f"group={group!r} is not a process group that has this process as a member")
    store = group.get_group_store()
    return StoreBootstrap(store, dist.get_rank(group), dist.get_world_size(group), "process group's store")


def connect_launched(rank: int, world_size: int, launch: Launch, timeout_s: float) -> StoreBootstrap:
    """Through torchrun's store if there is one, else a TCP store that rank 0 serves at MASTER_ADDR:MASTER_PORT.

    The store stays open as long as the process: later communicators use it, and so may torch.distributed.
    """
    assert launch.master_addr is not None
    assert launch.master_port is not None
    elastic = dist.is_torchelastic_launched()
    key = (launch.master_addr, launch.master_port, rank, world_size)
    name = "torchrun store" if elastic else "TCP store"
    if key not in _stores:
        with _store_errors(f"{name} at {launch.master_addr}:{launch.master_port}"):
            if elastic:
                handler = rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s))
                _stores[key] = next(iter(handler))[0]
            else:
                _stores[key] = _open_tcp_store(launch.master_addr, launch.master_port, rank, world_size, timeout_s)
    return StoreBootstrap(_stores[key], rank, world_size, name, serves=not elastic and rank == 0)


def _open_tcp_store(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> Store:
    """The server on rank 0 (shared with torch.distributed's own, if that comes later), a client elsewhere.

    A TCPStore's server looks up the name of every address that connects, one after the other. Those of IPv4 addresses
    on its own IPv6 socket are in no hosts file, so each costs a query to a name server; where that drops some, as it
    may when 32 ranks come at once, all wait for its time-out, 5 s. Hence it is given a socket of IPv4, where that is
    what ``host`` is, and no rank connects only to see whether the server is there.
    """
    if rank > 0:
        _wait_for_server(host, port, rank, timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_listener(host, port) if rank == 0 else None,
    )


def _listener(host: str, port: int) -> int | None:
    """A listening socket of IPv4. ``None`` leaves it to TCPStore: ``host`` is IPv6, or the port is taken, maybe by a
    store that this process has already."""
    try:
        if socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] == socket.AF_INET:
            return socket.create_server(("", port), backlog=socket.SOMAXCONN).detach()
    except OSError:
        pass
    return None


def _wait_for_server(host: str, port: int, rank: int, timeout_s: float) -> None:
    """Waits until rank 0 listens: TCPStore itself would wait deaf to Ctrl-C and then print C++ stacks. On this host the
    kernel's table tells; on another one the rank knocks."""
    local = is_local(host)
    for left_s in _pauses(time.monotonic() + timeout_s):
        ports = listening() if local else None
        if port in ports if ports is not None else _answers(host, port, rank, max(left_s, 0.1)):
            return
    raise PeerTimeoutError(f"rank {rank} waited {timeout_s:g} s for rank 0 to listen at {host}:{port} (TCP store)", 0)


def _answers(host: str, port: int, rank: int, timeout_s: float) -> bool:
    """Whether somebody takes a connection there."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except socket.gaierror as error:
        raise BootstrapError(f"MASTER_ADDR={host!r} is not a host that rank {rank} knows: {error}") from None
    except OSError:
        return False
    return True


def _pauses(deadline: float) -> Iterator[float]:
    """Yields the seconds left at once, then after ever longer pauses, until the deadline has passed."""
    pause_s, longest_s = _POLL_S
    yield deadline - time.monotonic()
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
        yield max(0.0, deadline - time.monotonic())


@contextlib.contextmanager
def _store_errors(name: str) -> Iterator[None]:
    """Turns the store's own errors into BootstrapError."""
    try:
        yield
    except (dist.DistError, ValueError) as error:
        raise BootstrapError(f"{name}: {str(error).splitlines()[0]}") from error
