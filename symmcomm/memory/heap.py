"""The symmetric heap: every rank maps every peer's memory at a fixed distance.

    byte ``offset`` of peer p is at   base + p · stride + offset   in this process

``stride`` (SYMMCOMM_HEAP_MAX_BYTES) is reserved once as address space. Segments are mapped into it in lockstep on all
ranks, so the heap grows without moving what was handed out. Offsets come from a deterministic allocator that every rank
runs alike; each request is compared across ranks first, so ranks that ask for different things get an error, not
corruption.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from symmcomm.errors import ArgumentError, MismatchError, OutOfSymmetricMemoryError
from symmcomm.memory import posix
from symmcomm.memory.allocator import Allocator
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.signals import align_up

_SEGMENT_BYTES = 32 << 20
"""The least that the heap grows by, to keep the number of mappings small. Untouched pages cost nothing."""


class _Mapping:
    """One mapped segment of one rank. Tensors on it keep it alive, so that they stay valid after ``close()``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes

    def __del__(self, _unmap: Callable[[int, int], None] = posix.unmap) -> None:
        _unmap(self.address, self.num_bytes)


class SymmetricHeap:
    """Memory of all ranks of one communicator.

    Args:
        control_bytes: room at the start of every rank's heap for signal pads and staging (``memory.signals``).
        max_bytes: what one rank's heap can grow to; address space is reserved for it, no memory.
        exchange: passes the segments' descriptors; owned by the heap from here on.

    Attributes:
        base, stride: of the flat address space, in bytes.
    """

    def __init__(
        self, rank: int, world_size: int, control_bytes: int, max_bytes: int, exchange: DescriptorExchange
    ) -> None:
        self.rank, self.world_size, self.exchange = rank, world_size, exchange
        self.stride = align_up(max_bytes, posix.PAGE_BYTES)
        if control_bytes > self.stride:
            raise OutOfSymmetricMemoryError(
                f"pads and staging need {control_bytes} bytes, more than SYMMCOMM_HEAP_MAX_BYTES={max_bytes}"
            )
        self.base = posix.reserve(world_size * self.stride)
        self.size = 0
        self._mappings: list[list[_Mapping]] = [[] for _ in range(world_size)]
        self._allocator = Allocator()
        try:
            self._grow(control_bytes)
            control = self._allocator.allocate(self.size)
            assert control == 0, control
        except BaseException:
            self.close()
            raise

    @property
    def own_address(self) -> int:
        """Where this rank's own heap begins."""
        return self.base + self.rank * self.stride

    def _grow(self, num_bytes: int) -> None:
        """Adds a segment of at least ``num_bytes`` on all ranks."""
        num_bytes = align_up(num_bytes, posix.PAGE_BYTES)
        fd = posix.create(num_bytes)
        try:
            fds = self.exchange.exchange(fd)
        finally:
            os.close(fd)
        try:
            for peer, peer_fd in enumerate(fds):
                address = self.base + peer * self.stride + self.size
                posix.map_at(address, num_bytes, peer_fd)
                self._mappings[peer].append(_Mapping(address, num_bytes))
        finally:
            for peer_fd in fds:
                os.close(peer_fd)
        self._allocator.grow(num_bytes)
        self.size += num_bytes

    def allocate(self, num_bytes: int, request: str, agree: Callable[[bytes], list[bytes]]) -> int:
        """Collective. Returns the offset of ``num_bytes``, the same on every rank.

        Args:
            request: what is asked for, in words; must be the same on every rank.
            agree: all-gather of bytes among the ranks.

        Raises:
            MismatchError: ranks ask for different things; names both requests.
            OutOfSymmetricMemoryError: no room, on this rank or another; nothing was allocated.
        """
        refusal = self._refusal(num_bytes)
        self._compare(request, refusal, agree)
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            self._grow(self._growth(num_bytes))
            offset = self._allocator.allocate(num_bytes)
        assert offset is not None, "the segment just added holds the request"
        return offset

    def free(self, offset: int, request: str, agree: Callable[[bytes], list[bytes]]) -> None:
        """Collective. Returns an allocation; raises ArgumentError for an offset that is none."""
        if offset == 0:
            raise ArgumentError("the control region of the heap cannot be freed")
        self._allocator.size_of(offset)
        self._compare(request, "", agree)
        self._allocator.free(offset)

    def _growth(self, num_bytes: int) -> int:
        """Bytes of the segment that would hold the request."""
        least = align_up(max(num_bytes, 1), posix.PAGE_BYTES)
        return max(least, min(_SEGMENT_BYTES, self.stride - self.size))

    def _refusal(self, num_bytes: int) -> str:
        """Why the request cannot be met on this rank; empty if it can."""
        if self._allocator.largest_free >= align_up(max(num_bytes, 1), self._allocator.alignment):
            return ""
        growth = align_up(max(num_bytes, 1), posix.PAGE_BYTES)
        if self.size + growth > self.stride:
            return (
                f"{num_bytes} bytes do not fit: {self._allocator.used_bytes} of {self.stride} bytes are used, "
                f"the largest hole has {self._allocator.largest_free}; raise SYMMCOMM_HEAP_MAX_BYTES={self.stride}"
            )
        available = posix.available_bytes()
        if growth > available:
            return (
                f"{num_bytes} bytes exceed the {available} bytes of memory this host has left "
                f"({self._allocator.used_bytes} bytes of the heap are used, SYMMCOMM_HEAP_MAX_BYTES={self.stride})"
            )
        return ""

    def _compare(self, request: str, refusal: str, agree: Callable[[bytes], list[bytes]]) -> None:
        answers = [answer.decode().split("\n", 1) for answer in agree(f"{request}\n{refusal}".encode())]
        for peer, (other, _) in enumerate(answers):
            if other != request:
                raise MismatchError(
                    f"ranks disagree about the symmetric heap: rank {self.rank} asks for {request}, "
                    f"rank {peer} for {other}"
                )
        for peer, (_, reason) in enumerate(answers):
            if reason:
                raise OutOfSymmetricMemoryError(f"symmetric heap of rank {peer}: {reason}")

    def offset_of(self, address: int, num_bytes: int) -> int:
        """Heap offset of a range of this rank's memory, or -1 if it lies elsewhere."""
        offset = address - self.own_address
        return offset if offset >= 0 and offset + num_bytes <= self.size else -1

    def buffer(self, peer: int, offset: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """Bytes of the peer's heap at ``offset`` as an object with the buffer protocol."""
        buffer = (ctypes.c_uint8 * num_bytes).from_address(self.base + peer * self.stride + offset)
        buffer.owners = list(self._mappings[peer])  # type: ignore[attr-defined]
        return buffer

    def close(self) -> None:
        """Gives the address space back; a mapped segment goes with the last tensor that uses it."""
        self.exchange.close()
        for peer, mappings in enumerate(self._mappings):
            mapped = sum(mapping.num_bytes for mapping in mappings)
            posix.unmap(self.base + peer * self.stride + mapped, self.stride - mapped)
            mappings.clear()
        self._mappings = []
