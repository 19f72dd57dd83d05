"""A contest of ``symmcomm tune`` on a fake GPU: who is timed under which threshold, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from symmcomm.schedule.select_gpu import DEFAULT, Thresholds

pytest.importorskip("cutlass")

import fake_gpu

from symmcomm import init
from symmcomm.bench import tune


class Side(fake_gpu.FakeGpuSide):
    """One that chooses by thresholds."""

    thresholds = DEFAULT

    def set_thresholds(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds


def test_both_kernels_are_captured_and_the_thresholds_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(tune, "torch", fake_gpu.FakeTorch())
    comm = init()
    comm.gpu = side = Side(comm)  # type: ignore[assignment]
    seen: list[tuple[int, int]] = []

    def prepare(_: Any, size: int) -> Any:
        tensor: torch.Tensor | None = None
        return lambda: seen.append((size, side.thresholds.gather_push_bytes)), tensor

    contest = tune.Contest(field="gather_push_bytes", small_first=False, sizes=(4096, 1 << 30), prepare=prepare)
    monkeypatch.setattr(tune, "CONTESTS", (contest,))
    lines: list[str] = []
    found = tune.tune(comm, 2, lines.append)
    assert found.gather_push_bytes == side.thresholds.gather_push_bytes
    assert len(lines) == 2
    for size, num_calls in ((4096, 40), (1 << 30, 2)):
        for threshold in (1 << 62, 0):
            assert seen.count((size, threshold)) == 1 + num_calls, "once, to load it, and in one graph"
    comm.close()
