"""Calls of torch.distributed with their results, to be made on a symm and on another group and compared. Tensors are on
torch's default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
Call = Callable[[Group], list[torch.Tensor]]

COUNTS = (0, 1, 7, 1024, 100_003)


def numbers(group: Group, count: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Small numbers that differ from rank to rank, the same in every call; whole, so that sums do not depend on
    their order."""
    generator = torch.Generator().manual_seed(1000 * group.rank() + salt)
    whole = torch.randint(1, 4, (count,), generator=generator, device="cpu").to(torch.get_default_device())
    return whole.bool() if dtype is torch.bool else whole.to(dtype)


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def all_reduce(op: dist.ReduceOp, dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        tensor = numbers(group, count, dtype)
        wait(dist.all_reduce(tensor, op, group=group, async_op=async_op))
        return [tensor]

    return call


def reduce(op: dist.ReduceOp, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        results = []
        for root in range(group.size()):
            tensor = numbers(group, count, salt=root)
            wait(dist.reduce(tensor, group_dst=root, op=op, group=group, async_op=async_op))
            results += [tensor] if group.rank() == root else []
        return results

    return call


def broadcast(dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        results = [numbers(group, count, dtype, salt) for salt in range(group.size())]
        for root, tensor in enumerate(results):
            wait(dist.broadcast(tensor, group_src=root, group=group, async_op=async_op))
        return results

    return call


def all_gather(dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        results = [torch.zeros(count, dtype=dtype) for _ in range(group.size())]
        wait(dist.all_gather(results, numbers(group, count, dtype), group=group, async_op=async_op))
        return results

    return call


def all_gather_single(dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        output = torch.zeros(group.size() * count, dtype=dtype)
        wait(dist.all_gather_into_tensor(output, numbers(group, count, dtype), group=group, async_op=async_op))
        return [output]

    return call


def gather(dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        root = group.size() - 1
        results = [torch.zeros(count, dtype=dtype) for _ in range(group.size())] if group.rank() == root else None
        tensor = numbers(group, count, dtype)
        wait(dist.gather(tensor, results, group_dst=root, group=group, async_op=async_op))
        return results or []

    return call


def scatter(dtype: torch.dtype, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        parts = [numbers(group, count, dtype, salt) for salt in range(group.size())] if group.rank() == 0 else None
        result = torch.zeros(count, dtype=dtype)
        wait(dist.scatter(result, parts, group_src=0, group=group, async_op=async_op))
        return [result]

    return call


def reduce_scatter(op: dist.ReduceOp, count: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        inputs = [numbers(group, count, salt=salt) for salt in range(group.size())]
        from_list, from_tensor = torch.zeros(count), torch.zeros(count)
        wait(dist.reduce_scatter(from_list, inputs, op, group=group, async_op=async_op))
        wait(dist.reduce_scatter_tensor(from_tensor, torch.cat(inputs), op, group=group, async_op=async_op))
        return [from_list, from_tensor]

    return call


def all_to_all_single(dtype: torch.dtype, rows: int, async_op: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        size, rank = group.size(), group.rank()
        even = torch.zeros(size * rows, 3, dtype=dtype)
        source = numbers(group, size * rows * 3, dtype).view(-1, 3)
        wait(dist.all_to_all_single(even, source, group=group, async_op=async_op))
        sent = [(rank + 2 * peer) % 4 * rows for peer in range(size)]
        received = [(peer + 2 * rank) % 4 * rows for peer in range(size)]
        uneven = torch.zeros(sum(received), 3, dtype=dtype)
        source = numbers(group, sum(sent) * 3, dtype).view(-1, 3)
        wait(dist.all_to_all_single(uneven, source, received, sent, group=group, async_op=async_op))
        return [even, uneven]

    return call


def exchange(dtype: torch.dtype, count: int) -> Call:
    """Everybody sends to the next two ranks and receives from the last two, in one batch."""

    def call(group: Group) -> list[torch.Tensor]:
        size, rank = group.size(), group.rank()
        hops = [hop for hop in (1, 2) if hop < size]
        results = [torch.zeros(count + hop, dtype=dtype) for hop in hops]
        sends = [
            dist.P2POp(dist.isend, numbers(group, count + hop, dtype, hop), group=group, group_peer=(rank + hop) % size)
            for hop in hops
        ]
        receives = [
            dist.P2POp(dist.irecv, result, group=group, group_peer=(rank - hop) % size)
            for hop, result in zip(hops, results, strict=True)
        ]
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        return results

    return call


def tagged(count: int) -> Call:
    """Messages received in another order than sent."""

    def call(group: Group) -> list[torch.Tensor]:
        size, rank = group.size(), group.rank()
        following, previous = (rank + 1) % size, (rank - 1) % size
        sent = [numbers(group, count, salt=tag) for tag in range(3)]
        works = [dist.isend(sent[tag], group=group, group_dst=following, tag=tag) for tag in (2, 0, 1)]
        results = [torch.zeros(count) for _ in range(3)]
        works += [dist.irecv(results[tag], group=group, group_src=previous, tag=tag) for tag in (0, 1, 2)]
        for work in works:
            work.wait()
        return results

    return call


def any_source(count: int) -> Call:
    """Rank 0 takes from whoever comes; the results are sorted, for the order is open."""

    def call(group: Group) -> list[torch.Tensor]:
        if group.rank() != 0:
            dist.send(numbers(group, count), group=group, group_dst=0, tag=5)
            return []
        results, sources = [], []
        for _ in range(1, group.size()):
            tensor = torch.zeros(count)
            sources.append(dist.get_group_rank(group, dist.recv(tensor, group=group, tag=5)))
            results.append((sources[-1], tensor))
        assert sorted(sources) == list(range(1, group.size()))
        return [tensor for _, tensor in sorted(results, key=lambda pair: pair[0])]

    return call


def objects(group: Group) -> list[torch.Tensor]:
    """All object collectives; raises if one is wrong."""
    size, rank, thing = group.size(), group.rank(), {"rank": group.rank(), "text": "x" * 1000 * group.rank()}
    expected = [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(size)]
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, thing, group=group)
    assert gathered == expected
    on_root = [None] * size if rank == 0 else None
    dist.gather_object(thing, on_root, group=group, group_dst=0)
    assert on_root is None or on_root == expected
    shared = [thing, "second"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(shared, group=group, group_src=size - 1)
    assert shared == [expected[-1], "second"]
    own: list[object] = [None]
    dist.scatter_object_list(own, expected if rank == 0 else None, group=group, group_src=0)
    assert own == [expected[rank]]
    if rank == 0:
        dist.send_object_list([thing], group=group, group_dst=size - 1)
    if rank == size - 1:
        dist.recv_object_list(own, group=group, group_src=0)
        assert own == [expected[0]]
    return []


def sparse(group: Group) -> list[torch.Tensor]:
    indices = torch.tensor([[group.rank(), 0], [1, 2]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 3.0]), (group.size(), 3), check_invariants=True)
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def complex_numbers(group: Group) -> list[torch.Tensor]:
    """By every call of gloo that takes them."""
    size, rank = group.size(), group.rank()

    def fresh(salt: int = 0, count: int = 9) -> torch.Tensor:
        return torch.complex(numbers(group, count, salt=salt), numbers(group, count, salt=salt + 10))

    reduced, at_root, sent, scattered = fresh(), fresh(1), fresh(2), torch.zeros_like(fresh())
    gathered = [torch.zeros_like(sent) for _ in range(size)]
    moved, from_list, from_tensor = torch.zeros((3, size), dtype=sent.dtype)
    dist.all_reduce(reduced, group=group)
    dist.reduce(at_root, group_dst=0, group=group)
    dist.broadcast(sent, group_src=1, group=group)
    dist.all_gather(gathered, fresh(3), group=group)
    dist.scatter(scattered, [fresh(4 + p) for p in range(size)] if rank == 1 else None, group_src=1, group=group)
    dist.all_to_all_single(moved, fresh(5, size), group=group)
    dist.reduce_scatter(from_list, [fresh(p, size) for p in range(size)], group=group)
    dist.reduce_scatter_tensor(from_tensor, fresh(6, size * size), group=group)
    return [reduced, at_root if rank == 0 else sent, sent, scattered, moved, from_list, from_tensor, *gathered]


def lists_at_once(group: Group) -> list[torch.Tensor]:
    """The older calls for several tensors."""
    reduced = [numbers(group, count, salt=count) for count in (3, 0, 1000)]
    dist.all_reduce_coalesced(reduced, group=group)
    inputs = [numbers(group, count, salt=count) for count in (5, 1000)]
    gathered = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(group.size())]
    dist.all_gather_coalesced(gathered, inputs, group=group)
    return [*reduced, *(tensor for tensors in gathered for tensor in tensors)]


def coalesced(async_ops: bool) -> Call:
    def call(group: Group) -> list[torch.Tensor]:
        size = group.size()
        tensors = [numbers(group, count) for count in (3, 1000)]
        gathered = [torch.zeros(size * tensor.numel()) for tensor in tensors]
        scattered = [torch.zeros(tensor.numel()) for tensor in tensors]
        reduced = [tensor.clone() for tensor in tensors]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for output, tensor in zip(gathered, tensors, strict=True):
                dist.all_gather_into_tensor(output, tensor, group=group)
        if async_ops:
            manager.wait()
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for output, tensor in zip(scattered, gathered, strict=True):
                dist.reduce_scatter_tensor(output, tensor, group=group)
        if async_ops:
            manager.wait()
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for tensor in reduced:
                dist.all_reduce(tensor, group=group)
        if async_ops:
            manager.wait()
        return [*gathered, *scattered, *reduced]

    return call


def barrier_within(group: Group, timeout_s: float) -> None:
    """``dist.barrier(group, timeout=...)``, which torch 2.11 has not."""
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=timeout_s)
    group.barrier(options).wait()


def barriers(group: Group) -> list[torch.Tensor]:
    dist.barrier(group)
    wait(dist.barrier(group, async_op=True))
    barrier_within(group, 30)
    dist.monitored_barrier(group, timedelta(seconds=30))
    dist.monitored_barrier(group, wait_all_ranks=True)
    return []


def all_calls() -> Iterator[tuple[str, Call]]:
    """(name, call): everything that gloo can do as well."""
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64):
            yield f"all_reduce {op} {dtype}", all_reduce(op, dtype, 1000, False)
        yield f"reduce {op}", reduce(op, 1000, False)
        yield f"reduce_scatter {op}", reduce_scatter(op, 1000, False)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        yield f"all_reduce {op}", all_reduce(op, torch.int32, 1000, False)
    for async_op in (False, True):
        for count in COUNTS:
            what = f"{count} elements, async_op={async_op}"
            yield f"all_reduce of {what}", all_reduce(ops.SUM, torch.float32, count, async_op)
            yield f"reduce of {what}", reduce(ops.SUM, count, async_op)
            yield f"reduce_scatter of {what}", reduce_scatter(ops.SUM, count, async_op)
            for dtype in (torch.float32, torch.int8):
                yield f"broadcast of {what}, {dtype}", broadcast(dtype, count, async_op)
                yield f"all_gather of {what}, {dtype}", all_gather(dtype, count, async_op)
                yield f"all_gather_single of {what}, {dtype}", all_gather_single(dtype, count, async_op)
                yield f"gather of {what}, {dtype}", gather(dtype, count, async_op)
                yield f"scatter of {what}, {dtype}", scatter(dtype, count, async_op)
                yield f"all_to_all_single of {what}, {dtype}", all_to_all_single(dtype, count // 10, async_op)
        yield f"coalesced, async_ops={async_op}", coalesced(async_op)
    for count in COUNTS:
        yield f"exchange of {count} elements", exchange(torch.float32, count)
        yield f"tags, {count} elements", tagged(count)
        yield f"any source, {count} elements", any_source(count)
    yield "objects", objects
    yield "sparse", sparse
    yield "complex", complex_numbers
    yield "lists at once", lists_at_once
    yield "barriers", barriers
