"""What the symmetric heap asks of a kind of memory; ``posix``, ``cuda_vmm`` and ``cuda_ipc`` provide it.

One segment of a heap comes about in the same steps everywhere::

    create   own memory, zeroed and mapped, and an *offer*: what a peer needs to map it
             (offers travel: a descriptor by ``memory.exchange``, bytes through the control plane)
    map      each peer's offer, at   base + p · stride + offset
    unmap    when the heap is closed and the last tensor on the segment is gone

``unmap`` and ``unreserve`` are called from finalisers, at any time and on any thread. A provider whose driver must not
be called there only takes a note, and does the work in ``reclaim``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

Offer = int | bytes
"""A file descriptor, which whoever holds it closes, or a handle as bytes."""


class Segment(NamedTuple):
    """This rank's own part of a new segment: where it is mapped, and what peers map it by."""

    address: int
    offer: Offer


class Provider(Protocol):
    """One kind of memory. All sizes in bytes, multiples of ``granularity_bytes``; all addresses in this process.

    Attributes:
        name: for ``symmcomm doctor`` and messages.
        place: whose memory it is, in words: "this host", "GPU 0".
        granularity_bytes: what segments and strides are multiples of; the same on every rank.
        growable: whether segments lie where the heap asks for, so that it can have several. If not, the driver chooses,
            and the heap takes all of its memory at once.
        divisible: whether parts of a reservation can be given back.
        owner_frees_last: whether memory may be freed only after every peer has unmapped it.
    """

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def granularity_bytes(self) -> int: ...
    @property
    def growable(self) -> bool: ...
    @property
    def divisible(self) -> bool: ...
    @property
    def owner_frees_last(self) -> bool: ...

    def reserve(self, num_bytes: int) -> int:
        """Takes address space without memory; returns its start. 0 where the driver chooses addresses itself.

        Raises OutOfSymmetricMemoryError.
        """
        ...

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Gives a reservation back, or a part of it if it is divisible, after what was mapped there is unmapped."""
        ...

    def create(self, address: int, num_bytes: int) -> Segment:
        """New memory of this rank, all zeros, mapped at ``address`` if the heap chooses.

        Raises OutOfSymmetricMemoryError naming the sizes; whatever it raises, nothing is left behind.
        """
        ...

    def map(self, address: int, num_bytes: int, offer: Offer) -> int:
        """Maps a peer's segment; returns where, which is ``address`` if the heap chooses. Closes no descriptor."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undoes ``create`` or ``map``; the address space stays reserved."""
        ...

    def reclaim(self) -> None:
        """Does what ``unmap`` and ``unreserve`` put off. Called where the heap is created, grows or closes."""
        ...

    def available_bytes(self) -> int:
        """Memory that this rank could still take."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """Mapped memory as a tensor of uint8, which keeps ``owner`` alive as long as any view of it lives."""
        ...
