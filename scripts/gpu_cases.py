"""What ``gpu_bench.py`` measures: collectives of bf16 tensors by symmcomm, NCCL and torch's symmetric memory, each with
a check of its result. Rank r puts in (r + 1)·(i mod 7), so sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from symmcomm.kernels.gpu import instances
from symmcomm.kernels.gpu.barrier import Barrier
from symmcomm.kernels.gpu.compile import architecture, compiled
from symmcomm.schedule import select_gpu
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.layout_gpu import Layout
from symmcomm.schedule.select_gpu import Algorithm, Launch

Call = Callable[[], object]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass
class Rank:
    """One rank of the benchmark: its place in the flat space, and its heap."""

    rank: int
    world_size: int
    base: int
    stride: int
    heap: Tensor
    stream: torch.cuda.Stream

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
    return select_gpu.choose_all_gather(part, world_size, num_sms, False, symmetric)


def ours(rank: Rank, collective: str, num_bytes: int, shape: Launch) -> Case:
    """Our kernel of that shape; tensors are symmetric where it needs it."""
    part, size, algorithm = num_bytes // rank.world_size, rank.world_size, shape.algorithm
    place, (arch, number) = (rank.base, rank.stride, rank.rank), capability()
    if collective == "all_reduce":
        tensor = rank.tensor(num_bytes, algorithm is Algorithm.two_shot)
        kernel = instances.all_reduce(shape, DType.bfloat16, Op.sum, size, number)
        arguments = (0, rank.data) if algorithm is Algorithm.two_shot else (tensor.data_ptr(), tensor.data_ptr())
        call = on_stream(compiled(kernel, arch), *place, *arguments, num_bytes // 2, shape.grid, keep=(tensor,))
        return Case(call, tensor, tensor)
    if collective == "reduce_scatter":
        pull = algorithm is Algorithm.pull
        source, result = rank.tensor(num_bytes, pull), rank.tensor(part, False)
        kernel = instances.reduce_scatter(shape, DType.bfloat16, Op.sum, size, number)
        origin = (0, rank.data) if pull else (source.data_ptr(),)
        arguments = (*origin, result.data_ptr(), part // 2, shape.grid)
        call = on_stream(compiled(kernel, arch), *place, *arguments, keep=(source, result))
        return Case(call, source, result)
    same, push, pull = collective == "all_gather", algorithm is Algorithm.push, algorithm is Algorithm.pull
    source, result = rank.tensor(part if same else num_bytes, pull), rank.tensor(num_bytes, push)
    origin = rank.data if pull else source.data_ptr()
    target = (rank.data if push else result.data_ptr(), part)
    function = compiled(instances.all_gather(shape, size, same), arch)
    extra = (0,) if push else ()
    arguments = (*extra, origin, 0 if same else part, *target, part, -1, shape.grid)
    call = on_stream(function, *place, *arguments, keep=(source, result))
    return Case(call, source, result)


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
    layout = Layout.create(world_size)
    part = num_bytes // world_size
    sent = num_bytes if collective == "all_reduce" else part
    kinds = [(Algorithm.ll, sent)] + [(Algorithm.ll_two_shot, part)] * (collective == "all_reduce")
    found = []
    for algorithm, each in kinds:
        for threads in (128, 256, 512, 1024):
            for unroll in (1, 2, 4):
                grid = -(-each // (8 * threads * unroll))
                if grid <= num_sms and threads * unroll <= layout.ll_slot_bytes // 16:
                    found.append(Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll))
    if num_bytes < 256 << 10:
        return found
    direct = {"all_reduce": [Algorithm.two_shot], "reduce_scatter": [Algorithm.pull]}
    for algorithm in direct.get(collective, [Algorithm.push, Algorithm.pull]):
        for threads, grids in ((256, (64, 128)), (512, (32, 64, 128)), (1024, (64, 128))):
            for grid in grids:
                for unroll in (2, 4, 8) if threads < 1024 else (2, 4):
                    found.append(Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll))
    for algorithm in [Algorithm.staged] * (collective != "all_reduce"):
        for threads, grid in ((256, 64), (256, 128), (512, 64), (512, 128), (1024, 128)):
            for chunk_bytes in (4 << 10, 8 << 10, 16 << 10, 32 << 10):
                unroll = min(4, chunk_bytes // (16 * threads))
                if unroll and grid * chunk_bytes <= 2 * part and chunk_bytes <= layout.staging_slot_bytes:
                    found.append(
                        Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll, chunk_bytes=chunk_bytes)
                    )
    return found


def shape_name(shape: Launch) -> str:
    chunk = f" c{shape.chunk_bytes >> 10}" if shape.chunk_bytes else ""
    return f"{shape.algorithm.name} {shape.grid}x{shape.threads} u{shape.unroll}{chunk}"
