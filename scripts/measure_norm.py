"""All-reduce, residual and RMSNorm in one kernel against the calls one after the other, on the CPU.

    python scripts/measure_norm.py --json scripts/results/cpu_norm.json

``unfused`` is our all_reduce, torch's addition and ``torch.nn.functional.rms_norm``, ``compiled`` the same with the
last two through torch.compile, each on ordinary and on symmetric (``heap``) inputs. ``sharded`` is
``reduce_scatter_rms_norm_all_gather`` against our reduce_scatter_tensor, addition, rms_norm, all_gather_into_tensor.

Every form is checked against float64 before it is timed. A round is a barrier, then so many calls that it takes
20 ms on the slower rank; the forms take turns, in the reverse order every other time; the figure is the median over the
rounds of the slower rank, in microseconds a call. One torch thread a rank. Buffers hold zeros while they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import rms_norm

sys.path.insert(0, str(Path(__file__).parents[1]))

import symmcomm
from symmcomm.bench.machine import hardware
from symmcomm.fused.norm import all_reduce_rms_norm, reduce_scatter_rms_norm_all_gather
from symmcomm.testing.spawn import run_ranks

EPS, ROUND_S, NUM_RANKS = 1e-5, 0.02, 2
Form = Callable[[], torch.Tensor]


def _forms(
    comm: symmcomm.Communicator, rows: int, hidden: int, dtype: torch.dtype, compiled: bool
) -> tuple[dict[str, Form], list[torch.Tensor]]:
    """The forms, which return all rows normalised, and their tensors: inputs, residual, weight."""
    ordinary, heap = torch.zeros(rows, hidden, dtype=dtype), comm.empty(rows, hidden, dtype=dtype)
    residual, weight = torch.zeros(rows, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    part = torch.zeros(rows // comm.world_size, hidden, dtype=dtype)
    own = residual[comm.rank * len(part) :][: len(part)]

    def add_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms_norm(total, (hidden,), weight, EPS), total

    def unfused(x: torch.Tensor, norm: Any) -> Form:
        def run() -> torch.Tensor:
            comm.all_reduce(x)
            return norm(x, residual)[0]

        return run

    def fused(x: torch.Tensor) -> Form:
        return lambda: all_reduce_rms_norm(comm, x, residual, weight, EPS)[0]

    def sharded() -> torch.Tensor:
        comm.reduce_scatter_tensor(part, ordinary)
        normalised, out = add_norm(part, own)[0], torch.empty_like(ordinary)
        comm.all_gather_into_tensor(out, normalised)
        return out

    forms = {"fused": fused(ordinary), "unfused": unfused(ordinary, add_norm), "fused heap": fused(heap),
             "unfused heap": unfused(heap, add_norm)}  # fmt: skip
    if compiled:
        norm = torch.compile(add_norm, dynamic=False)
        forms |= {"compiled": unfused(ordinary, norm), "compiled heap": unfused(heap, norm)}
    if rows >= comm.world_size:
        fused_sharded = reduce_scatter_rms_norm_all_gather
        forms |= {"fused sharded": lambda: fused_sharded(comm, ordinary, own, weight, EPS)[0]}
        forms |= {"unfused sharded": sharded}
    return forms, [ordinary, heap, residual, weight]


def _check(comm: symmcomm.Communicator, form: Form, tensors: list[torch.Tensor]) -> float:
    """Largest error against float64, in units of the largest that rounding each intermediate result can cause."""
    *inputs, residual, weight = tensors
    drawn = [torch.randn(residual.shape, generator=torch.Generator().manual_seed(s)) for s in range(comm.world_size)]
    rounded = [one.to(residual.dtype) for one in drawn]
    for tensor in inputs:
        tensor.copy_(rounded[comm.rank])
    residual.copy_(rounded[0])
    weight.fill_(1.5)
    total = sum(one.double() for one in rounded) + residual.double()
    expected = rms_norm(total, (weight.numel(),), weight.double(), EPS)
    error = (form().double() - expected).abs().max() / expected.abs().max()
    for tensor in (*inputs, residual):
        tensor.zero_()
    return float(error / (2 * torch.finfo(residual.dtype).eps))


def _round_s(comm: symmcomm.Communicator, form: Form, num_calls: int) -> float:
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(num_calls):
        form()
    return (time.perf_counter() - begin) / num_calls


def _slowest(comm: symmcomm.Communicator, seconds: float) -> float:
    slowest = torch.tensor([seconds])
    comm.all_reduce(slowest, "max")
    return float(slowest)


def _rank(cases: list[tuple[int, int, str]], num_rounds: int, compiled: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found = []
    with symmcomm.init() as comm:
        for rows, hidden, dtype in cases:
            forms, tensors = _forms(comm, rows, hidden, getattr(torch, dtype), compiled)
            calls, times = {}, {name: [] for name in forms}
            for name, form in forms.items():
                error = _slowest(comm, _check(comm, form, tensors))
                if not error <= 1:
                    raise AssertionError(f"{name}: wrong result, {error} of what rounding explains")
                _round_s(comm, form, 3)
                calls[name] = max(3, int(ROUND_S / _slowest(comm, _round_s(comm, form, 3))))
            for turn in range(num_rounds):
                for name in forms if turn % 2 else reversed(forms):
                    times[name].append(1e6 * _slowest(comm, _round_s(comm, forms[name], calls[name])))
            medians = {name: statistics.median(values) for name, values in times.items()}
            found.append({"rows": rows, "hidden": hidden, "dtype": dtype, "us": medians, "rounds_us": times})
            comm.free(tensors[1])
    return found


def _table(results: list[dict[str, Any]]) -> str:
    kinds = ["", " heap", " sharded"]
    lines = ["| dtype, rows × hidden | fused | unfused / fused | compiled / fused | heap | unfused / fused "
             "| compiled / fused | sharded | unfused / fused |", "|---|" + "---|" * 8]  # fmt: skip
    for result in results:
        us, cells = result["us"], [f"{result['dtype']}, {result['rows']} × {result['hidden']}"]
        for kind in kinds:
            fused = us.get(f"fused{kind}")
            cells.append("–" if fused is None else f"{fused:.1f}")
            for other in ("unfused", "compiled") if kind != " sharded" else ("unfused",):
                value = us.get(other + kind)
                cells.append("–" if value is None or fused is None else f"{value / fused:.2f}×")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,128,1024")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile'd addition and norm")
    parser.add_argument("--json", help="file for the figures of every round")
    options = parser.parse_args()
    dtypes, rows = options.dtypes.split(","), [int(each) for each in options.rows.split(",")]
    cases = [(each, options.hidden, dtype) for dtype in dtypes for each in rows]
    results = run_ranks(_rank, NUM_RANKS, cases, options.rounds, options.compiled, timeout_s=1200)[0].value
    print(_table(results))
    if options.json:
        facts = {"machine": hardware(), "torch": torch.__version__, "numpy": np.__version__, "ranks": NUM_RANKS}
        Path(options.json).write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
