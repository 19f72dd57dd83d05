"""VMM and legacy handles against a fake driver: the order of calls, and nothing left behind whichever call fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_driver import (
    GRANULARITY,
    INVALID,
    NOT_PERMITTED,
    OUT_OF_MEMORY,
    FakeDriver,
    Machine,
    Named,
    World,
    run_threads,
)

from symmcomm.errors import ArgumentError, CudaError, ExchangeError, MismatchError, OutOfSymmetricMemoryError
from symmcomm.memory import cuda_driver, cuda_ipc
from symmcomm.memory.cuda_driver import CudaDevice
from symmcomm.memory.cuda_ipc import IpcProvider, register
from symmcomm.memory.cuda_vmm import VmmProvider
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.provider import Segment

CONTEXT = {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuDevicePrimaryCtxRetain", "cuDeviceGet", "cuDeviceGetAttribute"}


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def vmm(**options: Any) -> tuple[FakeDriver, VmmProvider]:
    driver = FakeDriver(Machine())
    provider = VmmProvider(CudaDevice(0, driver), **options)
    driver.calls.clear()
    return driver, provider


def essential(driver: FakeDriver) -> list[str]:
    return [name for name in driver.calls if name not in CONTEXT]


def close_offer(segment: Segment) -> None:
    if isinstance(segment.offer, int):
        os.close(segment.offer)


# One segment of VMM.


def test_create_zeroes_the_memory_before_anybody_can_map_it() -> None:
    driver, provider = vmm()
    base = provider.reserve(2 * GRANULARITY)
    segment = provider.create(base, GRANULARITY)
    assert essential(driver) == [
        "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize",
        "cuMemExportToShareableHandle", "cuMemRelease",
    ]  # fmt: skip
    assert driver.mappings[base][1].zeroed
    assert driver.mappings[base][1].references == 1  # the mapping's: no handle is kept
    close_offer(segment)


def test_map_imports_maps_and_releases_the_handle() -> None:
    driver, provider = vmm()
    base = provider.reserve(2 * GRANULARITY)
    segment = provider.create(base, GRANULARITY)
    driver.calls.clear()
    assert provider.map(base + GRANULARITY, GRANULARITY, segment.offer) == base + GRANULARITY
    assert essential(driver) == ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease"]
    assert driver.accessible == {base, base + GRANULARITY}
    assert driver.mappings[base][1] is driver.mappings[base + GRANULARITY][1]
    close_offer(segment)


def test_fabric_handles_travel_as_bytes() -> None:
    driver, provider = vmm(fabric=True)
    base = provider.reserve(2 * GRANULARITY)
    segment = provider.create(base, GRANULARITY)
    assert isinstance(segment.offer, bytes)
    assert len(segment.offer) == 64
    provider.map(base + GRANULARITY, GRANULARITY, segment.offer)
    assert driver.mappings[base][1] is driver.mappings[base + GRANULARITY][1]


@pytest.mark.parametrize("fabric", [False, True])
def test_an_offer_of_another_kind_is_refused(fabric: bool) -> None:
    _, provider = vmm(fabric=fabric)
    for offer in (b"", 3 if fabric else bytes(64)):
        with pytest.raises(ExchangeError, match="offer"):
            provider.map(provider.reserve(GRANULARITY), GRANULARITY, offer)


@pytest.mark.parametrize(
    "name",
    ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize", "cuMemExportToShareableHandle"],
)
def test_a_step_of_create_that_fails_undoes_the_steps_before(name: str) -> None:
    driver, provider = vmm()
    base = provider.reserve(GRANULARITY)
    driver.failures[name] = (0, NOT_PERMITTED)
    with pytest.raises(CudaError, match=f"{name} failed: CUDA_ERROR_NOT_PERMITTED") as caught:
        provider.create(base, GRANULARITY)
    assert caught.value.code == "CUDA_ERROR_NOT_PERMITTED"
    assert (driver.mappings, driver.machine.memories, driver.contexts) == ({}, {}, 0)
    close_offer(provider.create(base, GRANULARITY))  # the place is free again


@pytest.mark.parametrize("name", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_step_of_map_that_fails_undoes_the_steps_before(name: str) -> None:
    driver, provider = vmm()
    base = provider.reserve(2 * GRANULARITY)
    segment = provider.create(base, GRANULARITY)
    driver.failures[name] = (0, INVALID)
    with pytest.raises(ExchangeError, match=f"GPU 0 cannot map {GRANULARITY} bytes of a peer's memory: {name} failed"):
        provider.map(base + GRANULARITY, GRANULARITY, segment.offer)
    assert list(driver.mappings) == [base]
    assert driver.mappings[base][1].references == 1
    close_offer(segment)


def test_out_of_memory_names_the_sizes() -> None:
    driver, provider = vmm()
    driver.machine.free_bytes = 3 << 20
    base = provider.reserve(2 * GRANULARITY)
    with pytest.raises(
        OutOfSymmetricMemoryError, match=rf"no {4 << 20} bytes .* {3 << 20} of {1 << 40} bytes are free"
    ):
        provider.create(base, 2 * GRANULARITY)
    driver.failures["cuMemAddressReserve"] = (0, OUT_OF_MEMORY)
    with pytest.raises(OutOfSymmetricMemoryError, match=f"cannot reserve {GRANULARITY} bytes of address space"):
        provider.reserve(GRANULARITY)


def test_finalisers_call_no_driver_and_reclaim_does_the_work_in_order() -> None:
    driver, provider = vmm()
    base = provider.reserve(GRANULARITY)
    close_offer(provider.create(base, GRANULARITY))
    driver.calls.clear()
    provider.unmap(base, GRANULARITY)
    provider.unreserve(base, GRANULARITY)
    assert driver.calls == []
    VmmProvider(CudaDevice(0, driver)).reclaim()  # any provider of the device will do
    assert essential(driver)[-3:] == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    assert (driver.mappings, driver.reservations, driver.machine.memories) == ({}, {}, {})


def test_a_lost_context_leaves_everything_to_the_end_of_the_process() -> None:
    driver, provider = vmm()
    base = provider.reserve(GRANULARITY)
    close_offer(provider.create(base, GRANULARITY))
    provider.unmap(base, GRANULARITY)
    driver.failures["cuCtxSynchronize"] = (0, Named(700, "CUDA_ERROR_ILLEGAL_ADDRESS"))
    provider.reclaim()
    assert base in driver.mappings


def test_growing_inside_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, provider = vmm()
    base = provider.reserve(GRANULARITY)
    provider.unreserve(base, GRANULARITY)
    monkeypatch.setattr(cuda_driver, "capturing", lambda: True)
    driver.calls.clear()
    with pytest.raises(ArgumentError, match="cannot be captured in a CUDA graph"):
        provider.create(base, GRANULARITY)
    provider.reclaim()
    assert driver.calls == []


def test_granularity_of_all_ranks_must_suit_the_device() -> None:
    assert vmm(granularity_bytes=4 * GRANULARITY)[1].granularity_bytes == 4 * GRANULARITY
    with pytest.raises(ArgumentError, match="not a multiple"):
        vmm(granularity_bytes=GRANULARITY + 1)


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(cuda_driver.importlib, "import_module", fails)
    with pytest.raises(CudaError, match=r"the CUDA driver cannot be loaded: OSError: libcuda\.so\.1"):
        CudaDevice(0)


# The heap on it, with ranks as threads.


class Rank:
    """A rank's driver, its heap, and how it agrees with the others."""

    def __init__(self, rank: int, world: World, machine: Machine, kind: Callable[..., Any], **options: Any) -> None:
        self.rank, self.driver = rank, FakeDriver(machine, rank)
        self.device = CudaDevice(rank, self.driver)
        self.agree: Callable[[bytes], list[bytes]] = lambda payload: world.all_gather(rank, payload)
        self.exchange = world.exchange(rank)
        self.world_size = world.world_size
        self.provider = kind(self.device, **options)
        self.driver.calls.clear()

    def heap(self, max_bytes: int = 64 << 20) -> SymmetricHeap:
        return SymmetricHeap(
            self.rank, self.world_size, 1 << 20, max_bytes, self.exchange, provider=self.provider, agree=self.agree
        )

    def is_clean(self) -> bool:
        return not (self.driver.mappings or self.driver.reservations)


def raise_failures(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("fabric", [False, True])
def test_every_rank_maps_every_peer_at_a_fixed_distance(world_size: int, fabric: bool) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> dict[tuple[int, int], int]:
        me = Rank(rank, world, machine, VmmProvider, fabric=fabric)
        heap = me.heap()
        first = heap.allocate(1 << 20, "first", me.agree)
        second = heap.allocate(40 << 20, "second", me.agree)
        assert (first, second) == (1 << 20, GRANULARITY)
        assert heap.segments == [(0, GRANULARITY), (GRANULARITY, 40 << 20)]
        found = {}
        for peer in range(world_size):
            for number, (offset, num_bytes) in enumerate(heap.segments):
                size, memory = me.driver.mappings[heap.base + peer * heap.stride + offset]
                assert (size, memory.zeroed) == (num_bytes, True)
                found[peer, number] = memory.number
        assert heap.base % GRANULARITY == heap.stride % GRANULARITY == 0
        heap.close(me.agree)
        assert me.is_clean()
        return found

    results = raise_failures(run_threads(world_size, body))
    assert all(result == results[0] for result in results)
    assert len(set(results[0].values())) == 2 * world_size
    assert machine.memories == {}


FAILURES = [
    ("cuMemCreate", OUT_OF_MEMORY, OutOfSymmetricMemoryError, OutOfSymmetricMemoryError),
    ("cuMemMap", INVALID, CudaError, ExchangeError),
    ("cuMemExportToShareableHandle", NOT_PERMITTED, CudaError, ExchangeError),
    ("cuMemImportFromShareableHandle", NOT_PERMITTED, ExchangeError, ExchangeError),
    ("cuMemSetAccess", INVALID, CudaError, ExchangeError),
]


@pytest.mark.parametrize(("name", "code", "own_error", "peers_error"), FAILURES)
@pytest.mark.parametrize("fabric", [False, True])
def test_a_growth_that_fails_on_one_rank_fails_on_all_and_the_heap_lives_on(
    name: str, code: Any, own_error: type, peers_error: type, fabric: bool
) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> str:
        me = Rank(rank, world, machine, VmmProvider, fabric=fabric)
        heap = me.heap()
        before = set(me.driver.mappings)
        if rank == 1:
            me.driver.failures[name] = (0, code)
        with pytest.raises(own_error if rank == 1 else peers_error) as caught:
            heap.allocate(8 << 20, "too much", me.agree)
        assert set(me.driver.mappings) == before
        assert heap.allocate(8 << 20, "again", me.agree) == 1 << 20  # and into the new segment
        assert len(heap.segments) == 2
        heap.close(me.agree)
        assert me.is_clean()
        return str(caught.value)

    results = raise_failures(run_threads(3, body))
    assert "rank 1" in results[0]
    assert "rank 1" in results[2]
    assert name in results[0]
    assert machine.memories == {}


@pytest.mark.parametrize("kind", [VmmProvider, IpcProvider])
def test_a_heap_that_cannot_be_built_on_one_rank_is_built_on_none(kind: Callable[..., Any]) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> str:
        me = Rank(rank, world, machine, kind)
        if rank == 1:
            me.driver.failures["cuMemCreate" if kind is VmmProvider else "cuMemAlloc"] = (0, OUT_OF_MEMORY)
        with pytest.raises(OutOfSymmetricMemoryError) as caught:
            me.heap()
        assert me.is_clean()
        return str(caught.value)

    results = raise_failures(run_threads(2, body))
    assert "rank 1" in results[0]
    assert machine.memories == {}


def test_tensors_keep_their_segment_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, provider = vmm()
    monkeypatch.setattr(provider, "tensor", lambda address, num_bytes, owner: [owner], raising=False)
    world = World(1)
    heap = SymmetricHeap(0, 1, 1 << 20, 64 << 20, world.exchange(0), provider=provider)
    view = heap.tensor(0, 0, 16)
    heap.close()
    assert len(driver.mappings) == 1
    assert len(driver.reservations) == 1
    del view
    assert len(driver.mappings) == 1  # a finaliser calls no driver
    provider.reclaim()
    assert (driver.mappings, driver.reservations, driver.machine.memories) == ({}, {}, {})


# Legacy handles.


@pytest.mark.parametrize("backwards", [False, True])
def test_two_ranks_always_have_a_flat_space(backwards: bool) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        if backwards:
            me.driver._next_address = (9 - rank) << 44
        heap = me.heap()
        assert heap.capacity == heap.size == 64 << 20
        for peer in range(2):
            assert me.driver.mappings[heap.base + peer * heap.stride][1].zeroed
        assert heap.own_address in me.provider._own
        assert heap.allocate(3 << 20, "some", me.agree) == 1 << 20
        with pytest.raises(OutOfSymmetricMemoryError, match="raise SYMMCOMM_HEAP_MAX_BYTES"):
            heap.allocate(64 << 20, "too much", me.agree)
        heap.close(me.agree)
        assert me.is_clean()

    raise_failures(run_threads(2, body))
    order = [name for _, name in machine.log if name in ("cuIpcCloseMemHandle", "cuMemFree")]
    assert order == ["cuIpcCloseMemHandle"] * 2 + ["cuMemFree"] * 2
    assert machine.memories == {}


def test_memory_that_peers_may_still_have_open_is_not_freed() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        heap = me.heap()
        own = heap.own_address
        heap.close()  # no agreement: as after a failure
        assert list(me.driver.mappings) == [own]

    raise_failures(run_threads(2, body))
    assert "cuMemFree" not in [name for _, name in machine.log]


def test_unequal_distances_are_refused_on_all_ranks() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        numbers = iter([0, 7, 9])
        me.driver._take_address = lambda _: (1 + next(numbers)) << 40  # type: ignore[method-assign]
        with pytest.raises(ExchangeError, match=r"unequal distances .* more than two ranks need cuda_vmm"):
            me.heap()

    raise_failures(run_threads(3, body))


class FakeTensor:
    """As much of a CUDA tensor as ``register`` looks at."""

    is_cuda, dtype, shape, nbytes = True, torch.bfloat16, (3, 5), 30

    def __init__(self, address: int, ordinal: int, **other: Any) -> None:
        self.address, self.device = address, torch.device("cuda", ordinal)
        vars(self).update(other)

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return 15

    def data_ptr(self) -> int:
        return self.address


def test_register_reaches_memory_that_others_allocated() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        own = me.device.call("cuMemAlloc", GRANULARITY)
        memory = register(me.device, rank, FakeTensor(own + 512 * (rank + 1) ** 2, rank), me.agree)  # type: ignore[arg-type]
        assert memory.buffer_ptrs[rank] == own + 512 * (rank + 1) ** 2
        for peer, address in enumerate(memory.buffer_ptrs):
            start, _ = me.device.call("cuMemGetAddressRange", address)
            assert address - start == 512 * (peer + 1) ** 2
        assert memory.flat_space() is None
        memory.close()
        memory.close()
        me.device.call("cuMemFree", own)
        assert me.is_clean()

    raise_failures(run_threads(3, body))


@pytest.mark.parametrize("name", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle"])
def test_register_fails_on_all_ranks_and_closes_what_it_opened(name: str) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        own = me.device.call("cuMemAlloc", GRANULARITY)
        if rank == 1:
            me.driver.failures[name] = (0, INVALID)
        with pytest.raises(ExchangeError, match=f"register: rank 1: .*{name} failed"):
            register(me.device, rank, FakeTensor(own, rank), me.agree)  # type: ignore[arg-type]
        me.device.call("cuMemFree", own)
        assert me.is_clean()

    raise_failures(run_threads(2, body))


def test_register_compares_tensors_and_checks_its_argument() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, IpcProvider)
        own = me.device.call("cuMemAlloc", GRANULARITY)
        with pytest.raises(ArgumentError, match="this communicator's device is GPU"):
            register(me.device, rank, FakeTensor(own, rank + 1), me.agree)  # type: ignore[arg-type]
        with pytest.raises(MismatchError, match=r"\(3, 5\) of torch.bfloat16 on rank 0, \(5, 3\)|on rank 1, \(3, 5\)"):
            register(me.device, rank, FakeTensor(own, rank, shape=(5, 3) if rank else (3, 5)), me.agree)  # type: ignore[arg-type]

    raise_failures(run_threads(2, body))
    assert cuda_ipc.IpcProvider.owner_frees_last
