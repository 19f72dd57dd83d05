"""Kernels of all kinds in one stream a rank, all ranks in one process on one GPU, with nothing that waits on the host.

Ranks are several kernels apart then, and consecutive kernels of different kinds take up the same pads, areas, staging
memory and queues of messages. What one of them leaves there while a peer may still read it, or expects there
and does not find, shows in a result or ends in a time-out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_local_collectives as collectives
import test_local_messages as messages
import test_local_norm as norms
import test_local_ring as rings
import test_local_world as worlds
import torch
from local_cases import DELAY_NS, PATIENCE_S
from norm_cases import Problem

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout, MessageLayout
from symmcomm.schedule.select_norm import Form
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Step = tuple[list[Callable[..., None]], list[tuple[Any, ...]]]
"""A function a rank, and its arguments."""
Made = tuple[list[Step], Callable[[], None]]
"""A call's steps, and a look at its results."""
ROUNDS = 4
ROOM = 700 << 10
"""Bytes of a call's symmetric tensors, at most."""
NO_CLUSTERS = 80
"""An architecture: on a GPU that ranks share, a cluster may find no room while others wait for it."""


def collective(world: LocalWorld, chance: random.Random, start: int, seed: int) -> Made:
    call = collectives.any_call(world, chance, start, seed)
    return [([call.function] * world.world_size, call.arguments)], call.verify


def ring(world: LocalWorld, chance: random.Random, start: int, seed: int) -> Made:
    size = world.world_size
    plan = rings.plan_for(size, chance.choice(["1d", "both", *(["2d", "pull"] if size in rings.DOMAINS else [])]))
    plan = chance.choice([plan, rings.whole_of(plan)])
    shape = rings.small(rings.ring_shape(plan, 1 << 20, DType.int32, Op.sum, world.num_sms))
    run = rings.Run(world, plan, DType.int32, Op.sum, chance.choice([3, 700, 5001]), shape, seed=seed)
    return [([run.function()] * size, [run.arguments(rank) for rank in range(size)])], run.verify


def message(world: LocalWorld, chance: random.Random, start: int, seed: int) -> Made:
    """To the rank some steps further on: all send, which waits for nobody, and then receive."""
    from symmcomm.kernels.gpu.point_to_point import Message

    ranks, size = range(world.world_size), world.world_size
    num_bytes, step = chance.choice((0, 7, 1000, 100_003)), chance.randrange(1, size)
    sources = [messages.data(seed + rank, num_bytes, seed % 2) for rank in ranks]
    rooms = [torch.zeros_like(source) for source in sources]
    send, receive = (
        collectives.compiled(world, Message(world_size=size, sends=sends, threads=64)) for sends in (True, False)
    )
    sent = [(sources[rank].data_ptr(), num_bytes, (rank + step) % size) for rank in ranks]
    received = [(rooms[rank].data_ptr(), num_bytes, (rank - step) % size) for rank in ranks]

    def verify() -> None:
        for rank in ranks:
            assert torch.equal(rooms[rank], sources[(rank - step) % size]), f"{num_bytes} bytes to rank {rank}"

    return [([send] * size, sent), ([receive] * size, received)], verify


def barrier(world: LocalWorld, chance: random.Random, start: int, seed: int) -> Made:
    algorithm, protocol, _ = chance.choice(worlds.BARRIERS)
    function = worlds.barrier(world, algorithm, protocol)
    return [([function] * world.world_size, [(0, 3)] * world.world_size)], lambda: None


def norm(world: LocalWorld, chance: random.Random, start: int, seed: int) -> Made:
    """LL and staged ones of ordinary tensors, all-reduced and scattered, and those on symmetric memory."""
    size, dtype = world.world_size, norms.DTYPE_OF[world.world_size]
    problem = Problem(dtype, chance.choice((1, 2, 5, 9)), chance.choice((64, 1024)), size, seed, with_bias=True)
    form, scatter = chance.choice(list(Form)), chance.random() < 0.5
    if form is Form.direct:
        variant, shape = chance.choice(("gather", "replicate", "keep")), norms.direct_shape(problem.rows, size, 16)
        kernels, arguments, verify = norms.direct_call(world, problem, shape, variant, start=start)
        return [([norms.compiled(world, kernel) for kernel in kernels], arguments)], verify
    if form is Form.lamport:
        rows = select_norm.part_rows(problem.rows, size) if scatter else problem.rows
        fits = select_norm.lamport_shape(rows, problem.hidden, dtype, size, world.num_sms, NO_CLUSTERS)
        assert fits is not None
        fits = replace(fits, grid=min(fits.grid, chance.choice((2, world.num_sms))))  # fewer CTAs than rows take turns
    else:
        fits = chance.choice([s for s in norms.shapes_of(world, problem, scatter) if s.form is form])
    tensors, kernels, arguments = norms.exchange_call(world, problem, fits, scatter)

    def check() -> None:
        for rank, mine in enumerate(tensors):
            mine.check(f"rank {rank}, {fits}", norms.part_of(problem, rank, scatter))

    return [([norms.compiled(world, kernel) for kernel in kernels], arguments)], check


KINDS = [collective] * 20 + [norm] * 20 + [ring] * 5 + [message] * 5 + [barrier] * 5


def in_any_order(chance: random.Random) -> list[Callable[..., Made]]:
    """With a norm behind each message: all ranks meet in it, so that one of them at most waits for a message, which
    takes more CTAs than its share of the SMs."""
    order = chance.sample(KINDS, len(KINDS))
    return [each for kind in order for each in ((kind, norm) if kind is message else (kind,))]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_all_kinds_of_kernels_in_one_stream(world_size: int) -> None:
    queues = MessageLayout.create(world_size).end - Layout.create(world_size).data
    num = len(KINDS) + KINDS.count(message)
    world, chance = LocalWorld(world_size, queues + num * ROOM, PATIENCE_S), random.Random(world_size)
    loaded: set[int] = set()
    for turn in range(ROUNDS):
        calls = [
            kind(world, chance, queues + place * ROOM, 100 * turn + place)
            for place, kind in enumerate(in_any_order(chance))
        ]
        steps = [step for of_call, _ in calls for step in of_call]
        for functions, arguments in steps:
            for function, given in zip(functions, arguments, strict=True):
                if id(function) not in loaded:
                    loaded.add(id(function))
                    world.load(function, *given)
        late = chance.randrange(world_size)
        world.put(late, at.DELAY_NS, DELAY_NS // 20)  # at every kernel
        torch.cuda.synchronize()
        for functions, arguments in steps:
            for rank, stream in enumerate(world.streams):
                functions[rank](world.base, world.stride, rank, *arguments[rank], stream.cuda_stream)
        torch.cuda.synchronize()
        world.put(late, at.DELAY_NS, 0)
        assert [world.record(rank) for rank in range(world_size)] == [None] * world_size
        for _, verify in calls:
            verify()
