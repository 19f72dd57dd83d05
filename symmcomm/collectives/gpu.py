"""The collectives on GPU tensors: which kernel, with which arguments. A call enqueues kernels on torch's current stream
and returns.

What a call needs is prepared once for what all ranks know alike (kind, dtype, operation, element count, whether the
tensors are symmetric, and where in the heap as far as the switch minds), and looked up by that. Kernels are chosen by
``schedule.select_gpu`` from nothing else, so all ranks launch the same grids. Arguments of one call must therefore
agree on all ranks, and a tensor must be symmetric (see ``gpu_memory``) on all of them or on none; a kernel does not see
it if they do not: such a call ends in a wait that gives up, or in wrong data. Only split sizes and sizes of messages
are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch

from symmcomm.checks import check_rank
from symmcomm.collectives.all_to_all import check_apart, even_part, row_bytes
from symmcomm.collectives.arguments import check_list, check_pair, check_place
from symmcomm.collectives.call import Kind, parse_reduction
from symmcomm.collectives.gpu_forms import Forms
from symmcomm.collectives.gpu_messages import GpuMessages
from symmcomm.collectives.gpu_ring import by_ring
from symmcomm.collectives.lists import check_lists
from symmcomm.errors import DTypeError
from symmcomm.kernels.gpu import instances, multimem
from symmcomm.kernels.gpu.copy_engine import AllGatherCopyEngine
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.store_words import StoreWords
from symmcomm.schedule import select_gpu
from symmcomm.schedule.cost import RingMode
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.select_gpu import Algorithm

_MAX_PREPARED = 4096  # calls kept; sizes that never come again must not fill the memory
_BAD = (AttributeError, KeyError, RuntimeError, TypeError)  # of arguments that cannot be looked up

Call = Callable[..., None]
Place = tuple[int, int, int]
"""Address, bytes in all, and bytes from one rank's part to the next: 0 if they have one."""


class GpuCollectives(GpuMessages):
    """The GPU side of a communicator: ``Communicator.gpu``. The methods are those of ``Communicator``, with the same
    arguments, on contiguous tensors of ``device``; they return once the work is enqueued on torch's current stream.

    Raises, from every method: ArgumentError, DTypeError on the calling rank; what ``check`` raises about earlier calls.
    """

    _engine: AllGatherCopyEngine | None = None

    def prepared(self, make: Callable[..., Call], *facts: object) -> Call:
        """``make(*facts)``, which is kept. ``facts``: what all ranks know alike of a call."""
        key = make, facts
        try:
            call = self._calls.get(key)
        except TypeError:  # an op that cannot even be looked up
            call = None
        return call or self._keep_call(key, make(*facts))

    def _keep_call(self, key: tuple[object, ...], call: Call) -> Call:
        if len(self._calls) >= _MAX_PREPARED:
            self._calls.clear()
        self._calls[key] = call
        return call

    def _pair(
        self, output: torch.Tensor, input: torch.Tensor, outputs_per_input: int, inputs_per_output: int
    ) -> tuple[int, int]:
        """Where output and input lie. Raises what ``check_pair`` raises."""
        target, source = self.address_of(output, "output"), self.address_of(input, "input")
        if output.dtype is not input.dtype or output.nbytes * inputs_per_output != input.nbytes * outputs_per_input:
            check_pair(output, input, outputs_per_input, inputs_per_output, self.device)
        return target, source

    # Reductions.

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", *, ring_mode: RingMode | Plan | None = None, num_blocks: int = 0
    ) -> None:
        """Replaces ``tensor`` on every rank by the reduction of all ranks' tensors, in rank order, with the same bits;
        where ``Thresholds.multimem_bytes`` gives it to the switch, in an order of its own.

        Large symmetric tensors are reduced where they are; others pass through memory of the heap.
        """
        if ring_mode is not None or num_blocks:
            self.check_tensor(tensor, "tensor")
            if by_ring(self, Kind.all_reduce, tensor, tensor, op, ring_mode, num_blocks):
                return
        try:  # ``prepared`` and ``address_of``, without their calls: this is the call whose time matters most
            call = self._calls[tensor.dtype, op, tensor.numel()]
            fit = (
                tensor.get_device() == self.ordinal
                and (address := tensor.data_ptr())
                and tensor.is_contiguous()
                and not tensor.is_neg()
            )
        except _BAD:
            fit = False
        if not fit:
            self.check_tensor(tensor, "tensor")
            facts, address = (tensor.dtype, op, tensor.numel()), tensor.data_ptr()
            call = self._keep_call(facts, self._prepare_all_reduce(*facts))
        call(address)

    def _prepare_all_reduce(self, of: torch.dtype, by: object, count: int) -> Call:
        dtype, op = parse_reduction(of, by)
        if self.world_size == 1 or count == 0:
            return lambda address: self.check()
        num_bytes = count * dtype.itemsize
        places = (False, False), (True, False), (True, self._switch_reduces(num_bytes, dtype, op))
        shapes = [self.choose_all_reduce(num_bytes, dtype, *each) for each in places]
        if shapes.count(shapes[0]) == len(shapes):
            return self._direct(shapes[0], dtype, op, count)
        forms: dict[int, Call] = {}  # kernels take a while to compile: each when it is needed

        def call(address: int) -> None:
            place = self.is_symmetric(address, num_bytes) + self._by_switch(address, num_bytes, 0)
            if place not in forms:
                forms[place] = self._direct(shapes[place], dtype, op, count)
            forms[place](address)

        return call

    def choose_all_reduce(
        self, num_bytes: int, dtype: DType, symmetric: bool, multimem: bool = False
    ) -> select_gpu.Launch:
        """The shape of an all-reduce on this world."""
        facts = num_bytes, dtype, self.world_size, self.num_sms
        return select_gpu.choose(*facts, symmetric, self.thresholds, multimem)

    def _by_switch(self, address: int, num_bytes: int, pitch: int) -> bool:
        """Whether the switch should move or reduce the tensor there, if it knows how (``select_gpu.by_switch``)."""
        return (
            self.multicast_base != 0
            and select_gpu.by_switch(num_bytes, address - self.heap.own_address, pitch, self.thresholds)
            and self.is_symmetric(address, num_bytes)
        )

    def _switch_reduces(self, num_bytes: int, dtype: DType, op: Op) -> bool:
        """Whether it should reduce, and knows how, tensors of that size that lie well."""
        wanted = self.multicast_base != 0 and select_gpu.by_switch(num_bytes, 0, 0, self.thresholds)
        return wanted and multimem.form(Reduction(dtype, op, self.world_size, self.arch_number), 16) is not None

    def _direct(self, shape: select_gpu.Launch, dtype: DType, op: Op, count: int, keeps: bool = True) -> Call:
        """One kernel, in place. Unless it ``keeps`` the result, that goes elsewhere and is forgotten."""
        kernel = partial(instances.all_reduce, shape, dtype, op, self.world_size, self.arch_number, self.early)
        forms, run, grid, own = Forms(shape, kernel, self.compiled), self.run, shape.grid, self.heap.own_address
        num_bytes = count * dtype.itemsize
        multicast = self.multicast_base
        if shape.algorithm is Algorithm.two_shot:  # takes an offset
            return lambda address: run(forms[0], multicast, address - own, count, grid)
        if shape.algorithm is Algorithm.pull:
            return lambda address: run(forms[0], multicast, address - own, address, count, grid)
        if keeps and shape.algorithm is not Algorithm.lamport:  # the smallest calls: their time is the host's
            function = forms[0]
            return lambda address: run(function, address, address, count, grid)
        if keeps:
            return lambda address: run(forms[(address | num_bytes) & 15], address, address, count, grid)
        nowhere = partial(torch.empty, num_bytes, dtype=torch.uint8, device=self.device)
        return lambda address: run(forms[(address | num_bytes) & 15], address, nowhere().data_ptr(), count, grid)

    def reduce(self, tensor: torch.Tensor, dst: int, op: object = "sum") -> None:
        """As ``all_reduce``, but only rank ``dst`` gets the result; the other ranks' tensors keep their values."""
        address = self.address_of(tensor, "tensor")
        check_rank(self, dst, "dst")
        self.prepared(self._prepare_reduce, tensor.dtype, op, tensor.numel(), dst == self.rank)(address)

    def _prepare_reduce(self, of: torch.dtype, by: object, count: int, keeps: bool) -> Call:
        dtype, op = parse_reduction(of, by)
        if self.world_size == 1 or count == 0:
            return lambda address: self.check()
        shape = self.choose_all_reduce(count * dtype.itemsize, dtype, False)
        return self._direct(shape, dtype, op, count, keeps)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: object = "sum", *,
        ring_mode: RingMode | Plan | None = None, num_blocks: int = 0,
    ) -> None:  # fmt: skip
        """Leaves part ``rank`` of the reduction of all inputs in ``output``, which may be that part of ``input``."""
        target, source = self._pair(output, input, 1, self.world_size)
        num_bytes = output.nbytes
        check_place(self, source, target, num_bytes, "input", "output")
        if ring_mode is None and num_bytes * self.world_size >= self.ring_from[1]:
            ring_mode = self.ring_from[0]
        if (ring_mode is not None or num_blocks) and by_ring(
            self, Kind.reduce_scatter_tensor, output, input, op, ring_mode, num_blocks
        ):
            return
        if self.world_size == 1:
            parse_reduction(input.dtype, op)
            return self._keep(output, input)
        whole = num_bytes * self.world_size
        place = self.is_symmetric(source, whole), self._by_switch(source, whole, num_bytes)
        self.prepared(self._prepare_reduce_scatter, input.dtype, op, output.numel(), *place)(target, source)

    def _prepare_reduce_scatter(
        self, of: torch.dtype, by: object, count: int, symmetric: bool, by_switch: bool
    ) -> Call:
        dtype, op = parse_reduction(of, by)
        if count == 0:
            return lambda target, source: self.check()
        shape = select_gpu.choose_reduce_scatter(
            count * dtype.itemsize, dtype, self.world_size, self.num_sms, symmetric, self.thresholds,
            by_switch and self._switch_reduces(count * dtype.itemsize * self.world_size, dtype, op),
        )  # fmt: skip
        kernel = partial(instances.reduce_scatter, shape, dtype, op, self.world_size, self.arch_number, self.early)
        forms, run, grid, own = Forms(shape, kernel, self.compiled), self.run, shape.grid, self.heap.own_address
        if shape.algorithm is Algorithm.pull:  # takes an offset
            multicast = self.multicast_base
            return lambda target, source: run(forms[0], multicast, source - own, target, count, grid)
        num_bytes = count * dtype.itemsize
        return lambda target, source: run(forms[(source | target | num_bytes) & 15], source, target, count, grid)

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
        target, source = self._pair(output, input, self.world_size, 1)
        num_bytes = input.nbytes
        check_place(self, target, source, num_bytes, "output", "input")
        if self.world_size == 1:
            return self._keep(output, input)
        num_sms = min(self.num_sms, max_ctas or self.num_sms)
        whole = num_bytes * self.world_size
        self._spread(num_bytes, (source, num_bytes, 0), (target, whole, num_bytes), num_sms=num_sms)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copies rank ``src``'s tensor into every other rank's."""
        address, num_bytes = self.address_of(tensor, "tensor"), tensor.nbytes
        check_rank(self, src, "src")
        if self.world_size > 1:
            self._spread(num_bytes, (address, num_bytes, 0), (address, num_bytes, 0), src)

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
        target, source = self._pair(output, input, 1, 1)
        part = even_part(self, output, input) * input.element_size()
        if self.world_size == 1:
            return self._keep(output, input)
        whole = part * self.world_size
        if target == source and part >= self.thresholds.gather_push_bytes and self.is_symmetric(target, whole):
            input = input.clone()  # peers push into the output while it is read
            source = input.data_ptr()
        self._spread(part, (source, whole, part), (target, whole, part))

    def _spread(self, num_bytes: int, source: Place, target: Place, sender: int = -1, num_sms: int = 0) -> None:
        """The calls in the table of ``kernels.gpu.all_gather``; ``num_bytes`` of a part. ``num_sms``: that the kernel
        may use, if not all."""
        if num_bytes == 0:
            return self.check()
        (start, whole, pitch), (place, room, stride) = source, target
        same, symmetric = pitch == 0, (self.is_symmetric(start, whole), self.is_symmetric(place, room))
        by_switch = same and self._by_switch(place, room, stride)
        call = self.prepared(self._prepare_spread, num_bytes, same, *symmetric, by_switch, num_sms or self.num_sms)
        call(start, pitch, place, stride, sender)

    def _prepare_spread(
        self, num_bytes: int, same: bool, source_symmetric: bool, target_symmetric: bool, by_switch: bool, num_sms: int
    ) -> Call:
        shape = select_gpu.choose_all_gather(
            num_bytes, self.world_size, num_sms, source_symmetric, target_symmetric, self.thresholds, True, by_switch
        )
        run, own = self.run, self.heap.own_address  # what is written or read at peers is given by its offset
        if shape.algorithm is Algorithm.copy_engine:
            engine = self.copy_engine()
            return lambda source, pitch, target, stride, sender: run(
                engine, source, pitch, target - own, stride, num_bytes, sender
            )
        kernel = partial(instances.all_gather, shape, self.world_size, same, self.early)
        forms, grid = Forms(shape, kernel, self.compiled), shape.grid
        if shape.algorithm is Algorithm.push:
            multicast = self.multicast_base
            return lambda source, pitch, target, stride, sender: run(
                forms[0], multicast, source, pitch, target - own, stride, num_bytes, sender, grid
            )
        if shape.algorithm is Algorithm.pull:
            return lambda source, pitch, target, stride, sender: run(
                forms[0], source - own, pitch, target, stride, num_bytes, sender, grid
            )
        return lambda source, pitch, target, stride, sender: run(
            forms[(source | target | num_bytes) & 15], source, pitch, target, stride, num_bytes, sender, grid
        )

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
        target, source = self.address_of(output, "output"), self.address_of(input, "input")
        if output.dtype is not input.dtype:
            raise DTypeError(f"output and input must have one dtype, got {output.dtype} and {input.dtype}")
        comes = row_bytes(self, output, output_split_sizes, "output")
        goes = row_bytes(self, input, input_split_sizes, "input")
        check_apart(output, input, "uneven splits do not allow it")
        self._exchange([*zip(*goes, *comes, strict=True)], source, target)

    def _exchange(self, rows: Sequence[tuple[int, int, int, int]], source: int = 0, target: int = 0) -> None:
        """Parts of any size, a row for each rank: bytes that go there and their offset from ``source``, bytes that come
        from there and their offset from ``target``."""
        shape = select_gpu.uneven_shape(self.world_size, self.num_sms)
        self.launch(StoreWords(num=4 * self.world_size), self.messages.parts, tuple(chain.from_iterable(rows)))
        kernel = instances.all_to_all_uneven(shape, self.world_size)
        self.launch(kernel, source, target, self.heap.own_address + self.messages.parts, shape.grid)

    def gather(
        self, tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None = None, dst: int = 0
    ) -> None:
        """Collects all ranks' tensors on rank ``dst``, in ``gather_list``, which is None elsewhere."""
        address, size = self.address_of(tensor, "tensor"), tensor.nbytes
        check_rank(self, dst, "dst")
        parts = check_list(self, gather_list, tensor, "gather_list", dst, self.device)
        comes = [(size, part.data_ptr()) for part in parts] or [(0, 0)] * self.world_size
        self._exchange([(size if p == dst else 0, address, *comes[p]) for p in range(self.world_size)])

    def scatter(
        self, tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int = 0
    ) -> None:
        """Sends tensor p of rank ``src``'s list to rank p."""
        address, size = self.address_of(tensor, "tensor"), tensor.nbytes
        check_rank(self, src, "src")
        parts = check_list(self, scatter_list, tensor, "scatter_list", src, self.device)
        goes = [(size, part.data_ptr()) for part in parts] or [(0, 0)] * self.world_size
        self._exchange([(*goes[p], size if p == src else 0, address) for p in range(self.world_size)])

    def all_gather(self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As ``all_gather_into_tensor``, with an output of its own for what each rank sends."""
        address, size = self.address_of(tensor, "tensor"), tensor.nbytes
        parts = check_list(self, tensor_list, tensor, "tensor_list", self.rank, self.device)
        self._exchange([(size, address, size, part.data_ptr()) for part in parts])

    def all_to_all(self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor]) -> None:
        """Sends ``input_list[p]`` to rank p and leaves what rank p sends in ``output_list[p]``."""
        check_lists(self, output_list, input_list, self.device)
        pairs = zip(input_list, output_list, strict=True)
        self._exchange([(a.nbytes, a.data_ptr(), b.nbytes, b.data_ptr()) for a, b in pairs])
