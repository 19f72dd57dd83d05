"""NVLink multicast over a VMM segment: one address whose stores reach all ranks, and whose loads reduce over them.

**The one gate.** ``multicast_allowed`` decides; every multicast entry point of the driver is called through
``_Entry.call`` below, which asks the gate again each time, and in no other file. A machine may support multicast (the
attribute reads 1) and yet forbid it: on some, using it takes the GPUs of the whole host out of service. Hence any of
SYMMCOMM_DISABLE_MULTICAST, TORCH_SYMM_MEM_DISABLE_MULTICAST, NCCL_NVLS_ENABLE and NVSHMEM_DISABLE_NVLS that is not
clearly a permission forbids it, on whichever rank it is set.

How the ranks bring one about, each step agreed by all before the next::

    rank 0                                     the others
    create, export ── descriptor ──────────►   import              rank 0 keeps its reference until all have imported
    add own device                             add own device      binding waits for all devices: agree first
    bind own segment, map                      bind own segment, map
                    barrier: the mapping works once all have bound; before, a store may fault
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from symmcomm.env import Settings, multicast_vetoes
from symmcomm.errors import SymmCommError
from symmcomm.memory.cuda_driver import CudaDevice, call
from symmcomm.memory.cuda_vmm import read_write
from symmcomm.memory.heap import AllGather, SymmetricHeap
from symmcomm.schedule.topology_gpu import Attempt


def multicast_allowed(settings: Settings, attribute: int, environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Whether this rank may use multicast, and why (not). Pure, but for reading the environment.

    Args:
        attribute: the device's MULTICAST_SUPPORTED; no permission by itself.
        environ: in place of the process's environment.
    """
    vetoes = multicast_vetoes(environ)
    if settings.disable_multicast and not any(veto.startswith("SYMMCOMM_") for veto in vetoes):
        vetoes = ["SYMMCOMM_DISABLE_MULTICAST (settings)", *vetoes]
    if vetoes:
        return False, f"forbidden by {', '.join(vetoes)}"
    if not attribute:
        return False, "the device does not support it (MULTICAST_SUPPORTED reads 0)"
    return True, "the device supports it, and nothing forbids it"


@dataclass(frozen=True)
class _Entry:
    """The way to the driver's multicast functions."""

    device: CudaDevice
    settings: Settings
    environ: Mapping[str, str] | None

    def allowed(self) -> tuple[bool, str]:
        real = isinstance(self.device.driver, ModuleType)
        environ = None if real else self.environ  # for the real driver the process's environment counts, always
        return multicast_allowed(self.settings, self.device.attribute("MULTICAST_SUPPORTED"), environ)

    def call(self, name: str, *args: Any) -> Any:
        allowed, reason = self.allowed()
        if not allowed:
            raise SymmCommError(f"{name} must not be called: {reason}")
        with self.device.current():
            return call(self.device.driver, name, *args)

    def undo(self, name: str, *args: Any) -> None:
        """As ``call``, for the way out: nothing is raised."""
        with contextlib.suppress(SymmCommError):
            self.call(name, *args)


class MulticastUnavailableError(SymmCommError, RuntimeError):
    """There is no multicast mapping, on any rank; the message says why."""


class MulticastSpace:
    """A heap seen by multicast: byte ``offset`` of all ranks at once is at ``base`` + offset.

    Args:
        heap: of a VMM provider on ``device``, with at least two ranks on as many GPUs.
        environ: in place of the process's environment, for the gate, where a fake stands in for the driver.

    Attributes:
        base: 0 until ``extend`` has mapped the first segment.
    """

    def __init__(
        self, device: CudaDevice, heap: SymmetricHeap, settings: Settings, environ: Mapping[str, str] | None = None
    ) -> None:
        self.base = 0
        self._entry, self._heap = _Entry(device, settings, environ), heap
        self._undo = contextlib.ExitStack()
        self._num_segments = 0

    def extend(self, agree: AllGather) -> None:
        """Collective. Maps the segments that the heap has gained. ``agree`` also is the barrier before first use.

        Raises:
            MulticastUnavailableError: on every rank: one must not, or cannot. If the gate refuses on one rank, no
                entry point is called on any; what was done up to a failure is undone.
        """
        allowed, reason = self._entry.allowed()
        if allowed and self._heap.world_size < 2:
            allowed, reason = False, "a world of one has nobody to reach"
        _settle("" if allowed else reason, agree)
        if not self.base:
            self._reserve(agree)
        for offset, num_bytes in self._heap.segments[self._num_segments :]:
            with contextlib.ExitStack() as undo:
                steps = _Steps(self._entry, self._heap, self.base + offset, offset, num_bytes, undo)
                for step in (steps.create, steps.exchange_object, steps.add_device, steps.bind, steps.map):
                    _agreed(step, agree)
                self._undo.push(undo.pop_all())
            self._num_segments += 1

    def _reserve(self, agree: AllGather) -> None:
        device, stride = self._entry.device, self._heap.capacity

        def reserve() -> None:
            self.base = int(device.call("cuMemAddressReserve", stride, self._heap.provider.granularity_bytes, 0, 0))
            self._undo.callback(device.undo, "cuMemAddressFree", self.base, stride)

        try:
            _agreed(reserve, agree)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps and unbinds everything. Call it after a barrier: no rank may use the addresses any more. Repeating it
        is harmless."""
        self._entry.device.refuse_in_capture("closing a multicast mapping")
        self._undo.close()
        self.base = self._num_segments = 0


class HeapMulticast:
    """The ``MulticastSpace`` of a heap for those who can do without one: there is none until it is wanted, and an
    attempt that failed is not repeated.

    Args:
        agree: all-gather of bytes among the ranks.
        device, heap, settings, environ: as of the space.

    Attributes:
        allowed: whether multicast may be tried (``topology_gpu.decide_multicast``), the same on all ranks; after an
            attempt that failed, what it came to.
    """

    def __init__(
        self, allowed: Attempt, agree: AllGather, device: CudaDevice, heap: SymmetricHeap, settings: Settings,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.allowed, self._agree = allowed, agree
        self._make = partial(MulticastSpace, device, heap, settings, environ)
        self._space: MulticastSpace | None = None

    def extend(self, wanted: bool) -> int:
        """Collective. Maps what the heap has gained if it is ``wanted``, on all ranks alike, or has been before.
        Returns the base, or 0: there is no mapping of the whole heap. One of a part stays until ``close``, as graphs
        and handles may have its addresses."""
        if not self.allowed.works or (self._space is None and not wanted):
            return 0
        self._space = self._space or self._make()
        try:
            self._space.extend(self._agree)
        except MulticastUnavailableError as error:
            self.allowed = Attempt(False, str(error))
            return 0
        return self._space.base

    def close(self) -> None:
        """See ``MulticastSpace.close``."""
        if self._space is not None:
            self._space.close()


def _agreed(step: Callable[[], None], agree: AllGather) -> None:
    """Takes a step and hears how it went elsewhere."""
    failure = ""
    try:
        step()
    except SymmCommError as error:
        failure = str(error)
    _settle(failure, agree)


def _settle(failure: str, agree: AllGather) -> None:
    for peer, reason in enumerate(agree(failure.encode())):
        if reason:
            raise MulticastUnavailableError(f"multicast is not used: rank {peer}: {reason.decode()}")


class _Steps:
    """The steps of one rank for one segment, in the order of the file's docstring. Each leaves what undoes it."""

    def __init__(
        self, entry: _Entry, heap: SymmetricHeap, address: int, offset: int, num_bytes: int, undo: contextlib.ExitStack
    ) -> None:
        self.entry, self.device, self.driver, self.heap = entry, entry.device, entry.device.driver, heap
        self.address, self.own_address, self.num_bytes, self.undo = address, heap.own_address + offset, num_bytes, undo
        self.kind = self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.object: Any = None
        self.descriptor = -1

    def create(self) -> None:
        """Rank 0 creates the object; all check that the segment fits it."""
        properties = self.driver.CUmulticastObjectProp()
        properties.numDevices, properties.size = self.heap.world_size, self.num_bytes
        properties.handleTypes, properties.flags = int(self.kind), 0
        option = self.driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        granularity_bytes = int(self.entry.call("cuMulticastGetGranularity", properties, option))
        if self.num_bytes % granularity_bytes or self.address % granularity_bytes:
            raise SymmCommError(
                f"a segment of {self.num_bytes} bytes for address {self.address:#x} is not aligned to the multicast "
                f"granularity {granularity_bytes}"
            )
        if self.heap.rank == 0:
            self.object = self.entry.call("cuMulticastCreate", properties)
            self.undo.callback(self.device.undo, "cuMemRelease", self.object)
            self.descriptor = int(self.device.call("cuMemExportToShareableHandle", self.object, self.kind, 0))
            self.undo.callback(self._close_descriptor)

    def exchange_object(self) -> None:
        """Rank 0's descriptor goes to all; the others give one of /dev/null, for an exchange is symmetric."""
        own = self.descriptor if self.heap.rank == 0 else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        received: list[int] = []
        try:
            received = self.heap.exchange.exchange(own)
            if self.heap.rank != 0:
                self.object = self.device.call("cuMemImportFromShareableHandle", received[0], self.kind)
                self.undo.callback(self.device.undo, "cuMemRelease", self.object)
        finally:
            for fd in [*received, *([own] if self.heap.rank != 0 else [])]:
                os.close(fd)

    def add_device(self) -> None:
        """All have imported by now, so rank 0's descriptor can go; its object lives by the reference that it keeps."""
        self._close_descriptor()
        self.entry.call("cuMulticastAddDevice", self.object, self.device.handle)

    def bind(self) -> None:
        """Binds this rank's segment; all devices have been added by now."""
        memory = self.device.call("cuMemRetainAllocationHandle", self.own_address)
        try:
            self.entry.call("cuMulticastBindMem", self.object, 0, memory, 0, self.num_bytes, 0)
        finally:
            self.device.undo("cuMemRelease", memory)
        self.undo.callback(self.entry.undo, "cuMulticastUnbind", self.object, self.device.handle, 0, self.num_bytes)

    def map(self) -> None:
        """Maps the object at its place. The agreement that follows is the barrier before use."""
        self.device.call("cuMemMap", self.address, self.num_bytes, 0, self.object, 0)
        self.undo.callback(self.device.undo, "cuMemUnmap", self.address, self.num_bytes)
        self.device.call("cuMemSetAccess", self.address, self.num_bytes, [read_write(self.device)], 1)
        self.undo.callback(self.device.undo, "cuCtxSynchronize")

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
