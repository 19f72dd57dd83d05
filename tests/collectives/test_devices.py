"""What a communicator says about GPUs where there is none, or where ranks do not agree."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import symmcomm
from symmcomm import ArgumentError, Communicator, DeviceError, MismatchError, Settings
from symmcomm.testing.spawn import run_ranks

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def on_gpu(count: int = 6) -> torch.Tensor:
    """A tensor that says it is on a GPU."""
    with FakeTensorMode():
        return torch.empty(count, device="cuda")


CALLS: dict[str, Callable[[Communicator], object]] = {
    "all_reduce": lambda comm: comm.all_reduce(on_gpu()),
    "reduce": lambda comm: comm.reduce(on_gpu(), 0),
    "reduce_scatter_tensor": lambda comm: comm.reduce_scatter_tensor(on_gpu(3), on_gpu()),
    "all_gather_into_tensor": lambda comm: comm.all_gather_into_tensor(on_gpu(), on_gpu(3)),
    "all_gather": lambda comm: comm.all_gather([on_gpu(), on_gpu()], on_gpu()),
    "broadcast": lambda comm: comm.broadcast(on_gpu(), 0),
    "gather": lambda comm: comm.gather(on_gpu(), None, 1),
    "all_to_all_single": lambda comm: comm.all_to_all_single(on_gpu(), on_gpu()),
    "uneven all_to_all_single": lambda comm: comm.all_to_all_single(on_gpu(), on_gpu(), [2, 4], [2, 4]),
    "all_to_all": lambda comm: comm.all_to_all([on_gpu()], [on_gpu()]),
    "scatter": lambda comm: comm.scatter(on_gpu(), None, 1),
    "send": lambda comm: comm.send(on_gpu(), 1),
    "recv": lambda comm: comm.recv(on_gpu(), 1),
    "free": lambda comm: comm.free(on_gpu()),
    "rendezvous": lambda comm: comm.rendezvous(on_gpu()),
    "register": lambda comm: comm.register(on_gpu()),
    "empty": lambda comm: comm.empty(3, device="cuda"),
    "pool": lambda comm: comm.pool(1 << 20),
}


def tensors_on_a_gpu() -> None:
    comm = symmcomm.init()
    if comm.rank == 0:
        for name, call in CALLS.items():
            with pytest.raises(ArgumentError, match=r'made without a GPU: init\(device="cuda"\)'):
                pytest.fail(f"{name} returned {call(comm)}")
        with pytest.raises(ArgumentError, match=r"gather_list\[1\] must be on device cpu, it is on cuda:0"):
            comm.gather(torch.ones(6), [torch.ones(6), on_gpu()], 0)
        with pytest.raises(ArgumentError, match="must be on a GPU"):
            comm.register(torch.ones(3))
    assert torch.equal(comm.empty(2, device="cpu").fill_(1), torch.ones(2))
    comm.barrier()
    comm.close()


def test_tensors_on_a_gpu_ask_for_a_device() -> None:
    run_ranks(tensors_on_a_gpu, 2)


def ask_for_a_gpu(device: object) -> str:
    with pytest.raises(DeviceError) as error:
        symmcomm.init(device=device, settings=Settings(timeout_s=20))  # type: ignore[arg-type]
    comm = symmcomm.init()
    comm.barrier()
    comm.close()
    return str(error.value)


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_no_gpu_is_an_error_with_a_reason_on_all_ranks(device: object) -> None:
    words = [result.value for result in run_ranks(ask_for_a_gpu, 2, device)]
    assert words[0] == words[1]
    assert words[0].startswith("rank 0 has no usable GPU: ")


def ask_on_one_rank() -> str:
    with pytest.raises(MismatchError) as error:
        symmcomm.init(device="cuda" if os.environ["RANK"] == "0" else "cpu")
    return str(error.value)


def test_a_device_on_one_rank_only() -> None:
    for rank, result in enumerate(run_ranks(ask_on_one_rank, 2)):
        mine, theirs = ("cuda", "cpu") if rank == 0 else ("cpu", "cuda")
        assert result.value == f"device is {mine} on rank {rank}, {theirs} on rank {1 - rank}"


def test_a_device_of_another_kind() -> None:
    with pytest.raises(ArgumentError, match="device='mps' is neither a CUDA device nor the host"):
        symmcomm.init(device="mps")
