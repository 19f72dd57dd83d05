"""What the copy engines are asked to do, and in which order, with nothing but names in place of the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from symmcomm.errors import CudaError

pytest.importorskip("cutlass")

from symmcomm.kernels.gpu import copy_engine

BASE, STRIDE, STREAM, BESIDE = 1 << 40, 1 << 30, 11, 12


class Driver:
    """Notes calls; ``refuses`` is the function that fails."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = refuses
        self.events = iter(("fork", "join"))

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.refuses:
                return (SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED"),)
            if name == "cuEventCreate":
                return (0, next(self.events))
            return (0, BESIDE) if name == "cuStreamCreate" else (0,)

        return function


def engine(monkeypatch: pytest.MonkeyPatch, driver: Driver, world_size: int) -> copy_engine.AllGatherCopyEngine:
    monkeypatch.setattr(copy_engine, "load_driver", lambda: driver)
    monkeypatch.setattr(copy_engine, "compiled", lambda *_: lambda *a: driver.calls.append(("barrier", a[2], a[-1])))
    made = copy_engine.AllGatherCopyEngine(world_size, "sm_90a", 90)
    driver.calls.clear()
    return made


def place(peer: int, offset: int) -> int:
    return BASE + peer * STRIDE + offset


def test_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    engine(monkeypatch, driver, 3)(BASE, STRIDE, 1, 5000, 100, 4096, 100, 100, -1, STREAM)
    assert driver.calls == [
        ("barrier", 1, STREAM),
        ("cuEventRecord", "fork", STREAM),
        ("cuStreamWaitEvent", BESIDE, "fork", 0),
        ("cuMemcpyDtoDAsync", place(1, 4196), 5100, 100, BESIDE),
        ("cuEventRecord", "join", BESIDE),
        ("cuMemcpyDtoDAsync", place(2, 4196), 5200, 100, STREAM),
        ("cuMemcpyDtoDAsync", place(0, 4196), 5000, 100, STREAM),
        ("cuStreamWaitEvent", STREAM, "join", 0),
        ("barrier", 1, STREAM),
    ]


def test_all_gather_in_place_copies_nothing_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    engine(monkeypatch, driver, 2)(BASE, STRIDE, 1, place(1, 4196), 0, 4096, 100, 100, -1, STREAM)
    copy = ("cuMemcpyDtoDAsync", place(0, 4196), place(1, 4196), 100, STREAM)
    assert driver.calls == [("barrier", 1, STREAM), copy, ("barrier", 1, STREAM)]


def test_who_does_not_send_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    engine(monkeypatch, driver, 2)(BASE, STRIDE, 1, 5000, 0, 4096, 0, 100, 0, STREAM)
    assert driver.calls == [("barrier", 1, STREAM)] * 2


def test_a_refusal_says_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine(monkeypatch, Driver("cuMemcpyDtoDAsync"), 2)
    with pytest.raises(CudaError, match="cuMemcpyDtoDAsync failed: CUDA_ERROR_NOT_SUPPORTED"):
        call(BASE, STRIDE, 0, 5000, 0, 4096, 100, 100, -1, STREAM)
