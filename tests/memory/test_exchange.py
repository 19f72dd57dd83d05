"""Descriptors reach every peer, and nobody else."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from functools import partial
from pathlib import Path

import pytest

from symmcomm.bootstrap import connect
from symmcomm.errors import ClosedError, ExchangeError, PeerDiedError, PeerError, PeerTimeoutError
from symmcomm.memory import exchange as exchange_module
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.testing.spawn import run_ranks

TIMEOUT_S = 20.0
BROKEN = (ExchangeError, PeerError)  # what a rank sees of a peer that gave up, and may have ended since
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def rank() -> int:
    return int(os.environ["RANK"])


def make(timeout_s: float = TIMEOUT_S) -> DescriptorExchange:
    bootstrap = connect(None, TIMEOUT_S)
    return DescriptorExchange(
        bootstrap.rank, bootstrap.world_size, partial(bootstrap.all_gather, timeout_s=TIMEOUT_S), timeout_s
    )


def own_file(text: str) -> int:
    fd = os.memfd_create("exchange-test")
    os.write(fd, text.encode())
    return fd


def num_fds(exchange: DescriptorExchange) -> int:
    """Open descriptors, but for the bootstrap's TCP sockets and connections of peers that are one exchange ahead."""
    count = -len(exchange.early) - len(exchange.silent)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
            if not is_socket:
                count += 1
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                count += duplicate.family == socket.AF_UNIX
    return count


def exchange_and_check(exchange: DescriptorExchange, note: str = "") -> None:
    """One exchange of a memfd that says whose it is, read back by all; nothing stays open."""
    fd = own_file(f"{exchange.rank}{note}")
    received = exchange.exchange(fd)
    assert [os.pread(each, 99, 0).decode() for each in received] == [f"{r}{note}" for r in range(exchange.world_size)]
    assert not any(os.get_inheritable(each) for each in received)
    for each in (fd, *received):
        os.close(each)


def exchange_once() -> list[int]:
    exchange = make()
    exchange_and_check(exchange)
    pids = exchange.pids
    exchange.close()
    exchange.close()
    with pytest.raises(ClosedError):
        exchange.exchange(0)
    return pids


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_every_descriptor(world_size: int) -> None:
    results = run_ranks(exchange_once, world_size)
    pids = [result.pid for result in results]
    assert all(result.value == pids for result in results)


def exchange_shared_memory() -> bytes:
    exchange = make()
    fd = os.memfd_create("exchange-test")
    os.ftruncate(fd, 16)
    received = exchange.exchange(fd)
    for each in received:
        os.pwrite(each, bytes([65 + rank()]), rank())
    connect(None, TIMEOUT_S).all_gather(b"", TIMEOUT_S)
    return os.pread(fd, exchange.world_size, 0)


def test_descriptors_are_the_peers_own_memory() -> None:
    assert [result.value for result in run_ranks(exchange_shared_memory, 3)] == [b"ABC"] * 3


def exchange_often(times: int) -> None:
    exchange = make()
    exchange_and_check(exchange)
    before = num_fds(exchange)
    for number in range(times):
        if number % 7 == rank():
            time.sleep(0.01)  # the others run ahead
        exchange_and_check(exchange, f" in exchange {number}")
    connect(None, TIMEOUT_S).all_gather(b"", TIMEOUT_S)  # opens nothing: the store is there already
    assert num_fds(exchange) == before


def test_fifty_exchanges_leak_nothing() -> None:
    run_ranks(exchange_often, 3, 50)


def test_many_ranks() -> None:
    run_ranks(exchange_often, 32, 2)


def call(exchange: DescriptorExchange, peer: int) -> socket.socket:
    """A connection to the peer's socket, as a stranger that knows its name would make it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(f"\0{exchange.peers[peer].name}")
    return connection


def answer_to(exchange: DescriptorExchange, request: bytes) -> tuple[bytes, list[int]]:
    """What rank 0 answers to a request."""
    with call(exchange, 0) as connection:
        try:
            connection.sendall(request)
            reply, fds, _, _ = socket.recv_fds(connection, 99, 4)
        except ConnectionError:
            return b"", []
        return reply, fds


def genuine_request(exchange: DescriptorExchange) -> bytes:
    token = bytes.fromhex(exchange.peers[exchange.rank].token)
    return exchange_module._REQUEST.pack(b"symmcomm", exchange.generation + 1, exchange.rank, token)


def ask_wrongly() -> None:
    exchange = make()
    if rank() == 1:
        pack = exchange_module._REQUEST.pack
        own, peers = [bytes.fromhex(exchange.peers[r].token) for r in (1, 0)]
        for request in (
            b"",
            b"hello",
            pack(b"symmcomm", 1, 1, bytes(32)),  # no token
            pack(b"symmcomm", 1, 1, peers),  # another rank's token
            pack(b"symmcomm", 1, 0, own),  # another rank's name
            pack(b"symmcomm", 1, 7, own),  # no such rank
            pack(b"symmcomm", 0, 1, own),  # an exchange that was
            pack(b"symmcomm", 5, 1, own),  # an exchange far off
            pack(b"strange!", 1, 1, own),
        ):
            if not request:
                call(exchange, 0).close()
            else:
                assert answer_to(exchange, request) == (b"", [])
        assert exchange.generation == 0
    exchange_and_check(exchange)


def test_without_token_nobody_gets_anything() -> None:
    run_ranks(ask_wrongly, 2)


def ask_twice() -> None:
    exchange = make()
    if rank() == 1:
        reply, fds = answer_to(exchange, genuine_request(exchange))
        assert (len(reply), len(fds)) == (16, 1)
        assert answer_to(exchange, genuine_request(exchange)) == (b"", [])
    else:
        exchange.timeout_s = 2.0
        with pytest.raises(BROKEN):  # rank 1 does not take part
            exchange.exchange(own_file("0"))


def test_a_rank_is_answered_once() -> None:
    run_ranks(ask_twice, 2)


def ask_as_other_user(user: int) -> None:
    exchange = make()
    if rank() == 1:
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.setuid(user)
                code = 0 if answer_to(exchange, genuine_request(exchange)) == (b"", []) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    exchange_and_check(exchange)


@needs_root
def test_other_user_gets_nothing_even_with_the_token() -> None:
    run_ranks(ask_as_other_user, 2, 65534)


def refuse_peers() -> str:
    exchange = make(2.0)
    if rank() == 0:
        exchange.expected_uid += 1
    with pytest.raises(BROKEN) as caught:
        exchange.exchange(own_file("secret"))
    exchange.close()
    return str(caught.value)


def test_peer_of_another_user_is_refused_by_both_sides() -> None:
    seen = [result.value for result in run_ranks(refuse_peers, 2)]
    assert f"the socket of rank 1 belongs to user {os.geteuid()}" in seen[0]
    assert "rank 0" in seen[1]


def impersonate() -> str:
    """Rank 1 says that its socket is pid 1's: what rank 0 finds there is not what it was told."""
    exchange = make(2.0)
    if rank() == 0:
        exchange.peers[1] = exchange_module._Peer(**{**vars(exchange.peers[1]), "pid": 1})
    with pytest.raises(BROKEN) as caught:
        exchange.exchange(own_file("secret"))
    exchange.close()
    return str(caught.value)


def test_listener_must_be_the_announced_process() -> None:
    results = run_ranks(impersonate, 2)
    assert results[0].value == f"the socket of rank 1 belongs to pid {results[1].pid}, not 1"


def crowd(num_strangers: int) -> float:
    """Rank 1 fills rank 0's queue with connections that say nothing and stay."""
    exchange = make()
    strangers: list[socket.socket] = []
    if rank() == 1:
        for _ in range(num_strangers):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            strangers.append(stranger)
            try:
                stranger.connect(f"\0{exchange.peers[0].name}")
            except BlockingIOError:
                break
    connect(None, TIMEOUT_S).all_gather(b"", TIMEOUT_S)
    started = time.monotonic()
    exchange_and_check(exchange)
    exchange_and_check(exchange)
    took_s = time.monotonic() - started
    if rank() == 0:
        assert not exchange.silent
    # Rank 0 has let all of them go.
    assert all(select.select([stranger], [], [], TIMEOUT_S)[0] for stranger in strangers)
    return took_s


@pytest.mark.parametrize("num_strangers", [3, 500])
def test_silent_strangers_disturb_nobody(num_strangers: int) -> None:
    assert max(result.value for result in run_ranks(crowd, 3, num_strangers)) < 2.0


def answer_without_descriptor() -> str:
    exchange = make(2.0)
    if rank() == 0:
        socket.send_fds = lambda sock, buffers, fds, *rest: sock.send(buffers[0])  # type: ignore[assignment]
    before = num_fds(exchange)
    try:
        exchange_and_check(exchange)
    except BROKEN as error:
        assert num_fds(exchange) == before + 1  # own_file's
        return str(error)
    return "fine"


def test_answer_without_descriptor_is_an_error() -> None:
    seen = [result.value for result in run_ranks(answer_without_descriptor, 2)]
    assert "rank 0 answered rank 1 with 0 descriptors, expected 1" in seen[1]


def miss(absent: int) -> tuple[int, str, float] | None:
    exchange = make(1.0)
    exchange_and_check(exchange)
    if rank() == absent:
        time.sleep(2.5)
        return None
    before, started = num_fds(exchange), time.monotonic()
    fd = own_file("")
    with pytest.raises(PeerTimeoutError) as caught:
        exchange.exchange(fd)
    assert num_fds(exchange) == before + 1
    waited_s = time.monotonic() - started
    time.sleep(1.5)  # stays until all have waited
    return caught.value.rank, str(caught.value), waited_s


def test_missing_rank_is_named() -> None:
    for result in run_ranks(miss, 4, 2):
        if result.rank != 2:
            named, message, waited_s = result.value
            assert named == 2
            assert message == f"rank {result.rank} waited 1 s to exchange descriptors (number 2) with ranks [2]"
            assert 0.9 < waited_s < 2.0


def die(folder: str) -> tuple[int, int, float] | None:
    exchange = make()
    exchange_and_check(exchange)
    if rank() == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    with pytest.raises(PeerDiedError) as caught:
        exchange.exchange(own_file(""))
    return caught.value.rank, caught.value.pid, time.monotonic() - started


def test_dead_rank_is_named_at_once(tmp_path: Path) -> None:
    results = run_ranks(die, 2, str(tmp_path), check=False)
    named, pid, took_s = results[0].value
    assert (named, pid) == (1, int((tmp_path / "pid").read_text()))
    assert took_s < 2.0
