"""The ring kernel compiles to PTX and machine code with no GPU; its table says what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import ARCHITECTURES, ptx_of

from symmcomm.schedule.dtypes import DType, Op, supports
from symmcomm.schedule.layout_gpu import DEPTH, Layout
from symmcomm.schedule.machines import nvlink, pcie
from symmcomm.schedule.plan import KEEP, all_reduce_of
from symmcomm.schedule.ring import direct, ring_1d, ring_2d
from symmcomm.schedule.ring_gpu import HEADER_WORDS, ROW_WORDS, SOURCE_WORDS, may_defer, num_early, pack, ring_shape

PLANS = {
    "two": ring_1d(nvlink(2)),
    "ring": ring_1d(nvlink(5)),
    "pull": ring_1d(nvlink(3), pull=True),
    "both": all_reduce_of(ring_2d(pcie((2, 2)), both_directions=True)),
    "direct": direct(nvlink(4)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_packed_table_is_the_plan(name: str) -> None:
    plan = PLANS[name]
    for rank in range(plan.world_size):
        words = pack(plan, rank)
        row_words = ROW_WORDS + SOURCE_WORDS * plan.num_sources
        steps = plan.steps[rank]
        assert len(words) == HEADER_WORDS + len(steps) * row_words
        assert words[:4] == [len(steps), num_early(plan, rank), plan.num_signals, int(may_defer(plan, rank))]
        for idx, step in enumerate(steps):
            row = words[HEADER_WORDS + idx * row_words :][:row_words]
            assert row[:7] == [
                step.segment, step.lane, step.own, step.target, step.slot, step.signal, len(step.sources),
            ]  # fmt: skip
            for number, source in enumerate(step.sources):
                sender, slot, signal, partial, early, *_ = row[ROW_WORDS + number * SOURCE_WORDS :]
                assert (sender, slot, signal) == tuple(source)
                at = [(s.target, s.signal) for s in plan.steps[sender]].index((rank, signal))
                assert early == (at < num_early(plan, sender))
                assert partial == (plan.steps[sender][at].own and bool(plan.steps[sender][at].sources))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_slots_fit_and_rounds_are_alike(name: str, dtype: DType) -> None:
    """All sets of slots fit the channel, and ranks agree on the early rows' signals: those of a pair come first."""
    plan = PLANS[name]
    shape = ring_shape(plan, 1 << 20, dtype, Op.sum, 132)
    layout = Layout.create(plan.world_size)
    factor = 4 // dtype.itemsize if shape.wide else 1
    assert plan.num_slots * shape.chunk_bytes * factor <= plan.world_size * layout.staging_slot_bytes
    assert shape.chunk_bytes % 16 == 0
    assert shape.chunk_bytes > 0
    assert DEPTH >= 4  # of an iteration that is one chunk ahead: schedule.plan
    for rank in range(plan.world_size):
        early = plan.steps[rank][: num_early(plan, rank)]
        assert all(step.target != KEEP for step in early)


def test_blocks_are_as_asked_for() -> None:
    plan = PLANS["two"]
    assert ring_shape(plan, 64 << 20, DType.bfloat16, Op.sum, 132, 7).grid == 7
    assert ring_shape(plan, 64 << 20, DType.bfloat16, Op.sum, 132).grid == 128
    assert ring_shape(plan, 100, DType.bfloat16, Op.sum, 132).grid == 1


def test_chunks_are_large_once_each_block_has_several() -> None:
    plan = PLANS["two"]
    sizes = [ring_shape(plan, part << 20, DType.bfloat16, Op.sum, 132).chunk_bytes for part in (16, 63, 64, 256)]
    assert sizes == [32 << 10, 32 << 10, 64 << 10, 64 << 10]
    assert ring_shape(PLANS["ring"], 256 << 20, DType.bfloat16, Op.sum, 132).chunk_bytes <= 64 << 10


PAIRS = [(dtype, Op.avg if supports(dtype, Op.avg) else Op.sum) for dtype in DType]
PAIRS += [(DType.bfloat16, Op.sum), (DType.int32, Op.bxor), (DType.float16, Op.max)]


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
@pytest.mark.parametrize(("name", "arch"), [*(("two", arch) for arch in ARCHITECTURES), ("both", "sm_90a")])
def test_compiles(
    name: str, dtype: DType, op: Op, arch: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("cutlass")
    if (arch, dtype) == ("sm_80", DType.float8_e4m3fn):
        reason = "without instructions for 8-bit floats two vectors of them and their average exceed 128 registers"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    from symmcomm.kernels.gpu.ring import Ring

    plan = PLANS[name]
    shape = ring_shape(plan, 1 << 20, dtype, op, 132)
    kernel = Ring(dtype=dtype, op=op, world_size=plan.world_size, arch=ARCHITECTURES[arch], shape=shape)
    ptx = ptx_of(kernel, arch, tmp_path)
    assert "st.release.sys.global.b32" in ptx
    assert "ld.acquire.sys.global.b32" in ptx
    assert "ld.relaxed.sys.global.v4.b32" in ptx
