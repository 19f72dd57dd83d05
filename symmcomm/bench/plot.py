"""Time over size, one line an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from symmcomm.bench.floor import Floor
from symmcomm.bench.implementations import OWN
from symmcomm.bench.timing import Measurement

_COLORS = {
    "symm": "#0b6e99", "symm_heap": "#0aa574", "gloo": "#9aa0a6", "openmpi": "#e07a1f", "mpich": "#b5446e",
    "nccl": "#e07a1f", "nccl_symm": "#b5446e", "torch_one_shot": "#c9a227", "torch_two_shot": "#8d6a9f",
    "nvshmem": "#7a8b99",
}


def plot(
    measurements: Sequence[Sequence[Measurement]], title: str, path: Path, floor: Floor | None = None
) -> None:
    """Writes a figure in the format of ``path``'s suffix; both axes are logarithmic. Needs matplotlib (extra: plot)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = dict.fromkeys(m.implementation for row in measurements for m in row)
    for name in names:
        line = [
            (max(m.case.size_bytes, 1), m.time_us)
            for row in measurements for m in row if m.implementation == name and m.time_us
        ]
        if line:
            width, marker = (2.4, "o") if name in OWN else (1.6, "s")
            axes.plot(*zip(*line, strict=True), marker=marker, ms=4, lw=width, color=_COLORS.get(name), label=name)
    if floor is not None:
        limit = [(max(row[0].case.size_bytes, 1), floor.us(row[0].case)) for row in measurements if row]
        axes.plot(*zip(*limit, strict=True), color="#555555", lw=1.2, ls="--", label="floor")
    sizes = sorted({max(row[0].case.size_bytes, 1) for row in measurements if row})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: max(1, -(-len(sizes) // 12))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_text(size)))
    axes.set_xlabel("size")
    axes.set_ylabel("time (µs)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(which="major", color="#dddddd", lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False)
    figure.savefig(path)


def bytes_text(size: float) -> str:
    """``"64 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
