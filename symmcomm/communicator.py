"""The communicator: a group of ranks with a symmetric heap, and the collectives as its methods."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from symmcomm.bootstrap import Bootstrap, connect
from symmcomm.bootstrap.host import check_same_host
from symmcomm.collectives.all_gather import all_gather_bytes, all_gather_into_tensor, broadcast, gather
from symmcomm.collectives.all_reduce import all_reduce, reduce
from symmcomm.collectives.all_to_all import all_to_all_single, scatter
from symmcomm.collectives.arguments import check_dense, check_tensor, check_whole
from symmcomm.collectives.barrier import barrier
from symmcomm.collectives.lists import all_gather, all_to_all
from symmcomm.collectives.mismatch import explain
from symmcomm.collectives.point_to_point import recv, send
from symmcomm.collectives.reduce_scatter import reduce_scatter_tensor
from symmcomm.discovery import cpu_topology, numa_node
from symmcomm.env import Settings
from symmcomm.errors import ArgumentError, ClosedError, ConcurrentCallError, DTypeError, MismatchError, TopologyError
from symmcomm.kernels import cpu
from symmcomm.kernels.compile import compile_once
from symmcomm.kernels.cpu import context as c
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.handle import SymmetricHandle
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.private import agree_on_reading
from symmcomm.memory.signals import ControlLayout
from symmcomm.memory.status import Fate, Report, StatusPage
from symmcomm.schedule.cost import RingMode, choose_from
from symmcomm.schedule.select import NEVER, choose
from symmcomm.schedule.topology import Topology, load_topology
from symmcomm.watch import Watch

_CONCURRENT = "another thread is in a call on this communicator: give each thread its own by split()"
_VERSION = 2  # of the layout and the protocols in shared memory; ranks must agree


class Communicator:
    """A group of ranks. Made by ``symmcomm.init`` or ``split``, both collective; calls must come in one order on all
    ranks.

    Attributes:
        rank, world_size: of this process.
        settings: the SYMMCOMM_* variables in force.
        num_cores: cores that the ranks share; with fewer than ranks, waiting ranks yield early.
        single_copy: whether ranks may read each other's ordinary tensors (``memory.private``).
        topology: what joins the ranks. ring_from: the rings it suggests, and the least bytes of input that they take.
        bootstrap_name: how the ranks found each other.
    """

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
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.settings, self.num_cores, self.bootstrap_name = settings, num_cores, bootstrap_name
        self.single_copy, self.topology = single_copy, topology
        mode, least_bytes = choose_from(topology)
        self.ring_from = (mode, NEVER if mode is RingMode.All2All else least_bytes)
        self.kernels = cpu.load()
        self.all_reduce_entry = self.kernels.all_reduce
        self.all_reductions: dict[tuple[object, ...], int] = {}
        self.reductions: dict[tuple[object, ...], int] = {}
        self.calls: dict[tuple[object, ...], tuple[int, int]] = {}
        self.blocks: list[NDArray[np.int64]] = []
        self.layout = ControlLayout.create(world_size, settings.staging_bytes)
        self.tuning = choose(world_size, num_cores, self.layout.slot_bytes, single_copy, settings.spin)
        exchange = DescriptorExchange(rank, world_size, all_gather, settings.timeout_s)
        self.heap = SymmetricHeap(rank, world_size, self.layout.end, settings.heap_max_bytes, exchange)
        self.heap_address, self.heap_bytes = self.heap.own_address, self.heap.stride
        self._failure: BaseException | None = None
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
            c.PIDS,
            c.ADDRESSES,
            c.SOURCES,
            c.TARGETS,
            c.CHUNKS_SENT,
            c.CHUNKS_TAKEN,
            c.EXPECTED,
            c.INCOMING,
            c.OUTGOING,
        )
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
            c.STEPS: layout.steps, c.TILE: self.tile_address, c.HEAP_BYTES: self.heap_bytes,
        }  # fmt: skip
        context[list(fields)] = list(fields.values())

    # Symmetric memory.

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. A symmetric tensor: at the same offset of every rank's heap, uninitialised.

        Peers reach it in place, so collectives on it copy nothing. It lives until ``free`` or, as memory of this
        process, as long as the tensor; dropping the tensor alone does not return it to the heap.

        Raises:
            MismatchError: ranks ask for different sizes or dtypes. OutOfSymmetricMemoryError: no room.
        """
        entries = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        shape = tuple(n for n in entries if isinstance(n, int) and n >= 0)
        if len(shape) != len(entries):
            raise ArgumentError(f"size={tuple(entries)} has an entry that is no non-negative whole number")
        if not isinstance(dtype, torch.dtype):
            raise DTypeError(f"dtype={dtype!r} is no torch.dtype")
        self.check_open()
        count = math.prod(shape)
        num_bytes = max(count * dtype.itemsize, 1)
        offset = self.heap.allocate(
            num_bytes, f"empty({', '.join(map(str, shape))}, dtype={dtype})", self.all_gather_bytes
        )
        raw = torch.frombuffer(self.heap.buffer(self.rank, offset, num_bytes), dtype=torch.uint8)
        return raw[: count * dtype.itemsize].view(dtype).view(shape)

    def free(self, tensor: torch.Tensor) -> None:
        """Collective. Returns a symmetric tensor's memory to the heap; the tensor must not be used any more."""
        self.check_open()
        check_dense(tensor, "tensor")
        offset = self.heap.offset_of(tensor.untyped_storage().data_ptr(), 0)
        if offset < 0:
            raise ArgumentError("tensor is not symmetric: it does not come from empty() of this communicator")
        self.heap.free(offset, f"free(offset {offset})", self.all_gather_bytes)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's data lie in this communicator's heap."""
        return self.locate(tensor)[1] >= 0

    def rendezvous(self, tensor: torch.Tensor) -> SymmetricHandle:
        """Collective. The handle through which this rank reaches all ranks' copies of a symmetric tensor."""
        self.check_open()
        check_tensor(tensor, "tensor")
        _, offset = self.locate(tensor)
        if offset < 0:
            raise ArgumentError("tensor is not symmetric: it does not come from empty() of this communicator")
        offers = [int(answer) for answer in self.all_gather_bytes(str(offset).encode())]
        for peer, other in enumerate(offers):
            if other != offset:
                raise MismatchError(
                    f"rendezvous: the tensor is at heap offset {offset} on rank {self.rank}, at {other} on rank {peer}"
                )
        return SymmetricHandle(self, offset, tensor.nbytes)

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(address, heap offset or -1) of a tensor's data."""
        address = tensor.data_ptr()
        offset = address - self.heap_address
        return address, offset if 0 <= offset < self.heap_bytes else -1

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
        return Communicator(
            members.index(self.rank), len(members), all_gather, self.settings, self.num_cores, self.single_copy, name,
            self.topology.restricted_to(members),
        )  # fmt: skip

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
        try:
            if state == c.OPEN and wait:
                self.barrier()
        finally:
            self._context[c.STATE] = c.CLOSED
            self.heap_bytes = 0
            if self._failure is None:
                self._pages[self.rank].stop(Report(Fate.CLOSED, -1, 0, ""))
            self.watch.close()
            self.heap.close()
            _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._failure is None and self._context[c.STATE] == c.OPEN:
            self._abandon(error)
        self.close()

    def _abandon(self, error: BaseException) -> None:
        """Tells the peers that this rank left a ``with`` block by an exception, so that they need not wait for it."""
        self._failure = error
        self._context[c.STATE] = c.FAILED
        self._pages[self.rank].stop(Report(Fate.RAISED, self.rank, 0, f"{type(error).__name__}: {error}"))

    @contextlib.contextmanager
    def deadline(self, timeout_s: float | None) -> Iterator[None]:
        """Another deadline for the waits in a block; None keeps the one in force."""
        if timeout_s is None:
            yield
            return
        if not timeout_s > 0:
            raise ArgumentError(f"timeout_s={timeout_s} is not positive")
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

    def check_open(self) -> None:
        """Raises unless calls can be made."""
        if self._context[c.STATE] != c.OPEN:
            self.fail(c.REFUSED)

    def fail(self, status: int) -> NoReturn:
        """Raises what a kernel's status stands for."""
        if status == c.STOPPED:
            self._failure = self.watch.stop()
            raise self._failure
        if status == c.MISMATCH:
            raise explain(self)
        state = int(self._context[c.STATE])
        if state == c.FORKED:
            raise ClosedError("this communicator belongs to the parent process: a forked child must call init() anew")
        if state == c.CLOSED:
            raise ClosedError("the communicator is closed")
        if state == c.FAILED and self._failure is not None:
            raise self._failure
        raise ConcurrentCallError(_CONCURRENT)


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork() -> None:
    for comm in list(_open):
        comm._context[c.STATE] = c.FORKED
        comm.heap_bytes = 0


os.register_at_fork(after_in_child=_after_fork)


def init(
    group: dist.ProcessGroup | None = None,
    *,
    settings: Settings | None = None,
    bootstrap: Bootstrap | None = None,
    topology: Topology | None = None,
) -> Communicator:
    """Collective. A communicator of all ranks.

    The ranks are those of ``group``, else of torch.distributed's default group if there is one, else those that
    torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or mpirun started, else this process alone.

    Args:
        settings: in place of the SYMMCOMM_* variables.
        bootstrap: how the ranks reach each other, if not in one of these ways; closed at the end.
        topology: what joins the ranks, the same on all; else SYMMCOMM_TOPOLOGY names a file, else it is discovered.

    Raises:
        BootstrapError: the ranks did not find each other. HostMismatchError: they are on different hosts.
        MismatchError: they run with different settings. TopologyError: it does not parse or is for other ranks.
    """
    settings = settings or Settings.from_env()
    timeout_s = settings.timeout_s
    bootstrap = bootstrap or connect(group, timeout_s)
    try:
        rank, world_size = bootstrap.rank, bootstrap.world_size

        def all_gather(payload: bytes) -> list[bytes]:
            return bootstrap.all_gather(payload, timeout_s)

        check_same_host(bootstrap, timeout_s)
        num_cores, topology = _agree(rank, world_size, settings, topology, all_gather)
        single_copy = agree_on_reading(rank, settings.single_copy, all_gather)
        if rank == 0:
            compile_once(cpu.load)  # fills Numba's cache for the others
        all_gather(b"kernels are compiled")
        return Communicator(rank, world_size, all_gather, settings, num_cores, single_copy, bootstrap.name, topology)
    finally:
        bootstrap.close()


def _agree(
    rank: int, world_size: int, settings: Settings, topology: Topology | None,
    all_gather: Callable[[bytes], list[bytes]],
) -> tuple[int, Topology]:  # fmt: skip
    """Compares what ranks must have alike; returns how many cores the ranks share, and what joins them. Pins this rank
    if asked to."""
    cores = sorted(os.sched_getaffinity(0))
    if topology is None and settings.topology:
        topology = load_topology(settings.topology)
    if topology is not None and topology.world_size != world_size:
        raise TopologyError(f"the topology is for {topology.world_size} ranks, there are {world_size}")
    given = "" if topology is None else hashlib.sha256(json.dumps(topology.to_json()).encode()).hexdigest()[:16]
    mine = {"version": _VERSION, "SYMMCOMM_HEAP_MAX_BYTES": settings.heap_max_bytes, "torch": torch.__version__,
            "SYMMCOMM_STAGING_BYTES": settings.staging_bytes, "SYMMCOMM_SPIN": settings.spin,
            "the topology's checksum": given}  # fmt: skip
    answers = [json.loads(answer) for answer in all_gather(json.dumps([mine, cores]).encode())]
    for peer, (theirs, _) in enumerate(answers):
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise MismatchError(f"{name} is {value} on rank {rank}, {theirs.get(name)} on rank {peer}")
    shared = sorted({core for _, theirs in answers for core in theirs})
    if settings.pin and len(cores) > 1:
        os.sched_setaffinity(0, {shared[rank % len(shared)]})
    if topology is None:
        held = [[shared[peer % len(shared)]] if settings.pin else answers[peer][1] for peer in range(world_size)]
        topology = cpu_topology([numa_node(theirs) for theirs in held])
    return len(shared), topology
