"""``symmcomm plan``: the ranking, the drawing, and topologies that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symmcomm.bench.plan_table import scaled
from symmcomm.cli import app
from symmcomm.schedule.machines import cluster, pcie


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_file_is_ranked_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine, picture, figures = (tmp_path / name for name in ("machine.json", "plan.png", "plan.json"))
    machine.write_text(json.dumps(pcie((4, 4)).to_json()))
    out = run("--topology", str(machine), "--bytes", "64M", "--plot", str(picture), "--json", str(figures))
    lines = [line for line in out.splitlines() if line.startswith(("ring", "all"))]
    assert lines[0].startswith("ring 2D")
    assert lines[-1].startswith("all to all")
    assert picture.read_bytes().startswith(b"\x89PNG")
    ranking = json.loads(figures.read_text())["ranking"]
    by_name = {entry["plan"]: entry["us"] for entry in ranking}
    assert by_name["ring 1D"] / by_name["ring 2D"] == pytest.approx(7 / 4, rel=0.01)


def test_a_machine_by_name_and_a_wide_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "all to all" in run("--topology", "8 NVLink", "-d", "bfloat16").splitlines()[2]
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(cluster(3, 8).to_json()))
    run("--topology", str(machine), "--plot", str(tmp_path / "plan.svg"))  # too many ranks for text


def test_scale() -> None:
    out = run("--topology", "7 PCIe", "--scale")
    assert "8 x 8 x 64" in out
    for _, extents, times in scaled(64 << 20):
        assert times.bound <= times.rings <= times.flat * (1 + 1e-9), extents


def test_what_is_no_topology(tmp_path: Path) -> None:
    broken = tmp_path / "machine.toml"
    broken.write_text("world_size = 2\nlinks = [\n")
    assert "line 2: " in run("--topology", str(broken), code=2)
    assert "cannot be read" in run("--topology", "9 PCIe", code=2)
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 100_000)
    assert "nested too deep" in run("--topology", str(nested), code=2)


def test_a_file_that_cannot_be_written_after_all() -> None:
    out = run("--topology", "7 PCIe", "--json", "/dev/full", code=1)
    assert "No space left on device" in out
    assert "Traceback" not in out
