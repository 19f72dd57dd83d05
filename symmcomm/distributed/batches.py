"""``batch_isend_irecv`` of GPU tensors: NCCL must be told where a batch begins and ends, else sends wait for receives
that are queued behind sends. torch 2.13 and older tells it to groups of its own class only."""

from __future__ import annotations

from functools import wraps

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Lets ``torch.distributed.batch_isend_irecv`` mark batches on symm groups."""
    original = distributed_c10d.batch_isend_irecv
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def wrapper(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        from symmcomm.distributed.process_group import SymmProcessGroup

        distributed_c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group or dist.group.WORLD, p2p_op_list[0].tensor.device
        if device.type != "cuda" or not isinstance(group, SymmProcessGroup):
            return original(p2p_op_list)
        group._start_coalescing(device)
        for op in p2p_op_list:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=group, tag=op.tag, **peer)
        return [group._end_coalescing(device)]

    distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = wrapper
