"""The peers on GPUs: NCCL on ordinary and on window-registered memory, and torch's symmetric memory.

NCCL is torch.distributed's default group. Forms that reduce or copy in the switch (``multimem_*``) are never called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm.bench.case import Case, Collective
from symmcomm.bench.implementations import Buffers, Call, Implementation, TorchDistributed
from symmcomm.schedule.dtypes import DType, Op

_DTYPES = (
    DType.float32, DType.float64, DType.float16, DType.bfloat16,
    DType.int8, DType.uint8, DType.int32, DType.int64,
)
_OPS = {
    Op.sum: dist.ReduceOp.SUM, Op.prod: dist.ReduceOp.PRODUCT, Op.max: dist.ReduceOp.MAX, Op.min: dist.ReduceOp.MIN,
    Op.avg: dist.ReduceOp.AVG,
}
_WINDOWS_SINCE = (2, 27)  # NCCL's symmetric memory windows


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that torch is built with."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


class Refused(Implementation):
    """One that cannot run here, whatever the case."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        return self._reason

    def call(self, case: Case, buffers: Buffers) -> Call:
        """Never reached."""
        raise AssertionError(self._reason)

    def barrier(self) -> None:
        """Never reached."""
        raise AssertionError(self._reason)


class Nccl(TorchDistributed):
    """NCCL on ordinary memory. ``meet`` brings the processes together."""

    def __init__(self, device: torch.device, meet: Callable[[], object]) -> None:
        super().__init__("nccl", _DTYPES, _OPS)
        self._device, self._meet = device, meet

    def barrier(self) -> None:
        """See Implementation."""
        self._meet()

    def _barrier(self) -> Call:
        """What ``dist.barrier`` does, without its wait on the host."""
        return partial(dist.all_reduce, torch.zeros(1, dtype=torch.int32, device=self._device))

    def _exchange(self, given: Tensor, got: Tensor, ranks: int) -> Call:
        following, before = (self._rank + 1) % ranks, (self._rank - 1) % ranks
        both = [dist.P2POp(dist.isend, given, following), dist.P2POp(dist.irecv, got, before)]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return exchange


class NcclSymm(Nccl):
    """NCCL on memory of its own allocator, registered as symmetric windows. The pools go back at the end: that is
    collective, and must come before the communicator goes."""

    def __init__(self, device: torch.device, meet: Callable[[], object]) -> None:
        super().__init__(device, meet)
        self._pools: list[Any] = []

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if nccl_version() < _WINDOWS_SINCE:
            found, needed = (".".join(map(str, version)) for version in (nccl_version(), _WINDOWS_SINCE))
            return f"NCCL {found} has no symmetric windows ({needed} and later have)"
        return super().refusal(case)

    def buffers(self, case: Case, ordinary: Callable[[], Buffers]) -> Buffers:
        """See Implementation."""
        pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            made = Buffers.allocate(case, self._rank, partial(self._zeros, case.numel))
        self._backend.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return made

    def _zeros(self, most: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(most, dtype=dtype, device=self._device)[:numel]  # windows are of one size on all ranks

    def close(self) -> None:
        """See Implementation."""
        for pool in self._pools:
            self._backend.deregister_mem_pool(pool)
        self._pools.clear()

    @property
    def _backend(self) -> Any:
        group: Any = dist.group.WORLD
        return group._get_backend(self._device)


class TorchSymmMem(Implementation):
    """torch's one-shot (out of place) or two-shot (in place) all-reduce on its symmetric memory."""

    def __init__(self, kind: str, device: torch.device, meet: Callable[[], object]) -> None:
        self._kind, self._device, self._meet = kind, device, meet
        group: Any = dist.group.WORLD
        self._group = group.group_name

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if case.collective is not Collective.all_reduce:
            return "torch's symmetric memory has one- and two-shot forms of all_reduce only"
        if case.op is not Op.sum or case.dtype not in (DType.float32, DType.bfloat16):
            return f"torch's symmetric memory has no {case.op.name} of {case.dtype.name}"
        if case.size_bytes % 4:
            return "torch's symmetric memory wants a multiple of 4 bytes"
        return None

    def buffers(self, case: Case, ordinary: Callable[[], Buffers]) -> Buffers:
        """See Implementation."""
        import torch.distributed._symmetric_memory as symm_mem

        tensor = symm_mem.empty(case.numel, dtype=getattr(torch, case.dtype.name), device=self._device)
        symm_mem.rendezvous(tensor, self._group)
        return Buffers(tensor, tensor if self._kind == "two_shot" else torch.empty_like(tensor))

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        ops, given, got = torch.ops.symm_mem, buffers.input, buffers.output
        if self._kind == "two_shot":
            return partial(ops.two_shot_all_reduce_, given, "sum", self._group)
        return partial(ops.one_shot_all_reduce_out, given, "sum", self._group, got)

    def barrier(self) -> None:
        """See Implementation."""
        self._meet()
