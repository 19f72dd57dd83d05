"""launch_command: what comes back, and that nothing is left running."""

from __future__ import annotations

import subprocess

import pytest
from test_spawn import eventually_gone

from symmcomm.testing.launch import launch_command


def test_command_returns_its_text() -> None:
    done = launch_command(["sh", "-c", "echo $GREETING; echo oops >&2; exit 3"], 10.0, {"GREETING": "hi"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "hi\n", "oops\n")


def test_late_command_is_killed_with_its_descendants() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        launch_command(["sh", "-c", "setsid sleep 600 & echo $!; trap '' TERM; while :; do sleep 1; done"], 1.0)
    assert isinstance(caught.value.output, str)
    assert eventually_gone(int(caught.value.output))
