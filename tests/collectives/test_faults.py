"""Ranks that die, are late, raise, are interrupted, fork or use threads: the others get a typed error, and soon."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import symmcomm
from symmcomm import Communicator, PeerAbortedError, PeerDiedError, PeerError, PeerTimeoutError, SymmCommError
from symmcomm.testing.faults import abstract_sockets, agreed_time, shared_mappings, signal_self_at
from symmcomm.testing.spawn import run_ranks

STAGED = {"SYMMCOMM_STAGING_BYTES": "1", "SYMMCOMM_SINGLE_COPY": "0"}  # the least slots: many chunks, cheaply
DIRECT = {"SYMMCOMM_SINGLE_COPY": "1"}  # large ordinary tensors are read out of their processes
SOON_S = 2.0


# Calls that a rank makes, each on its own: nothing returns before all ranks take part.


_symmetric: dict[int, torch.Tensor] = {}


def symmetric(comm: Communicator) -> torch.Tensor:
    """A symmetric tensor of 1 MiB, made by ``prepare``."""
    return _symmetric[comm.ctx]


def prepare(comm: Communicator) -> Communicator:
    _symmetric[comm.ctx] = comm.empty(1 << 18).fill_(1)
    return comm


def pass_round(comm: Communicator, count: int) -> None:
    """Each rank in turn gets the message and passes it on."""
    message, rank, world_size = torch.ones(count), comm.rank, comm.world_size
    if rank == 0:
        comm.send(message, 1)
        comm.recv(message, world_size - 1)
    else:
        comm.recv(message, rank - 1)
        comm.send(message, (rank + 1) % world_size)


def uneven(comm: Communicator) -> None:
    sizes = [100 * (comm.rank + peer) for peer in range(comm.world_size)]
    comm.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes)


def root_lists(comm: Communicator) -> list[torch.Tensor] | None:
    return [torch.ones(5000) for _ in range(comm.world_size)] if comm.rank == 1 else None


CALLS: dict[str, Callable[[Communicator], None]] = {
    "barrier": lambda comm: comm.barrier(),
    "ring barrier": lambda comm: comm.barrier(algorithm="ring"),
    "swap barrier": lambda comm: comm.barrier(protocol="cas"),
    "swap ring barrier": lambda comm: comm.barrier(algorithm="ring", protocol="cas"),
    "small all_reduce": lambda comm: comm.all_reduce(torch.ones(100)),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(4 << 20)),
    "symmetric all_reduce": lambda comm: comm.all_reduce(symmetric(comm)),
    "reduce": lambda comm: comm.reduce(torch.ones(100_000), 1),
    "reduce_scatter": lambda comm: comm.reduce_scatter_tensor(torch.ones(50_000), torch.ones(50_000 * comm.world_size)),
    "all_gather": lambda comm: comm.all_gather_into_tensor(torch.ones(50_000 * comm.world_size), torch.ones(50_000)),
    "all_to_all": lambda comm: comm.all_to_all_single(*torch.ones(2, 60_000)),
    "uneven all_to_all": uneven,
    "broadcast": lambda comm: comm.broadcast(torch.ones(100_000), 1),
    "gather": lambda comm: comm.gather(torch.ones(5000), root_lists(comm), 1),
    "scatter": lambda comm: comm.scatter(torch.ones(5000), root_lists(comm), 1),
    "small messages": lambda comm: pass_round(comm, 100),
    "large messages": lambda comm: pass_round(comm, 1 << 20),
    "empty": lambda comm: comm.free(comm.empty(1000)),
    "split": lambda comm: comm.split(0).close(),  # type: ignore[union-attr]
}


READS: dict[str, Callable[[Communicator], None]] = {
    "large all_reduce": CALLS["large all_reduce"],
    "reduce_scatter": lambda comm: comm.reduce_scatter_tensor(torch.ones(1 << 20), torch.ones(comm.world_size << 20)),
    "all_gather": lambda comm: comm.all_gather_into_tensor(torch.ones(comm.world_size << 20), torch.ones(1 << 20)),
    "all_to_all": lambda comm: comm.all_to_all_single(*torch.ones(2, comm.world_size << 20)),
}


def attempt(call: Callable[[], None]) -> SymmCommError | None:
    """The error with which a call ends, if any."""
    try:
        call()
    except SymmCommError as error:
        return error
    return None


# Death.


def die_in(call: str, victim: int, reads: bool) -> tuple[BaseException | None, float, float]:
    """Repeats a call until the victim has been killed in it; (error, seconds until then, seconds until the next)."""
    comm, function = prepare(symmcomm.init()), (READS if reads else CALLS)[call]
    moment = agreed_time(comm, 0.2)
    if comm.rank == victim:
        signal_self_at(moment)
    error: SymmCommError | None = None
    while error is None:
        error = attempt(lambda: function(comm))
    first = time.monotonic() - moment
    with pytest.raises(type(error)):
        function(comm)
    comm.close()
    return error, first, time.monotonic() - moment - first


def check_deaths(world_size: int, call: str, victim: int, env: dict[str, str]) -> None:
    results = run_ranks(die_in, world_size, call, victim, env is DIRECT, env=env, check=False)
    assert results[victim].exitcode == -signal.SIGKILL
    for result in results:
        if result.rank == victim:
            continue
        assert result.error is None, result.report()
        error, first, following = result.value
        assert isinstance(error, PeerDiedError), f"{call}: {error!r}"
        assert (error.rank, error.pid) == (victim, results[victim].pid)
        assert f"rank {victim} (pid {error.pid})" in str(error)
        assert first < SOON_S, f"rank {result.rank} noticed after {first:.2f} s"
        assert following < 0.5


@pytest.mark.parametrize(("call", "victim"), list(zip(CALLS, itertools.cycle([0, 1, 2]))))
def test_death_in_the_middle_of_a_call(call: str, victim: int) -> None:
    check_deaths(3, call, victim, STAGED)


@pytest.mark.parametrize(("call", "victim"), list(zip(READS, [1, 2, 0, 1], strict=True)))
def test_death_while_others_read_its_memory(call: str, victim: int) -> None:
    check_deaths(3, call, victim, DIRECT)


@pytest.mark.parametrize("victim", range(4))
def test_death_in_a_ring_of_four(victim: int) -> None:
    check_deaths(4, "ring barrier", victim, {})


def test_death_of_one_of_two_with_a_core_each() -> None:
    check_deaths(2, "large all_reduce", 1, {})


def die_elsewhere(spin: int) -> tuple[BaseException, float]:
    """Rank 1 is killed while it computes; the others wait for it already."""
    comm = symmcomm.init()
    moment = agreed_time(comm, 0.3)
    if comm.rank == 1:
        signal_self_at(moment)
        time.sleep(60)
    assert comm.tuning.spins == spin
    with pytest.raises(PeerDiedError) as caught:
        comm.all_reduce(torch.ones(10))
    return caught.value, time.monotonic() - moment


@pytest.mark.parametrize("spin", [0, 300_000])
def test_death_while_others_sleep_or_spin(spin: int) -> None:
    results = run_ranks(die_elsewhere, 3, spin, env={"SYMMCOMM_SPIN": str(spin)}, check=False)
    for rank in (0, 2):
        error, seconds = results[rank].value
        assert error.pid == results[1].pid
        assert 0 <= seconds < SOON_S


def end_without_close(code: int) -> None:
    comm = symmcomm.init()
    if comm.rank == 0:
        os._exit(code)
    comm.barrier()


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_ends_without_close(code: int) -> None:
    results = run_ranks(end_without_close, 2, code, check=False)
    assert isinstance(results[1].error, PeerDiedError)
    assert results[1].error.pid == results[0].pid


def kill_all(folder: str) -> None:
    comm = symmcomm.init()
    comm.all_reduce(comm.empty(1000).fill_(1))
    name = comm.heap.exchange.listener.getsockname().decode().removeprefix("\0")
    assert name in abstract_sockets()
    assert set(shared_mappings()) == {"/memfd:symmcomm (deleted)"}
    Path(folder, str(comm.rank)).write_text(name)
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_after_all_are_killed(tmp_path: Path) -> None:
    results = run_ranks(kill_all, 3, str(tmp_path), check=False)
    assert [result.exitcode for result in results] == [-signal.SIGKILL] * 3, results[0].report()
    names = {path.read_text() for path in tmp_path.iterdir()}
    assert len(names) == 3
    assert not names & abstract_sockets()
    assert not [entry for entry in os.listdir("/dev/shm") if "symmcomm" in entry]


# Lateness. A communicator that failed stays failed: each case gets one of its own by split().


def late_in_calls(absent: int, names: list[str]) -> None:
    with symmcomm.init() as comm:
        for name, call in ((name, CALLS[name]) for name in names):
            child = comm.split(0)
            assert child is not None
            prepare(child)
            comm.barrier()
            if comm.rank != absent:
                expect_late(child, name, call, absent)
            comm.barrier(timeout_s=30)
            error = attempt(child.close)  # waits for nobody after a failure; the late rank hears of it only now
            assert error is None or comm.rank == absent


def expect_late(comm: Communicator, name: str, call: Callable[[Communicator], None], absent: int) -> None:
    started, error = time.monotonic(), None
    while error is None:  # a small message is sent before anybody takes it
        error = attempt(lambda: call(comm))
    waited = time.monotonic() - started
    assert isinstance(error, PeerTimeoutError), f"{name}: {error!r}"
    assert error.rank == absent, f"{name}: {error}"
    assert f"rank {absent} did not arrive within 0.7 s (SYMMCOMM_TIMEOUT_S)" in str(error), name
    assert 0.65 < waited < 0.7 + SOON_S, f"{name}: {waited:.2f} s"
    with pytest.raises(PeerTimeoutError, match=f"rank {absent} did not arrive"):
        comm.barrier()
    assert time.monotonic() - started - waited < 0.2, name


@pytest.mark.parametrize(("world_size", "absent", "names"), [
    (3, 2, list(CALLS)), (4, 0, ["ring barrier", "swap ring barrier", "large all_reduce", "gather"]),
])  # fmt: skip
def test_late_rank_is_named(world_size: int, absent: int, names: list[str]) -> None:
    run_ranks(late_in_calls, world_size, absent, names, env={**STAGED, "SYMMCOMM_TIMEOUT_S": "0.7"})


def timeout_of_one_barrier() -> None:
    with symmcomm.init() as comm:
        child = comm.split(0)
        assert child is not None
        comm.barrier()
        if comm.rank == 0:
            started = time.monotonic()
            with pytest.raises(PeerTimeoutError, match=r"rank 1 did not arrive within 0.2 s"):
                child.barrier(timeout_s=0.2)
            assert time.monotonic() - started < 1
        comm.barrier()
        if comm.rank == 1:
            attempt(child.barrier)  # rank 0 did arrive at this one
            assert isinstance(attempt(child.barrier), PeerError)
        comm.barrier()
        child.close()  # failed on both: waits for nobody


def test_timeout_of_one_barrier() -> None:
    run_ranks(timeout_of_one_barrier, 2)


def late_after_having_waited() -> None:
    """Rank 2 was seen waiting for rank 1 a moment ago; now it is late itself."""
    with symmcomm.init() as comm:
        child = comm.split(0)
        assert child is not None
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.15)
        child.barrier()
        if comm.rank != 2:
            with pytest.raises(PeerTimeoutError) as caught:
                child.barrier(timeout_s=0.2 if comm.rank == 0 else 5)
            assert caught.value.rank == 2, str(caught.value)
        comm.barrier()
        attempt(child.close)


def test_late_rank_that_was_waiting_before() -> None:
    run_ranks(late_after_having_waited, 3)


def stopped_rank(folder: str) -> None:
    comm = symmcomm.init()
    Path(folder, str(comm.rank)).write_text(str(os.getpid()))
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(2):  # rank 0 did arrive at the first
            attempt(lambda: comm.all_reduce(torch.ones(5)))
        assert isinstance(attempt(comm.barrier), PeerError)
        return
    with pytest.raises(PeerTimeoutError) as caught:
        comm.all_reduce(torch.ones(5))
    assert caught.value.rank == 1
    os.kill(int(Path(folder, "1").read_text()), signal.SIGCONT)


def test_stopped_process_is_late(tmp_path: Path) -> None:
    run_ranks(stopped_rank, 2, str(tmp_path), env={"SYMMCOMM_TIMEOUT_S": "0.5"})


# Exceptions and signals.


def raise_in_block(call: str) -> None:
    with symmcomm.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            raise LookupError("no such layer")
        CALLS[call](prepare(comm) if call == "symmetric all_reduce" else comm)


@pytest.mark.parametrize("call", ["ring barrier", "small all_reduce", "large messages"])
def test_exception_in_a_with_block_reaches_the_others(call: str) -> None:
    started = time.monotonic()
    results = run_ranks(raise_in_block, 3, call, check=False)
    assert isinstance(results[1].error, LookupError)
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, PeerAbortedError), results[rank].report()
        assert error.rank in (1, 0, 2)
        assert "LookupError: no such layer" in str(error) or "gave up" in str(error)
    assert any("LookupError: no such layer" in str(results[rank].error) for rank in (0, 2))
    assert [result.exitcode for result in results] == [1, 1, 1]
    assert time.monotonic() - started < 30


def interrupt_one(call: str) -> str:
    comm = prepare(symmcomm.init())
    moment = agreed_time(comm, 0.2)
    if comm.rank == 0:
        signal_self_at(moment, signal.SIGINT)
    if comm.rank == 2:  # so that the others wait, for sure
        time.sleep(0.5)
    try:
        while True:
            CALLS[call](comm)
    except KeyboardInterrupt:
        assert time.monotonic() - moment < SOON_S
        comm.close()
        return "interrupted"
    except PeerAbortedError as error:
        assert time.monotonic() - moment < SOON_S
        comm.close()
        return str(error)


@pytest.mark.parametrize(
    "call", ["barrier", "ring barrier", "swap barrier", "large all_reduce", "small messages"]
)
def test_interrupt_of_one_waiting_rank(call: str) -> None:
    values = [result.value for result in run_ranks(interrupt_one, 3, call, env=STAGED)]
    assert values[0] == "interrupted"
    assert all("KeyboardInterrupt" in value or "gave up" in value for value in values[1:]), values
    assert any("rank 0 gave up: KeyboardInterrupt" in value for value in values[1:]), values


def interrupt_all() -> None:
    with symmcomm.init() as comm:
        moment = agreed_time(comm, 0.2)
        signal_self_at(moment, signal.SIGINT)
        if comm.rank == 1:
            time.sleep(60)
        comm.barrier()


def test_interrupt_of_all_ranks() -> None:
    started = time.monotonic()
    results = run_ranks(interrupt_all, 3, check=False)
    assert isinstance(results[1].error, KeyboardInterrupt)
    assert all(isinstance(result.error, KeyboardInterrupt | PeerAbortedError) for result in results)
    assert [result.exitcode for result in results] == [1, 1, 1]
    assert time.monotonic() - started < 30
