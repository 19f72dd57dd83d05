"""The judge of plans: runs one without data and says what is wrong.

A plan that passes, whatever the speeds of the ranks, on every run: sums every contribution exactly once; has a signal
for every wait and, for every signal, a wait; comes to its end; writes no slot that may still be read, and none of
another level; gives every rank the same work. Time enters by vector clocks: a step happened before another only if
program order and signals say so, so one run stands for all.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from symmcomm.errors import PlanError
from symmcomm.schedule.plan import KEEP, Plan, Source, Step


class _Value(NamedTuple):
    """What lies in a slot: whose contributions (a bit a rank), and whether that is the finished segment."""

    mask: int
    finished: bool


class _Message(NamedTuple):
    value: _Value
    segment: int
    lane: int
    clock: tuple[int, ...]


Pair = tuple[int, int, int]
"""Sender, receiver, signal."""


def simulate(plan: Plan) -> None:
    """Raises PlanError, naming the step and the rule it breaks, unless the plan is right (see the module)."""
    if len(plan.steps) != plan.world_size:
        raise PlanError(f"{plan.name}: {plan.world_size} ranks, but steps for {len(plan.steps)}")
    _Run(plan).run()
    _check_balance(plan)


def describe(rank: int, idx: int, step: Step) -> str:
    """A step, for messages."""
    gives = "keeps" if step.target == KEEP else f"sends rank {step.target}"
    return f"rank {rank}, step {idx} (round {step.round}: {gives} segment {step.segment}, lane {step.lane})"


def _check_balance(plan: Plan) -> None:
    """Every rank sends, and gets, as much as the others at each level."""
    sent = [Counter(step.level for step in steps if step.target != KEEP) for steps in plan.steps]
    got = [Counter[int]() for _ in plan.steps]
    for _, step in plan.messages():
        got[step.target][step.level] += 1
    for what, counts in (("sends", sent), ("gets", got)):
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise PlanError(
                    f"{plan.name}: links are not loaded alike: rank {rank} {what} {dict(count)} messages (by level), "
                    f"rank 0 {dict(counts[0])}"
                )


class _Run:
    """One run, step by step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.full = (1 << plan.world_size) - 1
        self.next = [0] * plan.world_size
        self.clocks = [[0] * plan.world_size for _ in range(plan.world_size)]
        self.messages: dict[Pair, _Message] = {}
        self.kept: dict[tuple[int, int, int], _Value] = {}
        self.readers = self._readers()
        self.last_use: dict[tuple[int, int], tuple[Pair, int]] = {}

    def _refuse(self, rank: int, idx: int, why: str) -> PlanError:
        return PlanError(f"{self.plan.name}: {describe(rank, idx, self.plan.steps[rank][idx])}: {why}")

    def _readers(self) -> dict[Pair, tuple[int, int]]:
        """For each message who reads it last: (rank, number of the step). Checks what needs no run."""
        readers: dict[Pair, tuple[int, int]] = {}
        for rank, steps in enumerate(self.plan.steps):
            signals: dict[int, int] = {}
            for idx, step in enumerate(steps):
                self._check_step(rank, idx, step)
                if idx and step.round < steps[idx - 1].round:
                    raise self._refuse(rank, idx, f"it comes after a step of round {steps[idx - 1].round}")
                if step.target != KEEP:
                    if step.signal != signals.get(step.target, 0):
                        expected = signals.get(step.target, 0)
                        raise self._refuse(rank, idx, f"its signal is {step.signal}, the next one is {expected}")
                    signals[step.target] = step.signal + 1
                for source in step.sources:
                    readers[source.sender, rank, source.signal] = (rank, idx)
        return readers

    def _check_step(self, rank: int, idx: int, step: Step) -> None:
        plan = self.plan
        if not 0 <= step.segment < plan.world_size or not 0 <= step.lane < plan.num_lanes:
            raise self._refuse(rank, idx, f"there are {plan.world_size} segments and {plan.num_lanes} lanes")
        if step.target != KEEP and (not 0 <= step.target < plan.world_size or step.target == rank):
            raise self._refuse(rank, idx, f"rank {step.target} is not a peer")
        if step.target != KEEP and step.slot < 0:
            raise self._refuse(rank, idx, "it has no slot to send to")
        if not step.own and len(step.sources) != 1:
            raise self._refuse(rank, idx, f"it passes on what came, but from {len(step.sources)} ranks")

    def run(self) -> None:
        ready = True
        while ready:
            ready = False
            for rank, steps in enumerate(self.plan.steps):
                while self.next[rank] < len(steps) and self._can_go(rank, steps[self.next[rank]]):
                    self._take(rank, self.next[rank], steps[self.next[rank]])
                    self.next[rank] += 1
                    ready = True
        for rank, steps in enumerate(self.plan.steps):
            if self.next[rank] < len(steps):
                raise self._stuck(rank, self.next[rank])
        self._check_end()

    def _can_go(self, rank: int, step: Step) -> bool:
        return all((source.sender, rank, source.signal) in self.messages for source in step.sources)

    def _stuck(self, rank: int, idx: int) -> PlanError:
        for source in self.plan.steps[rank][idx].sources:
            if (source.sender, rank, source.signal) not in self.messages:
                sends = [s.signal for s in self.plan.steps[source.sender] if s.target == rank]
                if source.signal not in sends:
                    why = f"it waits for signal {source.signal} of rank {source.sender}, which sends it {len(sends)}"
                    return self._refuse(rank, idx, why)
        return self._refuse(rank, idx, "deadlock: what it waits for is sent only after it")

    def _take(self, rank: int, idx: int, step: Step) -> None:
        clock = self.clocks[rank]
        value: _Value | None = self._own(rank, step) if step.own else None
        for source in step.sources:
            message = self._read(rank, idx, step, source)
            value = message.value if value is None else self._add(rank, idx, value, message.value)
            for peer, known in enumerate(message.clock):
                clock[peer] = max(clock[peer], known)
        assert value is not None
        if step.target == KEEP:
            self._keep(rank, idx, step, value)
        clock[rank] = idx + 1
        if step.target != KEEP:
            self._send(rank, idx, step, value)

    def _own(self, rank: int, step: Step) -> _Value:
        """The rank's own part: before it is replaced by the result, its contribution."""
        if not self.plan.reduces:
            return _Value(1 << rank, step.segment == rank)
        return self.kept.get((rank, step.segment, step.lane), _Value(1 << rank, False))

    def _read(self, rank: int, idx: int, step: Step, source: Source) -> _Message:
        message = self.messages[source.sender, rank, source.signal]
        if (message.segment, message.lane) != (step.segment, step.lane):
            brings = f"segment {message.segment}, lane {message.lane}"
            raise self._refuse(rank, idx, f"signal {source.signal} of rank {source.sender} brings {brings}")
        owner = source.sender if self.plan.pull else rank
        last = self.last_use.get((owner, source.slot))
        if last is None or last[0] != (source.sender, rank, source.signal):
            raise self._refuse(rank, idx, f"slot {source.slot} of rank {owner} does not hold what it reads there")
        return message

    def _add(self, rank: int, idx: int, value: _Value, more: _Value) -> _Value:
        if value.finished or more.finished:
            raise self._refuse(rank, idx, "it adds to a finished sum")
        if twice := value.mask & more.mask:
            raise self._refuse(rank, idx, f"it adds the contributions of ranks {_ranks(twice)} a second time")
        return _Value(value.mask | more.mask, False)

    def _keep(self, rank: int, idx: int, step: Step, value: _Value) -> None:
        key = (rank, step.segment, step.lane)
        if key in self.kept:
            raise self._refuse(rank, idx, "it has kept that already")
        if self.plan.reduces and step.own:
            if step.segment != rank:
                raise self._refuse(rank, idx, f"the sum belongs to rank {step.segment}")
            if missing := self.full & ~value.mask:
                raise self._refuse(rank, idx, f"the contributions of ranks {_ranks(missing)} are missing")
            value = _Value(value.mask, True)
        elif not value.finished:
            raise self._refuse(rank, idx, "what came is not the finished segment")
        self.kept[key] = value

    def _send(self, rank: int, idx: int, step: Step, value: _Value) -> None:
        owner = rank if self.plan.pull else step.target
        last = self.last_use.get((owner, step.slot))
        if last is not None:
            (before, level), reader = last, self.readers.get(last[0])
            if level != step.level:
                raise self._refuse(rank, idx, f"slot {step.slot} of rank {owner} belongs to level {level}")
            if reader is None or self.clocks[rank][reader[0]] <= reader[1]:
                held = f"signal {before[2]} of rank {before[0]} to rank {before[1]}"
                raise self._refuse(rank, idx, f"slot {step.slot} of rank {owner} may still be read: it holds {held}")
        pair = (rank, step.target, step.signal)
        self.last_use[owner, step.slot] = (pair, step.level)
        self.messages[pair] = _Message(value, step.segment, step.lane, tuple(self.clocks[rank]))

    def _check_end(self) -> None:
        plan = self.plan
        for sender, receiver, signal in self.messages:
            if (sender, receiver, signal) not in self.readers:
                raise PlanError(f"{plan.name}: signal {signal} of rank {sender} to rank {receiver} is never waited for")
        for rank in range(plan.world_size):
            for segment in range(plan.world_size) if plan.gathers else (rank,):
                for lane in range(plan.num_lanes):
                    if not (segment == rank and not plan.reduces) and (rank, segment, lane) not in self.kept:
                        raise PlanError(f"{plan.name}: rank {rank} never gets segment {segment}, lane {lane}")


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
