"""Which kernel a fused norm on the GPU launches, with which arguments: all but the GPU. Every kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from symmcomm.fused import norm_gpu
from symmcomm.fused.call import Call, Heads
from symmcomm.kernels.gpu.norm_row import NormArguments

HEAP, EPS = 1 << 20, 1e-5


class FakeGpu:
    """A GPU side that notes launches. Tensors whose address is noted are symmetric."""

    arch_number, num_sms, ordinal, early, whole_vectors = 90, 132, 0, True, True

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank
        self.offsets: dict[int, int] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.gathered: list[tuple[torch.Size, torch.Size]] = []
        self.gathered_by: list[int] = []
        self.summed: list[tuple[int, int]] = []

    def symmetric_offset(self, tensor: torch.Tensor) -> int:
        return self.offsets.get(tensor.data_ptr(), -1)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        assert callable(function)
        self.launches.append(arguments)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, max_ctas: int) -> None:
        assert output.dtype is input.dtype is torch.uint8
        assert output.numel() == self.world_size * input.numel()
        self.gathered.append((output.shape, input.shape))
        self.gathered_by.append(max_ctas)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        assert input.numel() == self.world_size * output.numel()
        self.summed.append((output.numel(), output.data_ptr()))

    def check(self) -> None:
        pass


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_gpu, "_device_of", lambda index: ("sm_90a", 90, 132))


def call(rows: int, hidden: int, world_size: int, rank: int, sharded: bool, with_residual: bool = True) -> Call:
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    made = Call(x, x.new_ones(hidden), None, EPS, 0.0)
    shape = made.shard(rank, world_size, "residual") if sharded else made.shape
    made.add_residual(x.new_zeros(shape) if with_residual else None, shape)
    made.add_new_residual(None, shape)
    made.add_out(None, made.shape, None)
    return made


def places(given: NormArguments) -> tuple[Any, ...]:
    return given.source, given.residual, given.new_residual, given.output


@pytest.mark.parametrize(("rows", "grid"), [(1, 8), (3, 12), (64, 64)])
def test_all_reduce(rows: int, grid: int) -> None:
    """Addresses as they are, the whole tensors; few rows by LL, several CTAs a row."""
    gpu, made = FakeGpu(2, 1), call(rows, 8192, 2, 1, False)
    norm_gpu.all_reduce(gpu, made)  # type: ignore[arg-type]
    ((given, launched),) = gpu.launches
    task = made.task
    assert places(given) == (task.input, task.residual, task.new_residual, task.out)
    assert (given.rows, given.hidden, given.source_pitch) == (rows, 8192, 16384)
    assert launched >= min(rows, grid) / 2


@pytest.mark.parametrize("scattered", [False, True])
def test_many_rows_of_ordinary_tensors(scattered: bool) -> None:
    """One kernel, with addresses as they are; no more CTAs than asked for."""
    gpu, made = FakeGpu(2, 1), call(4095, 8192, 2, 1, scattered)
    if scattered:
        norm_gpu.reduce_scatter(gpu, made, 24)  # type: ignore[arg-type]
    else:
        norm_gpu.all_reduce(gpu, made)  # type: ignore[arg-type]
    ((given, grid),) = gpu.launches
    task = made.task
    assert places(given) == (task.input, task.residual, task.new_residual, task.out)
    assert (given.rows, grid) == (4095, 24 if scattered else 128)
    assert not gpu.summed


@pytest.mark.parametrize("rows", [4096, 4095])
def test_between_many_ranks_everybody_norms_some_rows(rows: int) -> None:
    """The own rows of the whole residual; then output and residual are gathered."""
    gpu, made = FakeGpu(4, 2), call(rows, 8192, 4, 2, False)
    residual = made.task.residual
    norm_gpu.all_reduce(gpu, made)  # type: ignore[arg-type]
    ((given, _),) = gpu.launches
    assert given.residual == residual + 2048 * 16384
    assert given.rows == rows
    if rows == 4096:
        assert (given.output, given.new_residual) == (made.out[2048:].data_ptr(), made.new_residual[2048:].data_ptr())
    assert gpu.gathered == [((4096, 16384), (1024, 16384))] * 2
    assert not gpu.summed


def test_rows_too_long_for_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 between eight ranks: summed, padded with zeros to equal parts, then normed, by as few CTAs as asked."""
    gpu = FakeGpu(8, 7)
    made = Call(torch.zeros(15, 32768), torch.ones(32768), None, EPS, 0.0)
    own = made.shard(7, 8, "residual", "out")
    made.add_new_residual(None, own)
    made.add_out(None, own, None)
    normed: list[tuple[int, int, int]] = []

    def norm_rows(call: Call, max_ctas: int) -> None:
        normed.append((call.task.rows, call.task.input, max_ctas))

    monkeypatch.setattr(norm_gpu, "norm_rows", norm_rows)
    norm_gpu.reduce_scatter(gpu, made, 5)  # type: ignore[arg-type]
    ((count, address),) = gpu.summed
    assert count == 2 * 32768
    assert normed == [(1, address, 5)]
    assert not gpu.launches


def test_no_residual_is_a_row_of_zeros() -> None:
    gpu, made = FakeGpu(2, 0), call(4, 64, 2, 0, False, with_residual=False)
    norm_gpu.all_reduce(gpu, made)  # type: ignore[arg-type]
    given = gpu.launches[0][0]
    assert given.residual != 0
    assert given.residual_pitch == 0
    assert given.new_residual == made.new_residual.data_ptr()


@pytest.mark.parametrize("rows", [8, 7])
def test_scattered_and_gathered(rows: int) -> None:
    """Ordinary tensors: own rows into the own part, then an all-gather of equal parts."""
    gpu, made = FakeGpu(2, 1), call(rows, 512, 2, 1, True)
    norm_gpu.gather(gpu, made, 5, True)  # type: ignore[arg-type]
    ((given, grid),) = gpu.launches
    assert grid <= 5
    assert given.rows == rows
    if rows == 8:
        assert given.output == made.out[4:].data_ptr()
    assert gpu.gathered == [((8, 1024), (4, 1024))]
    assert gpu.gathered_by == [5]


def test_symmetric_tensors_are_written_everywhere() -> None:
    gpu, made = FakeGpu(2, 1), call(8, 512, 2, 1, True)
    gpu.offsets = {made.input.data_ptr(): HEAP, made.out.data_ptr(): 2 * HEAP}
    norm_gpu.gather(gpu, made, 3, True)  # type: ignore[arg-type]
    ((multicast, given, grid),) = gpu.launches
    assert (multicast, given.source, given.output) == (0, HEAP, 2 * HEAP)
    assert given.residual == made.task.residual
    assert grid <= 3
    made = call(8, 512, 2, 1, True)
    made.batch_offset = 3 * HEAP
    norm_gpu.gather(gpu, made, 3, True)  # type: ignore[arg-type]
    assert (gpu.launches[-1][1].source, gpu.launches[-1][1].output) == (3 * HEAP, 3 * HEAP)
    assert not gpu.gathered


def test_two_shots_between_four() -> None:
    gpu, made = FakeGpu(4, 1), call(512, 8192, 4, 1, False)
    gpu.offsets = {t.data_ptr(): HEAP * i for i, t in enumerate((made.input, made.out, made.new_residual), 1)}
    norm_gpu.all_reduce(gpu, made)  # type: ignore[arg-type]
    given = gpu.launches[0][1]
    assert (given.source, given.output, given.new_residual) == (HEAP, 2 * HEAP, 3 * HEAP)


def test_reduce_scatter() -> None:
    gpu = FakeGpu(3, 2)
    made = Call(torch.zeros(7, 64), torch.ones(64), None, EPS, 1.0)
    own = made.shard(2, 3, "residual", "out")
    made.add_new_residual(None, own)
    made.add_out(None, own, None)
    norm_gpu.reduce_scatter(gpu, made, 64)  # type: ignore[arg-type]
    given = gpu.launches[0][0]
    assert (given.output, given.new_residual) == (made.out.data_ptr(), made.new_residual.data_ptr())
    assert (given.rows, given.weight_bias) == (7, 1.0)


def test_alignment_and_float8() -> None:
    x = torch.zeros(4, 72, dtype=torch.bfloat16)
    for source, aligned in ((x[:, :64], True), (x[:, 1:65], False), (x[:, 8:72], True)):
        made = Call(source, x.new_ones(64), None, EPS, 0.0, True)
        made.add_out(None, made.shape, None)
        assert norm_gpu._options(made.task, 0, True) == (aligned, False, False, True)
    buffer = torch.zeros(600, dtype=torch.float8_e4m3fn)
    made = Call(x[:, :64], x.new_ones(64), None, EPS, 0.0)
    at = -buffer.data_ptr() % 16
    for shift, aligned in ((8, True), (4, False)):  # 16 bytes of bfloat16 become 8
        made.add_out(buffer[at + shift :][:256].view(4, 64), made.shape, torch.zeros(4))
        assert norm_gpu._options(made.task, 0, True) == (aligned, False, True, False)


def test_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(norm_gpu, "_heads", lambda *key: lambda *given: launched.append((key, given)))
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    qkv = torch.zeros(3, 8, 128, dtype=torch.bfloat16)
    weight = torch.ones(128, dtype=torch.bfloat16)
    q, k = Heads("q", qkv[:, :4], weight, None, EPS, 1.0), Heads("k", qkv[:, 4:6], weight, qkv[:, 4:6], EPS, 1.0)
    norm_gpu.qk_norm(q, k)
    ((key, (given, handle)),) = launched
    assert key[:3] == (3, 6, 128)
    assert key[5] is (given.query % 16 == given.query_weight % 16 == given.query_output % 16 == 0)
    assert (given.query, given.query_pitch, given.query_head_pitch) == (qkv.data_ptr(), 2048, 256)
    assert (given.key, given.key_output) == (qkv[:, 4:].data_ptr(),) * 2
    assert (given.tokens, given.query_heads, given.key_heads, given.weight_bias) == (3, 4, 2, 1.0)
    assert handle == 5
