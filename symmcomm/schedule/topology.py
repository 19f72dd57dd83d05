"""What joins the ranks: links with bandwidth and latency, through switches, and the groups that lie close together.

A topology is a graph. Its vertices are the ranks (numbers) and switches (names: a PCIe root, a memory controller, an
NVSwitch); an edge is one direction of a link. Groups are partitions of the ranks, the closest first: NUMA domains, then
the nodes of a cluster; a schedule that has inner and outer rings takes them from there.

As a file (TOML; JSON with the same keys)::

    world_size = 8
    [[levels]]
    name = "numa"
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    [[links]]
    between = [[0, 1, 2, 3], "root0"]     # or [0, "root0"]: a link for each rank of a list
    kind = "pcie"
    gbytes_per_s = 25.0                   # in each direction
    latency_us = 0.6
    duplex = true                         # the default: both directions at once, else they share the bandwidth

Pure data: how a machine is looked at is told by ``symmcomm.discovery``, machines that nobody has in
``schedule.machines``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from symmcomm.errors import TopologyError

Vertex = int | str
Partition = tuple[tuple[int, ...], ...]

MAX_WORLD_SIZE = 1 << 16
_LINK_KEYS = {"between", "kind", "gbytes_per_s", "latency_us", "duplex"}
_LEVEL_KEYS = {"name", "groups"}
_FILE_KEYS = {"world_size", "levels", "links"}


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two vertices.

    Attributes:
        ends: the two vertices. kind: what it is, as ``"pcie"``, ``"nvlink"``, ``"numa"``, ``"network"``.
        bandwidth: bytes a second in each direction. latency: seconds.
        duplex: both directions at once; else they share the bandwidth.
    """

    ends: tuple[Vertex, Vertex]
    kind: str
    bandwidth: float
    latency: float
    duplex: bool = True


Hop = tuple[Link, int]
"""A link and the direction in which it is passed: 0 or 1, always 0 where both directions share the bandwidth."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """See the module's text. ``level_names`` and ``levels`` belong together, innermost first, each level's groups are
    unions of those of the one before. Raises TopologyError where that, or the graph, is not sound."""

    world_size: int
    links: tuple[Link, ...]
    levels: tuple[Partition, ...] = ()
    level_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(f"world_size={self.world_size} is not positive")
        if len(self.levels) != len(self.level_names):
            raise TopologyError(f"{len(self.levels)} levels have {len(self.level_names)} names")
        for idx in range(len(self.levels)):
            self._check_level(idx)
        for idx, link in enumerate(self.links):
            check_link(link, self.world_size, f"links[{idx}]")
        if unreachable := sorted(set(range(self.world_size)) - set(self._reach(0))):
            raise TopologyError(f"the graph is not connected: no path leads from rank 0 to ranks {unreachable}")

    def _check_level(self, idx: int) -> None:
        name, groups = self.level_names[idx], self.levels[idx]
        if sorted(rank for group in groups for rank in group) != list(range(self.world_size)):
            raise TopologyError(f"level {name!r}: {groups} is not a partition of the ranks 0..{self.world_size - 1}")
        for inner in self.levels[idx - 1] if idx else ():
            if not any(set(inner) <= set(group) for group in groups):
                raise TopologyError(
                    f"level {name!r}: no group holds all of {list(inner)} of level {self.level_names[idx - 1]!r}"
                )

    @cached_property
    def _edges(self) -> dict[Vertex, list[tuple[Vertex, Hop]]]:
        edges: dict[Vertex, list[tuple[Vertex, Hop]]] = {rank: [] for rank in range(self.world_size)}
        for link in self.links:
            for direction, (start, end) in enumerate((link.ends, link.ends[::-1])):
                edges.setdefault(start, []).append((end, (link, direction if link.duplex else 0)))
        return edges

    def _reach(self, source: int) -> dict[Vertex, tuple[Hop, ...]]:
        """Paths from a rank to everything; ranks do not pass on what is for others. The fewest links win, then the
        widest, then the order of the links."""
        found: dict[Vertex, tuple[Hop, ...]] = {}
        queue: list[tuple[int, float, int, Vertex, tuple[Hop, ...]]] = [(0, 0.0, 0, source, ())]
        count = 0
        while queue:
            length, width, _, vertex, path = heappop(queue)
            if vertex in found:
                continue
            found[vertex] = path
            if isinstance(vertex, int) and vertex != source:
                continue
            for end, hop in self._edges[vertex]:
                count += 1
                bandwidth = min(hop[0].bandwidth, -width or hop[0].bandwidth)
                heappush(queue, (length + 1, -bandwidth, count, end, (*path, hop)))
        return found

    @cached_property
    def _paths(self) -> dict[int, dict[Vertex, tuple[Hop, ...]]]:
        return {}

    def path(self, source: int, target: int) -> tuple[Hop, ...]:
        """The links from one rank to another. Raises TopologyError if all ways lead through other ranks."""
        if source not in self._paths:
            self._paths[source] = self._reach(source)
        if target not in self._paths[source]:
            raise TopologyError(f"no path leads from rank {source} to rank {target} but through other ranks")
        return self._paths[source][target]

    def kind(self, source: int, target: int) -> str:
        """The kind of the narrowest link between two ranks."""
        return min(self.path(source, target), key=lambda hop: hop[0].bandwidth)[0].kind

    def ring_order(self) -> list[int]:
        """All ranks, groups within groups together."""
        return [rank for rank, _ in sorted(self.coordinates().items(), key=lambda item: item[1])]

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """For each rank its group's number at each level, outermost first, and last its own among the innermost."""
        places: dict[int, tuple[int, ...]] = {}
        for rank in range(self.world_size):
            numbers = [next(i for i, group in enumerate(level) if rank in group) for level in reversed(self.levels)]
            inner = self.levels[0][numbers[-1]] if self.levels else range(self.world_size)
            places[rank] = (*numbers, list(inner).index(rank))
        return places

    def is_flat(self) -> bool:
        """Whether every rank reaches every other over links of one kind, however many there are."""
        kinds = {self.kind(s, t) for s in range(self.world_size) for t in range(self.world_size) if s != t}
        return len(kinds) <= 1

    def restricted_to(self, members: Sequence[int]) -> Topology:
        """Of these ranks, numbered anew in the order given; the others stay as switches."""
        number = {rank: idx for idx, rank in enumerate(members)}

        def named(end: Vertex) -> Vertex:
            return number.get(end, f"rank {end}") if isinstance(end, int) else end

        links = tuple(replace(link, ends=(named(link.ends[0]), named(link.ends[1]))) for link in self.links)
        left = [[tuple(number[r] for r in group if r in number) for group in level] for level in self.levels]
        levels = tuple(tuple(group for group in level if group) for level in left)
        return replace(self, world_size=len(members), links=links, levels=levels)

    def to_json(self) -> dict[str, Any]:
        """The same as a file."""
        return {
            "world_size": self.world_size,
            "levels": [
                {"name": name, "groups": [list(group) for group in groups]}
                for name, groups in zip(self.level_names, self.levels, strict=True)
            ],
            "links": [
                {"between": list(link.ends), "kind": link.kind, "gbytes_per_s": round(link.bandwidth / 1e9, 9),
                 "latency_us": round(link.latency * 1e6, 9), "duplex": link.duplex}
                for link in self.links
            ],
        }  # fmt: skip


def check_link(link: Link, world_size: int, where: str) -> None:
    """Raises TopologyError, which says ``where``, unless the link can be one."""
    for end in link.ends:
        if isinstance(end, int) and not 0 <= end < world_size:
            raise TopologyError(f"{where}: {end} is not a rank of 0..{world_size - 1}")
    if link.ends[0] == link.ends[1]:
        raise TopologyError(f"{where}: both ends are {link.ends[0]!r}")
    if not 0 < link.bandwidth < float("inf") or not 0 <= link.latency < float("inf"):
        raise TopologyError(
            f"{where}: no link has a bandwidth of {link.bandwidth} bytes/s and a latency of {link.latency} s"
        )


def load_topology(path: Path | str, world_size: int | None = None) -> Topology:
    """Reads a ``.toml`` or ``.json`` file. Raises TopologyError, naming the file and the line, for one that does not
    parse, makes no sense, or is not for ``world_size`` ranks (if given)."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}") from None
    try:
        if path.suffix == ".json":
            return _build(json.loads(text), text, path, world_size)
        return _build(tomllib.loads(text), text, path, world_size)
    except RecursionError:
        raise TopologyError(f"{path}: its brackets are nested too deep") from None
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path}, line {error.lineno}: {error.msg}") from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))  # else: at the end of the document
        line = where.group(1) if where else len(text.splitlines())
        raise TopologyError(f"{path}, line {line}: {error}") from None


def _build(content: Any, text: str, path: Path, world_size: int | None) -> Topology:
    file = _File(text, path)
    file.check_keys(content, _FILE_KEYS, "the file", 1)
    given = content.get("world_size")
    if not _is_whole(given):
        raise TopologyError(f"{path}, line {file.line('world_size')}: world_size is {given!r}, expected a whole number")
    if given > MAX_WORLD_SIZE:
        raise TopologyError(f"{path}, line {file.line('world_size')}: world_size is {given}, at most {MAX_WORLD_SIZE}")
    if world_size is not None and given != world_size:
        raise TopologyError(
            f"{path}, line {file.line('world_size')}: world_size is {given}, but there are {world_size} ranks"
        )
    levels = [file.level(entry, idx) for idx, entry in enumerate(file.entries(content, "levels"))]
    links = [
        link for idx, entry in enumerate(file.entries(content, "links")) for link in file.links(entry, idx, given)
    ]
    try:
        return Topology(
            world_size=given, links=tuple(links), levels=tuple(groups for _, groups in levels),
            level_names=tuple(name for name, _ in levels),
        )  # fmt: skip
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class _File:
    """Knows where in the text an entry stands."""

    text: str
    path: Path

    def line(self, key: str, idx: int = 0) -> int:
        """Of the ``idx``-th entry of a list, or of a key; 1 if it is written in a way that is not seen through."""
        if self.path.suffix == ".json":
            word = {"links": '"between"', "levels": '"groups"'}.get(key, f'"{key}"')
            starts = [match.start() for match in re.finditer(re.escape(word), self.text)]
        else:
            starts = [m.start() for m in re.finditer(rf"^\s*(\[\[\s*{key}\s*\]\]|{key}\s*=)", self.text, re.MULTILINE)]
            starts = [start + len(self.text[start:]) - len(self.text[start:].lstrip()) for start in starts]
        return self.text.count("\n", 0, starts[idx]) + 1 if idx < len(starts) else 1

    def check_keys(self, entry: Any, known: set[str], what: str, line: int) -> None:
        if not isinstance(entry, dict):
            raise TopologyError(f"{self.path}, line {line}: {what} is not a table of keys")
        if unknown := sorted(set(entry) - known):
            names = f"{what} has unknown keys {unknown}, known are {sorted(known)}"
            raise TopologyError(f"{self.path}, line {line}: {names}")

    def entries(self, content: dict[str, Any], key: str) -> list[Any]:
        found = content.get(key, [])
        if not isinstance(found, list):
            raise TopologyError(f"{self.path}, line {self.line(key)}: {key} is not a list")
        return found

    def level(self, entry: Any, idx: int) -> tuple[str, Partition]:
        line = self.line("levels", idx)
        self.check_keys(entry, _LEVEL_KEYS, f"levels[{idx}]", line)
        groups = entry.get("groups")
        whole = isinstance(groups, list) and all(isinstance(g, list) and all(map(_is_whole, g)) for g in groups)
        if not whole or not groups:
            what = f"levels[{idx}].groups is not a list of lists of ranks: {groups!r}"
            raise TopologyError(f"{self.path}, line {line}: {what}")
        return str(entry.get("name", f"level {idx}")), tuple(tuple(group) for group in groups)

    def links(self, entry: Any, idx: int, world_size: int) -> Iterator[Link]:
        line = self.line("links", idx)
        self.check_keys(entry, _LINK_KEYS, f"links[{idx}]", line)
        between, duplex = entry.get("between"), entry.get("duplex", True)
        numbers = [entry.get("gbytes_per_s"), entry.get("latency_us", 0.0)]
        if not isinstance(between, list) or len(between) != 2:
            raise TopologyError(f"{self.path}, line {line}: links[{idx}].between is {between!r}, expected two ends")
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise TopologyError(f"{self.path}, line {line}: links[{idx}] has gbytes_per_s and latency_us {numbers!r}")
        if not isinstance(duplex, bool):
            raise TopologyError(f"{self.path}, line {line}: links[{idx}].duplex is {duplex!r}, expected true or false")
        for start in between[0] if isinstance(between[0], list) else [between[0]]:
            for end in between[1] if isinstance(between[1], list) else [between[1]]:
                if not all(_is_whole(e) or isinstance(e, str) for e in (start, end)):
                    raise TopologyError(f"{self.path}, line {line}: links[{idx}] ends at {start!r} and {end!r}")
                link = Link(
                    ends=(start, end), kind=str(entry.get("kind", "link")), bandwidth=numbers[0] * 1e9,
                    latency=numbers[1] * 1e-6, duplex=duplex,
                )  # fmt: skip
                check_link(link, world_size, f"{self.path}, line {line}: links[{idx}]")
                yield link


def partition(sizes: Sequence[int]) -> Partition:
    """Consecutive ranks in groups of the given sizes."""
    starts = [sum(sizes[:idx]) for idx in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
