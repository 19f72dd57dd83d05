"""run_ranks: what comes back, and that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from symmcomm.testing import spawn
from symmcomm.testing.launch import launch_command
from symmcomm.testing.spawn import RankFailedError, RankPool, RanksTimeoutError, run_ranks


def launch_variables() -> tuple[str, ...]:
    return tuple(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


def variable(name: str) -> str | None:
    return os.environ.get(name)


def echo(value: object) -> object:
    return value


def fail_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise ZeroDivisionError(f"on rank {rank}")


class PickyError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)


def raise_unpicklable() -> None:
    raise PickyError(1, 2)


def return_unpicklable() -> object:
    return lambda: None


def exit_with(code: int) -> None:
    sys.exit(code)


def kill_self(signum: int) -> None:
    os.kill(os.getpid(), signum)


def fail_or_sleep(failing: int) -> None:
    if os.environ["RANK"] == str(failing):
        raise ValueError(f"rank {failing} has lost its way")
    time.sleep(60)


def sleep_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        time.sleep(600)


def start_grandchild() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def write_pid_and_sleep(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def eventually_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_ranks_get_the_launch_variables() -> None:
    results = run_ranks(launch_variables, 3)
    assert [r.value for r in results] == [(str(n), "3", str(n), "127.0.0.1") for n in range(3)]
    assert [r.rank for r in results] == [0, 1, 2]
    assert all(r.ok for r in results)
    assert len({r.pid for r in results}) == 3


def test_env_is_added_and_none_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMMCOMM_TEST", "from the parent")
    assert run_ranks(variable, 1, "SYMMCOMM_TEST")[0].value == "from the parent"
    assert run_ranks(variable, 1, "SYMMCOMM_TEST", env={"SYMMCOMM_TEST": "x"})[0].value == "x"
    assert run_ranks(variable, 1, "RANK", env={"RANK": None})[0].value is None


def test_large_values_and_tensors_pass() -> None:
    torch = pytest.importorskip("torch")
    value = (torch.arange(10), b"x" * (8 << 20))
    back = run_ranks(echo, 2, value)[1].value
    assert torch.equal(back[0], value[0])
    assert back[1] == value[1]


def test_failure_carries_the_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 .*fail_on.*ZeroDivisionError: on rank 1") as caught:
        run_ranks(fail_on, 3, 1)
    assert "rank 0" not in str(caught.value)
    results = run_ranks(fail_on, 3, 1, check=False)
    assert [r.ok for r in results] == [True, False, True]
    assert isinstance(results[1].error, ZeroDivisionError)
    assert results[1].exitcode == 1


@pytest.mark.parametrize("fn", [raise_unpicklable, return_unpicklable])
def test_what_does_not_pickle_is_reported(fn: object) -> None:
    result = run_ranks(fn, 1, check=False)[0]  # type: ignore[arg-type]
    assert result.error is not None
    assert result.traceback


def test_exit_codes() -> None:
    assert run_ranks(exit_with, 1, 0)[0].ok
    assert run_ranks(exit_with, 1, 3, check=False)[0].exitcode == 3
    assert run_ranks(kill_self, 1, signal.SIGKILL, check=False)[0].exitcode == -signal.SIGKILL


def test_crash_shows_the_stack() -> None:
    result = run_ranks(kill_self, 1, signal.SIGSEGV, check=False)[0]
    assert result.exitcode == -signal.SIGSEGV
    assert "kill_self" in result.traceback


def test_timeout_names_the_ranks_and_their_stacks() -> None:
    started = time.monotonic()
    with pytest.raises(RanksTimeoutError, match="sleep_on") as caught:
        run_ranks(sleep_on, 3, 1, timeout_s=3.0)
    assert caught.value.ranks == [1]
    assert time.monotonic() - started < 6


def test_a_failure_is_told_soon_although_others_wait_for_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_GRIEF_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RanksTimeoutError, match="rank 1 has lost its way") as caught:
        run_ranks(fail_or_sleep, 2, 1)
    assert caught.value.ranks == [0]
    assert time.monotonic() - started < 30


def test_stopped_rank_is_killed() -> None:
    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(kill_self, 2, signal.SIGSTOP, timeout_s=2.0)
    assert caught.value.ranks == [0, 1]


def test_grandchildren_are_killed() -> None:
    assert eventually_gone(run_ranks(start_grandchild, 1)[0].value)


def script_of(body: str, folder: Path) -> tuple[list[str | Path], dict[str, str]]:
    """A command whose process calls ranks, and its environment."""
    script = folder / "caller.py"
    script.write_text(
        "import sys; from symmcomm.testing.spawn import RankPool, run_ranks; from test_spawn import *\n"
        f"if __name__ == '__main__': {body}\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return [sys.executable, script, folder], {**os.environ, "PYTHONPATH": path}


def test_ranks_die_with_their_caller(tmp_path: Path) -> None:
    command, environ = script_of("run_ranks(write_pid_and_sleep, 2, sys.argv[1])", tmp_path)
    caller = subprocess.Popen(command, env=environ)
    deadline = time.monotonic() + 60
    while len(pids := [int(t) for n in "01" if (f := tmp_path / n).exists() and (t := f.read_text())]) < 2:
        assert time.monotonic() < deadline
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert all(eventually_gone(pid) for pid in pids)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def test_a_pool_keeps_its_ranks(pool: RankPool) -> None:
    first = run_ranks(launch_variables, 2, pool=pool)
    pids = [result.pid for result in first]
    assert all(result.ok for result in first)
    more = run_ranks(launch_variables, 3, pool=pool)
    assert [result.value[:3] for result in more] == [(str(rank), "3", str(rank)) for rank in range(3)]
    assert [result.pid for result in more[:2]] == pids
    fewer = run_ranks(variable, 1, "SYMMCOMM_TEST", env={"SYMMCOMM_TEST": "x"}, pool=pool)
    assert [(result.pid, result.value) for result in fewer] == [(pids[0], "x")]
    assert run_ranks(variable, 1, "SYMMCOMM_TEST", pool=pool)[0].value is None
    pool.close()
    assert not any(map(is_running, pids))


def test_a_pool_renews_its_ranks(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_MOST_CALLS", 2)
    pids = [run_ranks(echo, 1, number, pool=pool)[0].pid for number in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


@pytest.mark.parametrize("end", [exit_with, kill_self])
def test_a_pool_replaces_ranks_that_have_ended(pool: RankPool, end: Callable[[int], None]) -> None:
    before = run_ranks(echo, 2, 0, pool=pool)
    ended = run_ranks(end, 2, 9, check=False, pool=pool)
    assert [result.pid for result in ended] == [result.pid for result in before]
    assert {result.exitcode for result in ended} == {9 if end is exit_with else -9}
    after = run_ranks(echo, 2, 1, pool=pool)
    assert not {result.pid for result in after} & {result.pid for result in before}
    waiting = pool.ranks(2)
    os.kill(after[0].pid, signal.SIGKILL)
    while waiting[0].process.is_alive():
        time.sleep(0.01)
    assert [result.value for result in run_ranks(echo, 2, 2, pool=pool)] == [2, 2]


def test_large_arguments_do_not_wait_for_a_stopped_rank(pool: RankPool) -> None:
    (stopped,) = run_ranks(echo, 1, 0, pool=pool)
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(RanksTimeoutError):
        run_ranks(echo, 1, b"x" * (8 << 20), timeout_s=1.0, pool=pool)
    assert run_ranks(echo, 1, 1, pool=pool)[0].value == 1


def test_an_interrupted_end_leaves_no_busy_rank(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spawn, "_GRIEF_S", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(echo, 2, 0, pool=pool)
    with monkeypatch.context() as patch:
        patch.setattr(spawn._Rank, "kill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(fail_or_sleep, 2, 1, pool=pool)
    assert [result.value for result in run_ranks(echo, 2, "new", pool=pool)] == ["new", "new"]


def test_a_pool_that_nobody_closes_ends_with_its_process(tmp_path: Path) -> None:
    body = "POOL = RankPool(); print(run_ranks(echo, 1, 0, pool=POOL)[0].pid)"
    command, environ = script_of(body, tmp_path)
    done = launch_command(command, 100.0, environ)
    assert done.returncode == 0, done.stderr
    assert eventually_gone(int(done.stdout))


def test_a_pool_replaces_all_ranks_after_a_failure(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_GRIEF_S", 1.0)
    before = run_ranks(echo, 3, 0, pool=pool)
    with pytest.raises(RankFailedError, match="on rank 1"):
        run_ranks(fail_on, 3, 1, pool=pool)
    between = run_ranks(echo, 3, 1, pool=pool)
    with pytest.raises(RanksTimeoutError, match="rank 1 has lost its way"):
        run_ranks(fail_or_sleep, 2, 1, pool=pool)
    after = run_ranks(echo, 3, 2, pool=pool)
    assert len({result.pid for results in (before, between, after) for result in results}) == 9
    assert not any(is_running(result.pid) for result in (*before, *between))
