"""Of processes that want the same compiled, one compiles; the others wait, and find what it made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

_POLL_S = 0.01


@contextmanager
def alone(path: Path, patience_s: float) -> Iterator[None]:
    """While no other process is here with the same ``path``, an empty file that stays. The lock is the kernel's, so a
    killed process leaves none.

    Two processes may be here where that file cannot be locked, or after ``patience_s``: a process that was stopped
    stops nobody else. What they make must be renamed into its place, so that either's will do.
    """
    lock = FileLock(path, timeout=patience_s)
    with suppress(OSError, NotImplementedError):  # TimeoutError is an OSError
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=_POLL_S)
    try:
        yield
    finally:
        lock.release()
