"""Ends the waits of this rank's kernels when a peer will not come: a kernel can look at the clock, but at no process.

A thread sleeps on the peers' pidfds and now and then looks at what peers report. On bad news it sets the deadline in
the rank's private state to the past, by a copy that no kernel holds up; whatever waits gives up at its next look at the
clock, and ``GpuMemory.check`` finds the cause. A peer that closed the communicator is no bad news.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Sequence

from symmcomm.errors import CudaError
from symmcomm.memory.cuda_driver import CudaDevice
from symmcomm.memory.status import Fate, StatusPage

_LOOK_MS = 500
_AT_ONCE_NS = -1


class Alarm:
    """The thread of one communicator's GPU side.

    Args:
        rank: of this process. pids: of each rank, 0 where it cannot be seen. pages: status pages of all ranks.
        deadline_address: of this rank's TIMEOUT_NS, on the device.
        keeps: whatever owns the pages and that place; the thread may outlive a communicator that nobody closes.
    """

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        pages: Sequence[StatusPage],
        device: CudaDevice,
        deadline_address: int,
        keeps: object,
    ) -> None:
        self._device, self._address, self._keeps = device, deadline_address, keeps
        self._pages = {peer: page for peer, page in enumerate(pages) if peer != rank}
        self._stream = device.call("cuStreamCreate", int(device.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._word = ctypes.c_int64(_AT_ONCE_NS)
        self._poll = select.poll()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._end, select.POLLIN)
        self._peer_of_fd: dict[int, int] = {}
        self._dead: set[int] = set()
        for peer in self._pages:
            self._watch(peer, pids[peer])
        self._thread = threading.Thread(target=self._run, name="symmcomm-alarm", daemon=True)
        self._thread.start()

    def _watch(self, peer: int, pid: int) -> None:
        if pid:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(peer)
            except OSError:  # not permitted or not known here: this peer's death ends in the deadline
                return
            else:
                self._peer_of_fd[fd] = peer
                self._poll.register(fd, select.POLLIN)

    def _run(self) -> None:
        while True:
            if self._is_bad():  # again and again: a call may set a deadline of its own
                self.ring()
            for fd, _ in self._poll.poll(_LOOK_MS):
                if fd == self._end:
                    return
                self._dead.add(self._peer_of_fd[fd])
                self._poll.unregister(fd)

    def ring(self) -> None:
        """Sets the deadline to the past."""
        with contextlib.suppress(CudaError):  # a broken context ends the kernels itself
            self._device.call("cuMemcpyHtoDAsync", self._address, ctypes.addressof(self._word), 8, self._stream)

    def _is_bad(self) -> bool:
        """Whether a process ended without a word, or a rank says that it gave up."""
        fates = {peer: page.report().fate for peer, page in self._pages.items()}
        return any(fate > Fate.CLOSED or (fate is Fate.RUNNING and peer in self._dead) for peer, fate in fates.items())

    def close(self) -> None:
        """Ends the thread."""
        if self._end < 0:
            return
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for fd in [self._end, *self._peer_of_fd]:
            os.close(fd)
        self._end = -1
        self._keeps = None
        self._device.undo("cuStreamDestroy", self._stream)
