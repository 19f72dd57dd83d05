"""The pipelines of ``kernels.gpu.staged``, ``all_reduce_norm``, ``ring`` and ``lamport`` as a model: CTAs of all
ranks in random order, kernels of all kinds after each other. No chunk may go into memory that holds one which has not
been read, none may be taken for another, no signal may go back, nobody may wait for ever, and all ranks end at the same
epochs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import pytest
from ring_events import ring_events

from symmcomm.schedule.layout_gpu import AHEAD, DEPTH
from symmcomm.schedule.machines import nvlink
from symmcomm.schedule.plan import Plan
from symmcomm.schedule.ring import ring_1d

Steps = Iterator[None]
Kernel = Callable[["World", int, int, int, int], Steps]
PATIENCE = 200_000  # steps without a CTA that ends


@dataclass
class World:
    """What kernels share: pads by (rank, channel, sender), sets of slots by (rank, channel, number of the set), and
    vectors by (rank, channel, parity, sender, place, thread, vector or byte)."""

    size: int
    pads: dict[tuple[int, int, int], int] = field(default_factory=dict)
    sets: dict[tuple[int, int, int], dict[object, object]] = field(default_factory=dict)
    vectors: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)

    def peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.size) if peer != rank]

    def signal(self, receiver: int, channel: int, sender: int, epoch: int) -> None:
        assert self.pads.get((receiver, channel, sender), 0) < epoch, "a signal goes back"
        self.pads[receiver, channel, sender] = epoch

    def arrive(self, rank: int, channel: int, epoch: int) -> Steps:
        for peer in self.peers(rank):
            self.signal(peer, channel, rank, epoch)
            yield

    def hear(self, rank: int, channel: int, sender: int, epoch: int) -> Steps:
        while self.pads.get((rank, channel, sender), 0) < epoch:
            yield

    def meet(self, rank: int, channel: int, epoch: int) -> Steps:
        for peer in self.peers(rank):
            yield from self.hear(rank, channel, peer, epoch)

    def put(self, owner: int, channel: int, number: int, slot: object, chunk: tuple[object, ...]) -> None:
        """``chunk``: begins with the call. Slots of kernels of two kinds lie elsewhere in a set."""
        there = self.sets.setdefault((owner, channel, number % DEPTH), {})
        assert slot not in there, f"{there[slot]} is overwritten"
        assert all(other[:1] == chunk[:1] for other in there.values()), f"{there} is overwritten"  # type: ignore[index]
        there[slot] = chunk

    def read(self, owner: int, channel: int, number: int, slot: object, chunk: tuple[object, ...]) -> None:
        assert self.sets[owner, channel, number % DEPTH].pop(slot) == chunk

    def push(self, rank: int, channel: int, number: int, chunk: tuple[object, ...]) -> Steps:
        for peer in self.peers(rank):
            self.put(peer, channel, number, rank, chunk)
            yield

    def take(self, rank: int, channel: int, number: int, chunk: tuple[object, ...]) -> Steps:
        for peer in self.peers(rank):
            yield
            self.read(rank, channel, number, peer, chunk)


def staged(split: bool, world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """A CTA of ``staged``."""
    epoch = world.epochs.get((rank, channel), 0)
    yield from start(world, rank, channel, num, call)
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


def norm(world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """A CTA of ``all_reduce_norm``, which takes a chunk out of its slot before it signals the one after next."""
    epoch = world.epochs.get((rank, channel), 0)
    yield from start(world, rank, channel, num, call)
    yield from world.meet(rank, channel, epoch + 1)
    yield from world.take(rank, channel, epoch, (call, channel, 0))
    for k in range(num):
        if k + AHEAD < num:
            yield from world.push(rank, channel, epoch + k + AHEAD, (call, channel, k + AHEAD))
        if k + 1 < num:
            yield from world.meet(rank, channel, epoch + 2 + k)
            yield from world.take(rank, channel, epoch + k + 1, (call, channel, k + 1))
        if k + AHEAD < num:
            yield from world.arrive(rank, channel, epoch + 1 + k + AHEAD)
    world.epochs[rank, channel] = epoch + num


def start(world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """What both begin with."""
    epoch = world.epochs.get((rank, channel), 0)
    for k in range(min(AHEAD, num)):
        yield from world.push(rank, channel, epoch + k, (call, channel, k))
        yield from world.arrive(rank, channel, epoch + 1 + k)


@cache
def plan_of(size: int, pull: bool) -> Plan:
    return ring_1d(nvlink(size), pull=pull)


def ring(pull: bool, world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """A CTA of ``ring``."""
    plan = plan_of(world.size, pull)
    epoch, most = world.epochs.get((rank, channel), 0), plan.num_signals
    for kind, peer, signal, slot, chunk in ring_events(plan, rank, num):
        if kind == "take":
            yield from world.hear(rank, channel, peer, epoch + signal)
            world.read(peer if pull else rank, channel, epoch + chunk, ("ring", slot), (call, peer, rank, chunk))
        elif kind == "put":
            owner = rank if pull else peer
            world.put(owner, channel, epoch + chunk, ("ring", slot), (call, rank, peer, chunk))
        else:
            world.signal(peer, channel, rank, epoch + signal)
        yield
    used = (num + 1) * most - num
    last = epoch + num + -(-used // DEPTH) * DEPTH
    for peer in world.peers(rank):
        if world.pads.get((peer, channel, rank)) != last:  # else the last message has said so
            world.signal(peer, channel, rank, last)
        yield
    world.epochs[rank, channel] = last


def barriers(world: World, rank: int, channel: int, num: int, call: int) -> Steps:
    """A CTA of a kernel between two barriers."""
    for _ in range(2):
        epoch = world.epochs.get((rank, channel), 0) + 1
        yield from world.arrive(rank, channel, epoch)
        yield from world.meet(rank, channel, epoch)
        world.epochs[rank, channel] = epoch


@dataclass
class Lamport:
    """A CTA of ``lamport.carry_out``, of threads that only its barriers hold together. ``size``: turns a slot.
    ``sender``: the only rank that sends, if one does. Some vectors come with a byte.

    Here a thread could refill a slot of several turns without waiting, as what it polled last was sent after its place
    was read; the waits are for the order of the stores that clear, which a model whose steps are seen by all at once
    does not show. ``waits``: whether it does, for the second slot, and for ranks that send nothing.
    """

    world: World
    rank: int
    channel: int
    num: int
    call: int
    size: int
    epoch: int
    waits: bool
    sender: int | None = None
    arrived: int = 0

    THREADS = 2

    def together(self) -> Steps:
        """CTA barrier."""
        self.arrived += 1
        goal = -(-self.arrived // self.THREADS) * self.THREADS
        while self.arrived < goal:
            yield

    def places(self, turn: int, thread: int, sender: int, receiver: int) -> list[tuple[int, ...]]:
        """Of a vector, and of its byte if one goes with it."""
        place = receiver, self.channel, (self.epoch + turn // self.size) % 2, sender, turn % self.size, thread
        return [(*place, part) for part in range(1 + ((self.call + turn + thread) % 3 == 0))]

    def senders(self) -> list[int]:
        peers = self.world.peers(self.rank)
        return peers if self.sender is None else [peer for peer in peers if peer == self.sender]

    def receivers(self) -> list[int]:
        return self.world.peers(self.rank) if self.sender in (None, self.rank) else []

    def thread(self, thread: int) -> Steps:
        world, rank, channel, size = self.world, self.rank, self.channel, self.size
        signals = self.num > size or (self.sender is not None and self.waits)
        if signals and thread == 0:
            yield from world.arrive(rank, channel, self.epoch)
        for turn in range(-1, self.num):
            if (later := turn + 1) < self.num:
                if later % size == 0 and later >= (size if self.waits else 2 * size):
                    yield from self.meet(thread, self.epoch + later // size - 1)
                for peer in self.receivers():
                    for place in self.places(later, thread, rank, peer):
                        assert place not in world.vectors, f"{world.vectors[place]} is overwritten"
                        world.vectors[place] = self.call, later
                        yield
            if turn < 0:
                continue
            for peer in self.senders():
                for place in self.places(turn, thread, peer, rank):
                    while place not in world.vectors:
                        yield
                    assert world.vectors.pop(place) == (self.call, turn)
            if later % size == 0 and later < self.num:
                yield from self.together()
                if thread == 0:
                    yield from world.arrive(rank, channel, self.epoch + turn // size + 1)
        if signals:
            yield from self.meet(thread, self.epoch + (self.num - 1) // size)

    def meet(self, thread: int, epoch: int) -> Steps:
        if thread == 0:
            yield from self.world.meet(self.rank, self.channel, epoch)
        yield from self.together()


def lamport(
    size: int, world: World, rank: int, channel: int, num: int, call: int, waits: bool = True, one_sends: bool = False
) -> Steps:
    """A CTA of vectors that announce themselves; if one rank sends, it does so in several calls."""
    rng, epoch = random.Random(call + 100 * rank), world.epochs.get((rank, channel), 0) + 1
    cta = Lamport(world, rank, channel, num, call, size, epoch, waits, call // 4 % world.size if one_sends else None)
    threads = [cta.thread(thread) for thread in range(Lamport.THREADS)]
    while threads:
        thread = rng.choice(threads)
        for _ in range(rng.choice((1, 5))):
            if next(thread, world) is world:
                threads.remove(thread)
                break
            yield
    world.epochs[rank, channel] = epoch + (num - 1) // size


KERNELS: dict[str, Kernel] = {
    "staged": partial(staged, False), "split": partial(staged, True), "norm": norm, "ring": partial(ring, False),
    "pull ring": partial(ring, True), "barriers": barriers, "lamport": partial(lamport, 9),
    "slots": partial(lamport, 2), "long slots": partial(lamport, 3), "short slots": partial(lamport, 1),
    "one sends": partial(lamport, 9, one_sends=True), "one sends in slots": partial(lamport, 2, one_sends=True),
}  # fmt: skip
LAMPORT = [kernel for kernel in KERNELS.values() if isinstance(kernel, partial) and kernel.func is lamport]


def run(rng: random.Random, kinds: list[Kernel]) -> None:
    """Some of these kernels, one after the other."""
    world = World(rng.choice((2, 2, 3, 4)))
    kernels = [(rng.choice(kinds), [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]) for _ in range(12)]

    def launch(rank: int, call: int) -> list[Steps]:
        """The CTAs of a kernel, by the chunks of each channel."""
        kernel, chunks = kernels[call]
        return [kernel(world, rank, channel, num, call) for channel, num in enumerate(chunks)]

    at = [0] * world.size
    running = [launch(rank, 0) for rank in range(world.size)]
    idle = 0
    while any(running) or min(at) < len(kernels) - 1:
        rank = rng.randrange(world.size)
        if not running[rank]:
            if at[rank] < len(kernels) - 1:
                at[rank] += 1
                running[rank] = launch(rank, at[rank])
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
    assert not world.vectors


@pytest.mark.parametrize("seed", range(150))
def test_any_order(seed: int) -> None:
    run(random.Random(seed), list(KERNELS.values()))


@pytest.mark.parametrize("seed", range(300))
def test_lamport_kernels_after_each_other(seed: int) -> None:
    run(random.Random(seed), LAMPORT)


@pytest.mark.parametrize(
    ("kernel", "seed"), [(partial(lamport, 1, waits=False), 1), (partial(lamport, 9, waits=False, one_sends=True), 7)]
)
def test_who_does_not_wait_is_found_out(kernel: Kernel, seed: int) -> None:
    """A second slot, of a single turn, is filled before a rank has heard from its peers in this kernel; and a sender
    that hears from nobody fills a slot again."""
    with pytest.raises(AssertionError, match="overwritten"):
        run(random.Random(seed), [kernel])
