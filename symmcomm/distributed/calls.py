"""The calls of c10d in terms of a communicator's: lists, several tensors at once, tensors that are not contiguous.

Every function here is collective and raises what the communicator raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from symmcomm.collectives.call import REDUCE_OPS
from symmcomm.communicator import Communicator
from symmcomm.errors import ArgumentError, DTypeError

Tensors = Sequence[torch.Tensor]


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous, else a contiguous copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_conj().resolve_neg()


def settle(tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Brings a result back that was made in ``as_dense(tensor)``, or in the parts of that. A communication is nothing
    that gradients flow through: the tensor may be a parameter."""
    if dense is not tensor:
        tensor.detach().copy_(torch.view_as_complex(dense) if tensor.is_complex() and not dense.is_complex() else dense)


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts, which its sum is the sum of."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


NAMES = {hash(dist.ReduceOp(theirs)): ours.name for ours, theirs in REDUCE_OPS.items()}
"""The communicator's operations by hash of a ReduceOp, which is its kind: comparing two takes longer than a call."""


def parse(op: dist.ReduceOp, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The communicator's operation, and the tensor it is for: PREMUL_SUM is the sum of scaled tensors, a sum of complex
    tensors that of their parts."""
    name = NAMES.get(hash(op))
    if name is not None:
        return name, parts(tensor) if tensor.is_complex() and name in ("sum", "avg") else tensor
    if op != dist.ReduceOp.PREMUL_SUM:  # type: ignore[comparison-overlap]  # they compare by kind
        known = ", ".join(theirs.name for theirs in REDUCE_OPS.values())
        raise ArgumentError(f"op={op} is not a reduction; known are {known}, PREMUL_SUM")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise DTypeError(f"op=premul_sum is not defined for dtype {tensor.dtype}")
    factor: Any = op.__getstate__()
    return "sum", parts(tensor) * factor[1]


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
    name, dense = parse(op, as_dense(tensor))
    comm.all_reduce(dense, name)
    settle(tensor, dense)


def all_reduce_each(comm: Communicator, tensors: Tensors, op: dist.ReduceOp) -> None:
    for tensor in tensors:
        all_reduce(comm, tensor, op)


def reduce(comm: Communicator, tensor: torch.Tensor, dst: int, op: dist.ReduceOp) -> None:
    """Leaves the tensor as it is on ranks other than ``dst``."""
    name, dense = parse(op, as_dense(tensor))
    comm.reduce(dense, dst, name)
    if comm.rank == dst:
        settle(tensor, dense)


def broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    dense = as_dense(tensor)
    comm.broadcast(dense, src)
    settle(tensor, dense)


def all_gather(comm: Communicator, outputs: Tensors, tensor: torch.Tensor) -> None:
    """Outputs of unlike sizes are broadcast one after the other; all ranks then have unlike ones."""
    targets = [as_dense(output) for output in outputs]
    if len({target.numel() for target in targets}) <= 1:
        comm.all_gather(targets, as_dense(tensor))
    else:
        _all_gather_uneven(comm, targets, as_dense(tensor))
    for output, target in zip(outputs, targets, strict=True):
        settle(output, target)


def _all_gather_uneven(comm: Communicator, targets: Tensors, tensor: torch.Tensor) -> None:
    own = targets[comm.rank] if len(targets) == comm.world_size else None
    if own is None or own.numel() != tensor.numel() or any(target.dtype is not tensor.dtype for target in targets):
        raise ArgumentError(
            f"tensor_list must have {comm.world_size} tensors of {tensor.dtype}, number {comm.rank} with "
            f"{tensor.numel()} elements; got {[(tuple(target.shape), target.dtype) for target in targets]}"
        )
    own.detach().copy_(tensor.view_as(own))
    for src, target in enumerate(targets):
        comm.broadcast(target, src)


def all_gather_single(comm: Communicator, output: torch.Tensor, tensor: torch.Tensor) -> None:
    dense = as_dense(output)
    comm.all_gather_into_tensor(dense, as_dense(tensor))
    settle(output, dense)


def all_gather_each(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        all_gather_single(comm, output, tensor)


def all_gather_lists(comm: Communicator, output_lists: Sequence[Tensors], inputs: Tensors) -> None:
    """``output_lists[rank][i]`` receives tensor i of the rank, as gloo's ``allgather_coalesced`` has it."""
    for index, tensor in enumerate(inputs):
        all_gather(comm, [outputs[index] for outputs in output_lists], tensor)


def gather(comm: Communicator, outputs: Tensors | None, tensor: torch.Tensor, dst: int) -> None:
    targets = None if outputs is None else [as_dense(output) for output in outputs]
    comm.gather(as_dense(tensor), targets, dst)
    for output, target in zip(outputs or (), targets or (), strict=True):
        settle(output, target)


def scatter(comm: Communicator, output: torch.Tensor, inputs: Tensors | None, src: int) -> None:
    dense = as_dense(output)
    comm.scatter(dense, None if inputs is None else [as_dense(tensor) for tensor in inputs], src)
    settle(output, dense)


def reduce_scatter(comm: Communicator, output: torch.Tensor, inputs: Tensors, op: dist.ReduceOp) -> None:
    """Inputs of unlike sizes are reduced one after the other; all ranks then have unlike ones."""
    if len(inputs) != comm.world_size or inputs[comm.rank].numel() != output.numel():
        raise ArgumentError(
            f"input_list must have {comm.world_size} tensors, number {comm.rank} with the {output.numel()} elements of "
            f"output; got {[tuple(tensor.shape) for tensor in inputs]}"
        )
    if len({tensor.numel() for tensor in inputs}) == 1:
        reduce_scatter_single(comm, output, torch.cat([tensor.reshape(-1) for tensor in inputs]), op)
        return
    for dst, tensor in enumerate(inputs):
        part = tensor.clone(memory_format=torch.contiguous_format)
        reduce(comm, part, dst, op)
        if comm.rank == dst:
            output.detach().copy_(part.view_as(output))


def reduce_scatter_single(comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
    name, source = parse(op, as_dense(tensor))
    dense = as_dense(output)
    comm.reduce_scatter_tensor(dense if source.is_complex() else parts(dense), source, name)
    settle(output, dense)


def reduce_scatter_each(comm: Communicator, outputs: Tensors, inputs: Tensors, op: dist.ReduceOp) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        reduce_scatter_single(comm, output, tensor, op)


def all_to_all(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    targets = [as_dense(output) for output in outputs]
    comm.all_to_all(targets, [as_dense(tensor) for tensor in inputs])
    for output, target in zip(outputs, targets, strict=True):
        settle(output, target)


def all_to_all_single(
    comm: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
) -> None:
    dense = as_dense(output)
    comm.all_to_all_single(dense, as_dense(tensor), output_split_sizes, input_split_sizes)
    settle(output, dense)


def barrier(comm: Communicator, timeout_s: float | None) -> None:
    comm.barrier(timeout_s=timeout_s)
