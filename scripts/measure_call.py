"""What one ``dist.all_reduce`` of 1 KiB takes through torch, on symm and on gloo or NCCL, and the bare call beside it.

    python scripts/measure_call.py --json scripts/results/cpu_call.json
    python scripts/measure_call.py --device cuda

Two ranks; all are made in the same processes and take turns, so that what else the machine does meets all. A figure is
the median of the rounds, and the least round, of the slower rank, in µs; a round is the mean of many calls. On GPUs,
which run behind, it is what the host spends. Ranks that share a GPU (SYMMCOMM_SHARE_GPU=1) make fewer calls a round,
which their queues hold, and leave out NCCL, which refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import symmcomm
from symmcomm.testing.spawn import run_ranks

COUNT = 256  # float32: 1 KiB
PEERS = {"cpu": "gloo", "cuda": "nccl"}


def _mean_us(call: Callable[[], object], num_calls: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin) / num_calls * 1e6


def _rank(num_rounds: int, device: str) -> dict[str, list[float]]:
    cores, rank, peer = sorted(os.sched_getaffinity(0)), int(os.environ["RANK"]), PEERS[device]
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    shares = device == "cuda" and torch.cuda.device_count() < 2
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("symm")
    comm, tensor = symmcomm.init(device=None if device == "cpu" else device), torch.zeros(COUNT, device=device)
    num_calls = 100 if shares else 2000
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "bare": (lambda: comm.all_reduce(tensor), num_calls),
        "symm": (lambda: dist.all_reduce(tensor), num_calls),
        "symm, async and wait": (lambda: dist.all_reduce(tensor, async_op=True).wait(), num_calls),
    }
    if not shares:
        other = dist.new_group(backend=peer)
        calls[peer] = (lambda: dist.all_reduce(tensor, group=other), 100)
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(num_rounds + 1):
        for name, (call, num_calls) in calls.items():
            figure = _mean_us(call, num_calls, device)
            rounds[name] += [figure] if round_ else []
    comm.close()
    dist.destroy_process_group()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=PEERS, default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="file for the figures of every round")
    options = parser.parse_args()
    ranks = [result.value for result in run_ranks(_rank, 2, options.rounds, options.device, timeout_s=300)]
    for name in ranks[0]:
        slower = max((rank[name] for rank in ranks), key=statistics.median)
        print(f"{name}: median {statistics.median(slower):.1f} µs, least {min(slower):.1f} µs")
    print(f"load average {os.getloadavg()[0]:.1f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1))


if __name__ == "__main__":
    main()
