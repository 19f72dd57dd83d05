"""Calls on lists of one tensor a rank: the kernels write to the tensors where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmcomm.collectives.arguments import check_list, check_tensor
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.kernels.cpu.all_to_all import UNEVEN

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator


def all_gather(self: Communicator, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """As ``all_gather_into_tensor``, with an output of its own for what each rank sends.

    Args:
        tensor_list: world_size tensors like ``tensor``.
        tensor: contiguous, any dtype, the same element count on all ranks.
    """
    check_tensor(tensor, "tensor")
    parts = check_list(self, tensor_list, tensor, "tensor_list", self.rank)
    self.targets[:] = [part.data_ptr() for part in parts]
    call = encode(Kind.all_gather_into_tensor, tensor.dtype)
    status = self.kernels.all_gather(self.ctx, call, tensor.data_ptr(), tensor.nbytes, -1, -1, 0, 0)
    if status:
        self.fail(status)


def all_to_all(self: Communicator, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor]) -> None:
    """Sends ``input_list[p]`` to rank p and leaves what rank p sends in ``output_list[p]``.

    Args:
        output_list, input_list: world_size contiguous tensors of one dtype; element counts may differ. They must not
            overlap.
    """
    tensors = {"output_list": output_list, "input_list": input_list}
    for name, parts in tensors.items():
        if len(parts) != self.world_size:
            raise ArgumentError(f"{name} has {len(parts)} tensors, world_size is {self.world_size}")
        for idx, part in enumerate(parts):
            check_tensor(part, f"{name}[{idx}]")
            if part.dtype is not input_list[0].dtype:
                raise DTypeError(
                    f"{name}[{idx}] and input_list[0] must have one dtype, got {part.dtype} and {input_list[0].dtype}"
                )
    self.outgoing[0::2] = [part.nbytes for part in input_list]
    self.outgoing[1::2] = [part.data_ptr() for part in input_list]  # offsets from address 0
    self.expected[:] = [part.nbytes for part in output_list]
    self.targets[:] = [part.data_ptr() for part in output_list]
    call = encode(Kind.all_to_all_single, input_list[0].dtype)
    status = self.kernels.all_to_all(self.ctx, call, 0, UNEVEN, -1, 0)
    if status:
        self.fail(status)
