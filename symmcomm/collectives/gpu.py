"""The collectives on GPU tensors: which kernel, with which arguments. A call enqueues kernels on torch's current stream
and returns.

What a call needs is prepared once for what all ranks know alike (kind, dtype, operation, element count, whether the
tensors are symmetric), and looked up by that. Kernels are chosen by ``schedule.select_gpu`` from nothing else, so all
ranks launch the same grids. Arguments of one call must therefore agree on all ranks, and a tensor must be symmetric
(see ``gpu_memory``) on all of them or on none; a kernel does not see it if they do not: such a call ends in a wait that
gives up, or in wrong data. Only split sizes and sizes of messages are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from symmcomm.collectives.all_to_all import check_apart, even_part, row_bytes
from symmcomm.collectives.arguments import check_list, check_pair, check_place, check_rank
from symmcomm.collectives.call import Kind, parse_reduction
from symmcomm.collectives.gpu_memory import GpuMemory
from symmcomm.collectives.gpu_ring import by_ring
from symmcomm.collectives.lists import check_lists
from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.kernels.gpu import instances
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import Kernel
from symmcomm.kernels.gpu.copy_engine import AllGatherCopyEngine
from symmcomm.kernels.gpu.point_to_point import Message
from symmcomm.kernels.gpu.words import StoreWords, SwapSignal
from symmcomm.schedule import select_gpu
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.select_gpu import Algorithm

_MAX_PREPARED = 4096  # calls kept; sizes that never come again must not fill the memory
_HOST_CHANNEL = 0  # of the compare-and-swap pads
_BAD = (AttributeError, KeyError, RuntimeError, TypeError)  # of arguments that cannot be looked up

Call = Callable[..., None]


class GpuCollectives(GpuMemory):
    """The GPU side of a communicator: ``Communicator.gpu``. The methods are those of ``Communicator``, with the same
    arguments, on contiguous tensors of ``device``; they return once the work is enqueued on torch's current stream.

    Raises, from every method: ArgumentError, DTypeError on the calling rank; what ``check`` raises about earlier calls.
    """

    _engine: AllGatherCopyEngine | None = None

    def find(self, key: tuple[object, ...], make: Callable[[], Call]) -> Call:
        """The prepared call; made, and kept, if it is new."""
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MAX_PREPARED:
                self._calls.clear()
            call = self._calls[key] = make()
        return call

    # Reductions.

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", *, ring_mode: RingMode | Plan | None = None, num_blocks: int = 0
    ) -> None:
        """Replaces ``tensor`` on every rank by the reduction of all ranks' tensors, in rank order, with the same bits.

        Small tensors, and symmetric ones, are reduced where they are; others are pipelined through staging memory.
        """
        if ring_mode is not None or num_blocks:
            self.check_tensor(tensor, "tensor")
            if by_ring(self, Kind.all_reduce, tensor, tensor, op, ring_mode, num_blocks):
                return
        try:
            call = self._calls[tensor.dtype, op, tensor.numel()]
            fit = tensor.get_device() == self.ordinal and tensor.is_contiguous() and not tensor.is_neg()
            fit = fit and tensor.data_ptr() != 0
        except _BAD:
            fit = False
        if not fit:
            self.check_tensor(tensor, "tensor")
            dtype, own_op = parse_reduction(tensor.dtype, op)
            key, count = (tensor.dtype, op, tensor.numel()), tensor.numel()
            call = self.find(key, lambda: self._prepare_all_reduce(dtype, own_op, count))
        call(tensor)

    def _prepare_all_reduce(self, dtype: DType, op: Op, count: int) -> Call:
        if self.world_size == 1 or count == 0:
            return lambda tensor: self.check()
        num_bytes = count * dtype.itemsize
        ordinary, symmetric = (self.choose_all_reduce(num_bytes, dtype, each) for each in (False, True))
        if symmetric == ordinary:
            return self._direct(ordinary, dtype, op, count)
        forms: dict[bool, Call] = {}  # a kernel takes half a second to compile: each when it is needed

        def call(tensor: torch.Tensor) -> None:
            inside = self.symmetric_offset(tensor) >= 0
            if inside not in forms:
                forms[inside] = self._direct(symmetric if inside else ordinary, dtype, op, count)
            forms[inside](tensor)

        return call

    def choose_all_reduce(self, num_bytes: int, dtype: DType, symmetric: bool) -> select_gpu.Launch:
        """The shape of an all-reduce on this world."""
        return select_gpu.choose(num_bytes, dtype, self.world_size, self.num_sms, symmetric, self.thresholds)

    def kernel_of_all_reduce(self, shape: select_gpu.Launch, dtype: DType, op: Op) -> Kernel:
        """Its kernel."""
        return instances.all_reduce(shape, dtype, op, self.world_size, self.arch_number, self.early)

    def _direct(self, shape: select_gpu.Launch, dtype: DType, op: Op, count: int, keeps: bool = True) -> Call:
        """One kernel, in place. Unless it ``keeps`` the result, that goes elsewhere and is forgotten."""
        function, run, grid = self.compiled(self.kernel_of_all_reduce(shape, dtype, op)), self.run, shape.grid
        own = self.heap.own_address
        if shape.algorithm is Algorithm.two_shot:  # takes an offset
            return lambda tensor: run(function, 0, tensor.data_ptr() - own, count, grid)
        if keeps:

            def call(tensor: torch.Tensor) -> None:
                address = tensor.data_ptr()
                run(function, address, address, count, grid)

            return call
        if (num_bytes := count * dtype.itemsize) <= self.scratch_bytes:
            nowhere = own + self.scratch(num_bytes)
            return lambda tensor: run(function, tensor.data_ptr(), nowhere, count, grid)
        return lambda tensor: run(function, tensor.data_ptr(), torch.empty_like(tensor).data_ptr(), count, grid)

    def reduce(self, tensor: torch.Tensor, dst: int, op: object = "sum") -> None:
        """As ``all_reduce``, but only rank ``dst`` gets the result; the other ranks' tensors keep their values."""
        self.check_tensor(tensor, "tensor")
        check_rank(self, dst, "dst")
        dtype, own_op = parse_reduction(tensor.dtype, op)
        keeps, count = dst == self.rank, tensor.numel()
        key = (Kind.reduce, dtype, own_op, count, keeps)
        self.find(key, lambda: self._prepare_reduce(dtype, own_op, count, keeps))(tensor)

    def _prepare_reduce(self, dtype: DType, op: Op, count: int, keeps: bool) -> Call:
        if self.world_size == 1 or count == 0:
            return lambda tensor: self.check()
        shape = self.choose_all_reduce(count * dtype.itemsize, dtype, False)
        return self._direct(shape, dtype, op, count, keeps)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: object = "sum", *,
        ring_mode: RingMode | Plan | None = None, num_blocks: int = 0,
    ) -> None:  # fmt: skip
        """Leaves part ``rank`` of the reduction of all inputs in ``output``, which may be that part of ``input``.
        A large symmetric input is read in place; other data go through staging memory, pipelined."""
        check_pair(output, input, 1, self.world_size, self.device)
        check_place(self, input.data_ptr(), output.data_ptr(), output.nbytes, "input", "output")
        if ring_mode is None and input.nbytes >= self.ring_from[1]:
            ring_mode = self.ring_from[0]
        if (ring_mode is not None or num_blocks) and by_ring(
            self, Kind.reduce_scatter_tensor, output, input, op, ring_mode, num_blocks
        ):
            return
        dtype, own_op = parse_reduction(input.dtype, op)
        count, offset = output.numel(), self.symmetric_offset(input)
        key = (Kind.reduce_scatter_tensor, dtype, own_op, count, offset >= 0)
        call = self.find(key, lambda: self._prepare_reduce_scatter(dtype, own_op, count, offset >= 0))
        call(output, input, offset)

    def _prepare_reduce_scatter(self, dtype: DType, op: Op, count: int, symmetric: bool) -> Call:
        if self.world_size == 1 or count == 0:
            return lambda output, input, offset: self._keep(output, input)
        shape = select_gpu.choose_reduce_scatter(
            count * dtype.itemsize, dtype, self.world_size, self.num_sms, symmetric, self.thresholds
        )
        kernel = instances.reduce_scatter(shape, dtype, op, self.world_size, self.arch_number, self.early)
        function, run, grid = self.compiled(kernel), self.run, shape.grid
        if shape.algorithm is Algorithm.pull:
            return lambda output, _, offset: run(function, 0, offset, output.data_ptr(), count, grid)
        return lambda output, input, _: run(function, input.data_ptr(), output.data_ptr(), count, grid)

    # Calls that move data, of any dtype.

    def _keep(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """What a rank that is alone does."""
        self.check()
        if output.data_ptr() != input.data_ptr():
            output.detach().view(-1).copy_(input.detach().view(-1))

    def all_gather_into_tensor(
        self, output: torch.Tensor, input: torch.Tensor, max_ctas: int | None = None
    ) -> None:
        """Gathers all ranks' inputs, in rank order, on every rank. ``input`` may be part ``rank`` of ``output``.
        ``max_ctas``: the most CTAs that the kernel takes."""
        check_pair(output, input, self.world_size, 1, self.device)
        check_place(self, output.data_ptr(), input.data_ptr(), input.nbytes, "output", "input")
        if self.world_size == 1:
            return self._keep(output, input)
        num_sms = min(self.num_sms, max_ctas or self.num_sms)
        self._spread(input, 0, output, input.nbytes, input.nbytes, num_sms=num_sms)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copies rank ``src``'s tensor into every other rank's."""
        self.check_tensor(tensor, "tensor")
        check_rank(self, src, "src")
        if self.world_size > 1:
            self._spread(tensor, 0, tensor, 0, tensor.nbytes, src)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        """Sends part p of ``input`` to rank p, and leaves what rank p sends in part p of ``output``. Where ranks
        disagree about split sizes, ``check`` and the next call raise MismatchError."""
        if output_split_sizes or input_split_sizes:
            return self._uneven(output, input, output_split_sizes, input_split_sizes)
        check_pair(output, input, 1, 1, self.device)
        part = even_part(self, output, input) * input.element_size()
        if self.world_size == 1:
            return self._keep(output, input)
        if output.data_ptr() == input.data_ptr() and self.symmetric_offset(output) >= 0:
            input = input.clone()  # peers may write to the output while it is read
        self._spread(input, part, output, part, part)

    def _spread(
        self, source: torch.Tensor, source_pitch: int, target: torch.Tensor, target_pitch: int, num_bytes: int,
        sender: int = -1, num_sms: int = 0,
    ) -> None:  # fmt: skip
        """The calls in the table of ``kernels.gpu.all_gather``; ``num_bytes`` of a part. ``num_sms``: that the kernel
        may use, if not all."""
        if num_bytes == 0:
            return self.check()
        out_of, into = self.symmetric_offset(source), self.symmetric_offset(target)
        how = (num_bytes, source_pitch == 0, out_of >= 0, into >= 0, num_sms or self.num_sms)
        self.find((Kind.all_gather_into_tensor, *how), lambda: self._prepare_spread(*how))(
            source.data_ptr(), out_of, source_pitch, target.data_ptr(), into, target_pitch, sender
        )

    def _prepare_spread(
        self, num_bytes: int, same: bool, source_symmetric: bool, target_symmetric: bool, num_sms: int
    ) -> Call:
        shape = select_gpu.choose_all_gather(
            num_bytes, self.world_size, num_sms, source_symmetric, target_symmetric, self.thresholds, copy_engine=True
        )
        run = self.run
        if shape.algorithm is Algorithm.copy_engine:
            engine = self.copy_engine()
            return lambda source, _, source_pitch, target, into, target_pitch, sender: run(
                engine, source, source_pitch, into, target_pitch, num_bytes, sender
            )
        function = self.compiled(instances.all_gather(shape, self.world_size, same, self.early))

        def call(
            source: int, out_of: int, source_pitch: int, target: int, into: int, target_pitch: int, sender: int
        ) -> None:
            ends = (source_pitch, target_pitch, num_bytes, sender, shape.grid)
            if shape.algorithm is Algorithm.push:
                run(function, 0, source, ends[0], into, *ends[1:])
            else:
                run(function, out_of if shape.algorithm is Algorithm.pull else source, ends[0], target, *ends[1:])

        return call

    def copy_engine(self) -> AllGatherCopyEngine:
        """The copy engines of this communicator; they have a stream of their own."""
        if self._engine is None:
            with torch.cuda.device(self.device):
                self._engine = AllGatherCopyEngine(self.world_size, self.arch, self.arch_number)
        return self._engine

    def close(self, wait: bool) -> None:
        """See ``GpuMemory.close``."""
        super().close(wait)
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _uneven(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
    ) -> None:
        self.check_tensor(output, "output")
        self.check_tensor(input, "input")
        if output.dtype is not input.dtype:
            raise DTypeError(f"output and input must have one dtype, got {output.dtype} and {input.dtype}")
        comes = row_bytes(self, output, output_split_sizes, "output")
        goes = row_bytes(self, input, input_split_sizes, "input")
        check_apart(output, input, "uneven splits do not allow it")
        self._exchange([*zip(*goes, *comes, strict=True)], input.data_ptr(), output.data_ptr())

    def _exchange(self, rows: Sequence[tuple[int, int, int, int]], source: int = 0, target: int = 0) -> None:
        """Parts of any size, a row for each rank: bytes that go there and their offset from ``source``, bytes that come
        from there and their offset from ``target``."""
        shape = select_gpu.uneven_shape(self.world_size, self.num_sms)
        self.launch(StoreWords(num=4 * self.world_size), self.table, tuple(chain.from_iterable(rows)))
        kernel = instances.all_to_all_uneven(shape, self.world_size)
        self.launch(kernel, source, target, self.heap.own_address + self.table, shape.grid)

    def gather(
        self, tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None = None, dst: int = 0
    ) -> None:
        """Collects all ranks' tensors on rank ``dst``, in ``gather_list``, which is None elsewhere."""
        self.check_tensor(tensor, "tensor")
        check_rank(self, dst, "dst")
        parts = check_list(self, gather_list, tensor, "gather_list", dst, self.device)
        size, address = tensor.nbytes, tensor.data_ptr()
        comes = [(size, part.data_ptr()) for part in parts] or [(0, 0)] * self.world_size
        self._exchange([(size if p == dst else 0, address, *comes[p]) for p in range(self.world_size)])

    def scatter(
        self, tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int = 0
    ) -> None:
        """Sends tensor p of rank ``src``'s list to rank p."""
        self.check_tensor(tensor, "tensor")
        check_rank(self, src, "src")
        parts = check_list(self, scatter_list, tensor, "scatter_list", src, self.device)
        size, address = tensor.nbytes, tensor.data_ptr()
        goes = [(size, part.data_ptr()) for part in parts] or [(0, 0)] * self.world_size
        self._exchange([(*goes[p], size if p == src else 0, address) for p in range(self.world_size)])

    def all_gather(self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As ``all_gather_into_tensor``, with an output of its own for what each rank sends."""
        self.check_tensor(tensor, "tensor")
        parts = check_list(self, tensor_list, tensor, "tensor_list", self.rank, self.device)
        size, address = tensor.nbytes, tensor.data_ptr()
        self._exchange([(size, address, size, part.data_ptr()) for part in parts])

    def all_to_all(self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor]) -> None:
        """Sends ``input_list[p]`` to rank p and leaves what rank p sends in ``output_list[p]``."""
        check_lists(self, output_list, input_list, self.device)
        pairs = zip(input_list, output_list, strict=True)
        self._exchange([(a.nbytes, a.data_ptr(), b.nbytes, b.data_ptr()) for a, b in pairs])

    # Messages, barriers and signals.

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Sends ``tensor`` to rank ``dst``. Messages of a pair arrive in the order sent; small ones leave the stream
        before they are received. A receiver that expects another number of bytes gets MismatchError, and the
        communicator is finished."""
        self._message(tensor, dst, "dst", True)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receives rank ``src``'s next message into ``tensor``, of as many bytes as were sent."""
        self._message(tensor, src, "src", False)

    def _message(self, tensor: torch.Tensor, peer: int, name: str, sends: bool) -> None:
        self.check_tensor(tensor, "tensor")
        check_rank(self, peer, name)
        if peer == self.rank:
            raise ArgumentError(f"{name}={peer} is the calling rank itself")
        self.launch(Message(world_size=self.world_size, sends=sends), tensor.data_ptr(), tensor.nbytes, peer)

    def barrier(
        self, *, algorithm: str = "all_to_all", protocol: str = "epoch", timeout_s: float | None = None
    ) -> None:
        """What is enqueued behind it on the current stream runs once all ranks have come to theirs. Arguments as of
        ``Communicator.barrier``, which holds up the host instead."""
        if algorithm not in ("all_to_all", "ring"):
            raise ArgumentError(f"algorithm={algorithm!r} is none of 'all_to_all', 'ring'")
        if protocol not in ("epoch", "cas"):
            raise ArgumentError(f"protocol={protocol!r} is none of 'epoch', 'cas'")
        kernel = Barrier(world_size=self.world_size, arch=self.arch_number, algorithm=algorithm, protocol=protocol)
        with self.deadline(timeout_s):
            self.launch(kernel, 0, _HOST_CHANNEL)

    def swap_barrier(self, channel: int, timeout_s: float | None) -> None:
        """Compare-and-swap barrier of all ranks on a channel."""
        kernel = Barrier(world_size=self.world_size, arch=self.arch_number, protocol="cas")
        with self.deadline(timeout_s):
            self.launch(kernel, 0, channel)

    def swap_signal(self, channel: int, peer: int, put: bool, timeout_s: float | None) -> None:
        """Puts a signal to the peer once it has taken the last one, or waits for one of it and takes it."""
        with self.deadline(timeout_s):
            self.launch(SwapSignal(world_size=self.world_size, puts=put), channel, peer)
