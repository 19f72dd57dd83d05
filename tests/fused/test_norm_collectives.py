"""Collectives with RMSNorm inside: float64 within bounds, the new residual to the bit, the same bits in all forms."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from symmcomm import ArgumentError, Communicator, DTypeError, MismatchError, PeerTimeoutError
from symmcomm.collectives.call import Kind
from symmcomm.errors import SymmCommError
from symmcomm.fused.norm import (
    all_reduce_rms_norm,
    fused_rs_ln_ag_cta,
    reduce_scatter_rms_norm,
    reduce_scatter_rms_norm_all_gather,
    rms_norm_all_gather,
)
from symmcomm.fused.rows import row_slice
from symmcomm.kernels.cpu import fused_norm
from symmcomm.testing.faults import delayed
from symmcomm.testing.spawn import run_ranks
from tests.collectives.placements import PATHS, Arena, communicator
from tests.fused.rows import DTYPES, EPS, Problem, check, check_scaled, expected, problem

SHAPES = [(0, 8), (1, 8), (3, 5), (7, 64), (6, 1000), (2, 5001), (50, 96)]


def sums_then_norms(comm: Communicator, p: Problem, x: torch.Tensor, arena: Arena, placement: str) -> torch.Tensor:
    """Every form that takes partial sums, on ``x``, this rank's; returns all rows normalised."""
    rows, hidden = p.residual.shape
    mine = row_slice(rows, comm.rank, comm.world_size)
    right, what = expected(p.inputs, p.residual, p.weight), f"{rows} x {hidden} {x.dtype} {placement}"
    out, new = all_reduce_rms_norm(comm, x, p.residual, p.weight, EPS)
    assert torch.equal(new, p.new_residual), what
    check(out, right, what)

    part, new = reduce_scatter_rms_norm(comm, x, p.residual[mine], p.weight, EPS, max_ctas=1)
    assert torch.equal(new, p.new_residual[mine]), what
    assert torch.equal(part, out[mine]), what

    wide = torch.zeros(rows, hidden + 3, dtype=x.dtype)
    residual = wide[mine, :hidden].copy_(p.residual[mine])
    target = arena.blank(x.numel(), x.dtype, placement, 1).view(rows, hidden)
    whole, new = reduce_scatter_rms_norm_all_gather(
        comm, x, residual, p.weight, EPS, out=target, new_residual=residual, max_ctas=64
    )
    assert whole is target
    assert new is residual
    assert torch.equal(new, p.new_residual[mine]), what
    assert torch.equal(whole, out), what
    assert torch.equal(x, p.inputs[comm.rank]), what
    return out


def options(comm: Communicator, p: Problem, x: torch.Tensor) -> None:
    """bias, weight_bias, float8; no residual; results in the place of arguments."""
    rows, mine = len(p.residual), row_slice(len(p.residual), comm.rank, comm.world_size)
    right = expected(p.inputs, p.residual, p.weight, p.bias, 1.0)
    scales, others, own = torch.empty(rows), torch.empty(rows), torch.empty(mine.stop - mine.start)
    extra = {"bias": p.bias, "weight_bias": 1.0}
    out, new = all_reduce_rms_norm(comm, x, p.residual, p.weight, EPS, scales=scales, **extra)
    check_scaled(out, scales, right, "float8")
    assert torch.equal(new, p.new_residual)
    again, _ = reduce_scatter_rms_norm_all_gather(comm, x, p.residual[mine], p.weight, EPS, scales=others, **extra)
    part, _ = reduce_scatter_rms_norm(comm, x, p.residual[mine], p.weight, EPS, scales=own, **extra)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(out[mine].view(torch.uint8), part.view(torch.uint8))
    assert torch.equal(scales, others)
    assert torch.equal(scales[mine], own)

    out, new = all_reduce_rms_norm(comm, x, None, p.weight, EPS)
    check(out, expected(p.inputs, None, p.weight), "without residual")
    assert torch.equal(new, p.sum)
    right = expected(p.inputs, p.residual, p.weight)
    residual = p.residual.clone()
    out, new = all_reduce_rms_norm(comm, x, residual, p.weight, EPS, out=x, new_residual=residual)
    check(x, right, "in place")
    assert torch.equal(residual, p.new_residual)
    x.copy_(p.inputs[comm.rank])
    out, new = reduce_scatter_rms_norm(comm, x, p.residual[mine], p.weight, EPS, out=x[mine])
    assert torch.equal(x[mine], expected_rows := residual_norm(comm, p, mine)), expected_rows
    x.copy_(p.inputs[comm.rank])
    reduce_scatter_rms_norm_all_gather(comm, x, p.residual[mine], p.weight, EPS, out=x)
    check(x, right, "all rows in place")
    x.copy_(p.inputs[comm.rank])


def residual_norm(comm: Communicator, p: Problem, mine: slice) -> torch.Tensor:
    """This rank's rows of the result, by the form that returns all."""
    return all_reduce_rms_norm(comm, p.inputs[comm.rank], p.residual, p.weight, EPS)[0][mine]


def norm_then_gather(comm: Communicator, p: Problem) -> None:
    rows, hidden = p.residual.shape
    mine = row_slice(rows, comm.rank, comm.world_size)
    right = expected([p.sum], p.residual, p.weight)
    apart = torch.zeros(mine.stop - mine.start, hidden + 5, dtype=p.sum.dtype)
    x = apart[:, 2 : 2 + hidden].copy_(p.sum[mine])
    out, new = rms_norm_all_gather(comm, x, p.residual[mine], p.weight, EPS, rows=rows)
    check(out, right, "gathered")
    assert torch.equal(new, p.new_residual[mine])
    scales = torch.empty(rows)
    gaps = torch.zeros(rows, 2 * hidden, dtype=torch.float8_e4m3fn)
    found, new = rms_norm_all_gather(comm, x, None, p.weight, EPS, rows=rows, out=gaps[:, :hidden], scales=scales)
    check_scaled(found, scales, expected([p.sum], None, p.weight), "gathered float8")
    assert new is x


def forms(path: str) -> None:
    with communicator(path) as comm:
        largest = max(rows * hidden * 4 for rows, hidden in SHAPES)
        arena = Arena(comm, largest + 256)
        for (rows, hidden), dtype in product(SHAPES, DTYPES):
            p = problem(rows, hidden, dtype, comm.world_size)
            seen = []
            for placement in ("ordinary", "symmetric", "shifted", "mixed"):
                x = arena.place(p.inputs[comm.rank], placement)
                seen.append(sums_then_norms(comm, p, x, arena, placement))
                arena.check(placement)
            assert all(torch.equal(seen[0], other) for other in seen)
            for placement in ("ordinary", "symmetric"):
                options(comm, p, arena.place(p.inputs[comm.rank], placement))
                arena.check(placement)
            norm_then_gather(comm, p)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forms(path: str, world_size: int) -> None:
    run_ranks(forms, world_size, path, env=PATHS[path], timeout_s=150)


def large(world_size: int) -> None:
    """More than is done one-shot, and more than a chunk, at the sizes in force by default."""
    with communicator("") as comm:
        for dtype in (torch.float32, torch.bfloat16):
            p = problem(33, 32768, dtype, world_size)
            arena = Arena(comm, p.residual.nbytes + 256)
            for placement in ("ordinary", "symmetric"):
                x = arena.place(p.inputs[comm.rank], placement)
                sums_then_norms(comm, p, x, arena, placement)
            norm_then_gather(comm, p)


@pytest.mark.parametrize("world_size", [2, 4])
def test_large(world_size: int) -> None:
    run_ranks(large, world_size, world_size, timeout_s=120)


def late() -> None:
    """Each rank late in turn, at each of its signals: the others must wait, or read old data."""
    with communicator("staged") as comm:
        arena = Arena(comm, 40 * 64 * 4 + 256)
        for turn in range(3 * comm.world_size):
            p = problem(40, 64, torch.float32, comm.world_size)
            factor = float(turn + 1)
            p = p._replace(inputs=[x * factor for x in p.inputs])
            with delayed(comm, 0.002 if turn % comm.world_size == comm.rank else 0.0):
                for placement in ("ordinary", "symmetric"):
                    x = arena.place(p.inputs[comm.rank], placement)
                    sums_then_norms(comm, p, x, arena, placement)
                    reduce_scatter_rms_norm(comm, x, None, p.weight, EPS)
                    x.fill_(float("nan"))  # nobody reads it any more
                norm_then_gather(comm, p)


@pytest.mark.parametrize("world_size", [2, 3])
def test_late_ranks(world_size: int) -> None:
    run_ranks(late, world_size, env=PATHS["staged"], timeout_s=120)


def tokenweave() -> None:
    """Two batches in one symmetric tensor, in TokenWeave's arguments."""
    with communicator("") as comm:
        rank, world_size = comm.rank, comm.world_size
        p = problem(6 * world_size, 64, torch.bfloat16, world_size)
        buffer = comm.empty(6 * world_size, 64, dtype=torch.bfloat16).copy_(p.inputs[rank])
        comm.barrier()
        handle, residual, start = comm.rendezvous(buffer), p.residual.clone(), 0
        right = expected(p.inputs, p.residual, p.weight)
        for num in (4, 2):  # rows of a rank
            mine = slice(start + rank * num, start + (rank + 1) * num)
            x, offset = buffer[mine], mine.start * 64 * 2
            found = fused_rs_ln_ag_cta(x, residual[mine], p.weight, handle, rank, world_size, 8, offset, EPS)
            assert found[0] is x
            assert torch.equal(residual[mine], p.new_residual[mine])
            start += num * world_size
        check(buffer, right, "both batches")
        x, args = buffer[2 * rank : 2 * rank + 2], (residual[:2], p.weight, handle)
        for bad, words in (
            ((rank + 1, world_size, 8, 256 * rank), "symm_mem_hdl has rank"),
            ((rank, world_size, 8, 256 * rank + 128), "x must be rank"),
            ((rank, world_size, 65, 256 * rank), "max_ctas=65 is not in 1..64"),
        ):
            with pytest.raises(ArgumentError, match=words):
                fused_rs_ln_ag_cta(x, *args, *bad, EPS)


def test_tokenweave_arguments() -> None:
    run_ranks(tokenweave, 2)


Call = Callable[[Communicator], object]


def bad_calls(x: torch.Tensor, w: torch.Tensor) -> Iterator[tuple[Call, type[SymmCommError], str]]:
    own = x[:2]
    yield lambda c: all_reduce_rms_norm(c, x, x[:, :7], w, EPS), ArgumentError, r"residual has shape \(4, 7\).*\(4, 8\)"
    yield lambda c: all_reduce_rms_norm(c, x, x, w.half(), EPS), DTypeError, "weight has dtype torch.float16.*float32"
    yield lambda c: all_reduce_rms_norm(c, x[:, :4], None, w[:4], EPS), ArgumentError, r"contiguous.*\(8, 1\)"
    big = torch.ones(8, 8)
    for options in (
        {"out": x, "new_residual": x},
        {"out": big[:4], "new_residual": big[1:5]},
        {"out": big[3:7]},
        {"new_residual": big[1:5]},
    ):
        yield lambda c, o=options: all_reduce_rms_norm(c, x, big[2:6], w, EPS, **o), ArgumentError, "overlaps"
    yield lambda c: all_reduce_rms_norm(c, big[:4], x, big[2], EPS, out=big[:4]), ArgumentError, "out overlaps weight"
    yield lambda c: all_reduce_rms_norm(c, x, x.clone(), w, EPS, out=x.half()), DTypeError, "out has dtype"
    yield lambda c: all_reduce_rms_norm(c, x, x.clone(), w, -1.0), ArgumentError, "eps=-1.0 is negative"
    for fused in (reduce_scatter_rms_norm_all_gather, reduce_scatter_rms_norm, rms_norm_all_gather):
        for ctas in (0, 65, 1.5):
            words = f"max_ctas={ctas} is n"
            yield lambda c, f=fused, n=ctas: f(c, x, own, w, EPS, max_ctas=n), ArgumentError, words
    yield lambda c: reduce_scatter_rms_norm(c, x, x, w, EPS), ArgumentError, r"residual has shape \(4, 8\).*\(2, 8\)"
    other = lambda c: x[2:] if c.rank == 0 else x[:2]
    yield (
        lambda c: reduce_scatter_rms_norm(c, x, None, w, EPS, out=other(c)),
        ArgumentError,
        "out overlaps the peers' rows",
    )
    yield lambda c: rms_norm_all_gather(c, x, None, w, EPS, rows=11), ArgumentError, "input has 4 rows; of rows=11 rank"
    yield lambda c: rms_norm_all_gather(c, x, None, w, EPS, rows=-1), ArgumentError, "rows=-1 is negative"
    yield lambda c: rms_norm_all_gather(c, x, None, w, EPS, new_residual=x), ArgumentError, "residual is not"
    yield lambda c: rms_norm_all_gather(c, own, None, w, EPS, out=x[1:3]), ArgumentError, r"out has shape \(2, 8\)"


def arguments() -> None:
    with communicator("") as comm:
        x, w = torch.ones(4, 8), torch.ones(8)
        for _ in range(2):  # before and after a right call that they are like
            for call, kind, words in bad_calls(x, w):
                with pytest.raises(kind, match=words):
                    call(comm)
            all_reduce_rms_norm(comm, x, x.clone(), w, EPS)
        assert torch.equal(all_reduce_rms_norm(comm, x, None, w, EPS)[1], 2 * x)


def test_bad_arguments() -> None:
    run_ranks(arguments, 2)


def mismatches() -> None:
    with communicator("") as comm:
        odd, w = comm.rank == 1, torch.ones(8)
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: all_reduce_rms_norm(comm, torch.ones(3 + odd, 8), None, w, EPS), r"rows is \d on .* \d on"),
            (lambda: all_reduce_rms_norm(comm, torch.ones(2, 8 - odd), None, w[: 8 - odd], EPS), "hidden is (8|7)"),
            (lambda: all_reduce_rms_norm(comm, torch.ones(2, 8), None, w, EPS, scales=torch.ones(2) if odd else None),
             "scales is (given|none)"),
            (lambda: rms_norm_all_gather(comm, torch.ones(2, 8, dtype=[torch.float16, torch.float32][odd]), None,
                                         w.to([torch.float16, torch.float32][odd]), EPS), "dtype is torch.float"),
            (lambda: (reduce_scatter_rms_norm if odd else all_reduce_rms_norm)(comm, torch.ones(2, 8), None, w, EPS),
             "call is (reduce_scatter|all_reduce)_rms_norm"),
            (lambda: comm.barrier() if odd else all_reduce_rms_norm(comm, torch.ones(2, 8), None, w, EPS), "barrier"),
        ]  # fmt: skip
        for call, words in cases:
            with pytest.raises(MismatchError) as caught:
                call()
            assert re.search(words, str(caught.value)), str(caught.value)
        x = torch.ones(2, 8)
        assert torch.equal(all_reduce_rms_norm(comm, x, None, w, EPS)[1], comm.world_size * x)


def test_mismatches() -> None:
    run_ranks(mismatches, 3)


def deserted() -> float:
    """Rank 1 does not come."""
    begin = time.monotonic()
    with communicator("") as comm:
        if comm.rank == 1:
            time.sleep(3)
            return 0.0
        with pytest.raises(PeerTimeoutError, match="rank 1"):
            all_reduce_rms_norm(comm, torch.ones(2, 8), None, torch.ones(8), EPS)
    return time.monotonic() - begin


def test_a_peer_that_does_not_come() -> None:
    waited = run_ranks(deserted, 2, env={"SYMMCOMM_TIMEOUT_S": "1"}, check=False)[0]
    assert waited.error is None, waited.traceback
    assert waited.value < 3


def test_forms_have_the_numbers_of_the_kernels() -> None:
    from symmcomm.fused.norm import _FORMS

    names = ("ALL_REDUCE", "SCATTER_GATHER", "SCATTER", "GATHER")
    assert [getattr(fused_norm, name) for name in names] == [0, 1, 2, 3]
    kinds = (
        Kind.all_reduce_rms_norm,
        Kind.reduce_scatter_rms_norm_all_gather,
        Kind.reduce_scatter_rms_norm,
        Kind.rms_norm_all_gather,
    )
    assert kinds == _FORMS
