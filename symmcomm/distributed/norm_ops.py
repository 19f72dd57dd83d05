"""``torch.ops.symmcomm.*``: the norms of ``symmcomm.fused.norm`` as operators, for ``torch.compile``, ``torch.export``.

    import symmcomm.distributed.norm_ops
    y, residual = torch.ops.symmcomm.all_reduce_rms_norm(x, residual, weight, 1e-5, group.group_name)

Arguments and results are those of the functions of the same names. Collectives take the name of a process group of
the backend ``symm``. All tensors that come out are new; none has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.library import custom_op

from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.distributed.torch_ops import _group
from symmcomm.errors import ArgumentError
from symmcomm.fused import norm
from symmcomm.fused.rows import row_slice

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _symm_group(name: str) -> SymmProcessGroup:
    group = _group(name)
    if not isinstance(group, SymmProcessGroup):
        raise ArgumentError(f"group_name={name!r} is a group of backend {group.name()}, expected symm")
    return group


def _run(call: Callable[..., Pair], group_name: str, input: torch.Tensor, *others: object) -> Pair:
    """``call(comm, input, *others)`` after all calls of the group that were made before."""
    group: Any = _symm_group(group_name)
    if input.is_cuda:
        group.side(input.device)  # opens it, or says that there is none
        return call(group.comm, input, *others)
    results: list[Pair] = []
    group.do(lambda comm: results.append(call(comm, input, *others)))
    return results[0]


def _own_shape(rows: int, hidden: int, group_name: str) -> list[int]:
    group = _group(group_name)
    mine = row_slice(rows, group.rank(), group.size())
    return [mine.stop - mine.start, hidden]


def _num_rows(input: torch.Tensor) -> int:
    return input.numel() // input.shape[-1]


@custom_op("symmcomm::rms_norm", mutates_args=())
def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """See ``symmcomm.fused.norm``."""
    return norm.rms_norm(input, weight, eps, bias=bias, weight_bias=weight_bias)


@custom_op("symmcomm::add_rms_norm", mutates_args=())
def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``."""
    return norm.add_rms_norm(input, residual, weight, eps, bias=bias, weight_bias=weight_bias)


@custom_op("symmcomm::qk_norm", mutates_args=())
def qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``."""
    return norm.qk_norm(q, k, q_weight, k_weight, eps, weight_bias=weight_bias)


@custom_op("symmcomm::all_reduce_rms_norm", mutates_args=())
def all_reduce_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_name: str,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``."""
    call = partial(norm.all_reduce_rms_norm, bias=bias, weight_bias=weight_bias)
    return _run(call, group_name, input.contiguous(), residual, weight, eps)


@custom_op("symmcomm::all_reduce_rms_norm_float8", mutates_args=())
def all_reduce_rms_norm_float8(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_name: str,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Triple:
    """(normalised as float8_e4m3fn, new residual, scales) of ``all_reduce_rms_norm``."""
    scales = input.new_empty([_num_rows(input)], dtype=torch.float32)
    call = partial(norm.all_reduce_rms_norm, bias=bias, weight_bias=weight_bias, scales=scales)
    return *_run(call, group_name, input.contiguous(), residual, weight, eps), scales


@custom_op("symmcomm::reduce_scatter_rms_norm_all_gather", mutates_args=())
def reduce_scatter_rms_norm_all_gather(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    max_ctas: int,
    group_name: str,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``."""
    call = partial(norm.reduce_scatter_rms_norm_all_gather, max_ctas=max_ctas, bias=bias, weight_bias=weight_bias)
    return _run(call, group_name, input.contiguous(), residual, weight, eps)


@custom_op("symmcomm::reduce_scatter_rms_norm", mutates_args=())
def reduce_scatter_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    max_ctas: int,
    group_name: str,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``."""
    call = partial(norm.reduce_scatter_rms_norm, max_ctas=max_ctas, bias=bias, weight_bias=weight_bias)
    return _run(call, group_name, input.contiguous(), residual, weight, eps)


@custom_op("symmcomm::rms_norm_all_gather", mutates_args=())
def rms_norm_all_gather(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rows: int,
    max_ctas: int,
    group_name: str,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> Pair:
    """See ``symmcomm.fused.norm``; ``rows`` are those of all ranks."""
    call = partial(norm.rms_norm_all_gather, rows=rows, max_ctas=max_ctas, bias=bias, weight_bias=weight_bias)
    out, new_residual = _run(call, group_name, input, residual, weight, eps)
    return out, new_residual.clone() if residual is None else new_residual


# Shapes, for tracing.


@rms_norm.register_fake
def _(input: torch.Tensor, *_: object) -> torch.Tensor:
    return input.new_empty(input.shape)


@add_rms_norm.register_fake
def _(input: torch.Tensor, *_: object) -> Pair:
    return input.new_empty(input.shape), input.new_empty(input.shape)


@qk_norm.register_fake
def _(q: torch.Tensor, k: torch.Tensor, *_: object) -> Pair:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@all_reduce_rms_norm.register_fake
def _(input: torch.Tensor, *_: object) -> Pair:
    return input.new_empty(input.shape), input.new_empty(input.shape)


@all_reduce_rms_norm_float8.register_fake
def _(input: torch.Tensor, *_: object) -> Triple:
    scales = input.new_empty([_num_rows(input)], dtype=torch.float32)
    return input.new_empty(input.shape, dtype=torch.float8_e4m3fn), input.new_empty(input.shape), scales


def _fake_sharded(input: torch.Tensor, group_name: str) -> torch.Tensor:
    return input.new_empty(_own_shape(_num_rows(input), input.shape[-1], group_name))


@reduce_scatter_rms_norm_all_gather.register_fake
def _(
    input: torch.Tensor, residual: object, weight: object, eps: float, max_ctas: int, group_name: str, *_: object
) -> Pair:
    return input.new_empty(input.shape), _fake_sharded(input, group_name)


@reduce_scatter_rms_norm.register_fake
def _(
    input: torch.Tensor, residual: object, weight: object, eps: float, max_ctas: int, group_name: str, *_: object
) -> Pair:
    return _fake_sharded(input, group_name), _fake_sharded(input, group_name)


@rms_norm_all_gather.register_fake
def _(input: torch.Tensor, residual: object, weight: object, eps: float, rows: int, *_: object) -> Pair:
    return input.new_empty([rows, input.shape[-1]]), input.new_empty(input.shape)


for _collective in (
    all_reduce_rms_norm,
    all_reduce_rms_norm_float8,
    reduce_scatter_rms_norm_all_gather,
    reduce_scatter_rms_norm,
    rms_norm_all_gather,
):
    torch.fx.node.has_side_effect(_collective._opoverload)  # kept if its results are unused on some rank
