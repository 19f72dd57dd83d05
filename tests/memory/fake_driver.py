# ruff: noqa: N802, N818  functions are named as the driver names them
"""A machine of GPUs that are not there: what the memory providers call of ``cuda.bindings.driver``, recorded.

One ``Machine`` is shared by the ranks, which are threads, each with a ``FakeDriver`` of its own. It keeps the books of
physical memory, mappings, reservations and handles, so a test sees what is left behind, and refuses what the driver
would refuse. Any call can be made to fail.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from symmcomm.errors import PeerTimeoutError
from symmcomm.memory.exchange import DescriptorExchange

GRANULARITY = 2 << 20
TIMEOUT_S = 20.0


class Named(int):
    """An enumerator: a number with a name."""

    name: str

    def __new__(cls, value: int, name: str) -> Named:
        self = super().__new__(cls, value)
        self.name = name
        return self


OK = Named(0, "CUDA_SUCCESS")
OUT_OF_MEMORY = Named(2, "CUDA_ERROR_OUT_OF_MEMORY")
INVALID = Named(1, "CUDA_ERROR_INVALID_VALUE")
NOT_PERMITTED = Named(800, "CUDA_ERROR_NOT_PERMITTED")


class Enumeration:
    """Every name is there, with a number of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Named:
        if name.startswith("_"):
            raise AttributeError(name)
        value = Named(next(self._numbers), name)
        setattr(self, name, value)
        return value


class Handle64:
    """A struct of 64 bytes."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_uint8 * 64)()

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


@dataclass
class Memory:
    """Physical memory, or a multicast object."""

    number: int
    size: int
    references: int = 1  # handles, exported descriptors not counted
    zeroed: bool = False
    words: dict[int, int] = field(default_factory=dict)
    devices: list[int] = field(default_factory=list)
    num_devices: int = 0  # of a multicast object
    bound: int = 0


class Machine:
    """What all drivers share."""

    def __init__(self, free_bytes: int = 1 << 40, attributes: dict[str, int] | None = None) -> None:
        self.free_bytes, self.total_bytes = free_bytes, 1 << 40
        self.attributes = {
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
            "HANDLE_TYPE_FABRIC_SUPPORTED": 1,
            "MULTICAST_SUPPORTED": 1,
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "MULTIPROCESSOR_COUNT": 132,
        } | (attributes or {})
        self.memories: dict[int, Memory] = {}
        self.log: list[tuple[int, str]] = []  # (rank, call), of all ranks
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)

    def new(self, size: int) -> Memory:
        memory = Memory(next(self.numbers), size)
        self.memories[memory.number] = memory
        return memory


class FakeDriver:
    """One process's driver.

    Attributes:
        calls: names, in order.
        failures: by name: (how many calls succeed first, the code of the one that fails).
    """

    def __init__(self, machine: Machine, rank: int = 0, num_devices: int = 8) -> None:
        self.machine, self.rank, self.num_devices = machine, rank, num_devices
        self.calls: list[str] = []
        self.failures: dict[str, tuple[int, Named]] = {}
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, Memory]] = {}
        self.accessible: set[int] = set()
        self.contexts = 0
        self._next_address = (rank + 1) << 44
        for name in (
            "CUdevice_attribute", "CUmemAllocationHandleType", "CUmemAllocationType", "CUmemLocationType",
            "CUmemAllocationGranularity_flags", "CUmemAccess_flags", "CUmulticastGranularity_flags",
        ):  # fmt: skip
            setattr(self, name, Enumeration())
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())
        self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmulticastObjectProp = SimpleNamespace
        self.CUipcMemHandle = Handle64

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            raise AttributeError(name)

        def recorded(*args: Any) -> tuple[Any, ...]:
            with self.machine.lock:
                self.calls.append(name)
                self.machine.log.append((self.rank, name))
                left, code = self.failures.get(name, (-1, OK))
                if left == 0:
                    del self.failures[name]
                    return (code,)
                if left > 0:
                    self.failures[name] = (left - 1, code)
                try:
                    value = function(self, *args)
                except Refused as refused:
                    return (refused.code,)
                return (OK, *value) if isinstance(value, tuple) else (OK,) if value is None else (OK, value)

        return recorded

    # Devices and contexts.

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetCount(self) -> int:
        return self.num_devices

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 77

    def _cuCtxPushCurrent(self, context: int) -> None:
        self.contexts += 1

    def _cuCtxPopCurrent(self) -> int:
        self.contexts -= 1
        return 77

    def _cuCtxSynchronize(self) -> None:
        self._needs_context()

    def _needs_context(self) -> None:
        refuse_unless(self.contexts > 0)

    def _cuDeviceGetAttribute(self, attribute: Named, device: int) -> int:
        return self.machine.attributes.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake GPU\0\0\0"

    def _cuDeviceGetUuid(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(bytes=bytes([device] * 16))

    def _cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 1

    def _cuMemGetInfo(self) -> tuple[int, int]:
        self._needs_context()
        return self.machine.free_bytes, self.machine.total_bytes

    # Virtual memory management.

    def _cuMemGetAllocationGranularity(self, properties: Any, option: Named) -> int:
        return GRANULARITY

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        refuse_unless(size % GRANULARITY == 0)
        start = self._take_address(size)
        self.reservations[start] = size
        return start

    def _take_address(self, size: int) -> int:
        start, self._next_address = self._next_address, self._next_address + size + GRANULARITY
        return start

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        refuse_unless(self.reservations.get(address) == size)
        refuse_unless(not any(address <= mapped < address + size for mapped in self.mappings))
        del self.reservations[address]

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        refuse_unless(size % GRANULARITY == 0)
        return self._allocate(size).number

    def _allocate(self, size: int) -> Memory:
        if size > self.machine.free_bytes:
            raise Refused(OUT_OF_MEMORY)
        self.machine.free_bytes -= size
        return self.machine.new(size)

    def _cuMemRelease(self, number: int) -> None:
        self._drop(self.machine.memories[number])

    def _drop(self, memory: Memory) -> None:
        memory.references -= 1
        if memory.references == 0:
            del self.machine.memories[memory.number]
            self.machine.free_bytes += memory.size if not memory.num_devices else 0

    def _cuMemMap(self, address: int, size: int, offset: int, number: int, flags: int) -> None:
        memory = self.machine.memories[number]
        inside = any(start <= address and address + size <= start + num for start, num in self.reservations.items())
        refuse_unless(inside and address not in self.mappings and size == memory.size and offset == 0)
        memory.references += 1
        self.mappings[address] = (size, memory)

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        refuse_unless(self.mappings[address][0] == size and count == len(access) == 1)
        self.accessible.add(address)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        refuse_unless(address in self.mappings and self.mappings[address][0] == size)
        self.accessible.discard(address)
        self._drop(self.mappings.pop(address)[1])

    def _cuMemRetainAllocationHandle(self, address: int) -> int:
        memory = self.mappings[address][1]
        memory.references += 1
        return memory.number

    def _cuMemExportToShareableHandle(self, number: int, kind: Named, flags: int) -> Any:
        text = str(number).encode()
        if kind.name.endswith("FABRIC"):
            handle = Handle64()
            ctypes.memmove(handle.getPtr(), text.ljust(64, b" "), 64)
            return handle
        fd = os.memfd_create("fake-gpu")
        os.write(fd, text)
        return fd

    def _cuMemImportFromShareableHandle(self, shared: Any, kind: Named) -> int:
        text = shared if isinstance(shared, bytes) else os.pread(shared, 64, 0)
        memory = self.machine.memories[int(text)]
        memory.references += 1
        return memory.number

    # Data.

    def _find(self, address: int) -> tuple[Memory, int]:
        for start, (size, memory) in self.mappings.items():
            if start <= address < start + size:
                refuse_unless(start in self.accessible)
                return memory, address - start
        raise Refused(INVALID)

    def _cuMemsetD8(self, address: int, value: int, size: int) -> None:
        self._needs_context()
        memory, offset = self._find(address)
        memory.zeroed = memory.zeroed or (value == 0 and offset == 0 and size == memory.size)

    def _cuMemsetD32(self, address: int, value: int, count: int) -> None:
        memory, offset = self._find(address)
        memory.words[offset] = value

    def _cuMemcpyDtoH(self, target: bytearray, address: int, size: int) -> None:
        memory, offset = self._find(address)
        target[:] = struct.pack("<I", memory.words.get(offset, 0))

    # Legacy handles.

    def _cuMemAlloc(self, size: int) -> int:
        self._needs_context()
        memory, address = self._allocate(size), self._take_address(size)
        self.mappings[address] = (size, memory)
        self.accessible.add(address)
        return address

    def _cuMemFree(self, address: int) -> None:
        memory = self.mappings[address][1]
        refuse_unless(memory.references == 1)  # undefined behaviour: somebody still has it open
        self.mappings.pop(address)
        self._drop(memory)

    def _cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        for start, (size, _) in self.mappings.items():
            if start <= address < start + size:
                return start, size
        raise Refused(INVALID)

    def _cuIpcGetMemHandle(self, address: int) -> Handle64:
        handle = Handle64()
        ctypes.memmove(handle.getPtr(), str(self.mappings[address][1].number).encode().ljust(64, b" "), 64)
        return handle

    def _cuIpcOpenMemHandle(self, handle: Handle64, flags: int) -> int:
        refuse_unless(flags == 1)
        memory = self.machine.memories[int(bytes(handle._bytes))]
        memory.references += 1
        address = self._take_address(memory.size)
        self.mappings[address] = (memory.size, memory)
        self.accessible.add(address)
        return address

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        self._drop(self.mappings.pop(address)[1])

    # Multicast.

    def _cuMulticastGetGranularity(self, properties: Any, option: Named) -> int:
        return GRANULARITY

    def _cuMulticastCreate(self, properties: Any) -> int:
        memory = self.machine.new(properties.size)
        memory.num_devices = properties.numDevices
        return memory.number

    def _cuMulticastAddDevice(self, number: int, device: int) -> None:
        memory = self.machine.memories[number]
        refuse_unless(device not in memory.devices)
        memory.devices.append(device)

    def _cuMulticastBindMem(self, number: int, at: int, memory: int, offset: int, size: int, flags: int) -> None:
        multicast = self.machine.memories[number]
        refuse_unless(len(multicast.devices) == multicast.num_devices and memory in self.machine.memories)
        multicast.bound += 1

    def _cuMulticastUnbind(self, number: int, device: int, at: int, size: int) -> None:
        self.machine.memories[number].bound -= 1


class Refused(Exception):
    """The driver would return an error."""

    def __init__(self, code: Named) -> None:
        super().__init__(code.name)
        self.code = code


def refuse_unless(condition: bool) -> None:
    """The driver's CUDA_ERROR_INVALID_VALUE."""
    if not condition:
        raise Refused(INVALID)


class World:
    """Ranks as threads, with a control plane."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._payloads: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size)

    def all_gather(self, rank: int, payload: bytes) -> list[bytes]:
        try:
            self._payloads[rank] = payload
            self._barrier.wait(TIMEOUT_S)
            answers = list(self._payloads)
            self._barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise PeerTimeoutError("a rank of the test did not come", 0) from None
        return answers

    def exchange(self, rank: int) -> DescriptorExchange:
        return DescriptorExchange(rank, self.world_size, lambda payload: self.all_gather(rank, payload), TIMEOUT_S)


def run_threads(world_size: int, rank_function: Callable[[int, World], Any]) -> list[Any]:
    """Calls ``rank_function(rank, world)`` in a thread a rank; returns values, or the exceptions that ended them."""
    world, results = World(world_size), [None] * world_size

    def body(rank: int) -> None:
        try:
            results[rank] = rank_function(rank, world)
        except BaseException as error:
            results[rank] = error
            world._barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return results
