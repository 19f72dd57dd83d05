"""``init_process_group("symm", "symm://")``: finds the ranks as ``symmcomm.init`` does, under mpirun and alone as well.

Under torchrun the default, ``env://``, is all that is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from symmcomm.bootstrap import connect
from symmcomm.errors import BootstrapError


def rendezvous(url: str, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    """Yields (store, rank, world size), once: the ranks agree on a store that rank 0 serves."""
    timeout_s = timeout.total_seconds()
    bootstrap = connect(None, timeout_s)
    rank, world_size = bootstrap.rank, bootstrap.world_size
    try:
        with socket.socket() as listener:
            if rank == 0:
                listener.bind(("", 0))
                listener.listen()
            own = f"{socket.gethostname()} {listener.getsockname()[1]}" if rank == 0 else ""
            _, port = bootstrap.all_gather(own.encode(), timeout_s)[0].decode().split()
            descriptor = listener.detach() if rank == 0 else None
        # All ranks are on one host, which the group makes sure of.
        store = TCPStore("127.0.0.1", int(port), world_size, rank == 0, timedelta(seconds=timeout_s), False,
                         master_listen_fd=descriptor)  # fmt: skip
    finally:
        bootstrap.close()
    yield store, rank, world_size
    raise BootstrapError(f"{url} was used up: ranks that come later cannot join")
