"""Tensor-parallel blocks with a norm spelled in many ways, and a check that the graph pass fuses each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from symmcomm.distributed import fuse_norm
from tests.fused.rows import EPS

ops = torch.ops.symmcomm
HIDDEN = 48

Norm = Callable[[Tensor, Tensor], Tensor]


def library(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (HIDDEN,), w, EPS)


def without_eps(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (HIDDEN,), w)


def operator(x: Tensor, w: Tensor) -> Tensor:
    """What ``rms_norm`` becomes in AOTAutograd's graphs for GPUs."""
    return torch.ops.aten._fused_rms_norm(x, [HIDDEN], w, EPS)[0]


def llama(x: Tensor, w: Tensor) -> Tensor:
    """As transformers spell it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


def squares(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide * wide).mean(dim=(-1,), keepdim=True).add(EPS).rsqrt() * w.float()).type_as(x)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * wide
    return (wide * (1.0 + w.float())).type_as(x)


def reduced(x: Tensor, name: str) -> Tensor:
    return ops.all_reduce(x, "sum", name)


def functional(x: Tensor, name: str) -> Tensor:
    return funcol.all_reduce(x, "sum", name)


def viewed(x: Tensor, name: str) -> Tensor:
    return funcol.all_reduce(x.view(-1, HIDDEN), "sum", name).view(2, -1, HIDDEN)


Reduce = Callable[[Tensor, str], Tensor]


class Block(nn.Module):
    """Two residual steps; the reductions are what tensor parallelism leaves at the end of each."""

    def __init__(self, reduce: Reduce, norm: Norm, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.reduce, self.norm, self.name = reduce, norm, name
        generator = torch.Generator().manual_seed(3)
        for weight in ("first", "second"):
            drawn = torch.randn(HIDDEN, generator=generator).to(dtype)
            self.register_parameter(weight, nn.Parameter(drawn, requires_grad=False))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.reduce(x, self.name)
        x = self.norm(residual, self.first).tanh()
        residual = self.reduce(x, self.name) + residual
        return self.norm(residual, self.second), residual


def backends(counts: list[int]) -> dict[str, Any]:
    def direct(module: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        counts.append(fuse_norm(module))
        return module.forward

    def lowered(module: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        counts.append(fuse_norm(module))
        assert "all_reduce_rms_norm" in module.code
        return make_boxed_func(module.forward)

    return {"dynamo": direct, "aot": aot_autograd(fw_compiler=lowered)}


def check_fused(
    group: dist.ProcessGroup, device: str, dtype: torch.dtype, reduces: Sequence[Reduce], norms: Sequence[Norm]
) -> None:
    """Collective. Both norms of a block are found, in Dynamo's graph and in AOTAutograd's, and the results are as near
    to float64 as those of the separate calls, or nearer."""

    def drawn(seed: int) -> Tensor:
        return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    x, residual = drawn(group.rank()), drawn(9)
    for reduce in reduces:
        for norm in norms:
            block = Block(reduce, norm, group.group_name, dtype).to(device)
            wide = Block(reduce, norm, group.group_name, dtype).to(device).double()
            exact, eager = wide(x.double(), residual.double()), block(x, residual)
            for kind in ("dynamo", "aot"):
                counts: list[int] = []
                torch._dynamo.reset()
                found = torch.compile(block, backend=backends(counts)[kind], fullgraph=True)(x, residual)
                what = f"{kind} {reduce.__name__} {norm.__name__} {dtype}"
                assert counts == [2], what
                for one, other, right in zip(found, eager, exact, strict=True):
                    assert one.shape == other.shape, what
                    error, separate = ((y.double() - right).abs().max() for y in (one, other))
                    assert error <= 1.5 * separate + 1e-6, f"{what}: {error} against {separate}"
