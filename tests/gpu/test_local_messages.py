"""Messages, signals and words with all ranks in one process on one GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from local_cases import DELAY_NS, PATIENCE_S, POISON

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import MessageLayout, Phase
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WORLDS = (2, 3, 8)
MARGIN = 64
LONG = 5 << 20  # more than a queue holds


@cache
def world_of(world_size: int) -> LocalWorld:
    layout = MessageLayout.create(world_size)
    return LocalWorld(world_size, layout.end - layout.counters, PATIENCE_S)


def function(world: LocalWorld, kernel: Any) -> Any:
    from symmcomm.kernels.gpu.compile import compiled

    return compiled(kernel, world.arch)


def message(world: LocalWorld, sends: bool) -> Any:
    from symmcomm.kernels.gpu.point_to_point import Message

    return world.load(function(world, Message(world_size=world.world_size, sends=sends)), 0, 0, 1)


def data(rank: int, num_bytes: int, shift: int) -> torch.Tensor:
    """A rank's bytes, ``shift`` from a boundary."""
    values = (torch.arange(num_bytes, device="cuda") * 13 + rank) % 251
    room = torch.zeros(num_bytes + shift, dtype=torch.uint8, device="cuda")
    room[shift:] = values.to(torch.uint8)
    return room[shift:]


def call(world: LocalWorld, rank: int, run: Any, tensor: torch.Tensor, peer: int) -> None:
    place = (world.base, world.stride, rank)
    run(*place, tensor.data_ptr(), tensor.nbytes, peer, world.streams[rank].cuda_stream)


def pass_on(world: LocalWorld, num_bytes: int, step: int, shift: int = 0) -> None:
    """Every rank sends to the one ``step`` further on, and receives."""
    ranks, size = range(world.world_size), world.world_size
    send, receive = message(world, True), message(world, False)
    sources = [data(rank, num_bytes, shift) for rank in ranks]
    rooms = [torch.full((num_bytes + 2 * MARGIN,), POISON, dtype=torch.uint8, device="cuda") for _ in ranks]
    torch.cuda.synchronize()
    for rank in ranks:
        call(world, rank, send, sources[rank], (rank + step) % size)
    for rank in ranks:
        call(world, rank, receive, rooms[rank][MARGIN : MARGIN + num_bytes], (rank - step) % size)
    torch.cuda.synchronize()
    for rank in ranks:
        assert world.record(rank) is None
        inside = rooms[rank][MARGIN : MARGIN + num_bytes]
        assert torch.equal(inside, sources[(rank - step) % size]), (num_bytes, rank)
        assert bool((rooms[rank][:MARGIN] == POISON).all())
        assert bool((rooms[rank][MARGIN + num_bytes :] == POISON).all())


@pytest.mark.parametrize("world_size", WORLDS)
def test_small_messages_leave_before_they_are_received(world_size: int) -> None:
    world = world_of(world_size)
    for num_bytes in (0, 1, 7, 16, 1000, 100_003):
        for step in {1, world_size - 1}:
            pass_on(world, num_bytes, step, num_bytes % 2)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_queue_holds_as_many_messages_as_slots(world_size: int) -> None:
    world, num = world_of(world_size), at.NUM_MESSAGE_SLOTS
    send, receive = message(world, True), message(world, False)
    sources = [data(number, 1000 + number, 0) for number in range(num)]
    rooms = [torch.zeros_like(source) for source in sources]
    torch.cuda.synchronize()  # ranks have streams of their own
    for source in sources:
        call(world, 0, send, source, 1)
    torch.cuda.synchronize()
    for room in rooms:
        call(world, 1, receive, room, 0)
    torch.cuda.synchronize()
    for room, source in zip(rooms, sources, strict=True):
        assert torch.equal(room, source)


@pytest.mark.parametrize("world_size", WORLDS)
def test_long_messages_with_delays(world_size: int) -> None:
    world = world_of(world_size)
    source, got = data(1, LONG, 0), torch.zeros(LONG, dtype=torch.uint8, device="cuda")
    send, receive = message(world, True), message(world, False)
    for victim in (0, 1):
        world.put(victim, at.DELAY_NS, DELAY_NS)
        torch.cuda.synchronize()
        call(world, 0, send, source, 1)
        call(world, 1, receive, got, 0)
        torch.cuda.synchronize()
        world.put(victim, at.DELAY_NS, 0)
        assert torch.equal(got, source)
        got.zero_()


def test_chunk_numbers_wrap_around() -> None:
    world, layout = LocalWorld(2, 32 << 20, PATIENCE_S), MessageLayout.create(2)
    for rank in range(2):
        world.bytes(rank, layout.counters, layout.headers - layout.counters).view(torch.int32).fill_(-3)
    for num_bytes in (1000, 100_003, 1 << 20):
        pass_on(world, num_bytes, 1)


def test_another_size_is_noticed_at_once() -> None:
    world = LocalWorld(2, 32 << 20, PATIENCE_S)
    call(world, 0, message(world, True), data(0, 1000, 0), 1)
    call(world, 1, message(world, False), data(0, LONG, 0), 0)
    torch.cuda.synchronize()
    record = world.record(1)
    assert record is not None
    assert (record.phase, record.peer, record.expected, record.seen) == (Phase.size, 0, LONG, 1000)
    assert world.record(0) is None


def test_nobody_sends() -> None:
    world = LocalWorld(2, 32 << 20, timeout_s=0.2)
    call(world, 1, message(world, False), data(0, 1000, 0), 0)
    torch.cuda.synchronize()
    record = world.record(1)
    assert record is not None
    assert (record.phase, record.peer, record.expected, record.seen) == (Phase.message, 0, 1, 0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_signals(world_size: int) -> None:
    from symmcomm.kernels.gpu.swap_signal import SwapSignal

    world = world_of(world_size)
    put, wait = (function(world, SwapSignal(world_size=world_size, puts=puts)) for puts in (True, False))
    for channel in (0, 63):
        for _ in range(2):
            world.launch(put, [(channel, (rank + 1) % world_size) for rank in range(world_size)])
            world.launch(wait, [(channel, (rank - 1) % world_size) for rank in range(world_size)])
    assert_taken(world)


def assert_taken(world: LocalWorld) -> None:
    """All signals, in order."""
    for rank in range(world.world_size):
        pad = world.bytes(rank, world.layout.swap_pad, at.NUM_SWAP_CHANNELS * world.world_size * 4)
        assert not bool(pad.any())
        assert world.record(rank) is None


@pytest.mark.parametrize("puts", [True, False], ids=["late sender", "late receiver"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_signals_with_a_late_rank(world_size: int, puts: bool) -> None:
    """Two signals from each rank to the next one in turn. The receiver waits for a late sender; and the sender's second
    signal for a late receiver to take the first."""
    from symmcomm.kernels.gpu.swap_signal import SwapSignal

    world = world_of(world_size)
    put, wait = (
        world.load(function(world, SwapSignal(world_size=world_size, puts=kind)), 0, 1) for kind in (True, False)
    )
    for sender in range(world_size):
        receiver = (sender + 1) % world_size
        late, punctual = (sender, receiver) if puts else (receiver, sender)
        world.put(late, at.DELAY_NS, DELAY_NS)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record(world.streams[late])
        for _ in range(2):
            put(world.base, world.stride, sender, 5, receiver, world.streams[sender].cuda_stream)
            wait(world.base, world.stride, receiver, 5, sender, world.streams[receiver].cuda_stream)
        stop.record(world.streams[punctual])
        torch.cuda.synchronize()
        world.put(late, at.DELAY_NS, 0)
        assert_taken(world)
        assert start.elapsed_time(stop) > 0.8 * DELAY_NS / 1e6


def test_words() -> None:
    from symmcomm.kernels.gpu.store_words import StoreWords

    world, layout = world_of(3), MessageLayout.create(3)
    words = (-1, 0, 1 << 40, 7, 5)
    store = function(world, StoreWords(num=5))
    world.launch(store, [(layout.slots + 8, words)] * 3)
    for rank in range(3):
        assert world.bytes(rank, layout.slots + 8, 40).view(torch.int64).tolist() == list(words)
