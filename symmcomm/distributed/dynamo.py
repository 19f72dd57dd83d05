"""What ``torch.compile`` must not look into."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")


def run_eagerly(cls: type[T]) -> type[T]:
    """Has Dynamo break the graph at the methods of the class and trace nothing that they call, as it does at the
    built-in process groups, which it cannot look into. As ``torch.compiler.disable``, but it neither imports the
    compiler nor stands in the way of a call."""
    alone = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, alone)
    return cls
