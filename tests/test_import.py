"""Importing symmcomm starts nothing and needs no MPI, no CUDA and no compiler; nor does a world of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# As if the modules were not installed.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""
FOREIGN = ("mpi4py", "cutlass", "cuda", "cupy", "triton", "nvshmem", "pynvml", "matplotlib", "typer", "rich")


def run(code: str, **env: str) -> str:
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launch and not name.startswith("OMPI_")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # else torch imports an installed symmcomm before these tests do
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**kept, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_nothing() -> None:
    code = """
import os, threading, torch
def state():
    sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "pipe:", "/memfd"))]
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    return threading.active_count(), len(os.listdir("/proc/self/task")), sorted(sockets), children
before = state()
import symmcomm
assert state() == before, (before, state())
"""
    run(code)


def test_import_needs_no_extra() -> None:
    run(WITHOUT.format(names=FOREIGN) + "import symmcomm")


def test_import_uses_no_extra() -> None:
    code = "import sys, torch; before = set(sys.modules); import symmcomm; print(*sorted(set(sys.modules) - before))"
    imported = {name.split(".")[0] for name in run(code).split()}
    assert "symmcomm" in imported
    assert not imported & set(FOREIGN)


def test_import_compiles_nothing() -> None:
    code = """
import sys
import symmcomm
from symmcomm.kernels.cpu import all_gather, all_reduce, all_to_all, barrier, point_to_point, reduce_scatter, windows
for module in (all_gather, all_reduce, all_to_all, barrier, point_to_point, reduce_scatter, windows):
    for name, function in vars(module).items():
        assert not getattr(function, "overloads", None), f"{module.__name__}.{name} is compiled"
from symmcomm.kernels import cpu
assert cpu.load.cache_info().currsize == 0
"""
    run(code)


def test_import_reads_no_variable_and_prints_nothing() -> None:
    assert run("import symmcomm", SYMMCOMM_STAGING_BYTES="nonsense", SYMMCOMM_TIMEOUT_S="never") == ""


def test_world_of_one_needs_no_extra() -> None:
    code = """
import torch, symmcomm
with symmcomm.init() as comm:
    x = comm.empty(10).fill_(3)
    comm.all_reduce(x)
    comm.barrier()
    print(comm.rank, comm.world_size, x.sum().item(), comm.bootstrap_name)
"""
    assert run(WITHOUT.format(names=FOREIGN) + code) == "0 1 30.0 world of one\n"


def test_public_names() -> None:
    import symmcomm

    assert sorted(symmcomm.__all__) == symmcomm.__all__
    for name in symmcomm.__all__:
        assert getattr(symmcomm, name).__doc__, name
