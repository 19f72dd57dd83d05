"""Tensors as rows in memory, and what must hold between them: checks on the calling rank, before anything moves."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.schedule import select_norm
from symmcomm.schedule.select_norm import MAX_HIDDEN, slice_rows

DTYPES = tuple(getattr(torch, dtype.name) for dtype in select_norm.DTYPES)


class Rows(NamedTuple):
    """``num`` rows: addresses and sizes in bytes. Between rows there may be gaps, within one there are none."""

    address: int
    pitch: int
    row_bytes: int
    num: int


def check_input(tensor: object, name: str) -> torch.Tensor:
    """Raises unless it is a tensor of a supported dtype whose last dimension, that of its rows, has a fit size."""
    _check_strided(tensor, name)
    assert isinstance(tensor, torch.Tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{name} is on device {tensor.device}, expected cpu or cuda")
    if tensor.dtype not in DTYPES:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")
    if tensor.dim() == 0 or not 1 <= tensor.shape[-1] <= MAX_HIDDEN:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; its last dimension must be 1 to {MAX_HIDDEN}")
    return tensor


def _check_strided(tensor: object, name: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentError(f"{name} must be a dense torch.Tensor, got {kind}")
    if tensor.is_neg():
        raise ArgumentError(f"{name} is a lazy negative view; pass {name}.resolve_neg()")


def check_like(
    tensor: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Raises unless it is a tensor of this shape and dtype on this device, which are those of a good input."""
    _check_strided(tensor, name)
    assert isinstance(tensor, torch.Tensor)
    if tensor.dtype is not dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    if tensor.shape != shape:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on device {tensor.device}, input on {device}")
    return tensor


def pitch_of(tensor: torch.Tensor, name: str) -> int:
    """Bytes from row to row. Rows are all dimensions but the last.

    Raises:
        ArgumentError: they do not lie at one distance, or there are gaps within a row.
    """
    if tensor.is_contiguous():
        return tensor.shape[-1] * tensor.itemsize
    sizes = [(n, stride) for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    even = all(outer == n * inner for (_, outer), (n, inner) in pairwise(sizes))
    if (tensor.shape[-1] > 1 and tensor.stride(-1) != 1) or not even:
        raise ArgumentError(
            f"{name} must have dense rows at one distance: shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            f"pass {name}.contiguous()"
        )
    return (sizes[-1][1] if sizes else tensor.shape[-1]) * tensor.itemsize


def rows_of(tensor: torch.Tensor, name: str) -> Rows:
    """The tensor's rows; see ``pitch_of``."""
    hidden = tensor.shape[-1]
    return Rows(tensor.data_ptr(), pitch_of(tensor, name), hidden * tensor.itemsize, tensor.numel() // hidden)


def overlap(one: Rows, other: Rows) -> bool:
    """Whether some byte belongs to rows of both. Rows of one distance may lie in each other's gaps."""
    if one.num == 0 or other.num == 0:
        return False
    if one.address > other.address:
        one, other = other, one
    apart = other.address - one.address
    if apart >= (one.num - 1) * one.pitch + one.row_bytes:
        return False
    if one.pitch != other.pitch or one.pitch == 0:
        return True
    column = apart % one.pitch
    return column < one.row_bytes or column + other.row_bytes > one.pitch


def check_written(written: dict[str, Rows], replaceable: dict[str, Rows], fixed: list[tuple[str, Rows]]) -> None:
    """Raises ArgumentError where a result overlaps itself, another result or an argument; unless it takes exactly the
    place of one that is ``replaceable``."""
    others = [*replaceable.items(), *fixed]
    for name, rows in written.items():
        if rows.num > 1 and rows.pitch < rows.row_bytes:
            raise ArgumentError(f"{name} overlaps itself: rows of {rows.row_bytes} bytes at a distance of {rows.pitch}")
        for other, theirs in others:
            if overlap(rows, theirs) and not (rows == theirs and other in replaceable):
                raise ArgumentError(f"{name} overlaps {other}: {rows} and {theirs}")
        others.append((name, rows))


def row_slice(rows: int, rank: int, world_size: int) -> slice:
    """The rows that ``rank`` has where they are sharded: slices of ⌈rows / world_size⌉, as ``torch.chunk`` cuts, so
    that the last ones are shorter or empty."""
    first, num = slice_rows(rows, world_size, rank)
    return slice(first, first + num)
