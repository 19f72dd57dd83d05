"""Parts of equal size, anywhere in memory, as a job of the Lamport protocol: CTAs take turns at pieces of all parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from symmcomm.kernels.gpu import lamport
from symmcomm.kernels.gpu.access import Access
from symmcomm.kernels.gpu.context import block, thread
from symmcomm.kernels.gpu.signatures import Placed
from symmcomm.schedule.layout_gpu import VECTOR_BYTES


@dataclass(frozen=True, kw_only=True)
class InTurns(Placed):
    """What kernels with such a job have in common.

    Attributes: ``vectors`` of 16 bytes a thread and turn: a CTA's must fit ``lamport_slot_bytes``, a thread's from all
    ranks be at most MOST_VECTORS. ``slots`` as of ``lamport.carry_out``, ``granule`` as of ``PartsInTurns``. Launch
    with at most NUM_LAMPORT_CHANNELS CTAs, of as many threads as there are ranks or more, and none without vectors.
    """

    vectors: int
    granule: int
    slots: int = 0

    @property
    def min_ctas(self) -> int:
        """Turns need registers, and never start early."""
        return min(self.slots, 1)


@dataclass(frozen=True, kw_only=True)
class PartsInTurns(lamport.Job):
    """The job, but for what becomes of the parts.

    Attributes: ``num_bytes`` of a part. ``granule``: 16, 4, 2 or 1, of which the parts' addresses and ``num_bytes`` are
    multiples.
    """

    num_bytes: Any
    granule: int

    @property
    def access(self) -> Access:
        """To a part."""
        per_vector = VECTOR_BYTES // self.granule
        return Access(
            itemsize=self.granule, per_vector=per_vector, aligned=per_vector == 1, hidden=self.num_bytes // self.granule
        )

    @property
    def num_turns(self) -> Any:
        """See ``lamport.Job``."""
        size, num_vectors = self.threads * self.vectors, Int32((self.num_bytes + (VECTOR_BYTES - 1)) // VECTOR_BYTES)
        pieces = (num_vectors + (size - 1)) // size
        return (pieces - block() + (cute.arch.grid_dim()[0] - 1)) // cute.arch.grid_dim()[0]

    def indices(self, turn: Any) -> list[Any]:
        """The thread's vectors of a part."""
        first = (Int64(turn) * cute.arch.grid_dim()[0] + block()) * (self.threads * self.vectors)
        return [first + (k * self.threads + thread()) for k in range(self.vectors)]

    def live(self, turn: Any) -> list[Any]:
        """See ``lamport.Job``."""
        return [index * VECTOR_BYTES < self.num_bytes for index in self.indices(turn)]

    def load_part(self, part: Any, turn: Any, when: Any) -> list[list[Any]]:
        """The thread's vectors of the part at that address; zeros where ``when`` is false, and beyond its end."""
        return [self.access.load(part, index, when) for index in self.indices(turn)]

    def store_part(self, part: Any, turn: Any, vectors: list[list[Any]], when: Any) -> None:
        """The opposite."""
        for index, vector in zip(self.indices(turn), vectors, strict=True):
            self.access.store(part, index, vector, when)
