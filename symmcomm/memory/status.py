"""The status page: what each rank tells those who wait for it. Written by its owner only, at the start of its heap."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from symmcomm.memory.signals import PAGE_BYTES, WAITING


class Fate(IntEnum):
    """How a rank fares."""

    RUNNING = 0
    CLOSED = 1
    PEER_DIED = 2
    """It stopped because a process is gone; ``culprit`` is that rank."""
    PEER_LATE = 3
    """It stopped because ``culprit`` did not arrive before the deadline."""
    RAISED = 4
    """It stopped for a reason of its own; ``text`` says which."""


class _Page(ctypes.Structure):
    _fields_: ClassVar = [
        ("fate", ctypes.c_int64),
        ("culprit", ctypes.c_int64),
        ("culprit_pid", ctypes.c_int64),
        ("waiting_for", ctypes.c_int64),  # written by kernels
        ("text", ctypes.c_char * 1024),
    ]


assert ctypes.sizeof(_Page) <= PAGE_BYTES
assert _Page.waiting_for.offset == WAITING


@dataclass(frozen=True)
class Report:
    """Why a rank stopped."""

    fate: Fate
    culprit: int
    culprit_pid: int
    text: str


class StatusPage:
    """One rank's page, mapped at ``address``."""

    def __init__(self, address: int) -> None:
        self._page = _Page.from_address(address)

    def report(self) -> Report:
        """What the owner last said."""
        page = self._page
        return Report(Fate(page.fate), page.culprit, page.culprit_pid, page.text.decode(errors="replace"))

    def stop(self, report: Report) -> None:
        """Says that the owner stopped, and why. The fate is stored last: a reader that sees it sees the rest (x86 keeps
        stores in order; elsewhere a torn text costs words of a message, no decision)."""
        page = self._page
        page.culprit, page.culprit_pid = report.culprit, report.culprit_pid
        page.text = report.text.encode()[:1000]
        page.fate = report.fate

    def waiting_for(self) -> int | None:
        """The rank that the owner waits for at this moment, after the first spins."""
        return int(self._page.waiting_for) - 1 if self._page.waiting_for else None
