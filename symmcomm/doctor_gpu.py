"""What ``symmcomm doctor`` says about GPUs: each device, how they reach each other, and which way to share memory ranks
would take, one on each of them. Everything is tried but NVLink multicast, for which the one gate is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from symmcomm.env import Settings
from symmcomm.probe_gpu import gpu_probes, probe_driver, probe_facts
from symmcomm.schedule.topology_gpu import (
    Attempt,
    GpuFacts,
    decide_devices,
    decide_links,
    decide_multicast,
    decide_provider,
)

_SHOWN = ("ordinal", "name", "uuid", "compute_capability", "num_sms", "total_bytes", "numa_node", "mig", "links")


@dataclass(frozen=True)
class GpuDiagnosis:
    """What was found: facts of each GPU, and what was tried or decided, by name."""

    facts: Sequence[GpuFacts]
    attempts: dict[str, Attempt]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of strings and numbers."""
        devices = [{name: asdict(fact)[name] for name in _SHOWN} for fact in self.facts]
        return {"devices": devices, "reach": reach(self.facts)}


def examine_gpus(settings: Settings) -> GpuDiagnosis:
    """Tries everything on every GPU that this process sees. Opens a context on each; never raises."""
    driver = probe_driver()
    facts = [probe_facts(ordinal, settings) for ordinal in range(torch.cuda.device_count())] if driver.works else []
    return GpuDiagnosis(facts, {"CUDA driver": driver} | gpu_probes(facts) | chosen_path(facts, settings))


def chosen_path(facts: Sequence[GpuFacts], settings: Settings) -> dict[str, Attempt]:
    """What a rank on each of these GPUs would decide, and why not otherwise. Pure."""
    if not facts:
        return {}
    devices = decide_devices(facts, settings.share_gpu)
    if not devices.works:
        return {"GPU ranks": devices}
    choice = decide_provider(facts, settings.gpu_memory)
    found = {"GPU ranks": devices, "GPU memory": Attempt(choice.provider is not None, choice.reason)}
    if choice.provider is not None:
        found |= {f"GPU memory by {name}": Attempt(False, reason) for name, reason in choice.refused}
    if len(facts) > 1:
        found["NVLink"] = decide_links(facts)
    return found | {"NVLink multicast": decide_multicast(facts, choice)}


def reach(facts: Sequence[GpuFacts]) -> list[list[str]]:
    """How the row's GPU reaches the column's: ``NV18`` over 18 NVLinks, ``P2P`` in another way, ``no``, ``?``."""

    def way(fact: GpuFacts, other: GpuFacts) -> str:
        attempt = fact.peers.get(other.uuid)
        if fact.uuid == other.uuid:
            return "-"
        if attempt is None:
            return "?"
        links = fact.links.get(other.uuid)
        return "no" if not attempt.works else f"NV{links}" if links else "P2P"

    return [[way(fact, other) for other in facts] for fact in facts]


def reach_table(facts: Sequence[GpuFacts]) -> Table:
    """``reach`` for a terminal."""
    table = Table("", *(f"GPU {fact.ordinal}" for fact in facts), title="peer to peer", title_justify="left", box=None)
    for fact, row in zip(facts, reach(facts), strict=True):
        table.add_row(f"GPU {fact.ordinal}, {fact.name}", *row)
    return table
