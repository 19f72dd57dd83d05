"""How long a plan takes on a topology, by a model of links; which plan is the fastest; and how rings scale.

**Model.** In a round all messages of the round are under way at once. A link (one direction of it) takes load /
bandwidth, the round takes what its slowest link does and the longest latency of a path. Chunks follow each other as in
a pipe, so that all rounds' messages are on the links at once: the first chunk takes the sum of the rounds, each further
one what the most loaded link takes for all rounds::

    time = Σ_rounds (max_links load / bandwidth + latency) + (chunks - 1) · max_links (Σ_rounds load / bandwidth)

Copies within a rank and the adding are taken to be free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from symmcomm.errors import TopologyError
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.ring import direct, ring_1d, ring_2d
from symmcomm.schedule.select import NEVER
from symmcomm.schedule.topology import Hop, Topology

CHUNK_BYTES = 32 << 10
"""Of a segment, for the model, unless told otherwise."""


class RingMode(Enum):
    """How a reduce-scatter or all-reduce goes, named as in Flux's ``ReduceScatterOption``."""

    All2All = "all2all"
    """Every rank with every rank, straight."""
    Ring1D = "ring1d"
    """Round one ring of all ranks."""
    Ring2D = "ring2d"
    """Round rings within the NUMA domains (or nodes), and round rings across them."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a plan costs.

    Attributes:
        seconds: of the whole. bottleneck_seconds: the part of it in which the most loaded link is busy.
        bottleneck: that link's kind; segments: how many segments it carries. num_rounds: waits one after the other.
    """

    seconds: float
    bottleneck_seconds: float
    bottleneck: str
    segments: float
    num_rounds: int


def cost(
    plan: Plan, topology: Topology, num_bytes: int, *, chunk_bytes: int = CHUNK_BYTES, partial_factor: float = 1.0
) -> Cost:
    """Time of a plan for tensors of ``num_bytes`` in all segments together.

    ``partial_factor``: how much wider partial sums are than elements (2 for bfloat16, which travels as float32).
    Raises TopologyError if plan and topology are for different numbers of ranks.
    """
    if plan.world_size != topology.world_size:
        raise TopologyError(f"{plan.name} is for {plan.world_size} ranks, the topology for {topology.world_size}")
    segment_bytes = num_bytes / plan.world_size
    num_chunks = max(1, -(-int(segment_bytes) // chunk_bytes))
    loads: dict[int, dict[Hop, float]] = defaultdict(lambda: defaultdict(float))
    latency: dict[int, float] = defaultdict(float)
    for rank, step in plan.messages():
        wide = partial_factor if (rank, step.target, step.signal) in plan.partial else 1.0
        path = topology.path(rank, step.target)
        latency[step.round] = max(latency[step.round], sum(link.latency for link, _ in path))
        for hop in path:
            loads[step.round][hop] += wide / plan.num_lanes
    total: dict[Hop, float] = defaultdict(float)
    for load in loads.values():
        for hop, segments in load.items():
            total[hop] += segments
    if not total:
        return Cost(seconds=0.0, bottleneck_seconds=0.0, bottleneck="none", segments=0.0, num_rounds=0)
    worst = max(total, key=lambda hop: total[hop] / hop[0].bandwidth)
    busy = total[worst] * segment_bytes / worst[0].bandwidth
    first = sum(max(n / hop[0].bandwidth for hop, n in load.items()) for load in loads.values())
    seconds = first * segment_bytes / num_chunks + sum(latency.values()) + busy * (num_chunks - 1) / num_chunks
    return Cost(
        seconds=seconds, bottleneck_seconds=busy, bottleneck=worst[0].kind, segments=total[worst],
        num_rounds=len(loads),
    )  # fmt: skip


class Ranked(NamedTuple):
    """A plan with its cost."""

    mode: RingMode
    plan: Plan
    cost: Cost


def plan_of(mode: RingMode, topology: Topology) -> Plan:
    """The mode's reduce-scatter. Raises TopologyError where the topology has no groups, or unequal ones, for Ring2D."""
    return {RingMode.All2All: direct, RingMode.Ring1D: ring_1d, RingMode.Ring2D: ring_2d}[mode](topology)


def rank_plans(topology: Topology, num_bytes: int, *, partial_factor: float = 1.0) -> list[Ranked]:
    """All modes that the topology admits, and their both-direction forms, the fastest first."""
    plans = [(RingMode.All2All, direct(topology))]
    for both in (False, True):
        plans.append((RingMode.Ring1D, ring_1d(topology, both_directions=both)))
        if admits_2d(topology):
            plans.append((RingMode.Ring2D, ring_2d(topology, both_directions=both)))
    ranked = [Ranked(mode, p, cost(p, topology, num_bytes, partial_factor=partial_factor)) for mode, p in plans]
    return sorted(ranked, key=lambda entry: entry.cost.seconds)


def admits_2d(topology: Topology) -> bool:
    """Whether there are groups, more than one, of more than one rank, all of one size."""
    sizes = {len(group) for group in topology.levels[0]} if topology.levels else set()
    return len(sizes) == 1 and 1 < min(sizes) < topology.world_size


def choose(topology: Topology, num_bytes: int, *, partial_factor: float = 1.0) -> RingMode:
    """The mode that is the fastest by the model. A pure function of what all ranks know alike."""
    return _fastest(_forms(topology), topology, num_bytes, partial_factor)


def choose_from(topology: Topology, most_bytes: int = 1 << 30) -> tuple[RingMode, int]:
    """The mode for the largest tensors, and the least power of two of bytes from which on it is the fastest; (All2All,
    NEVER) where rings do not pay: where all ranks reach each other alike, at least."""
    if topology.is_flat():
        return RingMode.All2All, NEVER
    forms = _forms(topology)
    best, size = _fastest(forms, topology, most_bytes, 1.0), most_bytes
    if best is RingMode.All2All:
        return best, NEVER
    while size > 1 and _fastest(forms, topology, size // 2, 1.0) is best:
        size //= 2
    return best, size


def _forms(topology: Topology) -> dict[RingMode, Plan]:
    """The modes that the topology admits."""
    return {mode: plan_of(mode, topology) for mode in RingMode if mode is not RingMode.Ring2D or admits_2d(topology)}


def _fastest(forms: dict[RingMode, Plan], topology: Topology, num_bytes: int, partial_factor: float) -> RingMode:
    return min(
        forms, key=lambda mode: cost(forms[mode], topology, num_bytes, partial_factor=partial_factor).seconds
    )


@dataclass(frozen=True, kw_only=True)
class FabricLevel:
    """One level of a regular fabric: groups of ``dim`` below one switch that blocks nobody.

    Attributes:
        bandwidth: bytes/s of each rank's share of the level's links, each direction. latency: seconds a message.
        above: its links are reached through those of the level before, which carry its messages as well, and one
            rank alone gets as much of them as it has of those.
    """

    dim: int
    bandwidth: float
    latency: float
    above: bool = False


class Scaling(NamedTuple):
    """Seconds of a ring of rings and of the flat ring on a regular fabric, and the least that any schedule takes."""

    rings: float
    flat: float
    bound: float


def scaling(levels: Sequence[FabricLevel], num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Scaling:
    """Reduce-scatter over the product of all ``dim`` ranks, in closed form: ``cost`` without writing the plan down.

    With g the ranks below a level and d its extent, a rank sends num_bytes · (1 - 1 / d) / g over it. The bound: the g
    ranks of a group have to get what they have for all others, num_bytes · (1 - g / world_size), out over their shares
    of this level and of those outer ones that are not reached through it, and some message takes the longest latency.
    """
    world_size = 1
    for level in levels:
        world_size *= level.dim
    segment = num_bytes / world_size
    num_chunks = max(1, -(-int(segment) // chunk_bytes))
    below, first, busiest, bound, rounds_latency, inner_load = 1, 0.0, 0.0, 0.0, 0.0, 0.0
    for idx, level in enumerate(levels):
        load = num_bytes * (1 - 1 / level.dim) / below
        through = (load + inner_load) / levels[idx - 1].bandwidth if level.above else 0.0
        busiest, inner_load = max(busiest, load / level.bandwidth, through), load
        first += load / level.bandwidth
        rounds_latency += (level.dim - 1) * level.latency
        others = [outer.bandwidth for outer in levels[idx + 1 :] if outer.dim > 1 and not outer.above]
        outward = below * sum([level.bandwidth if level.dim > 1 else 0.0, *others])
        bound = max(bound, num_bytes * (1 - below / world_size) / outward if outward else 0.0)
        below *= level.dim
    outer = [level for level in levels if level.dim > 1] or list(levels)
    slowest = min(level.bandwidth for level in outer if not level.above)
    flat = num_bytes * (1 - 1 / world_size) / slowest + (world_size - 1) * max(level.latency for level in outer)
    rings = first / num_chunks + rounds_latency + busiest * (num_chunks - 1) / num_chunks
    return Scaling(rings, flat, bound + max(level.latency for level in outer))
