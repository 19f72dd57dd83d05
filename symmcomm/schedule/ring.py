"""Rings of any number of levels as plans, and the direct exchange to compare them with.

**One level.** Segment s is summed along the chain s + 1 → s + 2 → … → s; every rank is in every chain, at another
place of each, so in each round every rank sends one segment to its successor: ``world_size - 1`` rounds, and every link
of the ring carries ``world_size - 1`` segments.

**Two levels** (Flux's 2D ring: src/gemm_rs/reduce_scatter_topos.hpp). Domains of m ranks each. Inner rings: in each
domain the segments of *all* domains that have the same place there are summed along one chain, which ends at that
place. Outer rings, across the domains, join the ranks of one place: what the chain has summed for another domain goes
on to it. A link between domains carries one segment for each of the m places, where a flat ring sends
``world_size - 1`` over it. Likewise with more levels: at the end of a chain of level j, what is for another group goes
into the chain of level j + 1.

**Order of chains.** Stage s of a level is the chain through positions ``b₀ ∘ s, b₁ ∘ s, …``: with ``Order.ring`` ∘ is
addition modulo m (Flux's topology 0), with ``Order.exchange`` it is exclusive or, so that ranks swap in pairs (topology
1; m a power of two). b is 0, 1, …, m - 1; backwards in every second inner ring, as in Flux, and in backward lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import pairwise

from symmcomm.errors import TopologyError
from symmcomm.schedule.plan import KEEP, Plan, Source, Step, number
from symmcomm.schedule.topology import Topology


class Order(Enum):
    """How the chains of a level differ from each other; see the module."""

    ring = "ring"
    exchange = "exchange"


@dataclass(frozen=True)
class Grid:
    """Ranks at the points of a box.

    Attributes:
        dims: extent of each level, innermost first.
        ranks: by position; a position's number is ``p₀ + dims[0] · (p₁ + dims[1] · (p₂ + …))``.
    """

    dims: tuple[int, ...]
    ranks: tuple[int, ...]

    def position(self, number: int) -> list[int]:
        """The coordinates of a position, innermost first."""
        position = []
        for dim in self.dims:
            number, place = divmod(number, dim)
            position.append(place)
        return position

    def rank(self, position: Sequence[int]) -> int:
        """Who is there."""
        number = 0
        for place, dim in zip(reversed(position), reversed(self.dims), strict=True):
            number = number * dim + place
        return self.ranks[number]


def grid_of(topology: Topology, num_levels: int) -> Grid:
    """The box of a topology: its innermost ``num_levels - 1`` partitions are levels, what is outside is the last.

    Raises TopologyError if there are fewer partitions, or groups of one level are of different size.
    """
    if num_levels < 1 or num_levels - 1 > len(topology.levels):
        raise TopologyError(
            f"a ring of {num_levels} levels needs {num_levels - 1} levels of groups, the topology has "
            f"{len(topology.levels)}"
        )
    sizes = [1]
    for name, groups in zip(topology.level_names[: num_levels - 1], topology.levels, strict=False):
        found = sorted({len(group) for group in groups})
        if len(found) > 1:
            raise TopologyError(f"level {name!r} has groups of {found} ranks: a ring of rings needs groups of one size")
        sizes.append(len(groups[0]))
    sizes.append(topology.world_size)
    dims = tuple(outer // inner for inner, outer in pairwise(sizes))
    return Grid(dims, tuple(topology.ring_order()))


def ring_1d(topology: Topology, *, pull: bool = False, both_directions: bool = False) -> Plan:
    """The flat ring through all ranks, groups together, so that it leaves each group once."""
    return ring(grid_of(topology, 1), name="ring 1D", pull=pull, both_directions=both_directions)


def ring_2d(
    topology: Topology, *, order: Order = Order.ring, pull: bool = False, both_directions: bool = False
) -> Plan:
    """Inner rings in the innermost groups, outer rings across them. Raises TopologyError where they differ in size."""
    return ring(grid_of(topology, 2), name="ring 2D", order=order, pull=pull, both_directions=both_directions)


def ring(
    grid: Grid, *, name: str = "ring", order: Order = Order.ring, pull: bool = False, both_directions: bool = False
) -> Plan:
    """The reduce-scatter over rings of ``len(grid.dims)`` levels. ``both_directions``: half of each segment goes each
    way round. Raises TopologyError for an ``exchange`` of a number that is not a power of two."""
    if order is Order.exchange and grid.dims[0] & (grid.dims[0] - 1):
        raise TopologyError(f"an exchange order needs inner rings of 2, 4, 8, … ranks, they have {grid.dims[0]}")
    lanes = 2 if both_directions else 1
    words = [name, *(["exchange"] if order is Order.exchange else []), *(["pull"] if pull else [])]
    plan = Plan(
        name=", ".join([*words, *(["both directions"] if both_directions else [])]), world_size=len(grid.ranks),
        num_lanes=lanes, pull=pull, reduces=True, gathers=False, steps=(),
    )  # fmt: skip
    rows: list[list[Step]] = [[] for _ in grid.ranks]
    for lane in range(lanes):
        for target in range(len(grid.ranks)):
            _add_tree(grid, order, lane, target, rows)
    return number(plan, rows)


def chain(order: Order, dim: int, stage: int, backwards: bool) -> list[int]:
    """The places that a chain passes."""
    base = [dim - 1 - i for i in range(dim)] if backwards else list(range(dim))
    return [b ^ stage for b in base] if order is Order.exchange else [(b + stage) % dim for b in base]


@cache
def _chain_to(order: Order, dim: int, end: int, backwards: bool) -> tuple[int, list[int]]:
    """(stage, places) of the level's chain that ends at ``end``."""
    chains = ((stage, chain(order, dim, stage, backwards)) for stage in range(dim))
    return next((stage, places) for stage, places in chains if places[-1] == end)


def _add_tree(grid: Grid, order: Order, lane: int, target: int, rows: list[list[Step]]) -> None:
    """The steps by which one segment's lane is summed: a tree, of which the chains are the branches."""
    goal = grid.position(target)
    for idx, rank in enumerate(grid.ranks):
        position = grid.position(idx)
        step = Step(segment=grid.ranks[target], lane=lane, own=True, sources=(), target=KEEP)
        for level, dim in enumerate(grid.dims):
            backwards = (lane + (position[1] if level == 0 and len(grid.dims) > 1 else 0)) % 2 == 1
            stage, places = _chain_to(order if level == 0 else Order.ring, dim, goal[level], backwards)
            at = places.index(position[level])
            step = replace(step, level=level, stage=step.stage if level else stage)
            if at > 0:
                sender = grid.rank([*position[:level], places[at - 1], *position[level + 1 :]])
                step = replace(step, sources=(*step.sources, Source(sender, -1, -1)))
            if position[level] != goal[level]:
                receiver = grid.rank([*position[:level], places[at + 1], *position[level + 1 :]])
                step = replace(step, target=receiver, round=step.round + at)
                break
            step = replace(step, round=step.round + dim - 1)
        rows[rank].append(step)


def direct(topology: Topology) -> Plan:
    """Every rank sends each segment straight to its owner, which sums its own first, then the next rank's, …"""
    world_size = topology.world_size
    rows: list[list[Step]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        for hop in range(1, world_size):
            owner = (rank + hop) % world_size
            rows[rank].append(Step(segment=owner, lane=0, own=True, sources=(), target=owner))
        everybody = tuple(Source((rank + hop) % world_size, -1, -1) for hop in range(1, world_size))
        rows[rank].append(Step(segment=rank, lane=0, own=True, sources=everybody, target=KEEP, round=1))
    plan = Plan(
        name="all to all", world_size=world_size, num_lanes=1, pull=False, reduces=True, gathers=False, steps=()
    )
    return number(plan, rows)


def stage_tables(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """Flux's ``rank_from`` and ``rank_to``: for each stage and rank whom it sends to, in that stage's inner chain or,
    at its end, across; and from whom a stage's sender reaches it. For a ring of two levels over two domains."""
    num_stages = max(step.stage for steps in plan.steps for step in steps) + 1
    rank_from = [[KEEP] * plan.world_size for _ in range(num_stages)]
    rank_to = [[KEEP] * plan.world_size for _ in range(num_stages)]
    for rank, step in plan.messages():
        rank_to[step.stage][rank] = step.target
        rank_from[step.stage][step.target] = rank
    return rank_from, rank_to
