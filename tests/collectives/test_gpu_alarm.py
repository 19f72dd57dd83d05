"""When a GPU's waits are cut short: with the driver faked, and real processes to die."""

from __future__ import annotations

import ctypes
import subprocess
import time
from types import SimpleNamespace
from typing import Any

from symmcomm.collectives.gpu_alarm import Alarm
from symmcomm.memory.status import Fate, Report, StatusPage

ADDRESS = 1234


class Device:
    """Notes what is written where."""

    driver = SimpleNamespace(CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1))

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def call(self, name: str, *args: Any) -> Any:
        if name == "cuMemcpyHtoDAsync":
            address, source, size, _ = args
            assert size == 8
            self.written.append((address, ctypes.c_int64.from_address(source).value))
        return 7

    undo = call

    def is_written(self, within_s: float) -> bool:
        end = time.monotonic() + within_s
        while not self.written and time.monotonic() < end:
            time.sleep(0.01)
        return bool(self.written)


def make(pids: list[int]) -> tuple[Alarm, Device, list[StatusPage]]:
    memory = [ctypes.create_string_buffer(4096) for _ in pids]
    pages = [StatusPage(ctypes.addressof(each)) for each in memory]
    device = Device()
    alarm = Alarm(0, pids, pages, device, ADDRESS, memory)  # type: ignore[arg-type]
    return alarm, device, pages


def test_a_process_that_dies() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        alarm, device, _ = make([0, process.pid])
        assert not device.is_written(0.2)
        process.kill()
        assert device.is_written(2.0)
    assert device.written[0] == (ADDRESS, -1)
    alarm.close()
    alarm.close()
    assert not alarm._thread.is_alive()


def test_a_process_that_is_gone_already_or_cannot_be_seen() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    alarm, device, _ = make([0, process.pid])
    assert device.is_written(2.0)
    alarm.close()
    alarm, device, _ = make([0, 0])
    assert not device.is_written(0.2)
    alarm.close()


def test_a_rank_that_gave_up_and_one_that_closed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        alarm, device, pages = make([0, process.pid, 0])
        pages[1].stop(Report(Fate.CLOSED, -1, 0, ""))
        process.kill()
        process.wait()
        assert not device.is_written(0.7)
        pages[2].stop(Report(Fate.RAISED, 2, 0, "why"))
        assert device.is_written(2.0)
        alarm.close()
