"""An ordered queue of calls. Whoever waits for one runs it; until then a thread of the lane works the queue off.

``busy`` is held by the one thread that runs calls of the lane. A synchronous call takes it, finds nothing queued, and
runs where it is: no other thread is involved. An asynchronous call is queued and the lane's thread woken; if the caller
waits before that thread has begun, the caller runs the queue up to its own call, as fast as a synchronous call.

No wake-up is lost: the thread goes back to sleep when it finds the lane busy, and whoever leaves the lane looks at the
queue after letting go of it.

A signal handler may raise, as Ctrl-C does, just when a thread has taken the lane, or is about to let go of it. The lane
then stays that thread's: it alone can take it again, and lets go of it all when it next leaves. ``inside`` tells this
from a handler that makes a call while its own thread is in one, and is refused: who takes the lane sets it within the
``try`` block, and clears it first thing in ``finally``. CPython runs handlers after calls, where functions start and
where loops jump back, never at a bare assignment: so ``inside`` is true in the call, and false once the block is left.

Futures are completed after the lane is let go of, since callbacks may make calls and wait for them, as DDP's hooks do.
If that happens while all threads of the lane are in callbacks, it gets another one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from symmcomm.distributed.work import PendingWork
from symmcomm.errors import ConcurrentCallError, WaitTimeoutError

FOREVER = threading.TIMEOUT_MAX


class Lane:
    """A lane of one process group.

    Args:
        name: for the thread and for error messages.
        timeout_s: how long a wait without a time limit of its own lasts; the longest where calls keep the deadline.
    """

    can_stop = False
    """Whether ``step`` keeps to its deadline; if not, a wait with a time limit leaves the work to the thread."""

    def __init__(self, name: str, timeout_s: float = FOREVER) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.busy = threading.RLock()
        self.inside = False  # whether the thread that has the lane is in a call
        self._is_mine: Callable[[], bool] = self.busy._is_owned  # type: ignore[attr-defined]  # as Condition has it
        self.pending: deque[PendingWork] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._signalled = False
        self.ended: deque[PendingWork] = deque()  # whose futures are to be completed
        self._threads: list[threading.Thread] = []
        self._num_away = 0  # threads that are in callbacks
        self._closed = False

    def take(self) -> bool:
        """Takes the lane if no other thread has it. Raises ConcurrentCallError if this one is in a call."""
        if not self.busy.acquire(False):
            return False
        if self.inside:
            self.busy.release()
            raise ConcurrentCallError(f"{self.name}: a call is under way below this signal handler")
        return True

    def is_interrupted(self) -> bool:
        """Whether this is a signal handler, and its own thread in a call of the lane."""
        return self._is_mine() and self.inside

    def enter(self) -> bool:
        """Takes the lane for a synchronous call, if nothing runs or is queued."""
        if not self.take():
            return False
        if self.pending:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Lets go of the lane."""
        while self._is_mine():
            self.busy.release()
        if self.pending or self._closed:
            self.wake()
        if self.ended:
            self._settle()

    def _settle(self) -> None:
        while self.ended:
            with contextlib.suppress(IndexError):  # another thread may have been faster
                self.ended.popleft().settle()

    def submit(self, work: PendingWork) -> None:
        """Queues a call."""
        self.pending.append(work)
        self.wake()

    def wake(self) -> None:
        """Has a thread of the lane look at the queue; starts one if there is none, or all are in callbacks."""
        if self._signalled:
            return
        self._signalled = True
        self._wakeups.put(None)
        if len(self._threads) == self._num_away and not self._closed:
            name = f"symmcomm {self.name}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()

    def complete(self, work: PendingWork, timeout_s: float) -> None:
        """Returns once the work is done, by running the queue up to it unless another thread does.

        Raises:
            WaitTimeoutError: not done after ``timeout_s`` (0: the lane's). The work goes on.
            ConcurrentCallError: see ``take``.
        """
        limit_s = timeout_s if timeout_s > 0 else self.timeout_s
        deadline = time.monotonic() + limit_s
        if (timeout_s <= 0 or self.can_stop) and self.take():
            try:
                self.inside = True
                while not work.done:
                    self.step(deadline)
            finally:
                self.inside = False
                self.leave()
        if not work.done and not work.await_done(deadline - time.monotonic()):
            raise self.timed_out(work, limit_s)

    def timed_out(self, work: PendingWork, limit_s: float) -> WaitTimeoutError:
        """The error for a wait that came to its end."""
        whom = "" if work.peer is None else f" with rank {work.peer}"
        return WaitTimeoutError(f"{self.name}{whom} timed out: not over after {limit_s:g} s")

    def step(self, deadline: float) -> None:
        """Runs the next call. Only for the thread that holds ``busy``."""
        self.pending.popleft().run()

    def close(self) -> None:
        """Waits for what is queued and ends the threads. In a signal handler above a call of its own thread, neither is
        waited for."""
        self._closed, interrupted = True, self.is_interrupted()
        if self._is_mine() and not interrupted:  # it was left taken
            self.leave()
        for _ in self._threads:
            self._wakeups.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and not interrupted:
                thread.join()

    def _serve(self) -> None:
        while not (self._closed and not self.pending):
            self._wakeups.get()
            self._signalled = False
            while self.pending and self.busy.acquire(False):
                try:
                    self.step(FOREVER)
                finally:
                    self.busy.release()
                if self.ended:
                    self._num_away += 1
                    self._settle()
                    self._num_away -= 1
