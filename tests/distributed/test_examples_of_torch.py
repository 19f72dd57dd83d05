"""An existing script prints the same with its one string changed back."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from symmcomm.testing.launch import launch_command

ROOT = Path(__file__).parents[2]
installed = pytest.mark.skipif(
    "symmcomm" not in entry_points(group="torch.backends").names, reason="symmcomm is not installed in this environment"
)


def python(*arguments: str, **env: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = launch_command([sys.executable, *arguments], 120.0, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reports(output: str) -> list[str]:
    """What the script prints of each rank."""
    found = re.findall(r"rank \d of 3: mean -?[\d.]+, total -?[\d.]+", output)
    assert len(found) == 3, output
    return found


@installed
def test_existing_script(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    script = ROOT / "examples" / "06_existing_script.py"
    before = tmp_path / "before.py"
    before.write_text(script.read_text().replace('BACKEND = "symm"', 'BACKEND = "gloo"'))
    # Rank 0 alone prints; yet a line and its end are written apart, and a warning may come between them.
    assert reports(python(*torchrun, str(script))) == reports(python(*torchrun, str(before)))


@installed
@pytest.mark.parametrize("first", ["torch", "symmcomm", "torch.distributed", "numpy, symmcomm, torch"])
def test_torch_finds_the_backend(first: str) -> None:
    """Whichever is imported first; and what runs the backend is not imported before it is used."""
    code = (
        f"import {first}, torch, sys; import torch.distributed as dist; print(dist.is_backend_available('symm'), "
        "[name for name in sys.modules if name.startswith('numba') or name == 'symmcomm.communicator'])"
    )
    assert python("-c", code) == "True []\n"


def test_without_entry_points() -> None:
    code = "import symmcomm, torch.distributed as dist; print(dist.is_backend_available('symm'))"
    assert python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True\n"
