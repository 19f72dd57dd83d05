"""Pass file descriptors between the ranks of one host.

Each rank listens on an abstract Unix socket (no file, nothing to clean up) whose random name, with a random token,
goes through the bootstrap. In an exchange every rank asks every peer and answers every peer, in one poll loop:

    asker                                       owner
    connect; is the listener the peer's?
    (generation, own rank, own token)  ──────►  same user? token of that rank? generation?
    the descriptor is mine             ◄──────  (generation, own rank) + descriptor by SCM_RIGHTS; close

Whoever fails a check gets nothing and disturbs nobody. A peer that is one exchange ahead is answered in the next one.
So a connection that is silent at the end of an exchange is kept to the end of the next: all peers have spoken by then.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Self

from symmcomm.errors import ClosedError, ExchangeError, PeerDiedError, PeerTimeoutError

_TOKEN_BYTES = 32
_REQUEST = struct.Struct(f"<8sII{_TOKEN_BYTES}s")  # magic, generation, rank of the asker, its token
_REPLY = struct.Struct("<8sII")  # magic, generation, rank of the owner
_MAGIC = b"symmcomm"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_RETRY_S = 0.005  # pause before a peer is asked again whose queue of connections is full
_DEATH_MS = 250  # a dying process closes its sockets a little before it counts as dead
_MIN_STRANGERS = 64  # silent connections kept at once, besides one a peer; the oldest gives way


@dataclass(frozen=True)
class _Peer:
    """What a rank tells the others about itself, through the bootstrap."""

    name: str
    token: str
    pid: int
    uid: int
    pid_namespace: int


class DescriptorExchange:
    """Collective passing of descriptors; ``exchange`` may be called any number of times.

    Args:
        all_gather: the bootstrap's; called once, here.
        timeout_s: deadline of one ``exchange``, in seconds.

    Attributes:
        pids: process id of each rank as this process sees it; 0 for a peer that it cannot see (other pid namespace).
    """

    def __init__(
        self, rank: int, world_size: int, all_gather: Callable[[bytes], list[bytes]], timeout_s: float
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.generation = 0
        self.expected_uid = os.geteuid()
        self.early: list[tuple[int, socket.socket]] = []  # askers of the next generation
        self.silent: list[socket.socket] = []  # accepted, no request so far
        name, token = f"symmcomm-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN_BYTES)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.listener.bind(f"\0{name}")
            self.listener.listen(2 * world_size + _MIN_STRANGERS)
            own = _Peer(name, token.hex(), os.getpid(), self.expected_uid, os.stat("/proc/self/ns/pid").st_ino)
            self.peers = [_Peer(**json.loads(text)) for text in all_gather(json.dumps(asdict(own)).encode())]
        except BaseException:
            self.listener.close()
            raise
        self.pids = [peer.pid if peer.pid_namespace == own.pid_namespace else 0 for peer in self.peers]

    def exchange(self, fd: int) -> list[int]:
        """Gives ``fd`` to every peer and returns one new descriptor a rank (own: a duplicate), all close-on-exec.

        Raises:
            PeerTimeoutError: ranks that did not take part before the deadline, the first of them as ``rank``.
            PeerDiedError: a peer's process is gone.
            ExchangeError: a peer's socket is not the peer's, or its answer holds no descriptor.
        """
        if self.listener.fileno() < 0:
            raise ClosedError("exchange() on a closed DescriptorExchange")
        self.generation += 1
        with _Round(self, fd) as round_:
            return round_.run()

    def close(self) -> None:
        """Stops listening. Local, and harmless when repeated."""
        self.listener.close()
        for connection in [*self.silent, *(connection for _, connection in self.early)]:
            connection.close()
        self.silent, self.early = [], []


class _Round:
    """One exchange: its sockets, what it has received and whom it still owes an answer."""

    def __init__(self, exchange: DescriptorExchange, fd: int) -> None:
        self._exchange, self._fd = exchange, fd
        others = [(exchange.rank + step) % exchange.world_size for step in range(1, exchange.world_size)]
        self._unasked, self._unserved = list(others), set(others)
        self._received: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(exchange.listener, selectors.EVENT_READ, self._accept)
        self._silent_before = list(exchange.silent)
        for connection in exchange.silent:
            self._selector.register(connection, selectors.EVENT_READ, self._answer)
        self._deadline = time.monotonic() + exchange.timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        stay = [connection for connection in self._exchange.silent if connection not in self._silent_before]
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in [self._exchange.listener, *stay]:
                self._drop(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()
        if error is not None:
            for fd in self._received.values():
                os.close(fd)

    def run(self) -> list[int]:
        """Asks and answers until nothing is missing. Returns the descriptors by rank."""
        exchange = self._exchange
        self._received[exchange.rank] = os.dup(self._fd)
        while exchange.early:
            peer, connection = exchange.early.pop()
            self._serve(peer, connection)
            connection.close()
        while len(self._received) < exchange.world_size or self._unserved:
            self._unasked = [peer for peer in self._unasked if not self._ask(peer)]
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise self._timed_out()
            for key, _ in self._selector.select(min(left_s, _RETRY_S) if self._unasked else left_s):
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not dropped by an earlier event
                    key.data(key.fileobj)
        return [self._received[rank] for rank in range(exchange.world_size)]

    # The asker's side.

    def _ask(self, peer: int) -> bool:
        """Connects and sends the request, which the kernel queues for the peer. False: its queue is full."""
        exchange = self._exchange
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(f"\0{exchange.peers[peer].name}")
            self._check_listener(peer, connection)
            token = bytes.fromhex(exchange.peers[exchange.rank].token)
            connection.send(_REQUEST.pack(_MAGIC, exchange.generation, exchange.rank, token))
        except BaseException as error:
            connection.close()
            if isinstance(error, BlockingIOError):
                return False
            if isinstance(error, ConnectionError):
                raise self._gone(peer, "no longer listens") from None
            raise
        self._selector.register(connection, selectors.EVENT_READ, partial(self._take, peer))
        return True

    def _check_listener(self, peer: int, connection: socket.socket) -> None:
        """The kernel vouches for who listens, so the token is shown to nobody else."""
        exchange = self._exchange
        pid, uid = _credentials(connection)
        if uid != exchange.expected_uid:
            raise ExchangeError(
                f"the socket of rank {peer} belongs to user {uid} (the rank said {exchange.peers[peer].uid}); "
                f"rank {exchange.rank} accepts user {exchange.expected_uid} only"
            )
        if exchange.peers[peer].pid_namespace != exchange.peers[exchange.rank].pid_namespace:
            exchange.pids[peer] = pid
        elif pid != exchange.peers[peer].pid:
            raise ExchangeError(f"the socket of rank {peer} belongs to pid {pid}, not {exchange.peers[peer].pid}")

    def _take(self, peer: int, connection: socket.socket) -> None:
        """Receives a peer's answer."""
        try:
            reply, fds, truncated = _receive(connection)
        except ConnectionError:
            reply, fds, truncated = b"", [], False
        self._drop(connection)
        expected = _REPLY.pack(_MAGIC, self._exchange.generation, peer)
        if reply == expected and len(fds) == 1 and not truncated:
            self._received[peer] = fds[0]
            return
        for fd in fds:
            os.close(fd)
        if not reply:
            raise self._gone(peer, "closed the connection without an answer")
        raise ExchangeError(
            f"rank {peer} answered rank {self._exchange.rank} with {len(fds)} descriptors, expected 1 "
            f"(truncated: {truncated}, reply as expected: {reply == expected})"
        )

    # The owner's side.

    def _accept(self, listener: socket.socket) -> None:
        """Takes one connection in; another user's is closed at once."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        connection.setblocking(False)
        if _credentials(connection)[1] != self._exchange.expected_uid:
            connection.close()
            return
        if len(self._exchange.silent) >= self._exchange.world_size + _MIN_STRANGERS:
            self._drop(self._exchange.silent[0])
        self._exchange.silent.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        """Reads a request and serves it, keeps it for the next exchange, or drops it."""
        try:
            request = connection.recv(_REQUEST.size)
        except OSError:
            request = b""
        asker = self._authenticate(request)
        if asker is None:
            self._drop(connection)
            return
        peer, generation = asker
        if generation == self._exchange.generation + 1:
            self._forget(connection)
            self._exchange.early.append((peer, connection))
            return
        if generation == self._exchange.generation:
            self._serve(peer, connection)
        self._drop(connection)

    def _authenticate(self, request: bytes) -> tuple[int, int] | None:
        """(rank, generation) of an asker that shows that rank's token."""
        if len(request) != _REQUEST.size:
            return None
        magic, generation, peer, token = _REQUEST.unpack(request)
        if magic != _MAGIC or peer >= self._exchange.world_size:
            return None
        known = bytes.fromhex(self._exchange.peers[peer].token)
        return (peer, generation) if hmac.compare_digest(token, known) else None

    def _serve(self, peer: int, connection: socket.socket) -> None:
        """Sends the descriptor, once a peer. A peer that is gone by now is noticed where it is asked."""
        if peer in self._unserved:
            self._unserved.remove(peer)
            reply = _REPLY.pack(_MAGIC, self._exchange.generation, self._exchange.rank)
            with contextlib.suppress(ConnectionError):
                socket.send_fds(connection, [reply], [self._fd])

    # Shared.

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        if connection in self._exchange.silent:
            self._exchange.silent.remove(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _gone(self, peer: int, symptom: str) -> Exception:
        pid = self._exchange.pids[peer]
        if pid and _has_ended(pid):
            return PeerDiedError(f"rank {peer} (pid {pid}) died: it {symptom}", peer, pid)
        return ExchangeError(f"rank {peer} (pid {pid}) {symptom}")

    def _timed_out(self) -> PeerTimeoutError:
        missing = sorted(set(range(self._exchange.world_size)) - set(self._received) | self._unserved)
        return PeerTimeoutError(
            f"rank {self._exchange.rank} waited {self._exchange.timeout_s:g} s to exchange descriptors "
            f"(number {self._exchange.generation}) with ranks {missing}",
            missing[0],
        )


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel, in this process's namespaces."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(ucred)
    return pid, uid


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """(reply, descriptors, whether the kernel kept some back). ``socket.recv_fds`` drops its flags (CPython 3.11)."""
    fd_bytes = struct.calcsize("i")
    reply, ancillary, flags, _ = connection.recvmsg(_REPLY.size, socket.CMSG_LEN(fd_bytes), socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in struct.iter_unpack("i", data[: len(data) // fd_bytes * fd_bytes])
    ]
    return reply, fds, bool(flags & socket.MSG_CTRUNC)


def _has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie, or becomes one within a moment."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(_DEATH_MS))
    finally:
        os.close(pidfd)
