"""Offsets in one rank's symmetric memory: best fit over a growing capacity, the same on every rank.

Ranks that make the same calls in the same order get the same offsets, so nothing is communicated.
"""

from __future__ import annotations

from bisect import bisect_left

from symmcomm.errors import ArgumentError


class Allocator:
    """Hands out offsets in ``[0, capacity)``. All sizes are rounded up to a multiple of ``alignment`` (bytes).

    Raises ArgumentError if ``alignment`` is not a power of two.
    """

    def __init__(self, alignment: int = 256) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment={alignment} is not a power of two")
        self.alignment = alignment
        self.capacity = 0
        self.used_bytes = 0
        self._blocks: dict[int, int] = {}  # offset -> bytes
        self._holes: list[tuple[int, int]] = []  # (offset, bytes), by offset; no two of them touch

    @property
    def largest_free(self) -> int:
        """Bytes of the largest hole: what ``allocate`` can still serve at once."""
        return max((size for _, size in self._holes), default=0)

    def grow(self, num_bytes: int) -> None:
        """Appends capacity, a positive multiple of the alignment. Offsets handed out stay as they are."""
        if num_bytes <= 0 or num_bytes % self.alignment:
            raise ArgumentError(f"num_bytes={num_bytes} is not a positive multiple of the alignment {self.alignment}")
        self._add_hole(self.capacity, num_bytes)
        self.capacity += num_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """Returns the offset of the smallest hole that fits, the lowest of equals; ``None`` if there is none.

        Zero bytes take the least block, so that every allocation has an offset of its own.
        """
        size = self._block_bytes(num_bytes)
        fits = [(hole_bytes, offset) for offset, hole_bytes in self._holes if hole_bytes >= size]
        if not fits:
            return None
        hole_bytes, offset = min(fits)
        idx = bisect_left(self._holes, (offset, 0))
        self._holes[idx : idx + 1] = [(offset + size, hole_bytes - size)] if hole_bytes > size else []
        self._blocks[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Gives a block back. Raises ArgumentError for an offset that is not allocated (any more)."""
        size = self.size_of(offset)
        del self._blocks[offset]
        self.used_bytes -= size
        self._add_hole(offset, size)

    def size_of(self, offset: int) -> int:
        """Bytes of the block at ``offset``, rounded up. Raises ArgumentError as ``free`` does."""
        if offset not in self._blocks:
            raise ArgumentError(f"offset={offset} is not allocated: it was freed before, or never handed out")
        return self._blocks[offset]

    def _block_bytes(self, num_bytes: int) -> int:
        if num_bytes < 0:
            raise ArgumentError(f"num_bytes={num_bytes} is negative")
        return max(1, -(-num_bytes // self.alignment)) * self.alignment

    def _add_hole(self, offset: int, size: int) -> None:
        """Inserts a hole, merged with the holes that touch it."""
        first = last = bisect_left(self._holes, (offset, 0))
        start, end = offset, offset + size
        if first > 0 and sum(self._holes[first - 1]) == offset:
            first -= 1
            start = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(start, end - start)]
