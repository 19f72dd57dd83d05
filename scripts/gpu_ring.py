"""The ring kernel beside the direct kernels and NCCL between two GPUs, by ``gpu_bench``'s protocol; a table, and JSON
to $OUT: ``PYTHONPATH=. python scripts/gpu_ring.py``."""

from __future__ import annotations

import gc
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_bench
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_cases import Case, Nccl, Rank, capability, chosen, on_stream, ours, shape_name

from symmcomm.kernels.gpu.compile import compiled
from symmcomm.kernels.gpu.ring import Ring
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.machines import nvlink
from symmcomm.schedule.plan import all_reduce_of
from symmcomm.schedule.ring import ring_1d
from symmcomm.schedule.ring_gpu import RingShape, pack, ring_shape
from symmcomm.schedule.select_gpu import staged_shape

SIZES = [2 << 20, 32 << 20, 128 << 20, 512 << 20]
ROUNDS = 7


def ring_case(rank: Rank, collective: str, num_bytes: int, shape: RingShape) -> Case:
    """The ring kernel of that shape on ordinary tensors of bf16."""
    size, part, (arch, number) = rank.world_size, num_bytes // rank.world_size, capability()
    plan = plan_for(collective, size)
    table = torch.tensor(pack(plan, rank.rank), dtype=torch.int32, device="cuda")
    source = rank.tensor(num_bytes, False)
    result = source if plan.gathers else rank.tensor(part, False)
    kernel = Ring(dtype=DType.bfloat16, op=Op.sum, world_size=size, arch=number, shape=replace(shape, grid=1))
    addresses = table.data_ptr(), source.data_ptr(), result.data_ptr()
    sizes = num_bytes, part, part if plan.gathers else 0
    place = rank.base, rank.stride, rank.rank
    call = on_stream(compiled(kernel, arch), *place, *addresses, *sizes, shape.grid, keep=(table, source, result))
    return Case(call, source, result)


def plan_for(collective: str, world_size: int) -> Any:
    plan = ring_1d(nvlink(world_size))
    return all_reduce_of(plan) if collective == "all_reduce" else plan


def shapes(collective: str, num_bytes: int, world_size: int) -> dict[str, RingShape]:
    """What would be chosen, and some beside it."""
    part = num_bytes // world_size
    first = ring_shape(plan_for(collective, world_size), part, DType.bfloat16, Op.sum, gpu_bench.num_sms())
    found = {"ring": first}
    for grid in (64,):
        found[f"ring {grid} blocks"] = replace(first, grid=min(grid, first.grid))
    for chunk_bytes, threads in ((16 << 10, 256), (32 << 10, 1024)):
        if chunk_bytes <= first.chunk_bytes:
            vectors = max(1, min(4, chunk_bytes // (16 * threads)))
            name = f"ring {chunk_bytes >> 10}K x {threads}"
            found[name] = replace(first, chunk_bytes=chunk_bytes, threads=threads, vectors=vectors)
    return found


def run(index: int, world_size: int, port: int) -> None:
    os.environ.update(gpu_bench.FORBID_MULTICAST)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", rank=index, world_size=world_size, device_id=torch.device("cuda", index))
    gpu_bench._gloo.append(dist.new_group(backend="gloo"))
    rank = gpu_bench.make_rank(index, world_size, max(SIZES))
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    nccl = Nccl()
    for collective in ("reduce_scatter", "all_reduce"):
        for num_bytes in SIZES if collective == "reduce_scatter" else SIZES[1:3]:
            row = compare(rank, collective, num_bytes, nccl)
            report["rows"].append(row)
            if index == 0:
                print(line(row), flush=True)
                (Path(os.environ.get("OUT", ".")) / "gpu_ring.json").write_text(json.dumps(report, indent=1))
    gc.collect()
    torch.cuda.synchronize()
    gpu_bench.meet()
    for action in gpu_bench._at_end:
        action()
    dist.destroy_process_group()


def compare(rank: Rank, collective: str, num_bytes: int, nccl: Nccl) -> dict[str, Any]:
    """Microseconds of each, where its result is right."""
    size, part = rank.world_size, num_bytes // rank.world_size
    direct = chosen(collective, num_bytes, size, gpu_bench.num_sms(), collective == "all_reduce")
    staged = staged_shape(part, size, gpu_bench.num_sms(), DType.bfloat16)
    made = {"direct": ours(rank, collective, num_bytes, direct if collective == "all_reduce" else staged)}
    made |= {name: ring_case(rank, collective, num_bytes, s) for name, s in shapes(collective, num_bytes, size).items()}
    made["nccl"] = nccl.case(collective, num_bytes, size)
    wrong = [name for name, case in made.items() if not all(gpu_bench.gather(case.is_right(collective, rank, meet)))]
    calls = {name: case.call for name, case in made.items() if name not in wrong}
    figures = gpu_bench.measure(calls, num_bytes, rank, ROUNDS)
    return {
        "collective": collective, "bytes": num_bytes, "us": figures, "wrong": wrong, "direct": shape_name(direct),
    }  # fmt: skip


def meet() -> None:
    gpu_bench.meet()


def line(row: dict[str, Any]) -> str:
    """All figures, and the ring's over the direct kernel's."""
    us = row["us"]
    text = f"{row['collective']:>14} {row['bytes']:>10} " + ", ".join(f"{name} {t:.1f}" for name, t in us.items())
    if "ring" in us and "direct" in us:
        text += f"; ring / direct {us['ring'] / us['direct']:.3f}"
        if "nccl" in us:
            text += f", nccl / ring {us['nccl'] / us['ring']:.2f}"
    return text + (f"; WRONG: {row['wrong']}" if row["wrong"] else "")


def main() -> None:
    os.environ.update(gpu_bench.FORBID_MULTICAST)  # before any library of the ranks looks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (2, port), nprocs=2)


if __name__ == "__main__":
    main()
