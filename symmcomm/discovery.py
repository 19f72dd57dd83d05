"""What this machine's topology is, as far as it says: sysfs for processors, NVML and sysfs (``probe_gpu``) for GPUs.

No file tells what a link between sockets carries. Round figures stand in: they decide from which size on a ring pays
(``schedule.cost.choose_from``), not whether a result is right. Give ``symmcomm.init`` a topology to replace them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from symmcomm.schedule.machines import NUMA_BANDWIDTH, NUMA_LATENCY, PCIE_BANDWIDTH, PCIE_LATENCY
from symmcomm.schedule.topology import Link, Partition, Topology
from symmcomm.schedule.topology_gpu import GpuFacts, decide_links, numa_domains

_NODES = Path("/sys/devices/system/node")
_MEMORY_BANDWIDTH, _MEMORY_LATENCY = 20e9, 0.1e-6  # one core's copies
_NVLINK_BANDWIDTH, _NVLINK_LATENCY = 25e9, 0.6e-6  # one link of NVLink 3 or 4


def parse_cores(text: str) -> set[int]:
    """``"0-2,5"`` → {0, 1, 2, 5}, as the kernel writes lists of processors."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def numa_node(cores: Collection[int], nodes: Path = _NODES) -> int:
    """The NUMA node that holds all these cores; -1 if there is none, or the kernel does not say."""
    for path in sorted(nodes.glob("node[0-9]*")):
        try:
            if cores and set(cores) <= parse_cores((path / "cpulist").read_text()):
                return int(path.name.removeprefix("node"))
        except (OSError, ValueError):
            continue
    return -1


def cpu_topology(nodes: Sequence[int]) -> Topology:
    """Of ranks that run on these NUMA nodes, one entry a rank. A rank that is held to no node (-1) may be anywhere:
    then all count as one domain, as there is nothing to tell."""
    domains: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        domains.setdefault(-1 if min(nodes) < 0 else node, []).append(rank)
    links = [
        Link(ends=(rank, f"node{node}"), kind="memory", bandwidth=_MEMORY_BANDWIDTH, latency=_MEMORY_LATENCY)
        for node, ranks in domains.items()
        for rank in ranks
    ]
    links += _between([f"node{node}" for node in domains])
    groups = tuple(tuple(ranks) for ranks in domains.values())
    return Topology(world_size=len(nodes), links=tuple(links), levels=(groups,), level_names=("numa",))


def gpu_topology(facts: Sequence[GpuFacts]) -> Topology:
    """Of ranks on these GPUs of one host: by NVLink where every pair has it, else below one PCIe root a NUMA domain,
    and by what NVLinks there are between pairs."""
    if decide_links(facts).works:
        links = [
            Link(ends=(rank, "nvlink"), kind="nvlink", latency=_NVLINK_LATENCY,
                 bandwidth=_NVLINK_BANDWIDTH * max([1, *fact.links.values()]))
            for rank, fact in enumerate(facts)
        ]  # fmt: skip
        return Topology(world_size=len(facts), links=tuple(links))
    groups: Partition = tuple(tuple(ranks) for ranks in numa_domains(facts))
    links = [
        Link(ends=(rank, f"root{idx}"), kind="pcie", bandwidth=PCIE_BANDWIDTH, latency=PCIE_LATENCY)
        for idx, ranks in enumerate(groups)
        for rank in ranks
    ]
    links += _between([f"root{idx}" for idx in range(len(groups))])
    for rank, fact in enumerate(facts):
        for peer in range(rank):
            if count := fact.links.get(facts[peer].uuid, 0):
                links.append(
                    Link(ends=(peer, rank), kind="nvlink", bandwidth=count * _NVLINK_BANDWIDTH, latency=_NVLINK_LATENCY)
                )
    return Topology(world_size=len(facts), links=tuple(links), levels=(groups,), level_names=("numa",))


def _between(roots: list[str]) -> list[Link]:
    """A link between every two NUMA domains."""
    pairs = [(roots[i], roots[j]) for j in range(len(roots)) for i in range(j)]
    return [Link(ends=pair, kind="numa", bandwidth=NUMA_BANDWIDTH, latency=NUMA_LATENCY) for pair in pairs]
