"""Calls of ``all_reduce_rms_norm`` on the CPU that are like one before: a third of the work, for a few rows half of the
time. Whatever is not at once seen to be right is left to the checks that have words for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from symmcomm.fused.call import Task
from symmcomm.fused.norm_cpu import entries, run_packed

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_MAX_KEPT = 1024  # sizes that never come again must not fill the memory
Pair = tuple[torch.Tensor, torch.Tensor]
Key = tuple[torch.Size, torch.dtype, float, float]


class Plan(NamedTuple):
    """What such calls have in common."""

    head: tuple[int, ...]  # of the job, up to HIDDEN
    num_bytes: int
    row_bytes: int
    weight_shape: torch.Size


_plans: dict[Key, Plan] = {}


def remember(task: Task, shape: torch.Size, call: int) -> None:
    """Keeps a call that has been checked: with a residual, and without bias and scales."""
    if task.residual == 0 or task.bias or task.scaled:
        return
    if len(_plans) >= _MAX_KEPT:
        _plans.clear()
    add, normalise = entries(task.dtype, True, True, False, False)
    row_bytes = task.hidden * task.dtype.itemsize
    head = (call, add, normalise, task.dtype.itemsize, task.rows, task.hidden)
    plan = Plan(head, task.rows * row_bytes, row_bytes, torch.Size((task.hidden,)))
    _plans[shape, task.dtype, task.eps, task.weight_bias] = plan


def _fits(tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    return (
        tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def all_reduce_again(
    comm: Communicator,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    out: torch.Tensor | None,
    new_residual: torch.Tensor | None,
) -> Pair | None:
    """The results; None if the call is new, or perhaps wrong: nothing has been done then."""
    try:
        shape, dtype = input.shape, input.dtype
        plan = _plans[shape, dtype, eps, weight_bias]
        fit = _fits(input, shape, dtype) and _fits(residual, shape, dtype) and _fits(weight, plan.weight_shape, dtype)
        for given in (out, new_residual):
            fit = fit and (given is None or _fits(given, shape, dtype))
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None
    if not fit:
        return None
    out = torch.empty_like(input) if out is None else out
    new_residual = torch.empty_like(input) if new_residual is None else new_residual
    source, old, factors = input.data_ptr(), residual.data_ptr(), weight.data_ptr()
    to, kept, num_bytes, row_bytes = out.data_ptr(), new_residual.data_ptr(), plan.num_bytes, plan.row_bytes
    for result in (to, kept):
        for argument in (source, old):
            if result != argument and abs(result - argument) < num_bytes:
                return None
        if result - row_bytes < factors < result + num_bytes:
            return None
    if abs(to - kept) < num_bytes:
        return None
    rows = (source, row_bytes, old, row_bytes, kept, row_bytes, to, row_bytes, plan.head[3], 0, factors, 0)
    run_packed(comm, plan.head + rows, eps, weight_bias)
    return out, new_residual
