"""The table that ``symmcomm tune`` writes and GPU communicators read: thresholds by GPU, world size and SMs a rank.

    [{"gpu": "NVIDIA H200", "world_size": 2, "num_sms": 132, "thresholds": {"ll_bytes": 524288, …}}, …]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from symmcomm.errors import ArgumentError, in_words
from symmcomm.schedule.select import NEVER
from symmcomm.schedule.select_gpu import DEFAULT, Thresholds


@dataclass(frozen=True, kw_only=True)
class World:
    """What thresholds hold for. Attributes: ``gpu`` its name, ``num_sms`` that a rank may use."""

    gpu: str
    world_size: int
    num_sms: int


def _parse(text: str) -> list[tuple[World, Thresholds]]:
    if not text.strip():
        return []
    names = {each.name for each in fields(Thresholds)}
    try:
        found = []
        for row in json.loads(text):
            given: dict[str, Any] = row["thresholds"]
            if not all(isinstance(value, int) and value >= 0 for value in given.values()):
                raise ValueError(f"thresholds are numbers of bytes, got {given}")
            known = {name: value for name, value in given.items() if name in names}  # another version may know more
            world = World(gpu=row["gpu"], world_size=int(row["world_size"]), num_sms=int(row["num_sms"]))
            found.append((world, Thresholds(**known)))
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(f"this is not a table of thresholds: {in_words(error)}") from None


def lookup(text: str, world: World) -> Thresholds:
    """The thresholds of a world; the defaults if the table does not know it.

    Raises ArgumentError for a text that is not a table.
    """
    return next((thresholds for known, thresholds in _parse(text) if known == world), DEFAULT)


def updated(text: str, world: World, thresholds: Thresholds) -> str:
    """The table with a world's row replaced, or added."""
    rows = [row for row in _parse(text) if row[0] != world] + [(world, thresholds)]
    return json.dumps([asdict(known) | {"thresholds": asdict(each)} for known, each in rows], indent=1) + "\n"


def last_win(sizes: Sequence[int], first: Sequence[float], second: Sequence[float]) -> int:
    """Up to which of the sizes, in ascending order, the first takes no longer than the second; 0 if never, and more
    than any tensor has if it does at the largest.

    One size at which it loses does not count if it wins at the next one: times scatter.
    """
    wins = [a <= b for a, b in zip(first, second, strict=True)]
    won = 0
    for i, size in enumerate(sizes):
        if wins[i]:
            won = size
        elif not any(wins[i + 1 : i + 2]):
            break
    return NEVER if won == sizes[-1] else won


def first_win(sizes: Sequence[int], first: Sequence[float], second: Sequence[float]) -> int:
    """From which of the sizes on the first takes no longer than the second, on all larger ones too."""
    start = NEVER
    for size, a, b in zip(reversed(sizes), reversed(first), reversed(second), strict=True):
        if a > b:
            break
        start = size
    return start
