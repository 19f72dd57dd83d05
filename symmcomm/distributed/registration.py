"""Tells torch.distributed that there is a backend ``symm``. Light: what runs it is imported with the first group.

Called by ``import symmcomm``, and by torch itself through the entry points ``torch.backends`` (at ``import torch``) and
``torch.distributed.backends`` (when the name is first used). torch is imported in the functions only: its import may be
what called them, or may call them before this module's caller goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, _DistributedBackendOptions

    from symmcomm.distributed.process_group import SymmProcessGroup

BACKEND = SCHEME = "symm"
_TIMEOUT = timedelta(minutes=5)


def register() -> None:
    """Makes ``init_process_group("symm")`` work, and the init method ``symm://``. Repeating it is harmless."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND.upper() in dist.Backend._plugins:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    # "cuda" is listed so that "symm" alone and "cpu:symm,cuda:symm" mean the same; the defaults of torch stay.
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def _create(options: _DistributedBackendOptions, _: object) -> SymmProcessGroup:
    from symmcomm.distributed import norm_ops, torch_functions, torch_ops  # noqa: F401  # register torch.ops.symmcomm
    from symmcomm.distributed.process_group import SymmProcessGroup

    torch_functions.install()
    return SymmProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout.total_seconds(),
        is_default=not options.global_ranks_in_group,
    )


def _rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: object) -> Iterator[tuple[Store, int, int]]:
    from symmcomm.distributed.rendezvous import rendezvous

    return rendezvous(url, timeout)
