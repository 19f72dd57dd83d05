"""What a call of the backend returns: a ``Work`` that is over, or one that is still to be done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from symmcomm.distributed.lane import Lane

NO_TIMEOUT = timedelta(0)

_futures_lock = threading.Lock()  # held for a few instructions, when a future is made or the work it belongs to ends


class FinishedWork(dist.Work):
    """A call that is over. Holds no state of it, so that one object serves all synchronous calls.

    Args:
        source: rank that sent what was received.
    """

    def __init__(self, source: int = -1) -> None:
        super().__init__()
        self._source = source

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Does nothing."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future with no tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


FINISHED = FinishedWork()


class PendingWork(dist.Work):
    """A call that waits for its turn in a lane.

    Args:
        call: does it.
        outputs: value of the future and of ``result``, as gloo has it.
        peer: whom a point-to-point call is about, for the message of a time-out.
    """

    def __init__(
        self, lane: Lane, call: Callable[[], object], outputs: Sequence[torch.Tensor], peer: int | None = None
    ) -> None:
        super().__init__()
        self.lane, self.call, self.outputs, self.peer = lane, call, outputs, peer
        self.done, self.source = False, -1
        self.error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._given: torch.futures.Future[Any] | None = None  # what comes of it
        self._ended = False  # what finish() and get_future() agree on, under the lock
        self._over = threading.Lock()
        self._over.acquire()

    def run(self) -> None:
        """Does the call; the error, if there is one, is for those who wait."""
        try:
            self.call()
        except BaseException as error:
            self.finish(error)
        else:
            self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Ends the work. Its future, if it has one, is for whoever leaves the lane next."""
        del self.call  # lets go of its tensors
        self.error, self.done = error, True
        self._over.release()
        with _futures_lock:
            self._ended = True
            if self._future is not None:
                self.lane.ended.append(self)

    def settle(self) -> None:
        """Completes the future, which runs its callbacks."""
        assert self._future is not None
        self._future.set_result(None)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        """What ``then`` makes of the future. C++, as DDP's reducer, sees an error that is raised here; of one given to
        ``set_exception`` it knows nothing, and would take it for tensors."""
        if self.error is not None:
            raise self.error
        return list(self.outputs)

    def await_done(self, timeout_s: float) -> bool:
        """Blocks until another thread has ended the work. False: not within ``timeout_s``."""
        if not self._over.acquire(timeout=max(timeout_s, 0.0)):
            return False
        self._over.release()
        return True

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns True once the call is over. Raises its error; WaitTimeoutError if it is not over in time."""
        if not self.done:
            self.lane.complete(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return list(self.outputs)

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed with the output tensors when the call is over; an error comes out as torch's RuntimeError, with its
        text."""
        with _futures_lock:
            if self._given is not None:
                return self._given
            self._future, ended = torch.futures.Future(), self._ended
            self._given = given = self._future.then(self._outcome)
        if ended:
            self.settle()
        return given


class GroupedWork(dist.Work):
    """Several works as one, for ``_end_coalescing``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for each in turn."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed when all are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])
