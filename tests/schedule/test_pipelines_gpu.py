"""The pipeline of ``kernels.gpu.staged`` as a model: CTAs of all ranks in random order, kernels after each other. No
chunk may go into a slot that has not been read, none may be taken for another, no signal may go back, nobody may wait
for ever, and all ranks end at the same epochs."""

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
    """A CTA of the kernel. Every other kernel's is ``split``."""
    split = call % 2
    epoch = world.epochs.get((rank, channel), 0)
    for k in range(min(AHEAD, num)):
        yield from world.push(rank, channel, epoch + k, (call, channel, k))
        yield from world.arrive(rank, channel, epoch + 1 + k)
    for k in range(num):
        yield from world.meet(rank, channel, epoch + 1 + k)
        if split and k > 0 and k + AHEAD <= num:
            yield from world.arrive(rank, channel, epoch + k + AHEAD)
        if k + AHEAD < num:
            yield from world.push(rank, channel, epoch + k + AHEAD, (call, channel, k + AHEAD))
        yield from world.take(rank, channel, epoch + k, (call, channel, k))
        if not split and k + AHEAD < num:
            yield from world.arrive(rank, channel, epoch + 1 + k + AHEAD)
    world.epochs[rank, channel] = epoch + num


def launch(world: World, rank: int, call: int, chunks: list[int]) -> list[Steps]:
    """The CTAs of a kernel, by the chunks of each channel."""
    return [staged(world, rank, channel, num, call) for channel, num in enumerate(chunks)]


@pytest.mark.parametrize("seed", range(100))
def test_any_order(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice((2, 2, 3, 4)))
    kernels = [[rng.randint(1, 9) for _ in range(rng.randint(1, 4))] for _ in range(12)]
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
        for channel in range(4):
            assert world.epochs.get((rank, channel), 0) == world.epochs.get((0, channel), 0)
