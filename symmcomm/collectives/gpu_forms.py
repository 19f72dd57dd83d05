"""The kernels of one call on a GPU, by how its tensors are aligned."""

from __future__ import annotations

from collections.abc import Callable

from symmcomm.kernels.gpu.compile import Kernel
from symmcomm.schedule.select_gpu import Algorithm, Launch, granule

Function = Callable[..., None]


class Forms(dict[int, Function]):
    """Compiled kernels by the last four bits of all addresses and sizes, or-ed. Lamport kernels are compiled for them,
    each when it is needed, as that takes a while; of others there is one.

    ``make``: the kernel for a granule of ``kernels.gpu.lamport_parts``. ``compiled``: its function.
    """

    def __init__(self, shape: Launch, make: Callable[[int], Kernel], compiled: Callable[[Kernel], Function]) -> None:
        self._make, self._compiled = make, compiled
        if shape.algorithm is not Algorithm.lamport:
            self.update(dict.fromkeys(range(16), compiled(make(1))))

    def __missing__(self, bits: int) -> Function:
        function = self[bits] = self._compiled(self._make(granule(bits)))
        return function
