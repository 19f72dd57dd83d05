"""The command line: usage errors, and the choice of peers and teams."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from symmcomm.bench.method import Device, Machine
from symmcomm.bench.run import joined, parse_peers, plan_teams, present
from symmcomm.cli import app
from symmcomm.env import Launch
from symmcomm.errors import ArgumentError

BAD_ARGUMENTS = [
    (["all_reduces"], "all_reduces"),
    (["-b", "many"], "'many' is not a size"),
    (["-e", "1.5"], "1.5"),
    (["-e", "inf"], "'inf' is not a whole, non-negative number of bytes"),
    (["-f", "1.0000001"], "more than 1000 sizes"),
    (["--json", "/"], "'/' cannot be written: it is a folder"),
    (["-b", "2K", "-e", "1K"], "2048"),
    (["-f", "1"], "factor 1"),
    (["-d", "float13"], "'float13' is not a dtype"),
    (["--op", "median"], "'median' is not a reduction"),
    (["--op", "band"], "'band' has no meaning for float32"),
    (["--peers", "nccl"], "'nccl' is not a peer"),
    (["--nproc", "0"], "0 is not in 1..64"),
    (["--nproc", "65"], "65 is not in 1..64"),
    (["--rounds", "-1"], "-1 is not positive"),
    (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    (["--plot", "figure.doc"], "figure.doc"),
    (["send_recv", "--nproc", "1"], "send_recv needs 2 ranks, not 1"),
    (["--device", "cpu", "--timing", "graph"], "--timing is for GPUs"),
    (["--virtual-ranks", "1"], "1 is not in 2..16"),
    (["--device", "cuda"], "--device cuda: no GPU in this test"),
]


def launch(**fields: str) -> Launch:
    return Launch.from_env(fields)


@pytest.fixture(autouse=True)
def _no_launcher_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symmcomm.cli.find_gpus", lambda: Machine(num_gpus=0, obstacle="no GPU in this test"))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("arguments", "named"), BAD_ARGUMENTS)
def test_usage_errors_name_the_value(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2, result.output
    assert named in result.output


def test_one_rank_has_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    result = CliRunner().invoke(app, ["tune"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert "one rank has nothing to tune" in result.output


def test_without_a_gpu_nothing_is_tuned() -> None:
    result = CliRunner().invoke(app, ["tune"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert "only kernels of GPUs are tuned: no GPU in this test" in result.output


def test_nproc_must_agree_with_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["bench", "--nproc", "4"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert "4 ranks, but the launcher started 2" in result.output


def test_peers() -> None:
    assert parse_peers("gloo,mpi", ["openmpi", "mpich"]) == ["gloo", "openmpi", "mpich"]
    assert parse_peers("mpich, mpi", ["openmpi", "mpich"]) == ["mpich", "openmpi"]
    assert parse_peers("mpi", []) == []
    assert parse_peers("none", ["mpich"]) == []
    with pytest.raises(ArgumentError, match="'mpich' is not installed"):
        parse_peers("mpich", ["openmpi"])


def test_peers_on_gpus() -> None:
    assert parse_peers("nccl,torch_symm_mem", [], Device.cuda) == ["nccl", "torch_one_shot", "torch_two_shot"]
    assert parse_peers("nvshmem,nccl_symm,none", [], Device.cuda) == ["nvshmem", "nccl_symm"]
    with pytest.raises(ArgumentError, match="'gloo' is not a peer on cuda: expected some of symm_ring, nccl"):
        parse_peers("gloo", [], Device.cuda)
    (own,) = plan_teams(["nccl"], Device.cuda)
    assert (own.implementations, own.launcher) == (["symm", "symm_heap", "nccl"], None)
    assert present(["nccl"], launch(OMPI_COMM_WORLD_SIZE="2"), Device.cuda) == (["nccl"], [])


def test_teams() -> None:
    teams = {plan.name: (plan.implementations, plan.launcher) for plan in plan_teams(["gloo", "openmpi", "mpich"])}
    assert teams == {"own": (["symm", "symm_heap", "gloo", "openmpi"], "openmpi"), "mpich": (["mpich"], "mpich")}
    (own,) = plan_teams(["gloo"])
    assert (own.implementations, own.launcher) == (["symm", "symm_heap", "gloo"], None)


def test_who_is_joined() -> None:
    assert joined(launch()) is None
    assert joined(launch(RANK="0", WORLD_SIZE="1")) is None
    assert joined(launch(RANK="0", WORLD_SIZE="4")) == 4
    assert joined(launch(OMPI_COMM_WORLD_SIZE="3")) == 3


def test_peers_among_ranks_of_a_launcher() -> None:
    peers = ["gloo", "openmpi", "mpich"]
    assert present(peers, launch(RANK="0", WORLD_SIZE="2"))[0] == ["gloo"]
    possible, notes = present(peers, launch(OMPI_COMM_WORLD_SIZE="2"))
    assert possible == ["gloo", "openmpi"]
    assert notes == ["mpich: n/a, the ranks were started by Open MPI"]


def test_doctor_prints_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["paths"]["memfd"]["status"] == "possible"
    assert "SYMMCOMM_TIMEOUT_S" in [variable["name"] for variable in found["variables"]]
    assert found["versions"]["torch"]
    assert found["ranks"] is None
