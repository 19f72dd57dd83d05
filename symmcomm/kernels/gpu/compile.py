"""Compiled kernels, kept in memory and on disk.

A kernel is a frozen dataclass whose fields are its specialisation; its representation is the key, together with the
architecture, the versions of the compilers and a digest of the sources. Nothing of a key is a pointer or a rank, so one
object serves all ranks and all runs. Objects are written beside their place and renamed into it: no reader ever sees
half of one. Of ranks that start together one compiles, and the others wait for its object.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
import tvm_ffi
from cutlass.cute.runtime import load_module, make_fake_stream

from symmcomm.kernels.cache import gpu_folder
from symmcomm.kernels.lock import alone

_PACKAGE = Path(__file__).parents[2]
_FUNCTION = "symmcomm_kernel"
_PATIENCE_S = 10.0  # for another process that compiles the same
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


def compiled(kernel: Kernel, arch: str, directory: Path | None = None) -> Callable[..., None]:
    """The function ``(*arguments, stream)`` of a kernel for an architecture such as ``"sm_90a"``. Integers are passed
    as Python's; a stream is anything with CUDA's stream protocol, or its handle. It launches and returns.

    ``directory`` keeps objects between runs (default ``cache.gpu_folder()``).
    """
    found = _loaded.get((kernel, arch))
    if found is None:
        path = (directory or gpu_folder()) / f"{_digest(kernel, arch)}.o"
        found = _cached(path)
        if found is None:
            with alone(path.with_suffix(".lock"), _PATIENCE_S):
                found = _cached(path) or _build(kernel, arch, path)
        _loaded[kernel, arch] = found
    return found


def compile_kernel(kernel: Kernel, arch: str, options: str = "") -> Any:
    """Compiles without a cache, and without a GPU. ``options``: more of CuTe DSL's, such as ``--keep-ptx``.

    The result is there to be exported, not called. Where there is a GPU that runs it, CuTe DSL would make it callable,
    for which it generates the host's half twice more: a quarter of the time of a whole compilation.
    """
    call: Any = kernel
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    return cute.compile(call, *kernel.arguments(), make_fake_stream(), options=options, no_jit_engine=True)


def _load(path: Path) -> Callable[..., None]:
    """What an object holds. It is called without a wrapper in Python, and needs the file no more."""
    function: Callable[..., None] = load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
    return function


def _cached(path: Path) -> Callable[..., None] | None:
    """None if there is no object, or one that cannot be loaded; the caller replaces it."""
    try:
        return _load(path) if path.exists() else None
    except (RuntimeError, OSError, AttributeError):
        return None


def _build(kernel: Kernel, arch: str, path: Path) -> Callable[..., None]:
    """Compiles, and keeps the object. A cache that cannot be written costs a compilation a run, no more: the object
    then passes through a temporary file. Raises OSError if there can be none either."""
    built = compile_kernel(kernel, arch)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _through(built, path.parent, path)
    return _through(built, Path(tempfile.gettempdir()), None)


def _through(built: Any, folder: Path, path: Path | None) -> Callable[..., None]:
    """Loads what was compiled from a new file in the folder, which then becomes ``path``, or goes."""
    handle, name = tempfile.mkstemp(dir=folder, suffix=".o.tmp")
    os.close(handle)
    try:
        built.export_to_c(name, function_name=_FUNCTION, export_only_tvm_ffi_symbols=True)
        function = _load(Path(name))
        if path is not None:
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return function


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
