"""What symm does not do itself goes to gloo (tensors on the CPU) or NCCL (tensors on a GPU), made with the group.

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


def register_fallbacks(group: dist.ProcessGroup, store: Store, timeout_s: float) -> None:
    """Collective. Makes the group's gloo, and its NCCL where there are GPUs."""
    rank, size, timeout = group.rank(), group.size(), timedelta(seconds=timeout_s)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
    options._devices, options._threads, options._timeout = [_loopback()], 1, timeout
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, options)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, nccl_options)
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor is for a fallback: on another device, or sparse."""
    return not tensor.is_cpu or tensor.layout is not torch.strided


def hand_over(group: dist.ProcessGroup, name: str, tensor: torch.Tensor, args: Sequence[object]) -> dist.Work:
    """Has the fallback for the tensor's device do a call of the group."""
    try:
        backend = group._get_backend(tensor.device)
    except RuntimeError:
        raise ArgumentError(f"{name}: the group has no backend for {tensor.device}") from None
    call: Callable[..., dist.Work] = getattr(backend, _CALLS.get(name, name))
    return call(*(arg for arg in args if arg is not None))
