"""Large all-gather and its kin by the copy engines, which use a link better than any kernel and leave the SMs free.

Barrier kernel; copies of this rank's parts into the targets of the peers, one after the other round the ring, and
beside them the one that stays; barrier kernel. A copy is done before the kernel after it in the stream starts, so the
second barrier says that all parts are there. The target is symmetric, at the same offset on all ranks; the source is
not in it, but for the part that stays. Streams may be captured: copies become nodes of the graph.

A copy does not ask what the barrier before it came to, as a kernel would: for that the host would have to wait, or a
graph to branch, in every call. So if that barrier gave up, the copies are made all the same. This rank has the record,
and the communicator is finished on it. A peer that comes late finds in its target what others put there, maybe before
it had entered the call and was done with what it held: on every rank the target of the call is undefined, as after any
collective that failed. Nothing outside the targets is written, and the barrier at the end returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import compiled
from symmcomm.memory.cuda_driver import call, load_driver


class AllGatherCopyEngine:
    """To be called as the compiled kernel ``all_gather.AllGatherPush``, but without ``multicast_base`` and grid.

    It belongs to one device, the current one when it is made, and to one stream at a time. ``arch``: such as
    ``"sm_90a"``; ``number``: the same as 90. Raises CudaError.
    """

    def __init__(self, world_size: int, arch: str, number: int) -> None:
        self._world_size = world_size
        self._barrier: Callable[..., None] = compiled(Barrier(world_size=world_size, arch=number), arch)
        self._driver = driver = load_driver()
        self._beside = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        no_timing = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._fork, self._join = self._call("cuEventCreate", no_timing), self._call("cuEventCreate", no_timing)

    def __call__(
        self, base: int, stride: int, rank: int, source: int, source_pitch: int, target: int, target_pitch: int,
        num_bytes: int, sender: int, stream: int,
    ) -> None:  # fmt: skip
        """``source``: an address; ``target``: an offset from the start of each rank's heap; ``num_bytes`` of a part."""
        self._barrier(base, stride, rank, 0, 0, stream)
        if sender in (-1, rank):
            place = base + target + rank * target_pitch
            mine, kept = place + rank * stride, source + rank * source_pitch
            if kept != mine:
                self._call("cuEventRecord", self._fork, stream)
                self._call("cuStreamWaitEvent", self._beside, self._fork, 0)
                self._call("cuMemcpyDtoDAsync", mine, kept, num_bytes, self._beside)
                self._call("cuEventRecord", self._join, self._beside)
            for hop in range(1, self._world_size):
                peer = (rank + hop) % self._world_size
                origin = source + peer * source_pitch
                self._call("cuMemcpyDtoDAsync", place + peer * stride, origin, num_bytes, stream)
            if kept != mine:
                self._call("cuStreamWaitEvent", stream, self._join, 0)
        self._barrier(base, stride, rank, 0, 0, stream)

    def close(self) -> None:
        """Gives stream and events back; nothing of them may be running."""
        self._call("cuStreamDestroy", self._beside)
        for event in (self._fork, self._join):
            self._call("cuEventDestroy", event)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._driver, name, *arguments)
