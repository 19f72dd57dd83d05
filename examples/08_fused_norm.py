"""Two Llama-style layers, tensor parallel: a graph pass fuses each all-reduce, residual addition and RMSNorm.

    torchrun --nproc-per-node 4 examples/08_fused_norm.py
    torchrun --nproc-per-node 2 examples/08_fused_norm.py cuda
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from symmcomm.distributed import fuse_norm

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
WIDTH, HEADS, HEAD_DIM, INNER, TOKENS = 64, 8, 8, 192, 24


class Layer(nn.Module):
    """This rank's heads, and its columns and rows of the multi-layer perceptron."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        whole = {"qkv": (HEADS, 3 * HEAD_DIM), "o": (HEADS, HEAD_DIM), "up": (INNER, 2), "down": (INNER,), "norm": (2,)}
        for name, shape in whole.items():
            weight = torch.randn(*shape, WIDTH) / WIDTH**0.5  # the same on all ranks, which have one seed
            own = weight if name == "norm" else weight.chunk(size)[rank].flatten(0, -2)
            self.register_parameter(name, nn.Parameter(own.to(DEVICE), requires_grad=False))

    def forward(self, x: torch.Tensor, residual: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        heads = linear(x, self.qkv).unflatten(-1, (-1, 3 * HEAD_DIM)).transpose(0, 1)
        attended = scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True).transpose(0, 1).flatten(1)
        residual = residual + torch.ops.symmcomm.all_reduce(attended @ self.o, "sum", name)
        up, gate = linear(rms_norm(residual, (WIDTH,), self.norm[0], 1e-5), self.up).unflatten(-1, (-1, 2)).unbind(-1)
        residual = residual + torch.ops.symmcomm.all_reduce((silu(gate) * up) @ self.down, "sum", name)
        return rms_norm(residual, (WIDTH,), self.norm[1], 1e-5), residual


def main() -> None:
    dist.init_process_group("symm", "symm://")
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    torch.manual_seed(0)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    layers, counts = nn.ModuleList([Layer(rank, size), Layer(rank, size)]), []
    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x, residual = layer(x, residual, name)
        return x

    x = torch.randn(TOKENS, WIDTH).to(DEVICE)
    compiled = torch.compile(block, backend=lambda graph, _: (counts.append(fuse_norm(graph)), graph.forward)[1])
    torch.testing.assert_close(compiled(x, x), block(x, x))
    print(f"rank {rank} of {size}: {counts} of 4 norms fused, on {x.device}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
