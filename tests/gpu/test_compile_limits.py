"""The kernels of the benchmark's floor compile with no GPU, and do what they are there to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from compiling import PER_ARCHITECTURE, ptx_of
from test_compile import SIGNALS, VECTORS

from symmcomm.kernels.gpu.limits import Empty, PingPong, Push


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_limits(arch: str, world_size: int, tmp_path: Path) -> None:
    ping_pong = ptx_of(PingPong(world_size=world_size), arch, tmp_path)
    push = ptx_of(Push(world_size=world_size, threads=512, vectors=4), arch, tmp_path)
    for access in SIGNALS:
        assert access in ping_pong
        assert access not in push
    for access in VECTORS:
        assert push.count(access) >= 4


@PER_ARCHITECTURE
def test_an_empty_kernel_is_empty(arch: str, tmp_path: Path) -> None:
    from symmcomm.kernels.gpu.compile import compile_kernel

    ptx = compile_kernel(Empty(world_size=2), arch, f"--keep-ptx --keep-cubin --dump-dir {tmp_path}").__ptx__
    body = ptx.rpartition("{")[2].partition("}")[0]
    assert body.split() == ["ret;"]
