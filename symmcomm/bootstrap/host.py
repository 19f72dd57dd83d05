"""What a rank finds out about its host, and whether all ranks can reach each other's memory: one kernel, one network
namespace (that of the Unix sockets)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from symmcomm.errors import HostMismatchError

if TYPE_CHECKING:
    from symmcomm.bootstrap import Bootstrap

_LISTEN = "0A"  # the kernel's TCP_LISTEN


@dataclass(frozen=True)
class HostIdentity:
    """Where a process runs.

    Attributes:
        boot_id: the running kernel's; two containers of one host share it. The host's name where there is none.
        network_namespace: inode of the namespace; abstract Unix sockets do not cross it.
    """

    hostname: str
    boot_id: str
    network_namespace: int


def host_identity() -> HostIdentity:
    """The identity of the host that this process runs on. Never raises."""
    hostname = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = hostname
    try:
        network_namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network_namespace = 0
    return HostIdentity(hostname, boot_id, network_namespace)


def is_local(address: str) -> bool:
    """Whether an address, or a name's first address, is one of this host's: only then can a socket be bound to it."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def listening() -> set[int] | None:
    """TCP ports that somebody listens on in this network namespace: from the kernel's tables (proc(5),
    ``/proc/net/tcp``), which leaves no trace. ``None`` if they cannot be read."""
    ports: set[int] | None = None
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            ports = ports or set()
            for line in lines:
                _, local, _, state, *_ = line.split()
                if state == _LISTEN:
                    ports.add(int(local.rsplit(":", 1)[1], 16))
    return ports


def check_same_host(bootstrap: Bootstrap, timeout_s: float) -> None:
    """Collective. Raises HostMismatchError, on all ranks, if they are not all in one place."""
    own = json.dumps(asdict(host_identity())).encode()
    hosts = [HostIdentity(**json.loads(text)) for text in bootstrap.all_gather(own, timeout_s)]
    places: dict[tuple[str, int], list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault((host.boot_id, host.network_namespace), []).append(rank)
    if len(places) == 1:
        return
    several_hosts = len({host.boot_id for host in hosts}) > 1
    what = "hosts" if several_hosts else "network namespaces of one host (as containers have)"
    listing = "; ".join(_describe(ranks, hosts[ranks[0]], several_hosts) for ranks in places.values())
    raise HostMismatchError(f"the ranks run in {len(places)} different {what}, without shared memory: {listing}")


def _describe(ranks: list[int], host: HostIdentity, several_hosts: bool) -> str:
    where = f"boot id {host.boot_id}" if several_hosts else f"network namespace {host.network_namespace}"
    return f"ranks {', '.join(map(str, ranks))} on {host.hostname} ({where})"
