"""What all ranks must have alike before they share memory, and where they run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable

import torch

from symmcomm.discovery import cpu_topology, numa_node
from symmcomm.env import Settings
from symmcomm.errors import MismatchError, TopologyError
from symmcomm.schedule.topology import Topology, load_topology

_VERSION = 2  # of the layout and the protocols in shared memory


def agree(
    rank: int, world_size: int, settings: Settings, topology: Topology | None, with_gpu: bool,
    all_gather: Callable[[bytes], list[bytes]],
) -> tuple[int, Topology]:  # fmt: skip
    """Compares what ranks must have alike; returns how many cores the ranks share, and what joins them. Pins this rank
    if asked to."""
    cores = sorted(os.sched_getaffinity(0))
    if topology is None and settings.topology:
        topology = load_topology(settings.topology)
    if topology is not None and topology.world_size != world_size:
        raise TopologyError(f"the topology is for {topology.world_size} ranks, there are {world_size}")
    given = "" if topology is None else hashlib.sha256(json.dumps(topology.to_json()).encode()).hexdigest()[:16]
    mine = {"version": _VERSION, "SYMMCOMM_HEAP_MAX_BYTES": settings.heap_max_bytes, "torch": torch.__version__,
            "SYMMCOMM_STAGING_BYTES": settings.staging_bytes, "SYMMCOMM_SPIN": settings.spin,
            "the topology's checksum": given, "SYMMCOMM_GPU_MEMORY": settings.gpu_memory,
            "SYMMCOMM_SHARE_GPU": settings.share_gpu, "SYMMCOMM_CHECK": settings.check,
            "device": "cuda" if with_gpu else "cpu"}  # fmt: skip
    answers = [json.loads(answer) for answer in all_gather(json.dumps([mine, cores]).encode())]
    for peer, (theirs, _) in enumerate(answers):
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise MismatchError(f"{name} is {value} on rank {rank}, {theirs.get(name)} on rank {peer}")
    shared = sorted({core for _, theirs in answers for core in theirs})
    if settings.pin and len(cores) > 1:
        os.sched_setaffinity(0, {shared[rank % len(shared)]})
    if topology is None:
        held = [[shared[peer % len(shared)]] if settings.pin else answers[peer][1] for peer in range(world_size)]
        topology = cpu_topology([numa_node(theirs) for theirs in held])
    return len(shared), topology
