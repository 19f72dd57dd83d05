"""Machines that nobody needs to have: topologies for tests, examples and for looking beyond what is at hand.

Figures are round, of the order of vendors' data sheets: PCIe 4.0 × 16 25 GB/s, the link between two sockets 12 GB/s
(what PCIe peers get across it, not what memory gets), NVLink 4 through switches 400 GB/s, a network port 45 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence

from symmcomm.schedule.topology import Link, Topology, partition

PCIE_BANDWIDTH, NUMA_BANDWIDTH, NVLINK_BANDWIDTH, NETWORK_BANDWIDTH = 25e9, 12e9, 400e9, 45e9
PCIE_LATENCY, NUMA_LATENCY, NVLINK_LATENCY, NETWORK_LATENCY = 0.6e-6, 0.4e-6, 0.6e-6, 2.0e-6


def pcie(sizes: Sequence[int]) -> Topology:
    """GPUs (or ranks on sockets) below one PCIe root a NUMA domain; every two roots are joined by a link."""
    domains = partition(sizes)
    links = [
        Link(ends=(rank, f"root{idx}"), kind="pcie", bandwidth=PCIE_BANDWIDTH, latency=PCIE_LATENCY)
        for idx, domain in enumerate(domains)
        for rank in domain
    ]
    links += [
        Link(ends=(f"root{i}", f"root{j}"), kind="numa", bandwidth=NUMA_BANDWIDTH, latency=NUMA_LATENCY)
        for j in range(len(domains))
        for i in range(j)
    ]
    return Topology(world_size=sum(sizes), links=tuple(links), levels=(domains,), level_names=("numa",))


def nvlink(world_size: int) -> Topology:
    """All GPUs in one NVLink domain, through switches that block nobody."""
    links = tuple(
        Link(ends=(rank, "nvswitch"), kind="nvlink", bandwidth=NVLINK_BANDWIDTH, latency=NVLINK_LATENCY)
        for rank in range(world_size)
    )
    return Topology(world_size=world_size, links=links)


def cluster(num_nodes: int, ranks_per_node: int, nodes_per_rack: int = 0) -> Topology:
    """Nodes of GPUs on NVLink, each GPU with a network port of its own into one fabric that blocks nobody. With
    ``nodes_per_rack``, racks are a level of their own and their uplinks carry half of what their ports do."""
    world_size = num_nodes * ranks_per_node
    nodes = partition([ranks_per_node] * num_nodes)
    links, levels, names = [], [nodes], ["node"]
    for node, ranks in enumerate(nodes):
        rack = f"rack{node // nodes_per_rack}" if nodes_per_rack else "fabric"
        for rank in ranks:
            links.append(
                Link(ends=(rank, f"node{node}"), kind="nvlink", bandwidth=NVLINK_BANDWIDTH, latency=NVLINK_LATENCY)
            )
            links.append(Link(ends=(rank, rack), kind="network", bandwidth=NETWORK_BANDWIDTH, latency=NETWORK_LATENCY))
    if nodes_per_rack:
        ranks_per_rack = nodes_per_rack * ranks_per_node
        uplink = NETWORK_BANDWIDTH * ranks_per_rack / 2
        levels.append(partition([ranks_per_rack] * (world_size // ranks_per_rack)))
        names.append("rack")
        links += [
            Link(ends=(f"rack{rack}", "spine"), kind="spine", bandwidth=uplink, latency=NETWORK_LATENCY)
            for rack in range(world_size // ranks_per_rack)
        ]
    return Topology(world_size=world_size, links=tuple(links), levels=tuple(levels), level_names=tuple(names))


MACHINES = {
    "8 = 2 x 4 PCIe": pcie((4, 4)),
    "8 NVLink": nvlink(8),
    "15 = 3 x 5 PCIe": pcie((5, 5, 5)),
    "2 nodes x 8": cluster(2, 8),
    "7 PCIe": pcie((7,)),
    "72 NVLink": nvlink(72),
}
"""Example machines for ``symmcomm plan`` and the tests, by name."""
