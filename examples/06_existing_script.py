"""A script that was written for gloo. One string was changed.

    torchrun --nproc-per-node 4 examples/06_existing_script.py
"""

import torch
import torch.distributed as dist

BACKEND = "symm"  # was "gloo"


def ring(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks by sends and receives to and from neighbours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(size - 1):
        received = torch.empty_like(passing)
        works = [dist.isend(passing, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
        for work in works:
            work.wait()
        total, passing = total + received, received
    return total


def main() -> None:
    dist.init_process_group(BACKEND)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = torch.randn(100_000)

    total = mine.clone()
    work = dist.all_reduce(total, async_op=True)
    by_ring = ring(mine)
    work.wait()
    torch.testing.assert_close(by_ring, total)

    evens = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        dist.broadcast(total, src=0, group=evens)
    reports = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank, "mean": mine.mean().item()}, reports)
    if rank == 0:
        for report in reports:
            print(f"rank {report['rank']} of {size}: mean {report['mean']:.6f}, total {total[0]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
