"""Compiled kernels have a place wherever the library is installed, and one that only their user can write."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from symmcomm import SymmCommError
from symmcomm.kernels.cache import private_folder

NO_ROOM = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}  # neither sources nor home can be written


def test_without_room_kernels_are_kept_among_temporary_files(tmp_path: Path) -> None:
    """Ranks of a container that may write nothing else."""
    script = "import symmcomm\nfrom symmcomm.kernels.compile import cache_folder\nsymmcomm.init\nprint(cache_folder())"
    environ = {**os.environ, **NO_ROOM, "TMPDIR": str(tmp_path)}
    environ.pop("NUMBA_CACHE_DIR", None)
    found = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"{tmp_path}/symmcomm-{os.getuid()}/numba/")


def test_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder() == folder


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def elsewhere(path: Path) -> None:
    path.symlink_to(path.parent, target_is_directory=True)


@pytest.mark.parametrize("make", [open_to_all, elsewhere, Path.touch])
def test_folder_of_others_is_refused(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from there is executed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make(tmp_path / f"symmcomm-{os.getuid()}")
    with pytest.raises(SymmCommError, match=f"{tmp_path}/symmcomm-{os.getuid()}.*set TMPDIR"):
        private_folder()


def test_no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(SymmCommError, match=r"no folder for temporary files: .*set TMPDIR"):
        private_folder()
