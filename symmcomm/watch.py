"""What a rank does while nothing arrives: looks at its peers and at the clock, and lets Ctrl-C in.

A kernel that waits calls ``Watch.address`` every POLL_INTERVAL_NS, and is told to go on or to stop; ``error`` then
holds what the call must raise. What a signal handler raises in here, as Ctrl-C does, is told apart: the wait must not
return as if nothing had been, though the peer has arrived in the meantime.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from symmcomm.errors import PeerAbortedError, PeerDiedError, PeerError, PeerTimeoutError, in_words
from symmcomm.kernels.cpu import context as c
from symmcomm.memory.status import Fate, Report, StatusPage


class Watch:
    """The watch of one communicator.

    Args:
        pids: of each rank; 0 where it cannot be seen, as in another pid namespace.
        pages: status pages of all ranks.
        context: this rank's fields (``kernels.cpu.context``).
        timeout_s: deadline of one wait, in seconds.

    Attributes:
        error: why the last wait was stopped.
        timeout_name: where the deadline comes from, for the message of its error.
        interrupt: set to an error, stops the wait that goes on, and every later one.
    """

    def __init__(
        self, rank: int, pids: Sequence[int], pages: Sequence[StatusPage], context: NDArray[np.int64], timeout_s: float
    ) -> None:
        self.rank, self.pids, self.pages, self.timeout_s = rank, pids, pages, timeout_s
        self.error: BaseException | None = None
        self.timeout_name = "SYMMCOMM_TIMEOUT_S"
        self.interrupt: BaseException | None = None
        self._context = context
        self._poll = select.poll()
        self._peer_of_fd: dict[int, int] = {}
        self._dead: set[int] = set()
        for peer, pid in enumerate(pids):
            if peer != rank and pid:
                self._watch_process(peer, pid)
        # A generator's send, not a function: Python runs signal handlers where its code starts or resumes, and here it
        # resumes inside the try block. At the start of a function, KeyboardInterrupt would escape to ctypes and be
        # lost.
        self._generator = self._answers()
        next(self._generator)
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(self._generator.send)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _watch_process(self, peer: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead.add(peer)
            return
        except OSError:  # not permitted or not known here: this peer's death ends in a time-out
            return
        self._peer_of_fd[fd] = peer
        self._poll.register(fd, select.POLLIN)

    def _answers(self) -> Generator[int, int, None]:
        answer = c.GO_ON
        while True:
            try:
                while True:  # Python runs handlers where it jumps back as well: here that is inside the block
                    yield answer
                    self.error = self._look()
                    answer = c.GO_ON if self.error is None else c.STOP
            except GeneratorExit:
                raise
            except BaseException as error:
                self.error, answer = error, c.RAISED

    def _look(self) -> BaseException | None:
        now = time.monotonic_ns()
        peer = int(self._context[c.WAIT_PEER])
        if error := self.interrupt or self._failure(peer):
            return error
        if self._context[c.WAIT_SINCE] == 0:
            self._context[c.WAIT_SINCE] = now
        if now - int(self._context[c.WAIT_SINCE]) < self.timeout_s * 1e9:
            return None
        culprit = self._last_of_chain(peer)
        return PeerTimeoutError(
            f"rank {culprit} did not arrive within {self.timeout_s:g} s ({self.timeout_name}): rank {self.rank} "
            f"waited for rank {peer}, expected signal {int(self._context[c.WAIT_EXPECTED])}, saw {self._seen()}",
            culprit,
        )

    def _seen(self) -> int:
        return ctypes.c_uint32.from_address(int(self._context[c.WAIT_WORD])).value

    def _last_of_chain(self, peer: int) -> int:
        """The rank that keeps the others waiting: ``peer``, or whom that one waits for, and so on."""
        seen = {self.rank}
        while peer not in seen:
            seen.add(peer)
            following = self.pages[peer].waiting_for()
            if following is None or following in seen:
                break
            peer = following
        return peer

    def _failure(self, awaited: int) -> PeerError | None:
        """The first cause of trouble among the peers: a process that ended without a word before one that reports, and
        that before one that is awaited but has closed the communicator."""
        self._dead.update(self._peer_of_fd[fd] for fd, _ in self._poll.poll(0))
        reports = {peer: page.report() for peer, page in enumerate(self.pages) if peer != self.rank}
        stopped = {peer: report for peer, report in reports.items() if report.fate > Fate.CLOSED}
        silent = sorted(peer for peer in self._dead if reports[peer].fate == Fate.RUNNING)
        if silent:
            peer = silent[0]
            return PeerDiedError(f"rank {peer} (pid {self.pids[peer]}) is gone", peer, self.pids[peer])
        for peer, report in sorted(stopped.items()):
            return self._passed_on(peer, report)
        if awaited != self.rank and reports[awaited].fate is Fate.CLOSED:
            return PeerAbortedError(f"rank {awaited} has closed the communicator", awaited)
        return None

    def _passed_on(self, peer: int, report: Report) -> PeerError:
        """The error that a peer reports, as this rank raises it."""
        if report.fate is Fate.PEER_DIED and report.culprit != self.rank:
            return PeerDiedError(f"{report.text} (reported by rank {peer})", report.culprit, report.culprit_pid)
        if report.fate is Fate.PEER_LATE and report.culprit != self.rank:
            return PeerTimeoutError(f"{report.text} (reported by rank {peer})", report.culprit)
        return PeerAbortedError(f"rank {peer} gave up: {report.text}", peer)

    def stop(self) -> BaseException:
        """Takes the error of a stopped wait, and tells the peers."""
        error, self.error = self.error or self._unread(), None
        self.tell(error)
        return error

    def tell(self, error: BaseException) -> None:
        """Tells the peers why this rank stopped."""
        if isinstance(error, PeerDiedError):
            report = Report(Fate.PEER_DIED, error.rank, error.pid, str(error))
        elif isinstance(error, PeerTimeoutError):
            report = Report(Fate.PEER_LATE, error.rank, 0, str(error))
        else:
            report = Report(Fate.RAISED, self.rank, 0, in_words(error))
        self.pages[self.rank].stop(report)

    def cause(self, peer: int) -> PeerError | None:
        """Why not to wait for ``peer``: somebody's process is gone, or somebody gave up; None if all is well."""
        return self._failure(peer)

    def _unread(self) -> PeerError:
        """Why a kernel stopped that was not told to: a peer's memory could not be read."""
        peer = int(self._context[c.WAIT_PEER])
        for _ in range(50):  # a process that is being killed loses its memory a moment before it is gone
            if error := self._failure(peer):
                return error
            time.sleep(0.002)
        return PeerAbortedError(f"the memory of rank {peer} (pid {self.pids[peer]}) cannot be read", peer)

    def close(self) -> None:
        """Closes the descriptors that watch the peers' processes."""
        for fd in self._peer_of_fd:
            os.close(fd)
        self._peer_of_fd.clear()
        self._poll = select.poll()
