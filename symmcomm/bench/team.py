"""Teams: the ranks that one launcher started, seen from the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import Protocol

from symmcomm.bench.method import ON_CPUS, Method
from symmcomm.bench.mpi_installations import MPIInstallation
from symmcomm.bench.rank import Command
from symmcomm.bench.timer import Answer
from symmcomm.errors import SymmCommError
from symmcomm.testing.launch import descendants
from symmcomm.testing.spawn import free_port

_LOOK_S = 0.1
_GRACE_S = 2.0
_STDERR_LINES = 15


class TeamError(SymmCommError, RuntimeError):
    """A rank failed or did not answer in time."""


class Team(Protocol):
    """Ranks that carry out commands together; see ``bench.rank`` for the commands."""

    @property
    def name(self) -> str: ...
    @property
    def implementations(self) -> list[str]: ...

    def ask(self, command: Command) -> list[Answer]:
        """Every rank carries out the command; their answers, by rank."""
        ...

    def close(self) -> None:
        """Ends the ranks in good order."""
        ...

    def kill(self) -> None:
        """Ends the ranks after an error."""
        ...


class SpawnedTeam:
    """Rank processes of our own.

    Args:
        world_size: processes to start.
        mpi: its launcher starts the ranks; ``None`` starts plain processes.
        timeout_s: the longest that one command may take.
    """

    def __init__(
        self, name: str, implementations: list[str], world_size: int, mpi: MPIInstallation | None, timeout_s: float,
        method: Method = ON_CPUS,
    ) -> None:  # fmt: skip
        self.name, self.implementations, self._timeout_s = name, implementations, timeout_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  as long as the team
        self._processes: list[subprocess.Popen[bytes]] = []
        self._partial = b""
        program = [sys.executable, "-m", "symmcomm.bench.rank", "--coordinator", str(os.getpid())]
        program += ["--method", method.to_json(), *implementations]
        try:
            if mpi is not None:
                variables = ["-u", "RANK", "-u", "WORLD_SIZE", "OMP_NUM_THREADS=1"]
                self._start(["env", *variables, *mpi.command(world_size), *program])
            else:
                port = free_port()
                for rank in range(world_size):
                    variables = [
                        f"RANK={rank}", f"WORLD_SIZE={world_size}", f"LOCAL_RANK={rank}", "OMP_NUM_THREADS=1",
                        "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}",
                    ]
                    self._start(["env", *variables, *program])
        except BaseException:
            self.kill()
            raise

    def _start(self, command: list[str]) -> None:
        first = not self._processes
        self._processes.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE if first else subprocess.DEVNULL, stderr=self._stderr,
                stdout=subprocess.PIPE if first else self._stderr, start_new_session=True,
            )
        )

    def ask(self, command: Command) -> list[Answer]:
        """See Team. Raises TeamError if a rank ends or the time is over."""
        stdin = self._processes[0].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._error("its rank 0 has gone") from None
        deadline = time.monotonic() + self._timeout_s + _GRACE_S  # the ranks' own deadlines name the culprit
        while (answers := _parsed(line := self._read_line(command, deadline))) is None:
            self._stderr.write(line + b"\n")  # a launcher's last words, which MPICH says on stdout
            self._stderr.flush()
        return answers

    def _read_line(self, command: Command, deadline: float) -> bytes:
        """The next line that rank 0 or its launcher prints."""
        stdout = self._processes[0].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._partial:
                if selector.select(_LOOK_S):
                    read = os.read(stdout.fileno(), 1 << 16)
                    if not read:
                        raise self._error("its rank 0 has ended")
                    self._partial += read
                    continue
                for rank, process in enumerate(self._processes):
                    if process.poll() is not None:
                        raise self._error(f"rank {rank} ended with exit code {process.returncode}")
                if time.monotonic() > deadline:
                    raise self._error(f"no answer to {json.dumps(command)} within {self._timeout_s:g} s")
        line, self._partial = self._partial.split(b"\n", 1)
        return line

    def _error(self, what: str) -> TeamError:
        """Ends all ranks; the error holds the end of what they printed."""
        self.kill()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]
        return TeamError("\n".join([f"team {self.name} ({', '.join(self.implementations)}): {what}", *lines]))

    def close(self) -> None:
        """See Team. Ranks that do not end by themselves are killed."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            stdin = self._processes[0].stdin
            assert stdin is not None
            stdin.write(b'{"do": "stop"}\n')
            stdin.close()
            deadline = time.monotonic() + 5 * _GRACE_S
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all ranks: a launcher gets the chance to do it, since its ranks may lie in sessions of their own."""
        running = [process for process in self._processes if process.poll() is None]
        tree = [pid for process in running for pid in (process.pid, *descendants(process.pid))]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _parsed(line: bytes) -> list[Answer] | None:
    try:
        answers: list[Answer] = json.loads(line)
        return answers
    except ValueError:
        return None
