"""Reading another process's memory: what is read, what is refused, and that all ranks come to one decision."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest
import torch

import symmcomm
from symmcomm.kernels.cpu import context as c
from symmcomm.memory import private
from symmcomm.testing.spawn import run_ranks

LARGE = 5 << 20  # elements: more bytes than any threshold of the single copy


def test_reads_what_the_other_process_holds() -> None:
    script = (
        "import ctypes, sys\nb = ctypes.create_string_buffer(b'over there')\n"
        "print(ctypes.addressof(b), flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        address = int(process.stdout.readline())
        try:
            found = private.read(process.pid, address, 10)
        except PermissionError:
            pytest.skip("this system forbids process_vm_readv between siblings")
        finally:
            process.kill()
    assert found == b"over there"


def test_an_unmapped_address_and_a_dead_process_raise() -> None:
    with pytest.raises(OSError, match="Bad address"):
        private.read(os.getpid(), 8, 8)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        private.read(process.pid, ctypes.addressof(ctypes.c_int64(0)), 8)


def _decision() -> tuple[bool, float]:
    with symmcomm.init() as comm:
        x = torch.full((LARGE,), float(comm.rank + 1))
        comm.all_reduce(x)
        assert (x == x[0]).all()
        assert (comm.field(c.SINGLE_COPY_BYTES) < LARGE) == comm.single_copy
        return comm.single_copy, float(x[0])


@pytest.mark.parametrize("variable", ["0", "1"])
def test_the_variable_decides_and_results_are_the_same(variable: str) -> None:
    results = [r.value for r in run_ranks(_decision, 3, env={"SYMMCOMM_SINGLE_COPY": variable})]
    assert len(set(results)) == 1
    assert results[0][1] == 6.0
    if variable == "0":
        assert not results[0][0]


def _one_forbids() -> bool:
    rank = int(os.environ["RANK"])
    settings = symmcomm.Settings(single_copy=rank != 1)
    with symmcomm.init(settings=settings) as comm:
        x = torch.ones(LARGE)
        comm.all_reduce(x)
        assert (x == 3).all()
        return comm.single_copy


def test_one_rank_that_forbids_decides_for_all() -> None:
    assert [r.value for r in run_ranks(_one_forbids, 3)] == [False, False, False]


def _victim_dies_while_it_is_read() -> str:
    comm = symmcomm.init()
    x = torch.ones(16 << 20)
    for call in range(1000):
        if comm.rank == 1 and call == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(x)
        except symmcomm.PeerDiedError as error:
            return f"rank {error.rank}"
    return "nothing happened"


def test_death_of_a_rank_whose_tensor_is_read() -> None:
    results = run_ranks(_victim_dies_while_it_is_read, 3, check=False)
    assert [r.value for r in results if r.rank != 1] == ["rank 1", "rank 1"]
