"""Norms on GPUs, alone and fused with collectives, beside NCCL and torch, in one run; a table, and JSON to $OUT.

    PYTHONPATH=. python scripts/gpu_norm.py                    two processes, one GPU each
    PYTHONPATH=. python scripts/gpu_norm.py --world-size 1     one process, one GPU: rows, qk and local

bf16, hidden size 8192 unless ``--hidden`` says otherwise; timed as ``symmcomm bench`` does. ``--parts``:

    rows     RMSNorm beside a copy of the same bytes
    qk       QK-norm beside two RMSNorms
    fused    all-reduce, add, RMSNorm by one kernel, beside NCCL's all-reduce followed by torch.compile'd add and norm,
             flashinfer's kernel if ``--flashinfer`` asks for it (it compiles for minutes before its first use), and our
             all-reduce alone, of symmetric and of ordinary tensors; and TokenWeave's form with few CTAs
    pdl      matrix product, fused norm, matrix product: with and without programmatic dependent launch
    overlap  two halves of a batch: one in a matrix product, the other in the fused kernel on few CTAs
    sweep    our kernels in many shapes, to set schedule/select_norm.py by (not unless asked for)
    local    fused norms of two ranks that share one GPU (in a world of one)
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_norm_alone import local_table, qk_table, rounded, rows_table, say
from gpu_norm_cases import (
    BF16,
    Case,
    FlashInfer,
    Problem,
    direct,
    fused,
    separate,
    shape_name,
    shapes_to_try,
)
from gpu_ranks import Call, Rank, capability, num_sms, on_gpus

from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import Form, RowLaunch

TOKENS = (1, 16, 64, 128, 512, 1024, 2048, 8192)
CTAS = (8, 16, 32, 64)
PARTS = ("rows", "qk", "fused", "pdl", "overlap")
LONE_PARTS = ("rows", "qk", "local")


def checked(
    what: str, makers: dict[str, Callable[[], Case]], problem: Problem, refused: dict[str, str]
) -> dict[str, Call]:
    """The calls of those that are right."""
    rank = problem.rank
    calls: dict[str, Call] = {}
    for name, make in makers.items():
        try:
            case = make()
            right = case.is_right(problem, rank.meet)
        except torch.AcceleratorError:
            print(f"{what} {name}: the GPU failed", flush=True)
            raise
        except Exception as error:  # a peer that does not work here is left out, and said so
            refused[f"{what} {name}"] = f"{type(error).__name__}: {error}"[:300]
            right = False
        if all(rank.gather(right)):
            calls[name] = case.call
        elif f"{what} {name}" not in refused:
            refused[f"{what} {name}"] = "wrong result"
    return calls


def chosen_shape(tokens: int, hidden: int, rank: Rank, scatter: bool = False) -> RowLaunch | None:
    """None: there is no one kernel for it."""
    choose = select_norm.choose_reduce_scatter_norm if scatter else select_norm.choose_all_reduce_norm
    return choose(tokens, hidden, DType.bfloat16, rank.world_size, num_sms(), capability()[1])


def fused_table(
    rank: Rank, hidden: int, refused: dict[str, str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Fused beside separate, by tokens."""
    rows, theirs = [], None
    if arguments.flashinfer and rank.has_nccl:
        try:
            theirs = FlashInfer(rank, 1024, hidden)
        except Exception as error:  # whatever it is: the others are measured
            refused["flashinfer"] = f"{type(error).__name__}: {error}"[:300]
    else:
        refused["flashinfer"] = "not asked for (--flashinfer), or ranks share a GPU"
    if not rank.has_nccl:
        refused["nccl"] = "ranks share a GPU"
    for tokens in TOKENS:
        problem, count = Problem(rank, tokens, hidden), tokens * hidden
        shape = chosen_shape(tokens, hidden, rank)
        name = shape_name(shape) if shape is not None else "no one kernel"
        makers = fused_makers(problem, shape, theirs, not arguments.eager)
        calls = checked(f"{tokens} tokens", makers, problem, refused)
        inside = rank.comm.empty(count, dtype=BF16, device=rank.heap.device).zero_()
        calls["all_reduce"] = partial(rank.comm.all_reduce, inside)
        calls["all_reduce ordinary"] = partial(rank.comm.all_reduce, torch.zeros_like(inside))
        us = rank.measure(calls, arguments.rounds)
        rank.comm.free(inside)
        rows.append({"tokens": tokens, "shape": name, "us": us})
        say(tokens, name, rounded(us))
        del calls, makers, problem
        torch.cuda.empty_cache()
    return rows


def fused_makers(
    problem: Problem, shape: RowLaunch | None, theirs: FlashInfer | None, compile_: bool
) -> dict[str, Callable[[], Case]]:
    """Everybody's fused norms of that many rows."""
    rank, tokens, hidden = problem.rank, problem.tokens, problem.hidden
    makers: dict[str, Callable[[], Case]] = {}
    if rank.has_nccl:
        makers["nccl"] = partial(separate, problem, compile_)
    if shape is not None:
        makers |= {"fused": partial(fused, problem, shape), "fused pdl": partial(fused, problem, shape, pdl=True)}
    staged = select_norm.staged_shape(tokens, hidden, DType.bfloat16, rank.world_size, num_sms())
    if shape is not None and shape.form is Form.lamport and tokens >= 64 and staged is not None:
        makers["fused staged"] = partial(fused, problem, staged)
    scattered = chosen_shape(tokens, hidden, rank, True)
    if scattered is not None:
        makers["reduce_scatter_norm"] = partial(fused, problem, scattered, scatter=True)
    if theirs is not None and tokens <= theirs.most_tokens:
        for oneshot in (True, False) if tokens > rank.world_size else (True,):
            for pdl in (False, True):
                name = f"flashinfer {'one' if oneshot else 'two'}-shot{' pdl' * pdl}"
                makers[name] = partial(theirs.case, problem, oneshot, pdl)
    part = select_norm.part_rows(tokens, rank.world_size)
    for ctas in CTAS if tokens >= 128 else ():
        few = select_norm.direct_shape(part, hidden, DType.bfloat16, rank.world_size, num_sms(), ctas)
        makers[f"weave {ctas}"] = partial(direct, problem, few)
    return makers


def sweep(rank: Rank, hidden: int, refused: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Our fused kernels in every sensible shape."""
    found: dict[str, Any] = {}
    for tokens in arguments.tokens:
        problem = Problem(rank, tokens, hidden)
        makers: dict[str, Callable[[], Case]] = {
            shape_name(shape): partial(fused, problem, shape)
            for shape in shapes_to_try(tokens, hidden, rank.world_size, num_sms())
        }
        us = rank.measure(checked(f"{tokens} tokens", makers, problem, refused), max(3, arguments.rounds // 2))
        found[str(tokens)] = dict(sorted(us.items(), key=lambda item: item[1]))
        best = [f"{name}: {value:.2f}" for name, value in found[str(tokens)].items()]
        say("\n   ".join([f"{tokens} tokens:", *best[:8]]))
        del makers, problem
        torch.cuda.empty_cache()
    return found


def pdl_table(rank: Rank, rounds: int) -> dict[str, Any]:
    """Matrix product, fused norm, matrix product."""
    hidden, found = 8192, {}
    left = torch.zeros(hidden, hidden // rank.world_size, device=rank.heap.device, dtype=BF16)
    for tokens in (1, 16, 64):
        shape = chosen_shape(tokens, hidden, rank)
        assert shape is not None, f"{tokens} rows are few enough for one kernel"
        problem, calls = Problem(rank, tokens, hidden), {}
        inner = torch.zeros(tokens, hidden // rank.world_size, device=rank.heap.device, dtype=BF16)
        for pdl in (False, True):
            case = fused(problem, shape, pdl=pdl)

            def block(case: Case = case, inner: torch.Tensor = inner) -> None:
                torch.mm(inner, left.t(), out=case.source)
                case.call()
                torch.mm(case.output, left, out=inner)

            calls["with pdl" if pdl else "without"] = block
            calls["norm alone, pdl" if pdl else "norm alone"] = case.call
        found[str(tokens)] = us = rank.measure(calls, rounds)
        say(f"PDL {tokens} tokens:", rounded(us))
    return found


@dataclass
class Halves:
    """Two halves of a batch on their way through layers of a matrix product and the fused kernel."""

    cases: list[Case]
    inputs: list[torch.Tensor]
    factor: torch.Tensor
    beside: torch.cuda.Stream
    layers: int = 4

    def product(self, half: int) -> None:
        torch.mm(self.inputs[half], self.factor, out=self.cases[half].source)

    def products(self) -> None:
        for half in (0, 1) * self.layers:
            self.product(half)

    def in_turn(self) -> None:
        for half in (0, 1) * self.layers:
            self.product(half)
            self.cases[half].call()

    def side_by_side(self) -> None:
        """A half's fused kernel runs beside the other half's product."""
        main, done = torch.cuda.current_stream(), [torch.cuda.current_stream().record_event()] * 2
        for half in (0, 1) * self.layers:
            main.wait_event(done[half])
            self.product(half)
            self.beside.wait_event(main.record_event())
            with torch.cuda.stream(self.beside):
                self.cases[half].call()
                done[half] = self.beside.record_event()
        for event in done:
            main.wait_event(event)


def overlap_table(rank: Rank, rounds: int) -> dict[str, Any]:
    """How much of the fused kernels' time the matrix products hide."""
    hidden, found = 8192, {}
    factor, beside = torch.zeros(hidden, hidden, device=rank.heap.device, dtype=BF16), torch.cuda.Stream()
    for tokens, ctas in ((1024, 16), (2048, 8), (2048, 16), (2048, 32), (4096, 16)):
        part = select_norm.part_rows(tokens, rank.world_size)
        shape = select_norm.direct_shape(part, hidden, DType.bfloat16, rank.world_size, num_sms(), ctas)
        problem = Problem(rank, tokens, hidden)
        cases = [direct(problem, shape, start=half * tokens * hidden * 2) for half in range(2)]
        inputs = [torch.zeros_like(problem.sources[0]) for _ in cases]
        halves = Halves(cases, inputs, factor, beside)
        calls = {"products": halves.products, "in turn": halves.in_turn, "side by side": halves.side_by_side}
        us = rank.measure(calls, rounds)
        us["hidden"] = (us["in turn"] - us["side by side"]) / (us["in turn"] - us["products"])
        found[f"{tokens} tokens a half, {ctas} CTAs"] = us
        say(f"overlap {tokens} x2, {ctas} CTAs:", rounded(us))
    return found


def run(arguments: argparse.Namespace) -> None:
    """One rank."""
    rank = Rank.join(2 * max(TOKENS) * arguments.hidden * 2)
    refused: dict[str, str] = {}
    report: dict[str, Any] = {"hidden": arguments.hidden, "refused": refused, "eager": arguments.eager}
    for part in arguments.parts:
        start = time.monotonic()
        report[part] = measured(part, rank, refused, arguments)
        say(f"({part}: {time.monotonic() - start:.0f} s)")
        if rank.rank == 0:
            write(report, rank.world_size)
    if refused:
        say("not timed:", json.dumps(refused, indent=1))
    rank.close()


def measured(part: str, rank: Rank, refused: dict[str, str], arguments: argparse.Namespace) -> Any:
    """One part of the report."""
    hidden, rounds, many = arguments.hidden, arguments.rounds, arguments.many
    match part:
        case "rows":
            return rows_table(rank, rounds, many)
        case "qk":
            return qk_table(rank, rounds, many)
        case "fused":
            return fused_table(rank, hidden, refused, arguments)
        case "sweep":
            return sweep(rank, hidden, refused, arguments)
        case "pdl":
            return pdl_table(rank, rounds)
        case "local":
            return local_table(hidden, rounds)
    return overlap_table(rank, rounds)


def write(report: dict[str, Any], world_size: int) -> None:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
    report["machine"] = {"gpu": torch.cuda.get_device_name(), "world_size": world_size} | versions
    directory = Path(os.environ.get("OUT", "."))
    (directory / "gpu_norm.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--world-size", type=int, default=2)
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="of the sweep")
    parser.add_argument("--parts", type=lambda text: text.split(","))
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--many", action="store_true", help="more shapes of rows and qk")
    parser.add_argument("--eager", action="store_true", help="the separate norm without torch.compile")
    arguments = parser.parse_args()
    possible = LONE_PARTS if arguments.world_size == 1 else (*PARTS, "sweep")
    arguments.parts = arguments.parts or list(LONE_PARTS if arguments.world_size == 1 else PARTS)
    if not set(arguments.parts) <= set(possible):
        raise SystemExit(f"parts of a world of {arguments.world_size}: {', '.join(possible)}")
    on_gpus(run, arguments.world_size, arguments)


if __name__ == "__main__":
    main()
