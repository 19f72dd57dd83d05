"""A contest of ``symmcomm tune`` on a fake GPU: who is timed under which threshold, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symmcomm.schedule.select import NEVER
from symmcomm.schedule.select_gpu import DEFAULT, Thresholds
from symmcomm.schedule.topology_gpu import Attempt

pytest.importorskip("cutlass")

import fake_gpu

from symmcomm import init
from symmcomm.bench import tune


class Side(fake_gpu.FakeGpuSide):
    """One that chooses by thresholds."""

    thresholds, multicast_base = DEFAULT, 0
    multicast = SimpleNamespace(allowed=Attempt(False, "rank 1: forbidden by NCCL_NVLS_ENABLE=0"))

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

        def call() -> None:
            seen.append((size, side.thresholds.gather_push_bytes))
            assert side.thresholds.multimem_bytes == NEVER, "the switch would serve both"

        return call, tensor

    side.thresholds = replace(DEFAULT, multimem_bytes=8192)  # of an earlier run
    contest = tune.Contest(field="gather_push_bytes", small_first=False, sizes=(4096, 1 << 30), prepare=prepare)
    monkeypatch.setattr(tune, "CONTESTS", (contest,))
    lines: list[str] = []
    found = tune.tune(comm, 2, lines.append)
    assert found.gather_push_bytes == side.thresholds.gather_push_bytes
    assert found.multimem_bytes == 8192
    assert len(lines) == 2
    for size, num_calls in ((4096, 40), (1 << 30, 2)):
        for threshold in (1 << 62, 0):
            assert seen.count((size, threshold)) == 1 + num_calls, "once, to load it, and in one graph"
    comm.close()


@pytest.mark.parametrize("base", [0, 1 << 40])
def test_the_switch_is_measured_only_where_it_can_be_used(base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(tune, "torch", fake_gpu.FakeTorch())
    comm = init()
    comm.gpu = side = Side(comm)  # type: ignore[assignment]
    side.multicast_base = base
    seen: list[int] = []
    (contest,) = (each for each in tune.CONTESTS if each.multicast)
    call = lambda: seen.append(side.thresholds.multimem_bytes)
    monkeypatch.setattr(tune, "CONTESTS", (replace(contest, sizes=(4096,), prepare=lambda *_: (call, None)),))
    lines: list[str] = []
    found = tune.tune(comm, 2, lines.append)
    if base:
        assert set(seen) == {0, NEVER}
        assert found.multimem_bytes in (4096, NEVER)
    else:
        assert lines == ["      multimem_bytes not measured: rank 1: forbidden by NCCL_NVLS_ENABLE=0"]
        assert (seen, found) == ([], DEFAULT)
    comm.close()
