"""Collectives on GPUs beside NCCL and torch's symmetric memory, in one run; tables, and JSON to $OUT.

    PYTHONPATH=. python scripts/gpu_bench.py              two processes, one GPU each
    PYTHONPATH=. python scripts/gpu_bench.py --sweep      our kernels in many shapes, to set schedule/select_gpu.py by
    PYTHONPATH=. python scripts/gpu_bench.py --local 4    four ranks in one process on one GPU, our all-reduce only: no
                                                          link, so nothing to quote

Protocol. bf16; bytes are of the whole buffer (all-to-all: sent by a rank, its own part included). ``ours`` has
symmetric tensors where that helps, ``ordinary`` none. Each implementation is first checked, and is not timed if it is
wrong. Then a CUDA graph of up to 50 calls is captured. A round replays it once on all ranks, between two events, behind
a sleep (so that all is enqueued in time) and a barrier on the GPUs (so that all start together); the figure is the
median over the rounds of the slowest rank's time a call. Implementations take turns, a round each. Buffers hold zeros
while they are timed. ``eager``: host time of one call in a loop of 300, nothing captured.

The floor is a launch, one way over the link, and the bytes at the rate of a kernel that only stores, measured in the
same run. NVLink multicast stays off: the variables that
forbid it are set for the ranks, whatever the caller has set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_cases import (
    COLLECTIVES,
    Call,
    Case,
    Nccl,
    Rank,
    barrier_of,
    cases,
    chosen,
    ours,
    pushing,
    shape_name,
    shapes_to_try,
)

from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import Layout
from symmcomm.schedule.select_gpu import Launch

FORBID_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "SYMMCOMM_DISABLE_MULTICAST": "1",
}  # fmt: skip
SLEEP_CYCLES = 400_000  # about 0.2 ms: longer than it takes to enqueue a round
KI, MI = 1 << 10, 1 << 20
SIZES = {
    "all_reduce": [KI, 8 * KI, 32 * KI, 128 * KI, 512 * KI, MI, 2 * MI, 8 * MI, 32 * MI, 128 * MI, 512 * MI],
    "reduce_scatter": [8 * KI, 128 * KI, 2 * MI, 32 * MI, 512 * MI],
    "all_gather": [8 * KI, 128 * KI, 2 * MI, 32 * MI, 512 * MI],
    "all_to_all": [448 * KI, 3584 * KI, 28 * MI, 112 * MI],
}
SWEEP = (  # the ones that matter most come first
    ("all_reduce", MI), ("all_reduce", 512 * KI), ("all_reduce", 2 * MI), ("all_reduce", 128 * KI), ("all_reduce", KI),
    ("reduce_scatter", 32 * MI), ("all_gather", 32 * MI), ("all_reduce", 32 * MI), ("all_reduce", 128 * MI),
    ("all_gather", 512 * MI), ("all_to_all", 112 * MI), ("reduce_scatter", 2 * MI), ("all_gather", 2 * MI),
    ("all_reduce", 8 * MI), ("all_to_all", 3584 * KI), ("all_to_all", 28 * MI), ("reduce_scatter", 128 * KI),
    ("all_to_all", 448 * KI),
)  # fmt: skip
PEERS = ("nccl", "nccl_symm", "torch_two_shot", "torch_one_shot")
LAUNCH_US, ONE_WAY_US = 0.64, 1.22  # LIMITS.md
COLUMNS = " ".join(f"{name:>8}" for name in ("ordinary", "nccl", "symm", "two", "one"))
HEADER = f"{'bytes':>10} {'ours':>8} {'shape':>26} {COLUMNS}  xNCCL  xbest  /floor"


_gloo: list[Any] = []
_at_end: list[Callable[[], object]] = []


def meet() -> None:
    """All ranks' hosts."""
    dist.barrier(group=_gloo[0])


def gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_gloo[0])
    return found


def capture(call: Call, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    meet()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog queries events
        for _ in range(calls):
            call()
    return graph


def measure(calls: dict[str, Call], num_bytes: int, rank: Rank, rounds: int) -> dict[str, float]:
    """Microseconds a call of each implementation."""
    repeat = 50 if num_bytes <= 1 << 20 else 10 if num_bytes <= 32 << 20 else 3
    graphs = {name: capture(call, repeat, rank.stream) for name, call in calls.items()}
    align = barrier_of(rank, "epoch")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 3):
        for name in list(graphs)[:: 1 if round_ % 2 else -1]:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            meet()
            with torch.cuda.stream(rank.stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                align()
                before.record()
                graphs[name].replay()
                after.record()
            after.synchronize()
            if round_ >= 3:
                times[name].append(before.elapsed_time(after) * 1e3 / repeat)
    return {name: statistics.median(max(t) for t in zip(*gather(found), strict=True)) for name, found in times.items()}


def eager_us(call: Call) -> float:
    """Host time of a call."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        meet()
        start = time.perf_counter()
        for _ in range(300):
            call()
        best = min(best, (time.perf_counter() - start) / 300 * 1e6)
    torch.cuda.synchronize()
    return best


def table(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    """The comparison; rank 0 prints it as it goes."""
    say = print if rank.rank == 0 else (lambda *_, **__: None)
    report: dict[str, Any] = {"refused": {}, "bytes_per_us": link_rate(rank, arguments.rounds)}
    say(f"push, GB/s a direction: {report['bytes_per_us'] / 1e3:.1f}")
    nccl = Nccl()
    for collective in arguments.collectives:
        report[collective] = []
        say(collective, HEADER, sep="\n")
        for num_bytes in arguments.sizes or SIZES[collective]:
            row = compare(rank, collective, num_bytes, nccl, arguments.rounds, report["refused"])
            row["floor_us"] = LAUNCH_US + ONE_WAY_US + row["on_wire"] / report["bytes_per_us"]
            report[collective].append(row)
            say(line(row), flush=True)
    barriers = {protocol: barrier_of(rank, protocol) for protocol in ("epoch", "cas")}
    report["barrier_us"] = measure(barriers, 1024, rank, arguments.rounds)
    small = chosen("all_reduce", 1024, rank.world_size, num_sms())
    report["eager_us"] = {
        "ours": eager_us(ours(rank, "all_reduce", 1024, small).call),
        "nccl": eager_us(nccl.case("all_reduce", 1024, rank.world_size).call),
    }
    say("barrier, us:", report["barrier_us"], "\neager host us:", report["eager_us"])
    if report["refused"]:
        say("not timed:", json.dumps(report["refused"], indent=1))
    _at_end.append(nccl.release)
    return report


def compare(
    rank: Rank, collective: str, num_bytes: int, nccl: Nccl, rounds: int, refused: dict[str, str],
    shape: Launch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One line of a table; ``shape``: of ours, else what the library chooses."""
    calls: dict[str, Call] = {}
    made = cases(rank, collective, num_bytes, num_sms(), nccl)
    if shape is not None:
        made["ours"] = partial(ours, rank, collective, num_bytes, shape)
    for name, make in made.items():
        try:
            case: Case = make()
            right = all(gather(case.is_right(collective, rank, meet)))
        except torch.AcceleratorError:  # the context is gone: no later figure would mean anything
            print(f"{collective} {name} {num_bytes}: the GPU failed", flush=True)
            raise
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            refused[f"{collective} {name} {num_bytes}"] = str(error)[:200]
            continue
        if right:
            calls[name] = case.call
        else:
            refused[f"{collective} {name} {num_bytes}"] = "wrong result"
    shape = shape or chosen(collective, num_bytes, rank.world_size, num_sms())
    on_wire = num_bytes if collective == "all_reduce" else num_bytes // rank.world_size * (rank.world_size - 1)
    figures = measure(calls, num_bytes, rank, rounds)
    return {"bytes": num_bytes, "us": figures, "shape": shape_name(shape), "on_wire": on_wire}


def line(row: dict[str, Any]) -> str:
    """A line of the table: times, then theirs over ours, and ours over the floor."""
    figures = row["us"]

    def cell(name: str) -> str:
        return f"{figures[name]:8.2f}" if name in figures else f"{'-':>8}"

    text = f"{row['bytes']:>10} {cell('ours')} {row['shape']:>26} {cell('ordinary')} "
    text += " ".join(cell(name) for name in PEERS)
    if "ours" in figures and "nccl" in figures:
        mine, best = figures["ours"], min((figures[n] for n in PEERS[1:] if n in figures), default=float("nan"))
        text += f" {figures['nccl'] / mine:6.2f} {best / mine:6.2f} {mine / row['floor_us']:7.2f}"
    return text


def sweep(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our kernels in every sensible shape: the best two of each kind at each size, then the best of all by turns with
    the others."""
    found: dict[str, Any] = {"bytes_per_us": link_rate(rank, arguments.rounds)}
    nccl, refused = Nccl(), {}
    _at_end.append(nccl.release)
    deadline, summary = time.monotonic() + arguments.seconds, []
    for collective, num_bytes in sweep_order(arguments):
        if any(gather(time.monotonic() > deadline)):
            summary.append(f"{collective} {num_bytes}: no time left")
            continue
        times: dict[str, float] = {}
        shapes = {shape_name(s): s for s in shapes_to_try(collective, num_bytes, rank.world_size, num_sms())}
        for name, shape in shapes.items():
            case = ours(rank, collective, num_bytes, shape)
            if all(gather(case.is_right(collective, rank, meet))):
                times |= measure({name: case.call}, num_bytes, rank, 4)
            elif rank.rank == 0:
                print("WRONG", collective, num_bytes, name, flush=True)
        best = sorted(times.items(), key=lambda item: item[1])
        row = compare(rank, collective, num_bytes, nccl, arguments.rounds, refused, shapes[best[0][0]])
        row["floor_us"] = LAUNCH_US + ONE_WAY_US + row["on_wire"] / found["bytes_per_us"]
        found[f"{collective} {num_bytes}"] = row | {"shapes": dict(best)}
        summary.append(f"{collective:>14} {line(row)}")
        of_kind: dict[str, list[str]] = {}
        for name, us in best:
            of_kind.setdefault(name.split()[0], []).append(f"{name}: {us:.2f}")
        if rank.rank == 0:
            print(f"{collective} {num_bytes}", *[" | ".join(kind[:3]) for kind in of_kind.values()], sep="\n   ")
            print(summary[-1], flush=True)
            write(found, arguments, rank.world_size)
    if rank.rank == 0:
        print(f"push, GB/s a direction: {found['bytes_per_us'] / 1e3:.1f}", refused, HEADER, *summary, sep="\n")
    return found


def sweep_order(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    if arguments.sizes:
        return [(name, size) for name in arguments.collectives for size in arguments.sizes]
    return [pair for pair in SWEEP if pair[0] in arguments.collectives]


def link_rate(rank: Rank, rounds: int) -> float:
    """Bytes a microsecond that stores bring over the link, both ways at once: from two transfers, so that what they
    cost besides drops out."""
    small, large = 32 << 20, 128 << 20
    calls = {size: measure({"push": pushing(rank, size)}, 3 * size, rank, rounds)["push"] for size in (small, large)}
    return (large - small) * (rank.world_size - 1) / (calls[large] - calls[small])


def num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def make_rank(index: int, world_size: int, data_bytes: int) -> Rank:
    """The heap is torch's symmetric memory: with two ranks any two addresses are a base and a stride."""
    import torch.distributed._symmetric_memory as symm_mem

    heap = symm_mem.empty(Layout.create(world_size).data + data_bytes, dtype=torch.uint8, device="cuda").zero_()
    handle = symm_mem.rendezvous(heap, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    pointers = list(handle.buffer_ptrs)
    strides = {b - a for a, b in pairwise(pointers)}
    assert len(strides) == 1, f"torch's buffers of {world_size} ranks are not evenly spaced: {pointers}"
    rank = Rank(index, world_size, pointers[0], strides.pop(), heap, torch.cuda.Stream())
    record = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    _at_end.append(record.zero_)  # alive until then
    heap[at.RECORD : at.RECORD + 8].view(torch.int64).fill_(record.data_ptr())
    heap[at.TIMEOUT_NS : at.TIMEOUT_NS + 8].view(torch.int64).fill_(20 * 10**9)
    torch.cuda.synchronize()
    meet()
    return rank


def run(index: int, world_size: int, port: int, arguments: argparse.Namespace) -> None:
    """One process."""
    os.environ.update(FORBID_MULTICAST)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    dist.init_process_group("nccl", rank=index, world_size=world_size, device_id=device)
    _gloo.append(dist.new_group(backend="gloo"))
    largest = max([256 << 20, *(arguments.sizes or [size for name in arguments.collectives for size in SIZES[name]])])
    rank = make_rank(index, world_size, largest)
    rank.early = not arguments.late
    report = (sweep if arguments.sweep else table)(rank, arguments)
    if index == 0:
        write(report, arguments, world_size)
    gc.collect()
    torch.cuda.synchronize()
    meet()
    for action in _at_end:
        action()
    gc.collect()  # NCCL's pools must be gone before NCCL is
    meet()
    dist.destroy_process_group()


def run_local(arguments: argparse.Namespace) -> None:
    """Ranks as streams of this process: an all-reduce on all of them, eager, without a link."""
    from symmcomm.testing.local_world import LocalWorld

    sizes = arguments.sizes or SIZES["all_reduce"][:-2]
    world = LocalWorld(arguments.local, max(sizes))
    heaps = world.memory.split(world.stride)
    places = zip(heaps, world.streams, strict=True)
    ranks = [Rank(i, arguments.local, world.base, world.stride, *place) for i, place in enumerate(places)]
    report: dict[str, Any] = {"local": []}
    for num_bytes in sizes:
        shape = chosen("all_reduce", num_bytes, world.world_size, world.num_sms)
        calls = [ours(rank, "all_reduce", num_bytes, shape).call for rank in ranks]
        times = []
        for _ in range(arguments.rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for rank, call in list(zip(ranks, calls, strict=True)) * 20:
                with torch.cuda.stream(rank.stream):
                    call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6 / 20)
        print(f"{num_bytes:>10} {shape_name(shape):>26} {statistics.median(times):8.2f} us", flush=True)
        report["local"].append({"bytes": num_bytes, "us": statistics.median(times), "shape": shape_name(shape)})
    write(report, arguments, world.world_size)


def write(report: dict[str, Any], arguments: argparse.Namespace, world_size: int) -> None:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
    versions |= {"cute_dsl": version("nvidia-cutlass-dsl"), "tvm_ffi": version("apache-tvm-ffi")}
    report["machine"] = {"gpu": torch.cuda.get_device_name(), "world_size": world_size} | versions
    directory = Path(os.environ.get("OUT", "."))
    (directory / f"gpu_{'sweep' if arguments.sweep else 'bench'}.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], help="in bytes")
    parser.add_argument("--collectives", type=lambda text: text.split(","), default=list(COLLECTIVES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600, help="after which a sweep begins no other size")
    parser.add_argument("--late", action="store_true", help="no kernel starts before the one before has ended")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--local", type=int, default=0, metavar="W")
    arguments = parser.parse_args()
    if arguments.local:
        return run_local(arguments)
    if torch.cuda.device_count() < arguments.world_size:
        raise SystemExit(f"{arguments.world_size} GPUs wanted, {torch.cuda.device_count()} found; --local W needs one")
    os.environ.update(FORBID_MULTICAST)  # before any library of the ranks looks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (arguments.world_size, port, arguments), nprocs=arguments.world_size)


if __name__ == "__main__":
    main()
