"""Compilations of different processes come one after the other, but none waits for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from symmcomm.kernels import compile as module
from symmcomm.kernels.compile import compile_once
from symmcomm.kernels.lock import alone
from symmcomm.testing.spawn import run_ranks

STEPS = 20


def count_up(path: str) -> None:
    """What two at a time would get wrong."""
    for _ in range(STEPS):
        with alone(Path(path).with_suffix(".lock"), 60.0):
            count = int(Path(path).read_text())
            time.sleep(0.001)
            Path(path).write_text(str(count + 1))


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    run_ranks(count_up, 3, str(path))
    assert path.read_text() == str(3 * STEPS)


def test_a_stopped_process_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    monkeypatch.setattr(module, "_lock_path", lambda: path)
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with alone(path, 1.0):
        assert compile_once(lambda: "compiled") == "compiled"
        with pytest.raises(Timeout):
            FileLock(path, timeout=0.0).acquire()  # it is still the other's


def test_a_folder_without_locks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "lock", 1.0):
        pass


def test_errors_pass_through_and_leave_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone(tmp_path / "lock", 1.0):
        raise ZeroDivisionError
    FileLock(tmp_path / "lock", timeout=0.0).acquire()
