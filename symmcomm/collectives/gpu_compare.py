"""SYMMCOMM_CHECK=1: ranks tell each other what they call on GPU tensors before any of them launches it, as kernels do
not see what ranks disagree about, and would give wrong data or wait for each other. One exchange of the hosts a call:
for debugging."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from symmcomm.collectives.call import parse_reduction
from symmcomm.errors import ArgumentError, DTypeError, MismatchError

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives

ALIKE = {
    "all_reduce": ("tensor", "op", "ring_mode", "num_blocks"),
    "reduce": ("tensor", "dst", "op"),
    "reduce_scatter_tensor": ("output", "input", "op", "ring_mode", "num_blocks"),
    "all_gather_into_tensor": ("output", "input"),
    "broadcast": ("tensor", "src"),
    "all_to_all_single": ("output", "input"),
    "gather": ("tensor", "dst"),
    "scatter": ("tensor", "src"),
    "all_gather": ("tensor",),
    "all_to_all": (),
    "barrier": ("algorithm", "protocol"),
}
"""Calls of all ranks, and their arguments that must be alike. Kernels compare split sizes themselves, and messages."""


def compare_calls(gpu: GpuCollectives) -> None:
    """Puts the comparison before the calls of one GPU side: MismatchError on every rank, and nothing is launched."""
    for name in ALIKE:
        setattr(gpu, name, _compared(gpu, name))


def _compared(gpu: GpuCollectives, name: str) -> Callable[..., None]:
    call = getattr(gpu, name)
    signature = inspect.signature(call)

    @wraps(call)
    def compare_and_call(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        own = _describe(name, given.arguments)
        for peer, answer in enumerate(gpu.exchange(own.encode())):
            if answer.decode() != own:
                raise MismatchError(f"ranks disagree: rank {gpu.rank} calls {own}, rank {peer} calls {answer.decode()}")
        call(*args, **kwargs)

    return compare_and_call


def _describe(name: str, given: dict[str, Any]) -> str:
    """The call with what must be alike of it."""
    alike = ALIKE[name]
    if name == "all_to_all_single" and (given["output_split_sizes"] or given["input_split_sizes"]):
        alike, name = (), "all_to_all_single with split sizes"
    texts = [f"{key}={_op(given) if key == 'op' else _text(given[key])}" for key in alike]
    return f"{name}({', '.join(texts)})"


def _text(value: object) -> str:
    return f"{value.numel()} of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)


def _op(given: dict[str, Any]) -> str:
    """The operation by the library's own name, whatever it was given as."""
    try:
        return parse_reduction(given["tensor" if "tensor" in given else "input"].dtype, given["op"])[1].name
    except (ArgumentError, DTypeError, AttributeError):  # the call itself will say so
        return repr(given["op"])
