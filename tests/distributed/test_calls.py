"""Every call of torch.distributed gives on symm what it gives on gloo, and what gloo lacks is right as well."""

from __future__ import annotations

import warnings
from functools import partial

import calls
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from symmcomm.distributed import symm_mem
from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.testing.spawn import run_ranks

warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its calls; the old names must work


def compare_all(backend: str) -> None:
    dist.init_process_group(backend)
    symm, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(symm, SymmProcessGroup)
    failed = []
    for name, call in calls.all_calls():
        got = call(symm)
        if " 0 elements" in name:  # gloo fails in some of these
            continue
        expected = call(gloo)
        if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
            failed.append(name)
    assert not failed, failed
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_as_gloo(world_size: int) -> None:
    run_ranks(compare_all, world_size, "symm", timeout_s=200)


@pytest.mark.parametrize("backend", ["cpu:symm", "cpu:symm,cuda:symm", "SYMM"])
def test_names(backend: str) -> None:
    run_ranks(compare_name, 2, backend)


def compare_name(backend: str) -> None:
    dist.init_process_group(backend)
    group = dist.group.WORLD
    assert isinstance(group, SymmProcessGroup)
    assert group.name() == "symm"
    assert dist.get_backend() in ("symm", backend)
    assert dist.get_backend(dist.new_group([0, 1])) in ("symm", backend)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()


def _scatters(op: dist.ReduceOp, async_op: bool) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return options


def beyond_gloo() -> None:
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = dist.ReduceOp

    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor, ops.AVG)
    assert tensor.tolist() == [(size - 1) / 2] * 5

    for scaled in (dist._make_nccl_premul_sum(0.5), dist._make_nccl_premul_sum(torch.tensor(0.5))):
        for async_op in (False, True):
            tensor = torch.full((5,), float(rank + 1))
            calls.wait(dist.all_reduce(tensor, scaled, async_op=async_op))
            assert tensor.tolist() == [size * (size + 1) / 4] * 5
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, torch.full((2 * size,), 4.0), dist._make_nccl_premul_sum(0.25))
    assert output.tolist() == [size, size]

    for op, expected in ((ops.AVG, 1 + 2j), (dist._make_nccl_premul_sum(0.5), size * (1 + 2j) / 2)):
        for async_op in (False, True):
            tensor, part = torch.full((size,), 1 + 2j), torch.zeros(1, dtype=torch.complex64)
            calls.wait(dist.group.WORLD.reduce_scatter_single(part, tensor, _scatters(op, async_op)))
            dist.group.WORLD.allreduce([tensor], op).wait()
            assert [*tensor.tolist(), *part.tolist()] == [expected] * (size + 1)
    collected = [torch.zeros(3, dtype=torch.complex64) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((3,), rank + 2j), collected)
    assert all((part == peer + 2j).all() for peer, part in enumerate(collected or []))

    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.bool):
        tensor = torch.ones(5).to(dtype)
        dist.all_reduce(tensor, ops.MAX)
        assert tensor.float().tolist() == [1.0] * 5

    stacked = torch.zeros(size, 3)
    dist.all_gather_into_tensor(stacked, torch.full((3,), float(rank)))
    assert stacked[:, 0].tolist() == list(range(size))

    uneven = [torch.zeros(peer + 1, 2) for peer in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)))
    assert all((part == peer).all() for peer, part in enumerate(uneven))

    inputs = [torch.full((peer + 1,), float(rank)) for peer in range(size)]
    output = torch.zeros(rank + 1)
    dist.reduce_scatter(output, inputs)
    assert output.tolist() == [size * (size - 1) / 2] * (rank + 1)

    parameter = torch.nn.Parameter(torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last))
    dist.broadcast(parameter, size - 1)
    assert (parameter == size - 1).all()
    parameters = [torch.nn.Parameter(torch.zeros(peer + 1, 2).t()) for peer in range(size)]
    dist.all_gather(parameters, torch.full((2, rank + 1), float(rank)))
    assert all((part == peer).all() for peer, part in enumerate(parameters))

    outputs = [torch.zeros(peer + 2 * rank) for peer in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + 2 * peer,), float(rank)) for peer in range(size)])
    assert all((part == peer).all() for peer, part in enumerate(outputs))
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_beyond_gloo(world_size: int) -> None:
    run_ranks(beyond_gloo, world_size)


def views() -> None:
    """Tensors that are not contiguous, as inputs and as outputs."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    for async_op in (False, True):
        for call, expected in (
            (partial(dist.all_reduce, async_op=async_op), size * (size - 1) / 2),
            (partial(dist.broadcast, src=1, async_op=async_op), 1.0),
        ):
            tensor = torch.full((4, 6), float(rank)).t()
            calls.wait(call(tensor))
            assert not tensor.is_contiguous()
            assert (tensor == expected).all()
    tensor = torch.zeros(6, 4)[:, ::2]
    if rank == 0:
        dist.send(torch.arange(12.0).view(2, 6).t(), 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        assert torch.equal(tensor, torch.arange(12.0).view(2, 6).t())
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    gathered = [torch.zeros(3, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([gathered], [conjugate]).wait()
    assert gathered[0].tolist() == [1 - 1j] * 3
    dist.destroy_process_group()


def test_views() -> None:
    run_ranks(views, 2)


def bare_methods() -> None:
    """Methods of the group as some libraries call them, without options."""
    dist.init_process_group("symm")
    group, size = dist.group.WORLD, dist.get_world_size()
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    group.allreduce(tensor).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert tensor.tolist() == [size * size] * 3
    group.barrier().wait()
    output = torch.zeros(3 * size)
    group._allgather_base(output, tensor).wait()
    assert output.tolist() == [size * size] * 3 * size
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([tensor])
    group._allgather_base(output, tensor)
    group._end_coalescing(torch.device("cpu")).wait()
    assert output.tolist() == [size**3] * 3 * size
    assert group.get_group_store() is not None
    assert (group.rank(), group.size()) == (dist.get_rank(), size)
    dist.destroy_process_group()


def test_bare_methods() -> None:
    run_ranks(bare_methods, 2)


def profiled() -> None:
    """A call's event ends with the call, so that who waited for the one may stop recording the other."""
    dist.init_process_group("symm")
    for async_op in (False, True):
        for _ in range(40):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                calls.wait(dist.all_reduce(torch.ones(3), async_op=async_op))
                calls.wait(dist.barrier(async_op=async_op))
            names = [event.name for event in profiler.events() if event.name.startswith("symm:")]
            assert sorted(names) == ["symm:all_reduce", "symm:barrier"]
    dist.destroy_process_group()


def test_profiled() -> None:
    run_ranks(profiled, 3)


def default_device() -> None:
    """torch's default device is for the user's tensors, not for ours."""
    with torch.device("meta"):
        dist.init_process_group("symm")
        group = dist.new_group([0, 1])
        for tensor in (torch.ones(3, device="cpu"), symm_mem.empty(3, device="cpu").fill_(1)):
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0] * 3
        symm_mem.rendezvous(tensor, group).barrier()
        dist.monitored_barrier()
        if dist.get_rank() == 0:
            dist.send(torch.ones(3, device="cpu"), 1, tag=2)
            dist.send(torch.zeros(3, device="cpu"), 1, tag=1)
        else:
            for tag in (1, 2):
                dist.recv(tensor, 0, tag=tag)
                assert tensor.tolist() == [tag - 1.0] * 3
        dist.destroy_process_group()


def test_default_device() -> None:
    run_ranks(default_device, 2)
