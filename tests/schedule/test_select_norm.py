"""The shapes of the norm kernels hold what they must, for every row length and world size."""

from __future__ import annotations

from itertools import product

import pytest

from symmcomm.schedule import select_norm as select
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import NUM_LAMPORT_CHANNELS, NUM_STAGED_CHANNELS, Layout
from symmcomm.schedule.select_norm import Form, RowLaunch

HIDDEN = (1, 7, 8, 64, 100, 2880, 4096, 8192, 12300, 16384, 32767, 32768)
ROWS = (1, 2, 3, 16, 64, 128, 133, 1024, 8192)
WORLDS = (1, 2, 3, 4, 5, 8, 16, 72)
NUM_SMS = (16, 66, 132)


def holds_a_row(shape: RowLaunch, hidden: int, dtype: DType) -> bool:
    return shape.threads * shape.unroll * shape.cluster * shape.pieces * 16 >= hidden * dtype.itemsize


@pytest.mark.parametrize("dtype", select.DTYPES, ids=lambda d: d.name)
def test_norm_alone(dtype: DType) -> None:
    for rows, hidden, num_sms in product(ROWS, HIDDEN, NUM_SMS):
        shape = select.norm_shape(rows, hidden, dtype, num_sms)
        assert holds_a_row(shape, hidden, dtype)
        assert shape.threads * shape.rows <= 1024
        assert shape.threads * shape.rows % 32 == 0
        assert shape.grid * shape.rows >= rows
        assert shape.rows == 1 or shape.threads <= 32
        assert shape.threads % 32 == 0 or 32 % shape.threads == 0


@pytest.mark.parametrize("dtype", select.DTYPES, ids=lambda d: d.name)
def test_heads(dtype: DType) -> None:
    for tokens, heads, head_dim in product((1, 40, 5000), (1, 12, 40), select.HEAD_DIMS):
        shape = select.qk_norm_shape(tokens, heads, head_dim, dtype, 132)
        assert shape.lanes * shape.vectors * 16 == head_dim * dtype.itemsize
        assert 32 % shape.lanes == 0
        assert shape.tokens <= tokens


@pytest.mark.parametrize("dtype", select.DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("world_size", WORLDS)
def test_exchanges(world_size: int, dtype: DType) -> None:
    layout = Layout.create(world_size)
    for rows, hidden, num_sms, arch in product(ROWS, HIDDEN, NUM_SMS, (80, 90)):
        chosen = [
            select.choose_all_reduce_norm(rows, hidden, dtype, world_size, num_sms, arch),
            select.choose_reduce_scatter_norm(rows, hidden, dtype, world_size, num_sms, arch),
        ]
        for shape in chosen:
            if shape is None:  # several kernels
                continue
            assert holds_a_row(shape, hidden, dtype)
            assert shape.threads * shape.rows % 32 == 0
            assert 32 <= shape.threads * shape.rows <= 1024
            assert 1 <= shape.grid <= num_sms
            if shape.form is Form.lamport:
                assert shape.grid <= NUM_LAMPORT_CHANNELS
                assert shape.grid % shape.cluster == 0
                assert shape.threads * shape.unroll * 16 <= layout.lamport_slot_bytes
                assert shape.cluster == 1 or arch >= 90
            else:
                assert shape.form is Form.staged
                assert shape.grid <= NUM_STAGED_CHANNELS
                assert shape.threads * shape.rows >= world_size
                assert shape.threads % 32 == 0 or 32 % shape.threads == 0
                assert shape.threads * shape.unroll * shape.rows * 16 <= layout.staging_slot_bytes
                assert shape.pieces == 1 or shape.rows == 1


@pytest.mark.parametrize("dtype", select.DTYPES, ids=lambda d: d.name)
def test_who_has_no_kernel_of_its_own(dtype: DType) -> None:
    """Up to eight ranks have one kernel that reduces, scatters and norms any rows, by few CTAs or many; but for the
    longest of float32, whose sum is not rounded before the norm either way. Two and three ranks all-reduce so, too."""
    for rows, hidden, world_size, num_sms in product(ROWS, HIDDEN, range(2, 9), (1, 8, 132)):
        shape = select.choose_reduce_scatter_norm(rows, hidden, dtype, world_size, num_sms, 90)
        assert shape or (dtype is DType.float32 and hidden > 16384 and world_size > 4)
        if world_size < 4:
            assert select.choose_all_reduce_norm(rows, hidden, dtype, world_size, num_sms, 90)
    assert select.choose_all_reduce_norm(8192, 8192, dtype, 4, 132, 90) is None


def test_chunks_of_the_staged_norm() -> None:
    """A row at a time while CTAs have few of them, then as much as a slot holds; short rows side by side."""
    for rows, hidden, threads, unroll, together in (
        (256, 8192, 512, 2, 1), (1024, 8192, 512, 2, 1), (8192, 8192, 256, 4, 2), (4096, 2048, 128, 2, 4),
        (65536, 2048, 64, 4, 8), (65536, 64, 4, 2, 128), (8192, 2880, 96, 4, 5), (200, 16, 1, 2, 32),
    ):  # fmt: skip
        shape = select.staged_shape(rows, hidden, DType.bfloat16, 2, 132)
        assert shape is not None
        assert (shape.threads, shape.unroll, shape.rows) == (threads, unroll, together), (rows, hidden)
        assert shape.grid == min(128, -(-rows // together))


def test_direct() -> None:
    for rows, hidden, world_size in product(ROWS, HIDDEN, WORLDS):
        for max_ctas in (None, 1, 16, 64):
            shape = select.direct_shape(rows, hidden, DType.bfloat16, world_size, 132, max_ctas)
            assert holds_a_row(shape, hidden, DType.bfloat16)
            assert 1 <= shape.grid <= (max_ctas or 132)
    for rows, world_size, form in ((4096, 8, Form.direct), (4096, 2, Form.staged), (128, 2, Form.lamport)):
        chosen = select.choose_all_reduce_norm(rows, 8192, DType.bfloat16, world_size, 132, 90, True)
        assert chosen is not None
        assert chosen.form is form


def test_slices_are_those_of_chunk() -> None:
    for rows, world_size in product(range(20), WORLDS):
        slices = [select.slice_rows(rows, world_size, rank) for rank in range(world_size)]
        owned = [row for first, num in slices for row in range(first, first + num)]
        assert owned == list(range(rows))
        assert all(num == -(-rows // world_size) for first, num in slices if first + num < rows)


def test_alignment() -> None:
    assert select.are_aligned(8, DType.bfloat16, 256, 32)
    assert not select.are_aligned(8, DType.bfloat16, 256, 40)
    assert not select.are_aligned(7, DType.bfloat16, 256)
    assert select.are_aligned(4, DType.float32)
