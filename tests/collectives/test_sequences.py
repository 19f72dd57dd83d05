"""Long random sequences of mixed collectives, the same on all ranks, and worlds of 16 and 64 ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from placements import PATHS, PLACEMENTS, Arena, as_bytes, communicator
from torch import Tensor

import symmcomm
from symmcomm import Communicator
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import check_bits, emulate, make_input
from symmcomm.testing.spawn import run_ranks

PAIRS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]


class Sequence:
    """Draws calls: ``shared`` gives all ranks the same numbers, ``own`` is for pauses of this rank alone."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm, self.seed = comm, seed
        self.shared, self.own = random.Random(seed), random.Random(1000 * seed + comm.rank)
        self.arena = Arena(comm, 4 * comm.layout.slot_bytes * comm.world_size)
        self.calls: list[Callable[[], str]] = [
            self.barrier, self.all_reduce, self.all_reduce, self.reduce, self.reduce_scatter, self.all_gather,
            self.broadcast, self.gather_scatter, self.all_to_all, self.uneven, self.messages, self.allocation,
        ]  # fmt: skip

    def run(self, num: int) -> None:
        for n in range(num):
            if self.own.random() < 0.1:
                time.sleep(self.own.random() * 0.003)
            call = self.shared.choice(self.calls)
            try:
                self.arena.check(call())
            except AssertionError as error:
                raise AssertionError(f"call {n} of sequence {self.seed}: {error}") from None

    def draw(self) -> tuple[DType, Op, int, str]:
        """Small ones often, two slots at the most."""
        dtype, op = self.shared.choice(PAIRS)
        largest = self.shared.choice([10, 100, 3000, 2 * self.comm.layout.slot_bytes // dtype.itemsize])
        return dtype, op, self.shared.randrange(largest), self.shared.choice(PLACEMENTS)

    def inputs(self, count: int, dtype: DType) -> list[Tensor]:
        seed = self.shared.randrange(1 << 20)
        return [make_input(peer, count, dtype, seed) for peer in range(self.comm.world_size)]

    def barrier(self) -> str:
        algorithm, protocol = self.shared.choice(["all_to_all", "ring"]), self.shared.choice(["epoch", "cas"])
        self.comm.barrier(algorithm=algorithm, protocol=protocol)
        return f"barrier {algorithm} {protocol}"

    def all_reduce(self) -> str:
        dtype, op, count, placement = self.draw()
        inputs, what = self.inputs(count, dtype), f"all_reduce {dtype.name} {op.name} × {count}, {placement}"
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        self.comm.all_reduce(tensor, op.name)
        check_bits(tensor, emulate(inputs, dtype, op), what)
        return what

    def reduce(self) -> str:
        dtype, op, count, placement = self.draw()
        root = self.shared.randrange(self.comm.world_size)
        inputs, what = self.inputs(count, dtype), f"reduce to {root} {dtype.name} {op.name} × {count}, {placement}"
        own = inputs[self.comm.rank]
        tensor = self.arena.place(own, placement)
        self.comm.reduce(tensor, root, op.name)
        check_bits(tensor, emulate(inputs, dtype, op) if self.comm.rank == root else own, what)
        return what

    def reduce_scatter(self) -> str:
        dtype, op, count, placement = self.draw()
        inputs = self.inputs(count * self.comm.world_size, dtype)
        what = f"reduce_scatter {dtype.name} {op.name} × {count}, {placement}"
        mine = slice(self.comm.rank * count, (self.comm.rank + 1) * count)
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        output = self.arena.blank(count, tensor.dtype, self.shared.choice(PLACEMENTS))
        self.comm.reduce_scatter_tensor(output, tensor, op.name)
        check_bits(output, emulate([part[mine] for part in inputs], dtype, op), what)
        return what

    def all_gather(self) -> str:
        dtype, _, count, placement = self.draw()
        inputs, what = self.inputs(count, dtype), f"all_gather {dtype.name} × {count}, {placement}"
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        output = self.arena.blank(count * self.comm.world_size, tensor.dtype, self.shared.choice(PLACEMENTS))
        self.comm.all_gather_into_tensor(output, tensor)
        check_bits(output, torch.cat(inputs), what)
        return what

    def broadcast(self) -> str:
        dtype, _, count, placement = self.draw()
        root = self.shared.randrange(self.comm.world_size)
        inputs, what = self.inputs(count, dtype), f"broadcast from {root} {dtype.name} × {count}, {placement}"
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        self.comm.broadcast(tensor, root)
        check_bits(tensor, inputs[root], what)
        return what

    def gather_scatter(self) -> str:
        """Gathered on one rank and scattered from there again."""
        dtype, _, count, placement = self.draw()
        root, world_size = self.shared.randrange(self.comm.world_size), self.comm.world_size
        inputs, what = self.inputs(count, dtype), f"gather, scatter at {root} {dtype.name} × {count}, {placement}"
        own = inputs[self.comm.rank]
        tensor, parts = self.arena.place(own, placement), None
        if self.comm.rank == root:
            parts = [torch.empty(count, dtype=tensor.dtype) for _ in range(world_size)]
        self.comm.gather(tensor, parts, root)
        output = self.arena.blank(count, tensor.dtype, placement)
        self.comm.scatter(output, parts[::-1] if parts else None, root)
        check_bits(output, inputs[world_size - 1 - self.comm.rank], what)
        return what

    def all_to_all(self) -> str:
        dtype, _, count, placement = self.draw()
        inputs = self.inputs(count * self.comm.world_size, dtype)
        what = f"all_to_all {dtype.name} × {count}, {placement}"
        mine = slice(self.comm.rank * count, (self.comm.rank + 1) * count)
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        in_place = self.shared.random() < 0.5
        output = tensor if in_place else self.arena.blank(tensor.numel(), tensor.dtype, self.shared.choice(PLACEMENTS))
        self.comm.all_to_all_single(output, tensor)
        check_bits(output, torch.cat([part[mine] for part in inputs]), f"{what}, in place: {in_place}")
        return what

    def uneven(self) -> str:
        dtype, _, count, placement = self.draw()
        ranks = range(self.comm.world_size)
        sizes = [[self.shared.randrange(count + 1) for _ in ranks] for _ in ranks]
        inputs = [part[: sum(sizes[peer])] for peer, part in enumerate(self.inputs(count * len(ranks), dtype))]
        what = f"uneven all_to_all {dtype.name} {sizes}, {placement}"
        expected = torch.cat([inputs[peer].split(sizes[peer])[self.comm.rank] for peer in ranks])
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        output = self.arena.blank(expected.numel(), tensor.dtype, placement)
        taken = [sizes[peer][self.comm.rank] for peer in ranks]
        self.comm.all_to_all_single(output, tensor, taken, sizes[self.comm.rank])
        check_bits(output, expected, what)
        return what

    def messages(self) -> str:
        """Round the ring, more than the queue holds: rank 0 sends first."""
        dtype, _, count, placement = self.draw()
        if self.comm.world_size == 1:
            return "no message"
        inputs, what = self.inputs(count, dtype), f"messages {dtype.name} × {count}, {placement}"
        following, previous = (self.comm.rank + 1) % len(inputs), (self.comm.rank - 1) % len(inputs)
        tensor = self.arena.place(inputs[self.comm.rank], placement)
        output = self.arena.blank(count, tensor.dtype, placement)
        for move in (self.comm.send, self.comm.recv)[:: 1 if self.comm.rank == 0 else -1]:
            move(*((tensor, following) if move == self.comm.send else (output, previous)))
        check_bits(output, inputs[previous], what)
        return what

    def allocation(self) -> str:
        """A symmetric tensor of its own, used and freed; at times the heap grows by it."""
        count = self.shared.choice([0, 1, 1000, 5 << 20])
        tensor = self.comm.empty(count, dtype=torch.int64)
        own = tensor.view(-1)[:2000].fill_(self.comm.rank + 1)
        self.comm.all_reduce(own)
        assert own.eq(sum(range(1, self.comm.world_size + 1))).all()
        self.comm.free(tensor)
        return f"empty({count})"


def run_sequence(path: str, num: int, seeds: list[int]) -> None:
    with communicator(path) as comm:
        for seed in seeds:
            Sequence(comm, seed).run(num)


@pytest.mark.parametrize(("world_size", "num", "seeds"), [
    (1, 200, [1]), (2, 500, [2, 3]), (3, 300, [5, 6]), (4, 200, [7]), (5, 100, [8]), (8, 80, [9]),
])  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_random_sequences(world_size: int, num: int, seeds: list[int], path: str) -> None:
    run_ranks(run_sequence, world_size, path, num, seeds, timeout_s=200, env=PATHS[path])


def run_sequence_in_groups() -> None:
    """Calls on the world and on overlapping groups, in turn."""
    with symmcomm.init() as comm:
        halves, edge = comm.split(comm.rank % 2), comm.split(None if comm.rank == 1 else 0, key=-comm.rank)
        groups = [Sequence(group, seed) for seed, group in ((11, comm), (12, halves), (13, edge)) if group is not None]
        for _ in range(20):
            for group in groups:
                group.run(5)
        for group in reversed(groups[1:]):
            group.comm.close()


def test_random_sequences_in_groups() -> None:
    run_ranks(run_sequence_in_groups, 4, timeout_s=120, env=PATHS["staged"])


# Many ranks.


def run_many() -> int:
    with symmcomm.init() as comm:
        rank, world_size = comm.rank, comm.world_size
        for placement in ("ordinary", "symmetric"):
            for count in (1, 1000, 20_000):
                inputs = [make_input(peer, count, DType.bfloat16, 1) for peer in range(world_size)]
                own = inputs[rank]
                tensor = own.clone() if placement == "ordinary" else comm.empty(count, dtype=own.dtype).copy_(own)
                comm.all_reduce(tensor)
                check_bits(tensor, emulate(inputs, DType.bfloat16, Op.sum), f"all_reduce × {count}, {placement}")
        sent = torch.arange(world_size * 3).view(world_size, 3) + 1000 * rank
        taken = torch.empty_like(sent)
        comm.all_to_all_single(taken, sent)
        expected = torch.stack([torch.arange(3 * rank, 3 * rank + 3) + 1000 * peer for peer in range(world_size)])
        assert as_bytes(taken) == as_bytes(expected)
        output = torch.empty(3)
        comm.reduce_scatter_tensor(output, torch.ones(3 * world_size))
        assert output.tolist() == [float(world_size)] * 3
        comm.send(torch.tensor([rank]), (rank + 1) % world_size)
        comm.recv(message := torch.empty(1, dtype=torch.int64), (rank - 1) % world_size)
        assert int(message) == (rank - 1) % world_size
        for algorithm, protocol in (("ring", "epoch"), ("all_to_all", "cas"), ("ring", "cas")):
            comm.barrier(algorithm=algorithm, protocol=protocol)
        group = comm.split(rank % 3)
        assert group is not None
        total = torch.ones(1)
        group.all_reduce(total)
        group.close()
        return int(total)


@pytest.mark.parametrize("world_size", [16, 64])
def test_many_ranks(world_size: int) -> None:
    results = run_ranks(run_many, world_size, timeout_s=200)
    assert [result.value for result in results] == [len(range(rank % 3, world_size, 3)) for rank in range(world_size)]
