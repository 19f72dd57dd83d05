"""Real torchrun and real mpirun, of Open MPI and of MPICH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from symmcomm.testing.launch import launch_command

SCRIPT = str(Path(__file__).with_name("gather_script.py"))
PYTHONPATH = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class MPILaunch:
    """One MPI's ``mpirun``, and the environment in which mpi4py loads the same MPI."""

    name: str
    mpirun: list[str]
    env: dict[str, str] = field(default_factory=dict)

    def run(self, num_ranks: int, *args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        argv = [*self.mpirun, "-n", str(num_ranks), sys.executable, SCRIPT, *map(str, args)]
        return launch_command(argv, 120.0, {**PYTHONPATH, **AS_ROOT, **(self.env if env is None else env)})


def find_open_mpi() -> MPILaunch | None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None or "Open MPI" not in launch_command([mpirun, "--version"], 30.0, AS_ROOT).stdout:
        return None
    return MPILaunch("Open MPI", [mpirun, "--oversubscribe"])


def find_mpich() -> MPILaunch | None:
    prefix = Path(sys.prefix) / "mpich"
    # A wheel has no links: libmpi.so may be a file with the name of the library.
    libraries = [path for path in sorted((prefix / "lib").glob("libmpi.so*")) if path.stat().st_size > 1 << 16]
    if not (prefix / "bin" / "mpiexec").exists() or not libraries:
        return None
    return MPILaunch("MPICH", [str(prefix / "bin" / "mpiexec")], {"MPI4PY_LIBMPI": str(libraries[0])})


FINDERS = {"Open MPI": find_open_mpi, "MPICH": find_mpich}


def found(name: str) -> MPILaunch:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)
    mpi = FINDERS[name]()
    if mpi is None:
        pytest.skip(f"{name} is not installed")
    return mpi


@pytest.fixture(params=list(FINDERS))
def mpi(request: pytest.FixtureRequest) -> MPILaunch:
    return found(request.param)


def test_torchrun() -> None:
    done = launch_command(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "60"],
        120.0,
        PYTHONPATH,
    )
    assert done.returncode == 0, done.stderr
    # A rank writes its line and the line's end apart, so the launcher may join the ranks' lines.
    assert sorted(re.findall(r"rank (\d) of 2: torchrun store", done.stdout)) == ["0", "1"]


def test_mpirun(mpi: MPILaunch) -> None:
    done = mpi.run(3, 60)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(rf"rank (\d) of 3: {mpi.name} v[\d.]+", done.stdout)) == ["0", "1", "2"]


def test_mpirun_of_one_needs_no_mpi(mpi: MPILaunch) -> None:
    done = mpi.run(1, 60, env={"MPI4PY_LIBMPI": "/nonexistent"})
    assert done.stdout.splitlines() == ["rank 0 of 1: world of one"], done.stderr


def test_mute_rank_is_named(mpi: MPILaunch) -> None:
    done = mpi.run(3, 2, 1)
    assert done.stdout.count(f"PeerTimeoutError {mpi.name}: ") == 2, done.stdout + done.stderr
    assert done.stdout.count("for rank 1 of 3 to send its payload") == 2


@pytest.mark.parametrize(("launcher", "loaded"), [("Open MPI", "MPICH"), ("MPICH", "Open MPI")])
def test_other_mpi_than_mpiruns_is_named(launcher: str, loaded: str) -> None:
    env = found(loaded).env
    done = found(launcher).run(2, 10, env=env)
    assert done.stdout.count(f"BootstrapError {launcher}: mpirun of {launcher} started 2 ranks") == 2, done.stderr
    assert done.stdout.count(f"which mpi4py cannot see: it was loaded with {loaded} v") == 2
