"""The NVSHMEM peer: nvshmem4py's collectives on a stream, on NVSHMEM's symmetric heap.

Only with NVSHMEM_DISABLE_NVLS=1 (``implementation`` says so otherwise): the library then keeps off NVLink multicast.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symmcomm.bench.case import ROOT, Case, Collective
from symmcomm.bench.gpu_peers import Refused
from symmcomm.bench.implementations import Buffers, Call, Implementation
from symmcomm.communicator import Communicator
from symmcomm.env import multicast_vetoes
from symmcomm.errors import in_words
from symmcomm.schedule.dtypes import DType, Op

_MOVES = (Collective.all_gather, Collective.all_to_all, Collective.broadcast)
_REDUCTIONS = (Collective.all_reduce, Collective.reduce_scatter)
_OPS = (Op.sum, Op.max, Op.min)
_DTYPES = (
    DType.float32, DType.float64, DType.float16, DType.bfloat16,
    DType.int8, DType.int16, DType.int32, DType.int64, DType.uint8,
)


def implementation(comm: Communicator, device: torch.device) -> Implementation:
    """NVSHMEM, or why it cannot be run. Collective."""
    if importlib.util.find_spec("nvshmem") is None:
        return Refused("nvshmem4py is not installed (extra: nvshmem)")
    if not any(veto.startswith("NVSHMEM_DISABLE_NVLS") for veto in multicast_vetoes()):
        return Refused("it is measured with NVSHMEM_DISABLE_NVLS=1 only")
    try:
        core = importlib.import_module("nvshmem.core")
        reason = ""
    except Exception as error:  # its library is missing, or one of its dependencies
        reason = in_words(error)
    reasons = [answer.decode() for answer in comm.all_gather_bytes(reason.encode())]
    for rank, text in enumerate(reasons):
        if text:
            return Refused(f"nvshmem4py cannot be imported on rank {rank}: {text}")
    return Nvshmem(core, comm, device)


class _Stream:
    """torch's current stream, in the protocol that nvshmem4py asks for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream(self._device).cuda_stream


class Nvshmem(Implementation):
    """Collectives of the team of all processes. ``core`` is the module ``nvshmem.core``. Collective."""

    def __init__(self, core: Any, comm: Communicator, device: torch.device) -> None:
        self._core, self._comm, self._stream = core, comm, _Stream(device)
        self._owned: list[Tensor] = []
        cuda_core = importlib.import_module("cuda.core")
        gpu = cuda_core.Device(device.index)
        gpu.set_current()
        identity = core.get_unique_id(empty=comm.rank != ROOT)
        words = identity._data.view(np.int8)
        words[:] = np.frombuffer(comm.all_gather_bytes(words.tobytes())[ROOT], dtype=np.int8)
        core.init(device=gpu, uid=identity, rank=comm.rank, nranks=comm.world_size, initializer_method="uid")

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if case.collective in _MOVES or case.collective is Collective.barrier:
            return None
        if case.collective not in _REDUCTIONS:
            return f"nvshmem4py has no {case.collective.value}"
        if case.op not in _OPS or case.dtype not in _DTYPES:
            return f"nvshmem4py has no {case.op.name} of {case.dtype.name}"
        return None

    def buffers(self, case: Case, ordinary: Callable[[], Buffers]) -> Buffers:
        """See Implementation."""
        if case.collective is Collective.barrier:
            return ordinary()
        return Buffers.allocate(case, self._comm.rank, self._empty)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self._core.bytetensor((numel * dtype.itemsize,), dtype=torch.uint8)
        self._owned.append(tensor)
        return tensor.view(dtype)

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        core, team, given, got = self._core, self._core.Teams.TEAM_WORLD, buffers.input, buffers.output
        if case.collective in _MOVES:
            given, got = given.view(torch.uint8), got.view(torch.uint8)
        match case.collective:
            case Collective.all_reduce:
                return partial(core.reduce, team, got, given, case.op.name, stream=self._stream)
            case Collective.reduce_scatter:
                return partial(core.reducescatter, team, got, given, case.op.name, stream=self._stream)
            case Collective.all_gather:
                return partial(core.fcollect, team, got, given, stream=self._stream)
            case Collective.all_to_all:
                return partial(core.alltoall, team, got, given, stream=self._stream)
            case Collective.broadcast:
                return partial(core.broadcast, team, got, given, root=ROOT, stream=self._stream)
            case _:
                return partial(core.barrier, team, stream=self._stream)

    def barrier(self) -> None:
        """See Implementation."""
        self._comm.barrier()

    def release(self) -> None:
        """See Implementation."""
        while self._owned:
            self._core.free_tensor(self._owned.pop())

    def close(self) -> None:
        """See Implementation."""
        self._core.finalize()
