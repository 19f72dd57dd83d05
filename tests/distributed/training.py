"""Training steps by every parallelism of torch; each returns tensors that must not depend on the backend. They are on
torch's default device."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 32, 8
ADAM_EPS = 1e-4
"""Above the gradients' rounding errors. With torch's 1e-8 Adam blows those up where a gradient is near 0: on gloo,
float32 is then off by 3e-3 from float64."""

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
ROUGHLY = {"rtol": 1e-2, "atol": 1e-2}  # gradients are rounded to 16 bits
MIXED = {"rtol": 1e-2, "atol": 4e-3}
"""Losses are bfloat16. Parameters after ``fsdp(mixed=True)`` are within 2e-3 of those that float32 gives, so those of
two devices within twice that of each other; without the other rank's gradients they move by 9e-3 to 0.13."""

Results = list[torch.Tensor]


@cache
def _store(host: str, port: int, rank: int, size: int) -> dist.TCPStore:
    """Shared with the library's own, where this process has one there."""
    return dist.TCPStore(host, port, size, rank == 0, wait_for_workers=False, multi_tenant=True)


@contextmanager
def process_group(backend: str) -> Iterator[dist.ProcessGroup]:
    """A default group after which this process may make another one, as they share a store. torch's own goes with its
    group, but a rank that comes to the next one early still finds it."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    shared = _store(os.environ["MASTER_ADDR"], port, rank, size)
    store = dist.PrefixStore(f"group {shared.add(f'groups of rank {rank}', 1)}", shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()


def device() -> torch.device:
    return torch.get_default_device()


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What ``make`` returns, on the default device; random numbers are the CPU's, the same for every device."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        made = make()
    return made.to(device())


def model() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
    )  # fmt: skip


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(ROWS, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3, same: bool = False) -> Results:
    """Losses and parameters."""
    results = []
    for step in range(num_steps):
        loss = module(batch(step, 0 if same else None)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(whole(loss))
    return results + [whole(parameter) for parameter in module.parameters()]


def ddp(hook: str = "", **options: object) -> Results:
    # Small buckets, so that there are several; but PowerSGD makes its calls in callbacks, in an order of its own.
    module = DistributedDataParallel(model(), bucket_cap_mb=25 if hook == "powersgd" else 0.01, **options)
    if hook == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "allreduce":
        module.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    elif hook == "builtin":
        module._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(module, torch.optim.SGD(module.parameters(), lr=0.1), 4)


def ddp_join() -> Results:
    """Uneven inputs: rank r has r + 2 batches."""
    module = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with module.join():
        train(module, optimizer, dist.get_rank() + 2)
    return [whole(parameter) for parameter in module.parameters()]


def sync_batch_norm_buffers(compiled: bool = False) -> Results:
    module = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
    trained = torch.compile(module, backend="aot_eager") if compiled else module
    return train(trained, torch.optim.SGD(module.parameters(), lr=0.1)) + [whole(b) for b in module.buffers()]


def fsdp(mixed: bool = False) -> Results:
    module = model()
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    if mixed:
        # Adam would make steps of rounding errors, which are bfloat16's here and differ between devices. Before a norm
        # gradients are small: a lower rate would hide in the tolerance what a wrong reduction does.
        return train(module, torch.optim.SGD(module.parameters(), lr=1.0))
    return train(module, torch.optim.AdamW(module.parameters(), lr=0.01, eps=ADAM_EPS))


def hybrid() -> Results:
    """Replicated over one dimension of the mesh, sharded over the other."""
    mesh = init_device_mesh(device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    module = model()
    fully_shard(module, mesh=mesh)
    return train(module, torch.optim.SGD(module.parameters(), lr=0.1))


def tensor_parallel(sequence: bool = False) -> Results:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    if sequence:
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0),
        }
    else:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(model(), mesh, plan)
    # One at a time: parameters outside the plan are no DTensors, and the form for many, which is the default on GPUs,
    # takes only one kind.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    if not sequence:
        return train(module, optimizer, same=True)
    rows = ROWS // dist.get_world_size()
    losses = []
    for step in range(3):
        part = batch(step, 0)[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]
        output = module(part)
        loss = (output.to_local() if isinstance(output, DTensor) else output).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss))
    return losses + [whole(parameter) for parameter in module.parameters()]


def dtensor() -> Results:
    """Every placement to every other, on even and uneven shapes, and on a mesh of two dimensions."""
    size = dist.get_world_size()
    mesh = init_device_mesh(device().type, (size,))
    results = []
    for shape in ((4 * size, 6), (5, 7), (size - 1, 3)):
        tensor = seeded(lambda shape=shape: torch.randn(shape), 1)
        placements = (Replicate(), Shard(0), Shard(1))
        for before in placements:
            for after in placements:
                local = distribute_tensor(tensor, mesh, [before]).redistribute(mesh, [after]).to_local()
                results.append(local.clone())
        for after in placements:
            part = DTensor.from_local(tensor * (dist.get_rank() + 1), mesh, [Partial()])
            results.append(part.redistribute(mesh, [after]).to_local().clone())
    if size == 4:
        flat = init_device_mesh(device().type, (2, 2), mesh_dim_names=("rows", "columns"))
        tensor = distribute_tensor(torch.arange(64.0).view(8, 8), flat, [Shard(0), Shard(1)])
        results.append(tensor.redistribute(flat, [Shard(1), Replicate()]).to_local().clone())
        results.append((tensor @ tensor.t()).full_tensor())
    return results


def pipeline() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), rank)
    stage = PipelineStage(module, rank, size, device())
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
    losses: Results = []
    for step in range(2):
        inputs, target = batch(step, 0), batch(step, 1)
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
    return [whole(loss) for loss in losses] + [whole(parameter.grad) for parameter in module.parameters()]


def zero() -> Results:
    module = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01, eps=ADAM_EPS)
    results = train(module, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        results += [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    return results


def checkpointed() -> Results:
    """Saved by a sharded model, loaded by one that is sharded another way."""
    folder: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    module = model()
    fully_shard(module, mesh=mesh)
    results = train(module, torch.optim.SGD(module.parameters(), lr=0.1))
    checkpoint.save(get_model_state_dict(module), checkpoint_id=str(folder[0]))
    torch.manual_seed(7)
    other = copy.deepcopy(nn.Sequential(*[nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]))
    other.append(nn.LayerNorm(WIDTH))
    other = parallelize_module(other, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=str(folder[0]))
    set_model_state_dict(other, state)
    dist.barrier()
    assert (Path(str(folder[0])) / ".metadata").exists()
    loaded = [whole(parameter) for parameter in other.parameters()]
    assert all(map(torch.equal, loaded, results[3:]))
    return loaded


def functional_collectives() -> Results:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    tensor = batch(0)
    results = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_reduce(tensor, "max", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.all_gather_tensor(tensor, 1, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        functional.all_to_all_single(tensor, None, None, group),
        functional.broadcast(tensor, size - 1, group),
        *functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group),
        *functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group),
    ]
    complex_ = torch.complex(tensor, tensor + 1)
    results.append(torch.view_as_real(functional.all_reduce(complex_, "sum", group).clone()))
    sent = [(rank + peer) % 3 for peer in range(size)]
    rows = torch.full((sum(sent), 2), float(rank))
    results.append(functional.all_to_all_single(rows, sent, sent, group))
    leaf = batch(1).requires_grad_()
    loss = functional.all_gather_tensor_autograd(leaf, 0, group).square().sum()
    loss = loss + functional.reduce_scatter_tensor_autograd(leaf, "sum", 0, group).square().sum()
    loss = loss + functional.all_to_all_single_autograd(leaf, None, None, group).pow(3).sum()
    loss = loss + differentiable.all_reduce(leaf.clone()).square().sum()
    loss.backward()
    return [result.clone() for result in results] + [whole(loss), leaf.grad]


def mesh_of_one_rank_groups() -> Results:
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(-1, 1)
    mesh = DeviceMesh(device().type, ranks, mesh_dim_names=("all", "alone"))
    tensor = batch(0)
    dist.all_reduce(tensor, group=mesh.get_group("alone"))
    dist.all_reduce(tensor, group=mesh.get_group("all"))
    return [tensor]


SCENARIOS: dict[str, Callable[[], Results]] = {
    "ddp": ddp,
    "ddp, gradients are views": lambda: ddp(gradient_as_bucket_view=True),
    "ddp, static graph": lambda: ddp(static_graph=True),
    "ddp, unused parameters": lambda: ddp(find_unused_parameters=True),
    "ddp, fp16 hook": lambda: ddp("fp16"),
    "ddp, all-reduce hook": lambda: ddp("allreduce"),
    "ddp, builtin hook": lambda: ddp("builtin"),
    "ddp, PowerSGD hook": lambda: ddp("powersgd"),
    "ddp, join": ddp_join,
    "ddp, buffers": sync_batch_norm_buffers,
    "ddp, compiled": lambda: sync_batch_norm_buffers(compiled=True),
    "fsdp": fsdp,
    "fsdp, mixed precision": lambda: fsdp(mixed=True),
    "fsdp, hybrid": hybrid,
    "tensor parallel": tensor_parallel,
    "sequence parallel": lambda: tensor_parallel(sequence=True),
    "dtensor": dtensor,
    "pipeline": pipeline,
    "zero": zero,
    "checkpoint": checkpointed,
    "functional collectives": functional_collectives,
    "mesh of one-rank groups": mesh_of_one_rank_groups,
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "data parallel": ("ddp", "zero"),
    "sharded": ("fsdp", "checkpoint"),
    "model parallel": ("tensor", "sequence", "dtensor", "pipeline", "functional", "mesh"),
}
"""Beginnings of the names of scenarios that are run in one world."""


def check_same(expected: Mapping[str, Results], got: Mapping[str, Results]) -> None:
    """Of each scenario, by name, what two backends gave."""
    for name, results in expected.items():
        assert len(results) == len(got[name]) > 0, name
        tolerance = ROUGHLY if "hook" in name else MIXED if "mixed" in name else TOLERANCE
        for number, (left, right) in enumerate(zip(results, got[name], strict=True)):
            torch.testing.assert_close(right, left, **tolerance, msg=lambda text, n=number, s=name: f"{s} {n}: {text}")
