"""What a norm must give: float64 results, and bounds around them from first principles.

t = Σ x + r has W roundings in float32 (W summands and a residual), so with u = 2⁻²⁴ and γ_n = n·u / (1 - n·u) its error
is at most γ_W · m, m = Σ|x| + |r| (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). The mean of n squares,
in any order, has a relative error of γ_{n+2} beside that of t; the root halves both. Then up to 4 roundings in float32,
and one to the dtype, with unit roundoff u_d and η half its smallest subnormal. With z = (w + weight_bias) / rms and y
the exact result::

    |error| ≤ z γ_W m + |y - bias| (γ_{n+2} / 2 + ‖γ_W m‖ / ‖t‖) + 4 u (|y - bias| + |bias|) + u_d |y| + η
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
U = 2.0**-24


class Problem(NamedTuple):
    """All ranks' inputs, and what they share."""

    inputs: list[Tensor]
    residual: Tensor
    weight: Tensor
    bias: Tensor

    @property
    def sum(self) -> Tensor:
        """As an all-reduce gives it: float32 in rank order, rounded once."""
        total = self.inputs[0].float()
        for one in self.inputs[1:]:
            total = total + one.float()
        return total.to(self.residual.dtype)

    @property
    def new_residual(self) -> Tensor:
        """The sum and the residual, added by torch."""
        return self.sum + self.residual


def problem(rows: int, hidden: int, dtype: torch.dtype, world_size: int = 1) -> Problem:
    """Random data, a function of the arguments alone. Rows are of different magnitudes, one is zero."""
    seed = zlib.crc32(f"{rows} {hidden} {dtype}".encode())
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scale = 10.0 ** (torch.arange(rows) % 4 - 2).view(-1, 1) if rows else torch.ones(0, 1)
    scale[2::3] = 0.0 if rows > 5 else 1.0
    inputs = [(draw(rows, hidden) * scale).to(dtype) for _ in range(world_size)]
    return Problem(inputs, (draw(rows, hidden) * scale).to(dtype), draw(hidden).to(dtype), draw(hidden).to(dtype))


class Expected(NamedTuple):
    """float64 results and the largest errors they may be met with."""

    value: Tensor
    tolerance: Tensor


def expected(
    inputs: list[Tensor], residual: Tensor | None, weight: Tensor, bias: Tensor | None = None, weight_bias: float = 0.0
) -> Expected:
    """Of the norm of the sum; see the module's docstring. Without the last rounding, that to the dtype."""
    parts = [one.double() for one in (*inputs, *([] if residual is None else [residual]))]
    total, size = sum(parts), sum(part.abs() for part in parts)
    assert isinstance(total, Tensor)
    assert isinstance(size, Tensor)
    n = total.shape[-1]
    rms = (total.square().mean(-1, keepdim=True) + EPS).sqrt()
    z = (weight.double() + weight_bias).abs() / rms
    scaled = total / rms * (weight.double() + weight_bias)
    offset = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double()
    gamma = len(inputs) * U
    moved = (gamma * size).norm(dim=-1, keepdim=True) / total.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    tolerance = z * gamma * size + scaled.abs() * ((n + 2) * U / 2 + moved) + 4 * U * (scaled.abs() + offset.abs())
    return Expected(scaled + offset, 1.01 * tolerance)


def check(found: Tensor, right: Expected, what: object) -> None:
    """Raises AssertionError where a result is further from the right one than rounding explains."""
    limits = torch.finfo(found.dtype)
    unit = 0.0 if found.dtype is torch.float32 else limits.eps / 2
    rounding = unit * right.value.abs() + limits.smallest_normal * limits.eps
    error = (found.double() - right.value).abs()
    allowed = right.tolerance * (1 + unit) + rounding
    assert found.shape == right.value.shape, f"{what}: {found.shape}"
    worst = float((error / allowed).max()) if found.numel() else 0.0
    assert worst <= 1, f"{what}: error is {worst:.2f} of what rounding explains"


def check_scaled(found: Tensor, scales: Tensor, right: Expected, what: object) -> None:
    """As ``check`` for float8_e4m3fn with a scale a row: largest magnitude / 448, or 1."""
    largest = right.value.abs().amax(-1)
    margin = right.tolerance.amax(-1) / 448 + 2 * U * largest / 448
    wanted = torch.where(largest == 0, torch.ones(()), largest / 448)
    assert bool(((scales.double() - wanted).abs() <= margin).all()), f"{what}: scales {scales} are not {wanted}"
    scale = scales.double().view(-1, 1)
    error = (found.double() * scale - right.value).abs()
    allowed = right.tolerance * 1.1 + (2.0**-4 + 4 * U) * right.value.abs() + 2.0**-10 * scale
    assert bool((error <= allowed).all()), f"{what}: float8 error is up to {float((error / allowed).max()):.2f} allowed"
