"""The CUDA driver as the memory providers use it: checked calls, one device, and what finalisers put off.

``cuda.bindings.driver`` is imported when a device is first opened. Tests put a recording fake in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from symmcomm.errors import ArgumentError, CudaError, OutOfSymmetricMemoryError, in_words

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_put_off: dict[tuple[Any, int], deque[Callable[[], object]]] = {}
"""By driver and device, in the order in which it was noted: tensors may outlive the heap and the provider."""


def load_driver() -> Any:
    """``cuda.bindings.driver``, initialised. Raises CudaError if it or the driver's library is not there."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        code = driver.cuInit(0)[0]
    except Exception as error:  # the loader's own exception types differ from version to version
        raise CudaError(f"the CUDA driver cannot be loaded: {in_words(error)}", "") from None
    if code:
        raise CudaError(f"cuInit failed: {code.name}", code.name)
    return driver


def call(driver: Any, name: str, *args: Any) -> Any:
    """Calls a driver function; returns its value, a tuple of values, or None.

    Raises CudaError with the function's and the error's name.
    """
    code, *values = getattr(driver, name)(*args)
    if code:
        text = getattr(code, "name", str(code))
        raise CudaError(f"{name} failed: {text}", text)
    return values[0] if len(values) == 1 else tuple(values) or None


def capturing() -> bool:
    """Whether torch's current stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class CudaDevice:
    """One GPU of this process, by its ordinal as torch counts.

    Attributes:
        driver: ``cuda.bindings.driver`` or what stands in for it.
        ordinal, handle: the device's number and the driver's handle of it.
    """

    def __init__(self, ordinal: int, driver: Any = None) -> None:
        self.driver = load_driver() if driver is None else driver
        self.ordinal = ordinal
        self.handle = call(self.driver, "cuDeviceGet", ordinal)
        self._context: Any = None
        self._put_off = _put_off.setdefault((self.driver, ordinal), deque())

    def __str__(self) -> str:
        return f"GPU {self.ordinal}"

    def call(self, name: str, *args: Any) -> Any:
        """``call`` on this device's driver, with the device's context current."""
        with self.current():
            return call(self.driver, name, *args)

    def undo(self, name: str, *args: Any) -> None:
        """``call`` on the way out of an error: a failure here would hide the first one, which may be its cause."""
        with contextlib.suppress(CudaError):
            self.call(name, *args)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the primary context, which torch uses too, current in a block. It stays retained until exit."""
        if self._context is None:
            self._context = call(self.driver, "cuDevicePrimaryCtxRetain", self.handle)
        call(self.driver, "cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            call(self.driver, "cuCtxPopCurrent")

    def attribute(self, name: str) -> int:
        """A device attribute by its name without ``CU_DEVICE_ATTRIBUTE_``; 0 where the driver does not know it."""
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return 0
        return int(call(self.driver, "cuDeviceGetAttribute", attribute, self.handle))

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def zero(self, address: int, num_bytes: int) -> None:
        """Fills with zeros, and waits until it is done."""
        with self.current():
            call(self.driver, "cuMemsetD8", address, 0, num_bytes)
            call(self.driver, "cuCtxSynchronize")

    def refuse_in_capture(self, what: str) -> None:
        """Raises ArgumentError while torch's current stream is being captured: the synchronisation that ``what`` needs
        would spoil the graph."""
        if capturing():
            raise ArgumentError(f"{what} cannot be captured in a CUDA graph: do it before the capture")

    @contextlib.contextmanager
    def names_sizes(self, num_bytes: int) -> Iterator[None]:
        """Turns the driver's out of memory into an error that says how much was asked for and how much there is."""
        try:
            yield
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = self.memory()
            raise OutOfSymmetricMemoryError(
                f"{self} has no {num_bytes} bytes for the symmetric heap ({error}): {free} of {total} bytes are free; "
                "lower SYMMCOMM_HEAP_MAX_BYTES, or give back what torch caches (torch.cuda.empty_cache())"
            ) from None

    def later(self, undo: Callable[[], object]) -> None:
        """Notes what must not be done where it falls due: a finaliser may run inside a graph capture or a kernel's
        wait, where synchronising would break the one and outlast the other."""
        self._put_off.append(undo)

    def reclaim(self) -> None:
        """Does what was put off on this device, once nothing runs there any more. Not during a graph capture, nor in a
        context that an error has made unusable: there it goes with the process."""
        if not self._put_off or capturing():
            return
        try:
            self.call("cuCtxSynchronize")
        except CudaError:
            return
        while self._put_off:
            self._put_off.popleft()()


def handle_bytes(handle: Any) -> bytes:
    """The 64 bytes of a fabric or IPC handle; cuda-python names the field differently from version to version."""
    return ctypes.string_at(int(handle.getPtr()), 64)


def handle_from_bytes(handle: Any, raw: bytes) -> Any:
    """Fills a fresh handle with the 64 bytes that ``handle_bytes`` gave elsewhere."""
    ctypes.memmove(int(handle.getPtr()), raw, 64)
    return handle
