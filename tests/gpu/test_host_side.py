"""The GPU side of communicators without a GPU: real ranks and heaps of the host's memory; CUDA and launches faked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass")

import symmcomm
from symmcomm import ClosedError, Communicator, DeviceError, MismatchError, PeerError, PeerTimeoutError, Settings
from symmcomm.errors import CudaError
from symmcomm.memory.handle import SymmetricHandle
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.multicast import MulticastUnavailableError
from symmcomm.memory.posix import PosixProvider
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import Phase
from symmcomm.schedule.topology_gpu import Attempt, GpuFacts
from symmcomm.testing.spawn import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is faked")
GOOD = Attempt(True, "fake")


class Event:
    """Counts who waited for one."""

    waits = 0

    def record(self, stream: object) -> None:
        """Any stream will do."""

    def wait(self, stream: object) -> None:
        Event.waits += 1


class Cuda:
    """A device whose copies are noted."""

    def __init__(self, _: int) -> None:
        self.driver = SimpleNamespace(CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1))
        self.copies: list[Any] = []

    def call(self, name: str, *args: Any) -> int:
        if name == "cuMemcpyHtoDAsync":
            self.copies.append(args)
        return 7

    undo = call


def facts(rank: int, **other: Any) -> GpuFacts:
    values: dict[str, Any] = {
        "device": GOOD, "host": "h", "ordinal": 0, "uuid": f"uuid {rank}", "name": "Fake", "num_sms": 132,
        "compute_capability": (9, 0), "granularity_bytes": 4096, "cuda_vmm": GOOD,
    }  # fmt: skip
    return GpuFacts(**values | other)


def fake(**other: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Puts fakes in place in this process; returns the list of launches to come."""
    import symmcomm.collectives.gpu_memory as memory
    import symmcomm.collectives.gpu_open as opening
    import symmcomm.kernels.gpu.compile as compiling

    launches: list[tuple[str, tuple[Any, ...]]] = []
    zeros, cuda, core = torch.zeros, vars(torch.cuda), vars(torch._C)
    own = facts(int(os.environ["RANK"]), **other)
    vars(opening)["probe_facts"] = lambda *_: own
    vars(memory).update(capturing=lambda: False, CudaDevice=Cuda, _provider=lambda *_: PosixProvider())
    vars(compiling)["compiled"] = lambda kernel, _: lambda *args: launches.append((type(kernel).__name__, args))
    cuda.update(
        is_available=lambda: True, current_device=lambda: 0, device=lambda _: contextlib.nullcontext(),
        set_device=lambda _: None, set_stream=lambda _: None, synchronize=lambda _=None: None,
        Stream=lambda **where: where, Event=Event,
    )  # fmt: skip
    core.update(
        _cuda_getCurrentRawStream=lambda _: core["stream"], _cuda_getDevice=lambda: -1, stream=0,
        _cuda_getCurrentStream=lambda _: (core["stream"], 0, 1), _cuda_setStream=lambda *_: None,
    )  # fmt: skip
    vars(torch)["zeros"] = lambda *args, pin_memory=False, **options: zeros(*args, **options)
    return launches


def make(**settings: Any) -> Communicator:
    """A communicator whose GPU side takes the host's tensors."""
    comm = symmcomm.init(device="cuda", settings=Settings(timeout_s=10, tuning="", **settings))
    gpu = comm.gpu_side
    gpu.device, gpu.ordinal = torch.device("cpu"), -1
    vars(comm)["gpu_on"] = lambda *_: gpu
    return comm


def calls() -> None:
    launches, comm = fake(), make()
    gpu, tensor = comm.gpu_side, torch.ones(100)
    assert (gpu.num_sms, gpu.arch, gpu.choice.provider) == (132, "sm_90a", "cuda_vmm")
    for _ in range(2):
        gpu.all_reduce(tensor)
    assert [name for name, _ in launches] == ["ReduceScatterLL"] * 2
    assert launches[0][1][:3] == (gpu.base, gpu.stride, comm.rank)
    vars(torch._C)["stream"] = 5
    gpu.all_reduce(tensor)
    gpu.all_reduce(tensor)
    assert Event.waits == 1
    assert launches[-1][1][-1] == 5
    launches.clear()
    with gpu.deadline(1.5):
        gpu.barrier()
    assert [(name, args[3:-1]) for name, args in launches] == [
        ("StoreWords", (at.TIMEOUT_NS, (1_500_000_000,))),
        ("Barrier", (0, 0)),
        ("StoreWords", (at.TIMEOUT_NS, (10_000_000_000,))),
    ]
    launches.clear()
    gpu.set_timeout(2.5)
    with gpu.deadline(1.5):
        pass
    stored = [args[4] for _, args in launches]
    assert stored == [(2_500_000_000,), (1_500_000_000,), (2_500_000_000,)]
    large = comm.empty(8 << 20, device="cuda")
    offset = gpu.symmetric_offset(large)
    assert offset == gpu.offset_of(large) > 0
    assert gpu.symmetric_offset(large[1:]) == -1 < gpu.offset_of(large[1:])
    child = comm.split(0, -comm.rank)
    assert child is not None
    assert child.gpu_side.facts == gpu.facts[::-1]
    child.close()
    comm.close()
    comm.close()
    with pytest.raises(ClosedError):
        gpu.all_reduce(tensor)


def test_calls() -> None:
    run_ranks(calls, 2)


def compared() -> None:
    launches = fake()
    with make(check=True) as comm:
        gpu, rank = comm.gpu_side, comm.rank
        x, y = torch.ones(8), torch.ones(4)
        differ: list[tuple[Callable[[], None], str]] = [
            (lambda: gpu.all_reduce(x[: 4 + rank]), r"all_reduce\(tensor=4 of torch.float32, op=sum"),
            (lambda: gpu.all_reduce((x, x.int())[rank]), "tensor=8 of torch.int32, op=sum"),
            (lambda: gpu.all_reduce(x, ("sum", "max")[rank]), "op=max"),
            (lambda: gpu.broadcast(x, rank), r"broadcast\(tensor=8 of torch.float32, src=1\)"),
            (lambda: gpu.reduce(x, rank), "dst=1"),
            (lambda: gpu.reduce_scatter_tensor(y, x, ("avg", "sum")[rank]), "op=avg"),
            (lambda: gpu.all_to_all_single(x, y.repeat(2), *([[4, 4]] * 2 * rank)), "with split sizes"),
            (lambda: gpu.barrier(algorithm=("ring", "all_to_all")[rank]), "algorithm='ring'"),
            (lambda: gpu.broadcast(x, 0) if rank else gpu.all_gather_into_tensor(x, y), "all_gather_into_tensor"),
        ]
        for call, words in differ:
            with pytest.raises(MismatchError, match=words):
                call()
        assert not launches
        gpu.all_reduce(x, ("sum", dist.ReduceOp.SUM)[rank])
        gpu.all_to_all_single(x, x.clone(), [3 + rank, 5 - rank], [3 + rank, 5 - rank])
        gpu.barrier()
        assert [name for name, _ in launches] == ["ReduceScatterLL", "StoreWords", "AllToAllUneven", "Barrier"]


def test_calls_are_compared_if_asked() -> None:
    run_ranks(compared, 2)


class Space:
    """In place of a ``MulticastSpace``: notes what becomes of it. It refuses a heap of more than ``most`` segments."""

    steps: ClassVar[list[str]] = []
    most = 2

    def __init__(self, _device: object, heap: SymmetricHeap, *_: object) -> None:
        self.heap, self.base = heap, 1 << 45

    def extend(self, agree: Callable[[bytes], list[bytes]]) -> None:
        agree(b"multicast")  # all ranks come
        self.steps.append(f"extend to {len(self.heap.segments)}")
        if len(self.heap.segments) > self.most:
            raise MulticastUnavailableError("multicast is not used: rank 1: full")

    def close(self) -> None:
        self.steps.append(f"close, {len(self.heap.segments)} in the heap")


def with_multicast(allowed: bool, most: int) -> list[str]:
    import symmcomm.memory.multicast as module

    rank = int(os.environ["RANK"])
    launches = fake(multicast=Attempt(allowed or rank == 0, "the gate's word"))
    vars(module)["MulticastSpace"], Space.most = Space, most
    comm = make()
    gpu = comm.gpu_side
    assert (Space.steps, gpu.multicast_base) == ([], 0)  # nobody asks for it
    gpu.set_thresholds(replace(gpu.thresholds, multimem_bytes=1 << 20, lamport_bytes=0))
    assert gpu.multicast_base == (1 << 45 if allowed and most else 0)
    tensor = comm.empty(40 << 20, dtype=torch.uint8, device="cuda")
    handle = SymmetricHandle(gpu, gpu.offset_of(tensor), tensor.nbytes)
    served = allowed and most > 1
    assert handle.multicast_ptr == (gpu.multicast_base + gpu.offset_of(tensor) if served else 0)
    gpu.all_reduce(tensor.view(torch.int32))
    assert (launches[-1][1][3] == gpu.multicast_base) == served  # the first argument behind the rank's place
    assert launches[-1][0] == ("AllReduceTwoShot" if served else "AllReduceStaged")
    if not allowed:
        assert gpu.multicast.allowed.reason == "rank 1: the gate's word"
    comm.close()
    return Space.steps


def test_multicast_follows_the_heap() -> None:
    for allowed, most, steps in (
        (True, 2, ["extend to 1", "extend to 2", "close, 2 in the heap"]),
        (True, 1, ["extend to 1", "extend to 2", "close, 2 in the heap"]),  # what there was stays until then
        (True, 0, ["extend to 1", "close, 2 in the heap"]),
        (False, 2, []),
    ):
        for result in run_ranks(with_multicast, 2, allowed, most):
            assert result.value == steps


def leave(comm: Communicator, phase: Phase, failed: int) -> None:
    """A record, as a kernel that waited for the other rank leaves it."""
    gpu = comm.gpu_side
    assert gpu._state is not None
    gpu._state[:1].view(torch.int32)[0] = failed
    gpu._record[1:7] = torch.tensor([comm.rank, 1 - comm.rank, 3, 100, 50, phase])
    gpu._record[0] = 1


def records() -> str:
    fake()
    comm = make()
    gpu, tensor = comm.gpu_side, torch.ones(100)
    import symmcomm.collectives.gpu_memory as memory

    leave(comm, Phase.splits, at.COMPLAINED)
    for in_capture in (True, False):  # in one nothing can be forgiven
        vars(memory)["capturing"] = lambda is_so=in_capture: is_so
        with pytest.raises(MismatchError, match=rf"rank {comm.rank} counts 100 bytes .*{1 - comm.rank}, which .* 50"):
            gpu.all_reduce(tensor)
    gpu.all_reduce(tensor)  # it was forgiven
    comm.barrier()
    if comm.rank == 0:
        leave(comm, Phase.data, at.GAVE_UP)
        for _ in range(2):
            with pytest.raises(PeerTimeoutError, match=r"phase data, channel 3.*expected signal 100, saw 50") as error:
                gpu.check()
        assert error.value.rank == 1
    with pytest.raises(PeerError) as ended:
        comm.barrier()
    with pytest.raises(PeerError):
        gpu.all_reduce(tensor)
    time.sleep(1.2)
    assert comm.rank == 0 or gpu.cuda_device.copies  # what waits on rank 1 was told to stop
    comm.close()
    return str(ended.value)


def test_records_become_errors() -> None:
    words = [result.value for result in run_ranks(records, 2)]
    assert words[1].startswith("rank 0 gave up") or "reported by rank 0" in words[1]


def interrupted() -> None:
    fake()
    comm = make()
    if comm.rank == 0:
        comm.gpu_side.interrupt()
        address, _, size, _ = comm.gpu_side.cuda_device.copies[0]
        assert (address, size) == (comm.gpu_side.heap.own_address + at.TIMEOUT_NS, 8)
    comm.close()


def test_what_waits_can_be_interrupted() -> None:
    run_ranks(interrupted, 2)


class Fails(PosixProvider):
    """Cannot map what rank 1 offers."""

    def map(self, address: int, num_bytes: int, offer: Any) -> int:
        if os.environ["RANK"] == "0":
            raise CudaError("cuMemImportFromShareableHandle: no way", "CUDA_ERROR_NOT_SUPPORTED")
        return super().map(address, num_bytes, offer)


def another_way(num_working: int) -> str:
    """Memory that turns out not to be shared in the first way."""
    import symmcomm.collectives.gpu_memory as memory

    fake(fabric=GOOD)
    providers = [Fails(), PosixProvider() if num_working else Fails()]
    vars(memory)["_provider"] = lambda *_: providers.pop(0)
    if not num_working:
        with pytest.raises(DeviceError) as error:
            make()
        return str(error.value)
    with make() as comm:
        assert [name for name, _ in comm.gpu_side.choice.refused] == ["cuda_vmm"]
        return comm.gpu_side.choice.provider or ""


def test_memory_is_shared_in_the_next_way_that_works() -> None:
    assert [result.value for result in run_ranks(another_way, 2, 1)] == ["fabric"] * 2


def test_memory_that_cannot_be_shared_in_any_way() -> None:
    mine, theirs = (result.value for result in run_ranks(another_way, 2, 0))
    assert "cuda_vmm: rank 0: it was tried between the ranks: cuMemImportFromShareableHandle: no way" in mine
    assert "fabric: rank 0: it was tried between the ranks: symmetric heap of rank 0: CudaError: " in theirs


def by_pcie() -> None:
    fake(links={"uuid 0": 0, "uuid 1": 0})
    with make() as comm:
        thresholds = comm.gpu_side.thresholds
        assert (thresholds.lamport_bytes, thresholds.ll_bytes, thresholds.all_reduce_ll_bytes) == (0, 0, 0)


def test_kernels_that_need_whole_vectors_are_not_for_pcie() -> None:
    run_ranks(by_pcie, 2)


def complaint_before_a_timeout() -> str:
    """What waits that gave up after a complaint, which keeps its record."""
    fake()
    comm = make()
    gpu = comm.gpu_side
    if comm.rank == 0:
        leave(comm, Phase.splits, at.GAVE_UP)
        for call in (gpu.check, gpu.check, lambda: gpu.all_reduce(torch.ones(100))):  # it is not forgiven
            with pytest.raises(MismatchError, match=r"rank 0 counts 100 bytes .* 1, which counts 50; a wait gave up"):
                call()
    with pytest.raises(PeerError if comm.rank else MismatchError) as ended:
        comm.barrier()
    comm.close()
    return str(ended.value)


def test_a_complaint_is_told_as_one_though_a_wait_gave_up_since() -> None:
    words = [result.value for result in run_ranks(complaint_before_a_timeout, 2)]
    assert "split sizes" in words[1]


def refused(other: dict[str, Any]) -> str:
    fake(**other)
    with pytest.raises(DeviceError) as error:
        make()
    comm = symmcomm.init()
    comm.barrier()
    comm.close()
    return str(error.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"uuid": "one"}, "ranks 0 and 1 use the same GPU (Fake, one)"),
        ({"compute_capability": (7, 5)}, "rank 0: Fake has compute capability 7.5, the kernels need 8.0"),
        ({"cuda_vmm": Attempt(False, "no VMM")}, "GPU memory cannot be shared: cuda_vmm: rank 0: no VMM"),
        ({"peers": {"uuid 1": Attempt(False, "no P2P")}}, "the GPU of rank 0 cannot reach that of rank 1: no P2P"),
        ({"device": Attempt(False, "of another vendor")}, "rank 0 has no usable GPU: of another vendor"),
    ],
)
def test_devices_that_do_not_do(other: dict[str, Any], words: str) -> None:
    for result in run_ranks(refused, 2, other):
        assert words in result.value
