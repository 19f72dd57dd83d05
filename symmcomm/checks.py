"""Arguments that calls of several layers have."""

from __future__ import annotations

from typing import Protocol

from symmcomm.errors import ArgumentError


class Ranked(Protocol):
    """A communicator, its GPU side, or what belongs to one."""

    rank: int
    world_size: int


def check_rank(ranks: Ranked, rank: object, name: str) -> None:
    """Raises ArgumentError unless ``rank`` is one of ``ranks``."""
    is_int = isinstance(rank, int) and not isinstance(rank, bool)
    if not is_int or not 0 <= rank < ranks.world_size:  # type: ignore[operator]
        what = "" if is_int else f": it is of type {type(rank).__name__}"
        raise ArgumentError(f"{name}={rank!r} is not a rank of this communicator (0..{ranks.world_size - 1}){what}")


def check_timeout(timeout_s: object, name: str = "timeout_s") -> None:
    """Raises ArgumentError unless it is a positive number."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ArgumentError(f"{name}={timeout_s!r} is not positive")
