"""The streams of one GPU and the events that order them, at little cost to the host.

torch makes a stream object whenever the current one is asked for, and an event, with the driver's behind it, whenever
one stream waits for another: several times what a small collective costs. Here both are kept. An event may be recorded
anew as soon as nobody will ask for it: a wait that is enqueued keeps to what had been recorded then, also in a capture.
No event is used twice at a time, since whoever needs one takes it off the list.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MOST_STREAMS = 256  # kept: those of other libraries come without limit


class GpuStreams:
    """See above.

    Args:
        ordinal: of the GPU, as torch counts.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._known: dict[tuple[int, ...], torch.cuda.Stream] = {}
        self._spare: list[torch.cuda.Event] = []

    def current(self) -> torch.cuda.Stream:
        """torch's current stream of the GPU."""
        place = torch._C._cuda_getCurrentStream(self.ordinal)
        stream = self._known.get(place)
        if stream is None:
            if len(self._known) >= _MOST_STREAMS:
                self._known.clear()
            stream_id, device_index, device_type = place
            stream = self._known[place] = torch.cuda.Stream(
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )  # type: ignore[no-untyped-call]
        return stream

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event of what is in the stream so far. It is the caller's until ``give_back``."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def give_back(self, event: torch.cuda.Event) -> None:
        """Of an event that nobody will ask for or wait for any more."""
        self._spare.append(event)

    def order(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """What comes in the one stream runs after what is in the other."""
        event = self.record(earlier)
        event.wait(later)
        self._spare.append(event)

    def run_on(self, stream: torch.cuda.Stream, call: Callable[..., object], *args: object) -> object:
        """``call(*args)`` with another stream current, and the GPU the current device."""
        device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self.ordinal)
        torch.cuda.set_stream(stream)  # makes its device the current one
        try:
            return call(*args)
        finally:
            torch._C._cuda_setStream(*before)
            if device != self.ordinal:
                torch.cuda.set_device(device)
