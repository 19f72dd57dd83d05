"""Fault injection: a rank that is late, dies or is interrupted at a given time, and what dead ranks left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from symmcomm.kernels.cpu import context as c

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


@contextlib.contextmanager
def delayed(comm: Communicator, seconds: float) -> Iterator[None]:
    """In the block this rank sleeps before each of its signals: proves that the others wait for it."""
    field = ctypes.c_int64.from_address(comm.ctx + 8 * c.DELAY_NS)
    before, field.value = field.value, int(seconds * 1e9)
    try:
        yield
    finally:
        field.value = before


def agreed_time(comm: Communicator, seconds: float) -> float:
    """Collective. A moment ``seconds`` from now on the clock ``time.monotonic``, the same for all ranks of the host."""
    return float(comm.all_gather_bytes(repr(time.monotonic() + seconds).encode())[0])


def signal_self_at(moment: float, signum: int = signal.SIGKILL) -> None:
    """Has this process send itself a signal at a moment of ``time.monotonic``, whatever its main thread then does."""

    def send() -> None:
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(os.getpid(), signum)

    threading.Thread(target=send, daemon=True).start()


def abstract_sockets() -> set[str]:
    """Names of the abstract Unix sockets of this network namespace."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1][1:] for line in lines if line.split()[-1].startswith("@")}


def shared_mappings() -> list[str]:
    """Files that this process maps shared and writable, as the kernel names them: ``(deleted)`` if without a name."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[-1] for fields in maps if fields[1] == "rw-s" and fields[-1].startswith("/")]
