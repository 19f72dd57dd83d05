"""Schedules of collectives as data: what every rank sends where, in which order, and what it adds on the way.

A tensor falls into one *segment* a rank; a segment into *lanes*, which travel separately (as the two directions of a
ring do). A *message* carries one lane of one segment from one rank to another: elements as they are, if the sender had
nothing to add to its own, or has finished the sum; else a partial sum. It lies in a *slot*, in the memory of the
receiver (push) or of the sender (pull), and is announced by a *signal*: the sender's words on the receiver's pad count
the messages of that pair of ranks.

A *step* reads what has come for one segment and lane, adds the rank's own part if ``own``, and sends the result on, or
keeps it: ``(x[sources[0]] ∘ own) ∘ x[sources[1]] ∘ …``. So the order of a sum is the plan's, and each run gives the
same bits. A rank takes its steps in order. *Rounds* number what can happen at the same time on all ranks.

``simulate`` is the judge of a plan; ``symmcomm.kernels`` execute its ``table``.

**Reuse of slots from chunk to chunk.** A kernel runs a plan once for each chunk of the data. When a rank has finished
chunk k, it holds every other rank's contribution to it, so each has begun with chunk k and, as they take chunks one
after the other, has finished chunk k - 1: nobody reads its slots any more. Hence any plan that ``simulate`` accepts may
use two sets of slots in turn, without a word of acknowledgement. (A kernel that takes the first steps of later chunks,
which wait for nothing, ``A`` chunks early, needs 2 + 2A sets, by the same argument.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

KEEP = -1
"""Target of a step whose result stays: the segment of the output."""


class Source(NamedTuple):
    """A message that a step waits for: its sender, its slot, and its number among that sender's to this rank."""

    sender: int
    slot: int
    signal: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """See the module.

    Attributes:
        segment: whose part it is; lane: which share of it.
        own: whether this rank's own part is added. sources: the messages that are.
        target: the rank that gets the result, or KEEP. slot: where it lies; signal: its number (if not kept).
        level: 0 for the innermost ring; a level has slots of its own.
        stage: which chain of the level it belongs to; round: when.
    """

    segment: int
    lane: int
    own: bool
    sources: tuple[Source, ...]
    target: int
    slot: int = -1
    signal: int = -1
    level: int = 0
    stage: int = 0
    round: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A schedule. Equal only to itself.

    Attributes:
        name: for people. world_size: ranks. num_lanes: shares of a segment.
        pull: slots are the sender's memory, and the receiver reads them there.
        reduces: the segments are summed. gathers: all ranks get all of them. (Both: an all-reduce.)
        steps: for each rank, in its order.
    """

    name: str
    world_size: int
    num_lanes: int
    pull: bool
    reduces: bool
    gathers: bool
    steps: tuple[tuple[Step, ...], ...]

    @cached_property
    def num_slots(self) -> int:
        """Slots that the rank with the most of them needs."""
        return max((step.slot + 1 for steps in self.steps for step in steps), default=0)

    @cached_property
    def num_signals(self) -> int:
        """Messages of the pair of ranks that exchanges the most."""
        return max((step.signal + 1 for steps in self.steps for step in steps), default=0)

    @cached_property
    def num_sources(self) -> int:
        """Messages that the step with the most waits for."""
        return max((len(step.sources) for steps in self.steps for step in steps), default=0)

    @cached_property
    def num_rounds(self) -> int:
        return max((step.round + 1 for steps in self.steps for step in steps), default=0)

    @cached_property
    def partial(self) -> frozenset[tuple[int, int, int]]:
        """(sender, receiver, signal) of the messages that carry partial sums; the others carry elements."""
        return frozenset(
            (rank, step.target, step.signal)
            for rank, steps in enumerate(self.steps)
            for step in steps
            if step.target != KEEP and step.own and step.sources
        )

    def messages(self) -> Iterator[tuple[int, Step]]:
        """All (sender, step) that send."""
        return ((rank, step) for rank, steps in enumerate(self.steps) for step in steps if step.target != KEEP)

    def table(self, rank: int) -> list[list[int]]:
        """A rank's steps as rows of whole numbers, for kernels: ROW_FIELDS, then SOURCE_FIELDS for each of
        ``num_sources`` sources, the absent ones all -1."""
        return [self._row(rank, step) for step in self.steps[rank]]

    def _row(self, rank: int, step: Step) -> list[int]:
        sums = step.own and bool(step.sources)
        row = [step.segment, step.lane, int(step.own), step.target, step.slot, step.signal, int(sums)]
        row.append(len(step.sources))
        for source in step.sources:
            row += [source.sender, source.slot, source.signal]
            row.append(int((source.sender, rank, source.signal) in self.partial))
        return row + [-1] * (len(SOURCE_FIELDS) * (self.num_sources - len(step.sources)))


ROW_FIELDS = ("segment", "lane", "own", "target", "slot", "signal", "partial", "num_sources")
SOURCE_FIELDS = ("sender", "slot", "signal", "partial")


def number(plan: Plan, rows: list[list[Step]]) -> Plan:
    """The plan with the given steps, of which sources need only name their senders: puts them in the order of their
    rounds and hands out slots (each used once) and signals."""
    ordered = [sorted(steps, key=lambda step: (step.round, step.target == KEEP)) for steps in rows]
    signals: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int, int, int], Source] = {}
    slots = [0] * plan.world_size
    sends = [(step.level, step.round, rank, step) for rank, steps in enumerate(ordered) for step in steps]
    for _, _, rank, step in sorted((send for send in sends if send[3].target != KEEP), key=lambda send: send[:3]):
        owner = rank if plan.pull else step.target
        found[rank, step.target, step.segment, step.lane] = Source(rank, slots[owner], -1)
        slots[owner] += 1
    numbered: list[list[Step]] = [[] for _ in rows]
    for rank, steps in enumerate(ordered):
        for step in steps:
            if step.target != KEEP:
                key = (rank, step.target, step.segment, step.lane)
                signal = signals.get((rank, step.target), 0)
                signals[rank, step.target] = signal + 1
                found[key] = found[key]._replace(signal=signal)
                step = replace(step, slot=found[key].slot, signal=signal)
            numbered[rank].append(step)
    complete = [
        tuple(
            replace(step, sources=tuple(found[s.sender, rank, step.segment, step.lane] for s in step.sources))
            for step in steps
        )
        for rank, steps in enumerate(numbered)
    ]
    return replace(plan, steps=tuple(complete))


def gather_of(plan: Plan) -> Plan:
    """The all-gather that takes a reduce-scatter's paths backwards: an owner's segment goes to those that it was summed
    from, and from them on."""
    return number(replace(plan, name=f"{plan.name}, backwards", reduces=False, gathers=True), _backwards(plan, 0))


def all_reduce_of(plan: Plan) -> Plan:
    """A reduce-scatter, and backwards the all-gather of what it gave."""
    rows = [[*steps, *back] for steps, back in zip(plan.steps, _backwards(plan, plan.num_rounds), strict=True)]
    return number(replace(plan, name=f"{plan.name} and back", gathers=True), rows)


def _backwards(plan: Plan, start: int) -> list[list[Step]]:
    """Steps of the all-gather, from round ``start`` on."""
    towards = {(rank, step.segment, step.lane): step.target for rank, step in plan.messages()}
    last = start + max((step.round for _, step in plan.messages()), default=0)
    rows: list[list[Step]] = [[] for _ in range(plan.world_size)]
    for rank, step in plan.messages():
        from_owner = step.target == step.segment
        before = () if from_owner else (Source(towards[step.target, step.segment, step.lane], -1, -1),)
        back = replace(step, own=from_owner, sources=before, target=rank, round=last - step.round)
        rows[step.target].append(back)
        kept = replace(step, own=False, sources=(Source(step.target, -1, -1),), target=KEEP, round=back.round + 1)
        rows[rank].append(replace(kept, slot=-1, signal=-1))
    return rows
