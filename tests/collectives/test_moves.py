"""Calls that move data: all_gather, broadcast, gather, scatter, all_to_all (even and uneven), send, recv; any dtype."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import pytest
import torch
from placements import PATHS, PLACEMENTS, Arena, as_bytes, communicator
from torch import Tensor

import symmcomm
from symmcomm import Communicator
from symmcomm.testing.spawn import run_ranks

DTYPES = [
    torch.float32, torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64,
    torch.complex128, torch.uint16, torch.float16, torch.float64, torch.complex32,
]  # fmt: skip
SIZES = (0, 1, 3, 63, 64, 65, 1000, 4097)


@lru_cache(maxsize=256)
def data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Any bytes (of bool: 0 and 1), all ranks' different."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same(got: Tensor, expected: Tensor, what: str) -> None:
    if as_bytes(got) == as_bytes(expected):
        return
    pairs = zip(as_bytes(got), as_bytes(expected), strict=True)
    at = next(idx for idx, (g, e) in enumerate(pairs) if g != e)
    raise AssertionError(f"{what}: byte {at} of {got.nbytes} differs")


def beyond_a_slot(comm: Communicator, dtype: torch.dtype) -> int:
    return 5 * comm.layout.slot_bytes // (2 * dtype.itemsize) + 3


def plan(comm: Communicator, full: bool) -> list[tuple[torch.dtype, int, tuple[str, ...]]]:
    """(dtype, count, placements) of all cases; thinned: each dtype at two or three sizes, the placements in turn."""
    if full:
        return [(d, n, PLACEMENTS) for d in DTYPES for n in (*SIZES, beyond_a_slot(comm, d))]
    found = []
    for idx, dtype in enumerate(DTYPES):
        for turn, count in enumerate((SIZES[idx % 8], 129 + idx, beyond_a_slot(comm, dtype))[: 3 - idx % 2]):
            found.append((dtype, count, (PLACEMENTS[(idx + turn) % 4],)))
    return found


# Calls in which all takers get the same.


def gather_everywhere(comm: Communicator, arena: Arena, count: int, dtype: torch.dtype, placement: str) -> None:
    everything = torch.cat([data(peer, count, dtype) for peer in range(comm.world_size)])
    own, start = data(comm.rank, count, dtype), comm.rank * count
    for in_place in (False, True):
        output = arena.blank(comm.world_size * count, dtype, placement)
        part = output[start : start + count]
        input = part.copy_(own) if in_place else arena.place(own, placement)
        comm.all_gather_into_tensor(output, input)
        same(output, everything, f"all_gather, in place: {in_place}")
        same(input, own, f"input of all_gather, in place: {in_place}")


def broadcast_from_each(comm: Communicator, arena: Arena, count: int, dtype: torch.dtype, placement: str) -> None:
    for src in range(comm.world_size):
        tensor = arena.place(data(comm.rank, count, dtype), placement)
        comm.broadcast(tensor, src)
        same(tensor, data(src, count, dtype), f"broadcast from {src}")


def gather_and_scatter(comm: Communicator, arena: Arena, count: int, dtype: torch.dtype, placement: str) -> None:
    root, ranks = count % comm.world_size, range(comm.world_size)
    own, is_root = data(comm.rank, count, dtype), comm.rank == count % comm.world_size
    tensor, room = arena.place(own, placement), arena.blank(comm.world_size * count, dtype, placement)
    parts = [room[peer * count : (peer + 1) * count] for peer in ranks] if is_root else None
    comm.gather(tensor, parts, root)
    for peer, part in enumerate(parts or []):
        same(part, data(peer, count, dtype), f"gather on {root}, part {peer}")
    same(tensor, own, "input of gather")
    everything = torch.cat([data(peer, count, dtype) for peer in ranks])
    whole = arena.place(everything, placement, area=1)
    tensor = arena.blank(count, dtype, placement, area=0)
    parts = [whole[peer * count : (peer + 1) * count] for peer in ranks] if is_root else None
    comm.scatter(tensor, parts, root)
    same(tensor, own, f"scatter from {root}")
    same(whole, everything, "list of scatter")


# Calls in which each taker gets its own.


def exchange(comm: Communicator, arena: Arena, count: int, dtype: torch.dtype, placement: str) -> None:
    """Even parts of ``count`` / world_size elements."""
    part, world_size = count // comm.world_size, comm.world_size
    inputs = [data(peer, part * world_size, dtype) for peer in range(world_size)]
    expected = torch.cat([peers[comm.rank * part : (comm.rank + 1) * part] for peers in inputs])
    for in_place in (False, True):
        input = arena.place(inputs[comm.rank], placement)
        output = input if in_place else arena.blank(part * world_size, dtype, placement)
        comm.all_to_all_single(output, input)
        same(output, expected, f"all_to_all, in place: {in_place}")
        if not in_place:
            same(input, inputs[comm.rank], "input of all_to_all")


def rows_of(sender: int, taker: int, world_size: int, count: int) -> int:
    """Uneven: nothing to some, several staging slots to others."""
    return 0 if (sender + 2 * taker) % 3 == 0 else (sender * world_size + taker) * count // world_size**2


def exchange_uneven(comm: Communicator, arena: Arena, count: int, dtype: torch.dtype, placement: str) -> None:
    ranks, width = range(comm.world_size), 1 + count % 3
    sizes = [[rows_of(sender, taker, comm.world_size, count // width) for taker in ranks] for sender in ranks]
    parts = []
    for sender in ranks:
        start = sum(sizes[sender][: comm.rank])
        whole = data(sender, sum(sizes[sender]) * width, dtype).view(-1, width)
        parts.append(whole[start : start + sizes[sender][comm.rank]])
    expected = torch.cat(parts)
    own = data(comm.rank, sum(sizes[comm.rank]) * width, dtype).view(-1, width)
    input = arena.place(own, placement)
    output = arena.blank(expected.numel(), dtype, placement).view(-1, width)
    comm.all_to_all_single(output, input, [sizes[sender][comm.rank] for sender in ranks], sizes[comm.rank])
    same(output, expected, f"uneven all_to_all {sizes}")
    same(input, own, f"input of uneven all_to_all {sizes}")


MOVES = (gather_everywhere, broadcast_from_each, gather_and_scatter, exchange, exchange_uneven)


def check_moves(path: str, full: bool) -> None:
    with communicator(path) as comm:
        arena = Arena(comm, comm.world_size * 4 * comm.layout.slot_bytes + (64 << 10) * comm.world_size)
        for dtype, count, placements in plan(comm, full):
            for placement in placements:
                what = f"{dtype} × {count}, {placement}, {comm.world_size} ranks"
                for move in MOVES:
                    try:
                        move(comm, arena, count, dtype, placement)
                        arena.check(move.__name__)
                    except AssertionError as error:
                        raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_moves(world_size: int, path: str) -> None:
    run_ranks(check_moves, world_size, path, True, timeout_s=280, env=PATHS[path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [4, 5, 8])
def test_moves_thinned(world_size: int, path: str) -> None:
    run_ranks(check_moves, world_size, path, False, timeout_s=280, env=PATHS[path])


def check_splits_of_one_side() -> None:
    """Splits may be given for one tensor, if the other's are even."""
    with symmcomm.init() as comm:
        output = torch.empty(4)
        comm.all_to_all_single(output, torch.arange(4.0) + 10 * comm.rank, [2, 2])
        assert output.tolist() == [float(10 * peer + 2 * comm.rank + idx) for peer in range(2) for idx in range(2)]
        received = torch.empty(3 if comm.rank == 0 else 1)
        sizes = [[2, 0], [1, 1]]
        taken = [sizes[peer][comm.rank] for peer in range(2)]
        comm.all_to_all_single(received, torch.full((2,), float(comm.rank)), taken, sizes[comm.rank])
        assert received.tolist() == ([0.0, 0.0, 1.0] if comm.rank == 0 else [1.0])


def test_splits_of_one_side() -> None:
    run_ranks(check_splits_of_one_side, 2)


def check_empty_after_full(path: str) -> None:
    """A call without elements must not remember what the call before it moved."""
    with communicator(path) as comm:
        empty = torch.empty(0)
        for full in (torch.arange(4000.0), comm.empty(4000)):
            kept = full.clone()
            comm.all_to_all_single(torch.empty(4000), full)
            comm.all_to_all_single(torch.empty(0), empty)
            comm.all_gather_into_tensor(torch.empty(0), empty)
            comm.all_to_all_single(torch.empty(0), empty, [0] * comm.world_size, [0] * comm.world_size)
            comm.reduce_scatter_tensor(torch.empty(0), empty)
            comm.broadcast(empty, 0)
            assert torch.equal(full, kept)


@pytest.mark.parametrize("path", PATHS)
def test_empty_call_after_a_full_one(path: str) -> None:
    run_ranks(check_empty_after_full, 2, path, env=PATHS[path])


def check_gathered_bytes(path: str) -> None:
    with communicator(path) as comm:
        for length in (0, 1, 100, 5000, 200_000):
            lengths = [(length * (peer + 1)) % (length + 7) for peer in range(comm.world_size)]
            payloads = [bytes([peer + 1]) * n for peer, n in enumerate(lengths)]
            assert comm.all_gather_bytes(payloads[comm.rank]) == payloads


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_gather_bytes(world_size: int, path: str) -> None:
    run_ranks(check_gathered_bytes, world_size, path, env=PATHS[path])


# Messages.


def message_sizes(comm: Communicator, dtype: torch.dtype) -> list[int]:
    """Around a chunk, and beyond what the queue holds."""
    chunk = (comm.layout.message_bytes - 64) // dtype.itemsize
    return [0, 1, 3, 63, 64, 65, 1000, chunk - 1, chunk, chunk + 1, 4 * chunk, 6 * chunk + 1]


def check_messages() -> None:
    """In pairs, each direction in turn: every size, dtype and placement."""
    with symmcomm.init() as comm:
        arena = Arena(comm, 7 * comm.layout.message_bytes + 1024)
        for a, b in ((a, b) for a in range(comm.world_size) for b in range(comm.world_size) if a != b):
            if comm.rank not in (a, b):
                continue
            for idx, dtype in enumerate(DTYPES[:: 1 if comm.world_size == 2 else 4]):
                for turn, count in enumerate(message_sizes(comm, dtype)):
                    placement = PLACEMENTS[(idx + turn + a) % 4]
                    tensor = arena.place(data(comm.rank, count, dtype), placement)
                    if comm.rank == a:
                        comm.send(tensor, b)
                    else:
                        comm.recv(tensor, a)
                    what = f"message of {count} {dtype} from {a} to {b}, {placement}"
                    same(tensor, data(a, count, dtype), what)
                    arena.check(what)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages(world_size: int) -> None:
    run_ranks(check_messages, world_size, timeout_s=120)


def check_queue() -> None:
    """Small messages leave before anybody takes them, in both directions, and arrive in order; other calls between."""
    with symmcomm.init() as comm:
        peers = [peer for peer in range(comm.world_size) if peer != comm.rank]
        for round_ in range(50):
            for number in range(4):
                for peer in peers:
                    comm.send(torch.tensor([round_, number, comm.rank, peer]), peer)
            total = torch.ones(3)
            comm.all_reduce(total)
            assert total.tolist() == [float(comm.world_size)] * 3
            for peer in reversed(peers):
                for number in range(4):
                    message = torch.empty(4, dtype=torch.int64)
                    comm.recv(message, peer)
                    assert message.tolist() == [round_, number, peer, comm.rank]


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_queue_in_order(world_size: int) -> None:
    run_ranks(check_queue, world_size)


def check_stream() -> None:
    """One rank sends a thousand messages of many sizes, the other takes them at its own pace."""
    with symmcomm.init() as comm:
        sizes = [(n * 7919) % 3000 if n % 100 else 200_000 for n in range(1000)]
        starts = [0, *accumulate(sizes)]
        for n, size in enumerate(sizes):
            expected = torch.arange(starts[n], starts[n] + size)
            if comm.rank == 0:
                comm.send(expected, 1)
            else:
                message = torch.empty(size, dtype=torch.int64)
                comm.recv(message, 0)
                assert torch.equal(message, expected), f"message {n}"


def test_stream_of_messages() -> None:
    run_ranks(check_stream, 2)
