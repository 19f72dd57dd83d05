"""What a coordinator makes of ranks that misbehave; the ranks are shell scripts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from symmcomm.bench.team import SpawnedTeam, TeamError

Script = Path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    path = tmp_path / "rank"
    path.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(path))
    return path


def start(script: Script, text: str, timeout_s: float = 20) -> SpawnedTeam:
    script.write_text(f"#!/bin/sh\n{text}\n")
    return SpawnedTeam("own", ["symm"], 2, None, timeout_s)


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def is_running(pid: int) -> bool:
    """Whether it runs; in a container nobody may bury the dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_answers_among_a_launchers_noise(script: Script) -> None:
    team = start(script, "read command; echo; echo '[proxy] BAD'; echo \"[$command]\"; read stop; exit 0")
    assert team.ask({"do": "describe"}) == [{"do": "describe"}]
    team.close()


def test_a_rank_that_fails_is_named_with_its_last_words(script: Script) -> None:
    team = start(script, "test $RANK = 0 && sleep 60; echo 'no luck' >&2; exit 3")
    with pytest.raises(TeamError, match=r"(?s)team own \(symm\): rank 1 ended with exit code 3.no luck"):
        team.ask({"do": "describe"})


def test_rank_0_ends_without_an_answer(script: Script) -> None:
    team = start(script, "test $RANK = 1 && sleep 60; read command; exit 0")
    with pytest.raises(TeamError, match="its rank 0 has ended"):
        team.ask({"do": "describe"})


def test_late_ranks_and_their_children_are_killed(script: Script, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    hang = f"trap '' TERM; touch {tmp_path}/pids/$$; setsid sleep 60 & touch {tmp_path}/pids/$!; wait; wait"
    team = start(script, hang, timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(TeamError, match=r'no answer to {"do": "describe"} within 0.5 s'):
        team.ask({"do": "describe"})
    assert time.monotonic() - started < 10
    assert len(pids(tmp_path / "pids")) == 4
    while left := [pid for pid in pids(tmp_path / "pids") if is_running(pid)]:  # the kernel takes its time
        assert time.monotonic() - started < 20, left
        time.sleep(0.01)
