"""Tensors as rows in memory, and what must hold between them: checks on the calling rank, before anything moves."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from symmcomm.errors import ArgumentError, DTypeError

MAX_HIDDEN = 32768
"""The largest row, in elements."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Rows(NamedTuple):
    """``num`` rows: addresses and sizes in bytes. Between rows there may be gaps, within one there are none."""

    address: int
    pitch: int
    row_bytes: int
    num: int


def check_input(tensor: object, name: str) -> torch.Tensor:
    """Raises unless it is a tensor of a supported dtype whose last dimension, that of its rows, has a fit size."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentError(f"{name} must be a dense torch.Tensor, got {kind}")
    if tensor.dtype not in DTYPES:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")
    if tensor.dim() == 0 or not 1 <= tensor.shape[-1] <= MAX_HIDDEN:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; its last dimension must be 1 to {MAX_HIDDEN}")
    if tensor.is_neg():
        raise ArgumentError(f"{name} is a lazy negative view; pass {name}.resolve_neg()")
    return tensor


def check_like(tensor: object, name: str, shape: torch.Size, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Raises unless it is a tensor of this shape and dtype on the device of ``like``, which is called input."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentError(f"{name} must be a dense torch.Tensor, got {kind}")
    if tensor.dtype is not dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}, expected {dtype} beside an input of {like.dtype}")
    if tensor.shape != shape:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.device != like.device:
        raise ArgumentError(f"{name} is on device {tensor.device}, input on {like.device}")
    if tensor.is_neg():
        raise ArgumentError(f"{name} is a lazy negative view; pass {name}.resolve_neg()")
    return tensor


def check_vector(tensor: object, name: str, like: torch.Tensor, hidden: int) -> int:
    """Address of a contiguous vector of ``hidden`` elements with the dtype and device of ``like``."""
    vector = check_like(tensor, name, torch.Size((hidden,)), like, like.dtype)
    if not vector.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, its stride is {vector.stride(0)}")
    return vector.data_ptr()


def rows_of(tensor: torch.Tensor, name: str) -> Rows:
    """The tensor's rows: all dimensions but the last, which must lie at one distance from each other.

    Raises:
        ArgumentError: they do not, or there are gaps within a row.
    """
    row_bytes = tensor.shape[-1] * tensor.itemsize
    num = tensor.numel() // tensor.shape[-1]
    if tensor.is_contiguous():
        return Rows(tensor.data_ptr(), row_bytes, row_bytes, num)
    sizes = [(n, stride) for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    even = all(outer == n * inner for (_, outer), (n, inner) in pairwise(sizes))
    if (tensor.shape[-1] > 1 and tensor.stride(-1) != 1) or not even:
        raise ArgumentError(
            f"{name} must have dense rows at one distance: shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            f"pass {name}.contiguous()"
        )
    return Rows(tensor.data_ptr(), sizes[-1][1] * tensor.itemsize if sizes else row_bytes, row_bytes, num)


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
    part = -(-rows // world_size)
    return slice(min(rank * part, rows), min((rank + 1) * part, rows))
