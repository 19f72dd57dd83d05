"""What kernels of collectives have in common: their fields, their arguments, and how they are launched.

Every kernel takes the place of its rank first (peer p's heap is at ``base + p · stride``), and its number of CTAs and
the stream last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from symmcomm.kernels.gpu.context import Context, after_previous_kernel
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A kernel with a place. Attributes: ``threads`` a CTA, ``early`` as in ``context.after_previous_kernel``."""

    world_size: int
    threads: int
    early: bool = False

    kernel: ClassVar[Any]

    @property
    def min_ctas(self) -> int:
        """On an SM, to which the compiler fits a thread's registers; 0: as it likes."""
        return 0

    def enter(self, base: Any, stride: Any, rank: Any) -> Context:
        """What ``kernel`` begins with."""
        after_previous_kernel(self.early)
        return Context(base, stride, rank, Layout.create(self.world_size))

    def launch(self, kernel: Any, grid: Any, stream: Any) -> None:
        """What the host's side ends with."""
        kernel.launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=self.min_ctas, stream=stream,
            use_pdl=self.early,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reducing(Placed):
    """A kernel that reduces elements of ``dtype``. Attributes: ``arch`` as in ``sm_<arch>``."""

    dtype: DType
    op: Op
    arch: int

    @property
    def reduction(self) -> Reduction:
        """Over all ranks."""
        return Reduction(self.dtype, self.op, self.world_size, self.arch)


@dataclass(frozen=True, kw_only=True)
class ReducingTensors(Reducing):
    """From any tensor to any other. The kernel's docstring says how many times ``count`` elements they have."""

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, result: Int64, count: Int64, grid: Int32,
        stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source`` and ``result``: addresses."""
        self.launch(self.kernel(base, stride, rank, source, result, count), grid, stream)


@dataclass(frozen=True, kw_only=True)
class MovingParts(Placed):
    """One that moves parts as the table in ``all_gather`` says."""

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), *[Int64(0)] * 5, Int32(0), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, source: Int64, source_pitch: Int64, target: Int64,
        target_pitch: Int64, num_bytes: Int64, sender: Int32, grid: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """``source`` and ``target``: addresses, unless the kernel's docstring says otherwise; pitches and ``num_bytes``
        (of one part, not 0) in bytes."""
        kernel = self.kernel(base, stride, rank, source, source_pitch, target, target_pitch, num_bytes, sender)
        self.launch(kernel, grid, stream)
