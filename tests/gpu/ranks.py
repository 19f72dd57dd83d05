"""What the tests of communicators on GPUs share: how their ranks start, and what they put in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from local_cases import repeated

import symmcomm
from symmcomm import Communicator, Settings
from symmcomm.memory.cuda_driver import CudaError, call, load_driver
from symmcomm.testing.oracle import check_bits
from symmcomm.testing.spawn import RankPool, RankResult, run_ranks

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
LIMIT_S = 100.0
"""For all ranks of a test to end; they are killed then, and their stacks shown. No statement about speed: other tests
run beside."""
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU")]
PAIR = 2 if NUM_GPUS > 1 else 1  # GPUs of two ranks
WORLDS = [
    pytest.param(1, 1, id="1-rank"),
    pytest.param(2, 1, id="2-ranks-on-1-GPU"),
    pytest.param(
        4, 1, id="4-ranks-on-1-GPU", marks=pytest.mark.skipif(NUM_GPUS > 1, reason="8 ranks on 2 GPUs share as much")
    ),
    *(
        pytest.param(world, 2, id=f"{world}-ranks-on-2-GPUs", marks=pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU"))
        for world in (2, 4, 8)
    ),
]
POOL = RankPool()
"""Serves the tests of a process one after the other: to start a rank and to make its contexts takes seconds."""


def take_gpu(ordinal: int) -> None:
    """Makes it the current one, before its context is there: the host then sleeps while it waits for the GPU, as tests
    that run beside need the cores."""
    driver = load_driver()
    flags = int(driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC)
    with contextlib.suppress(CudaError):
        call(driver, "cuDevicePrimaryCtxSetFlags", call(driver, "cuDeviceGet", ordinal), flags)
    torch.cuda.set_device(ordinal)


@contextlib.contextmanager
def communicator(num_gpus: int, timeout_s: float = 80.0, **settings: Any) -> Iterator[Communicator]:
    """A rank's communicator; at its end a plain operation of torch shows that the context is alive."""
    take_gpu(int(os.environ["LOCAL_RANK"]) % num_gpus)
    options = {"share_gpu": True, "disable_multicast": True, **settings}
    comm = symmcomm.init(device="cuda", settings=Settings(timeout_s=timeout_s, **options))
    yield comm
    comm.close()
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def start(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Runs the body on all ranks and returns their results. ``fresh``: on processes of its own, for what loads a kernel
    for the first time, or leaves something behind."""
    pool = None if fresh or not check else POOL
    env = {"SYMMCOMM_DISABLE_MULTICAST": "1", **(env or {})}
    return run_ranks(body, world_size, *args, timeout_s=limit_s, env=env, check=check, pool=pool)


def pattern(rank: int, num_bytes: int) -> torch.Tensor:
    """Bytes that tell rank and place, on the host."""
    return repeated(((torch.arange(251) * 7 + 31 * rank + 1) % 251).to(torch.uint8), num_bytes)


def filled(rank: int, count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Such data on the GPU, of any dtype, ``shift`` elements into an allocation."""
    raw = torch.zeros((count + shift) * dtype.itemsize, dtype=torch.uint8, device="cuda").view(dtype)[shift:]
    return put(raw, rank)


def put(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Fills a tensor with the rank's pattern (bool: with what is true of it)."""
    values = pattern(rank, tensor.nbytes)
    if tensor.dtype is torch.bool:
        tensor.copy_((values % 2).bool().view(tensor.shape))
    else:
        tensor.view(-1).view(torch.uint8).copy_(values)
    return tensor


def host(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``filled`` gives that rank, on the host."""
    values = pattern(rank, count * dtype.itemsize)
    return (values % 2).bool() if dtype is torch.bool else values.view(dtype)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit by bit."""
    check_bits(got.detach().cpu().view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8), what)
