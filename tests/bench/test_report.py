"""Tables, ratios, JSON and plot, from figures made up here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.floor import Floor
from symmcomm.bench.method import Device, Method, Timing
from symmcomm.bench.plot import bytes_text, plot
from symmcomm.bench.report import Report, figure, ratios, refusals, table
from symmcomm.bench.timing import Measurement
from symmcomm.schedule.dtypes import DType, Op

FLOOR = Floor(launch_us=1, signal_us=2, bandwidth=524.288)


def row(size_bytes: int = 1 << 20, wrong: int = 0) -> list[Measurement]:
    case = Case(
        collective=Collective.all_reduce, size_bytes=size_bytes, dtype=DType.bfloat16, op=Op.sum, world_size=4
    )
    return [
        Measurement(implementation="symm", case=case, wrong=0, iterations=9, round_us=[90.0, 100.0, 500.0]),
        Measurement(implementation="symm_heap", case=case, wrong=wrong, round_us=[] if wrong else [50.0]),
        Measurement(implementation="gloo", case=case, wrong=0, round_us=[1000.0]),
        Measurement(implementation="openmpi", case=case, refusal="no bfloat16"),
    ]


def report(rows: list[list[Measurement]]) -> Report:
    return Report(
        command=["symmcomm"], machine={"cpu": "some"}, versions={"torch": "2.13.0"}, rounds=3, measurements=rows
    )


def test_figures_of_a_measurement() -> None:
    symm = row()[0]
    assert symm.time_us == 100, "the median of the rounds"
    assert symm.algbw == pytest.approx((1 << 20) / 100e-6 / 1e9)
    assert symm.busbw == pytest.approx(1.5 * (1 << 20) / 100e-6 / 1e9)


def test_ratios_are_the_peers_time_over_ours() -> None:
    measurements = row()
    assert ratios(measurements[2], measurements) == {"symm": 10, "symm_heap": 20}
    assert ratios(measurements[0], measurements) == {}
    assert ratios(measurements[3], measurements) == {}
    assert ratios(row(wrong=3)[2], row(wrong=3)) == {"symm": 10}, "nothing is compared with a wrong result"


def test_table_has_the_columns_of_nccl_tests() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table([row(), row(1 << 21)]))
    text = console.export_text()
    for name in ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "/ symm", "/ symm_heap"):
        assert name in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1048576", "524288", "bfloat16", "sum", "symm", "100.0", "10.49", "15.73", "0"] in lines
    assert ["gloo", "1000", "1.05", "1.57", "0", "10.00x", "20.00x"] in lines
    assert ["openmpi", "n/a", "n/a", "n/a", "n/a"] in lines


def test_refusals_are_said_once() -> None:
    assert refusals([row(), row(1 << 21)]) == ["openmpi: n/a, no bfloat16"]


def test_a_wrong_result_of_ours_is_noticed() -> None:
    assert report([row()]).right
    assert not report([row(), row(wrong=3)]).right


def test_json_holds_every_figure() -> None:
    content = json.loads(json.dumps(report([row()]).to_json()))
    gloo = content["results"][2]
    assert (gloo["implementation"], gloo["time_us"], gloo["ratio"]) == ("gloo", 1000, {"symm": 10, "symm_heap": 20})
    assert content["results"][0]["round_us"] == [90, 100, 500]
    assert content["results"][3]["refusal"] == "no bfloat16"
    assert content["notes"] == ["openmpi: n/a, no bfloat16"]


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    plot([row(1024), row(1 << 20)], "all_reduce", path, FLOOR)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_floor_and_host_time_have_columns_where_they_were_measured() -> None:
    measurements = row()
    measurements[0].round_host_us = [7.0, 8.0, 9.0]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table([measurements], FLOOR))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["1048576", "524288", "bfloat16", "sum", "symm", "100.0", "10.49", "15.73", "8.00", "0", "16.67"] in lines
    assert ["gloo", "1000", "1.05", "1.57", "n/a", "0", "166.67", "10.00x", "20.00x"] in lines


def test_json_of_a_run_on_gpus() -> None:
    run = report([row()])
    run.method, run.floor = Method(device=Device.cuda, timing=Timing.graph), FLOOR
    run.machine = {"ranks": 2}
    facts = {"num_sms": 132, "memory_bytes": 1, "l2_bytes": 1, "versions": {"nccl": "2.28.9"}}
    run.learn([{"gpu": "H200", "uuid": "a", **facts}, {"gpu": "H200", "uuid": "b", **facts}])
    assert run.place == "2 ranks on 2 x H200, CUDA graphs"
    run.learn([{"gpu": "H200", "uuid": "b", **facts}])
    assert run.place == "2 ranks on 2 x H200, CUDA graphs", "a GPU counts once"
    content = json.loads(json.dumps(run.to_json()))
    assert content["floor"] == {"launch_us": 1, "signal_us": 2, "bandwidth": 524.288}
    assert content["results"][0]["floor_us"] == pytest.approx(1 + 2 + 1.5 * (1 << 20) / 524.288e3)
    assert content["method"]["timing"] == "graph"
    assert content["versions"]["nccl"] == "2.28.9"


@pytest.mark.parametrize(("value", "text"), [(None, "n/a"), (1.234, "1.23"), (123.45, "123.5"), (12345.6, "12346")])
def test_figure(value: float | None, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (3 << 30, "3 GiB")]
)
def test_bytes_text(size: int, text: str) -> None:
    assert bytes_text(size) == text
