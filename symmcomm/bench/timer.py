"""How calls are timed, and what a rank answers. ``gpu_timing`` has the GPU's clocks."""

from __future__ import annotations

import time
from itertools import repeat
from typing import Any, Protocol

from symmcomm.bench.implementations import Call

Answer = dict[str, Any]


class Timer(Protocol):
    """Times one call again and again. Keeps what it has prepared."""

    def time(self, iterations: int) -> Answer:
        """So many calls back to back, all ranks at about the same time: ``seconds`` a call, and ``host_seconds`` where
        the host's share of it is another."""
        ...


class HostTimer:
    """Calls that return when they are done."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def time(self, iterations: int) -> Answer:
        """See Timer."""
        call = self._call
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        return {"seconds": (time.perf_counter() - start) / iterations}
