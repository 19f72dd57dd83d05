"""Words that the host hands to the GPU in stream order, as a kernel's arguments, so that a graph keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from symmcomm.kernels.gpu.primitives import store


@dataclass(frozen=True, kw_only=True)
class StoreWords:
    """Writes ``num`` i64 (at most 500: arguments have 4 KiB) to the rank's own heap."""

    num: int

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int64(0), tuple(Int64(0) for _ in range(self.num)))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, offset: Int64, words: Any, stream: cuda.CUstream
    ) -> None:
        """``offset``: from the start of the heap; ``words``: a tuple."""
        kernel = self.kernel(base + Int64(rank) * stride + offset, words)
        kernel.launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, address: Int64, words: Any) -> None:
        for i in cutlass.range_constexpr(self.num):
            store(address + 8 * i, [words[i]])
