"""One rank of a team: carries out commands, and passes them on where it is rank 0.

Rank 0 reads commands from stdin, one JSON object a line, and answers each with a line on stdout: a JSON list with the
answer of every rank. Anything else that a rank prints goes to stderr. Between two commands the other ranks sit in the
bootstrap's gather, which sleeps: a team that is not measured leaves the cores alone. An error ends the process at
once, without MPI's finalisation, which would wait for ranks that are stuck; who started the team then ends the rest.

``{"do": "describe"}``                                       versions, and what the bootstrap found
``{"do": "prepare", "implementation": name, "case": {…}}``   allocates, checks one result; or says why it cannot
``{"do": "time", "implementation": name, "iterations": n}``  seconds a call
``{"do": "limits"}``                                         what the floor is made of (``bench.floor``)
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TextIO

import torch

from symmcomm.bench import oracle
from symmcomm.bench.case import Case, Collective
from symmcomm.bench.implementations import OWN, Buffers, Call, Implementation
from symmcomm.bench.method import Method
from symmcomm.bench.place import make_place
from symmcomm.bench.timer import Answer, Timer
from symmcomm.bootstrap import Bootstrap, connect
from symmcomm.env import Settings
from symmcomm.errors import SymmCommError, in_words

_IDLE_S = 24 * 3600.0
_LATE_S = 0.01
_MESSAGE = 300  # characters of a peer's error

Command = dict[str, Any]


@dataclass(frozen=True)
class _Bound:
    """An implementation's calls, one of each rank of this process, with the buffers that must outlive them."""

    implementations: Sequence[Implementation]
    calls: Sequence[Call]
    buffers: Sequence[Buffers]
    timer: Timer


class Rank:
    """Carries out commands on this process's rank, or on its ranks if they are virtual."""

    def __init__(self, names: list[str], relay: Bootstrap, method: Method) -> None:
        self._relay = relay
        self._place = make_place(names, relay, method)
        self._case: Case | None = None
        self._ordinary: dict[int, Buffers] = {}
        self._bound: dict[str, _Bound] = {}
        gc.collect()
        gc.freeze()  # what is there by now stays: a collection after each case need not look at it

    def carry_out(self, command: Command) -> Answer:
        """The answer of this rank. All ranks are given the same command at about the same time."""
        match command["do"]:
            case "describe":
                return {"pid": os.getpid(), "torch": torch.__version__, "relay": self._relay.name} | (
                    self._place.describe()
                )
            case "limits":
                return self._place.limits()
            case "prepare":
                return self._prepare(command["implementation"], Case.from_json(command["case"]))
            case "time":
                return self._time(self._bound[command["implementation"]], command["iterations"])
            case _:
                return {}

    def close(self) -> None:
        """Lets go of everything; collective."""
        self._release()
        for name in self._place.implementations[0]:
            for implementations in self._place.implementations:
                implementations[name].close()
        self._place.close()

    def _prepare(self, name: str, case: Case) -> Answer:
        implementations = [of_rank[name] for of_rank in self._place.implementations]
        if refusal := implementations[0].refusal(case):
            return {"refusal": refusal}
        if case != self._case:
            self._release()
            self._case = case
        try:
            return self._checked(name, implementations, case)
        except (RuntimeError, TypeError, AttributeError) as error:
            if name in OWN or isinstance(error, (SymmCommError, getattr(torch, "AcceleratorError", SymmCommError))):
                raise  # with the GPU's context gone, no later figure would mean anything
            self._bound.pop(name, None)
            return {"refusal": in_words(error)[:_MESSAGE]}

    def _checked(self, name: str, implementations: Sequence[Implementation], case: Case) -> Answer:
        """Allocates, and checks one result."""
        buffers = [
            implementation.buffers(case, partial(self._ordinary_buffers, case, rank))
            for rank, implementation in zip(self._place.ranks, implementations, strict=True)
        ]
        calls = [
            implementation.call(case, of_rank) for implementation, of_rank in zip(implementations, buffers, strict=True)
        ]
        self._bound[name] = bound = _Bound(implementations, calls, buffers, self._place.timer(calls))
        return self._check_barrier(bound) if case.collective is Collective.barrier else self._check(bound, case)

    def _ordinary_buffers(self, case: Case, rank: int) -> Buffers:
        """Tensors that the implementations share."""
        if rank not in self._ordinary:
            self._ordinary[rank] = Buffers.allocate(case, rank, self._place.zeros)
        return self._ordinary[rank]

    def _release(self) -> None:
        self._bound.clear()
        self._ordinary.clear()
        self._case = None
        for name in self._place.implementations[0]:
            for implementations in self._place.implementations:
                implementations[name].release()
        gc.collect()

    def _check(self, bound: _Bound, case: Case) -> Answer:
        """One call, compared with the oracle; then the buffers hold zeros, which every reduction keeps."""
        for rank, buffers in zip(self._place.ranks, bound.buffers, strict=True):
            oracle.poison(buffers.output)
            oracle.fill(buffers.input, case, rank)
        self._place.run([_nothing] * len(bound.calls))
        bound.implementations[0].barrier()
        self._place.run(bound.calls)
        wrong = 0
        for rank, buffers in zip(self._place.ranks, bound.buffers, strict=True):
            wrong += oracle.num_wrong(buffers.output, oracle.expected(case, rank))
            buffers.input.zero_()
            buffers.output.zero_()
        return {"wrong": wrong}

    def _check_barrier(self, bound: _Bound) -> Answer:
        """When this rank came and left, by the host's clock; the last rank comes late."""
        self._place.run(bound.calls)
        if self._relay.rank == self._relay.world_size - 1:
            time.sleep(_LATE_S)
        entered = time.monotonic()
        self._place.run(bound.calls)
        return {"entered": entered, "left": time.monotonic()}

    def _time(self, bound: _Bound, iterations: int) -> Answer:
        gc.disable()
        bound.implementations[0].barrier()
        answer = bound.timer.time(iterations)
        gc.enable()
        return answer


def _nothing() -> None:
    """In place of a call: only what was enqueued before is waited for."""


class Ranks:
    """The ranks of one team, seen from inside: rank 0 asks, the others follow."""

    name = "own"

    def __init__(self, names: list[str], method: Method) -> None:
        self.timeout_s = Settings.from_env().timeout_s
        _prepare_mpi()
        self._relay = connect(None, self.timeout_s)
        self.rank, self.world_size = self._relay.rank, self._relay.world_size
        self.implementations = names
        self._self = Rank(names, self._relay, method)

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
    """``python -m symmcomm.bench.rank --coordinator PID --method JSON IMPLEMENTATION…``, started by ``bench.team``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", type=int, required=True)
    parser.add_argument("--method", type=Method.from_json, required=True)
    parser.add_argument("implementations", nargs="+")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with, args=(arguments.coordinator,), daemon=True).start()
    try:
        ranks = Ranks(arguments.implementations, arguments.method)
        _serve(ranks, answers) if ranks.rank == 0 else ranks.follow()
    except BaseException:  # Ctrl-C too: nobody is left waiting
        traceback.print_exc()
        end_now()


if __name__ == "__main__":
    main()
