"""The norm kernels compile to PTX and machine code with no GPU; they move 16 bytes at a time and spill nothing."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import compiling
import pytest
from compiling import ARCHITECTURES, PER_ARCHITECTURE

from symmcomm.schedule import select_norm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import Form, RowLaunch

pytest.importorskip("cutlass")

from symmcomm.kernels.gpu import norm_instances

DTYPES = pytest.mark.parametrize("dtype", select_norm.DTYPES, ids=lambda d: d.name)
SIGNALS = ("st.release.sys.global.b32", "ld.acquire.sys.global.b32")
LOAD, STORE = "ld.global.v4.b32", "st.weak.global.v4.b32"


ptx_of = partial(compiling.ptx_of, shared=True)


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize(("rows", "hidden"), [(1, 8192), (16, 128), (8192, 8192), (8192, 32768)])
def test_rms_norm(rows: int, hidden: int, dtype: DType, arch: str, tmp_path: Path) -> None:
    shape = select_norm.norm_shape(rows, hidden, dtype, 132)
    ptx = ptx_of(
        norm_instances.rms_norm(shape, dtype, ARCHITECTURES[arch], aligned=True, residual=True), arch, tmp_path
    )
    assert ptx.count(LOAD) >= 3 * shape.unroll  # input, residual, weight
    assert ptx.count(STORE) == 2 * shape.unroll
    assert not re.search(r"ld\S*\.global\.(u16|b32) ", ptx)


@DTYPES
def test_options_of_rms_norm(dtype: DType, tmp_path: Path) -> None:
    shape = select_norm.norm_shape(64, 4096, dtype, 132)
    ptx = ptx_of(
        norm_instances.rms_norm(shape, dtype, 90, aligned=True, bias=True, quantize=True, pdl=True), "sm_90a", tmp_path
    )
    assert "e4m3x2.f32" in ptx
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
    ptx = ptx_of(norm_instances.rms_norm(shape, dtype, 90, aligned=False, residual=True), "sm_90a", tmp_path)
    assert LOAD not in ptx


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize("head_dim", select_norm.HEAD_DIMS)
def test_qk_norm(head_dim: int, dtype: DType, arch: str, tmp_path: Path) -> None:
    shape = select_norm.qk_norm_shape(1000, 40, head_dim, dtype, 132)
    ptx = ptx_of(
        norm_instances.qk_norm(shape, dtype, head_dim, ARCHITECTURES[arch], aligned=True), arch, tmp_path
    )
    assert ptx.count(STORE) == shape.tokens * shape.vectors
    assert "bar.sync" not in ptx


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("scatter", [False, True])
def test_exchange_norm(scatter: bool, world_size: int, dtype: DType, arch: str, tmp_path: Path) -> None:
    number = ARCHITECTURES[arch]
    lamport = select_norm.lamport_shape(2, 512, dtype, world_size, 132, number)
    assert lamport is not None
    kernel = norm_instances.exchange_norm(lamport, dtype, world_size, number, aligned=True, scatter=scatter)
    ptx = ptx_of(kernel, arch, tmp_path)
    assert "st.relaxed.sys.global.b128" in ptx
    assert "ld.relaxed.sys.global.b128" in ptx
    assert ("barrier.cluster.wait" in ptx) == (lamport.cluster > 1)
    staged = select_norm.staged_shape(1024, 2048, dtype, world_size, 132)
    assert staged is not None
    kernel = norm_instances.exchange_norm(staged, dtype, world_size, number, aligned=True, scatter=scatter)
    ptx = ptx_of(kernel, arch, tmp_path)
    for access in (*SIGNALS, "ld.relaxed.sys.global.v4.b32", LOAD, STORE):
        assert access in ptx


@PER_ARCHITECTURE
@pytest.mark.parametrize("scatter", [False, True])
def test_staged_norm_of_long_rows(scatter: bool, arch: str, tmp_path: Path) -> None:
    """Many rows of 8192 in small and in large chunks, and in pieces."""
    options = {"bias": True, "quantize": True, "pdl": arch != "sm_80"}
    for world_size, rows in ((2, 1024), (2, 8192), (3, 8192), (4, 8192), (8, 8192)):
        shape = select_norm.staged_shape(rows, 8192, DType.bfloat16, world_size, 132)
        assert shape is not None
        for extra in ({}, options) if world_size <= 4 else ({},):
            kernel = norm_instances.exchange_norm(
                shape, DType.bfloat16, world_size, ARCHITECTURES[arch], aligned=True, scatter=scatter, **extra
            )
            ptx_of(kernel, arch, tmp_path)


def test_a_staged_norm_has_the_next_chunk_at_hand(tmp_path: Path) -> None:
    """Between a signal and the stores of the next chunk to the peer lie no barrier, and no load but what has come."""
    shape = select_norm.staged_shape(8192, 8192, DType.bfloat16, 2, 132)
    assert shape is not None
    kernel = norm_instances.exchange_norm(shape, DType.bfloat16, 2, 90, aligned=True)
    ptx = ptx_of(kernel, "sm_90a", tmp_path)
    loop = ptx[ptx.index("ld.relaxed.sys.global.v4.b32") :]
    taken = loop.index("barrier") if "barrier" in loop else loop.index("bar.")
    assert loop[:taken].count("ld.relaxed.sys.global.v4.b32") == shape.unroll
    assert loop[:taken].count(STORE) == 2 * shape.unroll  # to the peer; the new residual


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize("world_size", [2, 8])
def test_direct_norm(world_size: int, dtype: DType, arch: str, tmp_path: Path) -> None:
    shape = select_norm.direct_shape(512, 4096, dtype, world_size, 132)
    for how in ({}, {"replicate": True}, {"gather": False, "quantize": True}, {"reduce": False, "residual": False}):
        kernel = norm_instances.direct_norm(shape, dtype, world_size, ARCHITECTURES[arch], aligned=True, **how)
        ptx = ptx_of(kernel, arch, tmp_path)
        assert ("ld.relaxed.sys.global.v4.b32" in ptx) == how.get("reduce", True)
        assert ptx.count("st.release.sys.global.b32") >= 2
        assert "multimem" not in ptx.split("{", 1)[1]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@DTYPES
def test_multimem(dtype: DType, arch: str, tmp_path: Path) -> None:
    shape = select_norm.direct_shape(512, 4096, dtype, 8, 132)
    words = {DType.float32: "f32", DType.float16: "acc::f32.v4.f16x2", DType.bfloat16: "acc::f32.v4.bf16x2"}[dtype]
    for replicate in (False, True):
        kernel = norm_instances.direct_norm(
            shape, dtype, 8, ARCHITECTURES[arch], aligned=True, replicate=replicate, multimem=True
        )
        ptx = ptx_of(kernel, arch, tmp_path)
        assert re.search(rf"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.\S*{words} ", ptx)
        stores = shape.unroll * shape.rows * (2 if replicate else 1)
        assert ptx.count("multimem.st.relaxed.sys.global.v4.f32") == stores


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_clusters(arch: str, tmp_path: Path) -> None:
    """A row of 8192 by several CTAs: their sums go to each other's shared memory once all have started."""
    for cluster in (2, 4):
        shape = RowLaunch(form=Form.lamport, grid=cluster, threads=1024 // cluster, unroll=1, cluster=cluster)
        kernel = norm_instances.exchange_norm(shape, DType.bfloat16, 2, ARCHITECTURES[arch], aligned=True, pdl=True)
        ptx = ptx_of(kernel, arch, tmp_path)
        started = ptx.index("barrier.cluster.wait")
        assert ptx.index("fence.mbarrier_init") < ptx.index("barrier.cluster.arrive") < started
        assert started < ptx.index("st.async.shared::cluster") < ptx.index("mbarrier.try_wait.parity")
        assert ptx.rindex("st.relaxed.sys.global.b128") < started  # vectors are under way before anybody waits
