"""A multi-layer perceptron split over the ranks: the first matrix by columns, the second by rows, one sum at the end.

    python examples/05_tensor_parallel_mlp.py
    torchrun --nproc-per-node 4 examples/05_tensor_parallel_mlp.py
    mpirun -n 4 python examples/05_tensor_parallel_mlp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symmcomm  # noqa: F401  # registers the backend; not needed once symmcomm is installed

WIDTH, ROWS = 64, 16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class ByHand(nn.Module):
    """The same with an operator of symmcomm: this rank's columns and rows, then the sum, which has a gradient."""

    def __init__(self, whole: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__()
        part = slice(group.rank() * 4 * WIDTH // group.size(), (group.rank() + 1) * 4 * WIDTH // group.size())
        self.columns, self.bias = nn.Parameter(whole[0].weight[part]), nn.Parameter(whole[0].bias[part])
        self.rows, self.last = nn.Parameter(whole[2].weight[:, part]), nn.Parameter(whole[2].bias)
        self.name = group.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(x, self.columns, self.bias))
        return torch.ops.symmcomm.all_reduce(nn.functional.linear(hidden, self.rows), "sum", self.name) + self.last


def main() -> None:
    dist.init_process_group("symm", "symm://")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = model()(x)

    split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(split(x), expected)
    by_hand = ByHand(model(), mesh.get_group())
    compiled = torch.compile(by_hand, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)

    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {by_hand.columns.shape[0]} of {4 * WIDTH} columns",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
