"""Shared memory of one host: anonymous memory files (memfd), mapped at fixed addresses.

A memfd has no name in any file system: when the last process that maps it ends, by whatever death, the memory is gone.
Its size is sealed, so that no peer can truncate it and make this process fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

import torch

from symmcomm.errors import ExchangeError, OutOfSymmetricMemoryError
from symmcomm.memory.provider import Offer, Segment

PAGE_BYTES = mmap.PAGESIZE
"""What mappings and segments are multiples of."""

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MADV_HUGEPAGE = 14
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(address: int, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped)


def reserve(num_bytes: int) -> int:
    """Takes address space without memory; returns its start."""
    try:
        return _mmap(0, num_bytes, _PROT_NONE, _RESERVED, -1)
    except OSError as error:
        raise OutOfSymmetricMemoryError(
            f"cannot reserve {num_bytes} bytes of address space for the symmetric heap ({error.strerror}): "
            "lower SYMMCOMM_HEAP_MAX_BYTES, or raise the limit on virtual memory (ulimit -v)"
        ) from None


def create(num_bytes: int) -> int:
    """A descriptor of ``num_bytes`` of zeroed shared memory; pages are taken when they are first touched."""
    fd = os.memfd_create("symmcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_at(address: int, num_bytes: int, fd: int) -> None:
    """Maps the shared memory inside a reservation, with huge pages where the system gives them to shared memory."""
    if os.fstat(fd).st_size != num_bytes:
        raise OSError(f"descriptor holds {os.fstat(fd).st_size} bytes, expected {num_bytes}")
    _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)  # advice: a refusal changes nothing


def unmap(address: int, num_bytes: int) -> None:
    """Gives the memory of a range back; its address space stays reserved."""
    _libc.mmap(address, num_bytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)


def unreserve(address: int, num_bytes: int) -> None:
    """Gives address space back, and memory that is still mapped there."""
    _libc.munmap(address, num_bytes)


def available_bytes() -> int:
    """Memory that this process could still take: the host's, or its control group's if that is less."""
    available = 1 << 62
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


class PosixProvider:
    """``memory.provider.Provider`` of the host's memory."""

    name, place = "posix", "this host"
    granularity_bytes = PAGE_BYTES
    growable, divisible, owner_frees_last = True, True, False

    reserve, unreserve, unmap = staticmethod(reserve), staticmethod(unreserve), staticmethod(unmap)
    available_bytes = staticmethod(available_bytes)

    def create(self, address: int, num_bytes: int) -> Segment:
        """New zeroed memory, mapped at ``address``; the offer is a descriptor."""
        fd = create(num_bytes)
        try:
            map_at(address, num_bytes, fd)
        except BaseException:
            os.close(fd)
            raise
        return Segment(address, fd)

    def map(self, address: int, num_bytes: int, offer: Offer) -> int:
        """Maps a peer's memory at ``address``. Raises ExchangeError if the offer is none of this provider's."""
        if not isinstance(offer, int):
            raise ExchangeError(f"a peer offers {len(offer)} bytes where memory of this host comes by a descriptor")
        map_at(address, num_bytes, offer)
        return address

    def reclaim(self) -> None:
        """Nothing is ever put off."""

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """A CPU tensor of uint8 that keeps ``owner`` alive."""
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)
