"""Ranks that disagree about a call: all of them get MismatchError, which names the argument and both values, no data
are touched, and the communicator goes on working."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import symmcomm
from symmcomm import Communicator, MismatchError, SymmCommError
from symmcomm.testing.spawn import run_ranks

W = 3
ODD = 1  # the rank that does something else


class Case(NamedTuple):
    """What the ranks call, what rank ODD calls instead, and words of the error (on every rank, in any order)."""

    call: Callable[[Communicator], object]
    instead: Callable[[Communicator], object]
    words: tuple[str, ...]


def ones(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype)


def parts(comm: Communicator, root: int, count: int) -> list[Tensor] | None:
    return [ones(count) for _ in range(comm.world_size)] if comm.rank == root else None


def exchange(comm: Communicator, lie: int = 0) -> None:
    """Uneven: rank s sends s + t rows to rank t; rank ODD may expect ``lie`` rows more of rank 2."""
    sends = [comm.rank + peer for peer in range(W)]
    takes = list(sends)
    takes[2] += lie
    comm.all_to_all_single(torch.zeros(sum(takes), 5), torch.ones(sum(sends), 5), takes, sends)


CASES: dict[str, Case] = {
    "count": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(11)),
                  ("all_reduce", "count is ", "10 elements", "11 elements")),
    "one-shot and two-shot": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(1_000_000)),
                                  ("10 elements", "1000000 elements")),
    "none and some": Case(lambda c: c.all_reduce(ones(0)), lambda c: c.all_reduce(ones(1)),
                          ("0 elements", "1 elements")),
    "dtype": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(10, torch.int32)),
                  ("dtype is ", "torch.float32", "torch.int32")),
    "dtype and count": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(20, torch.bfloat16)),
                            ("torch.float32", "torch.bfloat16", "10 elements", "20 elements")),
    "op": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.all_reduce(ones(10), "max"), ("op is ", "sum", "max")),
    "call": Case(lambda c: c.all_reduce(ones(10)), lambda c: c.broadcast(ones(10), 0),
                 ("call is ", "all_reduce", "broadcast")),
    "barrier and all_reduce": Case(lambda c: c.barrier(), lambda c: c.all_reduce(ones(10)),
                                   ("call is ", "barrier", "all_reduce")),
    "root of reduce": Case(lambda c: c.reduce(ones(10), 0), lambda c: c.reduce(ones(10), 2),
                           ("dst is ", "0 on", "2 on")),
    "reduce and all_reduce": Case(lambda c: c.reduce(ones(10), 0), lambda c: c.all_reduce(ones(10)),
                                  ("reduce", "all_reduce")),
    "count of reduce": Case(lambda c: c.reduce(ones(100_000), 0), lambda c: c.reduce(ones(10), 0),
                            ("100000 elements", "10 elements")),
    "count of reduce_scatter": Case(
        lambda c: c.reduce_scatter_tensor(ones(4), ones(4 * W)),
        lambda c: c.reduce_scatter_tensor(ones(5), ones(5 * W)),
        ("reduce_scatter_tensor", "4 elements of output", "5 elements of output")),
    "op of reduce_scatter": Case(
        lambda c: c.reduce_scatter_tensor(ones(4), ones(4 * W), "min"),
        lambda c: c.reduce_scatter_tensor(ones(4), ones(4 * W), "avg"), ("op is ", "min", "avg")),
    "count of all_gather": Case(
        lambda c: c.all_gather_into_tensor(ones(4 * W), ones(4)),
        lambda c: c.all_gather_into_tensor(ones(5 * W), ones(5)),
        ("all_gather_into_tensor", "16 bytes", "20 bytes")),
    "dtype of all_gather": Case(
        lambda c: c.all_gather_into_tensor(ones(4 * W), ones(4)),
        lambda c: c.all_gather_into_tensor(ones(4 * W, torch.int32), ones(4, torch.int32)),
        ("torch.float32", "torch.int32")),
    "root of broadcast": Case(lambda c: c.broadcast(ones(9), 0), lambda c: c.broadcast(ones(9), 1),
                              ("src is ", "0 on", "1 on")),
    "count of broadcast": Case(lambda c: c.broadcast(ones(9), 1), lambda c: c.broadcast(ones(100_000), 1),
                               ("36 bytes", "400000 bytes")),
    "root of gather": Case(lambda c: c.gather(ones(3), parts(c, 0, 3), 0),
                           lambda c: c.gather(ones(3), parts(c, 1, 3), 1),
                           ("gather", "dst is ", "0 on", "1 on")),
    "root of scatter": Case(lambda c: c.scatter(ones(3), parts(c, 0, 3), 0),
                            lambda c: c.scatter(ones(3), parts(c, 1, 3), 1), ("scatter", "src is ", "0 on", "1 on")),
    "count of scatter": Case(lambda c: c.scatter(ones(3), parts(c, 0, 3), 0), lambda c: c.scatter(ones(7), None, 0),
                             ("12 bytes", "28 bytes")),
    "count of all_to_all": Case(lambda c: c.all_to_all_single(ones(2 * W), ones(2 * W)),
                                lambda c: c.all_to_all_single(ones(8000 * W), ones(8000 * W)),
                                ("8 bytes", "32000 bytes")),
    "even and uneven": Case(lambda c: exchange(c), lambda c: c.all_to_all_single(ones(2 * W), ones(2 * W)),
                            ("split sizes", "8 bytes")),
    "split sizes": Case(lambda c: exchange(c), lambda c: exchange(c, 4),
                        ("split sizes: rank 1 expects 140 bytes from rank 2, which sends 60",)),
    "scatter and all_to_all": Case(lambda c: c.scatter(ones(3), parts(c, 0, 3), 0), lambda c: exchange(c),
                                   ("call is ", "scatter", "all_to_all_single")),
    "size of a symmetric tensor": Case(lambda c: c.empty(10), lambda c: c.empty(12),
                                       ("empty(10, dtype=torch.float32)", "empty(12, dtype=torch.float32)")),
    "dtype of a symmetric tensor": Case(lambda c: c.empty(10), lambda c: c.empty(10, dtype=torch.int32),
                                        ("empty(10, dtype=torch.float32)", "empty(10, dtype=torch.int32)")),
    "symmetric tensor too large on one": Case(lambda c: c.empty(10), lambda c: c.empty(1 << 50),
                                              ("empty(10, dtype", f"empty({1 << 50}, dtype")),
    "split and barrier": Case(lambda c: c.split(0), lambda c: c.barrier(), ("all_gather_bytes", "barrier")),
}  # fmt: skip


def provoke(comm: Communicator, name: str, case: Case) -> str:
    """What is wrong with the error of a case, if anything."""
    started = time.monotonic()
    try:
        (case.instead if comm.rank == ODD else case.call)(comm)
    except MismatchError as error:
        message = str(error)
        missing = [words for words in case.words if words not in message]
        ranks = {int(rank) for rank in re.findall(r"rank (\d)", message)}
        took = time.monotonic() - started
        fine = not missing and ODD in ranks and len(ranks) > 1 and took < 2
        return "" if fine else f"{name}: {message} (without {missing}, after {took:.1f} s)"
    except SymmCommError as error:
        return f"{name}: {error!r}"
    return f"{name}: no error"


def disagree() -> None:
    wrong = []
    with symmcomm.init() as comm:
        for name, case in CASES.items():
            wrong.append(provoke(comm, name, case))
            for count in (10, 100_000):
                total = ones(count)
                comm.all_reduce(total)
                assert total.eq(W).all(), f"all_reduce after {name}"
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_mismatch_in_every_call() -> None:
    run_ranks(disagree, W)


def keep_tensors() -> None:
    """A refused call leaves tensors as they are, symmetric ones too."""
    with symmcomm.init() as comm:
        for tensor in (torch.full((5000 + comm.rank,), 7.0), comm.empty(6000).fill_(7)[: 5000 + comm.rank]):
            for call in (lambda t: comm.all_reduce(t), lambda t: comm.reduce(t, 0), lambda t: comm.broadcast(t, 1)):
                with pytest.raises(MismatchError):
                    call(tensor)
                assert tensor.eq(7).all()


def test_mismatch_changes_no_data() -> None:
    run_ranks(keep_tensors, 2)


def free_different_tensors() -> None:
    with symmcomm.init() as comm:
        a, b = comm.empty(1000).fill_(1), comm.empty(1000).fill_(2)
        with pytest.raises(MismatchError, match=r"rank \d asks for free\(offset \d+\), rank \d for free\(offset \d+\)"):
            comm.free(a if comm.rank else b)
        with pytest.raises(MismatchError, match=r"at heap offset \d+ on rank \d, at \d+ on rank \d"):
            comm.rendezvous(a if comm.rank else b)
        comm.all_reduce(a)
        comm.all_reduce(b)
        assert a.eq(2).all()
        assert b.eq(4).all()
        comm.free(a)
        comm.free(b)
        assert comm.is_symmetric(comm.empty(2000))


def test_different_symmetric_tensors() -> None:
    run_ranks(free_different_tensors, 2)


def send_until_refused(comm: Communicator, count: int, words: str) -> None:
    """Messages beyond the queue are refused in their own send, others in the next one."""
    small = count < 100_000
    if small:
        comm.send(ones(count), 1)
    else:
        with pytest.raises(MismatchError, match=words):
            comm.send(ones(count), 1)
    comm.all_gather_bytes(b"the receiver has refused the message")
    if small:
        with pytest.raises(MismatchError, match=words):
            comm.send(ones(3) * 2, 1)
    else:
        comm.send(ones(3) * 2, 1)


def mismatched_messages(count: int) -> None:
    """The receiver learns at once, the sender in this or its next send; what is sent next arrives."""
    cases = (
        (ones(count + 1), f"disagree in send: count is {4 * count} bytes on rank 0, {4 * count + 4} bytes on rank 1"),
        (ones(count, torch.int32), "disagree in send: dtype is torch.float32 on rank 0, torch.int32 on rank 1"),
    )
    with symmcomm.init() as comm:
        for wrong, words in cases:
            if comm.rank == 0:
                send_until_refused(comm, count, words)
                continue
            with pytest.raises(MismatchError, match=words):
                comm.recv(wrong, 0)
            assert wrong.eq(1).all()
            comm.all_gather_bytes(b"the receiver has refused the message")
            comm.recv(message := torch.zeros(3), 0)
            assert message.tolist() == [2.0] * 3
        message = torch.full((count,), float(comm.rank))  # afterwards the other direction works as well
        if comm.rank == 1:
            comm.send(message, 0)
        else:
            comm.recv(message, 1)
        assert message.eq(1).all()


@pytest.mark.parametrize("count", [10, 2_000_000])  # within the queue, and beyond it
def test_mismatched_messages(count: int) -> None:
    run_ranks(mismatched_messages, 2, count)


def close_while_others_go_on() -> float:
    """Rank 0 closes, rank 1 calls: both are told; nobody waits for the rank that has closed."""
    comm = symmcomm.init()
    with pytest.raises(MismatchError, match=r"call is (barrier|all_reduce) on rank \d, (barrier|all_reduce) on rank"):
        comm.close() if comm.rank == 0 else comm.all_reduce(ones(10))
    started = time.monotonic()
    if comm.rank == 1:
        with pytest.raises(symmcomm.PeerAbortedError, match=r"rank 0 .*closed"):
            comm.all_reduce(ones(10))
        comm.close()
    else:
        time.sleep(0.5)
    return time.monotonic() - started


def test_close_while_others_go_on() -> None:
    assert run_ranks(close_while_others_go_on, 2, env={"SYMMCOMM_TIMEOUT_S": "10"})[1].value < 2
