"""Where compiled kernels are kept. Those of CPUs: by Numba's rule beside the sources, else below the user's home; else
here. Those of GPUs: below the user's home."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from numba import config, njit

from symmcomm.errors import SymmCommError


def private_folder() -> Path:
    """A folder of this user's own among the temporary files.

    Raises SymmCommError if there can be none: what lies there is run, so nobody else may write it.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"symmcomm-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise SymmCommError(f"no folder for temporary files: {error}; set TMPDIR to one that can be written") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SymmCommError(f"{folder} is not a folder that only this user can write: remove it, or set TMPDIR")
    return folder


def gpu_folder() -> Path:
    """Where objects of GPU kernels lie if nobody says otherwise."""
    return Path.home() / ".cache" / "symmcomm" / "kernels"


def find_room() -> None:
    """Numba does not even define a cached function where neither the installation nor the user's home can be written,
    as in containers: there it gets a folder among the temporary files, for all functions of this process."""
    try:
        njit(cache=True)(find_room)  # compiles nothing
    except RuntimeError:
        config.CACHE_DIR = str(private_folder() / "numba")
