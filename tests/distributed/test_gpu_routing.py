"""Where calls on GPU tensors go, and how streams are ordered, on stand-ins: neither a GPU nor its values are needed."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from symmcomm import ArgumentError, DeviceError
from symmcomm.collectives.gpu_streams import GpuStreams
from symmcomm.distributed import process_group
from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.testing.spawn import run_ranks

DEVICE = torch.device("cuda", 0)


class Stream:
    """Notes what it is told. torch makes the current one by its number, the other one by its priority."""

    log: ClassVar[list[str]]
    names = ("current", "side")
    in_use = 0

    def __init__(self, *_: object, stream_id: int = 1, **__: object) -> None:
        self.number, self.name = stream_id, self.names[stream_id]

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")

    @staticmethod
    def use(number: int, *_: object) -> None:
        Stream.in_use = number


class Event:
    """Notes who waits for it."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name

    def wait(self, stream: Stream) -> None:
        Stream.log.append(f"{stream.name} waits for {self.recorded}")

    def query(self) -> bool:
        return True


class Gpu:
    """Stands in for a communicator's GPU side."""

    device = DEVICE

    def __init__(self, log: list[str]) -> None:
        self._log, self.streams = log, GpuStreams(0)

    def check(self) -> None:
        """All is well."""

    def close(self, agree: bool) -> None:
        """There is nothing to close."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self._log.append(f"{name} on {Stream.names[Stream.in_use]}")


class Nccl:
    """Stands in for the group's NCCL."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._log.append(f"nccl {name}")


@contextlib.contextmanager
def stand_ins(log: list[str], refused: bool = False, capturing: bool = False) -> Any:
    """A group of one rank with stand-ins for CUDA around it, and tensors that claim to be on a GPU."""
    Stream.log = log

    def open_gpu(*_: object) -> Gpu:
        log.append("opened")
        if refused:
            raise DeviceError("no GPU here knows another")
        return Gpu(log)

    patches = {
        "torch.cuda.Stream": Stream,
        "torch.cuda.Event": Event,
        "torch.cuda.current_stream": lambda *_: Stream(stream_id=Stream.in_use),
        "torch.cuda.set_stream": lambda stream: Stream.use(stream.number),
        "torch.cuda.device": contextlib.nullcontext,
        "torch._C._cuda_getDevice": lambda: 0,
        "torch._C._cuda_getCurrentStream": lambda _: (Stream.in_use, 0, 1),
        "torch._C._cuda_setStream": Stream.use,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_current_stream_capturing": lambda: capturing,
        "torch.Tensor.record_stream": lambda *_: log.append("recorded"),
        "symmcomm.collectives.gpu_open.find_facts": lambda *_: [],
        "symmcomm.collectives.gpu_open.open_gpu": open_gpu,
        "symmcomm.distributed.process_group.open_nccl": lambda *_: Nccl(log),
        # The base class knows no stand-in.
        "symmcomm.distributed.process_group.SymmProcessGroup._get_backend": lambda *_: Nccl(log),
    }
    with contextlib.ExitStack() as stack:
        dist.init_process_group("symm")
        group = dist.group.WORLD
        assert isinstance(group, SymmProcessGroup)
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in, create=True))
        stack.enter_context(FakeTensorMode())
        yield group
        group.comm.gpu = None
    dist.destroy_process_group()


def tensor() -> torch.Tensor:
    return torch.empty(4, device=DEVICE)


COLLECTIVES = {
    "all_reduce": lambda later: dist.all_reduce(tensor(), async_op=later),
    "reduce": lambda later: dist.reduce(tensor(), 0, async_op=later),
    "broadcast": lambda later: dist.broadcast(tensor(), 0, async_op=later),
    "all_gather": lambda later: dist.all_gather([tensor()], tensor(), async_op=later),
    "all_gather_into_tensor": lambda later: dist.all_gather_into_tensor(tensor(), tensor(), async_op=later),
    "gather": lambda later: dist.gather(tensor(), [tensor()], async_op=later),
    "scatter": lambda later: dist.scatter(tensor(), [tensor()], async_op=later),
    "reduce_scatter_tensor": lambda later: dist.reduce_scatter_tensor(tensor(), tensor(), async_op=later),
    "all_to_all_single": lambda later: dist.all_to_all_single(tensor(), tensor(), async_op=later),
    "all_to_all": lambda later: dist.all_to_all([tensor()], [tensor()], async_op=later),
}


def collectives() -> None:
    log: list[str] = []
    with stand_ins(log):
        for number, (name, call) in enumerate(COLLECTIVES.items()):
            call(False)
            assert log == ["opened"] * (number == 0) + [f"{name} on current"]
            log.clear()
            work = call(True)
            assert log[:2] == ["side waits for current", f"{name} on side"]
            assert set(log[2:]) == {"recorded"}
            log.clear()
            work.wait()
            assert log == ["current waits for side"]
            assert work.is_completed()
            assert work.is_success()
            log.clear()
        dist.barrier()
        assert log == ["the host waits for current"]
        assert Event.made == 2  # one to order streams by, one of a work: used again and again


def test_collectives() -> None:
    run_ranks(collectives, 1)


def messages() -> None:
    log: list[str] = []
    with stand_ins(log) as group:
        group.send([tensor()], 0, 3)
        group.recv([tensor()], 0, 3)
        assert log == ["nccl send", "nccl recv"]
        log.clear()
        group._start_coalescing(DEVICE)
        group.send([tensor()], 0, 3)
        group._allgather_base(tensor(), tensor())
        group._end_coalescing(DEVICE).wait()
        assert [entry for entry in log if "nccl" in entry] == [
            "nccl _start_coalescing", "nccl send", "nccl _end_coalescing"
        ]  # fmt: skip
        assert "all_gather_into_tensor on side" in log
        assert log[-1] == "current waits for side"


def test_messages() -> None:
    run_ranks(messages, 1)


def without_shared_memory() -> None:
    log: list[str] = []
    with stand_ins(log, refused=True):
        with pytest.warns(UserWarning, match="to NCCL: no GPU here knows another"):
            dist.group.WORLD.allreduce([tensor()])
        dist.all_gather_into_tensor(tensor(), tensor())
        dist.barrier()
        assert log == ["opened", "nccl allreduce", "nccl _allgather_base"]


def test_without_shared_memory() -> None:
    run_ranks(without_shared_memory, 1)


def open_late(group: SymmProcessGroup) -> Any:
    """The group's NCCL, for which a gloo passes: registered as late as NCCL is."""
    late = mock.Mock(side_effect=lambda store, rank, size, _: dist.ProcessGroupGloo(store, rank, size))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.ProcessGroupNCCL", late, create=True))
        for name in ("torch.distributed.is_nccl_available", "torch.cuda.is_available"):
            stack.enter_context(mock.patch(name, return_value=True))
        return group._get_backend(DEVICE)


def named() -> None:
    dist.init_process_group("symm")
    rank, everybody = dist.get_rank(), dist.group.WORLD
    for group in (everybody, dist.new_group([0, 1], group_desc="a pair")):
        name, description = group.group_name, group.group_desc
        nccl = open_late(group)
        assert group._get_backend(DEVICE) is nccl
        assert (group.group_name, group.group_desc) == (name, description) != ("", "")
        assert _resolve_process_group(name) is group
        mesh = DeviceMesh.from_group(group, "cpu") if group is not everybody else init_device_mesh("cpu", (2,))
        assert mesh.get_group() is group
        gathered = all_gather_tensor(torch.full((1,), float(rank)), 0, group)
        assert gathered.tolist() == [0, 1]
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_keeps_its_name_when_nccl_comes() -> None:
    run_ranks(named, 2)


def in_a_capture() -> None:
    log: list[str] = []
    with stand_ins(log, capturing=True) as group:
        with pytest.raises(ArgumentError, match="before the capture"):
            dist.all_reduce(tensor())
        group.comm.gpu = Gpu(log)
        dist.all_reduce(tensor())
        dist.barrier()  # one of the GPUs: the host cannot wait
        assert log == ["all_reduce on current", "barrier on current"]


def test_in_a_capture() -> None:
    run_ranks(in_a_capture, 1)


def test_sparse_and_other_devices_are_foreign() -> None:
    assert not process_group._goes_by_mail(torch.empty(3, device="meta"))
    assert not process_group._goes_by_mail(torch.eye(3).to_sparse())
    assert process_group._goes_by_mail(torch.empty(3))
