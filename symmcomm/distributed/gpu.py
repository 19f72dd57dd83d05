"""The part of a group that calls on GPU tensors go to: the kernels of the communicator's GPU side.

**When it is made.** With the first such call, which is collective: the group cannot know sooner whether there will be
one, nor the device. Where GPUs cannot share memory, all ranks find that out alike, and NCCL does the calls.

**Streams.** A synchronous call is launched on torch's current stream, so what follows there comes after it; the host
does not wait. An asynchronous one is launched on a stream of the group's own, which first waits for the current one;
``wait`` makes the stream that is current then wait for the call's event. Both are what a CUDA graph can record. The
caching allocator is told of the second stream, so that tensors may be dropped as soon as the call is made.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmcomm.communicator import Communicator
from symmcomm.distributed.work import NO_TIMEOUT
from symmcomm.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives
    from symmcomm.distributed.process_group import SymmProcessGroup

_HIGH_PRIORITY = -1  # a rank that comes late keeps the kernels of all others waiting


class GpuWork(dist.Work):
    """An asynchronous call on the GPU.

    Args:
        stream: where it runs; what is in it so far ends with the call.
        outputs: value of the future and of ``result``.
    """

    def __init__(self, gpu: GpuCollectives, stream: torch.cuda.Stream, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._gpu, self._stream, self._outputs = gpu, stream, outputs
        self._end = gpu.streams.record(stream)
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Makes the current stream wait; the host goes on. Raises what earlier kernels are known to have failed of."""
        self._gpu.check()
        self._end.wait(self._gpu.streams.current())
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What a kernel of the communicator, perhaps of another call, is known to have failed of."""
        try:
            self._gpu.check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed already, as futures of GPU values are: what uses its value runs after the call on the GPU."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._gpu.device])
            self._gpu.streams.run_on(self._stream, self._future.set_result, list(self._outputs))
        return self._future

    def __del__(self) -> None:
        if (end := self.__dict__.get("_end")) is not None:  # else recording it has failed
            self._gpu.streams.give_back(end)


class GpuCalls:
    """Calls of one group on GPU tensors."""

    def __init__(self, group: SymmProcessGroup) -> None:
        self._group, self._comm = weakref.proxy(group), group.comm  # a destroyed group closes its sockets at once
        self._stream: torch.cuda.Stream | None = None
        self._refused = False

    def opens(self, device: torch.device) -> bool:
        """Whether the group has kernels for GPUs; collective when it is first asked."""
        if self._comm.gpu is not None:
            return True
        if not self._refused:
            if torch.cuda.is_current_stream_capturing():
                raise ArgumentError("a group's first call on a GPU allocates memory: make one before the capture")
            self._group.do(self._open, device)
            self._group._get_backend(device)  # for what C++ calls without asking Python
        return not self._refused

    def _open(self, comm: Communicator, device: torch.device) -> None:
        from symmcomm.collectives.gpu_open import find_facts, open_gpu  # what needs CUDA is imported when it is used

        try:
            comm.gpu = open_gpu(comm, find_facts(comm, device))
            comm.gpu.exchange = self._exchange
        except DeviceError as error:  # on all ranks
            self._refused = True
            if comm.rank == 0:
                warnings.warn(f"symm leaves calls on GPU tensors to NCCL: {error}", stacklevel=2)

    def _exchange(self, payload: bytes) -> list[bytes]:
        """All-gather of bytes, in its turn among the calls of the host, which another thread may be in."""
        answers: list[bytes] = []
        self._group.do(lambda comm: answers.extend(comm.all_gather_bytes(payload)))
        return answers

    def start(self, outputs: Sequence[Any], call: Callable[..., object], *args: object) -> GpuWork:
        """Launches ``call(comm, *args)`` beside the current stream, behind what is in it."""
        gpu = self._comm.gpu_side
        streams, stream = gpu.streams, self._stream
        if stream is None:
            stream = torch.cuda.Stream(gpu.device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self._stream = stream
        streams.order(stream, streams.current())
        streams.run_on(stream, call, self._comm, *args)
        _keep(args, stream)
        return GpuWork(gpu, stream, outputs)

    def settle(self) -> bool:
        """For a barrier: lets the host wait for the current stream. In a capture, where it cannot, puts a barrier of
        the GPUs there instead, and returns True."""
        gpu = self._comm.gpu
        if gpu is None:
            return False
        with torch.cuda.device(gpu.device):
            if torch.cuda.is_current_stream_capturing():
                gpu.barrier()
                return True
            torch.cuda.current_stream().synchronize()
        gpu.check()
        return False


def _keep(args: Sequence[object], stream: torch.cuda.Stream) -> None:
    """Keeps the memory of the tensors among a call's arguments, in lists or not, from other use before the stream is
    done with it."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg.record_stream(stream)
        elif isinstance(arg, list | tuple):
            _keep(arg, stream)
