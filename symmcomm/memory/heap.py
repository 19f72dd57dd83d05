"""The symmetric heap: every rank maps every peer's memory at a fixed distance.

    byte ``offset`` of peer p is at   base + p · stride + offset   in this process

``stride`` (SYMMCOMM_HEAP_MAX_BYTES) is reserved once as address space. Segments are mapped into it in lockstep on all
ranks, so the heap grows without moving what was handed out. Offsets come from a deterministic allocator that every rank
runs alike; each request is compared across ranks first, so ranks that ask for different things get an error, not
corruption. Whose memory it is, the host's or a GPU's, is the provider's matter (``memory.provider``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable
from itertools import accumulate

import torch

from symmcomm.errors import (
    ArgumentError,
    ExchangeError,
    MismatchError,
    OutOfSymmetricMemoryError,
    SymmCommError,
    in_words,
)
from symmcomm.memory.allocator import Allocator
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.posix import PosixProvider
from symmcomm.memory.provider import Offer, Provider
from symmcomm.memory.signals import align_up

_SEGMENT_BYTES = 32 << 20
"""The least that the heap grows by, to keep the number of mappings small. Untouched pages of the host cost nothing."""

AllGather = Callable[[bytes], list[bytes]]


class _Space:
    """The reservation. Where it cannot be divided, it goes with the last segment on it."""

    def __init__(self, provider: Provider, num_bytes: int) -> None:
        self.provider, self.num_bytes = provider, num_bytes
        self.base = provider.reserve(num_bytes)

    def part_unused(self, address: int, num_bytes: int) -> None:
        """Nothing will be mapped in this part any more."""
        if self.provider.divisible and num_bytes:
            self.provider.unreserve(address, num_bytes)

    def __del__(self) -> None:
        if not self.provider.divisible and hasattr(self, "base"):
            self.provider.unreserve(self.base, self.num_bytes)


class _Mapping:
    """One mapped segment of one rank. Tensors on it keep it alive, so that they stay valid after ``close()``."""

    def __init__(self, space: _Space, address: int, num_bytes: int) -> None:
        self.space, self.address, self.num_bytes = space, address, num_bytes
        self.last = True  # nothing will take its place: its address space goes with it
        self.offered = False  # peers may have mapped it

    def __del__(self) -> None:
        self.space.provider.unmap(self.address, self.num_bytes)
        if self.last:
            self.space.part_unused(self.address, self.num_bytes)


class SymmetricHeap:
    """Memory of all ranks of one communicator.

    Args:
        control_bytes: room at the start of every rank's heap for signal pads and staging (``memory.signals``).
        max_bytes: what one rank's heap can grow to; address space is reserved for it, no memory. A provider that cannot
            grow takes all of it as memory.
        exchange: passes the segments' descriptors; owned by the heap from here on.
        provider: of the memory; the host's by default.
        agree: all-gather of bytes among the ranks. Without it, which only a provider that offers descriptors allows,
            a rank that fails here shows to the others as an ExchangeError.

    Attributes:
        base, stride: of the flat address space, in bytes. The stride may be negative where the driver chose addresses.
        segments: (offset, bytes) of each segment that every rank has mapped, in order.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        control_bytes: int,
        max_bytes: int,
        exchange: DescriptorExchange,
        *,
        provider: Provider | None = None,
        agree: AllGather | None = None,
    ) -> None:
        self.rank, self.world_size, self.exchange = rank, world_size, exchange
        self.provider = provider or PosixProvider()
        self.stride = self.capacity = align_up(max_bytes, self.provider.granularity_bytes)
        if control_bytes > self.stride:
            raise OutOfSymmetricMemoryError(
                f"pads and staging need {control_bytes} bytes, more than SYMMCOMM_HEAP_MAX_BYTES={max_bytes}"
            )
        self.provider.reclaim()
        self._space: _Space | None = _Space(self.provider, world_size * self.stride)
        self.base = self._space.base
        self.size = 0
        self._mappings: list[list[_Mapping]] = [[] for _ in range(world_size)]
        self._allocator = Allocator()
        try:
            self._grow(control_bytes if self.provider.growable else self.stride, agree)
            control = self._allocator.allocate(control_bytes)
            assert control == 0, control
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> list[tuple[int, int]]:
        sizes = [mapping.num_bytes for mapping in self._mappings[self.rank]]
        return list(zip(accumulate(sizes, initial=0), sizes, strict=False))

    @property
    def own_address(self) -> int:
        """Where this rank's own heap begins."""
        return self.base + self.rank * self.stride

    def _start(self, peer: int) -> int:
        return self.base + peer * self.stride

    def _grow(self, num_bytes: int, agree: AllGather | None) -> None:
        """Adds a segment of at least ``num_bytes`` on all ranks, or on none: they tell each other how they fared."""
        num_bytes = align_up(num_bytes, self.provider.granularity_bytes)
        mappings: dict[int, _Mapping] = {}
        try:
            with contextlib.ExitStack() as descriptors:
                offers = self._exchange_offers(self._create(num_bytes, mappings, descriptors), descriptors, agree)
                mappings[self.rank].offered = self.world_size > 1
                failure = self._map_peers(num_bytes, mappings, offers)
                self._settle(failure, "", agree)
        except BaseException:
            for peer in mappings:
                mappings[peer].last = False  # the heap goes on without this segment
            self._let_go({peer: [mappings.pop(peer)] for peer in list(mappings)}, None)
            raise
        if not self.provider.growable:
            self.base, self.stride = flat_space(mappings)
        for peer, mapping in mappings.items():
            self._mappings[peer].append(mapping)
        self._allocator.grow(num_bytes)
        self.size += num_bytes

    def _create(
        self, num_bytes: int, mappings: dict[int, _Mapping], descriptors: contextlib.ExitStack
    ) -> Offer | Exception:
        """New memory of this rank: what it offers to the peers, or why there is none."""
        assert self._space is not None, "the heap is open"
        try:
            segment = self.provider.create(self.own_address + self.size, num_bytes)
        except (SymmCommError, OSError) as error:
            return error
        if isinstance(segment.offer, int):
            descriptors.callback(os.close, segment.offer)
        mappings[self.rank] = _Mapping(self._space, segment.address, num_bytes)
        return segment.offer

    def _exchange_offers(
        self, own: Offer | Exception, descriptors: contextlib.ExitStack, agree: AllGather | None
    ) -> list[Offer]:
        """Everybody's offers; ``descriptors`` will close those among them."""
        failure = own if isinstance(own, Exception) else None
        given = self._settle(failure, own.hex() if isinstance(own, bytes) else "", agree)
        if isinstance(own, int):
            fds = self.exchange.exchange(own)
            for fd in fds:
                descriptors.callback(os.close, fd)
            return list(fds)
        return [bytes.fromhex(each) for each in given]

    def _map_peers(self, num_bytes: int, mappings: dict[int, _Mapping], offers: list[Offer]) -> Exception | None:
        """Maps the peers' memory; returns what went wrong."""
        assert self._space is not None, "the heap is open"
        try:
            for peer in range(self.world_size):
                if peer != self.rank:
                    address = self.provider.map(self._start(peer) + self.size, num_bytes, offers[peer])
                    mappings[peer] = _Mapping(self._space, address, num_bytes)
            if not self.provider.growable:
                flat_space(mappings)
        except (SymmCommError, OSError) as error:
            return error
        return None

    def _settle(self, failure: Exception | None, text: str, agree: AllGather | None) -> list[str]:
        """Raises on every rank if one of them failed; else returns the text that each gave."""
        if agree is None:
            if failure is not None:
                raise failure
            return [text] * self.world_size
        full = isinstance(failure, OutOfSymmetricMemoryError)
        answer = json.dumps([in_words(failure) if failure else "", full, text])
        answers = [json.loads(each) for each in agree(answer.encode())]
        if failure is not None:
            raise failure
        for peer, (reason, is_full, _) in enumerate(answers):
            if reason:
                kind = OutOfSymmetricMemoryError if is_full else ExchangeError
                raise kind(f"symmetric heap of rank {peer}: {reason}")
        return [given for _, _, given in answers]

    def allocate(self, num_bytes: int, request: str, agree: AllGather) -> int:
        """Collective. Returns the offset of ``num_bytes``, the same on every rank.

        Args:
            request: what is asked for, in words; must be the same on every rank.
            agree: all-gather of bytes among the ranks.

        Raises:
            MismatchError: ranks ask for different things; names both requests.
            OutOfSymmetricMemoryError: no room, on this rank or another; nothing was allocated.
            ExchangeError: memory for it could not be mapped, here or on another rank; nothing was allocated.
        """
        refusal = self._refusal(num_bytes)
        self._compare(request, refusal, agree)
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            self._grow(self._growth(num_bytes), agree)
            offset = self._allocator.allocate(num_bytes)
        assert offset is not None, "the segment just added holds the request"
        return offset

    def free(self, offset: int, request: str, agree: AllGather) -> None:
        """Collective. Returns an allocation; raises ArgumentError for an offset that is none."""
        if offset == 0:
            raise ArgumentError("the control region of the heap cannot be freed")
        self._allocator.size_of(offset)
        self._compare(request, "", agree)
        self._allocator.free(offset)

    def _growth(self, num_bytes: int) -> int:
        """Bytes of the segment that would hold the request."""
        least = align_up(max(num_bytes, 1), self.provider.granularity_bytes)
        return max(least, min(_SEGMENT_BYTES, self.capacity - self.size))

    def _refusal(self, num_bytes: int) -> str:
        """Why the request cannot be met on this rank; empty if it can."""
        if self._allocator.largest_free >= align_up(max(num_bytes, 1), self._allocator.alignment):
            return ""
        growth = align_up(max(num_bytes, 1), self.provider.granularity_bytes)
        if self.size + growth > self.capacity:
            return (
                f"{num_bytes} bytes do not fit: {self._allocator.used_bytes} of {self.capacity} bytes are used, "
                f"the largest hole has {self._allocator.largest_free}; raise SYMMCOMM_HEAP_MAX_BYTES={self.capacity}"
            )
        available = self.provider.available_bytes()
        if growth > available:
            return (
                f"{num_bytes} bytes exceed the {available} bytes of memory {self.provider.place} has left "
                f"({self._allocator.used_bytes} bytes of the heap are used, SYMMCOMM_HEAP_MAX_BYTES={self.capacity})"
            )
        return ""

    def _compare(self, request: str, refusal: str, agree: AllGather) -> None:
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
        """Bytes of the peer's heap at ``offset`` as an object with the buffer protocol; of the host's memory only."""
        buffer = (ctypes.c_uint8 * num_bytes).from_address(self._start(peer) + offset)
        buffer.owners = list(self._mappings[peer])  # type: ignore[attr-defined]
        return buffer

    def tensor(self, peer: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the peer's heap at ``offset`` as a tensor of uint8 on this rank's device; ``num_bytes`` > 0."""
        return self.provider.tensor(self._start(peer) + offset, num_bytes, list(self._mappings[peer]))

    def close(self, agree: AllGather | None = None) -> None:
        """Gives the address space back; a mapped segment goes with the last tensor that uses it.

        Args:
            agree: lets the ranks wait for each other between letting go of peers' memory and freeing their own, where
                the provider needs it. Without it such memory stays until the process ends.
        """
        self.exchange.close()
        if self._space is None:
            return
        for peer, mappings in enumerate(self._mappings):
            mapped = sum(mapping.num_bytes for mapping in mappings)
            self._space.part_unused(self._start(peer) + mapped, self.stride - mapped)
        everything = dict(enumerate(self._mappings))
        del mappings
        self._mappings, self._space = [], None
        self._let_go(everything, agree)

    def _let_go(self, mappings: dict[int, list[_Mapping]], agree: AllGather | None) -> None:
        """Drops mappings, the peers' first. Own memory that peers may still have mapped is not freed behind their back
        where that matters."""
        own = mappings.pop(self.rank, [])
        mappings.clear()
        self.provider.reclaim()
        if self.provider.owner_frees_last and any(mapping.offered for mapping in own):
            if agree is None:
                _abandoned.extend(own)
            else:
                agree(b"")
        own.clear()
        self.provider.reclaim()


_abandoned: list[_Mapping] = []
"""Memory that peers may still have mapped, although nobody will say when they do not any more."""


def flat_space(mappings: dict[int, _Mapping]) -> tuple[int, int]:
    """(base, stride) of segments whose places a driver chose, one a rank: of two ranks always, of more only by luck.

    Raises ExchangeError if they do not lie at equal distances.
    """
    first = mappings[0].address
    stride = mappings[1].address - first if len(mappings) > 1 else mappings[0].num_bytes
    for peer, mapping in mappings.items():
        if mapping.address != first + peer * stride:
            raise ExchangeError(
                f"the driver mapped the memory of {len(mappings)} ranks at unequal distances (rank 1 at {stride:+#x} "
                f"from rank 0, rank {peer} at {mapping.address - first:+#x}): more than two ranks need cuda_vmm"
            )
    return first, stride
