"""What a data-parallel training step spends in communication, on symm and on gloo.

    python scripts/measure_ddp.py --json scripts/results/cpu_ddp.json --plot scripts/results/cpu_ddp.png

Two ranks train a model of 10 million parameters (40 MB of gradients) under torch's profiler. Both backends belong to
the same processes and take turns, so that what the machine does meanwhile meets both; each rank has a core for all its
threads. The time in communication of a step is that of the profiler's events ``gloo:all_reduce`` and
``symm:all_reduce``, from the call to its end; the figure is the median over all steps of the slower rank. The second
figure leaves out how late the other rank was: there a call begins when both ranks have made it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from symmcomm.testing.spawn import run_ranks

WIDTH, NUM_LAYERS, ROWS = 1600, 4, 256
Event = tuple[str, float, float]  # what, begin and end in ms from the start of the step
Step = tuple[float, list[Event], float]  # its length in ms, its events, and when it began, in ms of the machine's clock


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    module(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _profiled_step(*arguments: Any) -> Step:
    """One step, with its communication and the matrix products around it."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        _step(*arguments)
        step_ms = (time.perf_counter() - begin) * 1e3
    events, started_ns = profiler.events(), profiler.profiler.kineto_results.trace_start_ns()
    origin = min(event.time_range.start for event in events)
    kept = {"addmm": "forward", "mm": "backward"}
    found = []
    for event in events:
        what = event.name.removeprefix("aten::")
        if ":all_reduce" in event.name:
            found.append(
                ("communication", (event.time_range.start - origin) / 1e3, (event.time_range.end - origin) / 1e3)
            )
        elif what in kept:
            found.append((kept[what], (event.time_range.start - origin) / 1e3, (event.time_range.end - origin) / 1e3))
    return step_ms, found, started_ns / 1e6 + origin / 1e3


def _rank(num_rounds: int) -> dict[str, list[Step]]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})  # with all threads of both backends
    dist.init_process_group("symm")
    groups = {"gloo": dist.new_group(backend="gloo"), "symm": dist.group.WORLD}
    modules = {name: DistributedDataParallel(_model(), process_group=group) for name, group in groups.items()}
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=0.01) for name, module in modules.items()}
    batch = torch.randn(ROWS, WIDTH)
    steps: dict[str, list[Step]] = {name: [] for name in groups}
    for round_ in range(num_rounds + 2):
        for name in groups if round_ % 2 else reversed(groups):
            step = _profiled_step(modules[name], optimizers[name], batch)
            steps[name] += [step] if round_ >= 2 else []
    dist.barrier()
    dist.destroy_process_group()
    return steps


def _communication_ms(events: list[Event]) -> float:
    return sum(end - begin for what, begin, end in events if what == "communication")


def _together_ms(steps: tuple[Step, ...]) -> float:
    """The same step of all ranks: from when all have made a call to when it is over on all, summed over its calls."""
    calls = [
        [(at + begin, at + end) for what, begin, end in events if what == "communication"] for _, events, at in steps
    ]
    return sum(max(end for _, end in each) - max(begin for begin, _ in each) for each in zip(*calls, strict=True))


def _plot(path: str, steps: dict[str, Step]) -> None:
    """One step of each backend as a timeline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"forward": "tab:green", "backward": "tab:blue", "communication": "tab:red"}
    figure, axes = pyplot.subplots(len(steps), 1, sharex=True, figsize=(9, 1.6 * len(steps)), layout="constrained")
    for axis, (name, (step_ms, events, _)) in zip(axes, steps.items(), strict=True):
        for what, begin, end in events:
            axis.barh(what == "communication", end - begin, left=begin, color=colours[what], edgecolor="white")
        axis.set_yticks([0, 1], ["computation", "communication"])
        axis.set_title(
            f"{name}: step {step_ms:.0f} ms, {_communication_ms(events):.1f} ms in communication", loc="left"
        )
    axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file for the figures of every step")
    parser.add_argument("--plot", help="file for the timelines of the median steps")
    options = parser.parse_args()
    ranks = [result.value for result in run_ranks(_rank, 2, options.rounds, timeout_s=600)]
    medians, together, shown = {}, {}, {}
    for name in ("gloo", "symm"):
        slower = max(
            (rank[name] for rank in ranks), key=lambda s: statistics.median(_communication_ms(e) for _, e, _ in s)
        )
        ordered = sorted(slower, key=lambda step: _communication_ms(step[1]))
        shown[name] = ordered[len(ordered) // 2]
        medians[name] = _communication_ms(shown[name][1])
        step_ms = statistics.median(step[0] for step in slower)
        together[name] = statistics.median(map(_together_ms, zip(*(rank[name] for rank in ranks), strict=True)))
        print(
            f"{name}: {medians[name]:.1f} ms in communication of a step of {step_ms:.0f} ms; "
            f"{together[name]:.1f} ms once both ranks have made the call"
        )
    ratios = [figures["gloo"] / figures["symm"] for figures in (medians, together)]
    print(f"gloo / symm: {ratios[0]:.1f}, {ratios[1]:.1f} once both ranks have made the call")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1))
    if options.plot:
        _plot(options.plot, shown)


if __name__ == "__main__":
    main()
