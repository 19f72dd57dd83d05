"""Where the ranks' tensors lie in a test, guarded on both sides against writes beyond them, and how they move."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

import symmcomm
from symmcomm import Communicator
from symmcomm.kernels.cpu import context as c

PATHS = {
    "staged": {"SYMMCOMM_STAGING_BYTES": "1", "SYMMCOMM_SINGLE_COPY": "0"},
    "direct": {"SYMMCOMM_STAGING_BYTES": "1", "SYMMCOMM_SINGLE_COPY": "1"},
}
"""Environments. ``staged``: ordinary tensors go through staging slots, of the least size: many chunks, cheaply; and
data that are only moved are written past the caches, whatever the size.
``direct``: whatever the size, ordinary tensors are read out of their processes, symmetric ones where they lie."""


@contextlib.contextmanager
def communicator(path: str) -> Iterator[Communicator]:
    """``init`` on a path; its environment is the caller's business."""
    with symmcomm.init() as comm:
        fields = [c.STREAM_BYTES]
        if path == "direct":
            fields = [c.IN_PLACE_BYTES]
            if comm.single_copy:  # else the system forbids it: ordinary tensors are staged
                fields += [c.SINGLE_COPY_BYTES]
        for field in fields:
            ctypes.c_int64.from_address(comm.ctx + 8 * field).value = 1
        comm.barrier()
        yield comm


PLACEMENTS = ("ordinary", "symmetric", "shifted", "mixed")
"""``symmetric``: at one offset on all ranks; ``shifted``: at offsets that differ; ``mixed``: that on odd ranks only."""

_GUARD_BYTES = 64
_GUARD = 0xA5


class Arena:
    """Ordinary and symmetric memory of one rank, in ``num_areas`` areas of ``area_bytes`` each. Collective to make."""

    def __init__(self, comm: Communicator, area_bytes: int, num_areas: int = 2) -> None:
        self._rank, self._pitch = comm.rank, area_bytes + 1024
        self._symmetric = comm.empty(num_areas * self._pitch, dtype=torch.uint8).fill_(_GUARD)
        self._ordinary = torch.full((num_areas * self._pitch,), _GUARD, dtype=torch.uint8)
        self._guards: list[Tensor] = []

    def place(self, values: Tensor, placement: str, area: int = 0) -> Tensor:
        """A copy of ``values`` in an area, aligned to the element only unless at the same offset everywhere."""
        itemsize = values.element_size()
        symmetric = placement in ("symmetric", "shifted") or (placement == "mixed" and self._rank % 2 == 1)
        shift = 0 if placement == "symmetric" else (1 + 3 * self._rank) % 16 * itemsize
        memory = self._symmetric if symmetric else self._ordinary
        start = area * self._pitch + _GUARD_BYTES + shift
        end = start + values.numel() * itemsize
        assert end + _GUARD_BYTES <= (area + 1) * self._pitch, f"{values.nbytes} bytes are too many for an area"
        for guard in (memory[start - _GUARD_BYTES : start], memory[end : end + _GUARD_BYTES]):
            self._guards.append(guard.fill_(_GUARD))
        tensor = memory[start:end].view(values.dtype).view(values.shape)
        return tensor.copy_(values)

    def blank(self, count: int, dtype: torch.dtype, placement: str, area: int = 1) -> Tensor:
        """As ``place``, for an output: filled with bytes that no result has."""
        filling = torch.full((count * dtype.itemsize,), 0 if dtype is torch.bool else 0x5B, dtype=torch.uint8)
        return self.place(filling.view(dtype), placement, area)

    def check(self, what: str) -> None:
        """Raises AssertionError if anything was written next to a tensor placed since the last check."""
        for guard in self._guards:
            assert bool((guard == _GUARD).all()), f"{what}: bytes beyond a tensor were written"
        self._guards.clear()


def as_bytes(tensor: Tensor) -> bytes:
    """The tensor's memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
