"""Which kernels a call on the GPU comes to, and that they take the arguments they get: with no GPU, on the host's
tensors. Each compiled function checks its arguments before it finds that there is no driver."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symmcomm.errors import ArgumentError, DTypeError, PlanError, TopologyError

pytest.importorskip("cutlass")

from symmcomm.collectives.gpu import GpuCollectives
from symmcomm.kernels.gpu.compile import compiled
from symmcomm.schedule.cost import RingMode, choose_from
from symmcomm.schedule.layout_gpu import Layout, MessageLayout
from symmcomm.schedule.machines import nvlink
from symmcomm.schedule.plan import all_reduce_of
from symmcomm.schedule.ring import ring_1d
from symmcomm.schedule.select_gpu import DEFAULT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses are made up")
MI = 1 << 20


class Dry(GpuCollectives):
    """Two ranks whose heap is a tensor of the host. Notes the kernels that would run."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.world_size, self.ordinal, self.device = rank, 2, -1, torch.device("cpu")
        self.timeout_s = 1.0
        self.arch, self.arch_number, self.num_sms, self.early = "sm_90a", 90, 132, True
        self.whole_vectors = True
        self.layout, self.messages, self.thresholds = Layout.create(2), MessageLayout.create(2), DEFAULT
        self.memory = torch.zeros(self.messages.end + 40 * MI, dtype=torch.uint8)
        self.base, self.stride = self.memory.data_ptr() - rank * (1 << 40), 1 << 40
        self.heap: Any = SimpleNamespace(own_address=self.memory.data_ptr())
        self._symmetric, self._calls, self._word = set(), {}, ctypes.c_uint32(0)
        self.mapped = 0  # where multicast would be, once it is asked for
        self.multicast: Any = SimpleNamespace(extend=lambda wanted: self.mapped if wanted else 0)
        self.topology, self.ring_tables = nvlink(2), {}
        self.ring_from = choose_from(self.topology)
        self.made: dict[int, Any] = {}
        self.launched: list[Any] = []

    def check(self) -> None:
        pass

    def compiled(self, kernel: Any) -> Any:
        function = compiled(kernel, self.arch)
        self.made[id(function)] = kernel
        return function

    def launch(self, kernel: Any, *arguments: Any) -> None:
        self.run(self.compiled(kernel), *arguments)

    def run(self, function: Any, *arguments: Any) -> None:
        self.launched.append(self.made[id(function)])
        self.given = arguments
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):
            function(self.base, self.stride, self.rank, *arguments, 0)

    def symmetric(self, num_bytes: int, at: int = 0) -> torch.Tensor:
        start = self.messages.end + at
        self.add_symmetric(start, num_bytes)
        return self.memory[start : start + num_bytes]

    def kernels(self) -> list[str]:
        launched, self.launched = self.launched, []
        return [type(kernel).__name__ for kernel in launched]

    def granules(self) -> list[int]:
        launched, self.launched = self.launched, []
        return [kernel.granule for kernel in launched]


@pytest.fixture(scope="module")
def gpu() -> Dry:
    return Dry()


def test_all_reduce(gpu: Dry) -> None:
    for op in ("sum", "sum", dist.ReduceOp.SUM):
        gpu.all_reduce(torch.ones(100), op)
        assert gpu.kernels() == ["ReduceScatterLL"]
    gpu.all_reduce(torch.ones(100, dtype=torch.bool), "band")
    assert gpu.kernels() == ["ReduceScatterLL"]
    gpu.all_reduce(torch.ones(0))
    assert gpu.kernels() == []
    gpu.all_reduce(torch.ones(5 * MI // 2))
    assert gpu.kernels() == ["ReduceScatterLamport"]
    gpu.all_reduce(torch.ones(5 * MI // 2, dtype=torch.int32))
    assert gpu.kernels() == ["ReduceScatterLamport"]
    gpu.all_reduce(gpu.symmetric(16 * MI).view(torch.float32))
    assert gpu.kernels() == ["AllReduceStaged"]  # a push
    gpu.set_thresholds(replace(DEFAULT, lamport_bytes=0))
    tensor = gpu.symmetric(4 * MI).view(torch.int32)
    gpu.all_reduce(tensor)
    gpu.all_reduce(tensor.view(2, -1))
    assert gpu.kernels() == 2 * ["AllReduceTwoShot"]
    gpu.all_reduce(tensor[: MI - 1])  # a part: not every rank knows where it is
    assert gpu.kernels() in (["AllReduceStaged"], ["AllReduceLLTwoShot"])
    gpu.set_thresholds(DEFAULT)


def test_a_kernel_is_compiled_when_it_is_needed() -> None:
    gpu = Dry()
    tensor = gpu.symmetric(16 * MI).view(torch.int32)
    ordinary = torch.ones(len(tensor), dtype=torch.int32)
    for one, kernels in ((tensor, 1), (tensor, 1), (ordinary, 2), (ordinary, 2)):
        gpu.all_reduce(one)
        assert len(gpu.made) == kernels


def test_lamport_kernels_are_compiled_for_what_is_aligned_and_for_what_is_not() -> None:
    gpu = Dry()
    memory = torch.ones(MI + 16, dtype=torch.int8)
    shift = -memory.data_ptr() % 16
    for start, expected in ((0, 16), (4, 4), (8, 4), (2, 2), (1, 1), (3, 1), (0, 16)):
        gpu.all_reduce(memory[shift + start :][: MI - 16])
        gpu.all_gather_into_tensor(torch.ones(2 * MI, dtype=torch.int8), memory[shift + start :][:MI])
        assert gpu.granules() == [expected] * 2
    gpu.all_reduce(memory[shift:][: MI - 2])
    assert gpu.granules() == [2]


def test_reduce(gpu: Dry) -> None:
    for dst in (0, 1):
        gpu.reduce(torch.ones(100), dst)
        assert gpu.kernels() == ["ReduceScatterLL"]
        gpu.reduce(torch.ones(MI), dst, "max")
        assert gpu.kernels()[-1] == "ReduceScatterLamport"
        gpu.reduce(torch.ones(MI, dtype=torch.int32), dst, "max")
        assert gpu.kernels()[-1] == "ReduceScatterLamport"


def test_the_result_of_reduce_stays_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Dry()
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu, "run", lambda _, *arguments: seen.append(arguments))
    tensor = torch.ones(100)
    gpu.reduce(tensor, 0)
    gpu.reduce(tensor, 1)
    here = tensor.data_ptr()
    assert seen[0][:2] == (here, here)
    assert seen[1][0] == here
    assert seen[1][1] != here


def test_no_kernel_tells_by_parts_of_16_bytes_where_they_may_come_apart() -> None:
    gpu = Dry()
    gpu.whole_vectors = False
    gpu.set_thresholds(DEFAULT)
    for count in (1, 1000, MI, 5 * MI):
        gpu.all_reduce(torch.ones(count))
        gpu.reduce_scatter_tensor(torch.ones(count), torch.ones(2 * count))
        gpu.all_gather_into_tensor(torch.ones(2 * count), torch.ones(count))
        gpu.broadcast(torch.ones(count), 0)
        gpu.all_to_all_single(torch.ones(2 * count), torch.ones(2 * count))
    assert {name for name in gpu.kernels() if name.endswith(("LL", "Lamport"))} == set()


def test_reduce_scatter(gpu: Dry) -> None:
    gpu.reduce_scatter_tensor(torch.ones(5), torch.ones(10), "avg")
    gpu.reduce_scatter_tensor(torch.ones(MI), torch.ones(2 * MI))
    gpu.reduce_scatter_tensor(torch.ones(MI, dtype=torch.int32), torch.ones(2 * MI, dtype=torch.int32))
    assert gpu.kernels() == ["ReduceScatterLL", "ReduceScatterLamport", "ReduceScatterLamport"]
    input = gpu.symmetric(32 * MI).view(torch.int32)
    gpu.set_thresholds(replace(DEFAULT, lamport_bytes=0))
    gpu.reduce_scatter_tensor(input[: 4 * MI], input)
    gpu.reduce_scatter_tensor(torch.ones(MI), torch.ones(2 * MI))
    assert gpu.kernels() == ["ReduceScatterPull", "ReduceScatterStaged"]
    gpu.set_thresholds(DEFAULT)
    with pytest.raises(ArgumentError, match="there it may only be part 0 of it"):
        gpu.reduce_scatter_tensor(input[8 : 4 * MI + 8], input)


def test_rings(gpu: Dry) -> None:
    tensor, part = torch.ones(4 * MI), torch.ones(2 * MI)
    gpu.reduce_scatter_tensor(part, tensor, ring_mode=RingMode.Ring1D)
    gpu.reduce_scatter_tensor(part, tensor, ring_mode=RingMode.Ring1D, num_blocks=7)
    gpu.all_reduce(torch.ones(7), "avg", ring_mode=RingMode.Ring1D)
    gpu.all_reduce(tensor, ring_mode=all_reduce_of(ring_1d(nvlink(2))))
    assert gpu.kernels() == ["Ring"] * 4
    assert len(gpu.ring_tables) == 3
    gpu.reduce_scatter_tensor(part, tensor, ring_mode=RingMode.All2All)
    assert gpu.kernels() == ["ReduceScatterLamport"]
    gpu.ring_from = (RingMode.Ring1D, tensor.nbytes)  # where the topology suggests it
    gpu.reduce_scatter_tensor(part, tensor)
    gpu.reduce_scatter_tensor(part[:-1], tensor[:-2])
    assert gpu.kernels() == ["Ring", "ReduceScatterLamport"]
    with pytest.raises(TopologyError, match="needs 1 levels of groups"):
        gpu.all_reduce(tensor, ring_mode=RingMode.Ring2D)
    with pytest.raises(PlanError, match="is no all-reduce"):
        gpu.all_reduce(tensor, ring_mode=ring_1d(nvlink(2)))
    with pytest.raises(ArgumentError, match="num_blocks=3 is for rings"):
        gpu.all_reduce(tensor, num_blocks=3)


def test_all_gather_and_broadcast(gpu: Dry) -> None:
    gpu.all_gather_into_tensor(torch.ones(6, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64))
    gpu.broadcast(torch.ones(1), 1)
    assert gpu.kernels() == ["AllGatherLL", "AllGatherLL"]
    gpu.all_gather_into_tensor(torch.ones(2 * MI), torch.ones(MI))
    assert gpu.kernels() == ["AllGatherLamport"]
    output = gpu.symmetric(32 * MI).view(torch.float32)
    gpu.all_gather_into_tensor(output, output[: 4 * MI])
    gpu.broadcast(output, 0)
    gpu.all_gather_into_tensor(torch.ones(16 * MI), output)
    assert gpu.kernels() == ["AllGatherLamport"] * 3
    gpu.set_thresholds(replace(DEFAULT, lamport_bytes=0, gather_push_bytes=MI))
    gpu.all_gather_into_tensor(output, output[: 4 * MI])
    gpu.broadcast(output, 0)
    assert gpu.kernels() == ["AllGatherPush"] * 2
    gpu.all_gather_into_tensor(torch.ones(16 * MI), output)
    gpu.all_gather_into_tensor(torch.ones(4 * MI), torch.ones(2 * MI))
    assert gpu.kernels() == ["AllGatherPull", "AllToAllStaged"]
    gpu.set_thresholds(DEFAULT)


BASE = 1 << 45


@pytest.fixture
def switched() -> Dry:
    """As if all ranks' heaps were mapped for multicast; the switch has what is 1 MiB and more."""
    gpu = Dry()
    gpu.mapped = BASE
    gpu.set_thresholds(replace(DEFAULT, multimem_bytes=MI, lamport_bytes=0))
    return gpu


def launched(gpu: Dry) -> tuple[str, bool]:
    """The kernel of the one call, and whether the switch serves it, which has the base then."""
    (kernel,) = gpu.launched
    gpu.launched.clear()
    served = getattr(kernel, "multimem", False)
    assert not served or gpu.given[0] == BASE
    return type(kernel).__name__, served


def test_the_switch_reduces(switched: Dry) -> None:
    one_shot, two_shot = ("ReduceScatterPull", True), ("AllReduceTwoShot", True)
    for num_bytes, start, dtype, op, expected in (
        (MI, 0, torch.bfloat16, "sum", one_shot),
        (MI + 8, 0, torch.bfloat16, "sum", two_shot),  # no whole vectors
        (4 * MI, 0, torch.bfloat16, "sum", two_shot),
        (4 * MI, 0, torch.float32, "avg", two_shot),
        (4 * MI, 0, torch.int32, "max", two_shot),
        (4 * MI, 0, torch.bool, "prod", two_shot),
        (4 * MI, 16, torch.bfloat16, "sum", two_shot),
        (4 * MI, 8, torch.bfloat16, "sum", ("AllReduceTwoShot", False)),  # off its boundaries
        (4 * MI, 0, torch.bfloat16, "max", ("AllReduceTwoShot", False)),  # not as we do
        (4 * MI, 0, torch.bfloat16, "avg", ("AllReduceTwoShot", False)),
        (32 * MI, 0, torch.float8_e5m2, "sum", ("AllReduceStaged", False)),  # a push
        (MI // 2, 0, torch.bfloat16, "sum", ("ReduceScatterLL", False)),
    ):
        switched.all_reduce(switched.symmetric(num_bytes, start).view(dtype), op)
        assert launched(switched) == expected, (num_bytes, start, dtype, op)
    switched.all_reduce(torch.ones(4 * MI))
    assert launched(switched) == ("AllReduceStaged", False)
    switched.all_reduce(switched.symmetric(MI).view(torch.int64))
    assert switched.given[:3] == (BASE, switched.messages.end, switched.heap.own_address + switched.messages.end)
    assert switched.launched[-1].same


def test_the_switch_reduces_and_scatters(switched: Dry) -> None:
    for num_bytes, start, dtype, expected in (
        (4 * MI, 0, torch.bfloat16, ("ReduceScatterPull", True)),
        (4 * MI + 8, 0, torch.bfloat16, ("ReduceScatterStaged", False)),  # part 1 is off its boundaries
        (4 * MI, 4, torch.bfloat16, ("ReduceScatterStaged", False)),
        (4 * MI, 0, torch.uint8, ("ReduceScatterStaged", False)),
        (MI // 2, 0, torch.bfloat16, ("ReduceScatterLL", False)),
    ):
        input = switched.symmetric(num_bytes, start).view(dtype)
        switched.reduce_scatter_tensor(torch.ones(len(input) // 2, dtype=dtype), input)
        assert launched(switched) == expected, (num_bytes, start, dtype)
    switched.reduce_scatter_tensor(torch.ones(MI), torch.ones(2 * MI))
    assert launched(switched) == ("ReduceScatterStaged", False)


def test_the_switch_gathers_and_broadcasts(switched: Dry) -> None:
    output = switched.symmetric(4 * MI)
    switched.all_gather_into_tensor(output, torch.ones(2 * MI, dtype=torch.uint8))
    assert launched(switched) == ("AllGatherPush", True)
    switched.all_gather_into_tensor(output, output[: 2 * MI], max_ctas=3)
    assert launched(switched) == ("AllGatherPush", True)
    assert switched.given[-1] == 3
    odd = switched.symmetric(4 * MI + 2)
    switched.broadcast(odd, 1)
    assert launched(switched) == ("AllGatherPush", True)
    switched.all_gather_into_tensor(odd, torch.ones(2 * MI + 1, dtype=torch.uint8))
    assert launched(switched) == ("AllToAllStaged", False)
    switched.broadcast(switched.symmetric(MI // 2), 0)
    assert launched(switched) == ("AllGatherLL", False)
    switched.all_to_all_single(output, torch.ones(4 * MI, dtype=torch.uint8))  # each gets something else
    assert launched(switched) == ("AllToAllStaged", False)
    switched.broadcast(torch.ones(4 * MI), 0)
    assert launched(switched) == ("AllToAllStaged", False)


def test_no_kernel_uses_the_switch_when_the_mapping_is_gone_or_nobody_asked_for_it(switched: Dry) -> None:
    tensor = switched.symmetric(4 * MI).view(torch.bfloat16)
    calls = [
        lambda: switched.all_reduce(tensor), lambda: switched.broadcast(tensor, 0),
        lambda: switched.reduce_scatter_tensor(tensor[: MI], tensor),
    ]  # fmt: skip
    served = [call() or launched(switched)[1] for call in calls]
    switched.mapped = 0  # the heap has grown, and the mapping could not
    switched.extend_multicast()
    refused = [call() or launched(switched)[1] for call in calls]
    switched.mapped = BASE
    switched.set_thresholds(DEFAULT)
    default = [call() or launched(switched)[1] for call in calls]
    assert (served, refused, default) == ([True] * 3, [False] * 3, [False] * 3)
    assert switched.multicast_base == 0


@pytest.mark.parametrize("wait", [True, False])
def test_multicast_ends_before_the_heap_and_stays_where_no_barrier_was(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, steps = Dry(), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: steps.append("device"))
    gpu._failure, gpu._state = None, None
    gpu.comm = SimpleNamespace(is_open=True, all_gather_bytes=lambda payload: [payload])  # type: ignore[assignment]
    gpu._alarm = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    gpu.multicast.close = lambda: steps.append("multicast")
    gpu.heap.close = lambda agree: steps.append("heap")
    gpu.close(wait)
    assert steps == (["device", "multicast", "heap"] if wait else ["device", "heap"])


def test_all_to_all(gpu: Dry) -> None:
    gpu.all_to_all_single(torch.ones(6), torch.ones(6))
    gpu.all_to_all_single(torch.ones(3, 2), torch.ones(4, 2), [1, 2], [3, 1])
    gpu.gather(torch.ones(3), [torch.ones(3), torch.ones(3)], 0)
    gpu.gather(torch.ones(3), None, 1)
    gpu.scatter(torch.ones(3), [torch.ones(3), torch.ones(3)], 0)
    gpu.scatter(torch.ones(3), None, 1)
    gpu.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    gpu.all_to_all([torch.ones(1), torch.ones(3)], [torch.ones(2), torch.ones(0)])
    assert gpu.kernels() == ["AllGatherLL"] + 7 * ["StoreWords", "AllToAllUneven"]
    same = gpu.symmetric(32 * MI).view(torch.float32)
    for gather_push_bytes, kernel in ((64 * MI, "AllGatherLamport"), (MI, "AllGatherPush")):
        gpu.set_thresholds(replace(DEFAULT, gather_push_bytes=gather_push_bytes))
        gpu.all_to_all_single(same, same)
        assert gpu.kernels() == [kernel]
    gpu.set_thresholds(DEFAULT)


def test_messages_and_barriers(gpu: Dry) -> None:
    gpu.send(torch.ones(3), 1)
    gpu.recv(torch.ones(0), 1)
    assert gpu.kernels() == ["Message", "Message"]
    for algorithm in ("all_to_all", "ring"):
        for protocol in ("epoch", "cas"):
            gpu.barrier(algorithm=algorithm, protocol=protocol)
    assert gpu.kernels() == 4 * ["Barrier"]
    gpu.swap_barrier(3, None)
    gpu.swap_signal(3, 1, True, None)
    gpu.swap_signal(3, 1, False, 0.5)
    assert gpu.kernels() == ["Barrier", "SwapSignal", "StoreWords", "SwapSignal", "StoreWords"]


def test_bad_arguments_launch_nothing(gpu: Dry) -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: gpu.all_reduce(torch.ones(4, 4).t()), ArgumentError, "contiguous"),
        (lambda: gpu.all_reduce([1.0]), ArgumentError, "must be a torch.Tensor"),
        (lambda: gpu.all_reduce(torch.ones(3), "mean"), ArgumentError, "op='mean'"),
        (lambda: gpu.all_reduce(torch.ones(3), []), ArgumentError, "not a reduction"),
        (lambda: gpu.all_reduce(torch.ones(3), "band"), DTypeError, "band"),
        (lambda: gpu.all_reduce(torch.ones(3, device="meta")), ArgumentError, "must be on device cpu, it is on meta"),
        (lambda: gpu.all_reduce(torch.ones(3).to_sparse()), ArgumentError, "dense"),
        (lambda: gpu.broadcast(torch.ones(3), 2), ArgumentError, "src=2"),
        (lambda: gpu.reduce(torch.ones(3), True), ArgumentError, "dst=True"),
        (lambda: gpu.all_gather_into_tensor(torch.ones(3), torch.ones(3)), ArgumentError, "expected 2 of output"),
        (lambda: gpu.all_to_all_single(torch.ones(3), torch.ones(3)), ArgumentError, "does not divide"),
        (lambda: gpu.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2]), ArgumentError, "add up to 3"),
        (lambda: gpu.send(torch.ones(1), 0), ArgumentError, "calling rank itself"),
        (lambda: gpu.barrier(algorithm="tree"), ArgumentError, "'tree'"),
        (lambda: gpu.barrier(timeout_s=-1.0), ArgumentError, "not positive"),
    ]
    for call, kind, words in bad:
        with pytest.raises(kind, match=words):
            call()
    assert gpu.kernels() == []


def test_prepared_calls_refuse_what_has_no_memory(gpu: Dry) -> None:
    """As FSDP leaves a parameter that it has resharded: a kernel would write to address 0."""
    gpu.all_reduce(torch.ones(100))
    assert gpu.kernels()
    emptied = torch.ones(100)
    emptied.untyped_storage().resize_(0)
    for call in (gpu.all_reduce, lambda tensor: gpu.broadcast(tensor, 0)):
        with pytest.raises(ArgumentError, match="has no memory"):
            call(emptied)
    assert gpu.kernels() == []


def test_prepared_calls_refuse_lazy_views(gpu: Dry) -> None:
    real, complex_, whole = torch.ones(100), torch.ones(4, dtype=torch.complex64), torch.ones(8, dtype=torch.complex64)
    negative, conjugate = torch._neg_view(real), complex_.conj()
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
        (gpu.all_reduce, real, negative),
        (lambda tensor: gpu.reduce(tensor, 0), real, negative),
        (lambda tensor: gpu.broadcast(tensor, 0), complex_, conjugate),
        (lambda tensor: gpu.all_gather_into_tensor(whole, tensor), complex_, conjugate),
        (lambda tensor: gpu.reduce_scatter_tensor(real[:50], tensor), real, negative),
        (lambda tensor: gpu.all_to_all_single(torch.ones(100), tensor), real, negative),
    ]
    for call, tensor, view in calls:
        call(tensor)
        assert gpu.kernels()
        with pytest.raises(ArgumentError, match="lazy conjugate or negative view"):
            call(view)
        assert gpu.kernels() == []


def test_freed_memory_is_no_longer_symmetric() -> None:
    gpu = Dry()
    whole = gpu.symmetric(4096)
    part = gpu.symmetric(64, 128)
    assert gpu.symmetric_offset(whole) >= 0
    assert gpu.symmetric_offset(part) >= 0
    gpu.drop_symmetric(gpu.symmetric_offset(whole), 4096)
    assert gpu.symmetric_offset(whole) == gpu.symmetric_offset(part) == -1
