"""Calls as events of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import record_function


def ending(event: record_function, call: Callable[..., object]) -> Callable[..., object]:
    """An asynchronous call, with the end of its event as a part of it: whoever waits for the call may then stop the
    profiler, whose memory the event is."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)

    def run(*args: object) -> None:
        try:
            call(*args)
        finally:
            ended.set_result(None)

    return run
