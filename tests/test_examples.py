"""Every example runs: alone, under torchrun, and under mpirun."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from symmcomm.testing.launch import launch_command

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ENV = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
NUM_RANKS = 2


def launchers() -> dict[str, list[str]]:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}") or "mpirun"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    return {
        "alone": [sys.executable],
        "torchrun": [sys.executable, *torchrun],
        "mpirun": [mpirun, "-n", str(NUM_RANKS), sys.executable],
    }


def commands() -> dict[str, str]:
    """How an example says that it can be started."""
    return {
        "alone": "    python examples/{}",
        "torchrun": "    torchrun --nproc-per-node 4 examples/{}",
        "mpirun": "    mpirun -n 4 python examples/{}",
    }


@pytest.fixture(params=["alone", "torchrun", "mpirun"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "mpirun":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)
        if shutil.which(launchers()["mpirun"][0]) is None:
            pytest.skip("there is no mpirun")
    return str(request.param)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, launcher: str) -> None:
    if commands()[launcher].format(example.name) not in example.read_text().splitlines():
        pytest.skip(f"is not for {launcher}")
    if "gpu" in example.stem and torch.cuda.device_count() < NUM_RANKS:
        pytest.skip("needs a GPU for each rank")
    done = launch_command([*launchers()[launcher], str(example)], 120.0, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    num_ranks = 1 if launcher == "alone" else NUM_RANKS
    for rank in range(num_ranks):
        assert f"rank {rank} of {num_ranks}" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_start_it(example: Path) -> None:
    lines = example.read_text().splitlines()
    assert len(lines) <= 60
    assert commands()["torchrun"].format(example.name) in lines
