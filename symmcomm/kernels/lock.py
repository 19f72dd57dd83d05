"""Of processes that want the same compiled, one compiles; the others wait, and find what it made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

_POLL_S = 0.01


@contextmanager
def alone(path: Path, patience_s: float) -> Iterator[None]:
    """While no other process is here with the same ``path``, the file of a lock. The lock is the kernel's, so a killed
    process leaves none, and the file goes with whoever was last.

    Two processes may be here where the folder has no locks, or after ``patience_s``: a process that was stopped stops
    nobody else. What they make must be renamed into its place, so that either's will do.
    """
    lock = FileLock(path, timeout=patience_s)
    with suppress(OSError, NotImplementedError):  # TimeoutError is an OSError
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=_POLL_S)
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # who waits makes another
            with suppress(OSError):
                lock.release()
