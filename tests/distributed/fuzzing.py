"""Random calls on symm and on gloo, drawn from a seed that all ranks share, so that a failure can be repeated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from calls import Group, numbers

OPS = dist.ReduceOp
NUMERIC = (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)
MOVABLE = (*NUMERIC, torch.bool, torch.bfloat16)
COUNTS = (1, 2, 3, 5, 8, 13, 64, 255, 1000, 4096, 5001, 65_536, 200_003)

Started = tuple[list[dist.Work | None], list[torch.Tensor]]


def count_of(draw: random.Random) -> int:
    return draw.choice(COUNTS) + draw.choice((0, 0, 1))


def op_of(draw: random.Random, dtype: torch.dtype) -> dist.ReduceOp:
    ops = [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX]
    return draw.choice(ops if dtype.is_floating_point else [*ops, OPS.BAND, OPS.BOR, OPS.BXOR])


def all_reduce(group: Group, draw: random.Random, later: bool) -> Started:
    dtype = draw.choice(NUMERIC)
    op, tensor = op_of(draw, dtype), numbers(group, count_of(draw), dtype)
    return [dist.all_reduce(tensor, op, group=group, async_op=later)], [tensor]


def reduce(group: Group, draw: random.Random, later: bool) -> Started:
    dtype, root = draw.choice(NUMERIC), draw.randrange(group.size())
    op, tensor = op_of(draw, dtype), numbers(group, count_of(draw), dtype)
    work = dist.reduce(tensor, group_dst=root, op=op, group=group, async_op=later)
    return [work], [tensor] if group.rank() == root else []


def broadcast(group: Group, draw: random.Random, later: bool) -> Started:
    root, tensor = draw.randrange(group.size()), numbers(group, count_of(draw), draw.choice(MOVABLE))
    return [dist.broadcast(tensor, group_src=root, group=group, async_op=later)], [tensor]


def all_gather(group: Group, draw: random.Random, later: bool) -> Started:
    tensor = numbers(group, count_of(draw), draw.choice(MOVABLE))
    outputs = [torch.zeros_like(tensor) for _ in range(group.size())]
    return [dist.all_gather(outputs, tensor, group=group, async_op=later)], outputs


def all_gather_single(group: Group, draw: random.Random, later: bool) -> Started:
    tensor = numbers(group, count_of(draw), draw.choice(MOVABLE))
    output = tensor.new_zeros(group.size() * tensor.numel())
    return [dist.all_gather_into_tensor(output, tensor, group=group, async_op=later)], [output]


def gather(group: Group, draw: random.Random, later: bool) -> Started:
    root, tensor = draw.randrange(group.size()), numbers(group, count_of(draw), draw.choice(MOVABLE))
    outputs = [torch.zeros_like(tensor) for _ in range(group.size())] if group.rank() == root else None
    return [dist.gather(tensor, outputs, group_dst=root, group=group, async_op=later)], outputs or []


def scatter(group: Group, draw: random.Random, later: bool) -> Started:
    root, count, dtype = draw.randrange(group.size()), count_of(draw), draw.choice(MOVABLE)
    inputs = [numbers(group, count, dtype, salt) for salt in range(group.size())] if group.rank() == root else None
    output = torch.zeros(count, dtype=dtype)
    return [dist.scatter(output, inputs, group_src=root, group=group, async_op=later)], [output]


def reduce_scatter(group: Group, draw: random.Random, later: bool) -> Started:
    dtype, count = draw.choice(NUMERIC), count_of(draw)
    op, output = op_of(draw, dtype), torch.zeros(count, dtype=dtype)
    inputs = [numbers(group, count, dtype, salt) for salt in range(group.size())]
    return [dist.reduce_scatter(output, inputs, op, group=group, async_op=later)], [output]


def reduce_scatter_single(group: Group, draw: random.Random, later: bool) -> Started:
    dtype, count = draw.choice(NUMERIC), count_of(draw)
    op, output = op_of(draw, dtype), torch.zeros(count, dtype=dtype)
    tensor = numbers(group, count * group.size(), dtype)
    return [dist.reduce_scatter_tensor(output, tensor, op, group=group, async_op=later)], [output]


def all_to_all_single(group: Group, draw: random.Random, later: bool) -> Started:
    size, rank, dtype, width = group.size(), group.rank(), draw.choice(MOVABLE), draw.choice((1, 3, 16))
    if draw.random() < 0.5:
        rows = draw.choice((1, 5, 100))
        tensor = numbers(group, size * rows * width, dtype).view(-1, width)
        output = torch.zeros_like(tensor)
        return [dist.all_to_all_single(output, tensor, group=group, async_op=later)], [output]
    table = [[draw.choice((0, 1, 2, 30, 1000)) for _ in range(size)] for _ in range(size)]
    sent, received = table[rank], [table[peer][rank] for peer in range(size)]
    tensor = numbers(group, sum(sent) * width, dtype).view(-1, width)
    output = torch.zeros(sum(received), width, dtype=dtype)
    return [dist.all_to_all_single(output, tensor, received, sent, group=group, async_op=later)], [output]


def messages(group: Group, draw: random.Random, later: bool) -> Started:
    """Each rank to some others, with tags, all at once."""
    size, rank, dtype = group.size(), group.rank(), draw.choice(NUMERIC)
    routes = list(itertools.permutations(range(size), 2))
    routes = [(*draw.choice(routes), number, count_of(draw)) for number in range(draw.randrange(1, 6))]
    works: list[dist.Work | None] = []
    outputs = []
    for src, dst, tag, count in routes:
        if src == rank:
            works.append(dist.isend(numbers(group, count, dtype, tag), group=group, group_dst=dst, tag=tag))
    draw.shuffle(routes)
    for src, dst, tag, count in routes:
        if dst == rank:
            outputs.append(torch.zeros(count, dtype=dtype))
            works.append(dist.irecv(outputs[-1], group=group, group_src=src, tag=tag))
    return works, outputs


def barrier(group: Group, draw: random.Random, later: bool) -> Started:
    return [dist.barrier(group, async_op=later)], []


KINDS: tuple[Callable[[Group, random.Random, bool], Started], ...] = (
    all_reduce, all_reduce, reduce, broadcast, all_gather, all_gather_single, gather, scatter, reduce_scatter,
    reduce_scatter_single, all_to_all_single, messages, messages, barrier,
)  # fmt: skip


def window(groups: list[Group], seed: int, first: int, num_calls: int) -> list[list[torch.Tensor]]:
    """Starts so many calls, some asynchronous, and waits for them in a random order; returns their outputs."""
    started: list[Started] = []
    for number in range(first, first + num_calls):
        draw = random.Random(f"{seed} {number}")
        kind, later, group = draw.choice(KINDS), draw.random() < 0.6, draw.choice(groups)
        started.append(([], []) if group is None else kind(group, draw, later))
    works = [work for some, _ in started for work in some if work is not None]
    random.Random(f"{seed} {first} {dist.get_rank()}").shuffle(works)  # each rank in its own order
    for work in works:
        work.wait()
    return [outputs for _, outputs in started]


def fuzz(num_calls: int, seed: int) -> None:
    """Raises AssertionError with the number of the first call whose outputs differ."""
    dist.init_process_group("symm")
    ranks = range(dist.get_world_size())
    members = [list(ranks), *([list(ranks[:-1]), list(ranks[1:]), [ranks[0], ranks[-1]]] if len(ranks) > 2 else [])]
    symm = [dist.group.WORLD, *(_member(dist.new_group(some)) for some in members[1:])]
    gloo = [_member(dist.new_group(some, backend="gloo")) for some in members]
    first = 0
    while first < num_calls:
        length = min(random.Random(f"{seed} length {first}").choice((1, 2, 4, 8)), num_calls - first)
        expected, got = window(gloo, seed, first, length), window(symm, seed, first, length)
        for number, (left, right) in enumerate(zip(expected, got, strict=True), first):
            same = len(left) == len(right) and all(map(torch.equal, left, right))
            assert same, f"call {number} of seed {seed} on {len(ranks)} ranks"
        first += length
    dist.destroy_process_group()


def _member(group: Group) -> Group | None:
    return group if isinstance(group, dist.ProcessGroup) else None
