"""Topologies: from files, with errors that name the line; graphs; paths; made-up machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from symmcomm.errors import TopologyError
from symmcomm.schedule.machines import MACHINES, cluster, nvlink, pcie
from symmcomm.schedule.topology import Link, Topology, load_topology, partition

TOML = """\
world_size = 4
[[levels]]
name = "numa"
groups = [[0, 1], [2, 3]]

[[links]]
between = [[0, 1], "left"]
kind = "pcie"
gbytes_per_s = 25.0
latency_us = 0.5
[[links]]
between = [[2, 3], "right"]
kind = "pcie"
gbytes_per_s = 25.0
[[links]]
between = ["left", "right"]
kind = "numa"
gbytes_per_s = 12
duplex = false
"""


def write(folder: Path, text: str, name: str = "machine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_reads_toml(tmp_path: Path) -> None:
    topology = load_topology(write(tmp_path, TOML), 4)
    assert topology.levels == (((0, 1), (2, 3)),)
    assert len(topology.links) == 5
    assert topology.links[0] == Link(ends=(0, "left"), kind="pcie", bandwidth=25e9, latency=0.5e-6)
    assert not topology.links[-1].duplex
    assert [hop[0].kind for hop in topology.path(0, 3)] == ["pcie", "numa", "pcie"]
    assert topology.path(0, 3)[1] == topology.path(3, 0)[1]  # both directions of this link share its bandwidth
    assert topology.path(0, 3)[0] != topology.path(3, 0)[2]
    assert topology.kind(0, 1) == "pcie"
    assert topology.kind(0, 3) == "numa"
    assert not topology.is_flat()


def test_ranks_that_only_meet_at_a_third() -> None:
    """Ranks do not pass on what is for others."""
    links = [Link(ends=(0, peer), kind="pcie", bandwidth=1e9, latency=1e-6) for peer in (1, 2)]
    with pytest.raises(TopologyError, match="no path leads from rank 1 to rank 2 but through other ranks"):
        Topology(world_size=3, links=tuple(links)).path(1, 2)


@pytest.mark.parametrize("name", MACHINES)
def test_json_is_the_same(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    read = load_topology(write(tmp_path, json.dumps(machine.to_json(), indent=1), "machine.json"))
    assert read.to_json() == machine.to_json()
    assert read.levels == machine.levels


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("world_size = 4", "world_size = ", "line 1"),
        ("world_size = 4", "world_size = 4.5", "line 1: world_size is 4.5"),
        ("world_size = 4", "world_size = 1000000000", "line 1: world_size is 1000000000, at most 65536"),
        ("world_size = 4", "world_size = 5", r"is not a partition of the ranks 0..4"),
        ("groups = [[0, 1], [2, 3]]", "groups = [[0, 1], [2]]", "level 'numa'"),
        ("groups = [[0, 1], [2, 3]]", "groups = 7", "line 2: levels.0..groups"),
        ('between = [[2, 3], "right"]', 'between = [[2, 4], "right"]', "line 11: links.1.: 4 is not a rank of 0..3"),
        ('between = [[2, 3], "right"]', 'between = ["right"]', "line 11: links.1..between"),
        ('between = [[2, 3], "right"]', 'between = [2.5, "right"]', "line 11: links.1. ends at 2.5"),
        ("gbytes_per_s = 12", "gbytes_per_s = 0", "line 15: links.2.: no link has a bandwidth of 0"),
        ("gbytes_per_s = 12", 'gbytes_per_s = "12"', "line 15: links.2. has gbytes_per_s"),
        ("gbytes_per_s = 12", "gigabytes = 12", "line 15: links.2. has unknown keys .'gigabytes'."),
        ("duplex = false", "duplex = 0", "line 15: links.2..duplex is 0"),
        ('between = ["left", "right"]', 'between = ["left", "left"]', "line 15: links.2.: both ends are 'left'"),
        ('between = ["left", "right"]', 'between = ["left", "up"]', r"not connected: no path .* to ranks \[2, 3\]"),
        ("[[levels]]", "[[levels", "line 2"),
        ("[[levels]]", "[[planes]]", "unknown keys .'planes'."),
    ],
)
def test_a_bad_file_is_named_with_its_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in TOML
    path = write(tmp_path, TOML.replace(old, new, 1))
    with pytest.raises(TopologyError, match=message) as caught:
        load_topology(path)
    assert str(path) in str(caught.value)


def test_bad_json_is_named_with_its_line(tmp_path: Path) -> None:
    text = json.dumps(pcie((2, 2)).to_json(), indent=1)
    with pytest.raises(TopologyError, match="line 3: "):
        load_topology(write(tmp_path, text.replace('"levels":', '"levels"', 1), "machine.json"))
    number = text[: text.index('"between"', text.index('"between"') + 1)].count("\n") + 1
    with pytest.raises(TopologyError, match=f"line {number}: links.1.: 9 is not a rank"):
        load_topology(write(tmp_path, text.replace("   1,\n", "   9,\n", 1), "machine.json").resolve())


def test_another_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="line 1: world_size is 4, but there are 6 ranks"):
        load_topology(write(tmp_path, TOML), 6)
    with pytest.raises(TopologyError, match="cannot be read"):
        load_topology(tmp_path / "nothing.toml")


def test_levels_nest() -> None:
    links = nvlink(8).links
    levels = (partition([3, 5]), partition([4, 4]))
    with pytest.raises(TopologyError, match=r"level 'node': no group holds all of \[3, 4, 5, 6, 7\]"):
        Topology(world_size=8, links=links, levels=levels, level_names=("numa", "node"))


def test_ring_order_keeps_groups_together() -> None:
    groups = ((0, 2, 4), (1, 3, 5))
    topology = Topology(world_size=6, links=nvlink(6).links, levels=(groups,), level_names=("numa",))
    assert topology.ring_order() == [0, 2, 4, 1, 3, 5]
    assert topology.is_flat()


def test_paths_prefer_wide_links() -> None:
    machine = cluster(2, 4)
    assert [hop[0].kind for hop in machine.path(0, 3)] == ["nvlink", "nvlink"]
    assert [hop[0].kind for hop in machine.path(0, 7)] == ["network", "network"]
    racks = cluster(4, 2, nodes_per_rack=2)
    assert [hop[0].kind for hop in racks.path(0, 7)] == ["network", "spine", "spine", "network"]
