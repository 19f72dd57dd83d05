"""A communicator's life: split, close, use after close, threads, forks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import symmcomm
from symmcomm import ArgumentError, ClosedError, Communicator, ConcurrentCallError, communicator
from symmcomm.kernels.compile import compile_once
from symmcomm.testing.spawn import run_ranks

# Split.


def ranks_of(comm: Communicator, number: int) -> list[int]:
    """What each rank of a group says, in the order of the group."""
    return [int(answer) for answer in comm.all_gather_bytes(str(number).encode())]


def split_in_many_ways() -> None:
    with symmcomm.init() as comm:
        me, world_size = comm.rank, comm.world_size
        halves = comm.split(me % 2)
        assert halves is not None
        assert ranks_of(halves, me) == list(range(me % 2, world_size, 2))
        assert halves.world_size == len(range(me % 2, world_size, 2))
        backwards = comm.split(0, key=-me)
        assert backwards is not None
        assert backwards.rank == world_size - 1 - me
        assert ranks_of(backwards, me) == list(range(world_size))[::-1]
        edge = comm.split(None if me == 1 else 7)  # overlaps the halves
        assert (edge is None) == (me == 1)
        inner = edge.split(edge.rank // 2) if edge else None  # nested
        alone = comm.split(me)
        assert alone is not None
        assert alone.world_size == 1
        assert comm.split(None) is None
        for group in (halves, backwards, edge, inner, alone, comm):
            if group is not None:
                check_group(group)
        for group in (inner, halves, alone, edge, backwards):
            if group is not None:
                group.close()
        check_group(comm)


def check_group(group: Communicator) -> None:
    """Collectives, symmetric memory and messages of a group are its own."""
    own = group.empty(5000).fill_(group.rank + 1)
    group.all_reduce(own)
    assert own.eq(group.world_size * (group.world_size + 1) / 2).all()
    tensor = torch.tensor([group.rank])
    group.broadcast(tensor, group.world_size - 1)
    assert int(tensor) == group.world_size - 1
    if group.world_size > 1:
        group.send(torch.tensor([group.rank]), (group.rank + 1) % group.world_size)
        group.recv(tensor, (group.rank - 1) % group.world_size)
        assert int(tensor) == (group.rank - 1) % group.world_size
    for algorithm in ("all_to_all", "ring"):
        group.barrier(algorithm=algorithm)
    group.free(own)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_split(world_size: int) -> None:
    run_ranks(split_in_many_ways, world_size)


def outlive_the_parent() -> None:
    comm = symmcomm.init()
    group = comm.split(0, key=-comm.rank)
    assert group is not None
    comm.close()
    check_group(group)
    group.close()


def test_group_outlives_what_it_was_split_from() -> None:
    run_ranks(outlive_the_parent, 3)


def foreign_tensors() -> None:
    """A tensor that is symmetric in one communicator is an ordinary one in another."""
    with symmcomm.init() as comm, comm.split(0, key=-comm.rank) as group:  # type: ignore[union-attr]
        own = comm.empty(10_000).fill_(group.rank + 1)
        assert comm.is_symmetric(own)
        assert not group.is_symmetric(own)
        group.all_reduce(own)
        assert own.eq(3).all()
        with pytest.raises(ArgumentError, match="not symmetric"):
            group.free(own)


def test_symmetric_tensor_of_another_communicator() -> None:
    run_ranks(foreign_tensors, 2)


def many_communicators() -> None:
    """Descriptors and mappings do not pile up."""
    def count(path: str) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) if path == "fd" else len(open("/proc/self/maps").readlines())

    with symmcomm.init() as comm:
        for n in range(30):
            with comm.split(0) as group:  # type: ignore[union-attr]
                group.all_reduce(group.empty(100))
            del group
            if n == 4:
                fds, maps = count("fd"), count("maps")
        assert count("fd") <= fds
        assert count("maps") <= maps + 3


def test_nothing_piles_up() -> None:
    run_ranks(many_communicators, 2)


# Close.

AFTER_CLOSE: dict[str, Callable[[Communicator], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "ring barrier": lambda comm: comm.barrier(algorithm="ring"),
    "swap barrier": lambda comm: comm.barrier(protocol="cas"),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(3)),
    "reduce": lambda comm: comm.reduce(torch.ones(3), 0),
    "reduce_scatter": lambda comm: comm.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * comm.world_size)),
    "all_gather": lambda comm: comm.all_gather_into_tensor(torch.ones(3 * comm.world_size), torch.ones(3)),
    "all_gather_bytes": lambda comm: comm.all_gather_bytes(b"x"),
    "broadcast": lambda comm: comm.broadcast(torch.ones(3), 0),
    "gather": lambda comm: comm.gather(torch.ones(3), [torch.ones(3)] * 2 if comm.rank == 0 else None),
    "scatter": lambda comm: comm.scatter(torch.ones(3), [torch.ones(3)] * 2 if comm.rank == 0 else None),
    "all_to_all": lambda comm: comm.all_to_all_single(torch.ones(4), torch.ones(4)),
    "all_gather of a list": lambda comm: comm.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3)),
    "all_to_all of lists": lambda comm: comm.all_to_all([torch.ones(3)] * 2, [torch.ones(3)] * 2),
    "uneven all_to_all": lambda comm: comm.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [2, 1]),
    "send": lambda comm: comm.send(torch.ones(3), 1 - comm.rank),
    "recv": lambda comm: comm.recv(torch.ones(3), 1 - comm.rank),
    "empty": lambda comm: comm.empty(3),
    "split": lambda comm: comm.split(0),
    "split off": lambda comm: comm.split(None),
}


def error_of(call: Callable[[Communicator], object], comm: Communicator) -> Exception | None:
    """What a call raises."""
    try:
        call(comm)
    except Exception as error:
        return error
    return None


def use_after_close() -> None:
    comm = symmcomm.init()
    mine = comm.empty(1000).fill_(comm.rank + 1)
    handle = comm.rendezvous(mine)
    theirs = handle.get_buffer(1 - comm.rank, (1000,), torch.float32)
    comm.all_reduce(torch.ones(3))
    comm.barrier()
    comm.close()
    calls = AFTER_CLOSE | {
        "free": lambda comm: comm.free(mine),
        "rendezvous": lambda comm: comm.rendezvous(mine),
        "barrier of a handle": lambda comm: handle.barrier(),
        "put_signal": lambda comm: handle.put_signal(1 - comm.rank),
        "wait_signal": lambda comm: handle.wait_signal(1 - comm.rank),
        "get_buffer": lambda comm: handle.get_buffer(0, (1000,), torch.float32),
        "get_signal_pad": lambda comm: handle.get_signal_pad(0),
    }
    not_refused = [name for name, call in calls.items() if not isinstance(error_of(call, comm), ClosedError)]
    assert not not_refused, f"after close(): {not_refused}"
    comm.close()
    assert not comm.is_symmetric(mine)
    assert mine.eq(comm.rank + 1).all()  # what is left of the heap stays readable
    assert theirs.eq(2 - comm.rank).all()
    with symmcomm.init() as again:  # and a process may start anew
        again.all_reduce(mine)
        assert mine.eq(3).all()


def test_use_after_close() -> None:
    run_ranks(use_after_close, 2)


def leave_block_by_return() -> int:
    with symmcomm.init() as comm:
        tensor = comm.empty(3).fill_(1)
        comm.all_reduce(tensor)
        return int(tensor[0])


def test_block_closes() -> None:
    assert [result.value for result in run_ranks(leave_block_by_return, 3)] == [3, 3, 3]


# Threads.


def call_from_two_threads(of_lists: bool) -> None:
    """Rank 0's second thread calls while the first waits: refused at once, and the first call is right."""
    with symmcomm.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.5)
        sent = [[4, 2], [1, 5]]
        taken = [sent[peer][comm.rank] for peer in range(2)]
        output, input = torch.zeros(sum(taken)), torch.arange(6.0) + 10 * comm.rank
        not_refused: list[str] = []
        thread = threading.Thread(target=lambda: not_refused.extend(interfere(comm)))
        if comm.rank == 0:
            thread.start()
        if of_lists:
            comm.all_to_all(list(output.split(taken)), list(input.split(sent[comm.rank])))
        else:
            comm.all_to_all_single(output, input, taken, sent[comm.rank])
        if comm.rank == 0:
            thread.join()
        assert not not_refused, "\n".join(not_refused)
        assert output.tolist() == ([0.0, 1.0, 2.0, 3.0, 10.0] if comm.rank == 0 else [4.0, 5.0, 11, 12, 13, 14, 15])


INTERFERING: dict[str, Callable[[Communicator], object]] = {
    **{name: AFTER_CLOSE[name] for name in AFTER_CLOSE},
    "close": lambda comm: comm.close(),
}


def interfere(comm: Communicator) -> list[str]:
    """Calls that were not refused while another thread is in one."""
    time.sleep(0.1)
    errors = {name: error_of(call, comm) for name, call in INTERFERING.items()}
    return [f"{name}: {error!r}" for name, error in errors.items() if not isinstance(error, ConcurrentCallError)]


@pytest.mark.parametrize("of_lists", [False, True])
def test_two_threads(of_lists: bool) -> None:
    run_ranks(call_from_two_threads, 2, of_lists)


def race_of_threads(num: int) -> None:
    """Two threads a rank, each until it has had its calls: never a wrong result, never a hang."""
    sys.setswitchinterval(1e-4)
    with symmcomm.init() as comm:
        wrong: list[str] = []

        def work() -> None:
            done = 0
            while done < num:
                total = torch.ones(2000)
                try:
                    comm.all_reduce(total)
                except ConcurrentCallError:
                    continue
                done += 1
                if not total.eq(comm.world_size).all():
                    wrong.append(f"{total.unique().tolist()}")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]


def test_race_of_threads() -> None:
    run_ranks(race_of_threads, 2, 500)


def group_a_thread() -> None:
    """As the error advises: each thread its own group."""
    with symmcomm.init() as comm, comm.split(0) as group:  # type: ignore[union-attr]
        results: list[bool] = []

        def work(own: Communicator) -> None:
            for n in range(200):
                total = torch.full((n * 10,), 1.0)
                own.all_reduce(total)
                results.append(bool(total.eq(2).all()))

        threads = [threading.Thread(target=work, args=(own,)) for own in (comm, group)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 400
        assert all(results)


def test_group_a_thread() -> None:
    run_ranks(group_a_thread, 2)


# Fork.


def fork_after_init() -> None:
    with symmcomm.init() as comm:
        tensor = comm.empty(100).fill_(comm.rank + 1)
        comm.barrier()
        child = os.fork()
        if child == 0:
            os._exit(run_child(comm, tensor))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        comm.all_reduce(tensor)
        assert tensor.eq(3).all()


def run_child(comm: Communicator, tensor: torch.Tensor) -> int:
    """The exit code of a forked child: 0 if all calls were refused, and it could start a world of its own."""
    try:
        for name, call in AFTER_CLOSE.items():
            error = error_of(call, comm)
            assert isinstance(error, ClosedError), f"{name}: {error!r}"
            assert "belongs to the parent process: a forked child must call init() anew" in str(error)
        comm.close()
        del comm
        gc.collect()
        os.environ.update(RANK="0", WORLD_SIZE="1")
        with symmcomm.init() as own:
            ours = own.empty(3).fill_(7)
            own.all_reduce(ours)
        return 0 if ours.eq(7).all() and not tensor.isnan().any() else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2


def test_fork_after_init() -> None:
    run_ranks(fork_after_init, 2)


# Compilation.


def compile_longer_than_a_wait_may_take() -> None:
    def slowly(compile_: Callable[[], object]) -> object:
        time.sleep(2.5)
        return compile_once(compile_)

    communicator.compile_once = slowly  # type: ignore[assignment]
    with symmcomm.init() as comm:
        comm.barrier()


def test_compilation_is_no_wait_for_a_peer() -> None:
    run_ranks(compile_longer_than_a_wait_may_take, 2, env={"SYMMCOMM_TIMEOUT_S": "1"})
