"""Messages: independent of each other, of collectives, and of the order of calls."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from symmcomm import MismatchError, WaitTimeoutError
from symmcomm.testing.spawn import run_ranks

LARGE = 3_000_001  # elements of float32: many times what the queue holds


def independent() -> None:
    dist.init_process_group("symm")
    rank = dist.get_rank()
    peer = 1 - rank

    # Both send first.
    sent, received = torch.full((LARGE,), float(rank)), torch.zeros(LARGE)
    work = dist.isend(sent, peer)
    dist.recv(received, peer)
    work.wait()
    assert (received == peer).all()

    # A receive that waits keeps neither collectives nor other messages from going on.
    late, early, tensor = torch.zeros(3), torch.zeros(LARGE), torch.ones(10)
    posted = dist.irecv(late, peer, tag=1)
    dist.all_reduce(tensor)
    assert tensor[0] == 2
    other = dist.irecv(early, peer, tag=2)
    work = dist.isend(sent, peer, tag=2)
    other.wait()
    work.wait()
    assert (early == peer).all()
    assert not posted.is_completed()
    dist.barrier()
    dist.send(torch.full((3,), 7.0), peer, tag=1)
    posted.wait()
    assert late.tolist() == [7.0] * 3
    assert posted.source_rank() == peer

    # A collective that waits for a peer that waits for a message.
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(sent, 1)
        work.wait()
    else:
        dist.recv(received, 0)
        dist.all_reduce(tensor)
    assert tensor[0] == 4
    dist.destroy_process_group()


def test_independent() -> None:
    run_ranks(independent, 2)


def tags() -> None:
    dist.init_process_group("symm")
    rank, count = dist.get_rank(), 200
    if rank == 0:
        for tag in reversed(range(count)):
            dist.send(torch.full((tag,), float(tag)), 1, tag=tag)
            dist.send(torch.full((2,), -float(tag)), 1, tag=0x7FFFFFFF)
    else:
        for tag in range(count):
            tensor = torch.zeros(tag)
            dist.recv(tensor, 0, tag=tag)
            assert (tensor == tag).all()
        for tag in reversed(range(count)):  # in order for each tag
            tensor = torch.zeros(2)
            dist.recv(tensor, 0, tag=0x7FFFFFFF)
            assert tensor.tolist() == [-tag, -tag]
    with pytest.raises(ValueError, match=r"tag=-1 is not in 0\.\.2147483647"):
        dist.isend(torch.ones(1), 1 - rank, tag=-1)
    dist.barrier()
    dist.destroy_process_group()


def test_tags() -> None:
    run_ranks(tags, 2)


def from_anywhere() -> None:
    """Receives from any rank beside receives from one, posted before and after the messages come."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        anywhere = [torch.zeros(5) for _ in range(size - 1)]
        posted = [dist.irecv(tensor) for tensor in anywhere]
        named = [torch.zeros(5) for _ in range(size - 1)]
        works = [dist.irecv(tensor, src, tag=3) for src, tensor in enumerate(named, 1)]
        dist.barrier()
        for work in [*works, *posted]:
            work.wait()
        assert sorted(int(tensor[0]) for tensor in anywhere) == list(range(1, size))
        assert [work.source_rank() for work in posted] == [int(tensor[0]) for tensor in anywhere]
        assert [int(tensor[0]) for tensor in named] == [10 * src for src in range(1, size)]
        dist.barrier()
        time.sleep(0.1)
        tensor = torch.zeros(LARGE)
        for _ in range(1, size):
            source = dist.recv(tensor, tag=9)
            assert (tensor == source).all()
    else:
        dist.barrier()
        dist.send(torch.full((5,), float(rank)), 0)
        dist.send(torch.full((5,), 10.0 * rank), 0, tag=3)
        dist.barrier()
        dist.send(torch.full((LARGE,), float(rank)), 0, tag=9)
    dist.barrier()
    dist.destroy_process_group()


def test_from_anywhere() -> None:
    run_ranks(from_anywhere, 4)


def to_oneself() -> None:
    dist.init_process_group("symm")
    rank = dist.get_rank()
    received = torch.zeros(LARGE)
    work = dist.irecv(received, rank)
    dist.isend(torch.full((LARGE,), 5.0), rank).wait()
    work.wait()
    assert (received == 5).all()
    with pytest.raises(ValueError, match="same as the rank"):
        dist.send(received, rank)
    dist.destroy_process_group()


def test_to_oneself() -> None:
    run_ranks(to_oneself, 2)


def heard_at_send(count: int, tag: int) -> str:
    """Sends to rank 1. The message goes out, also where it is now that rank 0 hears of one before."""
    try:
        dist.send(torch.ones(count), 1, tag=tag)
    except MismatchError as error:
        return str(error)
    return ""


def mismatched(aside: bool) -> str:
    """Returns what the rank heard. Afterwards messages go on."""
    dist.init_process_group("symm")
    heard = ""
    if dist.get_rank() == 0:
        heard = heard_at_send(4, 1) + heard_at_send(1, 2)
        dist.barrier()
        heard += heard_at_send(1, 3)
    else:
        if aside:
            dist.recv(torch.zeros(1), 0, tag=2)
        with pytest.raises(MismatchError) as caught:
            dist.recv(torch.zeros(4, dtype=torch.int64), 0, tag=1)
        heard = str(caught.value)
        if not aside:
            dist.recv(torch.zeros(1), 0, tag=2)
        dist.barrier()
        dist.recv(torch.zeros(1), 0, tag=3)
    dist.destroy_process_group()
    return heard


@pytest.mark.parametrize("aside", [False, True])
def test_mismatched(aside: bool) -> None:
    results = run_ranks(mismatched, 2, aside)
    for result in results:
        if result.value or result.rank == 1:
            assert "dtype is torch.float32 on rank 0, torch.int64 on rank 1" in result.value
            assert "count is 16 bytes on rank 0, 32 bytes on rank 1" in result.value


def timeouts() -> None:
    dist.init_process_group("symm", timeout=timedelta(seconds=1))
    rank = dist.get_rank()
    peer = 1 - rank
    tensor = torch.zeros(3)
    for source in (peer, None):
        work = dist.irecv(tensor, source)
        started = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="timed out"):
            work.wait(timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - started < 0.9
        with pytest.raises(WaitTimeoutError, match="timed out"):
            work.wait()
        assert 1 < time.monotonic() - started < 3
        dist.barrier()
        dist.send(torch.full((3,), 2.0), peer)  # the work that timed out gets it
        work.wait()
        assert tensor.tolist() == [2.0] * 3
    dist.barrier()
    with pytest.raises(WaitTimeoutError, match="timed out"):
        dist.send(torch.zeros(LARGE), peer)  # nobody receives
    dist.destroy_process_group()


def test_timeouts() -> None:
    run_ranks(timeouts, 2)
