"""What a CTA of the GPU's ring kernel does, in order: the order of ``kernels.gpu.ring``, for models of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from symmcomm.schedule.plan import KEEP, Plan
from symmcomm.schedule.ring_gpu import may_defer, num_early


class Event(NamedTuple):
    """``kind``: "take" (wait for a peer's epoch, then read its message), "put" (write one for a peer) or "signal".

    Epochs count from the kernel's first. ``slot`` and ``chunk``: of the message.
    """

    kind: str
    peer: int
    epoch: int = 0
    slot: int = 0
    chunk: int = 0


def ring_events(plan: Plan, rank: int, num_chunks: int) -> Iterator[Event]:
    """Of the rank's CTA, for that many chunks."""
    steps, first, most = plan.steps[rank], num_early(plan, rank), plan.num_signals
    for iteration in range(num_chunks + 1):
        late = may_defer(plan, rank) and iteration > 0
        for number, step in enumerate(steps):
            chunk = iteration if number < first else iteration - 1
            if not 0 <= chunk < num_chunks:
                continue
            for source in step.sources:
                at = [(s.target, s.signal) for s in plan.steps[source.sender]].index((rank, source.signal))
                early = at < num_early(plan, source.sender)
                epoch = (chunk + 1 - early) * most + source.signal + 1
                yield Event("take", source.sender, epoch, source.slot, chunk)
            if step.target != KEEP:
                yield Event("put", step.target, 0, step.slot, chunk)
            announced = [] if late and number < first else [step]
            if late and number == first and iteration < num_chunks:
                announced = [*steps[:first], step]
            for each in announced:
                if each.target != KEEP:
                    yield Event("signal", each.target, iteration * most + each.signal + 1)
