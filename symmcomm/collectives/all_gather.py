"""Calls in which all takers get the same: all-gather, broadcast, gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmcomm.collectives.arguments import check_list, check_place, prepare_pair, prepare_rooted
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_LENGTHS = encode(Kind.all_gather_bytes, torch.int64)
_CPU = torch.device("cpu")
_BYTES = encode(Kind.all_gather_bytes, torch.uint8)
_ALL_GATHER = Kind.all_gather_into_tensor


def all_gather_into_tensor(self: Communicator, output: torch.Tensor, input: torch.Tensor) -> None:
    """Gathers all ranks' inputs, in rank order, on every rank.

    Args:
        output: contiguous, world_size · N elements.
        input: contiguous, N elements of any dtype; if symmetric, peers read it in place. It may be part ``rank`` of
            ``output``, else they must lie apart.
    """
    call = prepare_pair(self, _ALL_GATHER, output, input, self.world_size, 1)
    if call is None:
        return self.gpu_side.all_gather_into_tensor(output, input)
    _gather(self, call, input, output)


def _gather(self: Communicator, call: int, input: torch.Tensor, output: torch.Tensor) -> None:
    num_bytes, source, target = input.nbytes, input.data_ptr(), output.data_ptr()
    check_place(self, target, source, num_bytes, "output", "input")
    status = self.kernels.all_gather(self.ctx, call, source, num_bytes, -1, -1, target, num_bytes)
    if status:
        self.fail(status)


def broadcast(self: Communicator, tensor: torch.Tensor, src: int) -> None:
    """Copies rank ``src``'s tensor into every other rank's.

    Args:
        tensor: contiguous, any dtype, the same element count on all ranks; if symmetric on ``src``, it is read in
        place.
    """
    call = prepare_rooted(self, Kind.broadcast, tensor, src, "src")
    if call is None:
        return self.gpu_side.broadcast(tensor, src)
    address = tensor.data_ptr()
    status = self.kernels.all_gather(self.ctx, call, address, tensor.nbytes, src, -1, address, 0)
    if status:
        self.fail(status)


def gather(
    self: Communicator, tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None = None, dst: int = 0
) -> None:
    """Collects all ranks' tensors on rank ``dst``.

    Args:
        tensor: contiguous, any dtype, the same element count on all ranks.
        gather_list: on ``dst`` world_size tensors like ``tensor``, elsewhere None.
    """
    call = prepare_rooted(self, Kind.gather, tensor, dst, "dst")
    if call is None:
        return self.gpu_side.gather(tensor, gather_list, dst)
    parts = check_list(self, gather_list, tensor, "gather_list", dst)
    with self.tables():
        self.targets[: len(parts)] = [part.data_ptr() for part in parts]
        status = self.kernels.all_gather(self.ctx, call, tensor.data_ptr(), tensor.nbytes, -1, dst, 0, 0)
    if status:
        self.fail(status)


def all_gather_bytes(self: Communicator, payload: bytes) -> list[bytes]:
    """Every rank's bytes, by rank; lengths may differ. The control plane of symmcomm itself."""
    if not isinstance(payload, bytes | bytearray):
        raise ArgumentError(f"payload must be bytes, got {type(payload).__name__}")
    lengths = torch.empty(self.world_size, dtype=torch.int64, device=_CPU)  # not torch's default device
    _gather(self, _LENGTHS, torch.tensor([len(payload)], device=_CPU), lengths)
    longest = int(lengths.max())
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device=_CPU)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
    gathered = torch.empty(self.world_size * padded.numel(), dtype=torch.uint8, device=_CPU)
    _gather(self, _BYTES, padded, gathered)
    rows = gathered.view(self.world_size, -1)
    return [rows[peer, : int(lengths[peer])].numpy().tobytes() for peer in range(self.world_size)]
