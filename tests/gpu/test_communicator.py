"""Every call of a communicator on GPUs, in processes of their own: one GPU each, or several on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from local_cases import PERIOD, repeated
from ranks import NEEDS_GPU, PAIR, WORLDS, communicator, filled, host, put, same, start

from symmcomm import Communicator
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import check_bits, check_reduction, make_input, torch_dtype

pytest.importorskip("cutlass")
pytestmark = NEEDS_GPU

COUNTS = (0, 1, 3, 8, 127, 4099)
LARGE = (8 << 20) + 40  # bytes: many rounds through staging memory, the last one odd
MOVED = (torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64)


@lru_cache(maxsize=1)
def inputs(world_size: int, count: int, dtype: DType, seed: int) -> list[torch.Tensor]:
    """All ranks', on the host, with awkward values: of ``count`` elements those up to where they repeat."""
    return [make_input(rank, min(count, PERIOD), dtype, seed) for rank in range(world_size)]


def check_repeated(got: torch.Tensor, parts: list[torch.Tensor], dtype: DType, op: Op, what: str) -> None:
    """``got`` is the reduction of sequences that begin with ``parts`` and repeat: its beginning is, and it repeats."""
    got, period = got.cpu(), len(parts[0])
    check_reduction(got[:period], [part[: len(got)] for part in parts], dtype, op, what)
    check_bits(got[period:], got[: max(len(got) - period, 0)], f"{what}, from element {period}")


def check_one(comm: Communicator, dtype: DType, op: Op, count: int, tensor: torch.Tensor) -> None:
    """One all-reduce of ``tensor``."""
    parts = inputs(comm.world_size, count, dtype, count + op)
    tensor.copy_(repeated(parts[comm.rank], count))
    comm.all_reduce(tensor, op.name)
    check_repeated(tensor, parts, dtype, op, f"all_reduce {dtype.name} {op.name} {count}")


def every_reduction(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        for dtype in DType:
            for op in Op:
                if supports(dtype, op):
                    check_one(comm, dtype, op, 1000, torch.empty(1000, dtype=torch_dtype(dtype), device="cuda"))


def sizes_and_places(num_gpus: int) -> None:
    """Counts, alignments, symmetric and ordinary tensors, of types of each size."""
    with communicator(num_gpus) as comm:
        for dtype in (DType.bfloat16, DType.int8, DType.float64):
            kind = torch_dtype(dtype)
            symmetric = comm.empty(LARGE // kind.itemsize, dtype=kind, device="cuda")
            assert comm.is_symmetric(symmetric)
            for count in COUNTS:
                room = torch.empty(count + 1, dtype=kind, device="cuda")
                check_one(comm, dtype, Op.sum, count, room[:count])
                check_one(comm, dtype, Op.sum, count, room[1:])
                check_one(comm, dtype, Op.max, count, symmetric[:count])
            ordinary = torch.empty(LARGE // kind.itemsize + 1, dtype=kind, device="cuda")
            check_one(comm, dtype, Op.sum, len(symmetric), symmetric)
            check_one(comm, dtype, Op.sum, len(symmetric), ordinary[1:])
            some = (1 << 20) // kind.itemsize
            check_one(comm, dtype, Op.avg, some, ordinary[:some])
            comm.free(symmetric)


def reduce_and_scatter(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        size, rank = comm.world_size, comm.rank
        for dtype, op, count in [(d, Op.sum, 1001) for d in DType] + [
            (DType.bfloat16, Op.avg, 0), (DType.bfloat16, Op.avg, 1), (DType.bfloat16, Op.sum, (3 << 20) + 5),
            (DType.int32, Op.bxor, (1 << 20) + 1),
        ]:  # fmt: skip
            kind = torch_dtype(dtype)
            parts = inputs(size, size * count, dtype, count)
            input = torch.empty(size * count, dtype=kind, device="cuda")
            input.copy_(repeated(parts[rank], size * count))
            output = torch.empty(count, dtype=kind, device="cuda")
            comm.reduce_scatter_tensor(output, input, op.name)
            mine = [part.roll(-rank * count) for part in parts]
            check_repeated(output, mine, dtype, op, f"reduce_scatter {dtype.name} {count}")
            inside = input[rank * count : (rank + 1) * count]
            comm.reduce_scatter_tensor(inside, input, op.name)
            assert torch.equal(inside.cpu().view(torch.uint8), output.cpu().view(torch.uint8)), "inside the input"
        symmetric = comm.empty(size * (9 << 20) // 2, dtype=torch.bfloat16, device="cuda")  # read in place
        symmetric.copy_(torch.arange(len(symmetric), device="cuda") % 7 + rank)
        output = torch.empty(len(symmetric) // size, dtype=torch.bfloat16, device="cuda")
        comm.reduce_scatter_tensor(output, symmetric)
        start = rank * len(output)
        numbers = torch.arange(start, start + len(output)) % 7 * size + size * (size - 1) // 2
        same(output, numbers.to(torch.bfloat16), "reduce_scatter of a symmetric tensor")
        for count in (5, 1000, LARGE // 4):
            for dst in range(size):
                parts = inputs(size, count, DType.float32, count)
                tensor = repeated(parts[rank], count).cuda()
                comm.reduce(tensor, dst)
                expected = parts if dst == rank else [parts[rank]]
                check_repeated(tensor, expected, DType.float32, Op.sum, f"reduce to {dst}")


def moves(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        size, rank, ranks = comm.world_size, comm.rank, range(comm.world_size)
        for kind, count, shift in [(k, c, s) for k in MOVED for c, s in ((0, 0), (1, 0), (1001, 1))] + [
            (torch.uint8, (1 << 20) + 3, 1), (torch.uint8, (2 << 20) + 5, 0), (torch.uint8, 1 << 20, rank),
        ]:  # fmt: skip
            what = f"{kind} {count}"
            output = filled(99, size * count, kind, shift)
            comm.all_gather_into_tensor(output, filled(rank, count, kind, shift))
            together = torch.cat([host(peer, count, kind) for peer in ranks])
            same(output, together, f"all_gather {what}")
            put(output.zero_()[rank * count : (rank + 1) * count], rank)
            comm.all_gather_into_tensor(output, output[rank * count : (rank + 1) * count])
            same(output, together, f"all_gather in place {what}")
            for src in ranks:
                tensor = filled(rank + 10 * src, count, kind, shift)
                comm.broadcast(tensor, src)
                same(tensor, host(src + 10 * src, count, kind), f"broadcast {what} from {src}")
            swapped = [host(peer, size * count, kind)[rank * count : (rank + 1) * count] for peer in ranks]
            comm.all_to_all_single(output, filled(rank, size * count, kind, shift))
            same(output, torch.cat(swapped), f"all_to_all {what}")
            put(output, rank)
            comm.all_to_all_single(output, output)
            same(output, torch.cat(swapped), f"all_to_all in place {what}")


def symmetric_moves(num_gpus: int) -> None:
    """Large parts of symmetric tensors: by the Lamport protocol, then pushed and pulled."""
    with communicator(num_gpus) as comm:
        move_symmetric(comm)
        comm.gpu_side.set_thresholds(replace(comm.gpu_side.thresholds, lamport_bytes=0, gather_push_bytes=1 << 20))
        move_symmetric(comm)


def move_symmetric(comm: Communicator) -> None:
    size, rank, part = comm.world_size, comm.rank, 2 << 20
    whole, other = (comm.empty(size * part, dtype=torch.uint8, device="cuda") for _ in range(2))
    mine = comm.empty(part, dtype=torch.uint8, device="cuda")
    together = torch.cat([host(peer, part, torch.uint8) for peer in range(size)])
    swapped = torch.cat([host(peer, size * part, torch.uint8).view(size, part)[rank] for peer in range(size)])
    comm.all_gather_into_tensor(whole.zero_(), put(mine, rank))
    same(whole, together, "all_gather into a symmetric tensor")
    ordinary = torch.zeros_like(whole)
    comm.all_gather_into_tensor(ordinary, mine)
    same(ordinary, together, "all_gather out of one")
    put(whole.zero_()[rank * part : (rank + 1) * part], rank)
    comm.all_gather_into_tensor(whole, whole[rank * part : (rank + 1) * part])
    same(whole, together, "all_gather in place")
    comm.all_to_all_single(other, put(whole, rank))
    same(other, swapped, "all_to_all")
    comm.all_to_all_single(whole, whole)
    same(whole, swapped, "all_to_all in place")
    put(whole, rank)
    comm.broadcast(whole, size - 1)
    same(whole, host(size - 1, size * part, torch.uint8), "broadcast")
    for tensor in (whole, other, mine):
        comm.free(tensor)


def uneven(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        size, rank, ranks = comm.world_size, comm.rank, range(comm.world_size)
        for scale in (0, 1, 1000, 200_003):
            # Rows from each rank to each; even ranks keep nothing.
            rows = [[(scale * (1 + (3 * a + b) % 4)) // 4 * (a != b or a % 2) for b in ranks] for a in ranks]
            sent = [host(a, 2 * sum(rows[a]), torch.float32).view(-1, 2) for a in ranks]
            comes = [rows[a][rank] for a in ranks]
            output = torch.full((sum(comes), 2), -1.0, device="cuda")
            comm.all_to_all_single(output, sent[rank].cuda(), comes, rows[rank])
            starts = [sum(rows[a][:rank]) for a in ranks]
            expected = [sent[a][start : start + rows[a][rank]] for a, start in zip(ranks, starts, strict=True)]
            same(output, torch.cat(expected).contiguous(), f"uneven all_to_all {scale}")
        for count in (0, 1, 1001, (1 << 20) + 1):
            for root in {0, size - 1}:
                parts = [torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in ranks] if rank == root else None
                comm.gather(filled(rank, count, torch.uint8, 1), parts, root)
                for peer, part in enumerate(parts or []):
                    same(part, host(peer, count, torch.uint8), f"gather {count}")
                parts = [filled(5 + peer, count, torch.uint8, peer % 2) for peer in ranks] if rank == root else None
                tensor = torch.zeros(count, dtype=torch.uint8, device="cuda")
                comm.scatter(tensor, parts, root)
                same(tensor, host(5 + rank, count, torch.uint8), f"scatter {count}")
            parts = [torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in ranks]
            comm.all_gather(parts, filled(rank, count, torch.uint8))
            for peer, part in enumerate(parts):
                same(part, host(peer, count, torch.uint8), f"all_gather of lists {count}")
            outputs = [torch.zeros(count + peer, dtype=torch.uint8, device="cuda") for peer in ranks]
            comm.all_to_all(outputs, [filled(rank, count + rank, torch.uint8) for _ in ranks])
            for peer, part in enumerate(outputs):
                same(part, host(peer, count + peer, torch.uint8), f"all_to_all of lists {count}")


def messages(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        size, rank = comm.world_size, comm.rank
        if size == 1:
            return
        after, before = (rank + 1) % size, (rank - 1) % size
        for round_ in range(3):
            for count in (0, 1, 1001, 100_000):  # each sends before it receives: the queue holds it
                comm.send(filled(rank + round_, count, torch.uint8, 1), after)
            for count in (0, 1, 1001, 100_000):
                tensor = torch.zeros(count, dtype=torch.uint8, device="cuda")
                comm.recv(tensor, before)
                same(tensor, host(before + round_, count, torch.uint8), f"message of {count}")
        large = filled(rank, 6 << 20, torch.uint8)
        got = torch.zeros_like(large)
        for turn in range(2):  # longer than any queue
            if rank % 2 == turn:
                if after % 2 != turn:
                    comm.send(large, after)
            elif before % 2 == turn:
                comm.recv(got, before)
                same(got, host(before, len(large), torch.uint8), "a long message")


FEW = 4  # more ranks than that take turns on a GPU for milliseconds a step


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_dtype_and_operation(world_size: int) -> None:
    """What differs between worlds, and between ranks that share a GPU and others, is in the other tests."""
    start(every_reduction, world_size, PAIR)


BODIES = (sizes_and_places, reduce_and_scatter, moves, symmetric_moves, uneven, messages)
CALLS = [
    pytest.param(*world.values, body, id=f"{world.id}-{body.__name__}", marks=world.marks)
    for body in BODIES
    for world in WORLDS
    if int(str(world.values[0])) <= FEW or body is sizes_and_places
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_gpus", "body"), CALLS)
def test_calls(world_size: int, num_gpus: int, body: Callable[[int], None]) -> None:
    start(body, world_size, num_gpus)
