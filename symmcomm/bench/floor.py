"""The time that no implementation can undercut, from limits that were measured in the same run. Pure Python.

floor = launch + signal + wire bytes / bandwidth

``launch``: a kernel that does nothing, launched back to back in a CUDA graph. ``signal``: one way of a ping-pong
between two ranks. ``bandwidth``: every rank pushes to the next one, all at once. Wire bytes are the size of the whole
buffer times the factor of nccl-tests' PERFORMANCE.md: what the busiest rank must at least send (or receive) if no
switch reduces or copies on its behalf; of a broadcast, the one copy that leaves the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from symmcomm.bench.case import Case, Collective


@dataclass(frozen=True)
class Floor:
    """The limits: microseconds, and GB/s in one direction while the other is as busy."""

    launch_us: float
    signal_us: float
    bandwidth: float

    @classmethod
    def of_ranks(cls, answers: Sequence[Mapping[str, float]]) -> Floor | None:
        """From every rank's figures: those of the slowest, as a collective is as slow as its slowest rank. ``None`` if
        nothing was measured."""
        if not all(answers):
            return None
        return cls(
            max(answer["launch_us"] for answer in answers),
            max(answer["signal_us"] for answer in answers),
            min(answer["bandwidth"] for answer in answers),
        )

    def us(self, case: Case) -> float:
        """Microseconds. With one rank there is neither signal nor wire."""
        if case.world_size == 1:
            return self.launch_us
        wire = 0.0 if case.collective is Collective.barrier else case.size_bytes * case.bus_factor
        return self.launch_us + self.signal_us + wire / self.bandwidth / 1e3

    def __str__(self) -> str:
        """The formula with its figures."""
        return (
            f"floor = {self.launch_us:.2f} us launch + {self.signal_us:.2f} us signal "
            f"+ size x factor / {self.bandwidth:.0f} GB/s (busbw's factor; measured in this run)"
        )
