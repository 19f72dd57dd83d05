"""RMSNorm without peers: right for all dtypes, shapes, strides and options, and bad arguments are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from symmcomm import ArgumentError, DTypeError
from symmcomm.fused.norm import add_rms_norm, qk_norm, rms_norm
from symmcomm.fused.rows import Rows, overlap, row_slice
from tests.fused.rows import DTYPES, EPS, check, check_scaled, expected, problem

SHAPES = [(0, 8), (1, 1), (1, 7), (3, 33), (5, 64), (6, 1000), (2, 4099), (1, 32768)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_values(rows: int, hidden: int, dtype: torch.dtype) -> None:
    p = problem(rows, hidden, dtype)
    x = p.inputs[0]
    check(rms_norm(x, p.weight, EPS), expected([x], None, p.weight), "plain")
    found = rms_norm(x, p.weight, EPS, bias=p.bias, weight_bias=1.0)
    check(found, expected([x], None, p.weight, p.bias, 1.0), "bias and weight_bias")
    out, new = add_rms_norm(x, p.residual, p.weight, EPS)
    assert torch.equal(new, x + p.residual)
    check(out, expected([x], p.residual, p.weight), "residual")
    scales = torch.empty(rows)
    out, new = add_rms_norm(x, p.residual, p.weight, EPS, bias=p.bias, scales=scales)
    assert torch.equal(new, x + p.residual)
    check_scaled(out, scales, expected([x], p.residual, p.weight, p.bias), "float8")
    out = rms_norm(x, p.weight, EPS, scales=scales)
    check_scaled(out, scales, expected([x], None, p.weight), "float8 without residual")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_exact_than_separate_calls(dtype: torch.dtype) -> None:
    """Largest and root-mean-square error against float64, beside those of torch's addition and rms_norm."""
    x, residual, weight, _ = (lambda p: (p.inputs[0], *p[1:]))(problem(300, 2048, dtype))
    exact = torch_rms_norm(x.double() + residual.double(), (2048,), weight.double(), EPS)
    fused = (add_rms_norm(x, residual, weight, EPS)[0].double() - exact).abs()
    separate = (torch_rms_norm(x + residual, (2048,), weight, EPS).double() - exact).abs()
    assert fused.max() <= separate.max()
    assert fused.square().mean() <= separate.square().mean()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_apart_and_in_place(dtype: torch.dtype) -> None:
    p = problem(7, 33, dtype)
    right = expected([p.inputs[0]], p.residual, p.weight)
    wide = torch.full((7, 80), 5.0, dtype=dtype)
    x, residual = wide[:, 1:34], wide[:, 40:73]  # each in the other's gaps
    x.copy_(p.inputs[0])
    residual.copy_(p.residual)
    out, new = add_rms_norm(x, residual, p.weight, EPS, out=x, new_residual=residual)
    assert out is x
    assert new is residual
    check(x, right, "in place")
    assert torch.equal(residual, p.inputs[0] + p.residual)
    rest = torch.cat([wide[:, :1], wide[:, 34:40], wide[:, 73:]], 1)
    assert bool((rest == 5).all()), "gaps were written"
    same = p.residual[:1].expand(7, 33)  # rows at distance 0
    check(add_rms_norm(p.inputs[0], same, p.weight, EPS)[0], expected([p.inputs[0]], same, p.weight), "expanded")
    check(rms_norm(p.inputs[0].view(7, 1, 33), p.weight, EPS).view(7, 33), expected(p.inputs, None, p.weight), "3-d")


def test_not_finite() -> None:
    """NaN stays in its row; an infinite element gives NaN where it is and zeros beside it, as with torch."""
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    weight = torch.ones(64)
    torch.testing.assert_close(rms_norm(x, weight, EPS), torch_rms_norm(x, (64,), weight, EPS), equal_nan=True)
    scales = torch.empty(3)
    found = rms_norm(x, weight, EPS, scales=scales)
    assert scales.isnan().tolist() == [True, True, False]
    assert bool(found[2].float().isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80])
def test_qk_norm(head_dim: int, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads = 5, 6, 2
    qkv = problem(tokens, (heads + 2 * kv_heads) * head_dim, dtype).inputs[0]
    before, ends = qkv.clone(), (heads * head_dim, (heads + kv_heads) * head_dim)
    q, k = qkv[:, : ends[0]].view(tokens, heads, head_dim), qkv[:, ends[0] : ends[1]].view(tokens, kv_heads, head_dim)
    _, _, q_weight, k_weight = problem(1, head_dim, dtype)
    wanted = [(q.clone(), q_weight), (k.clone(), k_weight)]
    new = qk_norm(q, k, q_weight, k_weight, EPS, weight_bias=1.0)
    assert torch.equal(qkv, before)
    placed = qk_norm(q, k, q_weight, k_weight, EPS, weight_bias=1.0, q_out=q, k_out=k)
    assert placed[0] is q
    assert torch.equal(qkv[:, ends[1] :], before[:, ends[1] :])
    for fresh, found, (source, weight) in zip(new, placed, wanted, strict=True):
        assert torch.equal(fresh, found)
        check(found, expected([source], None, weight, weight_bias=1.0), head_dim)
    batched = qk_norm(wanted[0][0][None], wanted[1][0][None], q_weight, k_weight, EPS, weight_bias=1.0)
    assert torch.equal(batched[0][0], new[0])
    empty = qk_norm(q[:0], k[:0], q_weight, k_weight, EPS)
    assert [tuple(one.shape) for one in empty] == [(0, heads, head_dim), (0, kv_heads, head_dim)]


X = torch.zeros(4, 8)
W = torch.zeros(8)
BAD: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: rms_norm(X, torch.zeros(9), EPS), ArgumentError, ("weight", "(9,)", "(8,)")),
    (lambda: rms_norm(X, W.bfloat16(), EPS), DTypeError, ("weight", "bfloat16", "float32")),
    (lambda: rms_norm(X, torch.zeros(16)[::2], EPS), ArgumentError, ("weight", "contiguous", "2")),
    (lambda: rms_norm(X.double(), W.double(), EPS), DTypeError, ("input", "float64", "bfloat16")),
    (lambda: rms_norm([1.0], W, EPS), ArgumentError, ("input", "list")),  # type: ignore[arg-type]
    (lambda: rms_norm(torch.zeros(4, 0), W, EPS), ArgumentError, ("input", "(4, 0)", "32768")),
    (lambda: rms_norm(torch.zeros(1, 32769), W, EPS), ArgumentError, ("input", "(1, 32769)", "32768")),
    (lambda: rms_norm(torch.zeros(8, 4).t(), W, EPS), ArgumentError, ("input", "(1, 4)", "contiguous")),
    (lambda: rms_norm(torch.zeros(4, 8, 8)[:3, :7], W, EPS), ArgumentError, ("input", "(64, 8, 1)")),
    (lambda: rms_norm(X, W, float("nan")), ArgumentError, ("eps", "nan")),
    (lambda: rms_norm(X, W, -1e-5), ArgumentError, ("eps", "-1e-05")),
    (lambda: rms_norm(X, W, EPS, weight_bias="1"), ArgumentError, ("weight_bias", "'1'")),  # type: ignore[arg-type]
    (lambda: rms_norm(X, W, EPS, bias=torch.zeros(7)), ArgumentError, ("bias", "(7,)", "(8,)")),
    (lambda: rms_norm(X, W, EPS, out=torch.zeros(4, 9)), ArgumentError, ("out", "(4, 9)", "(4, 8)")),
    (lambda: rms_norm(X, W, EPS, out=torch.zeros(4, 8).half()), DTypeError, ("out", "float16", "float32")),
    (lambda: rms_norm(X, W, EPS, out=torch.zeros(1, 8).expand(4, 8)), ArgumentError, ("out", "itself", "32", "0")),
    (lambda: rms_norm(X[:2], W, EPS, out=X[1:3]), ArgumentError, ("out", "input")),
    (lambda: rms_norm(X[:1], W, EPS, out=W.view(1, 8)), ArgumentError, ("out", "weight")),
    (lambda: rms_norm(X, W, EPS, scales=torch.zeros(3)), ArgumentError, ("scales", "(3,)", "(4,)")),
    (lambda: rms_norm(X, W, EPS, scales=torch.zeros(4).half()), DTypeError, ("scales", "float16", "float32")),
    (lambda: rms_norm(X, W, EPS, scales=torch.zeros(8)[::2]), ArgumentError, ("scales", "contiguous")),
    (lambda: rms_norm(X, W, EPS, out=X, scales=torch.zeros(4)), DTypeError, ("out", "float32", "float8_e4m3fn")),
    (lambda: add_rms_norm(X, X[:, :7], W, EPS), ArgumentError, ("residual", "(4, 7)", "(4, 8)")),
    (lambda: add_rms_norm(X, X.half(), W, EPS), DTypeError, ("residual", "float16", "float32")),
    (lambda: add_rms_norm(X, X.to("meta"), W, EPS), ArgumentError, ("residual", "meta", "cpu")),
    (lambda: add_rms_norm(X, X.clone(), W, EPS, out=X, new_residual=X), ArgumentError, ("out", "new_residual")),
    (lambda: qk_norm(X, X.half(), W, W, EPS), DTypeError, ("k", "float16", "float32")),
    (lambda: qk_norm(X, X[:, :4], W, W[:4], EPS), ArgumentError, ("k", "(4, 4)", "(4, 8)")),
    (lambda: qk_norm(X, X.clone(), W, W[:4], EPS), ArgumentError, ("k_weight", "(4,)", "(8,)")),
    (lambda: qk_norm(W, W, W, W, EPS), ArgumentError, ("q", "(8,)", "head_dim")),
    (lambda: qk_norm(X, X.clone(), W, W, EPS, q_out=X[:2]), ArgumentError, ("q_out", "(2, 8)", "(4, 8)")),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[2]))
def test_bad_arguments(case: tuple[Callable[[], object], type[Exception], tuple[str, ...]]) -> None:
    call, kind, words = case
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_qk_outputs_apart() -> None:
    x = torch.zeros(4, 3, 8)
    q, k = x[:, :2], x[:, 2:]
    for outputs, words in (
        ({"q_out": x[:, 1:]}, "q_out overlaps"),
        ({"k_out": q[:, :1]}, "k_out overlaps q"),
        ({"q_out": torch.zeros(1, 2, 8).expand(4, 2, 8)}, "q_out overlaps itself"),
        ({"q_out": torch.zeros(4, 1, 8).expand(4, 2, 8)}, "q_out's heads overlap"),
    ):
        with pytest.raises(ArgumentError, match=words):
            qk_norm(q, k, W, W, EPS, **outputs)


@pytest.mark.parametrize(
    ("one", "other", "answer"),
    [
        (Rows(0, 10, 10, 3), Rows(30, 10, 10, 3), False),
        (Rows(0, 10, 10, 3), Rows(29, 10, 10, 3), True),
        (Rows(0, 20, 10, 3), Rows(10, 20, 10, 3), False),
        (Rows(0, 20, 10, 3), Rows(9, 20, 10, 3), True),
        (Rows(0, 20, 10, 3), Rows(11, 20, 10, 3), True),
        (Rows(0, 20, 10, 3), Rows(12, 20, 8, 3), False),
        (Rows(0, 20, 10, 3), Rows(10, 30, 10, 2), True),  # unlike distances are not looked into
        (Rows(0, 20, 10, 0), Rows(0, 20, 10, 3), False),
        (Rows(0, 0, 10, 3), Rows(5, 0, 10, 3), True),
    ],
)
def test_overlap(one: Rows, other: Rows, answer: bool) -> None:
    assert overlap(one, other) is answer
    assert overlap(other, one) is answer


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_row_slices(world_size: int) -> None:
    for rows in range(20):
        parts = [torch.arange(rows)[row_slice(rows, rank, world_size)] for rank in range(world_size)]
        assert torch.cat(parts).tolist() == list(range(rows))
        for part, chunk in zip(parts, torch.arange(rows).chunk(world_size) if rows else [], strict=False):
            assert part.tolist() == chunk.tolist()
