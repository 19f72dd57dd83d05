"""What ``gpu_bench.py`` measures: collectives of bf16 tensors by symmcomm, NCCL and torch's symmetric memory, each with
a check of its result. Rank r puts in (r + 1)·(i mod 7), so sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm.kernels.gpu import instances
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import architecture, compiled
from symmcomm.kernels.gpu.copy_engine import AllGatherCopyEngine
from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import LL_CELL_BYTES, Layout, ll_words
from symmcomm.schedule.select_gpu import Algorithm, Launch

Call = Callable[[], object]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass
class Rank:
    """One rank of the benchmark: its place in the flat space, and its heap; ``early``: LL kernels start before the one
    before has ended."""

    rank: int
    world_size: int
    base: int
    stride: int
    heap: Tensor
    stream: torch.cuda.Stream
    early: bool = False

    @property
    def data(self) -> int:
        return Layout.create(self.world_size).data

    def tensor(self, num_bytes: int, symmetric: bool) -> Tensor:
        """Zeros, at the start of the heap's data or elsewhere."""
        if symmetric:
            return self.heap[self.data : self.data + num_bytes].view(torch.bfloat16).zero_()
        return torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=self.heap.device)


@dataclass
class Case:
    """A call, what goes in and what comes out."""

    call: Call
    source: Tensor
    result: Tensor

    def is_right(self, collective: str, rank: Rank, meet: Callable[[], None]) -> bool:
        """One call, compared; leaves zeros. Collective: ``meet`` waits for all ranks' hosts."""
        size, count = rank.world_size, self.source.numel()
        pattern = (torch.arange(count, device=self.source.device) % 7).to(torch.bfloat16)
        self.source.copy_(pattern * (rank.rank + 1))
        part = slice(rank.rank * (count // size), (rank.rank + 1) * (count // size))
        total = size * (size + 1) // 2
        expected = {
            "all_reduce": lambda: pattern * total,
            "reduce_scatter": lambda: pattern[part] * total,
            "all_gather": lambda: torch.cat([pattern * (r + 1) for r in range(size)]),
            "all_to_all": lambda: torch.cat([pattern[part] * (r + 1) for r in range(size)]),
        }[collective]()
        torch.cuda.synchronize()
        meet()
        self.call()
        torch.cuda.synchronize()
        right = torch.equal(self.result, expected)
        self.source.zero_()
        torch.cuda.synchronize()
        return right


def on_stream(function: Callable[..., None], *arguments: int, keep: tuple[Tensor, ...] = ()) -> Call:
    """A call on torch's current stream. ``keep``: tensors whose addresses are among the arguments. They must live as
    long as the call does, as what torch allocates in their place (its tables of peers, say) would be overwritten."""
    device, raw_stream = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream

    def call(_keep: tuple[Tensor, ...] = keep) -> None:
        function(*arguments, raw_stream(device))

    return call


def capability() -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability()
    return architecture((major, minor)), 10 * major + minor


def barrier_of(rank: Rank, protocol: str) -> Call:
    arch, number = capability()
    kernel = Barrier(world_size=rank.world_size, arch=number, protocol=protocol)
    return on_stream(compiled(kernel, arch), rank.base, rank.stride, rank.rank, 0, 0)


def chosen(collective: str, num_bytes: int, world_size: int, num_sms: int, symmetric: bool = True) -> Launch:
    """What the library would choose. ``num_bytes`` of the whole buffer."""
    part = num_bytes // world_size
    if collective == "all_reduce":
        return select_gpu.choose(num_bytes, DType.bfloat16, world_size, num_sms, symmetric)
    if collective == "reduce_scatter":
        return select_gpu.choose_reduce_scatter(part, DType.bfloat16, world_size, num_sms, symmetric)
    return select_gpu.choose_all_gather(part, world_size, num_sms, False, symmetric, copy_engine=True)


def ours(rank: Rank, collective: str, num_bytes: int, shape: Launch) -> Case:
    """Our kernel of that shape; tensors are symmetric where it needs it."""
    place, (arch, number) = (rank.base, rank.stride, rank.rank), capability()
    if collective == "all_reduce":
        return our_all_reduce(rank, num_bytes, shape)
    part, size, algorithm = num_bytes // rank.world_size, rank.world_size, shape.algorithm
    early, pull = number >= 90 and rank.early, algorithm is Algorithm.pull
    if collective == "reduce_scatter":
        source, result = rank.tensor(num_bytes, pull), rank.tensor(part, False)
        kernel = instances.reduce_scatter(shape, DType.bfloat16, Op.sum, size, number, early)
        origin = (0, rank.data) if pull else (source.data_ptr(),)
        arguments = (*origin, result.data_ptr(), part // 2, shape.grid)
        call = on_stream(compiled(kernel, arch), *place, *arguments, keep=(source, result))
        return Case(call, source, result)
    same, inside = collective == "all_gather", algorithm in (Algorithm.push, Algorithm.copy_engine)
    source, result = rank.tensor(part if same else num_bytes, pull), rank.tensor(num_bytes, inside)
    moved = (rank.data if pull else source.data_ptr(), 0 if same else part)
    moved += (rank.data if inside else result.data_ptr(), part, part, -1)
    if algorithm is Algorithm.copy_engine:
        return Case(on_stream(copy_engine(size), *place, *moved, keep=(source, result)), source, result)
    function = compiled(instances.all_gather(shape, size, same, early), arch)
    extra = (0,) if algorithm is Algorithm.push else ()
    call = on_stream(function, *place, *extra, *moved, shape.grid, keep=(source, result))
    return Case(call, source, result)


@cache
def copy_engine(world_size: int) -> AllGatherCopyEngine:
    return AllGatherCopyEngine(world_size, *capability())


def our_all_reduce(rank: Rank, num_bytes: int, shape: Launch) -> Case:
    algorithm, (arch, number) = shape.algorithm, capability()
    symmetric = algorithm in (Algorithm.two_shot, Algorithm.push)
    tensor = rank.tensor(num_bytes, symmetric)
    kernel = instances.all_reduce(shape, DType.bfloat16, Op.sum, rank.world_size, number, number >= 90 and rank.early)
    arguments = (tensor.data_ptr(), tensor.data_ptr())
    if algorithm is Algorithm.two_shot:
        arguments = (0, rank.data)
    place = (rank.base, rank.stride, rank.rank)
    call = on_stream(compiled(kernel, arch), *place, *arguments, num_bytes // 2, shape.grid, keep=(tensor,))
    return Case(call, tensor, tensor)


def pushing(rank: Rank, num_bytes: int) -> Call:
    """Nothing but stores to the peers: an all-gather in place, which has no copy at home. ``num_bytes`` to each."""
    shape, (arch, _) = Launch(algorithm=Algorithm.push, grid=128, threads=512, unroll=4), capability()
    function = compiled(instances.all_gather(shape, rank.world_size, True), arch)
    source = rank.base + rank.rank * rank.stride + rank.data + rank.rank * num_bytes
    moved = (0, source, 0, rank.data, num_bytes, num_bytes, -1, shape.grid)
    return on_stream(function, rank.base, rank.stride, rank.rank, *moved)


def copied(rank: Rank, num_bytes: int, shape: Launch) -> Case:
    """The all-reduce of an ordinary tensor that is copied into the heap and back."""
    inside, tensor = ours(rank, "all_reduce", num_bytes, shape), rank.tensor(num_bytes, False)

    def call() -> None:
        inside.source.copy_(tensor)
        inside.call()
        tensor.copy_(inside.source)

    return Case(call, tensor, tensor)


class Nccl:
    """NCCL through torch, with ordinary or window-registered memory. Pools must go before the communicator does."""

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def tensor(self, num_bytes: int, symmetric: bool) -> Tensor:
        device = torch.device("cuda", torch.cuda.current_device())
        if not symmetric:
            return torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        backend.register_mem_pool(pool, symm=True)
        self.pools.append(pool)
        return tensor

    def case(self, collective: str, num_bytes: int, world_size: int, symmetric: bool = False) -> Case:
        part = num_bytes // world_size
        source = self.tensor(part if collective == "all_gather" else num_bytes, symmetric)
        if collective == "all_reduce":
            return Case(partial(dist.all_reduce, source), source, source)
        result = self.tensor(part if collective == "reduce_scatter" else num_bytes, symmetric)
        function = {
            "reduce_scatter": dist.reduce_scatter_tensor, "all_gather": dist.all_gather_into_tensor,
            "all_to_all": dist.all_to_all_single,
        }[collective]  # fmt: skip
        return Case(partial(function, result, source), source, result)

    def release(self) -> None:
        """Gives the pools back; no tensor of theirs may be alive. Collective."""
        if self.pools:
            device = torch.device("cuda", torch.cuda.current_device())
            backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
            for pool in self.pools:
                backend.deregister_mem_pool(pool)
            self.pools.clear()


def torch_symm_mem(num_bytes: int, kind: str) -> Case:
    """torch's all-reduces; the one-shot one is out of place."""
    import torch.distributed._symmetric_memory as symm_mem

    tensor = symm_mem.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").zero_()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    symm_mem.rendezvous(tensor, name)
    if kind == "two_shot":
        return Case(partial(torch.ops.symm_mem.two_shot_all_reduce_, tensor, "sum", name), tensor, tensor)
    result = torch.empty_like(tensor)
    return Case(partial(torch.ops.symm_mem.one_shot_all_reduce_out, tensor, "sum", name, result), tensor, result)


def cases(rank: Rank, collective: str, num_bytes: int, num_sms: int, nccl: Nccl) -> dict[str, Callable[[], Case]]:
    """What is compared: makers, as some may refuse."""
    size = rank.world_size
    shapes = [chosen(collective, num_bytes, size, num_sms, symmetric) for symmetric in (True, False)]
    made: dict[str, Callable[[], Case]] = {"ours": partial(ours, rank, collective, num_bytes, shapes[0])}
    if shapes[1] != shapes[0]:
        made["ordinary"] = partial(ours, rank, collective, num_bytes, shapes[1])
    elif shapes[1].algorithm is Algorithm.two_shot:
        made["ordinary"] = partial(copied, rank, num_bytes, shapes[1])
    made["nccl"] = partial(nccl.case, collective, num_bytes, size)
    made["nccl_symm"] = partial(nccl.case, collective, num_bytes, size, True)
    if collective == "all_reduce":
        made["torch_two_shot"] = partial(torch_symm_mem, num_bytes, "two_shot")
        if num_bytes <= 8 << 20:
            made["torch_one_shot"] = partial(torch_symm_mem, num_bytes, "one_shot")
    return made


def shapes_to_try(collective: str, num_bytes: int, world_size: int, num_sms: int) -> list[Launch]:
    """Every sensible shape of every kernel, of those sizes at which it could be the best."""
    part, reduces = num_bytes // world_size, collective == "all_reduce"
    sent = num_bytes if reduces else part
    found = ll_shapes(sent, world_size, num_sms, Algorithm.ll)
    if reduces and num_bytes >= 512 << 10:
        found += ll_shapes(part, world_size, num_sms, Algorithm.ll_two_shot)
    if sent < 256 << 10:
        return found
    for grid, threads, unroll in ((64, 256, 4), (64, 512, 8), (128, 256, 8), (128, 512, 4), (128, 512, 8)):
        algorithm = Algorithm.push
        if reduces or collective == "reduce_scatter":
            algorithm = Algorithm.two_shot if reduces else Algorithm.pull
        found.append(Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll))
    if collective in ("all_gather", "all_to_all") and part >= 8 << 20:
        found.append(Launch(algorithm=Algorithm.copy_engine, grid=1, threads=32, unroll=1))
    if reduces and num_bytes <= 2 << 20:
        found += chunk_shapes(Algorithm.one_shot, num_bytes, world_size)
    if reduces and num_bytes >= 2 << 20:
        found += chunk_shapes(Algorithm.push, part, world_size)
    if not reduces or num_bytes == 32 << 20:
        found += chunk_shapes(Algorithm.staged, part, world_size)
    return found


def ll_shapes(part: int, world_size: int, num_sms: int, algorithm: Algorithm) -> list[Launch]:
    """LL kernels in one wave, without those of few CTAs that do much."""
    found, room = [], Layout.create(world_size).ll_slot_bytes // LL_CELL_BYTES
    for threads in (128, 256, 384, 512, 1024):
        for unroll in (1, 2, 3):
            grid = -(-part // (4 * ll_words(2) * threads * unroll))
            alone = threads == 128 or grid >= 20
            if grid <= num_sms and threads * unroll <= room and (unroll == 1 or grid >= 60) and alone:
                found.append(Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll))
    return found


def chunk_shapes(algorithm: Algorithm, part: int, world_size: int) -> list[Launch]:
    """Kernels that send parts in chunks: as many chunks as keep half of the CTAs busy, or more."""
    found, slot = [], Layout.create(world_size).staging_slot_bytes
    sizes = (4 << 10, 8 << 10, 16 << 10) if part <= 4 << 20 else (16 << 10, 32 << 10)
    for threads, grid in ((256, 64), (256, 128), (512, 64), (512, 128), (1024, 128)):
        for chunk_bytes in sizes:
            unroll = min(4, chunk_bytes // (16 * threads))
            if unroll and grid * chunk_bytes <= 2 * part and chunk_bytes <= slot:
                shape = (grid, threads, unroll, chunk_bytes)
                keys = dict(zip(("grid", "threads", "unroll", "chunk_bytes"), shape, strict=True))
                found.append(Launch(algorithm=algorithm, **keys))
    return found


def shape_name(shape: Launch) -> str:
    chunk = f" c{shape.chunk_bytes >> 10}" if shape.chunk_bytes else ""
    return f"{shape.algorithm.name} {shape.grid}x{shape.threads} u{shape.unroll}{chunk}"
