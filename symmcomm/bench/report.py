"""What a run says: nccl-tests' columns as a table, and every figure as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table
from rich.text import Text

import symmcomm
from symmcomm.bench.case import Case, Collective
from symmcomm.bench.floor import Floor
from symmcomm.bench.implementations import OWN
from symmcomm.bench.method import ON_CPUS, Method
from symmcomm.bench.timer import Answer
from symmcomm.bench.timing import Measurement

_PACKAGES = (
    "torch", "numba", "numpy", "mpi4py", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "nvshmem4py-cu13",
)
GPU_FACTS = ("gpu", "uuid", "num_sms", "memory_bytes", "l2_bytes")
"""What a rank says about its GPU."""


@dataclass(kw_only=True)
class Report:
    """All measurements of a run, case by case.

    Attributes:
        floor: limits that were measured in the same run; ``None`` on CPUs.
        notes: what the reader should know, such as a peer that is missing.
    """

    command: list[str]
    machine: dict[str, Any]
    versions: dict[str, str]
    rounds: int
    measurements: list[list[Measurement]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    method: Method = ON_CPUS
    floor: Floor | None = None

    def learn(self, answers: Sequence[Answer]) -> None:
        """Takes in what the ranks say about their GPUs, if they have any."""
        for answer in answers:
            if "gpu" in answer:
                self.machine.setdefault("gpus", []).append({key: answer[key] for key in GPU_FACTS})
                self.versions |= answer["versions"]

    @property
    def place(self) -> str:
        """The ranks, and what they run on."""
        gpus: list[dict[str, Any]] = self.machine.get("gpus", [])
        if not gpus:
            where = f"{self.machine['usable_cores']} cores of {self.machine['cpu']}"
        else:
            names = Counter({gpu["uuid"]: gpu["gpu"] for gpu in gpus}.values())
            where = ", ".join(f"{number} x {name}" for name, number in names.items()) + f", {self.method}"
        return f"{self.machine['ranks']} ranks on {where}"

    @property
    def right(self) -> bool:
        """Whether no result of symmcomm's own was wrong."""
        return not any(m.wrong for row in self.measurements for m in row if m.implementation in OWN)

    def to_json(self) -> dict[str, Any]:
        """Times in microseconds, bandwidths in GB/s."""
        return {
            "command": self.command, "machine": self.machine, "versions": self.versions, "rounds": self.rounds,
            "method": json.loads(self.method.to_json()),
            "floor": asdict(self.floor) if self.floor else None,
            "notes": [*self.notes, *refusals(self.measurements)],
            "results": [_result(m, row, self.floor) for row in self.measurements for m in row],
        }


def _result(m: Measurement, row: Sequence[Measurement], floor: Floor | None) -> dict[str, Any]:
    return {
        **m.case.to_json(), "count": m.case.count, "implementation": m.implementation, "time_us": m.time_us,
        "algbw": m.algbw, "busbw": m.busbw, "wrong": m.wrong, "refusal": m.refusal, "iterations": m.iterations,
        "round_us": m.round_us, "host_us": m.host_us, "floor_us": floor.us(m.case) if floor else None,
        "ratio": ratios(m, row),
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


def table(measurements: Sequence[Sequence[Measurement]], floor: Floor | None = None) -> Table:
    """One line an implementation, one section a size. ``/ symm`` is the peer's time over ours, ``/ floor`` the time
    over the floor; ``host`` is there where it was measured."""
    owns = list(dict.fromkeys(m.implementation for row in measurements for m in row if m.implementation in OWN))
    hosts = any(m.round_host_us for row in measurements for m in row)
    result = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in ("size (B)", "count"):
        result.add_column(name, justify="right", no_wrap=True)
    for name in ("type", "redop", ""):
        result.add_column(name, no_wrap=True)
    more = [*(["host (us)"] if hosts else []), "#wrong", *(["/ floor"] if floor else []), *(f"/ {own}" for own in owns)]
    for name in ("time (us)", "algbw (GB/s)", "busbw (GB/s)", *more):
        result.add_column(name.replace(" (", "\n("), justify="right", no_wrap=True)
    for row in measurements:
        for position, m in enumerate(row):
            own = m.implementation in OWN
            shown = [m.time_us, m.algbw, m.busbw, *([m.host_us] if hosts else [])]
            ratio = ratios(m, row)
            result.add_row(
                *(Text(cell, style="bold") for cell in (_case_cells(m.case) if position == 0 else [""] * 4)),
                *(Text(cell, style="cyan" if own else "") for cell in (m.implementation, *map(figure, shown))),
                Text("n/a" if m.wrong is None else str(m.wrong), style="bold red" if m.wrong else ""),
                *([_over_floor(m, floor)] if floor else []),
                *(_ratio_cell(ratio.get(name)) for name in owns),
                end_section=position == len(row) - 1 and len(row) > 1,
            )
    return result


def _over_floor(m: Measurement, floor: Floor) -> Text:
    return Text(f"{m.time_us / floor.us(m.case):.2f}" if m.time_us else "")


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
