"""Symmetric memory of a communicator: on the host, and on the GPU if the communicator has one."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmcomm.collectives.arguments import check_dense, check_tensor, gpu_of, parse_device
from symmcomm.errors import ArgumentError, DTypeError, MismatchError
from symmcomm.memory.cuda_ipc import RegisteredMemory
from symmcomm.memory.cuda_ipc import register as register_memory
from symmcomm.memory.handle import SymmetricHandle

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator
    from symmcomm.memory.pool import SymmetricPool

_NOT_SYMMETRIC = "tensor is not symmetric: it does not come from empty() of this communicator"


def empty(
    self: Communicator,
    *size: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Collective. A symmetric tensor: at the same offset of every rank's heap, uninitialised.

    Peers reach it in place, so collectives on it copy nothing. It lives until ``free`` or, as memory of this
    process, as long as the tensor; dropping the tensor alone does not return it to the heap.

    Args:
        device: ``"cuda"`` for the GPU that the communicator was made for; the host by default.

    Raises:
        MismatchError: ranks ask for different sizes or dtypes. OutOfSymmetricMemoryError: no room.
    """
    shape = _shape(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError(f"dtype={dtype!r} is not a torch.dtype")
    self.check_open()
    place = parse_device(device)
    gpu = None if place is None else self.gpu_on(place)
    heap = self.heap if gpu is None else gpu.heap
    num_bytes = math.prod(shape) * dtype.itemsize
    request = f"empty({', '.join(map(str, shape))}, dtype={dtype}{'' if gpu is None else ', device=cuda'})"
    offset = heap.allocate(max(num_bytes, 1), request, self.all_gather_bytes)
    if gpu is not None:
        gpu.extend_multicast()
        gpu.add_symmetric(offset, num_bytes)
    raw = heap.tensor(self.rank, offset, max(num_bytes, 1))
    return raw[:num_bytes].view(dtype).view(shape)


def _shape(entries: Sequence[object]) -> tuple[int, ...]:
    """Sizes as Python's numbers; NumPy's and tensors of one whole number are taken as well."""
    try:
        shape = tuple(-1 if isinstance(n, bool) else operator.index(n) for n in entries)  # type: ignore[arg-type]
    except TypeError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise ArgumentError(f"size={tuple(entries)} has an entry that is not a whole number >= 0")
    return shape


def free(self: Communicator, tensor: torch.Tensor) -> None:
    """Collective. Returns a symmetric tensor's memory to the heap; the tensor must not be used any more."""
    self.check_open()
    gpu = gpu_of(self, tensor, "tensor")
    if gpu is None:
        check_dense(tensor, "tensor")
    heap = self.heap if gpu is None else gpu.heap
    offset = heap.offset_of(tensor.untyped_storage().data_ptr(), 0)
    if offset < 0:
        raise ArgumentError(_NOT_SYMMETRIC)
    heap.free(offset, f"free(offset {offset}{'' if gpu is None else ', device=cuda'})", self.all_gather_bytes)
    if gpu is not None:
        gpu.drop_symmetric(offset, tensor.untyped_storage().nbytes())


def is_symmetric(self: Communicator, tensor: torch.Tensor) -> bool:
    """Whether the tensor's data lie in this communicator's heap."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    return tensor.layout is torch.strided and self.locate(tensor)[1] >= 0


def rendezvous(self: Communicator, tensor: torch.Tensor) -> SymmetricHandle:
    """Collective. The handle through which this rank reaches all ranks' copies of a symmetric tensor.

    On the GPU, collectives work in place on tensors that ``empty`` returned, and on parts of those, and tensors of a
    pool, once they have been through here: only then do all ranks know that they lie at the same offset.
    """
    self.check_open()
    gpu = gpu_of(self, tensor, "tensor")
    if gpu is None:
        check_tensor(tensor, "tensor")
        offset = self.locate(tensor)[1]
    else:
        gpu.check_tensor(tensor, "tensor")
        offset = gpu.offset_of(tensor)
    if offset < 0:
        raise ArgumentError(_NOT_SYMMETRIC)
    offers = [int(answer) for answer in self.all_gather_bytes(str(offset).encode())]
    for peer, other in enumerate(offers):
        if other != offset:
            raise MismatchError(
                f"rendezvous: the tensor is at heap offset {offset} on rank {self.rank}, at {other} on rank {peer}"
            )
    if gpu is None:
        return SymmetricHandle(self, offset, tensor.nbytes)
    gpu.add_symmetric(offset, tensor.nbytes)
    return SymmetricHandle(gpu, offset, tensor.nbytes)


def register(self: Communicator, tensor: torch.Tensor) -> RegisteredMemory:
    """Collective. Makes each rank's tensor on the GPU, which another library allocated, reachable by all ranks through
    ``buffer_ptrs`` and ``get_buffer``. It does not become part of the heap: collectives treat it as any other.

    Call ``close()`` of what is returned when done, on all ranks.

    Raises:
        ArgumentError, MismatchError, ExchangeError: see ``memory.cuda_ipc.register``.
    """
    self.check_open()
    gpu = gpu_of(self, tensor, "tensor")
    if gpu is None:
        raise ArgumentError("tensor must be on a GPU: memory of the host cannot be registered")
    check_dense(tensor, "tensor", gpu.device)
    return register_memory(gpu.cuda_device, self.rank, tensor, self.all_gather_bytes)


def pool(self: Communicator, num_bytes: int) -> SymmetricPool:
    """Collective. A ``torch.cuda.MemPool`` on ``num_bytes`` of the GPU's symmetric heap: tensors that all ranks make in
    it, alike, lie at the same offsets. ``rendezvous`` checks that, and lets collectives work on them in place.

    After its ``close``, ``free(pool.memory)`` returns the memory.
    """
    from symmcomm.memory.pool import SymmetricPool

    return SymmetricPool(self.empty(num_bytes, dtype=torch.uint8, device="cuda"))


def locate(self: Communicator, tensor: torch.Tensor) -> tuple[int, int]:
    """(address, heap offset or -1) of a tensor's data."""
    address = tensor.data_ptr()
    if tensor.is_cuda:
        return address, self.gpu.offset_of(tensor) if self.gpu is not None else -1
    offset = address - self.heap_address
    return address, offset if 0 <= offset < self.heap_bytes else -1
