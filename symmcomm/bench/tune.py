"""``symmcomm tune``: measures where one kernel overtakes another, on this machine, and writes the table that GPU
communicators read (``schedule.tuning_gpu``).

A contest is one threshold: the same call is timed with the threshold at 0 and beyond all sizes, which makes the
selection take the one kernel and the other. Times are those of CUDA graphs (``bench.gpu_timing``), the slowest rank's,
the median of some rounds in which the two take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from symmcomm.bench.gpu_timing import GraphTimer, Lane
from symmcomm.communicator import Communicator, init
from symmcomm.env import Launch, Settings
from symmcomm.errors import DeviceError
from symmcomm.schedule.select import NEVER
from symmcomm.schedule.select_gpu import Thresholds
from symmcomm.schedule.tuning_gpu import first_win, last_win, updated

ROUNDS = 9
_BATCH_BYTES = 64 << 20  # moved by one graph, about
_MOST_CALLS = 40

Prepare = Callable[[Communicator, int], tuple[Callable[[], None], torch.Tensor | None]]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One threshold.

    Attributes:
        field: of ``Thresholds``.
        small_first: it counts up to where the small sizes' kernel pays, not from where the large sizes' one does.
        scaled: with the world size, in the selection.
        sizes: in bytes of what the threshold counts, between two ranks.
        prepare: the call to be timed, on tensors of such a size, and its symmetric tensor.
        lamport: whether Lamport kernels may be taken; else the contest is about what serves beyond them.
        multicast: whether it is about the NVLink switch, and held only where that may be used and can.
    """

    field: str
    small_first: bool
    scaled: bool = False
    sizes: tuple[int, ...]
    prepare: Prepare
    lamport: bool = False
    multicast: bool = False


def join(launch: Launch, settings: Settings) -> Communicator:
    """Collective. The communicator of a launcher's ranks, each on the GPU of its local rank."""
    local_rank = launch.local_rank or 0
    if (num := torch.cuda.device_count()) == 0:
        raise DeviceError("tuning needs an NVIDIA GPU, and torch finds none")
    torch.cuda.set_device(local_rank % num)
    return init(device="cuda", settings=settings)


def _tensor(comm: Communicator, num_bytes: int, symmetric: bool) -> torch.Tensor:
    if symmetric:
        return comm.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").zero_()
    return torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=comm.gpu_side.device)


def _all_reduce(comm: Communicator, num_bytes: int) -> tuple[Callable[[], None], torch.Tensor | None]:
    tensor = _tensor(comm, num_bytes, True)
    return lambda: comm.gpu_side.all_reduce(tensor), tensor


def _all_gather(comm: Communicator, part: int, pushes: bool) -> tuple[Callable[[], None], torch.Tensor | None]:
    output, input = _tensor(comm, part * comm.world_size, pushes), _tensor(comm, part, False)
    return lambda: comm.gpu_side.all_gather_into_tensor(output, input), output if pushes else None


def _reduce_scatter(comm: Communicator, part: int) -> tuple[Callable[[], None], torch.Tensor | None]:
    output, input = _tensor(comm, part, False), _tensor(comm, part * comm.world_size, True)
    return lambda: comm.gpu_side.reduce_scatter_tensor(output, input), input


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(first, last + 1))


CONTESTS = (
    Contest(field="all_reduce_ll_bytes", small_first=True, scaled=True, sizes=_powers(15, 22), prepare=_all_reduce),
    Contest(
        field="ll_bytes", small_first=True, scaled=True, sizes=_powers(14, 21),
        prepare=partial(_all_gather, pushes=False),
    ),
    Contest(field="pull_bytes", small_first=False, sizes=_powers(19, 26), prepare=_reduce_scatter),
    Contest(field="lamport_bytes", small_first=True, sizes=_powers(17, 26), prepare=_reduce_scatter, lamport=True),
    Contest(
        field="gather_push_bytes", small_first=False, sizes=_powers(18, 26), prepare=partial(_all_gather, pushes=True),
        lamport=True,
    ),
    Contest(
        field="multimem_bytes", small_first=False, sizes=_powers(16, 27), prepare=_all_reduce, lamport=True,
        multicast=True,
    ),
)


def _times(comm: Communicator, lane: Lane, contest: Contest, size: int, rounds: int) -> tuple[float, float]:
    """Microseconds of a call with the threshold beyond all sizes, and at 0."""
    gpu, before = comm.gpu_side, comm.gpu_side.thresholds
    num_calls = max(2, min(_MOST_CALLS, _BATCH_BYTES // (size * comm.world_size)))
    call, symmetric = contest.prepare(comm, size)
    timers = []
    lamport_bytes = before.lamport_bytes if contest.lamport else 0
    base = replace(before, lamport_bytes=lamport_bytes, multimem_bytes=NEVER)  # the switch would serve both
    for value in (NEVER, 0):
        gpu.set_thresholds(replace(base, **{contest.field: value}))
        call()  # loads the module
        timers.append(GraphTimer([lane], [call]))
        timers[-1].time(num_calls)  # captures
    gpu.set_thresholds(before)
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for timer, times in zip(timers, found, strict=True):
            comm.barrier()
            times.append(timer.time(num_calls)["seconds"] * 1e6)
    mine = [statistics.median(times) for times in found]
    if symmetric is not None:
        comm.free(symmetric)
    answers = comm.all_gather_bytes(f"{mine[0]} {mine[1]}".encode())
    high, low = zip(*(map(float, answer.split()) for answer in answers), strict=True)
    return max(high), max(low)


def tune(comm: Communicator, rounds: int, say: Say) -> Thresholds:
    """Collective. Measures the thresholds of CONTESTS, each with those found before it, by the median of ``rounds``;
    the others keep their values. ``say`` gets one line per measurement."""
    gpu = comm.gpu_side
    lane = Lane(torch.cuda.Stream(gpu.device), gpu.barrier)  # type: ignore[no-untyped-call]
    with lane.current():
        for contest in CONTESTS:
            if contest.multicast and (obstacle := _no_multicast(comm)):
                say(f"{contest.field:>20} not measured: {obstacle}")
                continue
            value = _threshold(comm, lane, contest, rounds, say)
            gpu.set_thresholds(replace(gpu.thresholds, **{contest.field: value}))
    return gpu.thresholds


def _no_multicast(comm: Communicator) -> str:
    """Collective. Why the switch cannot be used; empty if it can. Thresholds that want it make the GPU side try, where
    the one gate lets all ranks (``memory.multicast``)."""
    gpu, before = comm.gpu_side, comm.gpu_side.thresholds
    gpu.set_thresholds(replace(before, multimem_bytes=0))
    gpu.set_thresholds(before)
    return "" if gpu.multicast_base else gpu.multicast.allowed.reason


def _threshold(comm: Communicator, lane: Lane, contest: Contest, rounds: int, say: Say) -> int:
    """Where the curves cross."""
    scale = comm.world_size * (comm.world_size - 1) / 2 if contest.scaled else 1.0
    sizes = [max(4096, int(each / scale) // 4096 * 4096) for each in contest.sizes]
    pairs = []
    for num_bytes in sizes:
        pairs.append(_times(comm, lane, contest, num_bytes, rounds))
        below, above = pairs[-1]
        say(f"{contest.field:>20} {num_bytes:>10} bytes: below it {below:9.2f} us, above it {above:9.2f} us")
    beyond, at_zero = zip(*pairs, strict=True)
    if contest.small_first:
        return int(last_win(sizes, beyond, at_zero) * scale)
    return first_win(sizes, at_zero, beyond)


def write(comm: Communicator, thresholds: Thresholds, path: Path) -> None:
    """Puts the thresholds into the table, if this is rank 0."""
    if comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(updated(text, comm.gpu_side.tuned_for, thresholds))
