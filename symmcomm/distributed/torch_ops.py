"""``torch.ops.symmcomm.*``: the collectives as operators, for ``torch.compile``, ``torch.export`` and autograd.

    import symmcomm.distributed.torch_ops
    y = torch.ops.symmcomm.all_reduce(x, "sum", group.group_name)

Every operator takes the name of a process group as its last argument (``group.group_name``), is synchronous, and, but
for ``all_reduce_``, leaves its input alone and returns a new contiguous tensor. Gradients are those of the sum of all
ranks' losses, as in ``torch.distributed.nn``: what is copied forwards is summed backwards, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, _resolve_process_group
from torch.library import custom_op

from symmcomm.collectives.call import REDUCE_OPS
from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.schedule.dtypes import Op


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def _op(name: str) -> Any:
    if name not in Op.__members__:
        raise ArgumentError(f"op={name!r} is not a reduction; known are {', '.join(Op.__members__)}")
    return REDUCE_OPS[Op[name]]


def _part(tensor: torch.Tensor, size: int) -> list[int]:
    """Shape of one rank's part of dimension 0."""
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise ArgumentError(f"dimension 0 of shape {tuple(tensor.shape)} is not a multiple of the group's size {size}")
    return [tensor.shape[0] // size, *tensor.shape[1:]]


@custom_op("symmcomm::all_reduce", mutates_args=())
def all_reduce(input: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """The reduction of all ranks' inputs, of the shape and dtype of ``input``."""
    output = input.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, _op(op), group=_group(group_name))
    return output


@custom_op("symmcomm::all_reduce_", mutates_args=("input",))
def all_reduce_(input: torch.Tensor, op: str, group_name: str) -> None:
    """Replaces ``input`` by the reduction of all ranks'."""
    dist.all_reduce(input, _op(op), group=_group(group_name))


@custom_op("symmcomm::reduce", mutates_args=())
def reduce(input: torch.Tensor, dst: int, op: str, group_name: str) -> torch.Tensor:
    """The reduction on rank ``dst`` of the group, zeros on the others."""
    group, output = _group(group_name), input.clone(memory_format=torch.contiguous_format)
    dist.reduce(output, group_dst=dst, op=_op(op), group=group)
    return output if group.rank() == dst else torch.zeros_like(output)


@custom_op("symmcomm::reduce_scatter_tensor", mutates_args=())
def reduce_scatter_tensor(input: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """This rank's part, of dimension 0, of the reduction of all inputs."""
    group = _group(group_name)
    output = input.new_empty(_part(input, group.size()))
    group._reduce_scatter_base(output, input.contiguous(), _options(ReduceScatterOptions(), op)).wait()
    return output


@custom_op("symmcomm::all_gather_into_tensor", mutates_args=())
def all_gather_into_tensor(input: torch.Tensor, group_name: str) -> torch.Tensor:
    """All ranks' inputs, one after the other in dimension 0."""
    group = _group(group_name)
    output = input.new_empty([group.size() * input.shape[0], *input.shape[1:]])
    group._allgather_base(output, input.contiguous(), _options(AllgatherOptions())).wait()
    return output


@custom_op("symmcomm::all_to_all_single", mutates_args=())
def all_to_all_single(
    input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> torch.Tensor:
    """Rows (of dimension 0) to and from each rank; empty split sizes mean equal parts."""
    rows = sum(output_split_sizes) if output_split_sizes else input.shape[0]
    output = input.new_empty([rows, *input.shape[1:]])
    dist.all_to_all_single(
        output, input.contiguous(), list(output_split_sizes), list(input_split_sizes), group=_group(group_name)
    )
    return output


@custom_op("symmcomm::broadcast", mutates_args=())
def broadcast(input: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    """The input of rank ``src`` of the group; that of the others gives shape and dtype only."""
    output = input.clone(memory_format=torch.contiguous_format)
    dist.broadcast(output, group_src=src, group=_group(group_name))
    return output


@custom_op("symmcomm::gather", mutates_args=())
def gather(input: torch.Tensor, dst: int, group_name: str) -> torch.Tensor:
    """All ranks' inputs, one after the other in dimension 0, on rank ``dst``; no rows on the others."""
    group = _group(group_name)
    parts = [torch.empty_like(input) for _ in range(group.size())] if group.rank() == dst else None
    dist.gather(input.contiguous(), parts, group_dst=dst, group=group)
    return input.new_empty([0, *input.shape[1:]]) if parts is None else torch.cat(parts)


@custom_op("symmcomm::scatter", mutates_args=())
def scatter(input: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    """This rank's part, of dimension 0, of rank ``src``'s input; that of the others gives shape and dtype only."""
    group = _group(group_name)
    output = input.new_empty(_part(input, group.size()))
    parts = list(input.contiguous().chunk(group.size())) if group.rank() == src else None
    dist.scatter(output, parts, group_src=src, group=group)
    return output


@custom_op("symmcomm::barrier", mutates_args=())
def barrier(token: torch.Tensor, group_name: str) -> torch.Tensor:
    """Waits for all ranks; returns a copy of ``token``, through which a compiler sees what comes before and after."""
    dist.barrier(_group(group_name))
    return token.clone()


def _options(options: Any, op: str | None = None) -> Any:
    options.asyncOp = False
    if op is not None:
        options.reduceOp = _op(op)
    return options


# Shapes, for tracing.


def _like(input: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _nothing(input: torch.Tensor, op: str, group_name: str) -> None:
    return None


for _same in (all_reduce, reduce, broadcast, barrier):
    _same.register_fake(_like)
all_reduce_.register_fake(_nothing)


@reduce_scatter_tensor.register_fake
def _(input: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    return input.new_empty(_part(input, _group(group_name).size()))


@all_gather_into_tensor.register_fake
def _(input: torch.Tensor, group_name: str) -> torch.Tensor:
    return input.new_empty([_group(group_name).size() * input.shape[0], *input.shape[1:]])


@all_to_all_single.register_fake
def _(
    input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> torch.Tensor:
    rows = sum(output_split_sizes) if output_split_sizes else input.shape[0]
    return input.new_empty([rows, *input.shape[1:]])


@gather.register_fake
def _(input: torch.Tensor, dst: int, group_name: str) -> torch.Tensor:
    group = _group(group_name)
    return input.new_empty([group.size() * input.shape[0] if group.rank() == dst else 0, *input.shape[1:]])


@scatter.register_fake
def _(input: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    return input.new_empty(_part(input, _group(group_name).size()))


# Gradients. They need the arguments and the shape of the input, no values.


def _scale(op: str, group_name: str) -> float:
    if op not in ("sum", "avg"):
        raise DTypeError(f"op={op} has no gradient; sum and avg have")
    return 1.0 if op == "sum" else 1.0 / _group(group_name).size()


def _gather_gradient(grad: torch.Tensor, shape: Sequence[int], dst: int, group_name: str) -> torch.Tensor:
    group = _group(group_name)
    if group.rank() != dst:  # nothing came out here: anything of the right shape goes into the scatter
        grad = grad.new_zeros([group.size() * shape[0], *shape[1:]])
    part: torch.Tensor = ops.scatter(grad, dst, group_name)
    return part


def _scatter_gradient(grad: torch.Tensor, shape: Sequence[int], src: int, group_name: str) -> torch.Tensor:
    gathered: torch.Tensor = ops.gather(grad, src, group_name)
    if _group(group_name).rank() == src:
        return gathered
    return torch.cat([gathered, grad.new_zeros(shape)])  # of no rows and all; a compiler must see the gather used


ops: Any = torch.ops.symmcomm

_GRADIENTS: dict[Any, Callable[..., torch.Tensor]] = {
    all_reduce: lambda grad, _, op, group: ops.all_reduce(grad, "sum", group) * _scale(op, group),
    reduce: lambda grad, _, dst, op, group: ops.broadcast(grad, dst, group) * _scale(op, group),
    reduce_scatter_tensor: lambda grad, _, op, group: ops.all_gather_into_tensor(grad, group) * _scale(op, group),
    all_gather_into_tensor: lambda grad, _, group: ops.reduce_scatter_tensor(grad, "sum", group),
    all_to_all_single: lambda grad, _, rows_out, rows_in, group: ops.all_to_all_single(grad, rows_in, rows_out, group),
    broadcast: lambda grad, _, src, group: ops.reduce(grad, src, "sum", group),
    gather: _gather_gradient,
    scatter: _scatter_gradient,
    barrier: lambda grad, _, group: grad,
}
"""``gradient(gradient of the output, shape of the input, other arguments)``."""


def _differentiate(operator: Any, gradient: Callable[..., torch.Tensor]) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shape, ctx.others = inputs[0].shape, inputs[1:]

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient(grad.contiguous(), ctx.shape, *ctx.others), *(None for _ in ctx.others)

    operator.register_autograd(backward, setup_context=setup_context)


for _operator, _gradient in _GRADIENTS.items():
    _differentiate(_operator, _gradient)
    torch.fx.node.has_side_effect(_operator._opoverload)  # kept if its result is unused on some rank: the others wait
