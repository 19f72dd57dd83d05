"""Calls that go wrong: every rank that takes part gets an error that says what, and who."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from calls import barrier_within

from symmcomm import (
    MismatchError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    WaitTimeoutError,
)
from symmcomm.testing.spawn import run_ranks

Two = tuple[Callable[[], object], Callable[[], object], str]

MISMATCHES: dict[str, Two] = {
    "count": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(4)),
        "count is 3 elements on rank 0, 4 elements on rank 1",
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3).int()),
        "dtype is torch.float32 on rank 0, torch.int32 on rank 1",
    ),
    "op": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX),
        "op is sum on rank 0, max on rank 1",
    ),
    "call": (
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.barrier(),
        "call is broadcast on rank 0, barrier on rank 1",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.broadcast(torch.ones(3), 1),
        "src is 0 on rank 0, 1 on rank 1",
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(2), [1, 2], [1, 1]),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
        "split sizes",
    ),
}


def mismatch(name: str, async_op: bool) -> str:
    dist.init_process_group("symm")
    call = MISMATCHES[name][dist.get_rank()]
    with pytest.raises(MismatchError) as caught:
        call()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=async_op)  # the group goes on
    if work is not None:
        work.wait()
    assert tensor[0] == 2
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_names_both(name: str) -> None:
    ours, theirs = (result.value for result in run_ranks(mismatch, 2, name, False))
    words = MISMATCHES[name][2]
    assert words in ours
    left, _, right = words.partition(" on rank 0, ")
    assert words in theirs or (right and right.split(" on ")[0] in theirs and left.split(" is ")[1] in theirs)


def mismatch_async() -> None:
    dist.init_process_group("symm")
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    future = work.get_future()
    with pytest.raises(MismatchError, match="count is"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), MismatchError)
    with pytest.raises(RuntimeError, match="count is"):
        future.wait()
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_mismatch_of_asynchronous_calls() -> None:
    run_ranks(mismatch_async, 2)


def bad_arguments() -> None:
    dist.init_process_group("symm")
    size = dist.get_world_size()
    for call, error, words in (
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR), TypeError, "op=bxor is not defined for dtype"),
        (lambda: dist.all_gather([torch.ones(3)], torch.ones(3)), ValueError, "tensor_list must have 2 tensors"),
        (
            lambda: dist.all_gather([torch.ones(3)] * size, torch.ones(4)),
            ValueError,
            r"tensor_list\[0\] has 3 elements",
        ),
        (lambda: dist.all_gather([torch.ones(3), torch.ones(2)], torch.ones(7)), ValueError, "tensor_list must have 2"),
        (lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3)]), ValueError, "input_list must have 2 tensors"),
        (lambda: dist.all_to_all([torch.ones(3)], [torch.ones(3)]), ValueError, "output_list has 1 tensors"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), ValueError, "does not divide"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(3)), ValueError, "output has 3 elements"),
        (lambda: dist.group.WORLD.allreduce([torch.ones(1)] * 2), ValueError, "tensors must have 1 entry, got 2"),
    ):
        with pytest.raises(error, match=words):
            call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # nothing was communicated
    assert tensor[0] == size
    dist.destroy_process_group()


def test_bad_arguments() -> None:
    run_ranks(bad_arguments, 2)


def time_out() -> None:
    """The group's timeout ends a wait, and names the rank that did not come."""
    dist.init_process_group("symm", timeout=timedelta(seconds=1))
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(PeerTimeoutError, match="rank 1 did not arrive within 1 s") as caught:
            dist.all_reduce(torch.ones(3))
        assert caught.value.rank == 1
        assert 0.9 < time.monotonic() - started < 2.4
        with pytest.raises(PeerError):  # and stays finished
            dist.barrier()


def test_time_out() -> None:
    run_ranks(time_out, 2)


def later_time_out() -> None:
    """As training frameworks shorten it after the first step."""
    dist.init_process_group("symm")
    dist.barrier()
    group = dist.new_group([0, 1])
    dist.isend(torch.ones(3), 1 - dist.get_rank(), group=group)
    dist.recv(torch.ones(3), 1 - dist.get_rank(), group=group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeoutError, match="rank 1 did not arrive within 1 s"):
            dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(WaitTimeoutError):
            dist.recv(torch.ones(3), 1, group=group)
        assert 1.9 < time.monotonic() - started < 4
    dist.barrier()  # of the other group, whose deadline is as it was
    dist.destroy_process_group()


def test_later_time_out() -> None:
    run_ranks(later_time_out, 2)


def barrier_time_out() -> None:
    dist.init_process_group("symm")
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeoutError, match=r"rank 1 did not arrive within 0\.5 s"):
            barrier_within(dist.group.WORLD, 0.5)
    else:
        time.sleep(1)


def test_barrier_has_its_own_timeout() -> None:
    run_ranks(barrier_time_out, 2)


def wait_time_out() -> None:
    """A wait with a time limit ends, the call goes on."""
    dist.init_process_group("symm")
    if dist.get_rank() == 1:
        time.sleep(1)
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 0:
        with pytest.raises(WaitTimeoutError, match=r"timed out: not over after 0\.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
    work.wait(timedelta(seconds=20))
    assert tensor[0] == 2
    dist.destroy_process_group()


def test_wait_with_time_limit() -> None:
    run_ranks(wait_time_out, 2)


DEADLY: dict[str, Callable[[], object]] = {
    "collective": lambda: dist.all_reduce(torch.ones(3)),
    "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.ones(3), 1),
    "irecv": lambda: dist.irecv(torch.ones(3), 1).wait(timedelta(seconds=20)),
    "any": lambda: dist.recv(torch.ones(3)),
    "send": lambda: dist.send(torch.ones(3_000_000), 1),
}


def death(kind: str) -> None:
    dist.init_process_group("symm")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerDiedError, match=r"rank 1 \(pid \d+\) is gone"):
        DEADLY[kind]()
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("kind", DEADLY)
def test_death_is_noticed(kind: str) -> None:
    results = run_ranks(death, 2, kind, check=False)
    assert results[0].ok, results[0].report()


def monitored(wait_all_ranks: bool) -> str:
    dist.init_process_group("symm")
    dist.monitored_barrier()
    if dist.get_rank() > 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
    dist.barrier()
    dist.monitored_barrier()  # the one that failed disturbs none after it
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_names_the_missing(wait_all_ranks: bool) -> None:
    results = run_ranks(monitored, 4, wait_all_ranks)
    names = "Ranks 2, 3" if wait_all_ranks else "Rank 2"
    assert results[0].value == f"[Rank 0]: {names} failed to pass monitoredBarrier in 1000 ms"
    assert "Rank 1 successfully reached monitoredBarrier" in results[1].value
