"""The communicator: a group of ranks with a symmetric heap, and the collectives as its methods."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from symmcomm.agreement import agree
from symmcomm.bootstrap import Bootstrap, connect
from symmcomm.bootstrap.host import check_same_host
from symmcomm.checks import check_timeout
from symmcomm.collectives.all_gather import all_gather_bytes, all_gather_into_tensor, broadcast, gather
from symmcomm.collectives.all_reduce import all_reduce, reduce
from symmcomm.collectives.all_to_all import all_to_all_single, scatter
from symmcomm.collectives.arguments import check_whole, parse_device
from symmcomm.collectives.barrier import barrier
from symmcomm.collectives.lists import all_gather, all_to_all
from symmcomm.collectives.mismatch import explain
from symmcomm.collectives.point_to_point import recv, send
from symmcomm.collectives.reduce_scatter import reduce_scatter_tensor
from symmcomm.collectives.signals import swap_barrier, swap_signal
from symmcomm.collectives.symmetric import empty, free, is_symmetric, locate, pool, register, rendezvous
from symmcomm.env import Settings
from symmcomm.errors import ArgumentError, ClosedError, ConcurrentCallError, SymmCommError, retold
from symmcomm.kernels import cpu
from symmcomm.kernels.compile import PATIENCE_S, compile_once
from symmcomm.kernels.cpu import context as c
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.private import agree_on_reading
from symmcomm.memory.signals import ControlLayout
from symmcomm.memory.status import Fate, Report, StatusPage
from symmcomm.schedule.cost import choose_from
from symmcomm.schedule.select import choose
from symmcomm.schedule.topology import Topology
from symmcomm.schedule.topology_gpu import GpuFacts
from symmcomm.watch import Watch

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives

_FORKED = "this communicator belongs to the parent process: a forked child must call init() anew"
_CONCURRENT = "a call is under way, in another thread (split() gives each its own) or below this signal handler"


class Communicator:
    """A group of ranks. Made by ``symmcomm.init`` or ``split``, both collective; calls must come in one order on all
    ranks.

    Attributes:
        rank, world_size: of this process.
        gpu: the GPU side, if the communicator was made for a device; calls on GPU tensors go there.
        settings: the SYMMCOMM_* variables in force.
        num_cores: cores that the ranks share; with fewer than ranks, waiting ranks yield early.
        single_copy: whether ranks may read each other's ordinary tensors (``memory.private``).
        topology: what joins the ranks; topology_is_given: by the user, for their GPUs as well.
        ring_from: the rings it suggests, and the least bytes of input that they take.
        bootstrap_name: how the ranks found each other.
        in_child: what a forked child calls with the error that whatever is the parent's must then raise.
    """

    device, multicast_base = torch.device("cpu"), 0

    barrier = barrier
    all_reduce = all_reduce
    reduce = reduce
    reduce_scatter_tensor = reduce_scatter_tensor
    all_gather_into_tensor = all_gather_into_tensor
    all_gather_bytes = all_gather_bytes
    all_gather = all_gather
    broadcast = broadcast
    gather = gather
    all_to_all_single = all_to_all_single
    all_to_all = all_to_all
    scatter = scatter
    send = send
    recv = recv
    empty = empty
    free = free
    is_symmetric = is_symmetric
    rendezvous = rendezvous
    register = register
    pool = pool
    locate = locate
    swap_barrier = swap_barrier
    swap_signal = swap_signal

    def __init__(
        self,
        rank: int,
        world_size: int,
        all_gather: Callable[[bytes], list[bytes]],
        settings: Settings,
        num_cores: int,
        single_copy: bool,
        bootstrap_name: str,
        topology: Topology,
        topology_is_given: bool = False,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.settings, self.num_cores, self.bootstrap_name = settings, num_cores, bootstrap_name
        self.single_copy, self.topology, self.topology_is_given = single_copy, topology, topology_is_given
        self.ring_from = choose_from(topology)
        self.kernels = cpu.load()
        self.all_reduce_entry = self.kernels.all_reduce
        self.all_reductions: dict[tuple[object, ...], int] = {}
        self.reductions: dict[tuple[object, ...], int] = {}
        self.calls: dict[tuple[object, ...], int] = {}
        self.blocks: list[NDArray[np.int64]] = []
        self.layout = ControlLayout.create(world_size, settings.staging_bytes)
        self.tuning = choose(world_size, num_cores, self.layout.slot_bytes, single_copy, settings.spin)
        exchange = DescriptorExchange(rank, world_size, all_gather, settings.timeout_s)
        self.heap = SymmetricHeap(rank, world_size, self.layout.end, settings.heap_max_bytes, exchange)
        self.heap_address, self.heap_bytes = self.heap.own_address, self.heap.stride
        self.signal_pad = self.layout.signal_pad
        self.gpu: GpuCollectives | None = None
        self.in_child: list[Callable[[ClosedError], None]] = []
        self._failure: SymmCommError | None = None
        self._tables = threading.Lock()
        self._pages = [
            StatusPage(self.heap.base + peer * self.heap.stride + self.layout.status) for peer in range(world_size)
        ]
        self._fill_context()
        self.watch = Watch(rank, exchange.pids, self._pages, self._context, settings.timeout_s)
        self._context[c.POLL] = self.watch.address
        _open.add(self)

    def _fill_context(self) -> None:
        """Lays out the fields and scratch tables that kernels read (``kernels.cpu.context``)."""
        layout, world_size = self.layout, self.world_size
        tables = (
            c.PIDS, c.ADDRESSES, c.SOURCES, c.TARGETS, c.CHUNKS_SENT, c.CHUNKS_TAKEN, c.EXPECTED, c.INCOMING,
            c.OUTGOING,
        )  # fmt: skip
        sizes = [2 * world_size if table in (c.INCOMING, c.OUTGOING) else world_size for table in tables]
        context = np.zeros(c.NUM_FIELDS + c.TILE_ELEMENTS + sum(sizes), dtype=np.int64)
        self._context, self.ctx = context, context.ctypes.data
        views, start = {}, c.NUM_FIELDS + c.TILE_ELEMENTS
        for table, size in zip(tables, sizes, strict=True):
            views[table] = context[start : start + size]
            context[table] = views[table].ctypes.data
            start += size
        self.tile_address = context[c.NUM_FIELDS :].ctypes.data
        views[c.PIDS][:] = self.heap.exchange.pids
        self.targets, self.expected, self.outgoing = views[c.TARGETS], views[c.EXPECTED], views[c.OUTGOING]
        fields = {
            c.BASE: self.heap.base, c.STRIDE: self.heap.stride, c.RANK: self.rank, c.WORLD_SIZE: world_size,
            c.LINES: layout.lines, c.RING: layout.ring, c.SENT: layout.sent, c.TAKEN: layout.taken,
            c.SPLITS: layout.splits, c.SIGNAL_PAD: layout.signal_pad, c.MESSAGES: layout.messages,
            c.MESSAGE_BYTES: layout.message_bytes, c.STAGING: layout.staging, c.SLOT_BYTES: layout.slot_bytes,
            c.CHUNK_BYTES: self.tuning.chunk_bytes, c.ONE_SHOT_BYTES: self.tuning.one_shot_bytes,
            c.IN_PLACE_BYTES: self.tuning.in_place_bytes, c.SINGLE_COPY_BYTES: self.tuning.single_copy_bytes,
            c.PIPELINED_BYTES: self.tuning.pipelined_bytes,
            c.SPINS: self.tuning.spins, c.YIELDS: self.tuning.yields,
            c.STREAM_BYTES: self.tuning.stream_bytes, c.LANES: layout.lanes, c.LANE_BYTES: layout.lane_bytes,
            c.STEPS: layout.steps, c.TILE: self.tile_address, c.HEAP_BYTES: self.heap_bytes,
        }  # fmt: skip
        context[list(fields)] = list(fields.values())

    # Life.

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective. Communicators of the ranks that give the same ``color``, ordered by (``key``, rank), as
        MPI_Comm_split; None for ranks whose color is None. Each has memory and channels of its own."""
        if color is not None:
            check_whole(color, "color")
        check_whole(key, "key")
        answers = [json.loads(answer) for answer in self.all_gather_bytes(json.dumps([color, key]).encode())]
        members = [peer for peer, answer in enumerate(answers) if answer[0] == color]
        members.sort(key=lambda peer: (answers[peer][1], peer))
        if color is None:
            self.all_gather_bytes(b"")  # the members' one use of all_gather below
            return None

        def all_gather(payload: bytes) -> list[bytes]:
            everybody = self.all_gather_bytes(payload)
            return [everybody[peer] for peer in members]

        name = f"split of {self.world_size} ranks"
        child = Communicator(
            members.index(self.rank), len(members), all_gather, self.settings, self.num_cores, self.single_copy, name,
            self.topology.restricted_to(members), self.topology_is_given,
        )  # fmt: skip
        if self.gpu is not None:
            child.take_gpu(self.gpu.device, [self.gpu.facts[peer] for peer in members])
        return child

    # The GPU side.

    def take_gpu(self, device: torch.device, facts: Sequence[GpuFacts] = ()) -> None:
        """Collective. Adds a GPU side. ``facts``: about all ranks' GPUs, where they are known."""
        from symmcomm.collectives.gpu_open import find_facts, open_gpu  # what needs CUDA is imported when it is used

        try:
            self.gpu = open_gpu(self, facts or find_facts(self, device))
        except BaseException:
            self.close(wait=False)
            raise

    def gpu_on(self, device: torch.device, name: str = "device") -> GpuCollectives:
        """The GPU side for what is on that device. Raises ArgumentError, naming it, if there is none."""
        if self.gpu is None:
            raise ArgumentError(f'{name} is on {device}, the communicator was made without a GPU: init(device="cuda")')
        if device.type != "cuda" or device.index not in (None, self.gpu.device.index):
            raise ArgumentError(f"{name} is on {device}, this communicator's GPU is {self.gpu.device}")
        return self.gpu

    @property
    def gpu_side(self) -> GpuCollectives:
        """``gpu``, where it is known to be there."""
        assert self.gpu is not None, "the communicator has a GPU"
        return self.gpu

    def close(self, *, wait: bool = True) -> None:
        """Collective. Waits for all ranks and gives everything back; tensors on the heap stay readable. Repeating it is
        harmless, and after a failure it does not wait.

        Args:
            wait: False closes this rank's side alone; a peer that then waits for it gets PeerAbortedError.
        """
        state = int(self._context[c.STATE])
        if state in (c.CLOSED, c.FORKED):
            return
        if state == c.IN_CALL:  # on another thread, which would find its memory gone
            self.fail(c.REFUSED)
        with contextlib.ExitStack() as steps:  # taken in the end, the last one first, whatever fails
            steps.callback(self._close_host)
            if self.gpu is not None:
                steps.callback(self.gpu.close, wait)
            if state == c.OPEN and wait:
                steps.callback(self.barrier)
                if self.gpu is not None:
                    self.gpu.synchronize()

    def _close_host(self) -> None:
        self._context[c.STATE] = c.CLOSED
        self.heap_bytes = 0
        if self._failure is None:
            self._pages[self.rank].stop(Report(Fate.CLOSED, -1, 0, ""))
        self.watch.close()
        self.heap.close()
        self.in_child.clear()
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.abandon(error)
        self.close()

    def abandon(self, error: BaseException) -> None:
        """Ends the communicator, if nothing has, by an error that no kernel of the host met, and tells the peers, so
        that they need not wait: this rank left a ``with`` block by an exception, or a kernel on the GPU gave up."""
        if self._failure is None and self.is_open:
            self._failure = retold(error)
            self._context[c.STATE] = c.FAILED
            self.watch.tell(error)

    @contextlib.contextmanager
    def deadline(self, timeout_s: float | None) -> Iterator[None]:
        """Another deadline for the waits in a block; None keeps the one in force."""
        if timeout_s is None:
            yield
            return
        check_timeout(timeout_s)
        before, self.watch.timeout_s = self.watch.timeout_s, timeout_s
        try:
            yield
        finally:
            self.watch.timeout_s = before

    @contextlib.contextmanager
    def tables(self) -> Iterator[None]:
        """The right to fill the scratch tables that a kernel will read; refused while another thread has it."""
        if not self._tables.acquire(blocking=False):
            raise ConcurrentCallError(_CONCURRENT)
        try:
            self.check_open()
            yield
        finally:
            self._tables.release()

    # Failure.

    def field(self, number: int) -> int:
        """A field of the kernels' context (``kernels.cpu.context``)."""
        return int(self._context[number])

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return bool(self._context[c.STATE] == c.OPEN)

    def check_open(self) -> None:
        """Raises unless calls can be made."""
        if not self.is_open:
            self.fail(c.REFUSED)

    def fail(self, status: int) -> NoReturn:
        """Raises what a kernel's status stands for."""
        if status == c.STOPPED:
            error = self.watch.stop()
            self._failure = retold(error)
            if self.gpu is not None:
                self.gpu.stop(error)
            try:
                raise error
            finally:
                del error  # else its frames would hold it, and it them
        if status == c.MISMATCH:
            raise explain(self)
        state = int(self._context[c.STATE])
        if state in (c.FORKED, c.CLOSED):
            raise ClosedError(_FORKED if state == c.FORKED else "the communicator is closed")
        if state == c.FAILED and self._failure is not None:
            raise retold(self._failure)
        raise ConcurrentCallError(_CONCURRENT)


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork() -> None:
    for comm in list(_open):
        comm._context[c.STATE] = c.FORKED
        comm.heap_bytes = 0
        for refuse in comm.in_child:
            refuse(ClosedError(_FORKED))


os.register_at_fork(after_in_child=_after_fork)


def init(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
    bootstrap: Bootstrap | None = None,
    topology: Topology | None = None,
) -> Communicator:
    """Collective. A communicator of all ranks.

    The ranks are those of ``group``, else of torch.distributed's default group if there is one, else those that
    torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or mpirun started, else this process alone.

    Args:
        device: a CUDA device (``"cuda"``: torch's current one), for calls on its tensors too; on all ranks or none.
        settings: in place of the SYMMCOMM_* variables.
        bootstrap: how the ranks reach each other, if not in one of these ways; closed at the end.
        topology: what joins the ranks, the same on all; else SYMMCOMM_TOPOLOGY names a file, else it is discovered.

    Raises:
        BootstrapError: the ranks did not find each other. HostMismatchError: they are on different hosts.
        MismatchError: they run with different settings. TopologyError: it does not parse or is for other ranks.
        DeviceError: the kernels cannot run on a rank's device, or the devices cannot share memory.
    """
    settings = settings or Settings.from_env()
    gpu = parse_device(device)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology={topology!r} is not a Topology: load_topology reads a file")
    if gpu is not None and gpu.type != "cuda":
        raise ArgumentError(f"device={device!r} is neither a CUDA device nor the host")
    timeout_s = settings.timeout_s
    bootstrap = bootstrap or connect(group, timeout_s)
    try:
        rank, world_size = bootstrap.rank, bootstrap.world_size

        def all_gather(payload: bytes) -> list[bytes]:
            return bootstrap.all_gather(payload, timeout_s)

        check_same_host(bootstrap, timeout_s)
        num_cores, joined = agree(rank, world_size, settings, topology, gpu is not None, all_gather)
        single_copy = agree_on_reading(rank, settings.single_copy, all_gather)
        if rank == 0:
            compile_once(cpu.load)  # fills Numba's cache for the others
        bootstrap.all_gather(b"kernels are compiled", timeout_s if rank == 0 else max(timeout_s, PATIENCE_S))
        comm = Communicator(
            rank, world_size, all_gather, settings, num_cores, single_copy, bootstrap.name, joined,
            bool(topology or settings.topology),
        )  # fmt: skip
        if gpu is not None:
            comm.take_gpu(gpu)
        return comm
    finally:
        bootstrap.close()
