"""What ``gpu_norm.py`` measures on one GPU: norms that need no peer, and fused ones of ranks that share the GPU."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from gpu_norm_cases import BF16, Case, Problem, are_close, fused, norm_alone, qk_norm, rms_norm, shape_name
from gpu_ranks import METHOD, Call, Rank, capability, num_sms, on_stream

from symmcomm.bench.gpu_timing import GraphTimer, Lane
from symmcomm.bench.method import FEWEST
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import compiled
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import RowLaunch
from symmcomm.testing.local_world import LocalWorld

HEADS = ((32, 8), (64, 8))  # queries', keys'
QK_TOKENS = (1, 4, 16, 64, 256)
QK_CHANGES = (
    {"warps": 1}, {"warps": 2}, {"warps": 8}, {"lanes": 8, "vectors": 2}, {"lanes": 8, "vectors": 2, "warps": 2},
    {"lanes": 4, "vectors": 4}, {"tokens": 2}, {"tokens": 4},
)  # fmt: skip
LOCAL_TOKENS = (64, 128, 512, 1024, 2048, 8192)


def say(*words: object) -> None:
    if torch.distributed.get_rank() == 0:
        print(*words, flush=True)


def rounded(us: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in us.items()}


def ratio(us: dict[str, float], slow: str, quick: str) -> float:
    """NaN if one of them was wrong."""
    return us.get(slow, float("nan")) / us.get(quick, float("nan"))


def right_calls(rank: Rank, what: str, calls: dict[str, tuple[Call, Any]]) -> dict[str, Call]:
    """Those calls after one of which their check holds on all ranks."""
    right: dict[str, Call] = {}
    for name, (call, check) in calls.items():
        call()
        torch.cuda.synchronize()
        if all(rank.gather(check())):
            right[name] = call
        else:
            say("WRONG:", what, name)
    return right


def rows_table(rank: Rank, rounds: int, many: bool) -> dict[str, Any]:
    """RMSNorm of 8192 × 8192 beside a copy."""
    rows = hidden = 8192
    source = torch.randn(rows, hidden, device="cuda", dtype=torch.float32).to(BF16)
    output, weight = torch.empty_like(source), torch.randn(hidden, device="cuda").to(BF16)
    shapes = [select_norm.norm_shape(rows, hidden, DType.bfloat16, num_sms())]
    if many:
        for threads in (128, 256, 512, 1024):
            for grid in (rows, 2 * num_sms(), 4 * num_sms(), 8 * num_sms()):
                shapes.append(RowLaunch(form=None, grid=grid, threads=threads, unroll=1024 // threads))
    expected = rms_norm(source, weight)
    calls: dict[str, tuple[Call, Any]] = {
        shape_name(shape): (
            norm_alone(rows, hidden, shape, source, output, weight), lambda: are_close(output, expected)
        )
        for shape in shapes
    }  # fmt: skip
    timed = {"copy": lambda: output.copy_(source), **right_calls(rank, "RMSNorm", calls)}
    us, best = rank.measure(timed, rounds), shape_name(shapes[0])
    of_copy = ratio(us, "copy", best)
    say("RMSNorm 8192×8192:", rounded(us), f"{of_copy:.3f} of the copy's bandwidth")
    return {"chosen": best, "us": us, "of copy": of_copy}


def qk_table(rank: Rank, rounds: int, many: bool) -> dict[str, Any]:
    """QK-norm of heads of 128 beside two RMSNorms of the same data."""
    found: dict[str, Any] = {}
    for heads in HEADS:
        for tokens in QK_TOKENS:
            us = qk_figures(rank, tokens, heads, rounds, many)
            plain, pdl = (ratio(us, "two RMSNorms" + how, "QK-norm" + how) for how in ("", " pdl"))
            say(f"QK-norm {tokens} tokens, {heads[0]}+{heads[1]} heads:", rounded(us), f"{plain:.2f}x, pdl {pdl:.2f}x")
            found[f"{tokens} tokens, {heads} heads"] = us
    return found


def qk_figures(rank: Rank, tokens: int, heads: tuple[int, int], rounds: int, many: bool) -> dict[str, float]:
    head_dim = 128
    query, key = (torch.randn(tokens, num, head_dim, device="cuda").to(BF16) for num in heads)
    weight = torch.randn(head_dim, device="cuda").to(BF16)
    outputs = (torch.zeros_like(query), torch.zeros_like(key))
    expected = [rms_norm(x, weight) for x in (query, key)]

    def check() -> bool:
        right = all(are_close(y, x) for x, y in zip(expected, outputs, strict=True))
        for output in outputs:
            output.zero_()
        return right

    calls: dict[str, tuple[Call, Any]] = {}
    for pdl in (False, True):
        both = []
        for tensor, output in zip((query, key), outputs, strict=True):
            num = tensor.shape[0] * tensor.shape[1]
            shape = select_norm.norm_shape(num, head_dim, DType.bfloat16, num_sms())
            both.append(norm_alone(num, head_dim, shape, tensor, output, weight, pdl))
        calls["two RMSNorms" + " pdl" * pdl] = (lambda both=both: [call() for call in both], check)
        calls["QK-norm" + " pdl" * pdl] = (qk_norm(query, key, weight, outputs, num_sms(), pdl=pdl), check)
    for changes in QK_CHANGES if many else ():
        calls[f"QK-norm {changes}"] = (qk_norm(query, key, weight, outputs, num_sms(), **changes), check)
    return rank.measure(right_calls(rank, f"{tokens} tokens", calls), rounds)


@dataclass(frozen=True)
class LocalRank:
    """One of the ranks that share this process and its GPU, as far as ``gpu_norm_cases`` asks."""

    rank: int
    world_size: int
    base: int
    stride: int
    heap: torch.Tensor


def local_table(hidden: int, rounds: int) -> dict[str, Any]:
    """Fused norms of two ranks on one GPU, half of the SMs each: no link, so what is measured is how fast the kernels
    take what has come. Bytes a microsecond and CTA, to compare with the share that a link brings."""
    found: dict[str, Any] = {}
    world, dtype = LocalWorld(2, 1 << 20), DType.bfloat16
    ranks: list[Any] = [LocalRank(i, 2, world.base, world.stride, world.memory) for i in range(2)]
    arch, number = capability()
    barrier: Any = compiled(Barrier(world_size=2, arch=number), arch)
    lanes = [
        Lane(stream, on_stream(barrier, world.base, world.stride, rank, 0, 0))
        for rank, stream in enumerate(world.streams)
    ]
    for tokens in LOCAL_TOKENS:
        problems = [Problem(rank, tokens, hidden) for rank in ranks]
        part = select_norm.part_rows(tokens, 2)
        for shape, scatter in (
            (select_norm.lamport_shape(tokens, hidden, dtype, 2, world.num_sms, number), False),
            (select_norm.staged_shape(tokens, hidden, dtype, 2, world.num_sms), False),
            (select_norm.staged_shape(part, hidden, dtype, 2, world.num_sms), True),
        ):
            if shape is None:
                continue
            cases = [fused(problem, shape, scatter=scatter) for problem in problems]
            name = f"{tokens} tokens, {'reduce-scatter' if scatter else 'all-reduce'}, {shape_name(shape)}"
            if not are_right(cases, problems, lanes):
                say("WRONG:", name)
                continue
            us = local_us([case.call for case in cases], lanes, rounds)
            rate = (part if scatter else tokens) * hidden * 2 / us / shape.grid
            found[name] = {"us": us, "bytes/us/CTA": rate}
            say(f"local: {name}: {us:.2f} us, {rate:.0f} B/us/CTA (364 GB/s over 128 CTAs: 2844)")
    return found


def are_right(cases: list[Case], problems: list[Problem], lanes: list[Lane]) -> bool:
    """One call on all ranks, compared."""
    for case, problem in zip(cases, problems, strict=True):
        case.source.copy_(problem.sources[problem.rank.rank])
        case.residual.copy_(problem.residual[case.rows_of(problem)])
    torch.cuda.synchronize()
    for case, lane in zip(cases, lanes, strict=True):
        with lane.current():
            case.call()
    torch.cuda.synchronize()
    return all(case.came_right(problem) for case, problem in zip(cases, problems, strict=True))


def local_us(calls: list[Call], lanes: list[Lane], rounds: int) -> float:
    """Of one call on all ranks."""
    timer = GraphTimer(lanes, calls)
    num = METHOD.calls(timer.time(FEWEST)["seconds"])
    return statistics.median(timer.time(num)["seconds"] * 1e6 for _ in range(rounds))
