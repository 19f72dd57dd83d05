"""Groups: subsets, overlaps, many of them, and the end of each."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symmcomm import ClosedError, PeerAbortedError
from symmcomm.testing.spawn import run_ranks


def overlapping() -> None:
    dist.init_process_group("symm")
    rank = dist.get_rank()
    pairs = [(left, right) for left in range(4) for right in range(left + 1, 4)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    works, tensors = [], {}
    for pair in pairs:
        if rank in pair:
            tensors[pair] = torch.full((1000,), float(rank))
            works.append(dist.all_reduce(tensors[pair], group=groups[pair], async_op=True))
    if rank % 2:
        works.reverse()
    for work in works:
        work.wait()
    assert all((tensor == sum(pair)).all() for pair, tensor in tensors.items())
    local, _ = dist.new_subgroups(2)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=local)
    assert tensor[0] == rank // 2 * 4 + 1
    mine = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
    dist.broadcast(tensor.fill_(rank), group=mine, group_src=1)
    assert tensor[0] == rank % 2 + 2
    dist.barrier()  # rank 0 serves the store, by which the other pair may still be making its group
    dist.destroy_process_group()


def unsorted() -> None:
    dist.init_process_group("symm")
    rank = dist.get_rank()
    group = dist.new_group([3, 1, 0, 2], sort_ranks=False)
    assert dist.get_group_rank(group, rank) == [2, 1, 3, 0][rank]
    gathered = torch.zeros(4)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == [3, 1, 0, 2]
    dist.destroy_process_group()


def test_overlapping() -> None:
    run_ranks(overlapping, 4)


@pytest.mark.skipif("sort_ranks" not in signature(dist.new_group).parameters, reason="torch 2.11 sorts always")
def test_unsorted() -> None:
    run_ranks(unsorted, 4)


def opposite_order() -> None:
    """Asynchronous calls on two groups, waited for in another order than made, and made in another order by rank."""
    dist.init_process_group("symm")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    for _ in range(50):
        tensors = [torch.ones(100), torch.full((100,), 2.0)]
        works = {which: dist.all_reduce(tensors[which], group=groups[which], async_op=True) for which in order}
        for which in order:
            works[which].wait()
        assert tensors[0][0] == 2
        assert tensors[1][0] == 4
    dist.destroy_process_group()


def test_opposite_order() -> None:
    run_ranks(opposite_order, 2)


def footprint() -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "MiB of address space": int(status["VmSize"].split()[0]) >> 10,
        "MiB resident": int(status["VmRSS"].split()[0]) >> 10,
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def many_groups(num_groups: int) -> None:
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    before: dict[str, int] = {}
    for number in range(num_groups + 10):
        if number == 10:
            before = footprint()
        group = dist.new_group(list(range(size)))
        tensor = torch.ones(10_000)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        assert tensor[0] == size * size
        work = dist.isend(tensor, (rank + 1) % size, group=group)
        dist.recv(tensor, (rank - 1) % size, group=group)
        work.wait()
        dist.destroy_process_group(group)
    dist.barrier()
    after = footprint()
    growth = {name: after[name] - before[name] for name in before}
    allowed = {"descriptors": 6, "threads": 1, "MiB of address space": 200, "MiB resident": 10, "mappings": 12}
    assert all(growth[name] <= allowed[name] for name in growth), growth
    dist.destroy_process_group()


def test_groups_leak_nothing() -> None:
    run_ranks(many_groups, 2, 60)


@pytest.mark.slow
def test_a_thousand_groups_leak_nothing() -> None:
    run_ranks(many_groups, 2, 1000, timeout_s=200)


def again_and_again(folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for round_ in range(3):
        method = f"file://{folder}/{round_}"
        dist.init_process_group("symm", method, timedelta(seconds=30), rank=rank, world_size=size)
        tensor = torch.full((3,), float(round_))
        dist.all_reduce(tensor)
        assert tensor[0] == round_ * dist.get_world_size()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_destroyed_and_made_again(tmp_path: Path) -> None:
    run_ranks(again_and_again, 2, str(tmp_path))


def destroyed_early() -> str:
    """Rank 0 destroys its group while the others count on it; nobody hangs, whoever waits for it hears of it."""
    dist.init_process_group("symm")
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(3), group=group)
    heard = ""
    if dist.get_rank() == 0:
        started = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - started < 2
    else:
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except PeerAbortedError as error:
            heard = str(error)
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    return heard


def test_destroying_waits_for_nobody() -> None:
    results = run_ranks(destroyed_early, 3)
    assert any("rank 0 has closed" in result.value for result in results)
    assert all(result.value for result in results[1:])


def destroyed_with_work_left() -> None:
    """Destroying lets queued collectives end, and gives up receives that nobody serves."""
    dist.init_process_group("symm")
    group = dist.new_group([0, 1])
    tensors = [torch.ones(100_000) for _ in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    never = dist.irecv(torch.zeros(3), 1 - dist.get_rank(), group=group)
    dist.destroy_process_group(group)
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all((tensor == 2).all() for tensor in tensors)
    assert never.is_completed()
    with pytest.raises(RuntimeError, match="destroyed"):
        never.wait()
    dist.barrier()
    dist.destroy_process_group()


def test_destroyed_with_work_left() -> None:
    run_ranks(destroyed_with_work_left, 2)


def exit_without_destroying() -> None:
    dist.init_process_group("symm")
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.irecv(torch.zeros(3), 1 - dist.get_rank())


def test_exit_without_destroying() -> None:
    run_ranks(exit_without_destroying, 2, timeout_s=30)


def abort() -> None:
    dist.init_process_group("symm")
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        time.sleep(0.2)
        group.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
    dist.barrier()
    dist.destroy_process_group()


def test_abort() -> None:
    run_ranks(abort, 2)


def call_on_a_destroyed_group() -> None:
    dist.init_process_group("symm")
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    for later in (False, True):
        with pytest.raises((RuntimeError, ValueError)):
            group.allreduce([torch.ones(3)]) if later else dist.all_reduce(torch.ones(3), group=group)
    for call in (group.send, group.recv):
        with pytest.raises(ClosedError):
            call([torch.ones(3)], 1 - dist.get_rank(), 0).wait()
    dist.barrier()
    dist.destroy_process_group()


def test_a_destroyed_group_refuses_calls() -> None:
    run_ranks(call_on_a_destroyed_group, 2, timeout_s=40)


def lose_a_peer_in_backward() -> str:
    """In an iteration after the first ones, where the reducer's futures are all that meets the error."""
    dist.init_process_group("symm")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 3)).sum().backward()
    return str(error.value)


def test_backward_raises_what_became_of_a_peer() -> None:
    alive, _ = run_ranks(lose_a_peer_in_backward, 2, timeout_s=40, check=False)
    assert alive.ok, alive.report()
    assert "rank 1" in alive.value


def forked(used: bool) -> None:
    """A child must not write into the queues that it shares with the parent and its peers."""
    dist.init_process_group("symm")
    rank, tensor = dist.get_rank(), torch.ones(3)
    if used:
        dist.isend(tensor, 1 - rank)
        dist.recv(tensor, 1 - rank)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (dist.send, dist.recv, dist.isend, dist.irecv):
            try:
                (call(torch.full((3,), 99.0), 1 - rank) or dist.Work()).wait()
            except ClosedError as error:
                refused += "belongs to the parent" in str(error)
        for call in (dist.all_reduce, partial(dist.all_reduce, async_op=True), partial(dist.broadcast, src=0)):
            try:
                (call(torch.full((3,), 99.0)) or dist.Work()).wait()
            except ClosedError as error:
                refused += "belongs to the parent" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    dist.isend(tensor.fill_(rank), 1 - rank)
    dist.recv(tensor, 1 - rank)
    assert tensor.tolist() == [1 - rank] * 3
    dist.all_reduce(tensor)
    dist.destroy_process_group()


@pytest.mark.parametrize("used", [False, True])
def test_a_forked_child_is_refused(used: bool) -> None:
    run_ranks(forked, 2, used, timeout_s=40)


def on_one_store() -> None:
    """As under torchrun, whose store outlives the worlds that are made on it, and their groups of the same names."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    gc.disable()
    for number in range(4):
        dist.init_process_group("symm", store=store, rank=rank, world_size=size)
        for group in (dist.group.WORLD, dist.new_group([0, 1])):
            tensor = torch.full((3,), float(number))
            dist.all_reduce(tensor, group=group)
            parts = [None] * size
            dist.all_gather_object(parts, (number, rank), group=group)
            assert parts == [(number, peer) for peer in range(size)]
            sparse = torch.ones(3).to_sparse()
            dist.all_reduce(sparse, group=group)  # by gloo, which finds its peers by the store too
            assert sparse.to_dense()[0] == size
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        assert group() is None, "its sockets are open until garbage is collected"


def test_worlds_on_one_store() -> None:
    run_ranks(on_one_store, 2, timeout_s=60)
