"""Functions of torch.distributed that serve groups of torch's own classes only (torch 2.13 and older), told of ours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from symmcomm.distributed.process_group import SymmProcessGroup

Original = Callable[..., Any]


def _monitored_barrier(
    original: Original,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """torch's turns away all backends but gloo by name."""
    used = group or dist.group.WORLD
    if isinstance(used, SymmProcessGroup):
        used.monitored_barrier(timeout, wait_all_ranks)
    else:
        original(group, timeout, wait_all_ranks)


def _batch_isend_irecv(original: Original, p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """NCCL, which has the messages of GPU tensors, must be told where a batch begins and ends: else sends wait for
    receives that are queued behind sends."""
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group, device = p2p_op_list[0].group or dist.group.WORLD, p2p_op_list[0].tensor.device
    if device.type != "cuda" or not isinstance(group, SymmProcessGroup):
        return original(p2p_op_list)  # type: ignore[no-any-return]
    group._start_coalescing(device)
    for op in p2p_op_list:
        peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
        op.op(op.tensor, group=group, tag=op.tag, **peer)
    return [group._end_coalescing(device)]


def _set_pg_timeout(original: Original, timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """torch's reaches what the group has of gloo and NCCL."""
    original(timeout, group)
    used = group or dist.group.WORLD
    if isinstance(used, SymmProcessGroup):
        used.set_timeout(timeout)


_OURS: dict[str, Callable[..., Any]] = {
    "monitored_barrier": _monitored_barrier,
    "batch_isend_irecv": _batch_isend_irecv,
    "_set_pg_timeout": _set_pg_timeout,
}


def install() -> None:
    """Puts them in the place of torch's. Repeating it is harmless."""
    for name, ours in _OURS.items():
        original = getattr(distributed_c10d, name)
        if not hasattr(original, "_original"):
            _replace(name, ours, original)


def _replace(name: str, ours: Callable[..., Any], original: Original) -> None:
    @wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        return ours(original, *args, **options)

    wrapper._original = original  # type: ignore[attr-defined]
    for module in (distributed_c10d, dist):
        if hasattr(module, name):
            setattr(module, name, wrapper)
