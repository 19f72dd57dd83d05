"""GPU memory by the driver's legacy handles: where descriptors are refused, and for memory that others allocated.

A legacy handle (cuIpcGetMemHandle, 64 bytes) names an allocation of cuMemAlloc, and the driver alone decides where an
importer sees it. So the heap has one segment only, taken whole at once; two ranks always make a flat space (any two
addresses are at equal distances, the stride may be negative), more ranks only by luck.

Memory must not be freed before every importer has closed it. ``SymmetricHeap.close`` and ``RegisteredMemory.close``
therefore let the ranks wait for each other in between.
"""

from __future__ import annotations

import contextlib
import json

import torch

from symmcomm.checks import check_rank
from symmcomm.errors import ArgumentError, CudaError, ExchangeError, MismatchError
from symmcomm.memory.cuda_driver import CudaDevice, handle_bytes, handle_from_bytes
from symmcomm.memory.device_tensor import device_tensor
from symmcomm.memory.heap import AllGather
from symmcomm.memory.provider import Offer, Segment

_GRANULARITY_BYTES = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1


class IpcProvider:
    """``memory.provider.Provider`` of one GPU's memory, for one segment."""

    name = "cuda_ipc"
    granularity_bytes = _GRANULARITY_BYTES
    growable, divisible, owner_frees_last = False, False, True

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.place = device, str(device)
        self._own: set[int] = set()

    def reserve(self, num_bytes: int) -> int:
        """0: the driver chooses addresses."""
        return 0

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Nothing was reserved."""

    def create(self, address: int, num_bytes: int) -> Segment:
        """New zeroed memory, where the driver puts it; the offer is a handle of 64 bytes."""
        device = self.device
        device.refuse_in_capture(f"allocating a symmetric heap of {num_bytes} bytes")
        with contextlib.ExitStack() as undo, device.names_sizes(num_bytes):
            own = int(device.call("cuMemAlloc", num_bytes))
            undo.callback(device.undo, "cuMemFree", own)
            device.zero(own, num_bytes)
            offer = handle_bytes(device.call("cuIpcGetMemHandle", own))
            undo.pop_all()
        self._own.add(own)
        return Segment(own, offer)

    def map(self, address: int, num_bytes: int, offer: Offer) -> int:
        """Opens a peer's handle; returns where the driver put it. Raises ExchangeError."""
        return open_handle(self.device, offer)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Notes that own memory is to be freed, or a peer's closed."""
        undo = "cuMemFree" if address in self._own else "cuIpcCloseMemHandle"
        self._own.discard(address)
        self.device.later(lambda: self.device.call(undo, address))

    def reclaim(self) -> None:
        """Frees and closes what was noted, after the device has finished its work."""
        self.device.reclaim()

    def available_bytes(self) -> int:
        """Free memory of the device."""
        return self.device.memory()[0]

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """A tensor of uint8 on this device, also where the memory is a peer's."""
        return device_tensor(self.device.ordinal, address, num_bytes, owner)


def open_handle(device: CudaDevice, offer: Offer) -> int:
    """Maps the allocation that a legacy handle names; returns its start. Raises ExchangeError."""
    if not isinstance(offer, bytes) or len(offer) != 64:
        raise ExchangeError(f"a peer's offer is {offer!r} where cuda_ipc needs a handle of 64 bytes")
    handle = handle_from_bytes(device.driver.CUipcMemHandle(), offer)
    try:
        return int(device.call("cuIpcOpenMemHandle", handle, _LAZY_ENABLE_PEER_ACCESS))
    except CudaError as error:
        raise ExchangeError(f"{device} cannot open a peer's memory: {error}") from None


class RegisteredMemory:
    """Every rank's copy of a tensor that another library allocated. Made by ``register``; use ``close`` when done.

    Attributes:
        rank, world_size: of the communicator.
        buffer_size: bytes of the tensor.
        buffer_ptrs: address in this process of every rank's tensor. They are at no fixed distance: a kernel needs the
            table, or ``flat_space`` where there is one.
    """

    def __init__(
        self, device: CudaDevice, rank: int, tensor: torch.Tensor, buffer_ptrs: list[int], agree: AllGather
    ) -> None:
        self.rank, self.world_size, self.buffer_size = rank, len(buffer_ptrs), tensor.nbytes
        self.buffer_ptrs = buffer_ptrs
        self._device, self._tensor, self._agree = device, tensor, agree
        self._opened: list[int] = []  # starts of the peers' allocations

    def flat_space(self) -> tuple[int, int] | None:
        """(base, stride) if the tensors lie at equal distances, as those of two ranks always do."""
        first = self.buffer_ptrs[0]
        stride = self.buffer_ptrs[1] - first if self.world_size > 1 else 0
        regular = all(address == first + peer * stride for peer, address in enumerate(self.buffer_ptrs))
        return (first, stride) if regular else None

    def get_buffer(self, rank: int) -> torch.Tensor:
        """The rank's copy, shaped as this rank's tensor. It must not be used after ``close``."""
        check_rank(self, rank, "rank")
        if rank == self.rank:
            return self._tensor
        raw = device_tensor(self._device.ordinal, self.buffer_ptrs[rank], self.buffer_size, self)
        return raw.view(self._tensor.dtype).view(self._tensor.shape)

    def close(self) -> None:
        """Collective. Lets go of the peers' memory, and waits until they have let go of this rank's, whose owner may
        free it from then on. Repeating it is harmless."""
        self._device.refuse_in_capture("closing registered memory")
        opened, self._opened = self._opened, []
        if opened:
            self._device.call("cuCtxSynchronize")
        for address in opened:
            self._device.call("cuIpcCloseMemHandle", address)
        self._agree(b"")


def register(device: CudaDevice, rank: int, tensor: torch.Tensor, agree: AllGather) -> RegisteredMemory:
    """Collective. Makes each rank's ``tensor`` reachable by all ranks, without copying; it stays its owner's.

    Args:
        tensor: contiguous, on ``device``, of the same size and dtype on every rank.
        agree: all-gather of bytes among the ranks.

    Raises:
        ArgumentError: the tensor is not contiguous, empty, or on another device.
        MismatchError: tensors differ between ranks.
        ExchangeError: on every rank, if a rank cannot give its memory or reach a peer's. Legacy handles exist for
            cudaMalloc only: not for torch's expandable segments, nor for cudaMallocAsync.
    """
    if not tensor.is_cuda or tensor.device.index != device.ordinal:
        raise ArgumentError(f"tensor is on {tensor.device}, this communicator's device is {device}")
    if not tensor.is_contiguous() or tensor.numel() == 0:
        raise ArgumentError(f"tensor of shape {tuple(tensor.shape)} is not contiguous, or empty")
    address = tensor.data_ptr()
    what = f"{tuple(tensor.shape)} of {tensor.dtype}"
    failure, offer, start = "", b"", address
    try:
        start = int(device.call("cuMemGetAddressRange", address)[0])
        offer = handle_bytes(device.call("cuIpcGetMemHandle", start))
    except CudaError as error:
        failure = f"its memory has no legacy handle ({error}); was it allocated by cudaMalloc?"
    answers = [json.loads(each) for each in agree(json.dumps([what, failure, offer.hex(), address - start]).encode())]
    for peer, (other, _, _, _) in enumerate(answers):
        if other != what:
            raise MismatchError(f"register: the tensor is {what} on rank {rank}, {other} on rank {peer}")
    _raise_first([reason for _, reason, _, _ in answers])
    memory = RegisteredMemory(device, rank, tensor, [address] * len(answers), agree)
    try:
        for peer, (_, _, handle, skip) in enumerate(answers):
            if peer != rank:
                memory._opened.append(open_handle(device, bytes.fromhex(handle)))
                memory.buffer_ptrs[peer] = memory._opened[-1] + skip
    except ExchangeError as error:
        failure = str(error)
    reasons = [each.decode() for each in agree(failure.encode())]
    if any(reasons):
        memory.close()
    _raise_first(reasons)
    return memory


def _raise_first(reasons: list[str]) -> None:
    for peer, reason in enumerate(reasons):
        if reason:
            raise ExchangeError(f"register: rank {peer}: {reason}")
