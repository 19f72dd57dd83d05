"""Communicators on GPUs: memory, handles, streams, graphs, groups, bad input; ranks that are late, wrong or dead."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ranks import LIMIT_S, NEEDS_GPU, NUM_GPUS, PAIR, communicator, filled, host, put, same, start, take_gpu

import symmcomm
from symmcomm import (
    ArgumentError,
    ClosedError,
    Communicator,
    DeviceError,
    MismatchError,
    OutOfSymmetricMemoryError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    Settings,
)
from symmcomm.schedule import layout_gpu as at
from symmcomm.testing.launch import launch_command

pytest.importorskip("cutlass")
pytestmark = NEEDS_GPU
MI = 1 << 20


def total(comm: Communicator, count: int = 100) -> torch.Tensor:
    """An all-reduce of the ranks' numbers."""
    tensor = torch.full((count,), comm.rank + 1.0, device="cuda")
    comm.all_reduce(tensor)
    return tensor


def works(comm: Communicator) -> None:
    size = comm.world_size
    assert (total(comm) == size * (size + 1) / 2).all()


# Memory and handles.


def memory(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        assert comm.gpu is not None
        rank, size, peer = comm.rank, comm.world_size, (comm.rank + 1) % comm.world_size
        first = comm.empty(3, 1000, dtype=torch.bfloat16, device="cuda")
        assert first.device == comm.gpu.device
        assert first.shape == (3, 1000)
        handle = comm.rendezvous(first)
        assert handle.buffer_ptrs[rank] == first.data_ptr()
        first.fill_(rank + 1)
        comm.gpu.barrier()
        assert (handle.get_buffer(peer, (3, 1000), torch.bfloat16) == peer + 1).all()
        assert handle.get_buffer(peer, (0,), torch.float32).numel() == 0
        comm.gpu.barrier(algorithm="ring", protocol="cas")
        pointers = handle._pointers[0].tolist()
        assert pointers == handle.buffer_ptrs
        assert handle.buffer_ptrs_dev != 0
        for channel in (0, 5):
            handle.barrier(channel)
            handle.put_signal(peer, channel)
            handle.wait_signal((rank - 1) % size, channel)
        comm.gpu.synchronize()
        assert not handle.get_signal_pad(rank).cpu().any()  # torch has no any() of uint32 on GPUs
        second = comm.empty(60 * MI, dtype=torch.uint8, device="cuda")  # the heap grows
        second.fill_(rank)
        comm.broadcast(second, 1 % size)
        assert (second == 1 % size).all()
        offset = comm.gpu.offset_of(second)
        comm.free(second)
        again = comm.empty(60 * MI, dtype=torch.uint8, device="cuda")
        assert comm.gpu.offset_of(again) == offset
        assert not comm.is_symmetric(torch.ones(3, device="cuda"))
        with pytest.raises(ArgumentError, match="not symmetric"):
            comm.rendezvous(torch.ones(3, device="cuda"))
        with pytest.raises(ArgumentError, match="not symmetric"):
            comm.free(torch.ones(3, device="cuda"))
        if size > 1:
            with pytest.raises(MismatchError, match="empty"):
                comm.empty(3 + rank, device="cuda")
            with pytest.raises(MismatchError, match="heap offset"):
                comm.rendezvous(again[rank:])
        with pytest.raises(OutOfSymmetricMemoryError, match="SYMMCOMM_HEAP_MAX_BYTES"):
            comm.empty(1 << 40, device="cuda")
        part = first[1]
        assert comm.gpu.symmetric_offset(part) == -1
        comm.rendezvous(part)
        assert comm.gpu.symmetric_offset(part) >= 0
        works(comm)


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_and_handles(world_size: int) -> None:
    start(memory, world_size, PAIR)


def through_legacy_handles(num_gpus: int) -> None:
    with communicator(num_gpus, gpu_memory="cuda_ipc", heap_max_bytes=256 * MI) as comm:
        assert comm.gpu is not None
        assert comm.gpu.choice.provider == "cuda_ipc"
        works(comm)
        tensor = comm.empty(16 * MI, dtype=torch.uint8, device="cuda")
        put(tensor, comm.rank)
        comm.broadcast(tensor, 1)
        same(tensor, host(1, 16 * MI, torch.uint8), "broadcast")
        del tensor


def test_legacy_handles_are_a_way_too() -> None:
    start(through_legacy_handles, 2, PAIR)


def memory_of_others(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        tensor = filled(comm.rank, 1000, torch.float32)
        torch.cuda.synchronize()
        registered = comm.register(tensor)
        comm.barrier()
        for peer in range(comm.world_size):
            same(registered.get_buffer(peer), host(peer, 1000, torch.float32), f"what rank {peer} registered")
        comm.barrier()
        registered.close()
        with pytest.raises(ArgumentError, match="must be on a GPU"):
            comm.register(torch.ones(3))
        pool = comm.pool(64 * MI)
        assert pool.mempool is not None
        with torch.cuda.use_mem_pool(pool.mempool):
            born = torch.empty(20 * MI, dtype=torch.uint8, device="cuda")
        assert comm.is_symmetric(born)
        comm.rendezvous(born)
        put(born, comm.rank)
        comm.broadcast(born, 1)
        same(born, host(1, 20 * MI, torch.uint8), "broadcast in a pool")
        del born
        pool.close()
        comm.free(pool.memory)
        works(comm)


def test_registered_memory_and_pools() -> None:
    start(memory_of_others, 2, PAIR)


# Streams, graphs and groups.


def streams(num_gpus: int) -> None:
    """Each call on another stream; without order between them channels would be used twice at once."""
    with communicator(num_gpus) as comm:
        side = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for number in range(30):
            with torch.cuda.stream(side[number % 3]):
                tensor = torch.full((5000,), comm.rank + number, dtype=torch.float64, device="cuda")
                comm.all_reduce(tensor)
                results.append(tensor)
        torch.cuda.synchronize()
        size = comm.world_size
        for number, tensor in enumerate(results):
            assert (tensor == size * number + size * (size - 1) // 2).all(), number


def test_calls_on_several_streams_follow_each_other() -> None:
    start(streams, 2, PAIR)


def graphs(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        size, rank, peer = comm.world_size, comm.rank, 1 - comm.rank
        number = torch.zeros(1, device="cuda")
        small, large = torch.zeros(1000, device="cuda"), torch.zeros(2 * MI, device="cuda")
        symmetric = comm.empty(2 * MI, device="cuda")
        gathered, message = torch.zeros(2000, device="cuda"), torch.zeros(1000, device="cuda")
        moved, splits = torch.zeros(1000, device="cuda"), [600, 400] if rank else [400, 600]

        def work() -> None:
            number.add_(1)
            for tensor in (small, large, symmetric):
                tensor.copy_((number * (rank + 1)).expand_as(tensor))
                comm.all_reduce(tensor)
            comm.all_gather_into_tensor(gathered, number.mul(rank + 1).repeat(1000))
            comm.send(small, peer)
            comm.recv(message, peer)
            comm.all_to_all_single(moved, gathered[:1000], splits, splits)
            comm.gpu_side.barrier()

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for replay in range(2, 5):
            graph.replay()
            torch.cuda.synchronize()
            for tensor in (small, large, symmetric, message):
                assert (tensor == 3 * replay).all(), replay
            for part in range(size):
                assert (gathered[1000 * part : 1000 * (part + 1)] == replay * (part + 1)).all(), replay
        work()  # eager calls go on where the graph ended
        assert (symmetric == 15).all()
        assert (moved == 5).all()
        comm.gpu_side.synchronize()


def test_graphs() -> None:
    start(graphs, 2, PAIR)


def new_kernel_in_a_capture(num_gpus: int) -> None:
    """Nothing of it was compiled or loaded before."""
    with communicator(num_gpus) as comm:
        tensor = torch.full((77,), comm.rank + 2, dtype=torch.int16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(tensor, "prod")
        graph.replay()
        assert (tensor == 6).all()
        more = torch.ones(3, dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(ArgumentError, match="cannot be captured"):
                comm.empty(60 * MI, dtype=torch.uint8, device="cuda")
            comm.all_reduce(more)
        graph.replay()
        assert (more == 2).all()


def test_first_use_and_growth_in_a_capture() -> None:
    start(new_kernel_in_a_capture, 2, PAIR, fresh=True)


def groups(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        child = comm.split(comm.rank % 2)
        assert child is not None
        works(child)
        works(comm)
        same_ranks = comm.split(0, -comm.rank)
        assert same_ranks is not None
        assert same_ranks.rank == comm.world_size - 1 - comm.rank
        works(same_ranks)
        same_ranks.close()
        child.close()
        works(comm)
        with pytest.raises(ClosedError):
            child.all_reduce(torch.ones(3, device="cuda"))


def test_groups() -> None:
    start(groups, 4, PAIR)


def open_and_close() -> tuple[int, int]:
    take_gpu(0)
    free, outer = [], symmcomm.init()
    for _ in range(6):
        comm = symmcomm.init(device="cuda", settings=Settings(share_gpu=True, disable_multicast=True))
        comm.empty(64 * MI, dtype=torch.uint8, device="cuda").fill_(1)
        works(comm)
        comm.barrier()
        comm.close()
        comm.close()
        outer.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        outer.barrier()
    outer.close()
    return free[1], free[-1]


@pytest.mark.alone
def test_communicators_leave_no_memory_behind() -> None:
    for result in start(open_and_close, 2):
        early, late = result.value
        assert late >= early - (32 << 20)


# Bad input.


def bad_arguments(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        here = comm.gpu_side.device
        bad: list[tuple[Callable[[], object], str]] = [
            (lambda: comm.all_gather_into_tensor(torch.ones(2, device=here), torch.ones(1)), "must be on device cuda"),
            (lambda: comm.all_gather_into_tensor(torch.ones(2), torch.ones(1, device=here)), "must be on device cpu"),
            (lambda: comm.all_reduce(torch.ones(4, 4, device=here).t()), "must be contiguous"),
            (lambda: comm.empty(3, device="cuda:7"), f"this communicator's GPU is {here}"),
        ]
        if NUM_GPUS > 1:
            there = torch.ones(3, device=f"cuda:{1 - here.index}")
            words = f"tensor must be on device {here}, it is on {there.device}"
            bad.append((lambda: comm.all_reduce(there), words))
        for call, words in bad:
            with pytest.raises(ArgumentError, match=words):
                call()
        with torch.cuda.device((here.index + 1) % NUM_GPUS):  # another device than the communicator's is current
            tensor = torch.full((100,), comm.rank + 1.0, device=here)
            comm.all_reduce(tensor)
            assert (tensor == 3).all()
        host_comm = symmcomm.init(settings=Settings())
        with pytest.raises(ArgumentError, match=r'init\(device="cuda"\)'):
            host_comm.all_reduce(torch.ones(3, device="cuda"))
        host_comm.close()


def test_bad_arguments() -> None:
    start(bad_arguments, 2, PAIR)


def share_unasked() -> str:
    take_gpu(0)
    with pytest.raises(DeviceError) as error:
        symmcomm.init(device="cuda", settings=Settings(timeout_s=20, disable_multicast=True))
    return str(error.value)


def test_ranks_on_one_gpu_must_say_so() -> None:
    for result in start(share_unasked, 2):
        assert "ranks 0 and 1 use the same GPU" in result.value
        assert "SYMMCOMM_SHARE_GPU=1" in result.value


def only_one_has_a_device() -> str:
    with pytest.raises(MismatchError) as error:
        symmcomm.init(
            device="cuda" if os.environ["RANK"] == "0" else None,
            settings=Settings(timeout_s=20, disable_multicast=True),
        )
    return str(error.value)


def test_a_device_on_one_rank_only() -> None:
    assert "device is cuda on rank 0, cpu on rank 1" in start(only_one_has_a_device, 2)[0].value


def disagree(num_gpus: int) -> None:
    """Split sizes are compared on the GPU; messages of another size end the communicator."""
    with communicator(num_gpus) as comm:
        for _ in range(2):
            comm.all_to_all_single(
                torch.empty(3, device="cuda"), torch.ones(3, device="cuda"), [1 + comm.rank, 2 - comm.rank], [1, 2]
            )
            with pytest.raises(MismatchError, match="split sizes"):
                comm.gpu_side.synchronize()
            works(comm)
            comm.barrier()
    comm = symmcomm.init(device="cuda", settings=Settings(share_gpu=True, timeout_s=20, disable_multicast=True))
    if comm.rank == 0:
        comm.send(torch.ones(1000, device="cuda"), 1)
        with pytest.raises(PeerError):
            comm.barrier()
    else:
        comm.recv(torch.ones(999, device="cuda"), 0)
        with pytest.raises(MismatchError, match="3996 bytes on rank 1, 4000 on rank 0"):
            comm.gpu_side.synchronize()
    comm.close()


def test_ranks_that_disagree() -> None:
    start(disagree, 2, PAIR, fresh=True)


# Ranks that are late or dead.


def late(num_gpus: int) -> float:
    with communicator(num_gpus) as comm:
        works(comm)
        with comm.gpu_side.deadline(5.0):
            works(comm)
        comm.barrier()
        began = time.monotonic()
        if comm.rank == 1:
            with comm.gpu_side.deadline(1.5):
                comm.all_reduce(torch.ones(100, device="cuda"))
                with pytest.raises(PeerTimeoutError, match="expected signal") as error:
                    comm.gpu_side.synchronize()
            assert error.value.rank == 0
        waited = time.monotonic() - began
        if comm.rank == 0:
            time.sleep(4)
        with pytest.raises(PeerError):
            comm.barrier()
        with pytest.raises(PeerError):
            comm.all_reduce(torch.ones(3, device="cuda"))
        return waited


def test_a_late_rank() -> None:
    results = start(late, 2, PAIR, fresh=True)
    assert results[1].value < 4


def wait_for(comm: Communicator) -> None:
    total(comm, 4 * MI)
    comm.gpu_side.synchronize()


def killed(num_gpus: int, provider: str) -> float:
    with communicator(num_gpus, timeout_s=60.0, gpu_memory=provider, heap_max_bytes=256 * MI) as comm:
        works(comm)
        comm.barrier()
        if comm.rank == 1:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerDiedError) as error:
            wait_for(comm)
        assert error.value.rank == 1
        return time.monotonic() - began


@pytest.mark.parametrize(
    ("world_size", "provider", "env"),
    [
        pytest.param(2, "auto", {}, id="2"),
        pytest.param(3, "auto", {}, id="3"),
        pytest.param(2, "cuda_ipc", {}, id="2-by-legacy-handles"),
        pytest.param(2, "auto", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="2-with-one-hardware-queue"),
    ],
)
def test_a_killed_rank_is_noticed_at_once(world_size: int, provider: str, env: dict[str, str]) -> None:
    """Also where all streams share one hardware queue, as Megatron-LM has it."""
    results = start(killed, world_size, PAIR, provider, check=False, env=env)
    for result in results[:1] + results[2:]:
        assert result.ok, result.report()
        assert result.value < 10  # the deadline is a minute
    assert results[1].exitcode == -signal.SIGKILL


def delayed(num_gpus: int) -> None:
    with communicator(num_gpus) as comm:
        gpu = comm.gpu_side
        for victim in range(comm.world_size):
            state = gpu.heap.tensor(comm.rank, 0, at.EPOCHS).view(torch.int64)
            state[at.DELAY_NS // 8] = 3_000_000 if comm.rank == victim else 0
            torch.cuda.synchronize()
            works(comm)
            tensor = filled(comm.rank, 5 * MI, torch.uint8)
            comm.broadcast(tensor, victim)
            same(tensor, host(victim, 5 * MI, torch.uint8), "broadcast")
            peer = 1 - comm.rank
            comm.send(filled(comm.rank, 1000, torch.uint8), peer)
            comm.recv(got := torch.zeros(1000, dtype=torch.uint8, device="cuda"), peer)
            same(got, host(peer, 1000, torch.uint8), "message")


def test_delays_on_one_rank() -> None:
    start(delayed, 2, PAIR)


def forgotten(num_gpus: int) -> None:
    take_gpu(int(os.environ["LOCAL_RANK"]) % num_gpus)
    comm = symmcomm.init(device="cuda", settings=Settings(share_gpu=True, disable_multicast=True))
    works(comm)
    comm.barrier()


def test_a_communicator_that_nobody_closes() -> None:
    start(forgotten, 2, PAIR, fresh=True)


# Launchers.

EXAMPLES = Path(__file__).parents[2] / "examples"
ENV = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "SYMMCOMM_DISABLE_MULTICAST": "1",
    "SYMMCOMM_SHARE_GPU": str(int(NUM_GPUS < 2)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "example", "words"),
    [
        ("torchrun", ["07_gpu_all_reduce.py"], "rank {} of 2"),
        ("mpirun", ["07_gpu_all_reduce.py"], "rank {} of 2"),
        ("torchrun", ["08_fused_norm.py", "cuda"], "rank {} of 2: [4] of 4 norms fused, on cuda"),
    ],
    ids=["torchrun", "mpirun", "torchrun-fused_norm"],
)
def test_launchers(launcher: str, example: list[str], words: str) -> None:
    start_two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if launcher == "mpirun":
        pytest.importorskip("mpi4py", exc_type=ImportError)
        beside = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
        start_two = [shutil.which("mpirun", path=beside) or pytest.skip("no mpirun"), "-n", "2", sys.executable]
    done = launch_command([*start_two, str(EXAMPLES / example[0]), *example[1:]], LIMIT_S, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert words.format(rank) in done.stdout


def thresholds_of(path: str) -> object:
    with communicator(PAIR, tuning=path) as comm:
        works(comm)
        return comm.gpu_side.thresholds


@pytest.mark.slow
def test_tuning_writes_the_table_that_communicators_read(tmp_path: Path) -> None:
    table = tmp_path / "tuning.json"
    command = [sys.executable, "-m", "symmcomm", "tune", "--nproc", "2", "--rounds", "1", "--output", str(table)]
    done = launch_command(command, 100.0, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(table.read_text())
    for result in start(thresholds_of, 2, str(table)):
        assert asdict(result.value) == row["thresholds"]
    table.write_text("no table")
    for result in start(thresholds_of, 2, str(table), check=False):
        assert isinstance(result.error, ArgumentError)
        assert "SYMMCOMM_TUNING" in str(result.error)
