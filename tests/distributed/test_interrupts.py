"""Exceptions of signal handlers, Ctrl-C above all: each comes out of a call, and nothing waits for ever after it."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import symmcomm
from symmcomm import ClosedError, Communicator, ConcurrentCallError, PeerAbortedError
from symmcomm.testing.faults import agreed_time, signal_self_at
from symmcomm.testing.spawn import run_ranks

SOON_S = 0.5  # until the signal: time enough for its rank to be in the call


class StopError(Exception):
    """Of a handler of the user's."""


def group() -> Communicator:
    dist.init_process_group("symm", timeout=timedelta(seconds=20))
    return dist.group.WORLD.comm


CALLS: dict[str, Callable[[Communicator], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "swap barrier": lambda comm: comm.barrier(protocol="cas"),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(4)),
    "message": lambda comm: comm.recv(torch.ones(4), 1) if comm.rank == 0 else comm.send(torch.ones(4), 0),
    "all_reduce of the group": lambda comm: dist.all_reduce(torch.ones(4)),
    "message of the group": lambda comm: (
        dist.recv(torch.ones(4), 1) if dist.get_rank() == 0 else dist.send(torch.ones(4), 0)
    ),
}


def started(call: str) -> Communicator:
    """After a first call, which compiles."""
    comm = group() if "group" in call else symmcomm.init()
    CALLS[call](comm)
    return comm


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def raise_while_the_peer_comes(call: str) -> None:
    """The handler of rank 0 starts while it waits; then rank 1 comes; then the handler raises."""
    comm = started(call)
    moment = agreed_time(comm, SOON_S)
    if comm.rank == 1:
        sleep_until(moment + 0.3)
        with contextlib.suppress(PeerAbortedError):
            CALLS[call](comm)
        return

    def handler(*_: object) -> None:
        time.sleep(0.6)
        raise StopError

    signal.signal(signal.SIGUSR1, handler)
    signal_self_at(moment, signal.SIGUSR1)
    with pytest.raises(StopError):
        CALLS[call](comm)


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_is_raised_though_the_peer_has_come(call: str) -> None:
    run_ranks(raise_while_the_peer_comes, 2, call)


class Large:
    """What a step of a program holds."""


def later_calls(call: str) -> None:
    """After Ctrl-C in a call, the next ones say so, and nothing holds what the steps that failed had."""
    comm = started(call)
    moment = agreed_time(comm, SOON_S)
    if comm.rank == 1:
        sleep_until(moment + 0.5)
        return
    signal_self_at(moment, signal.SIGINT)
    seen: list[weakref.ref[Large]] = []

    def step() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        CALLS[call](comm)

    with pytest.raises(KeyboardInterrupt):
        step()
    depths = set()
    for _ in range(3):
        with pytest.raises(ClosedError, match="a call was ended by KeyboardInterrupt") as caught:
            step()
        depths.add(len(caught.traceback))
    assert len(depths) == 1
    del caught
    gc.collect()
    assert [large() for large in seen] == [None] * 4


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce of the group"])
def test_later_calls(call: str) -> None:
    run_ranks(later_calls, 2, call)


def call_of_a_handler(async_op: bool) -> None:
    """A handler that communicates in the middle of a call is refused; it must not wait for its own thread."""
    moment = agreed_time(started("all_reduce of the group"), SOON_S)
    if dist.get_rank() == 1:
        sleep_until(moment + 0.5)
        with contextlib.suppress(PeerAbortedError):
            dist.barrier()
        return

    def handler(*_: object) -> None:
        work = dist.all_reduce(torch.ones(3), async_op=async_op)
        if work is not None:
            work.wait()

    signal.signal(signal.SIGUSR1, handler)
    signal_self_at(moment, signal.SIGUSR1)
    with pytest.raises(ConcurrentCallError, match="below this signal handler"):
        dist.barrier()


@pytest.mark.parametrize("async_op", [False, True])
def test_call_of_a_handler(async_op: bool) -> None:
    run_ranks(call_of_a_handler, 2, async_op)


def receive_of_a_handler(source: int | None, handlers_source: int | None) -> None:
    """In the middle of a receive: refused if its thread serves the queue; else another one does, and serves both."""
    moment = agreed_time(started("message of the group"), SOON_S)
    if dist.get_rank() == 1:
        sleep_until(moment + 0.2)
        for value in (5.0, 6.0):
            dist.isend(torch.full((4,), value), 0)
        time.sleep(0.5)
        return
    got: list[float] = []

    def receive(source: int | None) -> None:
        message = torch.zeros(4)
        dist.recv(message, source)
        got.append(message[0].item())

    signal.signal(signal.SIGUSR1, lambda *_: receive(handlers_source))
    signal_self_at(moment, signal.SIGUSR1)
    with contextlib.suppress(ConcurrentCallError):
        receive(source)
        assert sorted(got) == [5, 6]


@pytest.mark.parametrize(("source", "handlers_source"), [(1, 1), (1, None), (None, 1), (None, None)])
def test_receive_of_a_handler(source: int | None, handlers_source: int | None) -> None:
    run_ranks(receive_of_a_handler, 2, source, handlers_source)


def destroyed_by_a_handler(call: str, exits: bool) -> None:
    """As a job that is told to end does it: the call that the handler interrupts ends as well."""
    moment = agreed_time(started(call), SOON_S)
    if dist.get_rank() == 1:
        sleep_until(moment + 0.5)
        with contextlib.suppress(PeerAbortedError):
            CALLS[call](dist.group.WORLD.comm)
        return

    def handler(*_: object) -> None:
        dist.destroy_process_group()
        if exits:
            raise SystemExit(3)

    signal.signal(signal.SIGUSR1, handler)
    signal_self_at(moment, signal.SIGUSR1)
    with pytest.raises((SystemExit, ClosedError) if exits else ClosedError):
        CALLS[call](dist.group.WORLD.comm)
    assert not dist.is_initialized()


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize("call", ["all_reduce of the group", "message of the group"])
def test_destroyed_by_a_handler(call: str, exits: bool) -> None:
    run_ranks(destroyed_by_a_handler, 2, call, exits)


def lane_left_taken() -> None:
    """As Ctrl-C leaves it, when it comes just after a call has taken the lane."""
    group()
    rank, lane = dist.get_rank(), dist.group.WORLD._lane
    tensor, message = torch.ones(3), torch.ones(3)
    dist.isend(message, 1 - rank).wait()
    dist.recv(message, 1 - rank)
    inbox = dist.group.WORLD._mailbox.inbox(1 - rank)
    for _ in range(3):
        assert lane.busy.acquire(False)
        assert inbox.busy.acquire(False)
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.get_future().wait()  # the lane's own thread did it
        assert lane.busy.acquire(False)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.barrier()
        dist.send(message, 1 - rank)
        received = dist.irecv(message, 1 - rank)
        received.get_future().wait()
    assert tensor[0] == 2**9
    queued = dist.all_reduce(tensor, async_op=True)
    assert lane.busy.acquire(True)
    dist.destroy_process_group()
    assert queued.is_completed()


def test_lane_left_taken() -> None:
    run_ranks(lane_left_taken, 2)
