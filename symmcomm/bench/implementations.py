"""What is compared, each behind the same few methods and in its fastest call form.

``symm`` is this library on ordinary tensors, ``symm_heap`` on symmetric ones, ``symm_ring`` round a ring. Ordinary
tensors are shared by all implementations of a process, so that all work on the same pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm.bench.case import ROOT, Case, Collective
from symmcomm.collectives.call import REDUCE_OPS
from symmcomm.communicator import Communicator
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import torch_dtype

OWN = ("symm", "symm_heap")
RING = "symm_ring"
Call = Callable[[], object]

_GLOO_DTYPES = (
    DType.float32, DType.float64, DType.float16, DType.bfloat16,
    DType.int8, DType.uint8, DType.int32, DType.int64,
)
_GLOO_OPS: dict[Op, dist.ReduceOp.RedOpType] = {op: theirs for op, theirs in REDUCE_OPS.items() if op is not Op.avg}


@dataclass(frozen=True)
class Buffers:
    """A rank's tensors: flat, of the case's dtype; one and the same where the collective works in place."""

    input: Tensor
    output: Tensor

    @classmethod
    def allocate(cls, case: Case, rank: int, empty: Callable[[int, torch.dtype], Tensor]) -> Buffers:
        """Tensors of the case's sizes, made by ``empty(numel, dtype)``."""
        dtype = torch_dtype(case.dtype)
        given = empty(case.input_numel(rank), dtype)
        return cls(given, given if case.collective.in_place else empty(case.output_numel(rank), dtype))


class Implementation(ABC):
    """One way to run a case."""

    def refusal(self, case: Case) -> str | None:
        """Why the case cannot be run, the same on all ranks; ``None`` if it can."""
        return None

    def buffers(self, case: Case, ordinary: Callable[[], Buffers]) -> Buffers:
        """The memory that it works on: the ordinary tensors, or its own. Collective."""
        return ordinary()

    @abstractmethod
    def call(self, case: Case, buffers: Buffers) -> Call:
        """One collective on the buffers, with all arguments prepared. On a GPU it only enqueues."""

    @abstractmethod
    def barrier(self) -> None:
        """Brings the ranks' processes together before a round."""

    def release(self) -> None:  # noqa: B027, most have nothing to let go of
        """Lets go of the memory that ``buffers`` gave; nobody holds a tensor of it any more. Collective."""

    def close(self) -> None:  # noqa: B027, as before
        """Lets go of everything. Collective."""


class Symm(Implementation):
    """This library, on ordinary or on symmetric tensors; on the GPU if the communicator has one."""

    def __init__(self, comm: Communicator, symmetric: bool) -> None:
        self._comm, self._symmetric = comm, symmetric
        self._owned: list[Tensor] = []

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if case.collective.reduces and not supports(case.dtype, case.op):
            return f"{case.op.name} has no meaning for {case.dtype.name}"
        return None

    def buffers(self, case: Case, ordinary: Callable[[], Buffers]) -> Buffers:
        """See Implementation."""
        if not self._symmetric:
            return ordinary()
        return Buffers.allocate(case, self._comm.rank, partial(self._empty, case))

    def _empty(self, case: Case, numel: int, dtype: torch.dtype) -> Tensor:
        device = self._comm.gpu.device if self._comm.gpu is not None else None
        same = case.collective not in (Collective.gather, Collective.scatter)  # where the root's part is larger
        self._owned.append(self._comm.empty(numel if same else case.numel, dtype=dtype, device=device))
        return self._owned[-1][:numel]

    def release(self) -> None:
        """See Implementation."""
        while self._owned:
            self._comm.free(self._owned.pop())

    def barrier(self) -> None:
        """See Implementation."""
        self._comm.barrier()

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        comm, op, given, got = self._comm, case.op.name, buffers.input, buffers.output
        root, ranks = comm.rank == ROOT, case.world_size
        match case.collective:
            case Collective.all_reduce:
                return partial(comm.all_reduce, given, op)
            case Collective.reduce_scatter:
                return partial(comm.reduce_scatter_tensor, got, given, op)
            case Collective.all_gather:
                return partial(comm.all_gather_into_tensor, got, given)
            case Collective.all_to_all:
                return partial(comm.all_to_all_single, got, given)
            case Collective.broadcast:
                return partial(comm.broadcast, given, ROOT)
            case Collective.reduce:
                return partial(comm.reduce, given, ROOT, op)
            case Collective.gather:
                return partial(comm.gather, given, list(got.chunk(ranks)) if root else None, ROOT)
            case Collective.scatter:
                return partial(comm.scatter, got, list(given.chunk(ranks)) if root else None, ROOT)
            case Collective.send_recv:
                return self._exchange(given, got)
            case _:
                return comm.barrier if comm.gpu is None else comm.gpu.barrier

    def _exchange(self, given: Tensor, got: Tensor) -> Call:
        """To the next rank and from the one before; even ranks send first, so that nobody waits in a circle."""
        comm = self._comm
        following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

        def send_first() -> None:
            comm.send(given, following)
            comm.recv(got, before)

        def receive_first() -> None:
            comm.recv(got, before)
            comm.send(given, following)

        return receive_first if comm.rank % 2 else send_first


class SymmRing(Symm):
    """This library's ring through all ranks, on ordinary tensors."""

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if case.collective not in (Collective.reduce_scatter, Collective.all_reduce):
            return f"there is no ring {case.collective.value}"
        return super().refusal(case)

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        comm, op, given = self._comm, case.op.name, buffers.input
        if case.collective is Collective.all_reduce:
            return partial(comm.all_reduce, given, op, ring_mode=RingMode.Ring1D)
        return partial(comm.reduce_scatter_tensor, buffers.output, given, op, ring_mode=RingMode.Ring1D)


class TorchDistributed(Implementation):
    """Synchronous calls of torch.distributed on its default group, whose backend is ``name``."""

    def __init__(self, name: str, dtypes: Collection[DType], ops: Mapping[Op, dist.ReduceOp.RedOpType]) -> None:
        self._name, self._dtypes, self._ops = name, dtypes, ops
        self._rank = dist.get_rank()

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if not case.collective.reduces:
            return None
        if case.op not in self._ops or not supports(case.dtype, case.op):
            return f"{self._name} has no {case.op.name} for {case.dtype.name}"
        return None if case.dtype in self._dtypes else f"{self._name} reduces no {case.dtype.name}"

    def barrier(self) -> None:
        """See Implementation."""
        dist.barrier()

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        given, got = buffers.input, buffers.output
        if not case.collective.reduces:  # bytes are bytes, and backends know few dtypes
            given, got = given.view(torch.uint8), got.view(torch.uint8)
        root, ranks = self._rank == ROOT, case.world_size
        match case.collective:
            case Collective.all_reduce:
                return partial(dist.all_reduce, given, self._ops[case.op])
            case Collective.reduce_scatter:
                return partial(dist.reduce_scatter_tensor, got, given, self._ops[case.op])
            case Collective.all_gather:
                return partial(dist.all_gather_into_tensor, got, given)
            case Collective.all_to_all:
                return partial(dist.all_to_all_single, got, given)
            case Collective.broadcast:
                return partial(dist.broadcast, given, ROOT)
            case Collective.reduce:
                return partial(dist.reduce, given, ROOT, self._ops[case.op])
            case Collective.gather:
                return partial(dist.gather, given, list(got.chunk(ranks)) if root else None, ROOT)
            case Collective.scatter:
                return partial(dist.scatter, got, list(given.chunk(ranks)) if root else None, ROOT)
            case Collective.send_recv:
                return self._exchange(given, got, ranks)
            case _:
                return self._barrier()

    def _barrier(self) -> Call:
        """What is timed as a barrier."""
        return dist.barrier

    def _exchange(self, given: Tensor, got: Tensor, ranks: int) -> Call:
        following, before = (self._rank + 1) % ranks, (self._rank - 1) % ranks

        def exchange() -> None:
            sent = dist.isend(given, following)
            dist.recv(got, before)
            assert sent is not None
            sent.wait()

        return exchange


def gloo() -> Implementation:
    """torch.distributed over gloo; the default group must be gloo's."""
    return TorchDistributed("gloo", _GLOO_DTYPES, _GLOO_OPS)


def mpi_implementation() -> Implementation:
    """The MPI that this process was started by; imports mpi4py, which initialises MPI."""
    from symmcomm.bench.mpi_calls import MPICalls

    return MPICalls()
