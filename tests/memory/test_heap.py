"""The heap on the host's memory: flat addresses, growth in lockstep, failures on one rank, life after close."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import World, run_threads

from symmcomm.errors import ExchangeError, MismatchError, OutOfSymmetricMemoryError
from symmcomm.memory import posix
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.posix import PAGE_BYTES, PosixProvider
from symmcomm.memory.provider import Provider

MAX_BYTES = 256 << 20
CONTROL_BYTES = 64 << 10


def build(rank: int, world: World, **options: Any) -> tuple[SymmetricHeap, Callable[[bytes], list[bytes]]]:
    heap = SymmetricHeap(rank, world.world_size, CONTROL_BYTES, MAX_BYTES, world.exchange(rank), **options)
    return heap, lambda payload: world.all_gather(rank, payload)


def raise_failures(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def reserved_bytes(start: int, end: int) -> int:
    """Bytes of [start, end) that this process has taken, mapped or reserved."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        total += max(0, min(last, end) - max(first, start))
    return total


def test_posix_is_a_provider() -> None:
    provider: Provider = PosixProvider()
    assert (provider.name, provider.granularity_bytes, provider.growable) == ("posix", PAGE_BYTES, True)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_what_a_rank_writes_is_read_by_all_at_a_fixed_distance(world_size: int) -> None:
    def body(rank: int, world: World) -> None:
        heap, agree = build(rank, world)
        assert heap.segments == [(0, CONTROL_BYTES)]
        offsets = [heap.allocate(size, f"empty({size})", agree) for size in (1000, 40 << 20, 5 << 20)]
        assert offsets[0] == CONTROL_BYTES
        assert len(heap.segments) == 3
        for offset in (0, *offsets):
            heap.tensor(rank, offset, 8).view(torch.int64)[0] = 1000 * rank + offset
            agree(b"")
            for peer in range(world_size):
                assert heap.tensor(peer, offset, 8).view(torch.int64).item() == 1000 * peer + offset
                assert bytes(heap.buffer(peer, offset, 8)) == (1000 * peer + offset).to_bytes(8, "little")
        assert heap.tensor(rank, offsets[1] + 8, (40 << 20) - 8).sum() == 0
        assert heap.offset_of(heap.own_address + offsets[2], 8) == offsets[2]
        assert heap.offset_of(heap.own_address - 8, 8) == -1
        agree(b"")
        heap.close()
        heap.close()

    raise_failures(run_threads(world_size, body))


def test_ranks_that_ask_for_different_things_are_told_and_go_on() -> None:
    def body(rank: int, world: World) -> None:
        heap, agree = build(rank, world)
        with pytest.raises(MismatchError, match=r"rank [01] asks for empty\([12]\), rank [01] for empty\([12]\)"):
            heap.allocate(64 << 20, f"empty({rank + 1})", agree)
        with pytest.raises(OutOfSymmetricMemoryError, match=f"raise SYMMCOMM_HEAP_MAX_BYTES={MAX_BYTES}"):
            heap.allocate(MAX_BYTES, "everything", agree)
        offset = heap.allocate(100, "some", agree)
        heap.free(offset, "free", agree)
        assert heap.allocate(100, "again", agree) == offset
        heap.close()

    raise_failures(run_threads(2, body))


@pytest.mark.parametrize("name", ["create", "map"])
def test_a_growth_that_fails_on_one_rank_fails_on_all_and_the_heap_lives_on(name: str) -> None:
    class Failing(PosixProvider):
        armed = False

        def _fail(self) -> None:
            if self.armed:
                self.armed = False
                raise OSError(24, "too many files")

        def create(self, *args: Any) -> Any:
            if name == "create":
                self._fail()
            return super().create(*args)

        def map(self, *args: Any) -> int:
            if name == "map":
                self._fail()
            return super().map(*args)

    def body(rank: int, world: World) -> None:
        provider = Failing()
        heap, agree = build(rank, world, provider=provider)
        provider.armed = rank == 1
        with pytest.raises(OSError if rank == 1 else ExchangeError, match="too many files"):
            heap.allocate(64 << 20, "a lot", agree)
        whole = 3 * heap.stride
        assert reserved_bytes(heap.base, heap.base + whole) == whole
        assert heap.segments == [(0, CONTROL_BYTES)]
        offset = heap.allocate(64 << 20, "a lot", agree)
        heap.tensor(rank, offset, 8)[0] = rank + 1
        agree(b"")
        assert [heap.tensor(peer, offset, 8)[0].item() for peer in range(3)] == [1, 2, 3]
        agree(b"")
        heap.close()

    before = len(os.listdir("/proc/self/fd"))
    raise_failures(run_threads(3, body))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_heap_that_cannot_be_built_closes_what_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> int:
        raise OSError(28, "no space")

    monkeypatch.setattr(posix, "create", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no space"):
        build(0, World(1))
    with pytest.raises(OutOfSymmetricMemoryError, match="pads and staging need"):
        SymmetricHeap(0, 1, 2 * MAX_BYTES, MAX_BYTES, World(1).exchange(0))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_outlive_the_heap_and_its_address_space() -> None:
    heap, agree = build(0, World(1))
    offset = heap.allocate(1 << 20, "one", agree)
    segment = heap.segments[1]
    tensor = heap.tensor(0, offset, 1 << 20)
    base, end = heap.base, heap.base + heap.stride
    assert reserved_bytes(base, end) == heap.stride
    heap.close()
    tensor.fill_(7)
    assert reserved_bytes(base, end) == sum(num_bytes for _, num_bytes in [(0, CONTROL_BYTES), segment])
    view = tensor[10:20].view(2, 5)
    del tensor
    assert view.sum() == 70
    del view
    gc.collect()
    assert reserved_bytes(base, end) == 0
