"""What is measured: one collective at one size, with the arithmetic of nccl-tests. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import log
from typing import Any

from symmcomm.errors import ArgumentError
from symmcomm.schedule.dtypes import DType, Op

ROOT = 0
"""Root of broadcast, reduce, gather and scatter."""

MAX_SIZES = 1000
"""Of a sequence. Where the factor is near 1 more would be asked for than anybody waits for."""


class Collective(StrEnum):
    """What can be measured."""

    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"
    all_gather = "all_gather"
    all_to_all = "all_to_all"
    broadcast = "broadcast"
    reduce = "reduce"
    gather = "gather"
    scatter = "scatter"
    send_recv = "send_recv"
    barrier = "barrier"

    @property
    def reduces(self) -> bool:
        """Whether a reduction is part of it; the others move bytes of any dtype."""
        return self in (Collective.all_reduce, Collective.reduce_scatter, Collective.reduce)

    @property
    def in_place(self) -> bool:
        """Whether input and output are one tensor."""
        return self in (Collective.all_reduce, Collective.broadcast, Collective.reduce)

    @property
    def splits(self) -> bool:
        """Whether the buffer falls into one equal part a rank."""
        parts = (Collective.reduce_scatter, Collective.all_gather, Collective.all_to_all)
        return self in (*parts, Collective.gather, Collective.scatter)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the benchmark.

    Attributes:
        size_bytes: of the whole buffer, nccl-tests' ``size``: the larger of what a rank (the root) gives and gets.
    """

    collective: Collective
    size_bytes: int
    dtype: DType
    op: Op
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.size_bytes // self.dtype.itemsize

    @property
    def count(self) -> int:
        """nccl-tests' ``count``: elements of one rank's part where the buffer is split, else of the whole buffer."""
        return self.numel // self.world_size if self.collective.splits else self.numel

    def input_numel(self, rank: int) -> int:
        """Elements that ``rank`` gives."""
        if self.collective in (Collective.all_gather, Collective.gather):
            return self.count
        return 0 if self.collective is Collective.scatter and rank != ROOT else self.numel

    def output_numel(self, rank: int) -> int:
        """Elements that ``rank`` gets."""
        if self.collective in (Collective.reduce_scatter, Collective.scatter):
            return self.count
        return 0 if self.collective is Collective.gather and rank != ROOT else self.numel

    @property
    def bus_factor(self) -> float:
        """busbw = algbw · factor, as in nccl-tests' PERFORMANCE.md."""
        ranks = self.world_size
        if self.collective is Collective.all_reduce:
            return 2 * (ranks - 1) / ranks
        return (ranks - 1) / ranks if self.collective.splits else 1.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of strings and numbers; ``from_json`` is its inverse."""
        return {
            "collective": self.collective.value, "size_bytes": self.size_bytes, "dtype": self.dtype.name,
            "op": self.op.name, "world_size": self.world_size,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """See ``to_json``."""
        return cls(
            collective=Collective(fields["collective"]), size_bytes=fields["size_bytes"], dtype=DType[fields["dtype"]],
            op=Op[fields["op"]], world_size=fields["world_size"],
        )


def cases(
    collective: Collective, begin: int, end: int, factor: float, dtype: DType, op: Op, world_size: int
) -> list[Case]:
    """All sizes from ``begin`` to ``end`` bytes, each ``factor`` times the one before.

    A size is rounded down to whole elements, and to a multiple of the ranks where the collective splits the buffer, but
    never to nothing; sizes that become equal are measured once. A barrier has the one size 0.

    Raises ArgumentError where the sizes or the factor make no sequence.
    """
    if begin > end:
        raise ArgumentError(f"sizes from {begin} to {end} bytes: the first is larger than the last")
    if begin < 1:
        raise ArgumentError(f"sizes from {begin} bytes: expected at least 1")
    if not factor > 1:
        raise ArgumentError(f"factor {factor:g}: expected more than 1")
    if log(end / begin) >= MAX_SIZES * log(factor):
        raise ArgumentError(f"factor {factor}: more than {MAX_SIZES} sizes from {begin} to {end} bytes")
    unit = dtype.itemsize * (world_size if collective.splits else 1)
    sizes, size = [], float(begin)
    while size <= end:
        sizes.append(max(int(size) // unit, 1) * unit)
        size *= factor
    if collective is Collective.barrier:
        sizes = [0]
    return [
        Case(collective=collective, size_bytes=size, dtype=dtype, op=op, world_size=world_size)
        for size in dict.fromkeys(sizes)
    ]
