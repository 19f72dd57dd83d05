"""GPU memory between processes, on one GPU and on two: real mappings, real deaths. Multicast stays off."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import start, take_gpu

from symmcomm.bootstrap import connect
from symmcomm.env import Settings
from symmcomm.errors import ArgumentError, MismatchError, OutOfSymmetricMemoryError
from symmcomm.memory.cuda_driver import CudaDevice
from symmcomm.memory.cuda_ipc import IpcProvider, register
from symmcomm.memory.cuda_vmm import VmmProvider
from symmcomm.memory.exchange import DescriptorExchange
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.pool import SymmetricPool
from symmcomm.probe_gpu import probe_facts
from symmcomm.schedule.topology_gpu import GpuFacts, decide_devices, decide_multicast, decide_provider

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TIMEOUT_S = 60.0
MAX_BYTES = 256 << 20
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
GPUS = [1, pytest.param(2, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU only"))]


@dataclass
class Rank:
    """One process's way to the others and to its GPU."""

    rank: int
    world_size: int
    agree: Callable[[bytes], list[bytes]]
    device: CudaDevice

    def heap(self, kind: Callable[..., Any], max_bytes: int = MAX_BYTES) -> SymmetricHeap:
        exchange = DescriptorExchange(self.rank, self.world_size, self.agree, TIMEOUT_S)
        return SymmetricHeap(
            self.rank, self.world_size, 1 << 20, max_bytes, exchange, provider=kind(self.device), agree=self.agree
        )  # fmt: skip

    def meet(self) -> None:
        """Finishes this rank's work and waits for the others'."""
        torch.cuda.synchronize()
        self.agree(b"")

    @property
    def cuda(self) -> torch.device:
        return torch.device("cuda", self.device.ordinal)


@contextlib.contextmanager
def joined(num_gpus: int) -> Iterator[Rank]:
    bootstrap = connect(None, TIMEOUT_S)
    ordinal = bootstrap.rank % num_gpus
    take_gpu(ordinal)
    torch.zeros(1, device="cuda")
    yield Rank(
        bootstrap.rank, bootstrap.world_size, lambda payload: bootstrap.all_gather(payload, TIMEOUT_S),
        CudaDevice(ordinal),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert torch.ones(1000, device="cuda").sum().item() == 1000  # the context is alive


# Every rank reads and writes every peer's memory.


def exchange_patterns(kind: Callable[..., Any], num_gpus: int) -> None:
    with joined(num_gpus) as me:
        heap = me.heap(kind)
        count = 1 << 20
        offset = heap.allocate(4 * count, "patterns", me.agree)

        def words(peer: int) -> torch.Tensor:
            tensor = heap.tensor(peer, offset, 4 * count).view(torch.int32)
            assert tensor.device == me.cuda
            assert tensor.data_ptr() == heap.base + peer * heap.stride + offset
            return tensor

        assert not heap.tensor(me.rank, 0, heap.size).any()
        numbers = torch.arange(count, dtype=torch.int32, device=me.cuda)
        me.meet()
        words(me.rank).copy_(numbers * (me.rank + 1))
        me.meet()
        for peer in range(me.world_size):
            assert torch.equal(words(peer), numbers * (peer + 1)), f"rank {me.rank} reads rank {peer}"
            assert words(peer).add(1)[7].item() == 7 * (peer + 1) + 1
        me.meet()
        part = count // me.world_size
        for peer in range(me.world_size):  # each writes a part of everybody's
            words(peer)[me.rank * part : (me.rank + 1) * part] = 1000 * me.rank + peer
        me.meet()
        for sender in range(me.world_size):
            mine = words(me.rank)[sender * part : (sender + 1) * part]
            assert (mine == 1000 * sender + me.rank).all(), f"rank {me.rank} was written by rank {sender}"
        if heap.provider.growable:
            more = heap.allocate(100 << 20, "more", me.agree)
            assert not heap.tensor(me.rank, more, 100 << 20).any()
            me.meet()
            heap.tensor((me.rank + 1) % me.world_size, more + (100 << 20) - 8, 8).fill_(me.rank + 1)
            me.meet()
            expected = (me.rank - 1) % me.world_size + 1
            assert (heap.tensor(me.rank, more + (100 << 20) - 8, 8) == expected).all()
            assert words(me.rank)[0].item() == me.rank  # nothing moved
        me.meet()
        heap.close(me.agree)


@pytest.mark.parametrize("num_gpus", GPUS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vmm_maps_every_peer(num_gpus: int, world_size: int) -> None:
    start(exchange_patterns, world_size, VmmProvider, num_gpus)


@pytest.mark.parametrize("num_gpus", GPUS)
def test_legacy_handles_map_a_pair(num_gpus: int) -> None:
    start(exchange_patterns, 2, IpcProvider, num_gpus)


def open_and_close(kind: Callable[..., Any], num_gpus: int) -> tuple[int, int]:
    with joined(num_gpus) as me:
        free = []
        for number in range(12):
            heap = me.heap(kind)
            heap.allocate(64 << 20, "some", me.agree)
            heap.tensor(1 - me.rank, 0, 64).fill_(number)
            me.meet()
            heap.close(me.agree)
            me.meet()
            free.append(me.device.memory()[0])
            me.agree(b"")
        return free[1], free[-1]


@pytest.mark.alone
@pytest.mark.parametrize("kind", [VmmProvider, IpcProvider])
def test_heaps_that_come_and_go_leave_no_memory_behind(kind: Callable[..., Any]) -> None:
    for result in start(open_and_close, 2, kind, 1):
        early, late = result.value
        assert late >= early - (32 << 20)


# Faults.


def lose_a_peer(kind: Callable[..., Any], num_gpus: int) -> str:
    with joined(num_gpus) as me:
        heap = me.heap(kind)
        offset = heap.allocate(1 << 20, "some", me.agree)
        heap.tensor(me.rank, offset, 1 << 20).fill_(me.rank + 1)
        me.meet()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        if kind is VmmProvider:  # the mapping holds the memory of the dead
            assert (heap.tensor(1, offset, 1 << 20) == 2).all()
            heap.tensor(1, offset, 1 << 20).fill_(9)
        heap.tensor(0, offset, 1 << 20).fill_(3)
        torch.cuda.synchronize()
        heap.close()
        return "alive"


@pytest.mark.parametrize("num_gpus", GPUS)
@pytest.mark.parametrize("kind", [VmmProvider, IpcProvider])
def test_a_killed_peer_leaves_the_other_alive(kind: Callable[..., Any], num_gpus: int) -> None:
    survivor, victim = start(lose_a_peer, 2, kind, num_gpus, check=False)
    assert victim.exitcode == -signal.SIGKILL
    assert survivor.ok, survivor.report()
    assert survivor.value == "alive"


def ask_for_too_much(num_gpus: int) -> list[str]:
    with joined(num_gpus) as me:
        total = me.device.memory()[1]
        heap = me.heap(VmmProvider, 4 * total)
        with pytest.raises(OutOfSymmetricMemoryError) as refused:
            heap.allocate(2 * total, "far too much", me.agree)
        provider = heap.provider
        size = -(-2 * total // provider.granularity_bytes) * provider.granularity_bytes
        space = provider.reserve(size)
        with pytest.raises(OutOfSymmetricMemoryError) as failed:
            provider.create(space, size)
        provider.unreserve(space, size)
        with pytest.raises(MismatchError):
            heap.allocate(1 << 20, f"rank {me.rank}", me.agree)
        assert heap.allocate(1 << 20, "some", me.agree) > 0
        heap.close(me.agree)
        return [str(refused.value), str(failed.value), str(size), str(2 * total)]


def test_out_of_memory_names_sizes_and_the_heap_lives_on() -> None:
    for result in start(ask_for_too_much, 2, 1):
        refused, failed, size, request = result.value
        assert request in refused
        assert "bytes of memory GPU 0 has left" in refused
        assert f"has no {size} bytes" in failed
        assert "CUDA_ERROR_OUT_OF_MEMORY" in failed


def grow_in_a_capture() -> None:
    with joined(1) as me:
        heap = me.heap(VmmProvider)
        counter = torch.zeros(1, device=me.cuda)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            with pytest.raises(ArgumentError, match="cannot be captured in a CUDA graph"):
                heap.allocate(64 << 20, "some", me.agree)
            offset = heap.allocate(1 << 10, "what is there already", me.agree)
            heap.tensor(0, offset, 1 << 10).fill_(5)
            counter.add_(1)
            graph.capture_end()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert counter.item() == 3
        assert (heap.tensor(0, offset, 1 << 10) == 5).all()
        assert heap.allocate(64 << 20, "some", me.agree) > 0
        heap.close(me.agree)


def test_growth_is_refused_inside_a_capture_which_goes_on() -> None:
    start(grow_in_a_capture, 1)


def outlive_the_heap() -> None:
    with joined(1) as me:
        heap = me.heap(VmmProvider)
        offset = heap.allocate(64 << 20, "some", me.agree)
        tensor = heap.tensor(0, offset, 64 << 20).view(torch.bfloat16)
        heap.close(me.agree)
        tensor.fill_(1.5)
        assert (tensor[1:].view(torch.int16) == 0x3FC0).all()
        free = me.device.memory()[0]
        del tensor
        other = me.heap(VmmProvider)  # does what the finaliser put off
        assert me.device.memory()[0] > free + (32 << 20)
        other.close(me.agree)


@pytest.mark.alone
def test_a_tensor_outlives_its_heap() -> None:
    start(outlive_the_heap, 1)


# Memory of other libraries, and torch's own on the heap.


def register_tensors(num_gpus: int) -> None:
    with joined(num_gpus) as me:
        padding = torch.empty(1 + 1000 * me.rank, device=me.cuda)  # so that offsets differ
        tensor = torch.full((3, 1000), me.rank + 1.0, dtype=torch.bfloat16, device=me.cuda)
        me.meet()
        memory = register(me.device, me.rank, tensor, me.agree)
        for peer in range(me.world_size):
            assert memory.get_buffer(peer).shape == (3, 1000)
            assert (memory.get_buffer(peer) == peer + 1).all()
        me.meet()
        memory.get_buffer((me.rank + 1) % me.world_size)[1] = 7
        me.meet()
        assert (tensor[1] == 7).all()
        assert (tensor[2] == me.rank + 1).all()
        assert me.world_size != 2 or memory.flat_space() is not None
        again = register(me.device, me.rank, tensor, me.agree)  # the same allocation, opened twice
        memory.close()
        assert (again.get_buffer((me.rank + 1) % me.world_size)[1] == 7).all()
        me.meet()
        again.close()
        with pytest.raises(MismatchError):
            register(me.device, me.rank, tensor[: me.rank + 1], me.agree)
        del padding


@pytest.mark.parametrize("num_gpus", GPUS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_torch_are_registered(num_gpus: int, world_size: int) -> None:
    start(register_tensors, world_size, num_gpus)


def tensors_born_symmetric(num_gpus: int) -> list[int]:
    with joined(num_gpus) as me:
        heap = me.heap(VmmProvider)
        size = 128 << 20
        start_offset = heap.allocate(size, "pool", me.agree)
        pool = SymmetricPool(heap.tensor(me.rank, start_offset, size))
        assert pool.mempool is not None
        with torch.cuda.use_mem_pool(pool.mempool):
            layer = torch.nn.Linear(512, 512, device=me.cuda)
            large = torch.full((5 << 20,), me.rank + 1.0, device=me.cuda)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 30, device=me.cuda)
        assert "refused" in pool.describe_refusal()
        outside = torch.empty(1 << 20, device=me.cuda)
        assert heap.offset_of(outside.data_ptr(), 1) == -1
        offsets = [heap.offset_of(each.data_ptr(), each.nbytes) for each in (layer.weight, layer.bias, large)]
        assert min(offsets) >= start_offset
        me.meet()
        peer = (me.rank + 1) % me.world_size
        theirs = heap.tensor(peer, offsets[2], large.nbytes).view(torch.float32)
        assert (theirs == peer + 1).all()
        me.meet()
        with pytest.raises(OutOfSymmetricMemoryError, match="are in use"):
            pool.close()
        del layer, large
        pool.close()
        assert pool.table.used_bytes == 0
        heap.free(start_offset, "free", me.agree)
        me.meet()
        heap.close(me.agree)
        return offsets


@pytest.mark.parametrize("num_gpus", GPUS)
def test_tensors_of_a_pool_are_born_symmetric(num_gpus: int) -> None:
    results = start(tensors_born_symmetric, 2, num_gpus)
    assert results[0].value == results[1].value


# Probes.


def find_facts(num_gpus: int) -> tuple[str | None, bool, bool, str, list[str]]:
    with joined(num_gpus) as me:
        calls = me.agree(probe_facts(me.device.ordinal, Settings.from_env()).to_json())
        facts = [GpuFacts.from_json(each) for each in calls]
        choice = decide_provider(facts)
        reasons = [f"{fact.cuda_vmm} {fact.fabric} {fact.cuda_ipc} {fact.multicast} {fact.links}" for fact in facts]
        devices = decide_devices(facts, False)
        return choice.provider, decide_multicast(facts, choice).works, devices.works, devices.reason, reasons


@pytest.mark.parametrize("num_gpus", GPUS)
def test_ranks_agree_on_vmm_and_on_no_multicast(num_gpus: int) -> None:
    results = start(find_facts, 2, num_gpus)
    provider, multicast, own_gpus, reason, reasons = results[0].value
    print(*reasons, sep="\n")
    assert results[1].value == results[0].value
    assert provider == "cuda_vmm", reasons
    assert not multicast
    assert own_gpus is (num_gpus == 2), reason
