"""One rank of a team: carries out commands, and passes them on where it is rank 0.

Rank 0 reads commands from stdin, one JSON object a line, and answers each with a line on stdout: a JSON list with the
answer of every rank. Anything else that a rank prints goes to stderr. Between two commands the other ranks sit in the
bootstrap's gather, which sleeps: a team that is not measured leaves the cores alone. An error ends the process at
once, without MPI's finalisation, which would wait for ranks that are stuck; who started the team then ends the rest.

``{"do": "describe"}``                                       versions, and what the bootstrap found
``{"do": "prepare", "implementation": name, "case": {…}}``   allocates, checks one result; or says why it cannot
``{"do": "time", "implementation": name, "iterations": n}``  seconds a call
``{"do": "stop"}``
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from symmcomm import Communicator, init
from symmcomm.bench import oracle
from symmcomm.bench.case import Case, Collective
from symmcomm.bench.implementations import (
    OWN,
    RING,
    Buffers,
    Call,
    Gloo,
    Implementation,
    Symm,
    SymmRing,
    mpi_implementation,
)
from symmcomm.bootstrap import Bootstrap, connect
from symmcomm.env import Settings

_IDLE_S = 24 * 3600.0
_LATE_S = 0.01

Command = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class _Bound:
    """An implementation's call on its buffers, which must outlive it."""

    implementation: Implementation
    call: Call
    buffers: Buffers


class Rank:
    """Carries out commands on this rank."""

    def __init__(self, names: list[str], relay: Bootstrap) -> None:
        torch.set_num_threads(1)
        self._relay = relay
        self._comm: Communicator | None = init() if set(names) & set(OWN) else None
        self._implementations = {name: self._make(name) for name in names}
        self._case: Case | None = None
        self._ordinary: Buffers | None = None
        self._symmetric: list[torch.Tensor] = []
        self._bound: dict[str, _Bound] = {}

    def _make(self, name: str) -> Implementation:
        if name in (*OWN, RING):
            assert self._comm is not None
            return SymmRing(self._comm) if name == RING else Symm(self._comm)
        if name == "gloo":
            _join_gloo(self._relay)
            return Gloo()
        return mpi_implementation()

    def carry_out(self, command: Command) -> Answer:
        """The answer of this rank. All ranks are given the same command at about the same time."""
        match command["do"]:
            case "describe":
                return self._describe()
            case "prepare":
                return self._prepare(command["implementation"], Case.from_json(command["case"]))
            case "time":
                return {"seconds": self._time(self._bound[command["implementation"]], command["iterations"])}
            case _:
                return {}

    def close(self) -> None:
        """Lets go of everything; collective."""
        self._release()
        if self._comm is not None:
            self._comm.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _describe(self) -> Answer:
        """Who this rank is, whether a first all-reduce gave the right sum, and how the ranks found each other."""
        answer: Answer = {"pid": os.getpid(), "torch": torch.__version__, "relay": self._relay.name}
        if self._comm is not None:
            ranks = torch.full((1000,), float(self._relay.rank))
            self._comm.all_reduce(ranks)
            total = sum(range(self._relay.world_size))
            answer |= {"bootstrap": self._comm.bootstrap_name, "right": bool((ranks == total).all())}
        return answer

    def _prepare(self, name: str, case: Case) -> Answer:
        implementation = self._implementations[name]
        if refusal := implementation.refusal(case):
            return {"refusal": refusal}
        if case != self._case:
            self._release()
            self._case = case
        buffers = self._buffers(name, case)
        bound = _Bound(implementation, implementation.call(case, buffers), buffers)
        self._bound[name] = bound
        return self._check_barrier(bound) if case.collective is Collective.barrier else self._check(bound, case)

    def _buffers(self, name: str, case: Case) -> Buffers:
        if name != "symm_heap":
            self._ordinary = self._ordinary or Buffers.allocate(
                case, self._relay.rank, lambda numel, dtype: torch.zeros(numel, dtype=dtype)
            )
            return self._ordinary

        def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
            assert self._comm is not None
            self._symmetric.append(self._comm.empty(case.numel, dtype=dtype))  # the same size on every rank
            return self._symmetric[-1][:numel]

        return Buffers.allocate(case, self._relay.rank, empty)

    def _release(self) -> None:
        self._bound.clear()
        self._ordinary, self._case = None, None
        while self._symmetric:
            assert self._comm is not None
            self._comm.free(self._symmetric.pop())
        gc.collect()

    def _check(self, bound: _Bound, case: Case) -> Answer:
        """One call, compared with the oracle; then the buffers hold zeros, which every reduction keeps."""
        rank, buffers = self._relay.rank, bound.buffers
        oracle.poison(buffers.output)
        oracle.fill(buffers.input, case, rank)
        bound.implementation.barrier()
        bound.call()
        wrong = oracle.num_wrong(buffers.output, oracle.expected(case, rank))
        buffers.input.zero_()
        buffers.output.zero_()
        return {"wrong": wrong}

    def _check_barrier(self, bound: _Bound) -> Answer:
        """When this rank came and left, by the host's clock; the last rank comes late."""
        bound.call()
        if self._relay.rank == self._relay.world_size - 1:
            time.sleep(_LATE_S)
        entered = time.monotonic()
        bound.call()
        return {"entered": entered, "left": time.monotonic()}

    def _time(self, bound: _Bound, iterations: int) -> float:
        """Seconds a call, the mean of a round."""
        call = bound.call
        gc.disable()
        bound.implementation.barrier()
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        seconds = (time.perf_counter() - start) / iterations
        gc.enable()
        return seconds


class Ranks:
    """The ranks of one team, seen from inside: rank 0 asks, the others follow."""

    name = "own"

    def __init__(self, names: list[str]) -> None:
        self.timeout_s = Settings.from_env().timeout_s
        _prepare_mpi()
        self._relay = connect(None, self.timeout_s)
        self.rank, self.world_size = self._relay.rank, self._relay.world_size
        self.implementations = names
        self._self = Rank(names, self._relay)

    def ask(self, command: Command) -> list[Answer]:
        """On rank 0: every rank carries out the command; their answers."""
        self._relay.all_gather(json.dumps(command).encode(), self.timeout_s)
        answer = json.dumps(self._self.carry_out(command)).encode()
        return [json.loads(other) for other in self._relay.all_gather(answer, self.timeout_s)]

    def follow(self) -> None:
        """On the other ranks: carries out what rank 0 asks, until it says stop."""
        command: Command = {"do": "start"}
        while command["do"] != "stop":
            command = json.loads(self._relay.all_gather(b"", _IDLE_S)[0])
            self._relay.all_gather(json.dumps(self._self.carry_out(command)).encode(), self.timeout_s)
        self._self.close()

    def close(self) -> None:
        """On rank 0: tells the others to stop, and stops."""
        self.ask({"do": "stop"})
        self._self.close()
        self._relay.close()

    def kill(self) -> None:
        """Does nothing: this process ends with an error, and the launcher ends the others (``end_now``)."""


def end_now() -> NoReturn:
    """Leaves with exit code 1 and without the clean-up of libraries, which might wait for ranks that are stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _join_gloo(relay: Bootstrap) -> None:
    """The default process group, over a store of its own that rank 0 serves."""
    timeout = timedelta(seconds=Settings.from_env().timeout_s)
    rank, world_size = relay.rank, relay.world_size
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout) if rank == 0 else None
    port = int(relay.all_gather(str(store.port if store else 0).encode(), timeout.total_seconds())[0])
    store = store or TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _prepare_mpi() -> None:
    """One thread calls MPI: at this level it takes no locks. Must be said before MPI is initialised."""
    if importlib.util.find_spec("mpi4py") is not None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"


def _end_with(pid: int) -> None:
    """Ends this process when the coordinator's has ended, however that came about."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    os._exit(1)


def _serve(ranks: Ranks, answers: TextIO) -> None:
    """Rank 0 of a team that a coordinator started."""
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        print(json.dumps(ranks.ask(command)), file=answers, flush=True)
    ranks.close()


def main() -> None:
    """``python -m symmcomm.bench.rank --coordinator PID IMPLEMENTATION…``, started by ``bench.team``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", type=int, required=True)
    parser.add_argument("implementations", nargs="+")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with, args=(arguments.coordinator,), daemon=True).start()
    try:
        ranks = Ranks(arguments.implementations)
        _serve(ranks, answers) if ranks.rank == 0 else ranks.follow()
    except BaseException:  # Ctrl-C too: nobody is left waiting
        traceback.print_exc()
        end_now()


if __name__ == "__main__":
    main()
