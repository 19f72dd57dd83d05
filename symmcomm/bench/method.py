"""How a run measures: on which device, with which clock. Pure Python."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from symmcomm.errors import ArgumentError

FEWEST = 3
"""Calls of a round."""


class Device(StrEnum):
    """Where the tensors are."""

    cpu = "cpu"
    cuda = "cuda"


class Timing(StrEnum):
    """What is timed: calls that the host makes one after the other, or a CUDA graph of them."""

    eager = "eager"
    graph = "graph"


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run measures; all its ranks are given the same.

    Attributes:
        cold_l2: before every call the GPU's L2 cache is flushed. Needs graphs.
        virtual_ranks: ranks that one process holds, as streams of one GPU; 0: a process is a rank.
        share_gpu: several ranks (processes) may use one GPU.
    """

    device: Device = Device.cpu
    timing: Timing = Timing.eager
    cold_l2: bool = False
    virtual_ranks: int = 0
    share_gpu: bool = False

    @property
    def round_s(self) -> float:
        """What a round should take, in seconds."""
        if self.device is Device.cpu:
            return 0.02
        return 0.001 if self.timing is Timing.graph else 0.005

    def calls(self, seconds: float) -> int:
        """Calls of that length which fill a round, FEWEST at least. Graphs come in few sizes, as each is captured anew;
        of eager calls a GPU's queue must hold them all, or the host would wait."""
        wanted = int(self.round_s / max(seconds, 1e-9))
        if self.device is Device.cpu:
            return min(max(wanted, FEWEST), 50_000)
        if self.timing is Timing.eager:
            return min(max(wanted, FEWEST), 300)
        return next((calls for calls in (50, 10) if calls <= wanted), FEWEST)

    @property
    def rounds(self) -> int:
        """Rounds unless the user says otherwise."""
        return 5 if self.device is Device.cpu else 20

    def to_json(self) -> str:
        """One line; ``from_json`` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Method:
        """See ``to_json``."""
        fields = json.loads(text)
        return cls(**fields | {"device": Device(fields["device"]), "timing": Timing(fields["timing"])})

    def __str__(self) -> str:
        """For the heading of a table."""
        if self.device is Device.cpu:
            return "CPU"
        text = "CUDA graphs" if self.timing is Timing.graph else "eager calls"
        if self.cold_l2:
            text += ", cold L2"
        if self.virtual_ranks:
            text += f", {self.virtual_ranks} VIRTUAL ranks on one GPU (no link in between)"
        elif self.share_gpu:
            text += ", ranks share GPUs"
        return text


ON_CPUS = Method()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a choice depends on. ``obstacle``: why GPUs cannot be used; empty if they can."""

    num_gpus: int
    obstacle: str = ""


def choose(
    machine: Machine, device: Device | None, timing: Timing | None, cold_l2: bool, share_gpu: bool, virtual_ranks: int
) -> Method:
    """The method that the options ask for. Without a device: the GPUs if there are two or more, or if an option is for
    GPUs only; else the CPU.

    Raises ArgumentError where options exclude each other or the machine.
    """
    options = {
        "--timing": timing is not None, "--cold-l2": cold_l2, "--share-gpu": share_gpu,
        "--virtual-ranks": virtual_ranks > 0,
    }
    for_gpus = [name for name, given in options.items() if given]
    if device is None:
        device = Device.cuda if for_gpus or (machine.num_gpus > 1 and not machine.obstacle) else Device.cpu
    if device is Device.cpu:
        if for_gpus:
            raise ArgumentError(f"{for_gpus[0]} is for GPUs, and --device is cpu")
        return ON_CPUS
    if machine.obstacle:
        raise ArgumentError(f"{for_gpus[0] if for_gpus else '--device cuda'}: {machine.obstacle}")
    timing = timing or Timing.graph
    if cold_l2 and timing is Timing.eager:
        raise ArgumentError("--cold-l2 needs --timing graph: between eager calls the host's time would hide it")
    if virtual_ranks and share_gpu:
        raise ArgumentError("--virtual-ranks and --share-gpu exclude each other: streams of one process, or processes")
    return Method(
        device=device, timing=timing, cold_l2=cold_l2, virtual_ranks=virtual_ranks, share_gpu=share_gpu
    )


def num_ranks(method: Method, machine: Machine, nproc: int | None, joined: int | None) -> int:
    """The ranks of a run on GPUs: as many as asked for or started (``joined``), else one a GPU, and two at least where
    GPUs are shared.

    Raises ArgumentError where that cannot be.
    """
    if method.virtual_ranks:
        if joined is not None:
            raise ArgumentError(f"--virtual-ranks is for one process, and a launcher started {joined}")
        if nproc is not None and nproc != method.virtual_ranks:
            raise ArgumentError(f"--nproc {nproc} and --virtual-ranks {method.virtual_ranks} differ; leave one out")
        return method.virtual_ranks
    ranks = joined or nproc or max(machine.num_gpus, 2 if method.share_gpu else 1)
    if ranks > machine.num_gpus and not method.share_gpu:
        raise ArgumentError(f"{ranks} ranks on {machine.num_gpus} GPUs: --share-gpu lets ranks share one")
    return ranks
