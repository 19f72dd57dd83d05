"""Plans as tables and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from symmcomm.schedule.cost import FabricLevel, Ranked, Scaling, scaling
from symmcomm.schedule.machines import NETWORK_BANDWIDTH, NETWORK_LATENCY, NVLINK_BANDWIDTH, NVLINK_LATENCY
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.topology import Topology

_COLORS = {
    "nvlink": "#0aa574", "memory": "#0aa574", "pcie": "#0b6e99", "numa": "#e07a1f", "network": "#b5446e",
    "spine": "#7a4fb5",
}  # fmt: skip
_OTHER = "#9aa0a6"
_MOST_WITH_TEXT = 16
_PER_NODE, _PER_RACK = 8, 8


def ranking(ranked: Sequence[Ranked]) -> Table:
    """One line a plan, the fastest first."""
    found = Table(box=None, pad_edge=False)
    found.add_column("plan")
    for name in ("time (us)", "/ best", "busiest link", "segments on it", "waits"):
        found.add_column(name, justify="right")
    for entry in ranked:
        cost = entry.cost
        found.add_row(
            entry.plan.name, f"{cost.seconds * 1e6:.1f}", f"{cost.seconds / ranked[0].cost.seconds:.2f}x",
            cost.bottleneck, f"{cost.segments:g}", str(cost.num_rounds),
        )  # fmt: skip
    return found


def ranking_json(ranked: Sequence[Ranked]) -> list[dict[str, Any]]:
    """The same, for a file."""
    return [
        {"plan": entry.plan.name, "mode": entry.mode.name, "us": entry.cost.seconds * 1e6,
         "busiest_link": entry.cost.bottleneck, "segments_on_it": entry.cost.segments, "waits": entry.cost.num_rounds}
        for entry in ranked
    ]  # fmt: skip


def scaled(num_bytes: int) -> list[tuple[int, str, Scaling]]:
    """(ranks, extents, times) of reduce-scatters on a modelled cluster: nodes of 8 GPUs on NVLink, a network port a
    GPU; in two levels, and in three with racks of 8 nodes whose uplinks carry half of what their ports do."""
    found = []
    node = FabricLevel(dim=_PER_NODE, bandwidth=NVLINK_BANDWIDTH, latency=2 * NVLINK_LATENCY)
    for num_nodes in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        size = _PER_NODE * num_nodes
        fabric = FabricLevel(dim=num_nodes, bandwidth=NETWORK_BANDWIDTH, latency=2 * NETWORK_LATENCY)
        found.append((size, f"8 x {num_nodes}", scaling([node, fabric], num_bytes)))
        if num_nodes > _PER_RACK:
            rack = FabricLevel(dim=_PER_RACK, bandwidth=NETWORK_BANDWIDTH, latency=2 * NETWORK_LATENCY)
            spine = FabricLevel(
                dim=num_nodes // _PER_RACK, bandwidth=NETWORK_BANDWIDTH / 2, latency=4 * NETWORK_LATENCY, above=True
            )
            found.append((size, f"8 x 8 x {num_nodes // _PER_RACK}", scaling([node, rack, spine], num_bytes)))
    return found


def scaling_table(rows: Sequence[tuple[int, str, Scaling]]) -> Table:
    """One line a world."""
    found = Table(box=None, pad_edge=False)
    for name in ("ranks", "extents", "rings (us)", "flat ring (us)", "bound (us)", "rings / bound"):
        found.add_column(name, justify="right")
    for size, extents, times in rows:
        figures = (f"{seconds * 1e6:.0f}" for seconds in times)
        found.add_row(str(size), extents, *figures, f"{times.rings / times.bound:.2f}")
    return found


def draw(plan: Plan, topology: Topology, title: str, path: Path) -> None:
    """Writes a figure: ranks down, rounds across, a box for each message that the rank sends then, coloured by the
    narrowest link on its way; in it the segment and, after the arrow, who gets it. Needs matplotlib (extra: plot)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    size, rounds = plan.world_size, plan.num_rounds - 1
    figure = Figure(figsize=(max(5, 1.7 * rounds + 1.5), max(3, 0.55 * size + 1)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    at: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for rank, step in plan.messages():
        label = f"{step.segment}→{step.target}"
        at.setdefault((rank, step.round), []).append((topology.kind(rank, step.target), label))
    for (rank, round_), messages in at.items():
        width = 0.94 / len(messages)
        for idx, (kind, label) in enumerate(messages):
            left = round_ + 0.03 + idx * width
            axes.add_patch(Rectangle((left, rank + 0.1), width * 0.95, 0.8, color=_COLORS.get(kind, _OTHER)))
            if size <= _MOST_WITH_TEXT and len(messages) <= 4:
                axes.text(left + width * 0.475, rank + 0.5, label, ha="center", va="center", color="white", fontsize=7)
    kinds = sorted({kind for messages in at.values() for kind, _ in messages})
    handles = [Patch(color=_COLORS.get(kind, _OTHER), label=kind) for kind in kinds]
    axes.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlim(0, rounds)
    axes.set_ylim(size, 0)
    axes.set_xticks([r + 0.5 for r in range(rounds)], [str(r) for r in range(rounds)])
    axes.set_yticks([r + 0.5 for r in range(size)], [str(r) for r in range(size)])
    for group in topology.levels[0][1:] if topology.levels else ():
        axes.axhline(min(group), color="#555555", lw=0.8)
    axes.set_xlabel("round")
    axes.set_ylabel("rank")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
