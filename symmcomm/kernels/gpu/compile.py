"""Compiled kernels, kept in memory and on disk.

A kernel is a frozen dataclass whose fields are its specialisation; its representation is the key, together with the
architecture, the versions of the compilers and a digest of the sources. Nothing of a key is a pointer or a rank, so one
object serves all ranks and all runs. Objects are written beside their place and renamed into it: no reader ever sees
half of one, and ranks that start together at worst compile the same kernel twice.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
import tvm_ffi
from cutlass.cute.runtime import load_module, make_fake_stream

_PACKAGE = Path(__file__).parents[2]
_FUNCTION = "symmcomm_kernel"
_loaded: dict[tuple[Any, str], Callable[..., None]] = {}


class Kernel(Protocol):
    """What ``compiled`` needs of a kernel."""

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders of the arguments before the stream."""
        ...


def architecture(capability: tuple[int, int]) -> str:
    """``(9, 0)`` → ``"sm_90a"``: instructions of the very architecture where there are any."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def default_directory() -> Path:
    """Where objects lie if nobody says otherwise."""
    return Path.home() / ".cache" / "symmcomm" / "kernels"


def compiled(kernel: Kernel, arch: str, directory: Path | None = None) -> Callable[..., None]:
    """The function ``(*arguments, stream)`` of a kernel for an architecture such as ``"sm_90a"``. Integers are passed
    as Python's; a stream is anything with CUDA's stream protocol, or its handle. It launches and returns.

    ``directory`` keeps objects between runs (default ``default_directory()``).
    """
    found = _loaded.get((kernel, arch))
    if found is None:
        path = (directory or default_directory()) / f"{_digest(kernel, arch)}.o"
        found = _load(path) if path.exists() else None
        if found is None:
            built = compile_kernel(kernel, arch)
            _export(built, path)
            found = _load(path) or built  # what was loaded is called without a wrapper in Python
        _loaded[kernel, arch] = found
    return found


def compile_kernel(kernel: Kernel, arch: str, options: str = "") -> Any:
    """Compiles without a cache, and without a GPU. ``options``: more of CuTe DSL's, such as ``--keep-ptx``."""
    call: Any = kernel
    return cute.compile(
        call, *kernel.arguments(), make_fake_stream(), options=f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    )


def _load(path: Path) -> Callable[..., None] | None:
    """None for an object that cannot be loaded; the caller replaces it."""
    try:
        function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
    except (RuntimeError, OSError, AttributeError):
        return None
    return function


def _export(built: Any, path: Path) -> None:
    """A cache that cannot be written costs a compilation a run, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".o.tmp")
        os.close(handle)
        built.export_to_c(name, function_name=_FUNCTION)
        os.replace(name, path)
    except OSError:
        return


def _digest(kernel: Kernel, arch: str) -> str:
    return hashlib.sha256(f"{kernel!r} {arch} {_sources()}".encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """Digest of everything that a kernel is made from."""
    files = [*sorted((_PACKAGE / "kernels" / "gpu").glob("*.py")), *sorted((_PACKAGE / "schedule").glob("*.py"))]
    digest = hashlib.sha256(f"{cutlass.__version__} {tvm_ffi.__version__}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
