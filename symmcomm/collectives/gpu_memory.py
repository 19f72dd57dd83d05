"""The GPU side of a communicator below its collectives: a symmetric heap on the GPU, launches, and what they came to.

**Streams.** Calls go to torch's current stream of the device. All calls of a communicator share channels, so they run
one after the other: a call on another stream than the last one waits for it by an event. In a capture there is nothing
to wait for outside of it: whoever replays a graph orders it with other calls of the communicator.

**Failure.** A kernel whose wait passes its deadline leaves a record in pinned host memory; later kernels return at
once. Each launch first looks at that record: one load. ``check`` raises what it stands for, and the communicator is
finished, on the host too, so that the peers' waits there end. The CUDA context is not affected. ``gpu_alarm`` sees to
it that nobody waits until the deadline for a rank whose process is gone.

**What counts as symmetric.** A kernel that works in place needs the tensor at the same offset on all ranks, which one
rank cannot see. So only ranges that all ranks know of count: what ``empty`` returned, whole, and what has been through
``rendezvous``. Everything else passes as an ordinary tensor does, wherever it lies.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from symmcomm.checks import check_timeout
from symmcomm.collectives.arguments import check_tensor
from symmcomm.collectives.gpu_alarm import Alarm
from symmcomm.collectives.gpu_streams import GpuStreams
from symmcomm.discovery import gpu_topology
from symmcomm.errors import (
    ArgumentError,
    ClosedError,
    CudaError,
    ExchangeError,
    MismatchError,
    PeerTimeoutError,
    SymmCommError,
    retold,
)
from symmcomm.memory.cuda_driver import CudaDevice, capturing
from symmcomm.memory.cuda_ipc import IpcProvider
from symmcomm.memory.cuda_vmm import VmmProvider
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.multicast import HeapMulticast
from symmcomm.memory.provider import Provider
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_gpu
from symmcomm.schedule.cost import choose_from
from symmcomm.schedule.layout_gpu import Layout, MessageLayout, Phase, Record
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.select import NEVER
from symmcomm.schedule.select_gpu import Thresholds
from symmcomm.schedule.topology_gpu import Choice, GpuFacts, decide_multicast, decide_vectors
from symmcomm.schedule.tuning_gpu import World, lookup

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator
    from symmcomm.kernels.gpu.compile import Kernel

_STOPPED = 2  # first word of a record that the host wrote: nothing can be launched any more


class NotSharedError(ExchangeError):
    """The ranks could not share GPU memory in the chosen way, found when it was tried; on every rank."""


def _provider(device: CudaDevice, choice: Choice) -> Provider:
    if choice.provider == "cuda_ipc":
        return IpcProvider(device)
    return VmmProvider(
        device, fabric=choice.provider == "fabric", granularity_bytes=choice.granularity_bytes
    )


class GpuMemory:
    """See ``GpuCollectives``, which has the calls.

    Attributes:
        rank, world_size: of the communicator. device: the GPU.
        heap: the symmetric heap; peer p's is at ``base + p · stride`` (``base``, ``stride``).
        multicast_base: of all ranks' heaps at once by NVLink multicast; 0: there is none. multicast: why.
        layout, messages: of its start.
        num_sms: SMs that a kernel of any rank may use: the smallest share, as grids must agree.
        arch, arch_number: for which kernels are compiled, as "sm_90a" and 90.
        early: whether small kernels may start early (``kernels.gpu.context``): each rank has a GPU of its own that can.
        facts: about all ranks' GPUs. choice: how they share memory, and why.
        whole_vectors: whether 16 bytes reach a peer in one piece; else kernels that need that are not chosen.
        timeout_s: deadline of a wait, in seconds.
        thresholds: sizes by which kernels are chosen.
        streams: of the GPU.
        topology, ring_from: as of the communicator, for its GPUs.
        exchange: all-gather of bytes by the hosts, for ``gpu_compare``.
    """

    multicast_base = 0

    def __init__(self, comm: Communicator, facts: list[GpuFacts], choice: Choice) -> None:
        from symmcomm.kernels.gpu.compile import architecture, compiled

        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.exchange: Callable[[bytes], list[bytes]] = comm.all_gather_bytes
        self.facts, self.choice, fact = facts, choice, facts[comm.rank]
        self.timeout_s = comm.watch.timeout_s
        self.ordinal, self.device = fact.ordinal, torch.device("cuda", fact.ordinal)
        self.arch = architecture(fact.compute_capability)
        self.arch_number = 10 * fact.compute_capability[0] + fact.compute_capability[1]
        places = [(each.host, each.uuid) for each in facts]
        self.num_sms = max(1, min(each.num_sms // places.count((each.host, each.uuid)) for each in facts))
        self.early = self.arch_number >= 90 and len(set(places)) == len(places)
        self.layout, self.messages = Layout.create(self.world_size), MessageLayout.create(self.world_size)
        self.signal_pad = self.layout.swap_pad
        self._compiled = compiled
        self.cuda_device = CudaDevice(fact.ordinal)
        exchange = DescriptorExchange(self.rank, self.world_size, comm.all_gather_bytes, self.timeout_s)
        try:
            self.heap = SymmetricHeap(
                self.rank, self.world_size, self.messages.end, comm.settings.heap_max_bytes, exchange,
                provider=_provider(self.cuda_device, choice), agree=comm.all_gather_bytes,
            )  # fmt: skip
        except (ExchangeError, CudaError, OSError) as error:
            raise NotSharedError(str(error)) from error
        self.base, self.stride = self.heap.base, self.heap.stride
        self.multicast = HeapMulticast(
            decide_multicast(facts, choice), comm.all_gather_bytes, self.cuda_device, self.heap, comm.settings
        )
        self._symmetric: set[tuple[int, int]] = set()
        self.streams = GpuStreams(self.ordinal)
        self._stream = -1  # of the last call
        self._last: torch.cuda.Stream | None = None
        self._calls: dict[tuple[object, ...], Callable[..., None]] = {}  # prepared, by what all ranks know alike
        self.whole_vectors = decide_vectors(facts).works
        self.set_thresholds(self._read_thresholds())
        self.topology = comm.topology if comm.topology_is_given else gpu_topology(facts)
        self.ring_from = choose_from(self.topology)
        self.ring_tables: dict[tuple[object, ...], tuple[Plan, torch.Tensor]] = {}  # on the device, as long as the heap
        self._failure: SymmCommError | None = None
        self._fill_state()
        self.extend_multicast()
        comm.in_child.append(self.stop)

    @property
    def tuned_for(self) -> World:
        """What measured thresholds must have been measured on."""
        return World(gpu=self.facts[self.rank].name, world_size=self.world_size, num_sms=self.num_sms)

    def _read_thresholds(self) -> Thresholds:
        """Collective. From the table of SYMMCOMM_TUNING; the same on all ranks, or MismatchError."""
        path, error, found = Path(self.comm.settings.tuning).expanduser(), "", select_gpu.DEFAULT
        try:
            found = lookup(path.read_text() if path.is_file() else "", self.tuned_for)
        except (ArgumentError, OSError) as reason:
            error = f"SYMMCOMM_TUNING={path}: {reason}"
        own = json.dumps([error, asdict(found)])
        for peer, answer in enumerate(self.comm.all_gather_bytes(own.encode())):
            if json.loads(answer)[0]:
                raise ArgumentError(json.loads(answer)[0])
            if answer.decode() != own:
                theirs = json.loads(answer)[1]
                raise MismatchError(f"SYMMCOMM_TUNING: {found} on rank {self.rank}, {theirs} on rank {peer}")
        return found

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Collective. Chooses kernels by other sizes from now on; on all ranks alike."""
        self.thresholds = thresholds if self.whole_vectors else select_gpu.without_ll(thresholds)
        self._calls.clear()
        self.extend_multicast()

    def extend_multicast(self) -> None:
        """Collective, after the heap has grown or thresholds have changed. Multicast reaches all of the heap if they
        ask for it and it can; else kernels do without from now on."""
        before, self.multicast_base = self.multicast_base, self.multicast.extend(self.thresholds.multimem_bytes < NEVER)
        if self.multicast_base != before:
            self._calls.clear()

    def _fill_state(self) -> None:
        """Writes the private fields (``schedule.layout_gpu``) before any rank launches."""
        with torch.cuda.device(self.device):
            self._record = torch.zeros(Record.NUM_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
            self._state: torch.Tensor | None = self.heap.tensor(self.rank, 0, at.EPOCHS).view(torch.int64)
            self._state[at.RECORD // 8] = self._record.data_ptr()
            self._state[at.TIMEOUT_NS // 8] = int(self.timeout_s * 1e9)
            torch.cuda.synchronize(self.device)
        self._word = ctypes.c_uint32.from_address(self._record.data_ptr())
        watch = self.comm.watch
        deadline, keeps = self.heap.own_address + at.TIMEOUT_NS, (self.comm.heap, self.heap)
        self._alarm = Alarm(self.rank, watch.pids, watch.pages, self.cuda_device, deadline, keeps)
        self.comm.all_gather_bytes(b"the heap is ready")

    # Places in the heap.

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Heap offset of the tensor's data, or -1 if they lie elsewhere."""
        return self.heap.offset_of(tensor.data_ptr(), tensor.nbytes)

    def symmetric_offset(self, tensor: torch.Tensor) -> int:
        """Heap offset of a tensor that all ranks know to be symmetric, else -1."""
        address = tensor.data_ptr()
        return address - self.heap.own_address if self.is_symmetric(address, tensor.nbytes) else -1

    def is_symmetric(self, address: int, num_bytes: int) -> bool:
        """Whether a tensor of so many bytes there is one that all ranks know to be symmetric."""
        return (address - self.heap.own_address, num_bytes) in self._symmetric

    def add_symmetric(self, offset: int, num_bytes: int) -> None:
        """Notes, on all ranks alike, that these bytes are a symmetric tensor."""
        self._symmetric.add((offset, num_bytes))

    def drop_symmetric(self, offset: int, num_bytes: int) -> None:
        """Forgets what lay in these bytes."""
        self._symmetric = {
            (start, size) for start, size in self._symmetric if not offset <= start < offset + max(num_bytes, 1)
        }

    def check_tensor(self, tensor: object, name: str) -> None:
        """Raises ArgumentError unless it is dense, contiguous, and on the device."""
        check_tensor(tensor, name, self.device)

    def address_of(self, tensor: torch.Tensor, name: str) -> int:
        """Where the tensor's data lie. Raises what ``check_tensor`` raises, which is asked only if all is not well:
        it takes longer."""
        try:
            address = tensor.data_ptr()
            fit = (
                address
                and tensor.get_device() == self.ordinal
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not tensor.is_conj()
            )
        except (AttributeError, RuntimeError):
            fit = False
        if not fit:
            self.check_tensor(tensor, name)
            address = tensor.data_ptr()
        return address

    # Launches.

    def launch(self, kernel: Kernel, *arguments: object) -> None:
        """Launches a kernel with the place of this rank, the arguments, and the current stream.

        Raises what ``check`` raises; nothing is launched then.
        """
        self.run(self._compiled(kernel, self.arch), *arguments)

    def compiled(self, kernel: Kernel) -> Callable[..., None]:
        """What ``run`` runs."""
        return self._compiled(kernel, self.arch)

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """``launch`` for a kernel that is compiled already."""
        if self._word.value:
            self.check()
        stream: int = torch._C._cuda_getCurrentRawStream(self.ordinal)
        if stream != self._stream:
            self._change_stream(stream)
        if torch._C._cuda_getDevice() == self.ordinal:
            function(self.base, self.stride, self.rank, *arguments, stream)
        else:
            with torch.cuda.device(self.device):
                function(self.base, self.stride, self.rank, *arguments, stream)

    def _change_stream(self, stream: int) -> None:
        """Lets the current stream wait for that of the last call, wherever that was, unless one of them, and not the
        other, is being captured."""
        streams, last = self.streams, self._last
        current = streams.current()
        if last is not None and streams.run_on(current, capturing) == streams.run_on(last, capturing):
            streams.order(current, last)
        self._last, self._stream = current, stream

    @contextmanager
    def deadline(self, timeout_s: float | None) -> Iterator[None]:
        """Another deadline for the kernels launched in a block; None keeps the one in force."""
        if timeout_s is None:
            yield
            return
        check_timeout(timeout_s)
        self._store_deadline(timeout_s)
        try:
            yield
        finally:
            if not self._word.value:  # else nothing is launched any more
                self._store_deadline(self.timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Another deadline for the kernels launched from now on."""
        check_timeout(timeout_s)
        self._store_deadline(timeout_s)
        self.timeout_s = timeout_s

    def _store_deadline(self, timeout_s: float) -> None:
        from symmcomm.kernels.gpu.store_words import StoreWords

        self.launch(StoreWords(num=1), at.TIMEOUT_NS, (int(timeout_s * 1e9),))

    # What became of them.

    def check_open(self) -> None:
        """Raises unless calls can be made."""
        self.check()

    def check(self) -> None:
        """Raises what the kernels that are done so far came to, if not all is well.

        Raises:
            PeerTimeoutError, PeerDiedError, PeerAbortedError: a wait gave up; the communicator is finished.
            MismatchError: split sizes disagreed; the data of that call are undefined, later calls go on unless a wait
                gave up since, which finishes the communicator. The sizes of a message disagreed: it is finished too.
            ClosedError: the communicator was closed.
        """
        if not self._word.value:
            return
        if self._failure is None:
            record = Record(*(int(word) & 0xFFFFFFFF for word in self._record[:7]))
            if record.phase == Phase.splits and (capturing() or self._forgive()):  # in a capture nobody may wait for it
                raise MismatchError(_describe(record))
            self._failure = self._error_of(record)
            self.comm.abandon(self._failure)
        raise retold(self._failure)

    def _forgive(self) -> bool:
        """Clears a complaint. False: a wait gave up since, so it stands; the record is still the complaint's."""
        torch.cuda.synchronize(self.device)
        assert self._state is not None, "the heap is open"
        failed = self._state[:1].view(torch.int32)[0]
        if int(failed) != at.COMPLAINED:
            return False
        failed.zero_()
        torch.cuda.synchronize(self.device)
        self._record.zero_()
        return True

    def _error_of(self, record: Record) -> SymmCommError:
        """What finishes the communicator: the disagreement, if one was recorded; else why a wait gave up, if the host
        knows more than that it took too long."""
        if record.phase == Phase.splits:
            return MismatchError(f"{_describe(record)}; a wait gave up since, so the communicator is finished")
        if record.phase == Phase.size:
            return MismatchError(_describe(record))
        peer = record.peer if record.peer < self.world_size else self.rank
        return self.comm.watch.cause(peer) or PeerTimeoutError(_describe(record), peer)

    def synchronize(self) -> None:
        """Waits until the device has finished its work; raises what ``check`` raises."""
        torch.cuda.synchronize(self.device)
        self.check()

    # Life.

    def interrupt(self) -> None:
        """Ends the waits of kernels that run, as if their deadline had passed. The communicator is finished then."""
        self._alarm.ring()

    def close(self, wait: bool) -> None:
        """Gives the memory back, once the device is done. Once, and collective if ``wait`` and nothing failed; see
        ``Communicator.close``."""
        agree = self.comm.all_gather_bytes if wait and self._failure is None and self.comm.is_open else None
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self._alarm.close()
            self.stop(ClosedError("the communicator is closed"))
            self._state = None
            if agree is not None:  # no rank is before the barrier of ``Communicator.close``; else it stays
                self.multicast.close()
            self.heap.close(agree)

    def stop(self, error: BaseException) -> None:
        """Refuses calls with this error from now on."""
        self._failure = retold(error)
        self._word = ctypes.c_uint32(_STOPPED)


def _describe(record: Record) -> str:
    """A record in words."""
    rank, peer, expected, seen = record.rank, record.peer, record.expected, record.seen
    if record.phase == Phase.splits:
        return (
            f"ranks disagree in all_to_all_single: split sizes: rank {rank} counts {expected} bytes between it and "
            f"rank {peer}, which counts {seen}"
        )
    if record.phase == Phase.size:
        return f"ranks disagree in recv: count is {expected} bytes on rank {rank}, {seen} on rank {peer}, the sender"
    return (
        f"rank {peer if peer < 1 << 31 else 'unknown'} did not arrive within the deadline (SYMMCOMM_TIMEOUT_S): rank "
        f"{rank} waited for it on the GPU (phase {Phase(record.phase).name}, channel {record.channel}), expected "
        f"signal {expected}, saw {seen}"
    )
