"""Symmetric memory with the names of ``torch.distributed._symmetric_memory``, on groups of the ``symm`` backend.

    import symmcomm.distributed.symm_mem as symm_mem

    x = symm_mem.empty(1024, dtype=torch.float32)
    handle = symm_mem.rendezvous(x, group)          # collective
    handle.barrier()
    peer = handle.get_buffer(1, x.shape, x.dtype)   # rank 1's x, for loads and stores

As in torch, ``empty`` is local and ``rendezvous`` collective, and one tensor may meet several groups. Unlike there,
``rendezvous`` is what moves the tensor into shared memory, contents included: take views of it afterwards. On a GPU,
barriers and signals of a handle are kernels on the current stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from symmcomm.checks import check_rank
from symmcomm.communicator import Communicator
from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.errors import ArgumentError
from symmcomm.memory.handle import SymmetricHandle

_owners: weakref.WeakSet[SymmProcessGroup] = weakref.WeakSet()  # groups that tensors were moved to
_workspaces: weakref.WeakKeyDictionary[SymmProcessGroup, torch.Tensor] = weakref.WeakKeyDictionary()


class GroupHandle(SymmetricHandle):
    """A symmetric tensor as the ranks of a group see it. ``rank``, ``world_size`` and all ranks are of this group.

    Attributes:
        device: of the buffers.
        offset: of the tensor within the buffers, in bytes: 0.
    """

    offset = 0

    def __init__(self, group: SymmProcessGroup, tensor: torch.Tensor, owner: SymmProcessGroup) -> None:
        _, offset = owner.comm.locate(tensor)
        super().__init__(group.side(tensor.device), offset, tensor.nbytes)
        self.device = tensor.device
        self._group, self._owner = group, owner.side(tensor.device)
        self._owner_ranks = [dist.get_group_rank(owner, rank) for rank in dist.get_process_group_ranks(group)]
        heap = self._owner.heap
        self.buffer_ptrs = [heap.base + rank * heap.stride + offset for rank in self._owner_ranks]
        if group is not owner:  # multicast reaches all of the owner's ranks
            self.multicast_ptr = 0
        self._pointers[0] = torch.tensor(self.buffer_ptrs, device=self._pointers.device)

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0
    ) -> torch.Tensor:
        """The rank's copy as a tensor of ``sizes``, starting ``storage_offset`` elements in."""
        check_rank(self, rank, "rank")
        whole = SymmetricHandle(self._owner, self._offset, self.buffer_size)
        return whole.get_buffer(self._owner_ranks[rank], sizes, dtype, storage_offset or 0)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As ``get_buffer``."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        storage_offset: int | None = 0,
    ) -> torch.Tensor:
        """The rank's signal pad as a tensor; by default all of it, as uint32."""
        return super().get_signal_pad(rank, sizes or None, dtype or torch.uint32, storage_offset or 0)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Barrier of the group's ranks on a channel. ``timeout_ms`` of 0 means the group's timeout."""
        self._do(lambda _: SymmetricHandle.barrier(self, channel, timeout_ms))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals ``dst_rank`` on a channel, once it has taken this rank's last signal there."""
        self._do(lambda _: SymmetricHandle.put_signal(self, dst_rank, channel, timeout_ms))

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for ``src_rank``'s signal on a channel and takes it."""
        self._do(lambda _: SymmetricHandle.wait_signal(self, src_rank, channel, timeout_ms))

    def _do(self, call: Callable[[Communicator], None]) -> None:
        """On the host in turn with the group's calls; on the GPU the stream sees to that."""
        if self.device.type == "cpu":
            self._group.do(call)
        else:
            call(self._group.comm)


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """As ``torch.empty``; the tensor may then be given to ``rendezvous``."""
    entries: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return torch.empty(tuple(entries), dtype=dtype, device=device)


def rendezvous(tensor: torch.Tensor, group: str | dist.ProcessGroup) -> GroupHandle:
    """Collective over the group. Makes the tensor symmetric, and returns the handle through which this rank reaches
    every rank's.

    Args:
        tensor: contiguous, the whole of its storage, of the same shape and dtype on all ranks.
        group: of the ``symm`` backend, or its name. If the tensor has met a group before, one with no other ranks.

    Raises:
        ArgumentError: on the calling rank. MismatchError: ranks give different sizes or dtypes.
    """
    members = _resolve(group)
    owner = next((other for other in _owners if other.comm.is_symmetric(tensor)), None)
    if owner is None:
        _move(tensor, members)
        owner = members
    strangers = set(dist.get_process_group_ranks(members)) - set(dist.get_process_group_ranks(owner))
    if strangers:
        raise ArgumentError(
            f"the tensor is shared with ranks {dist.get_process_group_ranks(owner)} only, not with ranks "
            f"{sorted(strangers)}: rendezvous with the larger group first"
        )
    handle = GroupHandle(members, tensor, owner)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # with what moved it
    members.do(lambda comm: comm.all_gather_bytes(b""))  # nobody may reach for it before all have it
    return handle


def _resolve(group: str | dist.ProcessGroup) -> SymmProcessGroup:
    found = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    if not isinstance(found, SymmProcessGroup):
        raise ArgumentError(f"group={group!r} is not of the symm backend")
    return found


def _move(tensor: torch.Tensor, group: SymmProcessGroup) -> None:
    """Collective. Puts the tensor's storage into the group's symmetric heap."""
    if not tensor.is_contiguous() or tensor.nbytes != tensor.untyped_storage().nbytes():
        raise ArgumentError(
            f"tensor must be contiguous and the whole of its storage; it has strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}, {tensor.nbytes} of {tensor.untyped_storage().nbytes()} bytes"
        )
    group.side(tensor.device)  # there is one
    moved: list[torch.Tensor] = []
    group.do(lambda comm: moved.append(comm.empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)))
    with torch.no_grad():
        moved[0].copy_(tensor)
        tensor.set_(moved[0].untyped_storage(), 0, tensor.shape, tensor.stride())
    _owners.add(group)


def get_symm_mem_workspace(group_name: str, min_size: int) -> GroupHandle:
    """Collective. The handle of a buffer of the group's, of at least ``min_size`` bytes; grows by need."""
    group = _resolve(group_name)
    workspace = _workspaces.get(group)
    if workspace is None or workspace.nbytes < min_size:
        workspace = _workspaces[group] = empty(min_size, dtype=torch.uint8)
    return rendezvous(workspace, group)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Does nothing: every symm group has symmetric memory."""
    _resolve(group_name)


def is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Whether the group is of the symm backend."""
    return isinstance(_resolve_process_group(group_name), SymmProcessGroup)  # type: ignore[arg-type]


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor has been through ``rendezvous``."""
    return any(group.comm.is_symmetric(tensor) for group in _owners)


def get_backend(device: torch.device | str) -> str | None:
    """``"SYMM"`` on CPUs and NVIDIA GPUs; None elsewhere."""
    return "SYMM" if torch.device(device).type in ("cpu", "cuda") else None


def is_nvshmem_available() -> bool:
    """False: memory is shared by the hosts' kernel."""
    return False
