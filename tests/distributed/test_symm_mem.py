"""Code written for torch's symmetric memory runs with an import changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import symmcomm.distributed.symm_mem as symm_mem
from symmcomm import ArgumentError, MismatchError
from symmcomm.testing.spawn import run_ranks


def exchange() -> None:
    """As the tutorials do it."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = symm_mem.empty(4, 8, dtype=torch.bfloat16, device="cpu").fill_(rank)
    assert not symm_mem.is_symm_mem_tensor(tensor)
    handle = symm_mem.rendezvous(tensor, group=dist.group.WORLD)
    assert symm_mem.is_symm_mem_tensor(tensor)
    assert (tensor == rank).all()  # moved with its contents

    assert (handle.rank, handle.world_size) == (rank, size)
    assert handle.buffer_size == tensor.nbytes
    assert len(handle.buffer_ptrs) == len(handle.signal_pad_ptrs) == size
    assert handle.buffer_ptrs[rank] == tensor.data_ptr()
    assert handle.multicast_ptr == 0
    assert handle.buffer_ptrs_dev != 0
    assert handle.signal_pad_ptrs_dev != 0
    assert handle.device == tensor.device
    assert handle.offset == 0
    strides = {handle.buffer_ptrs[peer] - peer * handle._owner.heap.stride for peer in range(size)}
    assert len(strides) == 1  # every peer's copy at a fixed distance

    peer = (rank + 1) % size
    handle.barrier()
    assert (handle.get_buffer(peer, (4, 8), torch.bfloat16) == peer).all()
    assert (handle.get_remote_tensor(peer, (4, 8), torch.bfloat16) == peer).all()
    assert handle.get_buffer(peer, (2,), torch.bfloat16, 30).tolist() == [peer, peer]
    handle.barrier(channel=1, timeout_ms=10_000)
    handle.get_buffer(peer, (4, 8), torch.bfloat16)[0] = 100 + rank
    handle.barrier()
    assert (tensor[0] == 100 + (rank - 1) % size).all()
    assert (tensor[1:] == rank).all()

    for channel in (0, 3):
        handle.put_signal(dst_rank=peer, channel=channel)
        handle.wait_signal(src_rank=(rank - 1) % size, channel=channel)
    handle.barrier()  # all signals are taken
    assert handle.get_signal_pad(peer).dtype is torch.uint32
    assert handle.get_signal_pad(peer, (4,), dtype=torch.int32, storage_offset=4 * size).tolist() == [0] * 4

    dist.all_reduce(tensor.fill_(rank))  # in place, nothing is copied
    assert (tensor == size * (size - 1) / 2).all()
    again = symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
    assert again.buffer_ptrs == handle.buffer_ptrs
    with pytest.raises(ArgumentError, match="rank=9 is not a rank"):
        handle.get_buffer(9, (1,), torch.bfloat16)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange(world_size: int) -> None:
    run_ranks(exchange, world_size)


def groups() -> None:
    dist.init_process_group("symm")
    rank = dist.get_rank()
    pair, _ = dist.new_subgroups(2)
    odd = dist.new_group([1, 3])

    # One tensor, two groups: the larger first.
    tensor = symm_mem.empty(16).fill_(rank)
    world = symm_mem.rendezvous(tensor, dist.group.WORLD)
    small = symm_mem.rendezvous(tensor, pair)
    assert (small.rank, small.world_size) == (rank % 2, 2)
    other = rank ^ 1
    assert small.buffer_ptrs[1 - small.rank] == world.buffer_ptrs[other]
    small.barrier()
    assert (small.get_buffer(1 - small.rank, (16,), torch.float32) == other).all()
    small.barrier()

    # A tensor of some ranks only: the others do nothing.
    if rank in (1, 3):
        own = symm_mem.empty(8, dtype=torch.int64)
        handle = symm_mem.rendezvous(own, odd)
        own.fill_(rank)
        handle.barrier()
        assert handle.get_buffer(1 - handle.rank, (8,), torch.int64).tolist() == [4 - rank] * 8
        with pytest.raises(ArgumentError, match=r"shared with ranks \[1, 3\] only"):
            symm_mem.rendezvous(own, dist.group.WORLD)
    workspace = symm_mem.get_symm_mem_workspace(pair.group_name, 1000)
    assert symm_mem.get_symm_mem_workspace(pair.group_name, 500).buffer_ptrs == workspace.buffer_ptrs
    assert symm_mem.get_symm_mem_workspace(pair.group_name, 5000).buffer_size >= 5000
    symm_mem.enable_symm_mem_for_group(pair.group_name)
    assert symm_mem.is_symm_mem_enabled_for_group(pair.group_name)
    assert symm_mem.get_backend("cpu") == "SYMM"
    dist.barrier()
    dist.destroy_process_group()


def test_groups() -> None:
    run_ranks(groups, 4)


def refused() -> None:
    dist.init_process_group("symm")
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ArgumentError, match="not of the symm backend"):
        symm_mem.rendezvous(symm_mem.empty(3), gloo)
    with pytest.raises(ArgumentError, match="whole of its storage"):
        symm_mem.rendezvous(symm_mem.empty(4)[:2], dist.group.WORLD)
    with pytest.raises(MismatchError, match=r"empty\(3, dtype=torch.float32\)"):
        symm_mem.rendezvous(symm_mem.empty(3 + dist.get_rank()), dist.group.WORLD)
    tensor = torch.nn.Parameter(symm_mem.empty(5).fill_(2.0))  # parameters, too
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    handle.barrier()
    (tensor * 3).sum().backward()
    assert tensor.grad.tolist() == [3.0] * 5
    dist.destroy_process_group()


def test_refused() -> None:
    run_ranks(refused, 2)
