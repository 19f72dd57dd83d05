"""GPU memory by the driver's virtual memory management: the flat address space as it should be.

Physical memory (cuMemCreate) and address space (cuMemAddressReserve) are separate things here, so each rank maps every
peer's memory where the heap wants it, at base + p · stride. A segment goes to the peers as a POSIX descriptor. Memory
lives until the last process that maps it has unmapped it or died, by whatever death.

With ``fabric`` it goes as a 64-byte handle instead, which needs no common network namespace and, where an IMEX domain
spans them, no common host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from symmcomm.errors import ArgumentError, CudaError, ExchangeError, OutOfSymmetricMemoryError
from symmcomm.memory.cuda_driver import CudaDevice, handle_bytes
from symmcomm.memory.device_tensor import device_tensor
from symmcomm.memory.provider import Offer, Segment


class VmmProvider:
    """``memory.provider.Provider`` of one GPU's memory.

    Args:
        fabric: offers are fabric handles.
        granularity_bytes: the greatest of all ranks' granularities, where they differ; 0 takes this device's.

    Raises:
        ArgumentError: ``granularity_bytes`` is not a multiple of what this device needs.
        CudaError: the device cannot do it; ``probe_gpu`` tells beforehand.
    """

    growable, divisible, owner_frees_last = True, False, False

    def __init__(self, device: CudaDevice, *, fabric: bool = False, granularity_bytes: int = 0) -> None:
        self.device, self.fabric = device, fabric
        self.name, self.place = "fabric" if fabric else "cuda_vmm", str(device)
        kinds = device.driver.CUmemAllocationHandleType
        self._kind = kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        least = device_granularity(device, self._kind)
        self.granularity_bytes = granularity_bytes or least
        if self.granularity_bytes % least:
            raise ArgumentError(
                f"granularity_bytes={granularity_bytes} is not a multiple of the {least} bytes that {device} needs"
            )

    def reserve(self, num_bytes: int) -> int:
        """Takes address space; raises OutOfSymmetricMemoryError if there is none."""
        try:
            return int(self.device.call("cuMemAddressReserve", num_bytes, self.granularity_bytes, 0, 0))
        except CudaError as error:
            raise OutOfSymmetricMemoryError(
                f"cannot reserve {num_bytes} bytes of address space on {self.device} ({error}): "
                "lower SYMMCOMM_HEAP_MAX_BYTES"
            ) from None

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Notes that the whole reservation is to be given back."""
        self.device.later(lambda: self.device.call("cuMemAddressFree", address, num_bytes))

    def create(self, address: int, num_bytes: int) -> Segment:
        """New zeroed memory, mapped at ``address``; the offer is a descriptor, or a fabric handle of 64 bytes.

        The mapping and the offer hold the memory; the driver's handle is released here.
        """
        device = self.device
        device.refuse_in_capture(f"growing the symmetric heap by {num_bytes} bytes")
        with contextlib.ExitStack() as release, device.names_sizes(num_bytes):
            memory = device.call("cuMemCreate", num_bytes, allocation(device, self._kind), 0)
            release.callback(device.undo, "cuMemRelease", memory)
            with self._mapped(address, num_bytes, memory) as keep:
                device.zero(address, num_bytes)
                offer = self._export(memory)
                keep()
            return Segment(address, offer)

    def map(self, address: int, num_bytes: int, offer: Offer) -> int:
        """Maps a peer's segment at ``address``.

        Raises ExchangeError if this device cannot reach it, or the offer is none of this provider's.
        """
        if isinstance(offer, bytes) is not self.fabric or offer == b"":
            expected = "a fabric handle" if self.fabric else "a descriptor"
            raise ExchangeError(f"a peer's offer is {type(offer).__name__} where {self.name} needs {expected}")
        try:
            memory = self.device.call("cuMemImportFromShareableHandle", offer, self._kind)
            with contextlib.ExitStack() as release:
                release.callback(self.device.undo, "cuMemRelease", memory)
                with self._mapped(address, num_bytes, memory) as keep:
                    keep()
        except CudaError as error:
            raise ExchangeError(f"{self.device} cannot map {num_bytes} bytes of a peer's memory: {error}") from None
        return address

    @contextlib.contextmanager
    def _mapped(self, address: int, num_bytes: int, memory: Any) -> Iterator[Callable[[], object]]:
        """Maps memory with access for this device, and unmaps it again unless the block calls what it is given."""
        device = self.device
        with contextlib.ExitStack() as undo:
            device.call("cuMemMap", address, num_bytes, 0, memory, 0)
            undo.callback(device.undo, "cuMemUnmap", address, num_bytes)
            device.call("cuMemSetAccess", address, num_bytes, [read_write(device)], 1)
            yield undo.pop_all

    def _export(self, memory: Any) -> Offer:
        exported = self.device.call("cuMemExportToShareableHandle", memory, self._kind, 0)
        return handle_bytes(exported) if self.fabric else int(exported)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Notes that a segment is to be unmapped."""
        self.device.later(lambda: self.device.call("cuMemUnmap", address, num_bytes))

    def reclaim(self) -> None:
        """Unmaps and gives back what was noted, after the device has finished its work."""
        self.device.reclaim()

    def available_bytes(self) -> int:
        """Free memory of the device."""
        return self.device.memory()[0]

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """A tensor of uint8 on this device, also where the memory is a peer's."""
        return device_tensor(self.device.ordinal, address, num_bytes, owner)


def allocation(device: CudaDevice, kind: Any) -> Any:
    """The driver's description of memory of ``device`` that can be shared as ``kind``."""
    driver = device.driver
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = kind
    if device.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
        properties.allocFlags.gpuDirectRDMACapable = 1
    return properties


def device_granularity(device: CudaDevice, kind: Any) -> int:
    """What sizes and addresses of such memory are multiples of, in bytes: what the driver recommends, so that large
    pages are used."""
    option = device.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(device.call("cuMemGetAllocationGranularity", allocation(device, kind), option))


def read_write(device: CudaDevice) -> Any:
    """The driver's description of full access by ``device``."""
    access = device.driver.CUmemAccessDesc()
    access.location.type = device.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = device.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
