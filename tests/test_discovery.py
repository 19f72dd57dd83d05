"""What is made of sysfs and of the facts about GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from symmcomm.discovery import cpu_topology, gpu_topology, numa_node, parse_cores
from symmcomm.schedule.cost import RingMode, choose, choose_from
from symmcomm.schedule.topology_gpu import Attempt, GpuFacts


def test_lists_of_cores() -> None:
    assert parse_cores("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cores("\n") == set()


def test_the_node_that_holds_all_cores(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-3", "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    assert numa_node([4, 6], tmp_path) == 1
    assert numa_node([3, 4], tmp_path) == -1
    assert numa_node([], tmp_path) == -1
    assert numa_node([0], tmp_path / "nothing") == -1


def test_ranks_on_two_nodes_get_rings() -> None:
    topology = cpu_topology([0, 1, 0, 1, 0, 1, 0, 1])
    assert topology.levels == (((0, 2, 4, 6), (1, 3, 5, 7)),)
    assert choose_from(topology)[0] is RingMode.Ring2D
    assert choose(cpu_topology([0, 0, 0, 1, 1]), 64 << 20) is RingMode.Ring1D  # nodes of different size


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, -1, 1], [-1]])
def test_one_node_or_nobody_knows(nodes: list[int]) -> None:
    topology = cpu_topology(nodes)
    assert topology.is_flat()
    assert choose_from(topology)[0] is RingMode.All2All


def facts(numa: list[int], links: dict[tuple[int, int], int]) -> list[GpuFacts]:
    return [
        GpuFacts(
            device=Attempt(True, ""), uuid=f"GPU-{rank}", numa_node=node,
            links={f"GPU-{b}": count for (a, b), count in links.items() if a == rank},
        )
        for rank, node in enumerate(numa)
    ]  # fmt: skip


def test_gpus_on_nvlink_need_no_ring() -> None:
    everybody = {(a, b): 18 for a in range(4) for b in range(4) if a != b}
    topology = gpu_topology(facts([0, 0, 1, 1], everybody))
    assert topology.is_flat()
    assert topology.kind(0, 3) == "nvlink"
    assert topology.path(0, 3)[0][0].bandwidth == 18 * 25e9
    assert choose_from(topology)[0] is RingMode.All2All


def test_gpus_on_pcie_get_rings() -> None:
    topology = gpu_topology(facts([0, 0, 0, 0, 1, 1, 1, 1], {}))
    assert topology.levels == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert topology.kind(0, 1) == "pcie"
    assert topology.kind(0, 4) == "numa"
    assert choose_from(topology)[0] is RingMode.Ring2D


def test_pairs_on_nvlink_bridges() -> None:
    topology = gpu_topology(facts([0, 0, 1, 1], {(0, 1): 4, (1, 0): 4, (2, 3): 4, (3, 2): 4}))
    assert topology.kind(0, 1) == "nvlink"
    assert topology.kind(0, 2) == "numa"
    assert not topology.is_flat()
