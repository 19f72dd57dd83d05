"""Real ranks: every implementation is right, a run writes what it should, failures end everything."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symmcomm.bench import timing
from symmcomm.bench.case import Collective, cases
from symmcomm.bench.method import Device, Method
from symmcomm.bench.mpi_installations import find_mpis
from symmcomm.bench.run import PEERS, start_teams
from symmcomm.bench.team import SpawnedTeam, TeamError
from symmcomm.cli import app
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.testing.launch import launch_command

WORLD = 3
ON_CPU = ["--device", "cpu"]
ONE_SIZE = ["-b", "4K", "-e", "4K"]
INSTALLED = [peer for peer in PEERS[Device.cpu] if peer == "gloo" or peer in find_mpis()]
REDUCTIONS = [(DType.bfloat16, Op.sum), (DType.int32, Op.max), (DType.bool, Op.bxor), (DType.float16, Op.avg)]


@pytest.fixture(scope="module")
def teams() -> Iterator[list[SpawnedTeam]]:
    """Three ranks of every implementation, but of one MPI only."""
    started = start_teams(INSTALLED[:2], WORLD, find_mpis())
    yield started
    for team in started:
        team.kill()


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Method, "round_s", 0.002)


@pytest.mark.parametrize("collective", Collective)
def test_every_collective_is_right(teams: list[SpawnedTeam], collective: Collective) -> None:
    (case,) = cases(collective, 100_000, 100_000, 2, DType.float32, Op.sum, WORLD)
    measurements = timing.measure(teams, case, rounds=1, progress=lambda _: None)
    assert [m.implementation for m in measurements] == ["symm", "symm_heap", *INSTALLED[:2]]
    assert {m.implementation: m.wrong for m in measurements} == {m.implementation: 0 for m in measurements}
    assert all(m.time_us and m.iterations >= 3 for m in measurements)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_other_reductions_are_right_or_refused(teams: list[SpawnedTeam], dtype: DType, op: Op) -> None:
    (case,) = cases(Collective.all_reduce, 1000, 1000, 2, dtype, op, WORLD)
    measurements = timing.measure(teams, case, rounds=0, progress=lambda _: None)
    assert [m.wrong for m in measurements[:2]] == [0, 0]
    assert all(m.wrong == 0 or m.refusal for m in measurements)
    refused = {m.implementation: m.refusal or "" for m in measurements}
    if dtype is DType.bfloat16:
        assert refused["gloo"] == ""
        assert all("DATATYPE_NULL" in refused[mpi] for mpi in INSTALLED[1:2])


def test_idle_teams_leave_the_cores_alone(teams: list[SpawnedTeam]) -> None:
    pids = [answer["pid"] for team in teams for answer in team.ask({"do": "describe"})]
    before = sum(map(cpu_seconds, pids))
    time.sleep(1)
    assert sum(map(cpu_seconds, pids)) - before < 0.05 * len(pids)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def runs(pid: int) -> bool:
    """Whether a process is there and not dead: in a container without an init the dead may stay listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_rank_ends_the_team(teams: list[SpawnedTeam]) -> None:
    """Last of those that share the teams."""
    for team in teams:
        pids = [answer["pid"] for answer in team.ask({"do": "describe"})]
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TeamError, match=f"team {team.name}"):
            team.ask({"do": "describe"})
        assert time.monotonic() - started < 20
        assert not [pid for pid in pids if runs(pid)]


def test_a_run_writes_table_json_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {"--json": tmp_path / "run.json", "--plot": tmp_path / "run.png"}
    arguments = ["bench", "all_reduce", *ON_CPU, "--nproc", "2", "--peers", "gloo,mpi", "-b", "1K", "-e", "64K"]
    for option, path in files.items():
        arguments += [option, str(path)]
    result = CliRunner().invoke(app, [*arguments, "-f", "64", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert "#wrong" in result.stdout
    content = json.loads(files["--json"].read_text())
    found = [(entry["size_bytes"], entry["implementation"], entry["wrong"]) for entry in content["results"]]
    assert found == [(size, name, 0) for size in (1024, 65536) for name in ("symm", "symm_heap", *INSTALLED)]
    assert all(entry["time_us"] > 0 and len(entry["round_us"]) == 2 for entry in content["results"])
    gloo = content["results"][2]
    assert gloo["ratio"]["symm"] == pytest.approx(gloo["time_us"] / content["results"][0]["time_us"])
    assert content["machine"]["ranks"] == 2
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_joins_the_ranks_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bench = ["-m", "symmcomm", "bench", "broadcast", *ON_CPU, *ONE_SIZE, "--rounds", "1", "--json", str(path)]
    done = launch_command([*torchrun, *bench, "--peers", "gloo,mpi"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size") == 1, "rank 0 alone prints"
    results = json.loads(path.read_text())["results"]
    assert [entry["implementation"] for entry in results] == ["symm", "symm_heap", "gloo"]
    for mpi in INSTALLED[1:]:
        assert f"# {mpi}: n/a, the ranks were started by torchrun" in done.stdout


def test_joins_the_ranks_of_mpirun() -> None:
    if INSTALLED == ["gloo"]:
        pytest.skip("no MPI is installed")
    name = INSTALLED[-1]
    bench = [sys.executable, "-m", "symmcomm", "bench", *ON_CPU, *ONE_SIZE, "--rounds", "1", "--peers", name]
    done = launch_command([*find_mpis()[name].command(2), *bench], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size") == 1, "rank 0 alone prints"
    assert name in done.stdout


def test_ranks_that_cannot_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    result = CliRunner().invoke(app, ["bench", *ON_CPU, "--nproc", "2", "-e", "1K"])
    assert result.exit_code == 1
    assert "error: team own (symm, symm_heap)" in result.output
