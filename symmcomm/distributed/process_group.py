"""The process group of the ``symm`` backend.

A synchronous call on CPU tensors runs where it is made and returns one shared, finished Work. An asynchronous one goes
through the group's lane (``lane``), messages through lanes of their own (``point_to_point``), other devices and sparse
tensors to gloo or NCCL (``fallback``). Method names are c10d's, the old ones as well as those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import AllreduceOptions, Store
from torch.profiler import record_function

from symmcomm.bootstrap.store import StoreBootstrap
from symmcomm.communicator import Communicator, init
from symmcomm.distributed import calls
from symmcomm.distributed.calls import NAMES
from symmcomm.distributed.fallback import hand_over, is_foreign, register_fallbacks
from symmcomm.distributed.lane import Lane
from symmcomm.distributed.monitored import monitored_barrier
from symmcomm.distributed.point_to_point import Mailbox
from symmcomm.distributed.work import FINISHED, GroupedWork, PendingWork
from symmcomm.env import Settings
from symmcomm.errors import ArgumentError, ClosedError, DTypeError

_GROUP_HEAP_BYTES = 4 << 30  # address space a rank of groups other than the default one
_GROUP_STAGING_BYTES = 2 << 20
_SCRATCH_BYTES = 128 << 20  # symmetric memory of calls in the background; it takes up what has been used of it
_LEAST_APART_BYTES = 256 << 10  # for smaller calls it is no gain

Tensors = list[torch.Tensor]


def _only(tensors: Sequence[Any], name: str) -> Any:
    """c10d passes lists, with one entry a device of this process; there is one."""
    if len(tensors) != 1:
        raise ArgumentError(f"{name} must have 1 entry, got {len(tensors)}")
    return tensors[0]


class SymmProcessGroup(dist.ProcessGroup):
    """A group of ranks of one host, with a communicator of its own. Made by torch; collective.

    Args:
        store: of this group alone.
        timeout_s: deadline of every wait, in seconds.
        is_default: whether this is the group of all ranks; the others get less memory.

    Attributes:
        comm: the communicator, for symmetric memory on this group.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, is_default: bool = True) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form that Python may subclass
        self._store: Store | None = store
        self._timeout_s = timeout_s
        settings = replace(Settings.from_env(), timeout_s=timeout_s)
        if not is_default:
            settings = replace(
                settings,
                heap_max_bytes=min(settings.heap_max_bytes, _GROUP_HEAP_BYTES),
                staging_bytes=min(settings.staging_bytes, _GROUP_STAGING_BYTES),
            )
        bootstrap = StoreBootstrap(store, rank, size, "process group's store")
        self.comm: Communicator = init(settings=settings, bootstrap=bootstrap)
        self.comm.watch.timeout_name = "the timeout of the process group or the call"
        self._scratch = self.comm.empty(min(_SCRATCH_BYTES, settings.heap_max_bytes // 4), dtype=torch.uint8)
        self._lane = Lane(f"collective of rank {rank}")
        self._mailbox = Mailbox(self.comm, timeout_s)
        self._num_monitored = 0
        self._coalesced: list[dist.Work] | None = None
        self._open = True
        # Rank 0 may serve the store, at an address that is free again only when nothing holds it: gloo, which takes
        # its time to end, gets a connection of its own. Else a world that is made anew there meets the old store.
        register_fallbacks(self, store.clone() if is_default else store, timeout_s)  # type: ignore[attr-defined]

    # Running calls.

    def do(self, call: Callable[..., object], *args: object) -> None:
        """Does ``call(comm, *args)`` here, after all calls that were made before. Collective if the call is."""
        if self._lane.enter():
            try:
                call(self.comm, *args)
            finally:
                self._lane.leave()
        else:
            self._later([], call, *args).wait()

    def _later(self, outputs: Sequence[Any], call: Callable[..., object], *args: object) -> PendingWork:
        work = PendingWork(self._lane, partial(call, self.comm, *args), outputs)
        self._lane.submit(work)
        return work

    def _run(self, opts: Any, outputs: Sequence[Any], call: Callable[..., None], *args: object) -> dist.Work:
        """Does ``call(comm, *args)`` now, or queues it if ``opts`` say so."""
        if _profiler_enabled():
            return self._profiled(opts, outputs, call, *args)
        if opts is not None and not opts.asyncOp:
            self.do(call, *args)
            return FINISHED
        return self._start(outputs, call, *args)

    def _start(self, outputs: Sequence[Any], call: Callable[..., object], *args: object) -> PendingWork:
        work = self._later(outputs, call, *args)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _profiled(self, opts: Any, outputs: Sequence[Any], call: Callable[..., None], *args: object) -> dist.Work:
        """As ``_run``, with an event ``symm:<call>`` from here to the end of the call, as gloo has them."""
        with record_function(f"symm:{call.__name__.lstrip('_')}") as event:
            if opts is not None and not opts.asyncOp:
                self.do(call, *args)
                return FINISHED
            ended: torch.futures.Future[None] = torch.futures.Future()
            event._call_end_callbacks_on_future(ended)
            return self._start(outputs, _ending(call, ended), *args)

    def _foreign(self, name: str, tensor: torch.Tensor, *args: object) -> dist.Work | None:
        """The work of a fallback if the tensor is for one."""
        return hand_over(self, name, tensor, args) if is_foreign(tensor) else None

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """In place. ``tensors``: a list of one, or that one; ``opts`` may also be a ReduceOp."""
        if not isinstance(opts, AllreduceOptions) or len(tensors) != 1:
            return self._allreduce_loosely(tensors, opts)
        tensor, lane = tensors[0], self._lane
        if not opts.asyncOp and not _profiler_enabled() and lane.enter():
            try:
                self.comm.all_reduce(tensor, NAMES[hash(opts.reduceOp)])
                return FINISHED
            except (ArgumentError, DTypeError, KeyError):
                pass  # nothing was communicated: perhaps it is for one of the ways below
            finally:
                lane.leave()
        if is_foreign(tensor):
            return hand_over(self, "allreduce", tensor, [tensors, opts])
        if self._is_apart(opts, tensor):
            return self._run(opts, tensors, calls.all_reduce_apart, tensor, opts.reduceOp, self._scratch)
        return self._run(opts, tensors, calls.all_reduce, tensor, opts.reduceOp)

    def _is_apart(self, opts: Any, tensor: torch.Tensor) -> bool:
        """Whether a call is large and in the background; see ``calls.all_reduce_apart``."""
        return bool(opts.asyncOp) and _LEAST_APART_BYTES <= tensor.nbytes <= self._scratch.nbytes

    def _allreduce_loosely(self, tensors: Any, opts: Any) -> dist.Work:
        """The other forms of the call: a bare tensor, an operation in place of options, none."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else _only(tensors, "tensors")
        options = opts if isinstance(opts, AllreduceOptions) else AllreduceOptions()
        if opts is not None and options is not opts:
            options.reduceOp = opts
        return self.allreduce([tensor], options)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        work = self._foreign("allreduce_coalesced", tensors[0], tensors, opts) if tensors else FINISHED
        return work or self._run(opts, tensors, calls.all_reduce_each, tensors, opts.reduceOp)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor = _only(tensors, "tensors")
        work = self._foreign("reduce", tensor, tensors, opts)
        return work or self._run(opts, tensors, calls.reduce, tensor, opts.rootRank, opts.reduceOp)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> dist.Work:
        output, inputs = _only(outputs, "output_tensors"), _only(input_lists, "input_tensors")
        work = self._foreign("reduce_scatter", output, outputs, input_lists, opts)
        return work or self._run(opts, outputs, calls.reduce_scatter, output, inputs, opts.reduceOp)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        if is_foreign(output):
            return hand_over(self, "reduce_scatter_single", output, [output, tensor, opts])
        if self._is_apart(opts, tensor):
            return self._run(opts, [output], calls.reduce_scatter_apart, output, tensor, opts.reduceOp, self._scratch)
        return self._run(opts, [output], calls.reduce_scatter_single, output, tensor, opts.reduceOp)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        if outputs and is_foreign(outputs[0]):
            return self._grouped(self.reduce_scatter_single, outputs, inputs, opts)
        return self._run(opts, outputs, calls.reduce_scatter_each, outputs, inputs, opts.reduceOp)

    # Moving data.

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor = _only(tensors, "tensors")
        work = self._foreign("broadcast", tensor, tensors, opts)
        return work or self._run(opts, tensors, calls.broadcast, tensor, opts.rootRank)

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        outputs, tensor = _only(output_lists, "output_tensors"), _only(inputs, "input_tensors")
        work = self._foreign("allgather", tensor, output_lists, inputs, opts)
        return work or self._run(opts, outputs, calls.all_gather, outputs, tensor)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._run(opts, output_lists, calls.all_gather_lists, output_lists, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        work = self._foreign("all_gather_single", tensor, output, tensor, opts)
        return work or self._run(opts, [output], calls.all_gather_single, output, tensor)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        if inputs and is_foreign(inputs[0]):
            return self._grouped(self.all_gather_single, outputs, inputs, opts)
        return self._run(opts, outputs, calls.all_gather_each, outputs, inputs)

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        tensor, outputs = _only(inputs, "input_tensors"), output_lists[0] if output_lists else None
        work = self._foreign("gather", tensor, output_lists, inputs, opts)
        return work or self._run(opts, outputs or [], calls.gather, outputs, tensor, opts.rootRank)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> dist.Work:
        output, inputs = _only(outputs, "output_tensors"), input_lists[0] if input_lists else None
        work = self._foreign("scatter", output, outputs, input_lists, opts)
        return work or self._run(opts, outputs, calls.scatter, output, inputs, opts.rootRank)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        work = self._foreign("alltoall", inputs[0], outputs, inputs, opts) if inputs else None
        return work or self._run(opts, outputs, calls.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        args = output, tensor, list(output_split_sizes), list(input_split_sizes)
        work = self._foreign("all_to_all_single", tensor, *args, opts)
        return work or self._run(opts, [output], calls.all_to_all_single, *args)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        tensor = _only(tensors, "tensors")
        return self._foreign("send", tensor, tensors, dst, tag) or self._mailbox.send(tensor, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        tensor = _only(tensors, "tensors")
        return self._foreign("recv", tensor, tensors, src, tag) or self._mailbox.receive(tensor, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        tensor = _only(tensors, "tensors")
        work = self._foreign("recv_anysource", tensor, tensors, tag)
        return work or self._mailbox.receive_from_any(tensor, tag)

    # Barriers and groups of calls.

    def barrier(self, opts: Any = None) -> dist.Work:
        """With the deadline of ``opts`` if it has one; missing it finishes the group, as every missed deadline does."""
        timeout_s = opts.timeout.total_seconds() if opts is not None and opts.timeout > timedelta(0) else None
        return self._run(opts, [], _barrier, timeout_s)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See ``monitored``. ``timeout`` as a number is in seconds; by default it is the group's."""
        timeout_s = self._timeout_s if timeout is None else timeout
        timeout_s = timeout_s.total_seconds() if isinstance(timeout_s, timedelta) else timeout_s
        self._num_monitored += 1
        monitored_barrier(self._mailbox, self._num_monitored, timeout_s, wait_all_ranks)

    def _grouped(self, call: Callable[..., dist.Work], outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        return GroupedWork([call(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)])

    def _start_coalescing(self, device: torch.device) -> None:
        """Starts to collect the works of asynchronous calls; each runs as soon as it can."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work for all since ``_start_coalescing``."""
        works, self._coalesced = self._coalesced or [], None
        return GroupedWork(works)

    # Identity and life.

    def name(self) -> str:
        return "symm"

    getBackendName = _get_backend_name = name  # noqa: N815

    def get_group_store(self) -> Store | None:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Deadline of the waits from now on."""
        self._timeout_s = self.comm.watch.timeout_s = self._mailbox.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Ends this rank's part: waits for its collectives, gives up its receives. Does not wait for peers."""
        if not self._open:
            return
        self._open = False
        self._store = None
        self._mailbox.close()
        self._lane.close()
        self._lane.busy.acquire()  # for good
        self.comm.close(wait=False)

    def abort(self) -> None:
        """As ``shutdown``, but what runs ends with ClosedError."""
        self.comm.watch.interrupt = ClosedError("the process group was aborted")
        self.shutdown()


def _ending(call: Callable[..., object], ended: torch.futures.Future[None]) -> Callable[..., object]:
    """The call, with the end of its event as a part of it: whoever waits for the call may then stop the profiler, whose
    memory the event is."""

    def run(*args: object) -> None:
        try:
            call(*args)
        finally:
            ended.set_result(None)

    return run


def _barrier(comm: Communicator, timeout_s: float | None) -> None:
    comm.barrier(timeout_s=timeout_s)
