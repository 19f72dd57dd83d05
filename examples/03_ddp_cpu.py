"""Data-parallel training on the CPU: the gradients are averaged by symmcomm, nothing else is new.

    python examples/03_ddp_cpu.py
    torchrun --nproc-per-node 4 examples/03_ddp_cpu.py
    mpirun -n 4 python examples/03_ddp_cpu.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import symmcomm  # noqa: F401  # registers the backend; not needed once symmcomm is installed


def data(rank: int, num_rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's share: points on a disc, and whether they are in the inner half."""
    generator = torch.Generator().manual_seed(rank)
    points = torch.rand(num_rows, 2, generator=generator) * 2 - 1
    return points, (points.square().sum(1) < 0.5).float()


def main() -> None:
    # "symm://" finds the ranks of torchrun or mpirun, or none; under torchrun init_process_group("symm") is enough.
    dist.init_process_group("symm", "symm://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points, inside = data(rank)
    losses = []
    for _ in range(200):
        loss = nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), inside)
        optimizer.zero_grad()
        loss.backward()  # all-reduces the gradients, bucket by bucket, while it computes the next ones
        optimizer.step()
        losses.append(loss.item())

    # All ranks hold the same model, bit for bit.
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(everybodys, weights)
    assert all(torch.equal(weights, other) for other in everybodys)
    assert losses[-1] < losses[0] / 3
    print(f"rank {rank} of {world_size}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
