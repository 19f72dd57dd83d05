"""All-gather and its kin by the copy engines, with all ranks in one process on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from local_cases import DELAY_NS, Place, assert_same, world_of
from test_local_collectives import DEADLINE_S, MOVES, launch_without_the_last, move, move_shape, random_bytes, run

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.select_gpu import Algorithm
from symmcomm.testing.local_world import LocalWorld

pytest.importorskip("cutlass")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextmanager
def copy_engines(world: LocalWorld) -> Iterator[Callable[..., None]]:
    """A rank's each, called as the push kernel would be."""
    from symmcomm.kernels.gpu.copy_engine import AllGatherCopyEngine

    size = world.world_size
    engines = [AllGatherCopyEngine(size, world.arch, world.arch_number) for _ in range(size)]
    yield lambda *a: engines[a[2]](*a[:3], *a[4:-2], a[-1])
    torch.cuda.synchronize()
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_copy_engine(world_size: int, kind: str) -> None:
    world = world_of(world_size)
    with copy_engines(world) as function:
        for seed, part in enumerate((1, 1000, 33333, 1 << 20)):
            push = move_shape(world, Algorithm.push, part)
            for in_place in (False, True) if kind in ("all_gather", "broadcast") else (False,):
                run(world, replace(move(world, kind, push, part, seed=seed, in_place=in_place), function=function))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_copy_engine_waits_for_the_late_one(world_size: int) -> None:
    """Nothing comes before a rank is in the call, however late: it clears its target until then. And all has come when
    a rank's call has ended."""
    world, part = world_of(world_size), 33333
    target, source = Place(world, part * world_size, True), Place(world, part, False)
    sent = [random_bytes(part, rank) for rank in range(world_size)]
    source.fill(sent)
    places = [(0, source.address(rank), 0, target.offset, part, part, -1, 0) for rank in range(world_size)]
    found = torch.empty(world_size, part * world_size, dtype=torch.uint8, device="cuda")
    with copy_engines(world) as function:

        def call(rank: int, cycles: int) -> None:
            stream = world.streams[rank]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                target.bytes(rank).zero_()
                function(world.base, world.stride, rank, *places[rank], stream.cuda_stream)
                found[rank].copy_(target.bytes(rank))

        world.load(lambda *a: call(a[2], 0))  # all that is launched while others wait
        for late in range(world_size):
            found.zero_()
            world.put(late, at.DELAY_NS, DELAY_NS)
            torch.cuda.synchronize()
            for rank in range(world_size):
                call(rank, 5_000_000 if rank == late else 0)  # milliseconds in which the others could come too soon
            torch.cuda.synchronize()
            world.put(late, at.DELAY_NS, 0)
            for rank in range(world_size):
                assert world.record(rank) is None
                assert_same(found[rank].cpu(), torch.cat(sent), f"rank {rank}, {late} was late")


@pytest.mark.parametrize(("kind", "root"), [(kind, 2) for kind in MOVES] + [("broadcast", 0), ("scatter", 0)])
def test_copy_engine_names_a_missing_peer(kind: str, root: int) -> None:
    world = LocalWorld(3, 1 << 20, DEADLINE_S)
    call = move(world, kind, move_shape(world, Algorithm.push, 1000), 1000, seed=root)
    with copy_engines(world) as function:
        launch_without_the_last(world, replace(call, function=function))
