"""100,000 mixed collectives in a row leave the resident set as it was."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symmcomm.testing.spawn import run_ranks


def resident_kib() -> int:
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def soak(num_calls: int, num_warm_up: int) -> int:
    """Returns the growth of the resident set between the warm-up and the end, in KiB."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    small, large, whole = torch.zeros(256), torch.zeros(20_000), torch.zeros(size * 256)
    parts = [torch.zeros(256) for _ in range(size)]

    def exchange() -> None:
        works = [dist.isend(small, following), dist.irecv(parts[0], previous)]
        for work in works:
            work.wait()

    calls = (
        lambda: dist.all_reduce(small),
        lambda: dist.all_reduce(large, async_op=True).wait(),
        lambda: dist.broadcast(small, 0),
        lambda: dist.all_gather(parts, small),
        lambda: dist.all_reduce(small, dist.ReduceOp.MAX, async_op=True).get_future().wait(),
        lambda: dist.group.WORLD._allgather_base(whole, small).wait(),
        lambda: dist.reduce_scatter(small, parts),
        lambda: dist.all_to_all_single(whole, whole.clone()),
        lambda: dist.gather(small, parts if rank == 0 else None),
        lambda: dist.scatter(small, parts if rank == 0 else None),
        lambda: dist.reduce(small, 0),
        lambda: dist.barrier(),
        exchange,
    )
    before = 0
    for number, call in enumerate(itertools.islice(itertools.cycle(calls), num_calls)):
        if number == num_warm_up:
            before = resident_kib()
        call()
    growth = resident_kib() - before
    dist.barrier()
    dist.destroy_process_group()
    return growth


def test_resident_set_is_flat() -> None:
    assert max(result.value for result in run_ranks(soak, 2, 10_000, 3_000, timeout_s=100)) < 2048


@pytest.mark.slow
def test_resident_set_is_flat_over_100_000_calls() -> None:
    assert max(result.value for result in run_ranks(soak, 2, 100_000, 10_000, timeout_s=280)) < 2048
