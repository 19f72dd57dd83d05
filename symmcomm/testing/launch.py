"""Run a command on this host, with a hard limit in time, after which nothing that it started is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from symmcomm.testing.spawn import merged

_TERMINATE_PATIENCE_S = 2.0


def launch_command(
    argv: Sequence[str | os.PathLike[str]], timeout_s: float, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command (``torchrun``, ``mpirun``, ``symmcomm`` …) in its own process group and returns its text output.

    Args:
        timeout_s: seconds after which the command and all its descendants are killed.
        env: added to this process's environment; ``None`` as a value removes a variable.

    Raises:
        subprocess.TimeoutExpired: with the output up to then.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def text(file: Any) -> str:
            file.seek(0)
            return str(file.read())

        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=merged(env or {}), start_new_session=True
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            _kill_tree(process)
            raise subprocess.TimeoutExpired(error.cmd, timeout_s, text(out), text(err)) from None
        finally:
            _kill_tree(process)
        return subprocess.CompletedProcess(argv, returncode, text(out), text(err))


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a command's process group and its descendants (torchrun and mpirun give ranks groups of their own).

    A launcher gets the chance to end its ranks itself; descendants are looked up before their parents are gone.
    """
    tree = [process.pid, *descendants(process.pid)] if process.poll() is None else []
    if tree:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_PATIENCE_S)
    for pid in tree[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """Of a process, as far as they can be seen."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))
