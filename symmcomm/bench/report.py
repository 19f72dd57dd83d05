"""What a run says: nccl-tests' columns as a table, and every figure as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table
from rich.text import Text

import symmcomm
from symmcomm.bench.case import Case, Collective
from symmcomm.bench.implementations import OWN
from symmcomm.bench.timing import Measurement

_PACKAGES = ("torch", "numba", "numpy", "mpi4py")


@dataclass(kw_only=True)
class Report:
    """All measurements of a run, case by case.

    Attributes:
        notes: what the reader should know, such as a peer that is missing.
    """

    command: list[str]
    machine: dict[str, Any]
    versions: dict[str, str]
    rounds: int
    measurements: list[list[Measurement]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether no result of symmcomm's own was wrong."""
        return not any(m.wrong for row in self.measurements for m in row if m.implementation in OWN)

    def to_json(self) -> dict[str, Any]:
        """Times in microseconds, bandwidths in GB/s."""
        return {
            "command": self.command, "machine": self.machine, "versions": self.versions, "rounds": self.rounds,
            "notes": [*self.notes, *refusals(self.measurements)],
            "results": [_result(m, row) for row in self.measurements for m in row],
        }


def _result(m: Measurement, row: Sequence[Measurement]) -> dict[str, Any]:
    return {
        **m.case.to_json(), "count": m.case.count, "implementation": m.implementation, "time_us": m.time_us,
        "algbw": m.algbw, "busbw": m.busbw, "wrong": m.wrong, "refusal": m.refusal, "iterations": m.iterations,
        "round_us": m.round_us, "ratio": ratios(m, row),
    }


def ratios(m: Measurement, row: Sequence[Measurement]) -> dict[str, float]:
    """A peer's time over that of each of our own on the same case; empty for our own, and where a time is missing."""
    if m.implementation in OWN or m.time_us is None:
        return {}
    return {own.implementation: m.time_us / own.time_us for own in row if own.implementation in OWN and own.time_us}


def refusals(measurements: Sequence[Sequence[Measurement]]) -> list[str]:
    """Who could not run and why, each reason once."""
    reasons = (f"{m.implementation}: n/a, {m.refusal}" for row in measurements for m in row if m.refusal)
    return list(dict.fromkeys(reasons))


def versions() -> dict[str, str]:
    """Of the packages that the figures depend on, where they are installed."""
    found = {"symmcomm": symmcomm.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def table(measurements: Sequence[Sequence[Measurement]]) -> Table:
    """One line an implementation, one section a size. ``/ symm`` is the peer's time over ours."""
    owns = list(dict.fromkeys(m.implementation for row in measurements for m in row if m.implementation in OWN))
    result = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in ("size (B)", "count"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("type", "redop", ""):
        result.add_column(name, no_wrap=True)
    for name in ("time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong", *(f"/ {own}" for own in owns)):
        result.add_column(name.replace(" (", "\n("), justify="right", no_wrap=True)
    for row in measurements:
        for position, m in enumerate(row):
            last = position == len(row) - 1
            result.add_row(*_cells(m, row, owns, first=position == 0), end_section=last and len(row) > 1)
    return result


def _cells(m: Measurement, row: Sequence[Measurement], owns: Sequence[str], *, first: bool) -> list[Text]:
    own = m.implementation in OWN
    case = _case_cells(m.case) if first else ["", "", "", ""]
    wrong = Text("n/a" if m.wrong is None else str(m.wrong), style="bold red" if m.wrong else "")
    shown = [figure(value) for value in (m.time_us, m.algbw, m.busbw)]
    ratio = ratios(m, row)
    return [
        *(Text(cell, style="bold") for cell in case),
        Text(m.implementation, style="cyan" if own else ""),
        *(Text(cell, style="cyan" if own else "") for cell in shown),
        wrong,
        *(_ratio_cell(ratio.get(name)) for name in owns),
    ]


def _case_cells(case: Case) -> list[str]:
    if case.collective is Collective.barrier:
        return ["0", "0", "-", "-"]
    return [str(case.size_bytes), str(case.count), case.dtype.name, case.op.name if case.collective.reduces else "-"]


def _ratio_cell(ratio: float | None) -> Text:
    if ratio is None:
        return Text("")
    return Text(f"{figure(ratio)}x", style="green" if ratio >= 1 else "yellow")


def figure(value: float | None) -> str:
    """Two decimals below 100, one below 1000, none above."""
    if value is None:
        return "n/a"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
