"""Inputs and expectations for the norm kernels: the separate steps in float32, and everything in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from local_cases import assert_same, reduced, torch_dtype
from torch import Tensor

from symmcomm.schedule.dtypes import DType, Op

EPS = 1e-5
POISON = 0x5A
MARGIN = 64
_UNIT32 = 2.0**-24


def guarded(rows: int, hidden: int, dtype: torch.dtype, pitch: int | None = None, shift: int = 0) -> Tensor:
    """Rows on the GPU, ``pitch`` elements apart, with poison around them; ``shift`` elements off a 16-byte boundary."""
    pitch = hidden if pitch is None else pitch
    raw = torch.full(((rows * pitch + 2 * MARGIN) * dtype.itemsize,), POISON, dtype=torch.uint8, device="cuda")
    return raw.view(dtype)[MARGIN + shift :][: rows * pitch].view(rows, pitch)[:, :hidden]


def assert_poison_left(rows: Tensor) -> None:
    """Nothing but the rows was written."""
    size = rows.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.untyped_storage())  # type: ignore
    inside = torch.zeros(raw.numel(), dtype=torch.bool, device=rows.device)
    shape, strides = (rows.shape[0], rows.shape[1] * size), (rows.stride(0) * size, 1)
    inside.as_strided(shape, strides, rows.storage_offset() * size).fill_(True)
    assert bool(((raw == POISON) | inside).all()), "something outside the rows was written"


@dataclass
class Problem:
    """What the ranks put in, on the GPU, and what must come out, which is computed once for all ranks."""

    dtype: DType
    rows: int
    hidden: int
    world_size: int = 1
    seed: int = 0
    with_residual: bool = True
    with_bias: bool = False
    weight_bias: float = 0.0
    sources: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(1000 * self.seed + self.rows + self.hidden)
        kind = torch_dtype(self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(kind)

        self.sources = [normal(self.rows, self.hidden) for _ in range(self.world_size)]
        self.residual = normal(self.rows, self.hidden) * 2
        self.weight, self.bias = normal(self.hidden), normal(self.hidden)
        if self.rows > 2:  # a row of zeros, and one of small numbers
            for tensor in (*self.sources, self.residual):
                tensor[1] = 0
                tensor[2] *= 1e-3

    @cached_property
    def new_residual(self) -> Tensor:
        """all_reduce, then add."""
        total = reduced(list(self.sources), self.dtype, Op.sum)
        return (total.float() + self.residual.float()).to(total.dtype)

    def _norm(self, values: Tensor) -> Tensor:
        inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
        result = values * inverse * (self.weight.to(values.dtype) + self.weight_bias)
        return result + self.bias.to(values.dtype) if self.with_bias else result

    @cached_property
    def separately(self) -> Tensor:
        """all_reduce, add, and RMSNorm in float32: the unfused path."""
        before = self.new_residual if self.with_residual else reduced(list(self.sources), self.dtype, Op.sum)
        return self._norm(before.float()).to(before.dtype)

    @cached_property
    def exact(self) -> Tensor:
        """In float64, nothing rounded."""
        total = torch.stack([s.double() for s in self.sources]).sum(0)
        return self._norm(total + self.residual.double() if self.with_residual else total)

    @cached_property
    def bound(self) -> Tensor:
        """How far an output may be from ``exact``: half a step of its type, and what float32 can be off before that.

        Each of the ``world_size + 1`` numbers of a value, and each factor, is off by a unit of float32 or so; the sum
        of squares by as many as additions follow one another (64 at most here), of which the root takes half.
        """
        exact, size = self.exact, torch.stack([s.double().abs() for s in self.sources]).sum(0)
        if self.with_residual:
            size = size + self.residual.double().abs()
        total = torch.stack([s.double() for s in self.sources]).sum(0)
        total = total + self.residual.double() if self.with_residual else total
        inverse = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        scale = (self.weight.double().abs() + abs(self.weight_bias)) * inverse
        noise = _UNIT32 * ((self.world_size + 1) * size * scale + (48 + self.world_size) * exact.abs() + scale)
        if self.with_bias:
            noise = noise + _UNIT32 * self.bias.double().abs()
        info = torch.finfo(torch_dtype(self.dtype))
        half_step = info.eps / 2 * (exact.abs() + noise) + info.smallest_normal * info.eps
        return noise + half_step

    def check(self, output: Tensor, new_residual: Tensor | None, what: str, part: slice = slice(None)) -> None:
        """Of all rows, or of part of them."""
        off = (output.double() - self.exact[part]).abs()
        assert bool((off <= self.bound[part]).all()), f"{what}: off by {float(off.max())}"
        if new_residual is not None:
            assert_same(new_residual.flatten(), self.new_residual[part].flatten(), f"{what}: new residual")

    def check_float8(self, output: Tensor, scales: Tensor, what: str, part: slice = slice(None)) -> None:
        """float8 rows: steps of 1/8 to the next power of two, and of 2**-9 at the least; half of it for rounding."""
        exact = self.exact[part]
        amax = exact.abs().amax(-1)
        expected = torch.where(amax > 0, amax / 448, torch.ones_like(amax))
        assert bool(((scales.double() - expected).abs() <= 1e-5 * expected).all()), f"{what}: scales"
        wanted = exact / scales.double()[:, None]
        off = (output.double() - wanted).abs()
        assert bool((off <= wanted.abs() * (2.0**-4 + 1e-5) + 2.0**-10 + 1e-4).all()), f"{what}: {float(off.max())}"
