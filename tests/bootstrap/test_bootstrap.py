"""Bootstraps over torch.distributed's stores, a world of one, environments without sense, ranks that do not come."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from symmcomm.bootstrap import StoreBootstrap, connect, host
from symmcomm.bootstrap.host import HostIdentity, check_same_host
from symmcomm.env import Launch
from symmcomm.errors import ArgumentError, BootstrapError, HostMismatchError, PeerTimeoutError
from symmcomm.testing.spawn import RankResult, run_ranks

LAUNCH = Launch(
    rank=None, world_size=None, local_rank=None, master_addr=None, master_port=None, mpi=None, mpi_world_size=None
)


def launch(**values: Any) -> Launch:
    return Launch(**{**vars(LAUNCH), **values})


def rank() -> int:
    return int(os.environ["RANK"])


def gather_often() -> tuple[str, int]:
    """Returns the bootstrap's name and how many keys the store gained between the first and the last gather."""
    first, second = connect(None, 30.0), connect(None, 30.0)
    assert isinstance(first, StoreBootstrap)
    store, num_keys = first._store, []
    for number in range(12):
        for bootstrap in (first, second):
            own = b"%d:" % bootstrap.rank + b"x" * (number * bootstrap.rank)
            parts = bootstrap.all_gather(own, 30.0)
            assert parts == [b"%d:" % r + b"x" * (number * r) for r in range(bootstrap.world_size)]
        num_keys.append(store.num_keys())
    first.all_gather(b"", 30.0)  # rank 0 serves the store: it must not leave while others count
    return first.name, max(num_keys) - min(num_keys)


@pytest.mark.parametrize("world_size", [2, 5])
def test_tcp_store_does_not_grow(world_size: int) -> None:
    for result in run_ranks(gather_often, world_size):
        name, growth = result.value
        assert name == "TCP store"
        # A gather in flight has one key a rank and a counter, in each of the two bootstraps.
        assert growth <= 2 * (world_size + 1)


def leave_at_once() -> None:
    connect(None, 30.0).all_gather(b"", 30.0)
    if rank() == 0:
        os._exit(0)


def test_server_stays_until_all_have_read() -> None:
    for _ in range(5):
        assert all(result.ok for result in run_ranks(leave_at_once, 4))


def gather_large() -> list[int]:
    sizes = [0, 9 << 20, 1, (4 << 20)]
    parts = connect(None, 30.0).all_gather(bytes([rank()]) * sizes[rank()], 30.0)
    assert all(part == bytes([r]) * sizes[r] for r, part in enumerate(parts))
    return [len(part) for part in parts]


def test_payloads_of_any_length() -> None:
    assert run_ranks(gather_large, 4)[0].value == [0, 9 << 20, 1, 4 << 20]


def gather_in_groups() -> list[Any]:
    mine = connect(None, 30.0)  # a store of our own, then torch's on the same port
    dist.init_process_group("gloo")
    world = connect(None, 30.0)
    pair_group, other_group = dist.new_group([1, 2]), dist.new_group([0])
    group = other_group if rank() == 0 else pair_group
    pair = connect(group, 30.0)
    found = [world.name, pair.rank, pair.world_size, pair.all_gather(b"%d" % rank(), 30.0)]
    with pytest.raises(ArgumentError, match="has this process as a member"):
        connect(pair_group if rank() == 0 else other_group, 30.0)
    assert world.all_gather(b"%d" % rank(), 30.0) == mine.all_gather(b"%d" % rank(), 30.0) == [b"0", b"1", b"2"]
    dist.destroy_process_group()
    return found


def test_existing_group_and_sub_group() -> None:
    results = run_ranks(gather_in_groups, 3)
    assert results[0].value == ["process group's store", 0, 1, [b"0"]]
    assert results[1].value == ["process group's store", 0, 2, [b"1", b"2"]]
    assert results[2].value == ["process group's store", 1, 2, [b"1", b"2"]]


def test_world_of_one() -> None:
    for only in (connect(None, 1.0, LAUNCH), connect(None, 1.0, launch(rank=0, world_size=1))):
        assert (only.name, only.rank, only.world_size) == ("world of one", 0, 1)
        assert only.all_gather(b"alone", 1.0) == [b"alone"]
        only.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"world_size": 2}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"rank": 0, "world_size": 0}, "WORLD_SIZE=0"),
        ({"rank": 2, "world_size": 2}, r"RANK=2 is not in 0\.\.1"),
        ({"rank": -1, "world_size": 2}, "RANK=-1"),
        ({"rank": 0, "world_size": 2, "master_port": 80}, "MASTER_ADDR"),
        ({"rank": 0, "world_size": 2, "master_addr": "127.0.0.1"}, "MASTER_PORT, which is not set"),
        ({"rank": 0, "world_size": 2, "master_addr": "127.0.0.1", "master_port": 99999}, "MASTER_PORT=99999"),
        ({"rank": 1, "world_size": 2, "master_addr": "no such host", "master_port": 80}, "MASTER_ADDR='no such host'"),
    ],
)
def test_bad_environment_names_the_variable(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BootstrapError, match=message):
        connect(None, 5.0, launch(**values))


def test_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BootstrapError, match=f"TCP store at 127.0.0.1:{port}"):
            connect(None, 5.0, launch(rank=0, world_size=2, master_addr="127.0.0.1", master_port=port))


def wait_for_all(absent: int, timeout_s: float) -> tuple[int, float] | None:
    started = time.monotonic()
    if rank() == absent:
        time.sleep(timeout_s + 1)
        return None
    with pytest.raises(PeerTimeoutError, match=f"waited {timeout_s:g} s for rank {absent}") as caught:
        connect(None, timeout_s).all_gather(b"", timeout_s)
    waited_s = time.monotonic() - started
    if rank() == 0:
        time.sleep(1)  # rank 0 serves the store
    return caught.value.rank, waited_s


@pytest.mark.parametrize("absent", [0, 2])
def test_absent_rank_is_named(absent: int) -> None:
    for result in run_ranks(wait_for_all, 3, absent, 1.5):
        if result.rank != absent:
            named, waited_s = result.value
            assert named == absent
            assert 1.4 < waited_s < 3.5


def check_hosts(identities: list[HostIdentity]) -> str:
    own = identities[rank()]
    host.host_identity = lambda: own  # a process of its own: nothing to restore
    bootstrap = connect(None, 30.0)
    try:
        check_same_host(bootstrap, 30.0)
    except HostMismatchError as error:
        return str(error)
    return "same"


def hosts_seen(*identities: HostIdentity) -> list[str]:
    results: list[RankResult] = run_ranks(check_hosts, len(identities), list(identities))
    return [result.value for result in results]


def test_hosts_differ() -> None:
    a, b = HostIdentity("node-a", "1111", 7), HostIdentity("node-b", "2222", 7)
    seen = hosts_seen(a, b, a)
    assert len(set(seen)) == 1
    assert "2 different hosts" in seen[0]
    assert "ranks 0, 2 on node-a (boot id 1111); ranks 1 on node-b (boot id 2222)" in seen[0]


def test_network_namespaces_differ() -> None:
    seen = hosts_seen(HostIdentity("box-a", "1111", 7), HostIdentity("box-b", "1111", 8))
    assert len(set(seen)) == 1
    assert "network namespaces of one host" in seen[0]
    assert "ranks 1 on box-b (network namespace 8)" in seen[0]


def test_one_host() -> None:
    assert hosts_seen(HostIdentity("name-a", "1111", 7), HostIdentity("name-b", "1111", 7)) == ["same", "same"]
    real = host.host_identity()
    assert real.hostname
    assert real.boot_id
    assert hosts_seen(real, real) == ["same", "same"]


def test_listening_ports_are_seen() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        if not host.is_local(address):
            continue  # a host without IPv6
        with socket.socket(family) as server:
            server.bind((address, 0))
            port = server.getsockname()[1]
            assert port not in (host.listening() or ())
            server.listen()
            assert port in (host.listening() or ())
    assert not host.is_local("192.0.2.1")  # of the block for documentation (RFC 5737)


def test_store_listens_by_ipv4_where_its_address_is() -> None:
    """Else a TCPStore asks a name server about every rank, see ``_open_tcp_store``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bootstrap = connect(None, 5.0, launch(rank=0, world_size=2, master_addr="127.0.0.1", master_port=port))
    assert bootstrap.name == "TCP store"
    if host.is_local("::1"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", port), timeout=5).close()
