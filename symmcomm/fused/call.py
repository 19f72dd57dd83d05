"""The arguments of a norm, checked one after the other into a ``Task``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.fused.rows import (
    Rows,
    check_input,
    check_like,
    check_vector,
    check_written,
    row_slice,
    rows_of,
)

_NOTHING = Rows(0, 0, 0, 0)


def check_number(value: object, name: str) -> float:
    """Raises ArgumentError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(f"{name}={value!r} is no finite number")
    return float(value)


@dataclass(slots=True)
class Task:
    """What a norm is to do, on any device. ``_NOTHING`` and 0 stand for what is absent.

    Attributes:
        dtype: of all but ``out`` and ``scales``.
        rows: of all ranks together.
        first: number of the first of this rank's own rows.
        sharded: which of input, residual, new_residual and out hold this rank's own rows only.
        weight, bias, scales: addresses. ``scales`` are sharded as ``out`` is.
    """

    dtype: torch.dtype
    rows: int
    hidden: int
    eps: float
    weight_bias: float
    input: Rows
    residual: Rows = _NOTHING
    new_residual: Rows = _NOTHING
    out: Rows = _NOTHING
    weight: int = 0
    bias: int = 0
    scales: int = 0
    first: int = 0
    sharded: frozenset[str] = frozenset()

    def start(self, name: str) -> int:
        """Address of row 0 of a field, whether or not this rank has it."""
        rows: Rows = getattr(self, name)
        return rows.address - self.first * rows.pitch if name in self.sharded else rows.address


class Call:
    """One call's arguments. ``task`` is complete when all have been given and ``check_aliases`` has passed."""

    def __init__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        weight_bias: float,
    ) -> None:
        self.input = check_input(input, "input")
        hidden, where = input.shape[-1], rows_of(input, "input")
        eps, weight_bias = check_number(eps, "eps"), check_number(weight_bias, "weight_bias")
        self.task = Task(input.dtype, where.num, hidden, eps, weight_bias, where)
        self.written: dict[str, Rows] = {}
        self.replaceable = {"input": where}
        self.fixed: list[tuple[str, Rows]] = []
        self.task.weight = self._vector(weight, "weight")
        if bias is not None:
            self.task.bias = self._vector(bias, "bias")

    def _vector(self, tensor: torch.Tensor, name: str) -> int:
        address = check_vector(tensor, name, self.input, self.task.hidden)
        self.fixed.append((name, Rows(address, tensor.nbytes, tensor.nbytes, 1)))
        return address

    def require_dense_input(self) -> None:
        """For calls in which peers see the input."""
        if not self.input.is_contiguous():
            raise ArgumentError(
                f"input must be contiguous: shape {tuple(self.input.shape)} has strides {self.input.stride()}; "
                "pass input.contiguous()"
            )

    def shard(self, rank: int, world_size: int, *names: str) -> torch.Size:
        """Says which tensors are sharded by rows. Returns their shape."""
        mine = row_slice(self.task.rows, rank, world_size)
        self.task.first, self.task.sharded = mine.start, frozenset(names)
        return torch.Size((mine.stop - mine.start, self.task.hidden))

    def take_part_of_input(self, num_rows: int) -> None:
        """For calls in which peers read the other rows of this rank's input while the results are written."""
        where, first = self.task.input, self.task.first
        end, last = first + num_rows, self.task.rows
        self.replaceable["input"] = where._replace(address=where.address + first * where.pitch, num=num_rows)
        self.fixed.append(("input", where._replace(num=first)))
        self.fixed.append(("input", where._replace(address=where.address + end * where.pitch, num=last - end)))

    def add_residual(self, residual: torch.Tensor | None, shape: torch.Size) -> None:
        """The residual, if there is one."""
        if residual is not None:
            check_like(residual, "residual", shape, self.input, self.input.dtype)
            self.task.residual = self.replaceable["residual"] = rows_of(residual, "residual")

    def add_new_residual(self, new_residual: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
        """Where the new residual goes: the given tensor, or a new one."""
        new_residual = self._result(new_residual, "new_residual", shape, self.input.dtype)
        self.task.new_residual = rows_of(new_residual, "new_residual")
        return new_residual

    def add_out(self, out: torch.Tensor | None, shape: torch.Size, scales: torch.Tensor | None) -> torch.Tensor:
        """Where the normalised rows go, and their scales."""
        dtype = self.input.dtype
        if scales is not None:
            dtype = torch.float8_e4m3fn
            num = math.prod(shape[:-1])
            check_like(scales, "scales", torch.Size((num,)), self.input, torch.float32)
            if not scales.is_contiguous():
                raise ArgumentError(f"scales must be contiguous, its stride is {scales.stride(0)}")
            self.task.scales = scales.data_ptr()
            self.written["scales"] = Rows(self.task.scales, 4, 4, num)
        out = self._result(out, "out", shape, dtype)
        self.task.out = rows_of(out, "out")
        return out

    def _result(self, given: torch.Tensor | None, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if given is None:
            return self.input.new_empty(shape, dtype=dtype)
        check_like(given, name, shape, self.input, dtype)
        self.written[name] = rows_of(given, name)
        return given

    def check_aliases(self) -> None:
        """Raises where a result would destroy what is still read."""
        if self.written:
            check_written(self.written, self.replaceable, self.fixed)


class Heads:
    """The q or the k of a call: checked, and as a task of one token's heads.

    Attributes:
        tokens, out_tokens: input and output; a row is a token, from its first head to its last.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        eps: float,
        weight_bias: float,
    ) -> None:
        head_dim = tensor.shape[-1]
        self.name = name
        address = check_vector(weight, f"{name}_weight", tensor, head_dim)
        self.weight = Rows(address, weight.nbytes, weight.nbytes, 1)
        self.given = out is not None
        self.out = tensor.new_empty(tensor.shape) if out is None else out
        check_like(self.out, f"{name}_out", tensor.shape, tensor, tensor.dtype)
        heads, self.tokens = _heads_of(tensor, name)
        out_heads, self.out_tokens = _heads_of(self.out, f"{name}_out")
        self.task = Task(tensor.dtype, heads.num, head_dim, eps, weight_bias, heads, out=out_heads, weight=address)

    def check_aliases(self, other: Heads) -> None:
        """Raises where this output would destroy what the call still reads, or the other output."""
        if self.given:
            fixed = [(f"{heads.name}_weight", heads.weight) for heads in (self, other)]
            fixed += [(other.name, other.tokens), (f"{other.name}_out", other.out_tokens)]
            check_written({f"{self.name}_out": self.out_tokens}, {self.name: self.tokens}, fixed)


def _heads_of(tensor: torch.Tensor, name: str) -> tuple[Rows, Rows]:
    """Of a tensor (…, heads, head_dim): the heads of a token; the tokens, each from its first head to its last."""
    if tensor.dim() < 2:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}, expected (..., heads, head_dim)")
    if tensor.numel() == 0:
        return _NOTHING, _NOTHING
    heads = rows_of(tensor[(0,) * (tensor.dim() - 2)], name)
    tokens = rows_of(tensor.select(-2, 0), name)
    if heads.num > 1 and heads.pitch < heads.row_bytes:
        raise ArgumentError(f"{name}'s heads overlap: {heads.row_bytes} bytes at a distance of {heads.pitch}")
    return heads, tokens._replace(row_bytes=(heads.num - 1) * heads.pitch + heads.row_bytes)


def check_same(tensor: torch.Tensor, name: str, like: torch.Tensor, other: str) -> None:
    """Raises unless two tensors have one dtype, one device, and the same sizes but for the heads."""
    if tensor.dtype is not like.dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}, {other} {like.dtype}")
    if tensor.device != like.device:
        raise ArgumentError(f"{name} is on device {tensor.device}, {other} on {like.device}")
    if (tensor.shape[:-2], tensor.shape[-1]) != (like.shape[:-2], like.shape[-1]):
        shapes = f"{name} has shape {tuple(tensor.shape)}, {other} {tuple(like.shape)}"
        raise ArgumentError(f"{shapes}: they may differ in the number of heads only")
