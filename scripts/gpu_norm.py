"""Norms on GPUs, alone and fused with collectives, beside NCCL and torch, in one run; a table, and JSON to $OUT.

    PYTHONPATH=. python scripts/gpu_norm.py                                 two processes, one GPU each
    PYTHONPATH=. python scripts/gpu_norm.py --world-size 1 --parts norm     one GPU is enough

bf16, hidden size 8192 unless ``--hidden`` says otherwise; timed as ``symmcomm bench`` does. ``--parts``:

    fused    all-reduce, add, RMSNorm by one kernel, beside NCCL's all-reduce followed by torch.compile'd add and norm,
             flashinfer's kernel, and our all-reduce alone; and TokenWeave's form with few CTAs
    sweep    our kernels in many shapes, to set schedule/select_norm.py by (not unless asked for)
    norm     RMSNorm beside a copy of the same bytes; QK-norm beside two RMSNorms
    pdl      matrix product, fused norm, matrix product: with and without programmatic dependent launch
    overlap  two halves of a batch: one in a matrix product, the other in the fused kernel on few CTAs
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_norm_cases import (
    BF16,
    Case,
    FlashInfer,
    Problem,
    are_close,
    direct,
    fused,
    norm_alone,
    qk_norm,
    rms_norm,
    separate,
    shape_name,
    shapes_to_try,
)
from gpu_ranks import Call, Rank, capability, num_sms, on_gpus

from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import RowLaunch

TOKENS = (1, 16, 64, 128, 512, 1024, 8192)
SWEEP_TOKENS = (1, 16, 64)
CTAS = (8, 16, 32, 64)
PARTS = ("norm", "fused", "pdl", "overlap")

say: Callable[..., None] = print


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


def chosen_shape(tokens: int, hidden: int, rank: Rank) -> RowLaunch | None:
    """None: there is no one kernel for so many rows."""
    _, arch = capability()
    return select_norm.choose_all_reduce_norm(tokens, hidden, DType.bfloat16, rank.world_size, num_sms(), arch)


def fused_table(rank: Rank, hidden: int, rounds: int, refused: dict[str, str], eager: bool) -> list[dict[str, Any]]:
    """Fused beside separate, by tokens."""
    rows, theirs = [], None
    try:
        theirs = FlashInfer(rank, 1024, hidden) if rank.has_nccl else None
    except Exception as error:  # whatever it is: the others are measured
        refused["flashinfer"] = f"{type(error).__name__}: {error}"[:300]
    for tokens in TOKENS:
        problem = Problem(rank, tokens, hidden)
        shape, part = chosen_shape(tokens, hidden, rank), select_norm.part_rows(tokens, rank.world_size)
        scattered = select_norm.choose_reduce_scatter_norm(
            tokens, hidden, DType.bfloat16, rank.world_size, num_sms(), capability()[1]
        )
        makers: dict[str, Callable[[], Case]] = {}
        if rank.has_nccl:
            makers["nccl"] = partial(separate, problem, not eager)
        if shape is not None:
            makers |= {"fused": partial(fused, problem, shape), "fused_pdl": partial(fused, problem, shape, pdl=True)}
        if scattered is not None:
            makers["reduce_scatter_norm"] = partial(fused, problem, scattered, scatter=True)
        if theirs is not None and tokens <= theirs.most_tokens:
            for oneshot in (True, False) if tokens > rank.world_size else (True,):
                for pdl in (False, True):
                    name = f"flashinfer {'one' if oneshot else 'two'}-shot{' pdl' * pdl}"
                    makers[name] = partial(theirs.case, problem, oneshot, pdl)
        for ctas in CTAS if tokens >= 128 else ():
            few = select_norm.direct_shape(part, hidden, DType.bfloat16, rank.world_size, num_sms(), ctas)
            makers[f"weave_{ctas}"] = partial(direct, problem, few)
        calls = checked(f"{tokens} tokens", makers, problem, refused)
        tensor = rank.comm.empty(tokens * hidden, dtype=BF16, device=rank.heap.device).zero_()
        calls["all_reduce"] = partial(rank.comm.all_reduce, tensor)
        us = rank.measure(calls, rounds)
        rank.comm.free(tensor)
        name = shape_name(shape) if shape is not None else "no one kernel"
        rows.append({"tokens": tokens, "shape": name, "us": us})
        say(tokens, name, {name: round(value, 2) for name, value in us.items()}, flush=True)
        del calls, makers, problem
        torch.cuda.empty_cache()
    return rows


def sweep(rank: Rank, hidden: int, rounds: int, refused: dict[str, str]) -> dict[str, Any]:
    """Our fused kernels in every sensible shape."""
    found: dict[str, Any] = {}
    for tokens in SWEEP_TOKENS:
        problem = Problem(rank, tokens, hidden)
        makers: dict[str, Callable[[], Case]] = {
            shape_name(shape): partial(fused, problem, shape)
            for shape in shapes_to_try(tokens, hidden, rank.world_size, num_sms())
        }
        us = rank.measure(checked(f"{tokens} tokens", makers, problem, refused), rounds)
        found[str(tokens)] = dict(sorted(us.items(), key=lambda item: item[1]))
        best = [f"{name}: {value:.2f}" for name, value in found[str(tokens)].items()]
        say(f"{tokens} tokens:", *best[:8], sep="\n   ", flush=True)
        del makers, problem
        torch.cuda.empty_cache()
    return found


def norm_table(rank: Rank, rounds: int, many: bool) -> dict[str, Any]:
    """RMSNorm beside a copy, QK-norm beside RMSNorm."""
    rows = hidden = 8192
    source = torch.randn(rows, hidden, device=rank.heap.device, dtype=torch.float32).to(BF16)
    output, weight = torch.empty_like(source), torch.randn(hidden, device=source.device).to(BF16)
    shapes = [select_norm.norm_shape(rows, hidden, DType.bfloat16, num_sms())]
    if many:
        for threads in (128, 256, 512, 1024):
            for grid in (rows, 2 * num_sms(), 4 * num_sms(), 8 * num_sms()):
                shapes.append(RowLaunch(form=None, grid=grid, threads=threads, unroll=1024 // threads))
    calls: dict[str, Call] = {"copy": lambda: output.copy_(source)}
    for shape in shapes:
        call = norm_alone(rows, hidden, shape, source, output, weight)
        call()
        torch.cuda.synchronize()
        close = are_close(output, rms_norm(source, weight))
        if all(rank.gather(close)):
            calls[shape_name(shape)] = call
        else:
            say("WRONG: RMSNorm", shape_name(shape))
    us = rank.measure(calls, rounds)
    best = shape_name(shapes[0])
    found: dict[str, Any] = {"chosen": best, "us": us, "of copy": us["copy"] / us[best]}
    say("RMSNorm 8192×8192:", {name: round(value, 1) for name, value in us.items()}, flush=True)
    for tokens in (1, 16, 64, 256):
        found[f"qk {tokens}"] = qk_figures(rank, tokens, rounds)
    return found


def qk_figures(rank: Rank, tokens: int, rounds: int) -> dict[str, float]:
    """32 query heads and 8 key heads of 128."""
    device, head_dim = rank.heap.device, 128
    query, key = (torch.randn(tokens, heads, head_dim, device=device).to(BF16) for heads in (32, 8))
    weight = torch.randn(head_dim, device=device).to(BF16)
    outputs = (torch.zeros_like(query), torch.zeros_like(key))
    general = []
    for tensor in (query, key):
        heads = tensor.shape[0] * tensor.shape[1]
        shape = select_norm.norm_shape(heads, head_dim, DType.bfloat16, num_sms())
        general.append(norm_alone(heads, head_dim, shape, tensor, torch.empty_like(tensor), weight))
    calls: dict[str, Call] = {"two RMSNorms": lambda: [call() for call in general]}
    for heads in (0, 1, 2, 4):
        call = qk_norm(query, key, weight, outputs, heads, num_sms())
        call()
        torch.cuda.synchronize()
        pairs = zip((query, key), outputs, strict=True)
        close = all(are_close(y, rms_norm(x, weight)) for x, y in pairs)
        if all(rank.gather(close)):
            calls[f"QK-norm of {heads}" if heads else "QK-norm"] = call
        else:
            say("WRONG: QK-norm", heads)
    us = rank.measure(calls, rounds)
    say(f"QK-norm {tokens} tokens:", {name: round(value, 2) for name, value in us.items()}, flush=True)
    return us


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
        say(f"PDL {tokens} tokens:", {name: round(value, 2) for name, value in us.items()}, flush=True)
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
        say(f"overlap {tokens} x2, {ctas} CTAs:", {name: round(value, 2) for name, value in us.items()}, flush=True)
    return found


def run(arguments: argparse.Namespace) -> None:
    """One rank."""
    global say
    rank = Rank.join(2 * max(TOKENS) * arguments.hidden * 2)
    if rank.rank:
        say = lambda *_, **__: None
    refused: dict[str, str] = {}
    report: dict[str, Any] = {"hidden": arguments.hidden, "refused": refused, "eager": arguments.eager}
    rounds = arguments.rounds
    for part in arguments.parts:
        if part == "sweep":
            report["sweep"] = sweep(rank, arguments.hidden, max(3, rounds // 3), refused)
        elif part == "fused":
            report["fused"] = fused_table(rank, arguments.hidden, rounds, refused, arguments.eager)
        elif part == "norm":
            report["norm"] = norm_table(rank, rounds, "sweep" in arguments.parts)
        elif part == "pdl":
            report["pdl"] = pdl_table(rank, rounds)
        else:
            report["overlap"] = overlap_table(rank, rounds)
        if rank.rank == 0:
            write(report, rank.world_size)
    if refused:
        say("not timed:", json.dumps(refused, indent=1))
    rank.close()


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
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--eager", action="store_true", help="the separate norm without torch.compile")
    arguments = parser.parse_args()
    on_gpus(run, arguments.world_size, arguments)


if __name__ == "__main__":
    main()
