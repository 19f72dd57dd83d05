"""The MPI peer: mpi4py's buffer calls on prepared messages, in place where symmcomm is in place."""

from __future__ import annotations

from functools import partial

from mpi4py import MPI
from torch import Tensor

from symmcomm.bench.case import ROOT, Case, Collective
from symmcomm.bench.implementations import Buffers, Call, Implementation
from symmcomm.schedule.dtypes import DType, Op, supports

Message = tuple[MPI.buffer, MPI.Datatype]

_DATATYPES = {
    DType.float32: MPI.FLOAT, DType.float64: MPI.DOUBLE, DType.float16: MPI.FLOAT16_T, DType.bfloat16: MPI.BFLOAT16_T,
    DType.int8: MPI.INT8_T, DType.int16: MPI.INT16_T, DType.int32: MPI.INT32_T, DType.int64: MPI.INT64_T,
    DType.uint8: MPI.UINT8_T, DType.bool: MPI.C_BOOL,
}
_OPS = {
    Op.sum: MPI.SUM, Op.max: MPI.MAX, Op.min: MPI.MIN, Op.prod: MPI.PROD,
    Op.band: MPI.BAND, Op.bor: MPI.BOR, Op.bxor: MPI.BXOR,
}
_BOOL_OPS = {
    Op.sum: MPI.LOR, Op.max: MPI.LOR, Op.bor: MPI.LOR, Op.prod: MPI.LAND, Op.min: MPI.LAND, Op.band: MPI.LAND,
    Op.bxor: MPI.LXOR,
}


class MPICalls(Implementation):
    """Calls on COMM_WORLD."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self._rank = self._comm.rank

    def refusal(self, case: Case) -> str | None:
        """See Implementation."""
        if not case.collective.reduces:
            return None
        if case.dtype not in _DATATYPES:
            return f"MPI has no {case.dtype.name}"
        datatype = _DATATYPES[case.dtype]
        if datatype == MPI.DATATYPE_NULL:
            return f"mpi4py's datatype of {case.dtype.name} is DATATYPE_NULL with {_library()}"
        if case.op not in _OPS or not supports(case.dtype, case.op):
            return f"MPI has no {case.op.name} for {case.dtype.name}"
        try:  # a local call: all ranks of one library agree
            element = bytearray(case.dtype.itemsize)
            self._op(case).Reduce_local((element, datatype), (bytearray(element), datatype))
        except MPI.Exception as error:
            return f"this MPI refuses {case.op.name} of {case.dtype.name}: {error.Get_error_string()}"
        return None

    def barrier(self) -> None:
        """See Implementation."""
        self._comm.Barrier()

    def call(self, case: Case, buffers: Buffers) -> Call:
        """See Implementation."""
        comm, root, given, got = self._comm, self._rank == ROOT, buffers.input, buffers.output
        op = self._op(case) if case.collective.reduces else MPI.OP_NULL
        match case.collective:
            case Collective.all_reduce:
                return partial(comm.Allreduce, MPI.IN_PLACE, _elements(given, case.dtype), op)
            case Collective.reduce_scatter:
                return partial(
                    comm.Reduce_scatter_block, _elements(given, case.dtype), _elements(got, case.dtype), op
                )
            case Collective.all_gather:
                return partial(comm.Allgather, _bytes(given), _bytes(got))
            case Collective.all_to_all:
                return partial(comm.Alltoall, _bytes(given), _bytes(got))
            case Collective.broadcast:
                return partial(comm.Bcast, _bytes(given), ROOT)
            case Collective.reduce:
                message = _elements(given, case.dtype)
                sent, received = (MPI.IN_PLACE, message) if root else (message, None)
                return partial(comm.Reduce, sent, received, op, ROOT)
            case Collective.gather:
                return partial(comm.Gather, _bytes(given), _bytes(got) if root else None, ROOT)
            case Collective.scatter:
                return partial(comm.Scatter, _bytes(given) if root else None, _bytes(got), ROOT)
            case Collective.send_recv:
                following, before = (self._rank + 1) % comm.size, (self._rank - 1) % comm.size
                return partial(comm.Sendrecv, _bytes(given), following, 0, _bytes(got), before, 0)
            case _:
                return comm.Barrier

    @staticmethod
    def _op(case: Case) -> MPI.Op:
        return (_BOOL_OPS if case.dtype is DType.bool else _OPS)[case.op]


def _library() -> str:
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def _elements(tensor: Tensor, dtype: DType) -> Message:
    """A message that can be reduced."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), _DATATYPES[dtype]


def _bytes(tensor: Tensor) -> Message:
    """A message that is only moved; all MPIs and dtypes can."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE
