"""Measures the limits of ``bench.floor`` on this rank's GPU: a launch, a signal, a push."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from symmcomm.bench.gpu_timing import Lane, capture, elapsed, repeated
from symmcomm.bench.implementations import Call
from symmcomm.kernels.gpu.limits import Empty, PingPong, Push

PUSH_BYTES = 256 << 20
_LAUNCHES, _ROUNDS, _PUSHES, _TIMES = 200, 1000, 4, 5
_GRID, _THREADS, _VECTORS = 64, 512, 4  # what fills an NVLink 4 port


class Reach(Protocol):
    """What launches kernels on a rank's behalf: ``GpuCollectives``, or a virtual rank."""

    rank: int
    world_size: int
    num_sms: int

    def launch(self, kernel: Any, *arguments: int) -> None:
        """``kernel(base, stride, rank, *arguments, current stream)``."""
        ...


def measure_limits(
    ranks: Sequence[Reach], lanes: Sequence[Lane], word: int, target: int, meet: Callable[[], object]
) -> dict[str, float]:
    """What ``Floor.of_ranks`` takes, from the slowest of this process's ranks. Collective.

    Args:
        word: offset of 4 bytes in every rank's heap, which hold 0.
        target: offset of PUSH_BYTES there.
        meet: brings the processes together.
    """
    world_size = ranks[0].world_size
    launch_s = _median(_graphs(ranks, lanes, Empty(world_size=world_size), _LAUNCHES), meet)
    return {
        "launch_us": launch_s * 1e6,
        "signal_us": _signal_s(ranks, lanes, word, meet) * 1e6,
        "bandwidth": PUSH_BYTES / (_push_s(ranks, lanes, target, meet) - launch_s) / 1e9,
    }


def _signal_s(ranks: Sequence[Reach], lanes: Sequence[Lane], word: int, meet: Callable[[], object]) -> float:
    """One way between ranks 0 and 1."""
    if ranks[0].world_size == 1:
        return 0.0
    kernel = PingPong(world_size=ranks[0].world_size)
    for rank, lane in zip(ranks, lanes, strict=True):
        with lane.current():
            rank.launch(kernel, word, 0, 0)  # loads the module, while nothing runs that waits for another lane
    times = []
    for number in range(_TIMES):
        meet()
        bodies = [partial(rank.launch, kernel, word, number * _ROUNDS, _ROUNDS) for rank in ranks]
        times.append(elapsed(lanes, bodies) / (2 * _ROUNDS))
    return statistics.median(times)


def _push_s(ranks: Sequence[Reach], lanes: Sequence[Lane], target: int, meet: Callable[[], object]) -> float:
    """PUSH_BYTES from every rank to the next one."""
    kernel = Push(world_size=ranks[0].world_size, threads=_THREADS, vectors=_VECTORS)
    source = torch.zeros(PUSH_BYTES, dtype=torch.uint8, device=lanes[0].stream.device)
    torch.cuda.synchronize()
    grid = min(_GRID, *(rank.num_sms for rank in ranks))
    timed = _graphs(ranks, lanes, kernel, _PUSHES, source.data_ptr(), target, PUSH_BYTES, grid)
    return _median(timed, meet)


def _graphs(
    ranks: Sequence[Reach], lanes: Sequence[Lane], kernel: Any, times: int, *arguments: int
) -> Callable[[], float]:
    """Times a graph of that many launches; seconds a launch."""
    launches: list[Call] = [partial(rank.launch, kernel, *arguments) for rank in ranks]
    for lane, launch in zip(lanes, launches, strict=True):
        with lane.current():
            launch()  # loads the module
    replays = capture(lanes, [repeated(launch, times) for launch in launches])
    return lambda: elapsed(lanes, replays) / times


def _median(timed: Callable[[], float], meet: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        meet()
        times.append(timed())
    return statistics.median(times)
