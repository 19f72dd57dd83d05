"""Calls in which every taker gets its own: all-to-all and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from symmcomm.checks import Ranked
from symmcomm.collectives.arguments import check_list, check_tensor, gpu_of, prepare_pair, prepare_rooted
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.kernels.cpu.all_to_all import UNEVEN

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_ALL_TO_ALL = Kind.all_to_all_single


def all_to_all_single(
    self: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> None:
    """Sends part p of ``input`` to rank p, and leaves what rank p sends in part p of ``output``.

    Args:
        output, input: contiguous, any one dtype; without splits of the same element count, a multiple of world_size.
            ``output`` may be ``input`` if there are no splits; if ``input`` is symmetric, peers read it in place.
        output_split_sizes, input_split_sizes: rows (of dimension 0) from and to each rank; sums are the tensors' rows.
            On all ranks or on none.
    """
    if _absent(output_split_sizes) and _absent(input_split_sizes):
        return _even(self, output, input)
    if (gpu := gpu_of(self, output, "output")) is not None:
        return gpu.all_to_all_single(output, input, output_split_sizes, input_split_sizes)
    check_tensor(output, "output")
    check_tensor(input, "input")
    if output.dtype is not input.dtype:
        raise DTypeError(f"output and input must have one dtype, got {output.dtype} and {input.dtype}")
    _uneven(self, output, input, output_split_sizes, input_split_sizes)


def _absent(splits: object) -> bool:
    """No splits are None or empty; a tensor, say, is neither."""
    return splits is None or (isinstance(splits, Sequence) and not splits)


def _even(self: Communicator, output: torch.Tensor, input: torch.Tensor) -> None:
    call = prepare_pair(self, _ALL_TO_ALL, output, input, 1, 1)
    if call is None:
        return self.gpu_side.all_to_all_single(output, input)
    num_bytes, source, target = input.nbytes, input.data_ptr(), output.data_ptr()
    if abs(source - target) < num_bytes or input.numel() % self.world_size:
        even_part(self, output, input)  # the same tensor, or an error
    status = self.kernels.all_to_all(self.ctx, call, source, num_bytes // self.world_size, -1, target)
    if status:
        self.fail(status)


def even_part(comm: Ranked, output: torch.Tensor, input: torch.Tensor) -> int:
    """Elements of each rank's part. Raises unless the parts are even and the tensors the same or apart."""
    part, rest = divmod(input.numel(), comm.world_size)
    if rest:
        raise ArgumentError(
            f"input has {input.numel()} elements, which world_size={comm.world_size} does not divide: give split sizes"
        )
    if input.data_ptr() != output.data_ptr():
        check_apart(output, input, "a partial overlap is not allowed")
    return part


def check_apart(output: torch.Tensor, input: torch.Tensor, why: str) -> None:
    """Raises ArgumentError if the tensors have memory in common."""
    source, target = input.data_ptr(), output.data_ptr()
    if source < target + output.nbytes and target < source + input.nbytes and output.nbytes and input.nbytes:
        raise ArgumentError(f"output and input overlap: {why}")


def row_bytes(
    self: Ranked, tensor: torch.Tensor, splits: Sequence[int] | None, name: str
) -> tuple[list[int], list[int]]:
    """(bytes, offset) of each rank's rows, as two lists."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None or _absent(splits):
        if rows % self.world_size:
            raise ArgumentError(f"{name} has {rows} rows, which world_size={self.world_size} does not divide")
        splits = [rows // self.world_size] * self.world_size
    if not isinstance(splits, Sequence):
        raise ArgumentError(f"{name}_split_sizes={splits!r} is not a sequence of whole numbers")
    if len(splits) != self.world_size:
        raise ArgumentError(f"{name}_split_sizes has {len(splits)} entries, world_size is {self.world_size}")
    if not all(isinstance(split, int) for split in splits):
        raise ArgumentError(f"{name}_split_sizes={list(splits)} has an entry that is not a whole number")
    if any(split < 0 for split in splits):
        raise ArgumentError(f"{name}_split_sizes={list(splits)} has a negative entry")
    if sum(splits) != rows:
        raise ArgumentError(f"{name}_split_sizes={list(splits)} add up to {sum(splits)}, {name} has {rows} rows")
    sizes = [split * (tensor.nbytes // max(rows, 1)) for split in splits]
    return sizes, [0, *accumulate(sizes)][:-1]


def _uneven(
    self: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> None:
    sizes_out, offsets_out = row_bytes(self, output, output_split_sizes, "output")
    sizes_in, offsets_in = row_bytes(self, input, input_split_sizes, "input")
    check_apart(output, input, "uneven splits do not allow it")
    target = output.data_ptr()
    with self.tables():
        self.outgoing[0::2], self.outgoing[1::2] = sizes_in, offsets_in
        self.expected[:] = sizes_out
        self.targets[:] = [target + offset for offset in offsets_out]
        call = encode(Kind.all_to_all_single, input.dtype)
        status = self.kernels.all_to_all(self.ctx, call, input.data_ptr(), UNEVEN, -1, 0)
    if status:
        self.fail(status)


def scatter(
    self: Communicator, tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int = 0
) -> None:
    """Sends tensor p of rank ``src``'s list to rank p.

    Args:
        tensor: contiguous, any dtype, the same element count on all ranks; receives this rank's part.
        scatter_list: on ``src`` world_size tensors like ``tensor``, elsewhere None.
    """
    call = prepare_rooted(self, Kind.scatter, tensor, src, "src")
    if call is None:
        return self.gpu_side.scatter(tensor, scatter_list, src)
    num_bytes = tensor.nbytes
    parts = check_list(self, scatter_list, tensor, "scatter_list", src)
    with self.tables():
        self.outgoing[0::2] = num_bytes if parts else 0
        self.outgoing[1::2] = [part.data_ptr() for part in parts] or 0  # offsets from address 0
        self.targets[:] = tensor.data_ptr()
        status = self.kernels.all_to_all(self.ctx, call, 0, num_bytes, src, 0)
    if status:
        self.fail(status)
