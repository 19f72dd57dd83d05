"""Every kernel compiles to PTX and machine code with no GPU, and the PTX holds what it must."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op, supports

pytest.importorskip("cutlass")

from barrier_cases import PassOn
from compiling import ARCHITECTURES, DTYPES, PER_ARCHITECTURE, num_registers, ptx_of

from symmcomm.kernels.gpu import instances, multimem
from symmcomm.kernels.gpu.all_gather import AllGatherPush
from symmcomm.kernels.gpu.all_reduce import AllReduceTwoShot
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import architecture, compile_kernel, compiled
from symmcomm.kernels.gpu.elements import Reduction
from symmcomm.kernels.gpu.reduce_scatter import ReduceScatterLL, ReduceScatterPull
from symmcomm.schedule.select_gpu import Algorithm, Launch
from symmcomm.testing.spawn import run_ranks


def ll(dtype: DType, op: Op, arch: str, world_size: int, cells: int = 1) -> ReduceScatterLL:
    return ReduceScatterLL(
        dtype=dtype, op=op, world_size=world_size, arch=ARCHITECTURES[arch], threads=256, cells=cells, same=True
    )


def two_shot(
    dtype: DType, op: Op, arch: str, world_size: int, vectors: int = 2, multimem: bool = False
) -> AllReduceTwoShot:
    number = ARCHITECTURES[arch]
    return AllReduceTwoShot(
        dtype=dtype, op=op, world_size=world_size, arch=number, threads=512, vectors=vectors, multimem=multimem
    )


@PER_ARCHITECTURE
@DTYPES
def test_ll(dtype: DType, arch: str, tmp_path: Path) -> None:
    ptx = ptx_of(ll(dtype, Op.sum, arch, 2), arch, tmp_path)
    assert "st.relaxed.sys.global.b128" in ptx
    assert "ld.relaxed.sys.global.b128" in ptx
    assert "st.release.sys.global.b32" in ptx  # the record


@PER_ARCHITECTURE
@DTYPES
def test_two_shot(dtype: DType, arch: str, tmp_path: Path) -> None:
    ptx = ptx_of(two_shot(dtype, Op.sum, arch, 2), arch, tmp_path)
    assert ptx.count("st.release.sys.global.b32") >= 2
    assert ptx.count("ld.acquire.sys.global.b32") >= 2
    assert "ld.relaxed.sys.global.v4.b32" in ptx
    assert "st.weak.global.v4.b32" in ptx
    assert "multimem" not in ptx.split("{", 1)[1].replace("_multimem", "")


@pytest.mark.parametrize(("dtype", "op"), [(d, o) for d in DType for o in Op if supports(d, o)], ids=lambda x: x.name)
def test_every_operation(dtype: DType, op: Op, tmp_path: Path) -> None:
    ptx_of(two_shot(dtype, op, "sm_90a", 3, vectors=1), "sm_90a", tmp_path)


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_worlds(world_size: int, tmp_path: Path) -> None:
    ptx_of(ll(DType.bfloat16, Op.sum, "sm_90a", world_size, cells=2), "sm_90a", tmp_path)
    ptx_of(two_shot(DType.bfloat16, Op.sum, "sm_90a", world_size), "sm_90a", tmp_path)


LL_ACCESSES = ("st.relaxed.sys.global.b128", "ld.relaxed.sys.global.b128")
SIGNALS = ("st.release.sys.global.b32", "ld.acquire.sys.global.b32")
VECTORS = ("ld.relaxed.sys.global.v4.b32", "st.weak.global.v4.b32")


def launch(algorithm: Algorithm, unroll: int = 1) -> Launch:
    return Launch(algorithm=algorithm, grid=1, threads=256, unroll=unroll, chunk_bytes=8192)


@PER_ARCHITECTURE
@DTYPES
def test_ll_two_shot(dtype: DType, arch: str, tmp_path: Path) -> None:
    kernel = instances.all_reduce(launch(Algorithm.ll_two_shot), dtype, Op.sum, 2, ARCHITECTURES[arch])
    ptx = ptx_of(kernel, arch, tmp_path)
    for access in LL_ACCESSES:
        assert access in ptx


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize("algorithm", [Algorithm.ll, Algorithm.pull, Algorithm.staged], ids=lambda a: a.name)
def test_reduce_scatter(algorithm: Algorithm, dtype: DType, arch: str, tmp_path: Path) -> None:
    kernel = instances.reduce_scatter(launch(algorithm), dtype, Op.sum, 2, ARCHITECTURES[arch])
    ptx = ptx_of(kernel, arch, tmp_path)
    for access in LL_ACCESSES if algorithm is Algorithm.ll else SIGNALS + VECTORS:
        assert access in ptx


STAGED = (Algorithm.one_shot, Algorithm.staged, Algorithm.push)


def staged_all_reduce(algorithm: Algorithm, dtype: DType, op: Op, world_size: int, arch: str) -> Any:
    """As large data have it: of the most threads and vectors."""
    shape = select_gpu.staged_shape(1 << 28, world_size, 132, dtype, algorithm)
    return instances.all_reduce(shape, dtype, op, world_size, ARCHITECTURES[arch])


@PER_ARCHITECTURE
@DTYPES
@pytest.mark.parametrize("algorithm", STAGED, ids=lambda a: a.name)
def test_staged_all_reduce(algorithm: Algorithm, dtype: DType, arch: str, tmp_path: Path) -> None:
    ptx = ptx_of(staged_all_reduce(algorithm, dtype, Op.sum, 2, arch), arch, tmp_path)
    for access in SIGNALS + VECTORS:
        assert access in ptx


@PER_ARCHITECTURE
@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float64, DType.int64], ids=lambda d: d.name)
@pytest.mark.parametrize("algorithm", STAGED[1:], ids=lambda a: a.name)
def test_staged_average(algorithm: Algorithm, dtype: DType, arch: str, tmp_path: Path) -> None:
    """The operation that needs the most registers; float64 has the most in flight."""
    ptx_of(staged_all_reduce(algorithm, dtype, Op.avg, 2, arch), arch, tmp_path)


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("dtype", [DType.float32, DType.int64], ids=lambda d: d.name)
def test_registers_hold_what_comes_from_many_ranks(dtype: DType, world_size: int, tmp_path: Path) -> None:
    """In all shapes that are chosen for large tensors."""
    sizes = [1 << exponent for exponent in range(22, 31)]
    found = {select_gpu.choose(size, dtype, world_size, 132, same) for size in sizes for same in (True, False)}
    shapes = {replace(shape, grid=1) for shape in found if shape.algorithm in (*STAGED, Algorithm.two_shot)}
    assert {shape.algorithm for shape in shapes} == {Algorithm.staged, Algorithm.push, Algorithm.two_shot}
    for shape in shapes:
        ptx_of(instances.all_reduce(shape, dtype, Op.sum, world_size, 90), "sm_90a", tmp_path)


LAMPORT_ACCESSES = (*LL_ACCESSES, "ld.relaxed.sys.global.u8", "st.relaxed.sys.global.u8")


@PER_ARCHITECTURE
@DTYPES
def test_lamport(dtype: DType, arch: str, tmp_path: Path) -> None:
    """Aligned data go as vectors, others as what they are multiples of."""
    for build, world_size, granule in (
        (instances.all_reduce, 2, 16), (instances.reduce_scatter, 2, min(4, dtype.itemsize)),
        (instances.reduce_scatter, 3, 16),
    ):  # fmt: skip
        kernel = build(launch(Algorithm.lamport), dtype, Op.sum, world_size, ARCHITECTURES[arch], granule=granule)
        ptx = ptx_of(kernel, arch, tmp_path)
        for access in LAMPORT_ACCESSES:
            assert access in ptx
        for unit, access in {16: "ld.global.v4.b32", 4: "ld.global.b32", 2: "ld.global.u16", 1: "ld.global.u8"}.items():
            assert (f"@live {access}" in ptx) == (unit == granule)


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_lamport_in_slots(world_size: int, arch: str, tmp_path: Path) -> None:
    """A reduce-scatter signals only where there may be several; one rank may be the only one to send, too."""
    for slots in range(3):
        shape = replace(launch(Algorithm.lamport, 2 if world_size <= 4 else 1), slots=slots)
        number = ARCHITECTURES[arch]
        kernel = instances.reduce_scatter(shape, DType.bfloat16, Op.sum, world_size, number, granule=16)
        assert (SIGNALS[1] in ptx_of(kernel, arch, tmp_path)) == (slots > 1)
        for same, granule in ((True, 16), (False, 16), (slots == 1, 1)):
            ptx = ptx_of(instances.all_gather(shape, world_size, same, granule=granule), arch, tmp_path)
            for access in LAMPORT_ACCESSES + SIGNALS:
                assert access in ptx


def early_kernels(world_size: int) -> list[Any]:
    """Those of the largest early shapes of every algorithm."""
    dtypes = (DType.bfloat16, DType.float8_e4m3fn, DType.float64)
    shapes: dict[Any, Any] = {}
    for part in sorted([1 << exponent for exponent in range(10, 24)] + [128 * 384 * 16]):
        found: dict[Any, Launch] = {same: select_gpu.choose_all_gather(part, world_size, 132) for same in (True, False)}
        for dtype in dtypes:
            found[dtype] = select_gpu.choose_reduce_scatter(part, dtype, world_size, 132)
            found[dtype, "all"] = select_gpu.choose(part, dtype, world_size, 132)
        early = {what: shape for what, shape in found.items() if select_gpu.may_start_early(shape, world_size)}
        shapes.update({(what, shape.algorithm): shape for what, shape in early.items()})
    kernels = []
    for (what, _), shape in shapes.items():
        if isinstance(what, bool):
            kernels.append(instances.all_gather(shape, world_size, what, True, 16))
        elif isinstance(what, tuple):
            kernels.append(instances.all_reduce(shape, what[0], Op.sum, world_size, 90, True, 16))
        else:
            kernels.append(instances.reduce_scatter(shape, what, Op.sum, world_size, 90, True, 16))
    return kernels


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_three_ctas_of_kernels_that_start_early_fit_on_an_sm(world_size: int, tmp_path: Path) -> None:
    """One that runs, one that waits behind it, and one of another communicator."""
    kernels = early_kernels(world_size)
    assert len(kernels) >= 8
    for kernel in kernels:
        registers = num_registers(compile_kernel(kernel, "sm_90a", f"--keep-cubin --dump-dir {tmp_path}").__cubin__)
        assert 16 <= registers <= 255
        assert 3 * kernel.threads * -(-registers // 8) * 8 <= 1 << 16, f"{registers} registers: {kernel}"


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("algorithm", [Algorithm.ll, Algorithm.push, Algorithm.pull, Algorithm.staged])
def test_all_gather(algorithm: Algorithm, world_size: int, arch: str, tmp_path: Path) -> None:
    for same in (True, False):
        ptx = ptx_of(instances.all_gather(launch(algorithm, 2), world_size, same), arch, tmp_path)
        for access in LL_ACCESSES if algorithm is Algorithm.ll else SIGNALS + VECTORS:
            assert access in ptx
        # Whose warp has not got a cell waits for no signal.
        assert ("vote.sync.all.pred" in ptx) == (algorithm is Algorithm.ll)


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_to_all_uneven(world_size: int, arch: str, tmp_path: Path) -> None:
    ptx = ptx_of(instances.all_to_all_uneven(launch(Algorithm.staged, 4), world_size), arch, tmp_path)
    for access in SIGNALS + VECTORS:
        assert access in ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_multimem_of_one_way(arch: str, tmp_path: Path) -> None:
    ptx = ptx_of(AllGatherPush(world_size=4, threads=256, vectors=2, multimem=True), arch, tmp_path)
    assert "multimem.st.relaxed.sys.global.v4.f32" in ptx
    kernel = ReduceScatterPull(
        dtype=DType.bfloat16, op=Op.sum, world_size=4, arch=ARCHITECTURES[arch], threads=256, vectors=2, multimem=True
    )
    ptx = ptx_of(kernel, arch, tmp_path)
    assert "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2" in ptx
    assert "st.weak.global.v4.b32" in ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dtype", "op"), [(d, o) for d in DType for o in Op if supports(d, o)], ids=lambda x: x.name)
def test_multimem(dtype: DType, op: Op, arch: str, tmp_path: Path) -> None:
    how = multimem.form(Reduction(dtype, op, 4, ARCHITECTURES[arch]), 16)
    if how is None:
        pytest.skip("the switch does not reduce this as we do")
    ptx = ptx_of(two_shot(dtype, op, arch, 4, multimem=True), arch, tmp_path)
    vector = ".v4" if how.num_words == 4 else ""
    acc = "(\\.acc::f32)" if how.acc else ""
    assert re.search(rf"multimem\.ld_reduce\.relaxed\.sys\.global\.{how.op}{acc}{re.escape(vector)}\.{how.kind} ", ptx)
    assert "multimem.st.relaxed.sys.global.v4.f32" in ptx
    assert bool(how.acc) == (dtype in (DType.float16, DType.bfloat16) and op is Op.sum)


ONE_SHOT = [
    (DType.bfloat16, Op.sum), (DType.float16, Op.sum), (DType.float32, Op.avg), (DType.float64, Op.sum),
    (DType.int32, Op.sum), (DType.int64, Op.min), (DType.bool, Op.prod),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dtype", "op"), ONE_SHOT, ids=lambda x: x.name)
def test_multimem_of_one_shot(dtype: DType, op: Op, arch: str, tmp_path: Path) -> None:
    """What the switch has reduced is stored behind the second barrier, in the own memory alone."""
    shape = replace(launch(Algorithm.pull, 2), multimem=True)
    ptx = ptx_of(instances.all_reduce(shape, dtype, op, 4, ARCHITECTURES[arch]), arch, tmp_path)
    acc = "add.acc::f32.v4" if dtype in (DType.float16, DType.bfloat16) else ""
    loaded, signalled = ptx.rindex(f"multimem.ld_reduce.relaxed.sys.global.{acc}"), ptx.rindex(SIGNALS[1])
    assert ptx.index(SIGNALS[1]) < loaded < signalled < ptx.index(VECTORS[1])
    assert "multimem.st" not in ptx
    assert VECTORS[0] not in ptx


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_one_shot_by_peers(world_size: int, arch: str, tmp_path: Path) -> None:
    kernel = instances.all_reduce(launch(Algorithm.pull), DType.bfloat16, Op.sum, world_size, ARCHITECTURES[arch])
    ptx = ptx_of(kernel, arch, tmp_path)
    loads, signalled = [found.start() for found in re.finditer(re.escape(VECTORS[0]), ptx)], ptx.rindex(SIGNALS[1])
    assert len(loads) == world_size
    assert ptx.index(SIGNALS[1]) < loads[0] < loads[-1] < signalled < ptx.index(VECTORS[1])


BARRIERS = [
    ("all_to_all", "epoch"), ("ring", "epoch"), ("all_to_all", "cas"), ("ring", "cas"), ("all_to_all", "multicast"),
]  # fmt: skip


@PER_ARCHITECTURE
@pytest.mark.parametrize(("algorithm", "protocol"), BARRIERS)
def test_barrier(algorithm: str, protocol: str, arch: str, tmp_path: Path) -> None:
    kernel = Barrier(world_size=4, arch=ARCHITECTURES[arch], algorithm=algorithm, protocol=protocol)
    ptx = ptx_of(kernel, arch, tmp_path)
    expected = {
        "epoch": ["st.release.sys.global.b32", "ld.acquire.sys.global.b32"],
        "cas": ["atom.acq_rel.sys.global.cas.b32"],
        "multicast": ["red.release.sys.global.add.u32", "ld.acquire.sys.global.b32"],
    }
    for instruction in expected[protocol]:
        assert instruction in ptx


@PER_ARCHITECTURE
@pytest.mark.parametrize(("algorithm", "protocol"), BARRIERS)
def test_barriers_inside_a_kernel(algorithm: str, protocol: str, arch: str, tmp_path: Path) -> None:
    """They speak for the CTA: its threads meet before the signals, and agree after the waits."""
    for world_size in (2, 3, 8):
        kernel = PassOn(world_size=world_size, algorithm=algorithm, protocol=protocol)
        ptx = ptx_of(kernel, arch, tmp_path)
        barriers = re.findall(r"bar(?:rier)?\.(?:cta\.)?(sync|red)", ptx)
        assert barriers == ["sync", "red", "sync", "red", "sync"]  # the last one is the kernel's end


def test_multicast_barrier(tmp_path: Path) -> None:
    ptx = ptx_of(Barrier(world_size=4, arch=90, protocol="multicast", multimem=True), "sm_90a", tmp_path)
    assert "multimem.red.release.sys.global.add.u32" in ptx


def test_the_disk_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from symmcomm.kernels.gpu import compile as module

    kernel = ll(DType.float32, Op.sum, "sm_90a", 2)
    monkeypatch.setattr(module, "_loaded", {})
    compiled(kernel, "sm_90a", tmp_path)
    (found,) = tmp_path.glob("*.o")
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "compile_kernel", lambda *_: pytest.fail("compiled although it is on disk"))
    function = compiled(kernel, "sm_90a", tmp_path)
    assert compiled(kernel, "sm_90a", tmp_path) is function
    with pytest.raises(TypeError, match="Expects 8 parameters"):
        function(1, 2, 3)
    monkeypatch.undo()
    monkeypatch.setattr(module, "_loaded", {})
    found.write_bytes(b"half of a file")
    compiled(kernel, "sm_90a", tmp_path)
    assert found.stat().st_size > 1000


def compile_in(folder: str) -> int:
    """How often this process had to compile."""
    from symmcomm.kernels.gpu import compile as module

    count, real = [0], module.compile_kernel

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return real(*arguments)

    module.compile_kernel = counted
    compiled(ll(DType.int16, Op.sum, "sm_90a", 2), "sm_90a", Path(folder))
    return count[0]


def test_of_ranks_that_start_together_one_compiles(tmp_path: Path) -> None:
    assert sum(result.value for result in run_ranks(compile_in, 3, str(tmp_path))) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".o"]


def test_nobody_waits_for_long_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from symmcomm.kernels.gpu import compile as module

    kernel = ll(DType.float32, Op.sum, "sm_90a", 2)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    with FileLock(tmp_path / f"{module._digest(kernel, 'sm_90a')}.lock"):
        compiled(kernel, "sm_90a", tmp_path)
    assert [*tmp_path.glob("*.o")]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from symmcomm.kernels.gpu import compile as module

    temporary, no_folder = tmp_path / "temporary", tmp_path / "file"
    temporary.mkdir()
    no_folder.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(module, "_loaded", {})
    function = compiled(ll(DType.float32, Op.sum, "sm_90a", 2), "sm_90a", no_folder)
    with pytest.raises(TypeError, match="Expects 8 parameters"):
        function(1, 2, 3)
    assert not [*temporary.iterdir()]


def test_architecture() -> None:
    assert architecture((8, 0)) == "sm_80"
    assert architecture((9, 0)) == "sm_90a"
    assert architecture((10, 0)) == "sm_100a"
