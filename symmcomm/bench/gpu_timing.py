"""How calls are timed on a GPU.

**Graph.** The calls of a round are captured in a CUDA graph, which is replayed between two events, behind a sleep on
the GPU (so that everything is enqueued in time) and a barrier kernel of all ranks (so that they start together). The
time of a call is the events' distance over the calls; launches are as close together as the GPU can have them.

**Cold L2.** Before every call the graph writes a buffer of twice the L2's size, and a barrier kernel brings the ranks
together again. A second graph holds the same writes and barriers without the calls; it is replayed just before, and its
time is taken off. What is written is left in the cache as dirty lines: a call also pays for pushing them out.

**Eager.** Calls are made one after the other, and the host waits for the GPU at the end: the time of a call is what a
loop of such calls takes. ``host_seconds``, up to the wait, is what a call costs the host; the GPU's queue holds all
calls of a round, so nothing in it waits for the GPU. The ranks start when their hosts do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from symmcomm.bench.implementations import Call
from symmcomm.bench.method import Method, Timing
from symmcomm.bench.timer import Answer, Timer

SLEEP_CYCLES = 400_000
"""About 0.2 ms: longer than it takes to enqueue a round."""


@dataclass(frozen=True)
class Lane:
    """Where the calls of one rank go. A process has one, unless its ranks are virtual.

    Attributes:
        align: enqueues a barrier of all ranks' GPUs.
    """

    stream: torch.cuda.Stream
    align: Call

    def current(self) -> AbstractContextManager[None]:
        """Makes its stream torch's current one."""
        context: AbstractContextManager[None] = torch.cuda.stream(self.stream)
        return context


def gpu_timer(method: Method, lanes: Sequence[Lane], calls: Sequence[Call], flush: Call) -> Timer:
    """Times ``calls``, one a lane. ``flush`` enqueues a write of more than the L2 holds."""
    if method.timing is Timing.eager:
        return EagerTimer(lanes, calls)
    return ColdTimer(lanes, calls, flush) if method.cold_l2 else GraphTimer(lanes, calls)


def l2_flush(device: torch.device) -> Call:
    """Writes twice the L2, on the current stream."""
    num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).zero_


class EagerTimer:
    """See the module's docstring."""

    def __init__(self, lanes: Sequence[Lane], calls: Sequence[Call]) -> None:
        self._lanes, self._calls = lanes, calls

    def time(self, iterations: int) -> Answer:
        """See Timer."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        if len(self._calls) == 1:
            with self._lanes[0].current():
                call = self._calls[0]
                for _ in range(iterations):
                    call()
        else:
            for _ in range(iterations):
                for lane, call in zip(self._lanes, self._calls, strict=True):
                    with lane.current():
                        call()
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        return {"seconds": (done - start) / iterations, "host_seconds": (enqueued - start) / iterations}


class GraphTimer:
    """See the module's docstring. Keeps the graphs of the last number of calls."""

    def __init__(self, lanes: Sequence[Lane], calls: Sequence[Call]) -> None:
        self._lanes, self._calls = lanes, calls
        self._graphs: list[Call] = []
        self._captured = 0

    def time(self, iterations: int) -> Answer:
        """See Timer. The slowest lane's time."""
        if iterations != self._captured:
            self._graphs = capture(self._lanes, [repeated(call, iterations) for call in self._calls])
            self._captured = iterations
        return {"seconds": elapsed(self._lanes, self._graphs) / iterations}


class ColdTimer:
    """See the module's docstring. Keeps the graphs of the last number of calls."""

    def __init__(self, lanes: Sequence[Lane], calls: Sequence[Call], flush: Call) -> None:
        self._lanes, self._calls, self._flush = lanes, calls, flush
        self._with: list[Call] = []
        self._without: list[Call] = []
        self._captured = 0

    def time(self, iterations: int) -> Answer:
        """See Timer. The slowest lane's time."""
        if iterations != self._captured:
            self._with = self._capture(self._calls, iterations)
            self._without = self._capture([_nothing] * len(self._lanes), iterations)
            self._captured = iterations
        without = elapsed(self._lanes, self._without)
        return {"seconds": max(elapsed(self._lanes, self._with) - without, 0.0) / iterations}

    def _capture(self, calls: Sequence[Call], iterations: int) -> list[Call]:
        def cold(lane: Lane, call: Call) -> Call:
            def one() -> None:
                self._flush()
                lane.align()
                call()

            return repeated(one, iterations)

        return capture(self._lanes, [cold(*pair) for pair in zip(self._lanes, calls, strict=True)])


def _nothing() -> None:
    pass


def repeated(call: Call, iterations: int) -> Call:
    """The call, so many times."""

    def calls() -> None:
        for _ in range(iterations):
            call()

    return calls


def capture(lanes: Sequence[Lane], bodies: Sequence[Call]) -> list[Call]:
    """What replays a CUDA graph of each lane's body; each graph has run once. Everything that the bodies call must have
    been called before: at a first call modules are loaded and memory is allocated. All ranks call it together."""
    torch.cuda.synchronize()
    replays: list[Call] = []
    for lane, body in zip(lanes, bodies, strict=True):
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events meanwhile, which only this mode allows
        with torch.cuda.graph(graph, stream=lane.stream, capture_error_mode="thread_local"):
            body()
        replays.append(graph.replay)
    elapsed(lanes, replays)  # the first launch of a graph also uploads it
    return replays


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed(lanes: Sequence[Lane], bodies: Sequence[Call]) -> float:
    """Enqueues all lanes' bodies at once; seconds that the slowest took. All ranks call it together."""
    events = [(_event(), _event()) for _ in lanes]
    for lane, body, (before, after) in zip(lanes, bodies, events, strict=True):
        with lane.current():
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            lane.align()
            before.record()
            body()
            after.record()
    torch.cuda.synchronize()
    return max(float(before.elapsed_time(after)) for before, after in events) / 1e3
