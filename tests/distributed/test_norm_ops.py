"""The norms as operators, and the pass that finds them in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm.fused.rows import row_slice
from symmcomm.testing.spawn import run_ranks
from tests.distributed import norm_blocks as blocks
from tests.distributed.norm_blocks import HIDDEN, backends, library
from tests.fused.rows import EPS, check, check_scaled, expected, problem

ops = torch.ops.symmcomm


def values() -> None:
    dist.init_process_group("symm")
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    p = problem(7, HIDDEN, torch.bfloat16, size)
    x, mine = p.inputs[rank], row_slice(7, rank, size)
    right = expected(p.inputs, p.residual, p.weight, p.bias, 1.0)
    out, new = ops.all_reduce_rms_norm(x, p.residual, p.weight, EPS, name, p.bias, 1.0)
    check(out, right, "all_reduce_rms_norm")
    assert torch.equal(new, p.new_residual)
    strided = ops.all_reduce_rms_norm(x.t().contiguous().t(), p.residual, p.weight, EPS, name, p.bias, 1.0)
    assert torch.equal(strided[0], out)
    small, new, scales = ops.all_reduce_rms_norm_float8(x, p.residual, p.weight, EPS, name, p.bias, 1.0)
    check_scaled(small, scales, right, "float8")
    all_rows, new = ops.reduce_scatter_rms_norm_all_gather(x, p.residual[mine], p.weight, EPS, 8, name, p.bias, 1.0)
    assert torch.equal(all_rows, out)
    assert torch.equal(new, p.new_residual[mine])
    own, new = ops.reduce_scatter_rms_norm(x, p.residual[mine], p.weight, EPS, 8, name, p.bias, 1.0)
    assert torch.equal(own, out[mine])
    gathered, new = ops.rms_norm_all_gather(p.sum[mine], None, p.weight, EPS, 7, 8, name)
    check(gathered, expected([p.sum], None, p.weight), "rms_norm_all_gather")
    assert torch.equal(new, p.sum[mine])
    check(ops.rms_norm(x, p.weight, EPS), expected([x], None, p.weight), "rms_norm")
    check(ops.add_rms_norm(x, p.residual, p.weight, EPS)[0], expected([x], p.residual, p.weight), "add_rms_norm")
    heads = x.view(7, 3, 16)
    q, k = ops.qk_norm(heads[:, :2], heads[:, 2:], p.weight[:16], p.bias[:16], EPS, 1.0)
    check(q, expected([heads[:, :2]], None, p.weight[:16], weight_bias=1.0), "q")
    check(k, expected([heads[:, 2:]], None, p.bias[:16], weight_bias=1.0), "k")
    gloo = dist.new_group(backend="gloo").group_name
    with pytest.raises(ValueError, match="backend gloo, expected symm"):
        ops.all_reduce_rms_norm(x, p.residual, p.weight, EPS, gloo)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size: int) -> None:
    run_ranks(values, world_size, timeout_s=200)


def checked() -> None:
    dist.init_process_group("symm")
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    p = problem(5, 16, torch.float32, size)
    x, mine = p.inputs[rank], row_slice(5, rank, size)
    args, own = (x, p.residual, p.weight, EPS), (x, p.residual[mine], p.weight, EPS)
    heads = x.view(5, 2, 8)
    for operator, arguments in (
        (ops.rms_norm.default, (x, p.weight, EPS)),
        (ops.add_rms_norm.default, args),
        (ops.qk_norm.default, (heads, heads, p.weight[:8], p.bias[:8], EPS)),
        (ops.all_reduce_rms_norm.default, (*args, name, p.bias, 1.0)),
        (ops.all_reduce_rms_norm_float8.default, (*args, name)),
        (ops.reduce_scatter_rms_norm_all_gather.default, (*own, 4, name)),
        (ops.reduce_scatter_rms_norm.default, (*own, 4, name)),
        (ops.rms_norm_all_gather.default, (x[mine], None, p.weight, EPS, 5, 4, name)),
    ):
        torch.library.opcheck(operator, arguments)
    dist.destroy_process_group()


def test_opcheck() -> None:
    run_ranks(checked, 2, timeout_s=200)


def fused_blocks() -> None:
    dist.init_process_group("symm")
    for dtype in (torch.bfloat16, torch.float32):
        blocks.check_fused(
            dist.group.WORLD, "cpu", dtype, (blocks.reduced, blocks.functional, blocks.viewed),
            (library, blocks.without_eps, blocks.operator, blocks.llama, blocks.squares, blocks.gemma),
        )  # fmt: skip
    dist.destroy_process_group()


def test_pass_finds_every_spelling() -> None:
    run_ranks(fused_blocks, 2, timeout_s=280)


def left_alone() -> None:
    dist.init_process_group("symm")
    name, gloo = dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name
    w = torch.ones(HIDDEN)
    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "average": lambda x, r: library(ops.all_reduce(x, "avg", name) + r, w),
        "sum used twice": lambda x, r: (y := ops.all_reduce(x, "sum", name), library(y + r, w)),
        "no residual": lambda x, r: library(ops.all_reduce(x, "sum", name), w),
        "alpha": lambda x, r: library(torch.add(ops.all_reduce(x, "sum", name), r, alpha=2), w),
        "number": lambda x, r: library(ops.all_reduce(x, "sum", name) + 1, w),
        "broadcast": lambda x, r: library(ops.all_reduce(x, "sum", name) + r[:1], w),
        "float64": lambda x, r: library((ops.all_reduce(x, "sum", name) + r).double(), w.double()),
        "another backend": lambda x, r: library(ops.all_reduce(x, "sum", gloo) + r, w),
        "other mean": lambda x, r: (y := ops.all_reduce(x, "sum", name) + r)
        * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + EPS) * w,
        "other power": lambda x, r: (y := ops.all_reduce(x, "sum", name) + r)
        * torch.rsqrt(y.pow(4).mean(-1, keepdim=True) + EPS) * w,
        "weight that comes late": lambda x, r: library(y := ops.all_reduce(x, "sum", name) + r, y[0].sigmoid()),
    }  # fmt: skip
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    r = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9))
    for what, function in functions.items():
        counts: list[int] = []
        torch._dynamo.reset()
        found = torch.compile(function, backend=backends(counts)["dynamo"], fullgraph=True)(x, r)
        assert counts == [0], what
        torch.testing.assert_close(found, function(x, r), msg=what)
    dist.destroy_process_group()


def test_pass_leaves_other_graphs_alone() -> None:
    run_ranks(left_alone, 2, timeout_s=200)
