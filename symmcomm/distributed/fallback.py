"""What symm does not do itself goes to gloo (tensors on the CPU), made with the group, or NCCL (tensors on a GPU), made
when it is first needed.

They are registered inside the group, so that torch's own C++ finds them as well: it calls Python for some collectives
only (in torch 2.13 not for ``_c10d_functional.all_gather_into_tensor_out``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from symmcomm.distributed.work import FINISHED
from symmcomm.errors import ArgumentError

_CALLS = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Names of a ``Backend``'s methods where they differ from those of a ``ProcessGroup``."""


@cache
def _loopback() -> Any:
    """One device, hence one thread and listener, for the gloo of all groups; all ranks are on one host."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def register_gloo(group: dist.ProcessGroup, store: Store, timeout_s: float) -> None:
    """Collective. Makes the group's gloo."""
    rank, size, timeout = group.rank(), group.size(), timedelta(seconds=timeout_s)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
    options._devices, options._threads, options._timeout = [_loopback()], 1, timeout
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, options)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def open_nccl(group: dist.ProcessGroup, store: Store, timeout_s: float) -> Any:
    """The group's NCCL, which connects with its first call; None where there is no GPU or no NCCL."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), group.rank(), group.size(), options)
    nccl._set_sequence_number_for_group()
    name, description = group.group_name, group.group_desc
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    # The name of a group is that of one of its backends, which torch names when the group is made: this one came later.
    group._set_group_name(name)
    group._set_group_desc(description)
    return nccl


def hand_over(group: dist.ProcessGroup, name: str, tensor: torch.Tensor, args: Sequence[object]) -> dist.Work:
    """Has the fallback for the tensor's device do a call of the group."""
    try:
        backend = group._get_backend(tensor.device)
    except RuntimeError:
        raise ArgumentError(f"{name}: the group has no backend for {tensor.device}") from None
    call: Callable[..., dist.Work | None] = getattr(backend, _CALLS.get(name, name))
    return call(*(arg for arg in args if arg is not None)) or FINISHED  # NCCL returns None where nothing is to wait for
