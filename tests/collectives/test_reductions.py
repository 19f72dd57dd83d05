"""all_reduce, reduce and reduce_scatter: every dtype × operation × size × placement × world against the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from placements import PATHS, PLACEMENTS, Arena, as_bytes, communicator
from torch import Tensor

import symmcomm
from symmcomm import Communicator
from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.testing.oracle import check_bits, check_reduction, emulate, make_input
from symmcomm.testing.spawn import run_ranks

PAIRS = [(dtype, op) for dtype in DType for op in Op if supports(dtype, op)]
SIZES = (0, 1, 3, 63, 64, 65, 1000, 4097)


@dataclass(frozen=True)
class Case:
    dtype: DType
    op: Op
    count: int
    placements: tuple[str, ...]


def edge_sizes(comm: Communicator, dtype: DType) -> list[int]:
    """The last size of the one-shot algorithm, of one chunk, and the next ones; and more than two staging slots."""
    beyond = 5 * comm.layout.slot_bytes // 2
    limits = {limit for limit in (comm.tuning.one_shot_bytes, comm.tuning.chunk_bytes) if limit < beyond}
    edges = [limit // dtype.itemsize + more for limit in sorted(limits) for more in (0, 1)]
    return [*edges, beyond // dtype.itemsize + 3]


def all_cases(comm: Communicator) -> Iterator[Case]:
    """The full product; with three ranks, two of the four placements in turn."""
    for dtype, op in PAIRS:
        for idx, count in enumerate((*SIZES, *edge_sizes(comm, dtype))):
            placements = PLACEMENTS if comm.world_size < 3 else PLACEMENTS[(idx + op) % 2 :: 2]
            yield Case(dtype, op, count, placements)


def thinned_cases(comm: Communicator) -> Iterator[Case]:
    """Each pair once, each item size at the edges, the placements in turn."""
    for idx, (dtype, op) in enumerate(PAIRS):
        count = SIZES[idx // 2 % len(SIZES)] if idx % 2 else 130 + idx
        yield Case(dtype, op, count, (PLACEMENTS[(idx + count) % 4],))
    for idx, dtype in enumerate((DType.float32, DType.bfloat16, DType.float8_e5m2, DType.int64)):
        for count in edge_sizes(comm, dtype):
            yield Case(dtype, Op.sum, count, (PLACEMENTS[(idx + count) % 4],))


@lru_cache(maxsize=64)
def inputs_of(world_size: int, count: int, dtype: DType, op: Op) -> list[Tensor]:
    return [make_input(rank, count, dtype, seed=int(op) + count) for rank in range(world_size)]


@lru_cache(maxsize=64)
def expected_of(world_size: int, count: int, dtype: DType, op: Op) -> Tensor:
    """By the oracle, which finds its own bits within its bounds."""
    inputs = inputs_of(world_size, count, dtype, op)
    result = emulate(inputs, dtype, op)
    check_reduction(result, inputs, dtype, op, f"the oracle itself, {dtype.name} {op.name}")
    return result


def reduce_everywhere(comm: Communicator, arena: Arena, case: Case, placement: str, what: str) -> Tensor:
    args = comm.world_size, case.count, case.dtype, case.op
    tensor = arena.place(inputs_of(*args)[comm.rank], placement)
    comm.all_reduce(tensor, case.op.name)
    check_bits(tensor, expected_of(*args), f"all_reduce {what}")
    return tensor


def reduce_to_root(comm: Communicator, arena: Arena, case: Case, placement: str, what: str) -> None:
    args = comm.world_size, case.count, case.dtype, case.op
    own, root = inputs_of(*args)[comm.rank], (case.count + case.op) % comm.world_size
    tensor = arena.place(own, placement)
    comm.reduce(tensor, root, case.op.name)
    if comm.rank == root:
        check_bits(tensor, expected_of(*args), f"reduce to {root} {what}")
    else:
        assert as_bytes(tensor) == as_bytes(own), f"reduce to {root} {what}: rank {comm.rank}'s tensor changed"


def reduce_and_scatter(comm: Communicator, arena: Arena, case: Case, placement: str, what: str) -> None:
    """The element count of the others is here that of the input."""
    count = case.count // comm.world_size
    args = comm.world_size, count * comm.world_size, case.dtype, case.op
    own, part = inputs_of(*args)[comm.rank], slice(comm.rank * count, (comm.rank + 1) * count)
    for in_place in (False, True):
        tensor = arena.place(own, placement)
        output = tensor[part] if in_place else arena.blank(count, own.dtype, placement)
        comm.reduce_scatter_tensor(output, tensor, case.op.name)
        check_bits(output, expected_of(*args)[part], f"reduce_scatter {what} in place: {in_place}")
        rest = tensor.clone()
        if in_place:
            rest[part] = own[part]
        assert as_bytes(rest) == as_bytes(own), f"reduce_scatter {what} in place: {in_place}: the input changed"


def check_cases(path: str, thinned: bool) -> int:
    """Runs all cases; ranks compare checksums of their results at the end, so that NaNs have the same bits too."""
    with communicator(path) as comm:
        arena = Arena(comm, 3 * comm.layout.slot_bytes + (64 << 10))
        checksums: list[tuple[str, int]] = []
        for case in thinned_cases(comm) if thinned else all_cases(comm):
            for placement in case.placements:
                what = f"{case.dtype.name} {case.op.name} × {case.count}, {placement}, {comm.world_size} ranks"
                result = reduce_everywhere(comm, arena, case, placement, what)
                checksums.append((what, zlib.crc32(as_bytes(result))))
                reduce_to_root(comm, arena, case, placement, what)
                reduce_and_scatter(comm, arena, case, placement, what)
                arena.check(what)
        compare_checksums(comm, checksums)
        return len(checksums)


def compare_checksums(comm: Communicator, checksums: list[tuple[str, int]]) -> None:
    mine = torch.tensor([checksum for _, checksum in checksums])
    everybody = torch.empty(comm.world_size * len(mine), dtype=mine.dtype)
    comm.all_gather_into_tensor(everybody, mine)
    for peer, theirs in enumerate(everybody.view(comm.world_size, -1)):
        wrong = (theirs != mine).nonzero().flatten().tolist()
        names = [checksums[idx][0] for idx in wrong[:3]]
        assert not wrong, f"ranks {comm.rank} and {peer} have different bits in {len(wrong)} cases: {names}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reductions(world_size: int, path: str) -> None:
    run_ranks(check_cases, world_size, path, False, timeout_s=280, env=PATHS[path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [4, 5, 8])
def test_reductions_thinned(world_size: int, path: str) -> None:
    run_ranks(check_cases, world_size, path, True, timeout_s=280, env=PATHS[path])


def check_torch_ops() -> None:
    with symmcomm.init() as comm:
        ours = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
        for name, op in ours.items():
            torchs, mine = torch.arange(1.0, 6) + comm.rank, torch.arange(1.0, 6) + comm.rank
            comm.all_reduce(torchs, getattr(dist.ReduceOp, name))
            comm.all_reduce(mine, op)
            check_bits(torchs, mine, name)
        for name in ("BAND", "BOR", "BXOR"):
            torchs, mine = torch.arange(5) + comm.rank, torch.arange(5) + comm.rank
            comm.all_reduce(torchs, getattr(dist.ReduceOp, name))
            comm.all_reduce(mine, name.lower())
            check_bits(torchs, mine, name)


def test_torch_names_of_operations() -> None:
    run_ranks(check_torch_ops, 2)


def check_shapes() -> None:
    with symmcomm.init() as comm:
        for shape in ((), (1, 1), (3, 4, 5), (2, 0, 3)):
            tensor = torch.full(shape, float(comm.rank + 1))
            comm.all_reduce(tensor)
            check_bits(tensor, torch.full(shape, 3.0), str(shape))
        transposed_of_contiguous = torch.ones(4, 5).t().contiguous()
        comm.all_reduce(transposed_of_contiguous)
        leaf = torch.ones(4, requires_grad=True)
        comm.all_reduce(leaf.detach())
        assert leaf.tolist() == [2.0] * 4


def test_shapes() -> None:
    run_ranks(check_shapes, 2)


def check_default_staging(count: int) -> None:
    """With the sizes that users have: long pipelines of chunks, single copies, huge pages in the heap."""
    with symmcomm.init() as comm:
        inputs = [make_input(rank, count, DType.bfloat16, 7) for rank in range(comm.world_size)]
        expected = emulate(inputs, DType.bfloat16, Op.sum)
        for tensor in (inputs[comm.rank].clone(), comm.empty(count, dtype=torch.bfloat16).copy_(inputs[comm.rank])):
            comm.all_reduce(tensor)
            check_bits(tensor, expected, f"{count} elements, symmetric: {comm.is_symmetric(tensor)}")


@pytest.mark.parametrize("single_copy", ["0", "1"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_tensors(world_size: int, single_copy: str) -> None:
    run_ranks(
        check_default_staging, world_size, (9 << 20) + 1, timeout_s=120, env={"SYMMCOMM_SINGLE_COPY": single_copy}
    )
