"""What the first use of a GPU kernel takes: compiled, and from the disk cache.

    python scripts/measure_compile.py --json scripts/results/gpu_compile.json

The calls are bf16 all-reduce, reduce-scatter, all-gather and all-to-all of several sizes, between two virtual ranks on
one GPU; calls that share a kernel count once. Each is made in an empty directory, then by another process from what
the first has left. A figure is the host's time, in ms, until both ranks' kernels have run: the compilation or the
reading of the object, the loading of the module, two launches. What a second call takes is beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from symmcomm.bench.virtual_place import VirtualRank
from symmcomm.kernels.gpu.compile import Kernel, compiled
from symmcomm.schedule.layout_gpu import MessageLayout
from symmcomm.testing.local_world import LocalWorld

WORLD_SIZE = 2
SIZES = [1 << 10, 128 << 10, 1 << 20, 8 << 20, 32 << 20]


def calls(ranks: list[VirtualRank]) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Names, and a call of each rank."""
    for size in SIZES:
        for symmetric in (True, False):
            empty = torch.empty if not symmetric else None
            made = []
            for rank in ranks:
                make = empty or rank.empty
                made.append([make(size // 2, dtype=torch.bfloat16, device=rank.device) for _ in range(2)])
            half, kind = size // 2 // WORLD_SIZE, "symmetric" if symmetric else "ordinary"
            pairs = [(rank, *tensors) for rank, tensors in zip(ranks, made, strict=True)]
            yield f"all_reduce {size} {kind}", [partial(rank.all_reduce, x) for rank, x, _ in pairs]
            yield (
                f"reduce_scatter {size} {kind}",
                [partial(rank.reduce_scatter_tensor, y[:half], x) for rank, x, y in pairs],
            )
            yield (
                f"all_gather {size} {kind}",
                [partial(rank.all_gather_into_tensor, y, x[:half]) for rank, x, y in pairs],
            )
            yield f"all_to_all {size} {kind}", [partial(rank.all_to_all_single, y, x) for rank, x, y in pairs]
            for rank in ranks:
                rank.free(made[0][0])


def first_uses(directory: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds of the first call and of the second, of each kernel that was not there before."""
    torch.zeros(1, device="cuda")
    world = LocalWorld(WORLD_SIZE, MessageLayout.create(WORLD_SIZE).end + 3 * SIZES[-1])
    ranks = [VirtualRank(world, rank, torch.device("cuda", 0)) for rank in range(WORLD_SIZE)]
    kernels: list[Kernel] = []

    def noted(kernel: Kernel, arch: str) -> Callable[..., None]:
        kernels.append(kernel)
        return compiled(kernel, arch, directory)

    def timed(bodies: list[Callable[[], Any]]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for rank, body in enumerate(bodies):
            with torch.cuda.stream(world.streams[rank]):
                body()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    for rank in ranks:
        rank._compiled = noted
    times, seen = {}, 0
    for name, bodies in calls(ranks):
        first, second = timed(bodies), timed(bodies)
        new, seen = len(set(kernels)) - seen, len(set(kernels))
        if new:
            times[name] = first, second
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        print(json.dumps(first_uses(Path(options.directory))))
        return
    runs: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in ("compiled", "from the cache"):
            command = [sys.executable, __file__, "--directory", directory]
            runs[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(f"{'first use, ms':40} {'compiled':>9} {'cached':>9} {'again':>9}")
    for call, (first, _) in runs["compiled"].items():
        cached, again = runs["from the cache"][call]
        print(f"{call:40} {first:9.1f} {cached:9.1f} {again:9.2f}")
    for name, times in runs.items():
        firsts = [first for first, _ in list(times.values())[1:]]  # the very first also starts the compiler
        print(f"{name}: median {statistics.median(firsts):.1f} ms, most {max(firsts):.1f} ms, without the first")
    if options.json:
        gpu = torch.cuda.get_device_name()
        Path(options.json).write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, **runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
