"""Inputs and expectations for the tests in which all ranks are in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_

import pytest
import torch
from torch import Tensor

from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.testing.local_world import LocalWorld

WORLDS = (2, 3, 4, 5, 8)
DATA_BYTES = 24 << 20
COUNTS = (1, 2, 3, 7, 8, 9, 64, 127, 1000, 4099)
PERIOD = 99_991
"""After so many elements long inputs repeat: a prime, so that no two chunks, parts or ranks have the same ones. To make
and to check megabytes that do not would take the host longer than the calls take."""
POISON = 0x5A
MARGIN = 256
ALIGNMENT = 512
DELAY_NS = 3_000_000
PATIENCE_S = 60.0
"""For waits that must succeed: no statement about speed, as other processes have their time slices on the GPU."""


@cache
def world_of(world_size: int) -> LocalWorld:
    """One world for all tests of a size: so every test also inherits the epochs and LL cells of those before."""
    return LocalWorld(world_size, DATA_BYTES, PATIENCE_S)


@contextmanager
def one_deadline(deadline_s: float) -> Iterator[None]:
    """What runs in the block takes one deadline: nobody gives up sooner, and nobody waits again who has given up. To
    load a kernel takes time as well, so it is loaded before (``LocalWorld.load``)."""
    start = time.monotonic()
    yield
    assert 0.75 * deadline_s < time.monotonic() - start < 1.75 * deadline_s


def torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.name)


def repeated(values: Tensor, count: int) -> Tensor:
    """``count`` of them, from the start again and again."""
    return values.repeat(-(-count // max(1, len(values))))[:count]


@dataclass
class Place:
    """Bytes of each rank with poison around them, in the heaps or elsewhere. All ranks' are written, and read, by one
    copy: each has to wait for the other processes on the GPU, and Python takes longer than the copy."""

    world: LocalWorld
    num_bytes: int
    symmetric: bool
    start: int = 0
    shift: int = 0
    raw: Tensor = field(init=False)

    def __post_init__(self) -> None:
        whole, size = self.num_bytes + 2 * MARGIN, self.world.world_size
        if self.symmetric:
            self.raw = self.world.all_bytes(self.world.data + self.start, whole)
        else:
            pitch = -(-whole // ALIGNMENT) * ALIGNMENT
            self.raw = torch.empty(size, pitch, dtype=torch.uint8, device="cuda")[:, :whole]
        self.raw.fill_(POISON)

    @property
    def first(self) -> int:
        return MARGIN // 2 + self.shift

    def bytes(self, rank: int) -> Tensor:
        return self.raw[rank, self.first : self.first + self.num_bytes]

    def address(self, rank: int) -> int:
        return self.bytes(rank).data_ptr()

    @property
    def offset(self) -> int:
        return self.world.data + self.start + self.first

    def fill(self, parts: Sequence[Tensor], skips: Sequence[int] = ()) -> None:
        """The ranks' values, ``skips`` bytes from the start, and poison everywhere else."""
        image = torch.full(self.raw.shape, POISON, dtype=torch.uint8)
        for rank, part in enumerate(parts):
            begin = self.first + (skips[rank] if skips else 0)
            image[rank, begin : begin + part.nbytes] = bits(part)
        self.raw.copy_(image)

    def read(self) -> Tensor:
        """What the ranks have now, a row each, on the CPU. Around it nothing was written."""
        found = self.raw.cpu()
        end = self.first + self.num_bytes
        assert bool((found[:, : self.first] == POISON).all())
        assert bool((found[:, end:] == POISON).all())
        return found[:, self.first : end].contiguous()


def unlikely(num_bytes: int, seed: int) -> Tensor:
    """Vectors of 16 bytes that go out as 0 or as 1, or as neither (see ``kernels.gpu.lamport``), in any order."""
    from symmcomm.kernels.gpu.lamport import KEY

    nothing = torch.tensor([word - (1 << 32) * (word >> 31) for word in KEY], dtype=torch.int32)
    kinds = torch.stack([nothing ^ torch.tensor([low, 0, 0, high]) for low, high in ((0, 0), (1, 0), (2, 0), (1, 1))])
    order = torch.randint(0, 4, (-(-num_bytes // 16),), generator=torch.Generator().manual_seed(seed))
    return kinds.to(torch.int32)[order].view(torch.uint8).flatten()[:num_bytes]


def granule_of(num_bytes: int, *addresses: int) -> int:
    """For which Lamport kernels are compiled (``kernels.gpu.lamport_parts``)."""
    return select_gpu.granule(reduce(or_, addresses, num_bytes))


def inputs(dtype: DType, op: Op, world_size: int, count: int, seed: int = 0) -> list[Tensor]:
    """What the ranks put in, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    kind, shape = torch_dtype(dtype), (world_size, min(count, PERIOD))
    if dtype is DType.bool:
        values = torch.randint(0, 2, shape, generator=generator)
    elif not dtype.is_floating_point:
        info = torch.iinfo(kind)
        low, high = max(info.min, -(1 << 40)), min(info.max, 1 << 40)
        values = torch.randint(low, high, shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * (1 if op is Op.prod else 100)
    return [repeated(part, count) for part in values.to(kind)]


def rounded(accumulator: Tensor, dtype: DType) -> Tensor:
    if dtype is DType.float8_e4m3fn:  # torch before 2.13 does not saturate
        accumulator = accumulator.clamp(-448, 448)
    return accumulator.to(torch_dtype(dtype))


def reduced(parts: list[Tensor], dtype: DType, op: Op) -> Tensor:
    """The reduction in rank order, with the accumulator that is promised."""
    if dtype is DType.bool:
        ops = {Op.sum: Op.bor, Op.max: Op.bor, Op.prod: Op.band, Op.min: Op.band}
        op, parts = ops.get(op, op), [p.to(torch.uint8) for p in parts]
    elif dtype.is_floating_point:
        parts = [p.to(torch.float64 if dtype is DType.float64 else torch.float32) for p in parts]
    else:
        parts = [p.to(torch.int64) for p in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        match op:
            case Op.sum | Op.avg:
                total = total + part
            case Op.prod:
                total = total * part
            case Op.max:
                total = torch.maximum(total, part)
            case Op.min:
                total = torch.minimum(total, part)
            case Op.band:
                total = total & part
            case Op.bor:
                total = total | part
            case Op.bxor:
                total = total ^ part
    if op is Op.avg:
        world_size = len(parts)
        total = total / world_size if dtype.is_floating_point else torch.div(total, world_size, rounding_mode="trunc")
    return rounded(total, dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    """Bit by bit; any NaN matches any other."""
    if torch.equal(bits(got), bits(expected)):
        return
    if got.dtype.is_floating_point:
        nan = expected.to(torch.float32).isnan()
        assert torch.equal(got.to(torch.float32).isnan(), nan), what
        got, expected = got[~nan], expected[~nan]
    if not torch.equal(bits(got), bits(expected)):
        wrong = (bits(got) != bits(expected)).view(len(got), -1).any(1)
        first = int(wrong.nonzero()[0])
        pytest.fail(f"{what}: {int(wrong.sum())} of {len(got)} wrong, at {first} {got[first]} for {expected[first]}")


def assert_close_to_float64(result: Tensor, parts: list[Tensor], dtype: DType, op: Op) -> None:
    """A sum of W numbers is off by at most W·u·Σ|x| to first order, u the unit roundoff of the type. Behind PERIOD all
    repeats."""
    if not dtype.is_floating_point or op is not Op.sum:
        return
    result, exact = result[:PERIOD], torch.stack([p[:PERIOD].to(torch.float64) for p in parts])
    info = torch.finfo(result.dtype)
    bound = len(parts) * info.eps / 2 * exact.abs().sum(0) + info.smallest_normal * info.eps
    limit = info.max
    total = exact.sum(0)
    inside = total.abs() <= limit
    assert bool(((result.to(torch.float64) - total).abs() <= bound)[inside].all())
