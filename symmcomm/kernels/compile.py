"""Compilation, once a machine: whoever comes first compiles and writes Numba's cache, the others read it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]


def _lock_path() -> Path:
    """One lock for each user and installation of the library."""
    digest = hashlib.sha256(f"{os.getuid()}:{_PACKAGE}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"symmcomm-compile-{digest}.lock"


def compile_once(compile_: Callable[[], T]) -> T:
    """Runs a cached compilation while no other process of this user does: ranks that start together would otherwise
    all compile the same function at the same time. The lock is the kernel's, so a killed process leaves none."""
    with FileLock(_lock_path()):
        _drop_stale_cache()
        return compile_()


@cache
def _drop_stale_cache() -> None:
    """Deletes what older sources compiled to. Numba looks at the file of a cached function only, but its machine code
    holds the functions it calls, from other files, as well."""
    from symmcomm.kernels.cpu import barrier

    directory = Path(str(barrier.sync.stats.cache_path))
    sources = [*sorted((_PACKAGE / "kernels" / "cpu").glob("*.py")), *sorted((_PACKAGE / "schedule").glob("*.py"))]
    sources.append(_PACKAGE / "memory" / "signals.py")
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    stamp = directory / "symmcomm-sources.txt"
    if stamp.exists() and stamp.read_text() == digest:
        return
    for pattern in ("*.nbi", "*.nbc"):
        for compiled in directory.glob(pattern):
            compiled.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
