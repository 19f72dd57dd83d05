"""The arguments of a norm, checked one after the other into a ``Task``."""

from __future__ import annotations

import math

import torch

from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.fused.rows import Rows, check_input, check_like, check_written, pitch_of, row_slice, rows_of

_NOTHING = Rows(0, 0, 0, 0)


def check_numbers(eps: object, weight_bias: object) -> tuple[float, float]:
    """Raises ArgumentError unless both are finite numbers, and ``eps`` is not negative."""
    for name, value in (("eps", eps), ("weight_bias", weight_bias)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ArgumentError(f"{name}={value!r} is not a finite number")
    assert isinstance(eps, int | float)
    assert isinstance(weight_bias, int | float)
    if eps < 0:
        raise ArgumentError(f"eps={eps} is negative")
    return float(eps), float(weight_bias)


def check_vector(tensor: object, name: str, hidden: int, dtype: torch.dtype, device: torch.device) -> int:
    """Address of a contiguous vector of ``hidden`` elements."""
    vector = check_like(tensor, name, (hidden,), dtype, device)
    if not vector.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, its stride is {vector.stride(0)}")
    return vector.data_ptr()


class Task:
    """What a norm is to do, on any device. Addresses are those of the first row that a tensor has on this rank, pitches
    bytes from row to row; 0 stands for what is absent.

    Attributes:
        dtype: of all but ``out`` and ``scales``.
        rows: of all ranks together.
        scaled: whether there are scales; a rank without rows may have no address of any.
        pdl: on a GPU, whether the kernel may start beside the one before it (programmatic dependent launch).
        first: number of the first of this rank's own rows.
        sharded: which of input, residual (with new_residual) and out (with scales) hold this rank's own rows only.
    """

    input = input_pitch = residual = residual_pitch = new_residual = new_residual_pitch = out = out_pitch = 0
    weight = bias = scales = first = 0
    scaled = pdl = False
    sharded: tuple[str, ...] = ()

    def __init__(self, dtype: torch.dtype, rows: int, hidden: int, eps: float, weight_bias: float) -> None:
        self.dtype, self.rows, self.hidden = dtype, rows, hidden
        self.eps, self.weight_bias = eps, weight_bias


class Call:
    """One call's arguments, given one after the other; then ``task`` is complete.

    Attributes:
        out, new_residual, scales: the results.
        batch_offset: heap offset of input and out, where the caller knows that it is one on all ranks; else -1.
    """

    out: torch.Tensor
    new_residual: torch.Tensor
    scales: torch.Tensor | None = None
    batch_offset = -1

    def __init__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        weight_bias: float,
        launch_with_pdl: bool = False,
    ) -> None:
        self.input = check_input(input, "input")
        self.shape, self.dtype, self.device = input.shape, input.dtype, input.device
        hidden = self.shape[-1]
        task = self.task = Task(self.dtype, input.numel() // hidden, hidden, *check_numbers(eps, weight_bias))
        task.pdl = launch_with_pdl
        task.input, task.input_pitch = input.data_ptr(), pitch_of(input, "input")
        self.others: list[tuple[str, torch.Tensor]] = []  # besides the input, of the rows that a result may replace
        self.results: list[tuple[str, torch.Tensor]] = []
        self.vectors = [("weight", weight)]
        task.weight = check_vector(weight, "weight", hidden, self.dtype, self.device)
        if bias is not None:
            task.bias = check_vector(bias, "bias", hidden, self.dtype, self.device)
            self.vectors.append(("bias", bias))

    def require_dense_input(self) -> None:
        """For calls in which peers see the input."""
        if not self.input.is_contiguous():
            raise ArgumentError(
                f"input must be contiguous: shape {tuple(self.shape)} has strides {self.input.stride()}; "
                "pass input.contiguous()"
            )

    def shard(self, rank: int, world_size: int, *names: str) -> torch.Size:
        """Says what is sharded by rows. Returns the shape of a tensor that is."""
        mine = row_slice(self.task.rows, rank, world_size)
        self.task.first, self.task.sharded, self.num_own = mine.start, names, mine.stop - mine.start
        return torch.Size((self.num_own, self.task.hidden))

    def add_residual(self, residual: torch.Tensor | None, shape: torch.Size) -> None:
        """The residual, if there is one."""
        if residual is not None:
            check_like(residual, "residual", shape, self.dtype, self.device)
            self.task.residual, self.task.residual_pitch = residual.data_ptr(), pitch_of(residual, "residual")
            self.others.append(("residual", residual))

    def add_new_residual(self, new_residual: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
        """Where the new residual goes: the given tensor, or a new one."""
        new_residual = self._result(new_residual, "new_residual", shape, self.dtype)
        self.new_residual, self.task.new_residual = new_residual, new_residual.data_ptr()
        self.task.new_residual_pitch = pitch_of(new_residual, "new_residual")
        return new_residual

    def add_out(self, out: torch.Tensor | None, shape: torch.Size, scales: torch.Tensor | None) -> torch.Tensor:
        """Where the normalised rows go, and their scales."""
        dtype = self.dtype
        if scales is not None:
            dtype = torch.float8_e4m3fn
            check_like(scales, "scales", (math.prod(shape[:-1]),), torch.float32, self.device)
            if not scales.is_contiguous():
                raise ArgumentError(f"scales must be contiguous, its stride is {scales.stride(0)}")
            self.scales, self.task.scales, self.task.scaled = scales, scales.data_ptr(), True
            self.results.append(("scales", scales.view(-1, 1)))
        out = self._result(out, "out", shape, dtype)
        self.out, self.task.out, self.task.out_pitch = out, out.data_ptr(), pitch_of(out, "out")
        return out

    def _result(self, given: torch.Tensor | None, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if given is None:
            if shape is self.shape and dtype is self.dtype and self.input.is_contiguous():
                return torch.empty_like(self.input)  # the cheaper call
            return torch.empty(shape, dtype=dtype, device=self.device)
        self.results.append((name, check_like(given, name, shape, dtype, self.device)))
        return given

    def check_aliases(self) -> None:
        """Raises where a result would destroy what is still read."""
        if not self.results:
            return
        where = rows_of(self.input, "input")
        fixed = [(name, Rows(vector.data_ptr(), vector.nbytes, vector.nbytes, 1)) for name, vector in self.vectors]
        if "out" in self.task.sharded:  # peers still read the other rows of this rank's input
            first, end, name = self.task.first, self.task.first + self.num_own, "the peers' rows of input"
            fixed.append((name, where._replace(num=first)))
            fixed.append((name, where._replace(address=where.address + end * where.pitch, num=where.num - end)))
            where = where._replace(address=where.address + first * where.pitch, num=self.num_own)
        replaceable = {"input": where} | {name: rows_of(tensor, name) for name, tensor in self.others}
        check_written({name: rows_of(tensor, name) for name, tensor in self.results}, replaceable, fixed)


class Heads:
    """The q or the k of a call: checked, and as a task of one token's heads.

    Attributes:
        source, weight_tensor, out: as given; out made if it was not.
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
        self.name, self.source, self.weight_tensor = name, tensor, weight
        address = check_vector(weight, f"{name}_weight", head_dim, tensor.dtype, tensor.device)
        self.weight = Rows(address, weight.nbytes, weight.nbytes, 1)
        self.given = out is not None
        self.out = tensor.new_empty(tensor.shape) if out is None else out
        check_like(self.out, f"{name}_out", tensor.shape, tensor.dtype, tensor.device)
        heads, self.tokens = _heads_of(tensor, name)
        out_heads, self.out_tokens = _heads_of(self.out, f"{name}_out")
        self.task = Task(tensor.dtype, heads.num, head_dim, eps, weight_bias)
        self.task.input, self.task.input_pitch = heads.address, heads.pitch
        self.task.out, self.task.out_pitch, self.task.weight = out_heads.address, out_heads.pitch, address

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
