"""Calls on lists of one tensor a rank: the kernels write to the tensors where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmcomm.checks import Ranked
from symmcomm.collectives.arguments import check_list, check_tensor, gpu_of
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.kernels.cpu.all_to_all import UNEVEN

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_CPU = torch.device("cpu")


def all_gather(self: Communicator, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """As ``all_gather_into_tensor``, with an output of its own for what each rank sends.

    Args:
        tensor_list: world_size tensors like ``tensor``.
        tensor: contiguous, any dtype, the same element count on all ranks.
    """
    if (gpu := gpu_of(self, tensor, "tensor")) is not None:
        return gpu.all_gather(tensor_list, tensor)
    check_tensor(tensor, "tensor")
    parts = check_list(self, tensor_list, tensor, "tensor_list", self.rank)
    call = encode(Kind.all_gather_into_tensor, tensor.dtype)
    with self.tables():
        self.targets[:] = [part.data_ptr() for part in parts]
        status = self.kernels.all_gather(self.ctx, call, tensor.data_ptr(), tensor.nbytes, -1, -1, 0, 0)
    if status:
        self.fail(status)


def all_to_all(self: Communicator, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor]) -> None:
    """Sends ``input_list[p]`` to rank p and leaves what rank p sends in ``output_list[p]``.

    Args:
        output_list, input_list: world_size contiguous tensors of one dtype; element counts may differ. They must not
            overlap.
    """
    if input_list and (gpu := gpu_of(self, input_list[0], "input_list[0]")) is not None:
        return gpu.all_to_all(output_list, input_list)
    check_lists(self, output_list, input_list)
    call = encode(Kind.all_to_all_single, input_list[0].dtype)
    with self.tables():
        self.outgoing[0::2] = [part.nbytes for part in input_list]
        self.outgoing[1::2] = [part.data_ptr() for part in input_list]  # offsets from address 0
        self.expected[:] = [part.nbytes for part in output_list]
        self.targets[:] = [part.data_ptr() for part in output_list]
        status = self.kernels.all_to_all(self.ctx, call, 0, UNEVEN, -1, 0)
    if status:
        self.fail(status)


def check_lists(
    comm: Ranked,
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    device: torch.device = _CPU,
) -> None:
    """Raises unless both lists have a tensor on the device for each rank, all of one dtype."""
    for name, parts in {"output_list": output_list, "input_list": input_list}.items():
        if len(parts) != comm.world_size:
            raise ArgumentError(f"{name} has {len(parts)} tensors, world_size is {comm.world_size}")
        for idx, part in enumerate(parts):
            check_tensor(part, f"{name}[{idx}]", device)
            if part.dtype is not input_list[0].dtype:
                raise DTypeError(
                    f"{name}[{idx}] and input_list[0] must have one dtype, got {part.dtype} and {input_list[0].dtype}"
                )
