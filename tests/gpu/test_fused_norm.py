"""The fused norms on GPUs: right values from every kernel they choose, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import NEEDS_GPU, PAIR, WORLDS, communicator, start
from torch import Tensor

from symmcomm import ArgumentError, Communicator
from symmcomm.fused.norm import (
    add_rms_norm,
    all_reduce_rms_norm,
    fused_rs_ln_ag_cta,
    qk_norm,
    reduce_scatter_rms_norm,
    reduce_scatter_rms_norm_all_gather,
    rms_norm,
    rms_norm_all_gather,
)
from symmcomm.fused.rows import row_slice
from tests.fused.rows import EPS, Problem, check, check_scaled, expected, problem

pytest.importorskip("cutlass")
pytestmark = NEEDS_GPU

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (0, 8, BF16), (1, 8, FP32), (3, 5, FP16), (16, 2048, BF16), (130, 96, FP32), (401, 4096, BF16), (2, 32768, FP16),
]  # fmt: skip
"""Rows, elements and dtype: what there is to compile, in every rank, is what takes time here."""


def on_gpu(comm: Communicator, p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's input, the residual, weight and bias."""
    return tuple(tensor.cuda() for tensor in (p.inputs[comm.rank], *p[1:]))  # type: ignore[return-value]


def same(found: Tensor, right: Tensor, what: str) -> None:
    assert torch.equal(found.cpu(), right), what


def symmetric(comm: Communicator, values: Tensor) -> Tensor:
    tensor = comm.empty(*values.shape, dtype=values.dtype, device="cuda")
    return tensor.copy_(values)


def all_forms(comm: Communicator, p: Problem, symmetrically: bool, **extra: Any) -> None:
    x, residual, weight, bias = on_gpu(comm, p)
    rows, hidden = p.residual.shape
    mine, what = row_slice(rows, comm.rank, comm.world_size), f"{rows} x {hidden} {x.dtype} {symmetrically} {extra}"
    right = expected(p.inputs, p.residual, p.weight, p.bias, 1.0)
    own = type(right)(right.value[mine], right.tolerance[mine])
    options: dict[str, Any] = {"bias": bias, "weight_bias": 1.0, **extra}
    outputs: tuple[Tensor, ...] = ()
    if symmetrically:
        x, outputs = symmetric(comm, x), (symmetric(comm, x), symmetric(comm, x))
    kept = {"out": outputs[0], "new_residual": outputs[1]} if outputs else {}
    out, new = all_reduce_rms_norm(comm, x, residual, weight, EPS, **options, **kept)
    check(out.cpu(), right, f"all_reduce {what}")
    same(new, p.new_residual, f"all_reduce {what}")
    kept.pop("new_residual", None)
    out, new = reduce_scatter_rms_norm_all_gather(comm, x, residual[mine], weight, EPS, max_ctas=3, **options, **kept)
    check(out.cpu(), right, f"reduce_scatter, all_gather {what}")
    same(new, p.new_residual[mine], f"reduce_scatter, all_gather {what}")
    out, new = reduce_scatter_rms_norm(comm, x, residual[mine], weight, EPS, **options)
    check(out.cpu(), own, f"reduce_scatter {what}")
    same(new, p.new_residual[mine], f"reduce_scatter {what}")
    summed = p.sum.cuda()
    out, new = rms_norm_all_gather(comm, summed[mine], residual[mine], weight, EPS, rows=rows, **options, **kept)
    check(out.cpu(), expected([p.sum], p.residual, p.weight, p.bias, 1.0), f"all_gather {what}")
    same(new, p.new_residual[mine], f"all_gather {what}")
    same(x, p.inputs[comm.rank], f"the input {what}")
    for tensor in (x, *outputs) if symmetrically else ():
        comm.free(tensor)


def forms(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        for rows, hidden, dtype in SHAPES:
            p = problem(rows, hidden, dtype, comm.world_size)
            for symmetrically in (False, True) if rows else (False,):
                all_forms(comm, p, symmetrically)


def more(num_gpus: int) -> None:
    """float8, no residual, rows apart, results in the place of arguments, programmatic dependent launch."""
    with communicator(num_gpus) as comm:
        for rows, hidden in ((5, 512), (70, 2048), (9, 100)):
            p = problem(rows, hidden, torch.bfloat16, comm.world_size)
            x, residual, weight, _ = on_gpu(comm, p)
            mine, right = row_slice(rows, comm.rank, comm.world_size), expected(p.inputs, p.residual, p.weight)
            scales = torch.empty(rows, device="cuda")
            found, _ = all_reduce_rms_norm(comm, x, residual, weight, EPS, scales=scales)
            check_scaled(found.cpu(), scales.cpu(), right, "all_reduce to float8")
            scales.zero_()
            found, _ = reduce_scatter_rms_norm_all_gather(comm, x, residual[mine], weight, EPS, scales=scales)
            check_scaled(found.cpu(), scales.cpu(), right, "reduce_scatter and all_gather to float8")
            for call in (all_reduce_rms_norm, reduce_scatter_rms_norm_all_gather):
                part = slice(None) if call is all_reduce_rms_norm else mine
                out, new = call(comm, x, None, weight, EPS)
                check(out.cpu(), expected(p.inputs, None, p.weight), "no residual")
                same(new, p.sum[part], "no residual")
                wide = torch.zeros(rows, hidden + 24, dtype=x.dtype, device="cuda")
                apart, placed = wide[:, 8 : hidden + 8].copy_(residual), x.clone()
                call(comm, placed, apart[part], weight, EPS, out=placed, new_residual=apart[part], launch_with_pdl=True)
                check(placed.cpu(), right, "in place")
                same(apart[part], p.new_residual[part], "in place")
                assert not wide[:, :8].any()
                assert not wide[:, hidden + 8 :].any()


def alone(num_gpus: int) -> None:
    """The norms that need no peer, also on a communicator of one."""
    for rows, hidden, dtype in SHAPES:
        p = problem(rows, hidden, dtype)
        x, residual, weight, bias = (tensor.cuda() for tensor in (p.inputs[0], *p[1:]))
        found = rms_norm(x, weight, EPS, bias=bias, weight_bias=1.0)
        check(found.cpu(), expected(p.inputs, None, p.weight, p.bias, 1.0), "rms_norm")
        found, new = add_rms_norm(x, residual, weight, EPS)
        check(found.cpu(), expected(p.inputs, p.residual, p.weight), "add_rms_norm")
        same(new, p.new_residual, "add_rms_norm")
    for head_dim, dtype in ((64, FP16), (128, BF16), (256, FP32), (80, BF16)):
        qkv = problem(5, 10 * head_dim, dtype).inputs[0].view(5, 10, head_dim)
        _, _, q_weight, k_weight = problem(1, head_dim, dtype)
        moved = qkv.cuda()
        q, k = moved[:, :6], moved[:, 6:8]
        new_q, _ = qk_norm(q, k, q_weight.cuda(), k_weight.cuda(), EPS, weight_bias=1.0)
        weights = q_weight.cuda(), k_weight.cuda()
        torch.cuda.synchronize()  # they are older than the kernel before the next
        qk_norm(q, k, *weights, EPS, weight_bias=1.0, q_out=q, k_out=k, launch_with_pdl=True)
        check(q.cpu(), expected([qkv[:, :6]], None, q_weight, weight_bias=1.0), "q")
        check(k.cpu(), expected([qkv[:, 6:8]], None, k_weight, weight_bias=1.0), "k")
        same(new_q, q.cpu(), "q")
        same(moved[:, 8:], qkv[:, 8:], "v")


def tokenweave(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        rank, size = comm.rank, comm.world_size
        p = problem(6 * size, 64, torch.bfloat16, size)
        x, residual, weight, _ = on_gpu(comm, p)
        buffer = symmetric(comm, x)
        handle, start_row = comm.rendezvous(buffer), 0
        for num in (4, 2):
            mine = slice(start_row + rank * num, start_row + (rank + 1) * num)
            part, offset = buffer[mine], mine.start * 128
            fused_rs_ln_ag_cta(part, residual[mine], weight, handle, rank, size, 8, offset, EPS)
            same(residual[mine], p.new_residual[mine], "residual")
            start_row += num * size
        check(buffer.cpu(), expected(p.inputs, p.residual, p.weight), "both batches")


def captured(num_gpus: int) -> None:
    """A graph of all of them, replayed on new data."""
    with communicator(num_gpus) as comm:
        first = problem(8, 1024, torch.bfloat16, comm.world_size)
        second = first._replace(inputs=[-2 * one for one in first.inputs])
        x, residual, weight, _ = on_gpu(comm, first)
        mine = row_slice(8, comm.rank, comm.world_size)

        def run() -> list[Tensor]:
            whole, _ = all_reduce_rms_norm(comm, x, residual, weight, EPS)
            return [whole, reduce_scatter_rms_norm_all_gather(comm, x, residual[mine], weight, EPS)[0]]

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for p in (first, second, first):
            x.copy_(p.inputs[comm.rank])
            for _ in range(3):
                graph.replay()
            for out in found:
                check(out.cpu(), expected(p.inputs, p.residual, p.weight), "replayed")


def refused(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        x, w = torch.ones(4, 8, device="cuda"), torch.ones(8, device="cuda")
        for call, words in (
            (lambda: all_reduce_rms_norm(comm, x, x.cpu(), w, EPS), "residual is on device cpu, input on cuda"),
            (lambda: all_reduce_rms_norm(comm, x, None, w.cpu(), EPS), "weight is on device cpu"),
            (lambda: reduce_scatter_rms_norm(comm, x, None, w, EPS, max_ctas=65), "max_ctas=65 is not in 1..64"),
        ):
            with pytest.raises(ArgumentError, match=words):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("body", [forms, more, tokenweave, captured, refused], ids=lambda body: body.__name__)
@pytest.mark.parametrize(("world_size", "num_gpus"), WORLDS)
def test_fused_norms(body: Callable[[int], None], world_size: int, num_gpus: int) -> None:
    start(body, world_size, num_gpus)


def test_norms_alone() -> None:
    start(alone, 1, PAIR)
