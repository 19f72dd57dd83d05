"""Nobody passes a barrier early: back to back, in every variant, with late ranks, and where epochs wrap around."""

from __future__ import annotations

import ctypes
import time
from itertools import product

import pytest
import torch
from placements import PATHS, PLACEMENTS, Arena, communicator
from torch import Tensor

import symmcomm
from symmcomm import Communicator
from symmcomm.kernels.cpu import context as c
from symmcomm.memory.signals import LINE_BYTES
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.testing.faults import delayed
from symmcomm.testing.oracle import check_bits, emulate, make_input
from symmcomm.testing.spawn import run_ranks

VARIANTS = list(product(("all_to_all", "ring"), ("epoch", "cas")))


class Counters:
    """A symmetric counter a rank: what a rank writes before a barrier, all others see after it."""

    def __init__(self, comm: Communicator) -> None:
        own = comm.empty(1, dtype=torch.int64).zero_()
        handle = comm.rendezvous(own)
        self.comm, self.own = comm, own
        self.all = [handle.get_buffer(peer, (1,), torch.int64) for peer in range(comm.world_size)]
        comm.barrier()

        self.n = 0

    def step(self, algorithm: str, protocol: str, what: str) -> None:
        self.n += 1
        self.own[0] = self.n
        self.comm.barrier(algorithm=algorithm, protocol=protocol)
        seen = [int(counter) for counter in self.all]
        what = f"{algorithm} {protocol} {what}: rank {self.comm.rank} passed barrier {self.n}, the ranks are at {seen}"
        assert min(seen) >= self.n, what
        assert max(seen) <= self.n + 1, what


def back_to_back(num: int) -> None:
    with symmcomm.init() as comm:
        counters = Counters(comm)
        for algorithm, protocol in VARIANTS:
            for _ in range(num):
                counters.step(algorithm, protocol, "back to back")
        generator = torch.Generator().manual_seed(3)
        for _ in range(num // 4):  # variants mixed
            counters.step(*VARIANTS[int(torch.randint(4, (1,), generator=generator))], "mixed with others")


@pytest.mark.parametrize(("world_size", "num"), [(1, 10), (2, 1000), (3, 1000), (4, 1000), (5, 300), (8, 200)])
def test_barriers_back_to_back(world_size: int, num: int) -> None:
    run_ranks(back_to_back, world_size, num, timeout_s=120)


def late_for_barriers() -> None:
    with symmcomm.init() as comm:
        counters = Counters(comm)
        for late, (algorithm, protocol) in product(range(comm.world_size), VARIANTS):
            with delayed(comm, 0.003 if comm.rank == late else 0):
                for _ in range(3):
                    counters.step(algorithm, protocol, f"with rank {late} late")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_barriers_with_a_late_rank(world_size: int) -> None:
    run_ranks(late_for_barriers, world_size)


def late_for_pads() -> None:
    """The handle's barrier and signals, on several channels at once."""
    with symmcomm.init() as comm:
        own = comm.empty(64, dtype=torch.int64).zero_()
        handle, rank, world_size = comm.rendezvous(own), comm.rank, comm.world_size
        following = handle.get_buffer((rank + 1) % world_size, (64,), torch.int64)
        for late in range(world_size):
            with delayed(comm, 0.003 if rank == late else 0):
                for channel in (0, 1, 63):
                    following[channel] = 100 * late + channel + rank
                    handle.put_signal((rank + 1) % world_size, channel)
                for channel in (63, 0, 1):
                    handle.wait_signal((rank - 1) % world_size, channel)
                    assert own[channel] == 100 * late + channel + (rank - 1) % world_size
                handle.barrier(channel=5)
        assert int(handle.get_signal_pad(rank).to(torch.int64).sum()) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_signals_with_a_late_rank(world_size: int) -> None:
    run_ranks(late_for_pads, world_size)


# A late rank in every collective: the results are right, so all waited where they had to.


def check_all_collectives(comm: Communicator, arena: Arena, count: int, placement: str, seed: int, what: str) -> None:
    """Each input is overwritten as soon as a call returns: no peer may still be reading it."""
    world_size, rank, ranks = comm.world_size, comm.rank, range(comm.world_size)
    inputs = [make_input(peer, count * world_size, DType.float32, seed) for peer in ranks]
    own, mine, root = inputs[rank], slice(rank * count, (rank + 1) * count), seed % world_size
    total = emulate(inputs, DType.float32, Op.sum)
    output, gathered = torch.empty(count), torch.empty(count * world_size)

    def check(name: str, got: Tensor, expected: Tensor, *used: Tensor) -> None:
        copy = got.clone()
        for tensor in used:
            tensor.fill_(-7)
        check_bits(copy, expected, f"{name}, {what}")

    comm.all_reduce(tensor := arena.place(own, placement))
    check("all_reduce", tensor, total, tensor)
    comm.reduce(tensor := arena.place(own, placement), root)
    check("reduce", tensor, total if rank == root else own, tensor)
    comm.reduce_scatter_tensor(output, tensor := arena.place(own, placement))
    check("reduce_scatter", output, total[mine], tensor)
    comm.all_gather_into_tensor(gathered, tensor := arena.place(own[:count], placement))
    check("all_gather", gathered, torch.cat([part[:count] for part in inputs]), tensor)
    comm.all_to_all_single(gathered, tensor := arena.place(own, placement))
    check("all_to_all", gathered, torch.cat([part[mine] for part in inputs]), tensor)
    sizes = [count] * world_size
    comm.all_to_all_single(gathered, tensor := arena.place(own, placement), sizes, sizes)
    check("all_to_all with splits", gathered, torch.cat([part[mine] for part in inputs]), tensor)
    comm.broadcast(tensor := arena.place(own, placement), root)
    check("broadcast", tensor, inputs[root], tensor)
    parts = list(torch.empty(world_size, count)) if rank == root else None
    comm.gather(tensor := arena.place(own[:count], placement), parts, root)
    expected = torch.cat([part[:count] for part in (inputs if parts else [own])])
    check("gather", torch.cat(parts or [tensor]), expected, tensor)
    tensor = arena.place(own, placement)
    comm.scatter(output, list(tensor.view(world_size, count)) if rank == root else None, root)
    check("scatter", output, inputs[root][mine], tensor)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    comm.send(tensor := arena.place(own[:100], placement), following)
    tensor.fill_(-7)
    comm.recv(output := torch.empty(100), previous)
    check("message", output, inputs[previous][:100])


def late_for_collectives(path: str, spin: int) -> None:
    with communicator(path) as comm:
        assert spin < 0 or comm.tuning.spins == spin
        slot = comm.layout.slot_bytes
        arena = Arena(comm, 4 * slot * comm.world_size)
        for late, placement, count in product(range(comm.world_size), PLACEMENTS, (200, slot // 4)):
            what = f"{placement} × {count}, rank {late} late"
            with delayed(comm, 0.001 if comm.rank == late else 0):
                check_all_collectives(comm, arena, count, placement, seed=late, what=what)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("world_size", "spin"), [(2, -1), (2, 0), (3, -1), (4, -1)])
def test_collectives_with_a_late_rank(world_size: int, spin: int, path: str) -> None:
    env = {**PATHS[path], "SYMMCOMM_SPIN": str(spin)}
    run_ranks(late_for_collectives, world_size, path, spin, env=env, timeout_s=120)


def delay_is_real() -> None:
    with symmcomm.init() as comm:
        comm.barrier()
        started = time.monotonic()
        with delayed(comm, 0.1 if comm.rank == 1 else 0):
            comm.all_reduce(torch.ones(5))
        assert time.monotonic() - started > 0.09


def test_delay_is_real() -> None:
    run_ranks(delay_is_real, 2)


# Wrap-around: as if 2³² - 3 barriers, rounds and messages had gone by.


def set_epochs(comm: Communicator, epoch: int) -> None:
    """Puts this rank's counters, and the words that peers have signalled, at ``epoch``."""
    layout, start = comm.layout, comm.heap.own_address
    words = [layout.ring, *(layout.lines + n * LINE_BYTES for n in range(2 * comm.world_size))]
    words += [table + n * LINE_BYTES for table in (layout.sent, layout.taken) for n in range(comm.world_size)]
    comm.barrier(protocol="cas")
    for word in words:
        ctypes.c_uint32.from_address(start + word).value = epoch & 0xFFFFFFFF
    for field in (c.EPOCH, c.RING_EPOCH):
        ctypes.c_int64.from_address(comm.ctx + 8 * field).value = epoch
    for table in (c.CHUNKS_SENT, c.CHUNKS_TAKEN):
        for peer in range(comm.world_size):
            ctypes.c_int64.from_address(comm.field(table) + 8 * peer).value = epoch
    comm.barrier(protocol="cas")


def wrap_around(path: str, epoch: int) -> None:
    with communicator(path) as comm:
        counters, arena = Counters(comm), Arena(comm, 4 * comm.layout.slot_bytes * comm.world_size)
        set_epochs(comm, epoch)
        for algorithm in ("all_to_all", "ring"):
            for _ in range(20):
                counters.step(algorithm, "epoch", f"past epoch {epoch}")
        set_epochs(comm, epoch)
        for round_ in range(8):
            check_all_collectives(comm, arena, 1000, PLACEMENTS[round_ % 4], round_, f"past epoch {epoch}")
        assert comm.field(c.EPOCH) > epoch + 6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("epoch", [2**31 - 6, 2**32 - 7, 2**32 - 6])
def test_epochs_wrap_around(epoch: int, path: str) -> None:
    run_ranks(wrap_around, 3, path, epoch, env=PATHS[path])
