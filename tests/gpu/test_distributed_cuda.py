"""The backend ``cpu:symm,cuda:symm`` on two GPUs: every call against gloo on the CPU, training against NCCL, streams,
CUDA graphs, and what is left to NCCL. On one GPU, which the two ranks share, without NCCL, which refuses that: training
is then compared with gloo on the CPU."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import NEEDS_GPU, NUM_GPUS, take_gpu

from symmcomm import ArgumentError, DeviceError
from symmcomm.collectives import gpu_open
from symmcomm.distributed import symm_mem
from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.errors import SymmCommError
from symmcomm.fused.rows import row_slice
from symmcomm.testing.spawn import RankResult
from tests.distributed import calls, norm_blocks, training
from tests.fused.rows import EPS, check, check_scaled, expected, problem

pytest.importorskip("cutlass")
pytestmark = NEEDS_GPU

BACKEND = "cpu:symm,cuda:symm"
SHARED = NUM_GPUS < 2
CPU_ONLY = ("sparse", "tags", "any source", "objects")  # NCCL knows no tags; objects travel by the CPU in any case
BY_NCCL = ("exchange", "pipeline", "ddp, PowerSGD hook") if SHARED else ()  # left out then; the hook asks for CUDA
REFERENCE, REFERENCE_DEVICE = ("gloo", "cpu") if SHARED else ("nccl", "cuda")
needs_nccl = pytest.mark.skipif(SHARED, reason="NCCL needs a GPU for each rank")


def start(body: Callable[..., Any], *args: Any, fresh: bool = False) -> list[RankResult]:
    """Runs the body on both ranks. Those that share a GPU take turns on it, by the driver's time slices."""
    return ranks.start(body, 2, *args, fresh=fresh, env={"SYMMCOMM_SHARE_GPU": "1"} if SHARED else {})


def set_device() -> None:
    take_gpu(int(os.environ["LOCAL_RANK"]) % NUM_GPUS)


@contextmanager
def world(backend: str = BACKEND) -> Iterator[SymmProcessGroup]:
    warnings.simplefilter("ignore")
    set_device()
    with training.process_group(backend) as group:
        yield group
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # the context is alive


def every_call() -> list[str]:
    """Names of the calls that gave another result than gloo on the CPU."""
    failed = []
    with world() as symm:
        gloo = dist.new_group(backend="gloo")
        for name, call in calls.all_calls():
            if name.startswith(CPU_ONLY + BY_NCCL) or " 0 elements" in name:
                continue
            with torch.device("cuda"):
                got = [tensor.cpu() for tensor in call(symm)]
            expected = call(gloo)
            if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                failed.append(name)
        assert symm.comm.gpu is not None
    return failed


@pytest.mark.slow
def test_every_call() -> None:
    assert [result.value for result in start(every_call)] == [[], []]


def empty_and_uneven() -> None:
    with world() as symm, torch.device("cuda"):
        rank, size = symm.rank(), symm.size()
        dist.all_reduce(torch.zeros(0))
        dist.all_gather([torch.zeros(0)] * size, torch.zeros(0))
        uneven = [torch.zeros(peer + 1, 2) for peer in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
        assert all((part == peer).all() for peer, part in enumerate(uneven))
        outputs = [torch.zeros(peer + 2 * rank) for peer in range(size)]
        dist.all_to_all(outputs, [torch.full((rank + 2 * peer,), float(rank)) for peer in range(size)])
        assert all((part == peer).all() for peer, part in enumerate(outputs))
        for later in (False, True):
            tensor = torch.full((4, 6), float(rank)).t()  # not contiguous
            calls.wait(dist.all_reduce(tensor, async_op=later))
            assert (tensor == 1).all()
            tensor = torch.full((5,), float(rank + 1))
            calls.wait(dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), async_op=later))
            assert (tensor == 1.5).all()
        half = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
        dist.all_reduce(half, dist.ReduceOp.AVG)
        assert (half == 1.5).all()


def test_empty_and_uneven() -> None:
    start(empty_and_uneven)


def trained(names: list[str]) -> None:
    results: list[dict[str, training.Results]] = []
    for backend, device in ((REFERENCE, REFERENCE_DEVICE), (BACKEND, "cuda")):
        with world(backend), torch.device(device):
            results.append({name: [tensor.cpu() for tensor in training.SCENARIOS[name]()] for name in names})
    training.check_same(*results)


@pytest.mark.parametrize("family", training.FAMILIES)
def test_training(family: str) -> None:
    names = [name for name in training.SCENARIOS if name.startswith(training.FAMILIES[family])]
    start(trained, [name for name in names if not name.startswith(BY_NCCL)], fresh=True)


def asynchronous() -> None:
    """Calls beside computations, dropped tensors, other streams, a late rank; results must be those of the order."""
    with world() as symm, torch.device("cuda"):
        rank, size = symm.rank(), symm.size()
        total = size * (size + 1) / 2
        for round_ in range(20):
            if round_ % size == rank:
                torch.cuda._sleep(2_000_000)
            tensors = [torch.full((count,), rank + 1.0) for count in (3, 1000, 300_000, 5_000_000)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            now = torch.full((100,), rank + 1.0)
            dist.all_reduce(now)  # on the current stream, while the others run on theirs
            for work in works[::-1]:
                work.wait()
            assert all((tensor == total).all() for tensor in [*tensors, now])
            assert all(work.is_completed() and work.is_success() for work in works)

            parts = [torch.zeros(1 << 20) for _ in range(size)]
            work = dist.all_gather(parts, torch.full((1 << 20,), float(rank)), async_op=True)  # whose input is dropped
            rubbish = [torch.full((1 << 20,), -1.0) for _ in range(4)]  # may take its place, after the call
            work.wait()
            assert all((part == peer).all() for peer, part in enumerate(parts)), rubbish

            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                dist.all_reduce(now, dist.ReduceOp.MAX)
                doubled = now * 2
            torch.cuda.current_stream().wait_stream(other)
            assert (doubled == 2 * total).all()

            future = dist.all_reduce(tensors[1], async_op=True).get_future()
            halved = future.then(lambda done: done.value()[0] / 2).wait()
            assert (halved == total * size / 2).all()


def test_asynchronous() -> None:
    start(asynchronous)


def captured() -> None:
    with world() as symm, torch.device("cuda"):
        rank, size = symm.rank(), symm.size()
        source, gathered = torch.zeros(5000), torch.zeros(5000 * size)
        large = torch.zeros(1 << 20)

        def step() -> torch.Tensor:
            work = dist.all_reduce(large, async_op=True)
            doubled = source * 2
            dist.all_reduce(doubled)
            then = dist.all_gather_into_tensor(gathered, doubled + rank, async_op=True)
            work.wait()
            then.wait()
            return gathered + large[0]

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for round_ in range(10):
            source.fill_(round_ + rank)
            large.fill_(rank)
            if round_ % size == rank:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            summed = 2 * (size * round_ + size * (size - 1) / 2)
            expected = torch.cat([torch.full((5000,), summed + peer) for peer in range(size)]) + size * (size - 1) / 2
            assert torch.equal(result, expected)
            eager = torch.ones(7)  # calls outside the graph, between its replays
            dist.all_reduce(eager)
            assert (eager == size).all()


def test_captured() -> None:
    start(captured)


def captured_at_first() -> None:
    with world(), torch.device("cuda"):
        group, tensor = dist.new_group([0, 1]), torch.ones(3)
        with pytest.raises(ArgumentError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()


def test_first_call_is_not_captured() -> None:
    start(captured_at_first)


def refused() -> list[str]:
    """GPUs that cannot share memory: all calls go to NCCL, and rank 0 says why."""

    def refuse(*_: object) -> None:
        raise DeviceError("no two GPUs here know each other")

    gpu_open.open_gpu = refuse
    with world() as symm, warnings.catch_warnings(record=True) as caught, torch.device("cuda"):
        warnings.simplefilter("always")
        tensor, gathered = torch.ones(3), torch.zeros(6)
        dist.all_reduce(tensor)
        calls.wait(dist.all_reduce(tensor, async_op=True))
        dist.all_gather_into_tensor(gathered, tensor)
        assert (gathered == 4).all()
        on_cpu = torch.ones(3, device="cpu")
        dist.all_reduce(on_cpu)
        assert (on_cpu == 2).all()
        assert symm.comm.gpu is None
    return [str(warning.message) for warning in caught if "NCCL" in str(warning.message)]


@needs_nccl
def test_refused() -> None:
    told, silent = (result.value for result in start(refused, fresh=True))
    assert len(told) == 1
    assert "no two GPUs here know each other" in told[0]
    assert not silent


def operators(backend: str) -> None:
    with world() as symm, torch.device("cuda"):
        name, rank = symm.group_name, symm.rank()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = torch.ops.symmcomm.all_reduce(x * 2, "sum", name)
            z = torch.ops.symmcomm.all_gather_into_tensor(y + 1, name)
            return torch.ops.symmcomm.barrier(torch.ops.symmcomm.reduce_scatter_tensor(z, "sum", name), name)

        compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(step, backend=backend, fullgraph=True)
        x = torch.full((4, 3), rank + 1.0, requires_grad=True)
        for function in (step, compiled):
            result = function(x)
            assert (result == 2 * (2 * 3 + 1)).all()
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert (gradient == 8).all()  # the losses are 2 y of rank 0 plus 2 y of rank 1; y is 2 x, summed


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_operators(backend: str) -> None:
    start(operators, backend, fresh=backend == "inductor")


def aborted() -> float:
    """Rank 0 gives a group up while its kernel waits for rank 1, which never comes."""
    with world():
        group, tensor = dist.new_group([0, 1]), torch.ones(1000, device="cuda")
        assert isinstance(group, SymmProcessGroup)
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        group.set_timeout(timedelta(seconds=70))
        assert group.comm.gpu_side.timeout_s == 70
        began = time.monotonic()
        if group.rank() == 0:
            dist.all_reduce(tensor, group=group, async_op=True)
            time.sleep(0.2)
            group.abort()
        waited = time.monotonic() - began
        dist.barrier()
        return waited


def test_abort() -> None:
    assert start(aborted, fresh=True)[0].value < 20


def fused_norms() -> None:
    """The graph pass, on tensors of the GPU; and the other operators beside the one that it puts in."""
    with world() as symm:
        reduces, norms = (norm_blocks.reduced, norm_blocks.viewed), (norm_blocks.library, norm_blocks.llama)
        norm_blocks.check_fused(symm, "cuda", torch.bfloat16, reduces, norms)
        ops, name = torch.ops.symmcomm, symm.group_name
        p = problem(7, 64, torch.bfloat16, symm.size())
        x, mine, right = p.inputs[symm.rank()].cuda(), row_slice(7, symm.rank(), 2), expected(*p[:3])
        residual, weight = p.residual.cuda(), p.weight.cuda()
        own = expected([whole[mine] for whole in p.inputs], p.residual[mine], p.weight)
        small, new, scales = ops.all_reduce_rms_norm_float8(x, residual, weight, EPS, name)
        check_scaled(small.cpu(), scales.cpu(), right, "float8")
        assert torch.equal(new.cpu(), p.new_residual)
        for operator, result in ((ops.reduce_scatter_rms_norm_all_gather, right), (ops.reduce_scatter_rms_norm, own)):
            out, new = operator(x, residual[mine], weight, EPS, 8, name)
            check(out.cpu(), result, str(operator))
            assert torch.equal(new.cpu(), p.new_residual[mine])


def test_fused_norms() -> None:
    start(fused_norms)


def symmetric_memory() -> None:
    """As the tutorials of torch's symmetric memory do it."""
    with world() as symm:
        rank, size, peer = symm.rank(), symm.size(), 1 - symm.rank()
        tensor = symm_mem.empty(4, 8, dtype=torch.bfloat16, device="cuda").fill_(rank)
        handle = symm_mem.rendezvous(tensor, symm)
        assert (tensor == rank).all()
        assert handle.buffer_ptrs[rank] == tensor.data_ptr()
        assert (handle.device, handle.rank, handle.world_size) == (tensor.device, rank, size)
        handle.barrier()
        assert (handle.get_buffer(peer, (4, 8), torch.bfloat16) == peer).all()
        handle.barrier(channel=1)
        handle.get_buffer(peer, (4, 8), torch.bfloat16)[0] = 100 + rank
        handle.barrier()
        assert (tensor[0] == 100 + peer).all()
        handle.put_signal(dst_rank=peer)
        handle.wait_signal(src_rank=peer)
        dist.all_reduce(tensor.fill_(rank + 1))
        assert (tensor == 3).all()
        assert symm_mem.is_symm_mem_tensor(tensor)
        again = symm_mem.rendezvous(tensor, dist.new_group([0, 1]))
        again.barrier()
        assert (again.get_buffer(peer, (4, 8), torch.bfloat16) == 3).all()
        torch.cuda.synchronize()


def test_symmetric_memory() -> None:
    start(symmetric_memory)


def many_groups() -> None:
    with world(), torch.device("cuda"):
        free = 0
        for number in range(12):
            group, tensor = dist.new_group([0, 1]), torch.ones(10_000)
            dist.all_reduce(tensor, group=group)
            calls.wait(dist.all_reduce(tensor, group=group, async_op=True))
            assert (tensor == 4).all()
            dist.destroy_process_group(group)
            dist.barrier()
            if number == 2:
                free = torch.cuda.mem_get_info()[0]
        assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.alone
def test_groups_leak_nothing() -> None:
    start(many_groups)


def late() -> str:
    """A rank that does not come: the others raise once the deadline is over, and their GPUs go on."""
    set_device()
    dist.init_process_group(BACKEND)
    dist.all_reduce(torch.ones(3, device="cuda"))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=8))
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    text = ""
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        torch.cuda.synchronize()
        with pytest.raises(SymmCommError) as caught:
            work.wait()
        text = str(caught.value)
    dist.barrier()
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    return text


def test_late_rank_is_named() -> None:
    assert "rank 1" in start(late, fresh=True)[0].value
