"""Compare-and-swap signals between two ranks, as kernels of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from symmcomm.kernels.gpu.context import Context, begin, thread
from symmcomm.kernels.gpu.primitives import put_signal, wait_signal
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True, kw_only=True)
class SwapSignal:
    """Puts a compare-and-swap signal to a peer, or (``puts`` false) takes one of it; see ``barrier``."""

    world_size: int
    puts: bool

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), Int32(0), Int32(0))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, channel: Int32, peer: Int32, stream: cuda.CUstream
    ) -> None:
        """``channel`` < NUM_SWAP_CHANNELS."""
        self.kernel(base, stride, rank, channel, peer).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, channel: Int32, peer: Int32) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        if begin(ctx, Int32(0))[0]:  # noqa: SIM102, the inner one is for the GPU
            if thread() == 0:
                pad = ctx.layout.swap_pad + 4 * ctx.world_size * channel
                if cutlass.const_expr(self.puts):
                    put_signal(ctx.state, rank, ctx.peer_address(peer, pad + 4 * rank), peer, channel)
                else:
                    wait_signal(ctx.state, rank, ctx.peer_address(rank, pad + 4 * peer), peer, channel)
