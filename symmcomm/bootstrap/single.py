"""A world of one rank."""

from __future__ import annotations


class SingleBootstrap:
    """The bootstrap of a process that has no peers."""

    name = "world of one"
    rank = 0
    world_size = 1

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Returns the payload."""
        return [bytes(payload)]

    def close(self) -> None:
        """Does nothing."""
