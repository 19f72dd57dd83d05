"""Run a function on several ranks, each a process of this host, with a hard limit in time.

Ranks are forked from a server that has torch and Numba loaded already, so a world starts in milliseconds. Whatever
happens, no rank outlives the call, or the pool that it is of: late ranks are killed, and the kernel kills the ranks of
a caller that dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from symmcomm.errors import in_words

_DUMP_SIGNAL = signal.SIGUSR2
_DUMP_PATIENCE_S = 0.5
_GRIEF_S = 20.0  # for the others to end after a rank has failed that should not
_LEAST_PORT, _MOST_PORT = 10_000, 32_768
_MOST_CALLS = 30  # of a pool's ranks: at the port of each a store stays open as long as its process
_CALL, _STACKS = "call.pickle", "stacks.txt"


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        exitcode: 0, the argument of ``sys.exit``, 1 after an exception, or minus the signal that killed the rank.
        value: what the function returned, ``None`` if it did not return.
        error: the exception, or a RuntimeError with its text where it does not pickle; ``None`` if there was none.
        traceback: the exception's traceback, or the Python stacks of a rank that crashed; ``""`` if there is none.
    """

    rank: int
    pid: int
    exitcode: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended well."""
        return self.exitcode == 0 and self.error is None

    def report(self) -> str:
        """One paragraph for an error message."""
        return f"--- rank {self.rank} (pid {self.pid}) ended with exit code {self.exitcode}\n{self.traceback}".rstrip()


class RankFailedError(RuntimeError):
    """At least one rank failed. ``results`` holds all ranks' results."""

    def __init__(self, results: Sequence[RankResult]) -> None:
        super().__init__("\n".join(result.report() for result in results if not result.ok))
        self.results = list(results)


class RanksTimeoutError(TimeoutError):
    """Ranks had not ended in time and were killed. ``ranks`` names them."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
    pool: RankPool | None = None,
) -> list[RankResult]:
    """Calls ``fn(*args)`` in ``world_size`` processes, new ones or a pool's, and returns their results, by rank.

    Each rank sees this process's environment, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, then ``env``
    (``None`` as a value removes a variable), and ``sys.path`` as it was when the rank started. torch is loaded by then:
    variables that a library reads when it is imported come too late, and torch runs one thread.

    Args:
        fn: a function that can be imported by name; its arguments and its value are pickled.
        timeout_s: seconds after which all ranks are killed.
        check: whether a failed rank raises RankFailedError; tests of faults pass ``False``.
        pool: keeps the ranks for its next call if all return.

    Raises:
        RankFailedError: with every failed rank's traceback.
        RanksTimeoutError: with the Python stacks of the ranks that had not ended, and what was wrong with others. If
            ``check``, those have a few seconds more only once another rank has failed.
    """
    _warm_fork_server()
    deadline = time.monotonic() + timeout_s
    call = pickle.dumps((fn, args))
    keep, pool = pool is not None, pool or RankPool()
    well = False
    try:
        ranks = pool.ranks(world_size)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in ranks:
            launch = {"RANK": str(rank.rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank.rank), **address}
            rank.call(call, merged({**launch, **(env or {})}))
        if late := _collect(ranks, deadline, _GRIEF_S if check else timeout_s, keep):
            names, waited_s = [rank.rank for rank in late], timeout_s + time.monotonic() - deadline
            failed = [rank.result().report() for rank in ranks if rank not in late and not rank.result().ok]
            stacks = [f"--- rank {rank.rank} (pid {rank.process.pid})\n{rank.stacks()}" for rank in late]
            first = f"ranks {names} had not ended after {waited_s:.0f} s" + ", others had failed" * bool(failed)
            raise RanksTimeoutError("\n".join([first, *failed, *stacks]), names)
        results = [rank.result() for rank in ranks]
        well = all(result.ok for result in results)
    finally:
        if not (keep and well):
            pool.close()
    if check and not well:
        raise RankFailedError(results)
    return results


class RankPool:
    """Ranks that outlive a call: those of the next need not start, nor load what they have. For functions that leave
    nothing behind; variables that a library reads only once stay those of a rank's first call."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._num_calls = 0
        Finalize(self, _end, (self._ranks,), exitpriority=10)  # before multiprocessing waits for all that still run

    def ranks(self, world_size: int) -> list[_Rank]:
        """The first of them for a call, new where there are too few or one has ended, and now and then."""
        if self._num_calls >= _MOST_CALLS or not all(rank.process.is_alive() for rank in self._ranks):
            self.close()
        self._num_calls += 1
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank(len(self._ranks)))
        return self._ranks[:world_size]

    def close(self) -> None:
        """Ends all ranks, whatever they do."""
        self._num_calls = 0
        _end(self._ranks)


def _end(ranks: list[_Rank]) -> None:
    ended = ranks.copy()
    ranks.clear()  # first: after Ctrl-C nobody must take a busy rank for one that waits
    for rank in ended:
        rank.process.kill()  # all at once: it takes a while
    for rank in ended:
        rank.kill()


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["symmcomm.testing.preload"])
    return context


@cache
def _warm_fork_server() -> None:
    """Waits until the fork server has loaded everything, which takes minutes where kernels must still be compiled: that
    is no time of the ranks'."""
    process = _fork_server().Process(target=int)
    process.start()
    process.join()


def free_port() -> int:
    """A TCP port that was free a moment ago: below those that the kernel gives to connections, which come and go."""
    below = _MOST_PORT
    with contextlib.suppress(OSError, ValueError):
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(_LEAST_PORT, below)
    for port in random.sample(ports, 100) if len(ports) >= 1000 else ():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Rank:
    """The parent's view of one rank: its process, the pipe on which it is asked and answers, and the files of what it
    is asked and of its stacks."""

    def __init__(self, rank: int) -> None:
        context = _fork_server()
        self.rank = rank
        self._folder = Path(tempfile.mkdtemp(prefix=f"symmcomm-rank{rank}-"))
        self._outcome: dict[str, Any] = {}
        self.connection, theirs = context.Pipe()
        self.process = ForkServerProcess(target=_rank_main, args=(theirs, self._folder), name=f"rank{rank}")
        self.process.start()
        theirs.close()

    def call(self, call: bytes, environ: dict[str, str]) -> None:
        """Asks for an outcome. A rank that has ended, or was stopped, is found by who waits for it: hence a file, as a
        pipe does not take more than the rank reads."""
        self._outcome = {}
        (self._folder / _CALL).write_bytes(pickle.dumps((call, environ)))
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"")

    def receive(self, keep: bool) -> bool:
        """Takes the outcome, of which a rank killed while it wrote has none; whether the rank then waits for another
        call, as it does if it is to be kept and has not failed."""
        with contextlib.suppress(EOFError, OSError):
            self._outcome = pickle.loads(self.connection.recv_bytes())
        waits = keep and "value" in self._outcome
        if not waits:
            self.connection.close()
        return waits

    def stacks(self) -> str:
        """Asks a live rank for its Python stacks; a rank that is stopped or crashed says nothing."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, _DUMP_SIGNAL)
        give_up = time.monotonic() + _DUMP_PATIENCE_S
        while not (text := self._crash_report()) and time.monotonic() < give_up:
            time.sleep(0.01)
        return text

    def _crash_report(self) -> str:
        stacks = self._folder / _STACKS
        return stacks.read_text() if stacks.exists() else ""

    def result(self) -> RankResult:
        """The result of a rank that has ended, or waits for another call."""
        exitcode: int | None = 0
        if self.connection.closed:
            self.process.join()
            exitcode = self.process.exitcode
        assert self.process.pid is not None
        assert exitcode is not None
        outcome = {"traceback": self._crash_report(), **self._outcome}
        return RankResult(self.rank, self.process.pid, exitcode, **outcome)

    def kill(self) -> None:
        """Ends the rank and everything it started, if anything is left of them."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _collect(ranks: Sequence[_Rank], deadline: float, grief_s: float, keep: bool) -> list[_Rank]:
    """Waits until all ranks have ended (``keep``: or have returned), taking outcomes as they come; returns the ranks
    that are late. Once one has failed the others have ``grief_s`` left."""
    running = {rank.process.sentinel: rank for rank in ranks}
    while running:
        readable: dict[Connection | int, _Rank] = {
            rank.connection: rank for rank in running.values() if not rank.connection.closed
        }
        ready = wait([*running, *readable], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for source in ready:
            if source in readable:
                if readable[source].receive(keep):
                    del running[readable[source].process.sentinel]
            elif source in running and running[source].connection.closed:
                ended = running.pop(source)
                deadline = min(deadline, math.inf if ended.result().ok else time.monotonic() + grief_s)
    return list(running.values())


def _rank_main(connection: Connection, folder: Path) -> None:
    """The body of a rank's process: calls, until one fails or nobody is left to ask for another."""
    os.setpgid(0, 0)
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell ignores it
    well = True
    with open(folder / _STACKS, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(_DUMP_SIGNAL, stacks)
        while well and _is_asked(connection):
            well = _answer(connection, *pickle.loads((folder / _CALL).read_bytes()))
        faulthandler.unregister(_DUMP_SIGNAL)
        faulthandler.enable()
    connection.close()
    if not well:
        sys.exit(1)


def _is_asked(connection: Connection) -> bool:
    """Waits for a call; false if there will be none."""
    try:
        connection.recv_bytes()
        return True
    except (EOFError, OSError):
        return False


def _answer(connection: Connection, call: bytes, environ: Mapping[str, str]) -> bool:
    """Carries out a call and sends its outcome; whether it returned."""
    os.environ.clear()
    os.environ.update(environ)
    outcome: dict[str, Any]
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        fn, args = pickle.loads(call)
        outcome = {"value": fn(*args)}
        message = pickle.dumps(outcome)
    except SystemExit:
        connection.close()
        raise
    except BaseException as error:  # the caller decides, about Ctrl-C too
        outcome = {"error": _portable(error), "traceback": traceback.format_exc()}
        message = pickle.dumps(outcome)
    connection.send_bytes(message)
    return "value" in outcome


def _die_with_parent() -> None:
    """Has the kernel kill this rank when its caller dies: the caller holds the other end of the sentinel's pipe.

    PR_SET_PDEATHSIG would watch the fork server, which lives as long as any rank.
    """
    caller = multiprocessing.parent_process()
    assert caller is not None
    fcntl.fcntl(caller.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(caller.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(caller.sentinel, fcntl.F_SETFL, fcntl.fcntl(caller.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _portable(error: BaseException) -> BaseException:
    """``error`` if it survives pickling, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # pickling runs the exception's own code
        return RuntimeError(in_words(error))


def merged(env: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment and ``env``, in which ``None`` removes a variable."""
    return {name: value for name, value in {**os.environ, **env}.items() if value is not None}
