"""The protocol of the measurement.

**Units.** Time is microseconds a call. algbw is the size of the whole buffer (see ``Case.size_bytes``) over the time,
busbw is algbw times the factor of nccl-tests' PERFORMANCE.md, both in GB/s = 10⁹ bytes a second.

**Check.** Before anything is timed, each implementation runs the case once on known data, and every rank compares its
output with a float64 oracle (``bench.oracle``). ``#wrong`` counts the elements outside the tolerance, over all ranks.
For a barrier, one rank comes 10 ms late, and ``#wrong`` counts the ranks that left before it came. A wrong result is
not timed.

**Rounds.** A round is a barrier of the implementation, then so many calls back to back, between two readings of
``time.perf_counter`` on each rank; the round's figure is the mean a call on the slowest rank. The number of calls, the
same on all ranks, comes from two unrecorded rounds, so that a round takes about 20 ms and has at least 3 calls. The
implementations take turns, one round each, in the reverse order every other time: what the machine does meanwhile
meets all of them. The figure of the case is the median over the rounds. On GPUs rounds are shorter; ``gpu_timing`` says
what a rank's clock reads there.

**Fairness.** One torch thread a rank. Peers run their fastest form: mpi4py's buffer calls on prepared messages at
thread level ``funneled``, in place where symmcomm is; synchronous calls for gloo. symm, gloo and Open MPI share
processes and tensors; MPICH has processes of its own, which sleep when it is not their turn. No rank is bound to a
core. Buffers hold zeros while they are timed: repeated in place, a reduction of anything else overflows or ends in
subnormal numbers. Calls follow each other without a barrier, as in nccl-tests: a root that needs not wait for the
others runs ahead of them, within what the implementation's buffers allow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.method import FEWEST, ON_CPUS, Method
from symmcomm.bench.team import Team
from symmcomm.bench.timer import Answer

Progress = Callable[[str], None]


@dataclass(kw_only=True)
class Measurement:
    """One implementation on one case.

    Attributes:
        wrong: elements outside the tolerance over all ranks; ``None`` if the case was refused.
        refusal: why the implementation cannot run the case.
        iterations: calls a round.
        round_us: mean time a call, one entry a round, in microseconds.
        round_host_us: what a call costs the host, where that is another time.
    """

    implementation: str
    case: Case
    wrong: int | None = None
    refusal: str | None = None
    iterations: int = 0
    round_us: list[float] = field(default_factory=list)
    round_host_us: list[float] = field(default_factory=list)

    @property
    def host_us(self) -> float | None:
        """Median over the rounds; ``None`` if it was not measured."""
        return statistics.median(self.round_host_us) if self.round_host_us else None

    @property
    def time_us(self) -> float | None:
        """Median over the rounds; ``None`` if nothing was timed."""
        return statistics.median(self.round_us) if self.round_us else None

    @property
    def algbw(self) -> float | None:
        """GB/s."""
        return self.case.size_bytes / self.time_us / 1e3 if self.time_us else None

    @property
    def busbw(self) -> float | None:
        """GB/s."""
        return self.algbw * self.case.bus_factor if self.algbw is not None else None


def num_steps(num_implementations: int, rounds: int) -> int:
    """How often ``measure`` reports progress."""
    return num_implementations * (1 + rounds)


def measure(
    teams: Sequence[Team], case: Case, rounds: int, progress: Progress, method: Method = ON_CPUS
) -> list[Measurement]:
    """Checks and times all implementations of all teams on one case; see the module's docstring for how.

    Raises TeamError if a rank fails.
    """
    running: list[tuple[Team, Measurement]] = []
    measurements = []
    for team in teams:
        for name in team.implementations:
            measurement = _checked(team, name, case)
            measurements.append(measurement)
            if measurement.wrong == 0:
                measurement.iterations = _iterations(team, name, method)
                running.append((team, measurement))
            progress(name)
    for turn in range(rounds):
        for team, measurement in running if turn % 2 == 0 else reversed(running):
            answer = _round(team, measurement.implementation, measurement.iterations)
            measurement.round_us.append(answer["seconds"] * 1e6)
            if "host_seconds" in answer:
                measurement.round_host_us.append(answer["host_seconds"] * 1e6)
            progress(measurement.implementation)
    return measurements


def _checked(team: Team, name: str, case: Case) -> Measurement:
    answers = team.ask({"do": "prepare", "implementation": name, "case": case.to_json()})
    if refusal := next((answer["refusal"] for answer in answers if answer.get("refusal")), None):
        return Measurement(implementation=name, case=case, refusal=refusal)
    barrier = case.collective is Collective.barrier
    wrong = _left_early(answers) if barrier else sum(answer["wrong"] for answer in answers)
    return Measurement(implementation=name, case=case, wrong=wrong)


def _left_early(answers: Sequence[Answer]) -> int:
    """Ranks that left the barrier before the last one came."""
    last = max(answer["entered"] for answer in answers)
    return sum(answer["left"] < last for answer in answers)


def _iterations(team: Team, name: str, method: Method) -> int:
    """Calls that fill a round. The first estimate holds what comes once: page faults, connections."""
    iterations = FEWEST
    for _ in range(2):
        iterations = method.calls(_round(team, name, iterations)["seconds"])
    return iterations


def _round(team: Team, name: str, iterations: int) -> dict[str, float]:
    """Each figure of the slowest rank."""
    answers = team.ask({"do": "time", "implementation": name, "iterations": iterations})
    return {key: max(float(answer[key]) for answer in answers) for key in answers[0]}
