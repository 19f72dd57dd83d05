"""Which MPIs this machine has, and how to start ranks with each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_VENDORS = {"openmpi": "Open MPI", "mpich": "HYDRA"}
_LAUNCHERS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "mpirun.mpich")


@dataclass(frozen=True)
class MPIInstallation:
    """One MPI.

    Attributes:
        name: ``"openmpi"`` or ``"mpich"``.
        library: its libmpi, for mpi4py to load; ``None`` leaves the choice to mpi4py.
    """

    name: str
    version: str
    launcher: Path
    library: Path | None

    def command(self, world_size: int) -> list[str]:
        """The command line up to the ranks' program, more ranks than cores allowed, no rank bound to a core."""
        if self.name == "mpich":
            options = ["-bind-to", "none", "-n", str(world_size)]
        else:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            options = [*root, "--oversubscribe", "--bind-to", "none", "-n", str(world_size)]
        library = [f"MPI4PY_LIBMPI={self.library}"] if self.library else []
        return ["env", *library, str(self.launcher), *options]


def find_mpis() -> dict[str, MPIInstallation]:
    """By name: MPIs in this Python's prefix, in prefixes of their own inside it, on the PATH. None without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return {}
    prefixes = [Path(sys.prefix), *(Path(sys.prefix) / name for name in _VENDORS)]
    candidates = [prefix / "bin" / launcher for prefix in prefixes for launcher in ("mpirun", "mpiexec")]
    candidates += [Path(path) for launcher in _LAUNCHERS if (path := shutil.which(launcher))]
    found: dict[str, MPIInstallation] = {}
    for launcher in candidates:
        mpi = _identify(launcher) if launcher.exists() else None
        if mpi is not None:
            found.setdefault(mpi.name, mpi)
    return found


def _identify(launcher: Path) -> MPIInstallation | None:
    """Asks the launcher for its version."""
    try:
        text = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name = next((name for name, mark in _VENDORS.items() if mark in text), None)
    if name is None:
        return None
    digits = [word for word in text.split() if word[0].isdigit()]
    libraries = sorted((launcher.parent.parent / "lib").glob("libmpi.so.*"))
    library = next((path for path in libraries if path.suffix[1:].isdigit()), None)
    return MPIInstallation(name, digits[0] if digits else "?", launcher, library)
