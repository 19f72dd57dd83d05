"""Compilation, once a machine: whoever comes first compiles and writes Numba's cache, the others read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from symmcomm.kernels.cache import private_folder
from symmcomm.kernels.lock import alone

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
PATIENCE_S = 300.0
"""For another process, which may compile all that every program needs."""


def _lock_path() -> Path:
    """One lock for each user and installation of the library."""
    digest = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]
    return private_folder() / f"compile-{digest}.lock"


def cache_folder() -> Path:
    """Where Numba keeps the kernels of the host."""
    from symmcomm.kernels.cpu import barrier

    return Path(str(barrier.sync.stats.cache_path))


def compile_once(compile_: Callable[[], T]) -> T:
    """Runs a cached compilation while no other process of this user does: ranks that start together would otherwise
    all compile the same function at the same time."""
    with alone(_lock_path(), PATIENCE_S):
        _drop_stale_cache()
        return compile_()


@cache
def _drop_stale_cache() -> None:
    """Deletes what older sources compiled to. Numba looks at the file of a cached function only, but its machine code
    holds the functions it calls, from other files, as well."""
    directory = cache_folder()
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
