"""The two staging pipelines of ``kernels.gpu`` (staged, paired) as a model: CTAs of all ranks in random order, and
kernels of both kinds after each other. No chunk may go into a slot that has not been read, none may be taken for
another, no signal may go back, nobody may wait for ever, and all ranks end at the same epochs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from symmcomm.schedule.layout_gpu import AHEAD, DEPTH

Steps = Iterator[None]
PATIENCE = 200_000  # steps without a CTA that ends


@dataclass
class World:
    """What kernels share: pads by (rank, channel, sender), slots by (rank, channel, slot, sender)."""

    size: int
    pads: dict[tuple[int, int, int], int] = field(default_factory=dict)
    slots: dict[tuple[int, int, int, int], tuple[object, bool]] = field(default_factory=dict)
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[tuple[int, int], int] = field(default_factory=dict)

    def peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.size) if peer != rank]

    def arrive(self, rank: int, channel: int, epoch: int) -> Steps:
        for peer in self.peers(rank):
            assert self.pads.get((peer, channel, rank), 0) < epoch, "a signal goes back"
            self.pads[peer, channel, rank] = epoch
            yield

    def meet(self, rank: int, channel: int, epoch: int) -> Steps:
        while any(self.pads.get((rank, channel, peer), 0) < epoch for peer in self.peers(rank)):
            yield

    def push(self, rank: int, channel: int, number: int, chunk: object) -> Steps:
        for peer in self.peers(rank):
            slot = (peer, channel, number % DEPTH, rank)
            assert self.slots.get(slot, (None, True))[1], f"{self.slots[slot]} is overwritten"
            self.slots[slot] = (chunk, False)
            yield

    def take(self, rank: int, channel: int, number: int, chunk: object) -> Steps:
        for peer in self.peers(rank):
            yield
            slot = (rank, channel, number % DEPTH, peer)
            assert self.slots[slot] == (chunk, False)
            self.slots[slot] = (chunk, True)


def staged(world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """A CTA of ``kernels.gpu.staged``."""
    epoch = world.epochs.get((rank, channel), 0)
    for k in range(min(AHEAD, num)):
        yield from world.push(rank, channel, epoch + k, (call, channel, k))
    yield from world.arrive(rank, channel, epoch + 1)
    for k in range(num):
        yield from world.meet(rank, channel, epoch + 1 + max(0, k - AHEAD + 1))
        if k + AHEAD < num:
            yield from world.push(rank, channel, epoch + k + AHEAD, (call, channel, k + AHEAD))
        yield from world.take(rank, channel, epoch + k, (call, channel, k))
        if k + AHEAD < num:
            yield from world.arrive(rank, channel, epoch + 2 + k)
    world.epochs[rank, channel] = epoch + num


def paired(world: World, rank: int, block: int, lanes: int, num: int, call: int, finish: bool) -> Steps:
    """A CTA of ``kernels.gpu.paired``."""
    lane, taker = block % lanes, block % lanes + lanes
    partner = lane + taker - block
    yield
    own, other = world.epochs.get((rank, block), 0), world.epochs.get((rank, partner), 0)
    final = {lane: 2 + num, taker: num}
    world.read[rank, block] = own + final[block]
    yield
    if block == lane:
        for k in range(num):
            if k >= AHEAD:
                yield from world.meet(rank, lane, own + 1 + max(0, k - DEPTH + 1))
            yield from world.push(rank, taker, other + k, (call, taker, k))
            yield from world.arrive(rank, taker, other + 1 + k)
        yield from world.meet(rank, lane, own + 1 + (num + 1 if finish else max(0, num - AHEAD)))
    else:
        yield from world.arrive(rank, lane, other + 1)
        for k in range(num):
            yield from world.meet(rank, taker, own + 1 + k)
            yield from world.take(rank, taker, own + k, (call, taker, k))
            if k + AHEAD < num:
                yield from world.arrive(rank, lane, other + 2 + k)
        if finish:
            yield from world.arrive(rank, lane, other + 2 + num)
    while world.read.get((rank, partner)) != other + final[partner]:
        yield
    world.epochs[rank, block] = own + final[block]


def launch(world: World, rank: int, call: int, kernel: tuple[str, list[int], bool]) -> list[Steps]:
    """The CTAs of a kernel: pipeline, chunks of each lane, whether it finishes."""
    kind, chunks, finish = kernel
    if kind == "staged":
        return [staged(world, rank, channel, num, call) for channel, num in enumerate(chunks)]
    lanes = len(chunks)
    return [paired(world, rank, block, lanes, chunks[block % lanes], call, finish) for block in range(2 * lanes)]


@pytest.mark.parametrize("seed", range(100))
def test_any_order(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice((2, 2, 3, 4)))
    kernels = []
    for _ in range(12):
        chunks = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
        kernels.append((rng.choice(("staged", "paired", "paired")), chunks, rng.random() < 0.4))
    at = [0] * world.size
    running = [launch(world, rank, 0, kernels[0]) for rank in range(world.size)]
    idle = 0
    while any(running) or min(at) < len(kernels) - 1:
        rank = rng.randrange(world.size)
        if not running[rank]:
            if at[rank] < len(kernels) - 1:
                at[rank] += 1
                running[rank] = launch(world, rank, at[rank], kernels[at[rank]])
            continue
        block = rng.choice(running[rank])
        for _ in range(rng.choice((1, 1, 3, 20))):
            if next(block, world) is world:
                running[rank].remove(block)
                idle = 0
                break
        idle += 1
        assert idle < PATIENCE, f"nobody goes on: {at} of {kernels}"
    for rank in range(world.size):
        for channel in range(8):
            assert world.epochs.get((rank, channel), 0) == world.epochs.get((0, channel), 0)
