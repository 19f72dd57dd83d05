"""What is known about the ranks' GPUs, and what follows from it: pure functions of facts that all ranks hold alike.

``probe_gpu`` gathers the facts by real attempts. All ranks exchange them once and decide by the same functions, so no
rank can take another path than its peers; each decision carries the reason for what was turned down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

MIN_COMPUTE_CAPABILITY = (8, 0)
PROVIDERS = ("cuda_vmm", "fabric", "cuda_ipc")
"""In the order in which they are preferred."""


class Attempt(NamedTuple):
    """Whether something was seen to work, and what was seen."""

    works: bool
    reason: str


UNKNOWN = Attempt(False, "not tried")


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What one rank knows about its GPU.

    Attributes:
        device: the GPU can be used at all; the reason says why not, and then nothing below holds.
        host: identity of the running kernel. network_namespace, pid_namespace: of the process.
        ordinal: as this process counts. uuid: the same for every process; MIG instances have their own.
        compute_capability: (major, minor). numa_node: -1 where unknown. total_bytes: the device's memory.
        mig: the GPU is a slice of a larger one.
        fabric_domain: cluster and clique of an NVLink fabric beyond one host; "" if there is none.
        granularity_bytes: of shareable memory.
        cuda_vmm, fabric, cuda_ipc: sharing memory in that way, tried within this process.
        multicast: the word of the one gate, ``memory.multicast.multicast_allowed``.
        peers: by UUID, whether this GPU can reach that one. A UUID that is not there was not visible.
        links: by UUID, the number of NVLinks straight to that GPU, or to a switch that leads there.
    """

    device: Attempt
    host: str = ""
    network_namespace: int = 0
    pid_namespace: int = 0
    ordinal: int = -1
    uuid: str = ""
    name: str = ""
    compute_capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    total_bytes: int = 0
    numa_node: int = -1
    mig: bool = False
    fabric_domain: str = ""
    granularity_bytes: int = 0
    cuda_vmm: Attempt = UNKNOWN
    fabric: Attempt = UNKNOWN
    cuda_ipc: Attempt = UNKNOWN
    multicast: Attempt = UNKNOWN
    peers: dict[str, Attempt] = field(default_factory=dict)
    links: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """For the exchange between ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> GpuFacts:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        for name in ("device", "cuda_vmm", "fabric", "cuda_ipc", "multicast"):
            values[name] = Attempt(*values[name])
        values["compute_capability"] = tuple(values["compute_capability"])
        values["peers"] = {uuid: Attempt(*attempt) for uuid, attempt in values["peers"].items()}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the ranks' GPUs share memory.

    Attributes:
        provider: "cuda_vmm", "fabric" or "cuda_ipc"; None if they cannot.
        reason: why this one, or why none.
        refused: (provider, why not) of those that were turned down.
        granularity_bytes: what segments must be multiples of on every rank.
    """

    provider: str | None
    reason: str
    refused: tuple[tuple[str, str], ...] = ()
    granularity_bytes: int = 0


def decide_devices(facts: Sequence[GpuFacts], share_gpu: bool) -> Attempt:
    """Whether each rank has a GPU that the kernels run on, and, unless ``share_gpu``, one of its own."""
    owner: dict[tuple[str, str], int] = {}
    for rank, fact in enumerate(facts):
        if not fact.device.works:
            return Attempt(False, f"rank {rank} has no usable GPU: {fact.device.reason}")
        if fact.compute_capability < MIN_COMPUTE_CAPABILITY:
            return Attempt(
                False,
                f"rank {rank}: {fact.name} has compute capability {_version(fact.compute_capability)}, "
                f"the kernels need {_version(MIN_COMPUTE_CAPABILITY)}",
            )
        first = owner.setdefault((fact.host, fact.uuid), rank)
        if first != rank and not share_gpu:
            return Attempt(
                False,
                f"ranks {first} and {rank} use the same GPU ({fact.name}, {fact.uuid}): select another with "
                "torch.cuda.set_device(local_rank), or set SYMMCOMM_SHARE_GPU=1 if it is meant",
            )
    capabilities = sorted({fact.compute_capability for fact in facts})
    if len(capabilities) > 1:
        return Attempt(True, f"compute capabilities differ: {', '.join(map(_version, capabilities))}")
    return Attempt(True, f"{len(owner)} × {facts[0].name}")


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def decide_provider(facts: Sequence[GpuFacts], requested: str = "auto") -> Choice:
    """How the ranks share GPU memory: the first of ``PROVIDERS`` that works for every rank and every pair.

    Args:
        requested: "auto", or the one that must be taken (SYMMCOMM_GPU_MEMORY).
    """
    refused: list[tuple[str, str]] = []
    for name in PROVIDERS if requested == "auto" else (requested,):
        reason = _obstacle(facts, name)
        if not reason:
            granularity = max(fact.granularity_bytes for fact in facts)
            why = f"{name}: {getattr(facts[0], name).reason}"
            return Choice(provider=name, reason=why, refused=tuple(refused), granularity_bytes=granularity)
        refused.append((name, reason))
    text = "; ".join(f"{name}: {reason}" for name, reason in refused)
    return Choice(provider=None, reason=f"GPU memory cannot be shared: {text}", refused=tuple(refused))


def _obstacle(facts: Sequence[GpuFacts], name: str) -> str:
    """Why the ranks cannot use a provider; empty if they can."""
    for rank, fact in enumerate(facts):
        attempt: Attempt = getattr(fact, name)
        if not attempt.works:
            return f"rank {rank}: {attempt.reason}"
    return _places(facts, name) or _unreachable(facts)


def _places(facts: Sequence[GpuFacts], name: str) -> str:
    """What the ranks' places forbid."""
    if name == "fabric":
        if len({fact.host for fact in facts}) > 1 and len({fact.fabric_domain for fact in facts}) > 1:
            return "the ranks' GPUs are not in one fabric domain"
        return ""
    for rank, fact in enumerate(facts):
        if fact.host != facts[0].host:
            return f"ranks 0 and {rank} are on different hosts"
        if name == "cuda_vmm" and fact.network_namespace != facts[0].network_namespace:
            return f"descriptors cannot pass between ranks 0 and {rank}: they are in different network namespaces"
    if name == "cuda_ipc":
        if len(facts) > 2:
            return f"legacy handles give {len(facts)} ranks no memory at equal distances"
        if len(facts) == 2 and facts[0].pid_namespace != facts[1].pid_namespace:
            return "legacy handles do not pass between pid namespaces"
    return ""


def _unreachable(facts: Sequence[GpuFacts]) -> str:
    """The first pair of different GPUs without peer access. A GPU that was not visible may be reachable: mapping it
    will tell."""
    for rank, fact in enumerate(facts):
        for peer, other in enumerate(facts):
            attempt = fact.peers.get(other.uuid)
            if other.uuid != fact.uuid and attempt is not None and not attempt.works:
                return f"the GPU of rank {rank} cannot reach that of rank {peer}: {attempt.reason}"
    return ""


def decide_multicast(facts: Sequence[GpuFacts], choice: Choice) -> Attempt:
    """Whether multicast may be tried: allowed on every rank, on GPUs of their own, over VMM memory."""
    for rank, fact in enumerate(facts):
        if not fact.multicast.works:
            return Attempt(False, f"rank {rank}: {fact.multicast.reason}")
    if choice.provider != "cuda_vmm":
        return Attempt(False, f"it needs cuda_vmm, and the ranks use {choice.provider}")
    if len({fact.uuid for fact in facts}) < max(len(facts), 2):
        return Attempt(False, "it needs two ranks or more, each with a GPU of its own")
    return Attempt(True, "every rank allows it")


def numa_domains(facts: Sequence[GpuFacts]) -> list[list[int]]:
    """Ranks by the NUMA node of their GPUs, in the order of their lowest ranks; unknown nodes count as one."""
    domains: dict[tuple[str, int], list[int]] = {}
    for rank, fact in enumerate(facts):
        domains.setdefault((fact.host, fact.numa_node), []).append(rank)
    return list(domains.values())


def decide_links(facts: Sequence[GpuFacts]) -> Attempt:
    """Whether every pair of different GPUs is joined by NVLink. Ranks on one GPU need no link."""
    for rank, fact in enumerate(facts):
        for peer, other in enumerate(facts):
            if other.uuid != fact.uuid and not fact.links.get(other.uuid):
                return Attempt(False, f"no NVLink is known between the GPUs of ranks {rank} and {peer}: PCIe")
    return Attempt(True, "every pair of GPUs is joined by NVLink")


def decide_vectors(facts: Sequence[GpuFacts]) -> Attempt:
    """Whether a store of 16 bytes reaches every peer in one piece, so that a kernel may tell by a part of them that all
    have come. NVLink carries them in one packet; of PCIe nothing is promised beyond 8 bytes, which is why NCCL's LL has
    a flag in every 8 and its LL128 is for NVLink only. Pairs of which nothing is known count as NVLink."""
    for rank, fact in enumerate(facts):
        for peer, other in enumerate(facts):
            if other.uuid != fact.uuid and fact.links.get(other.uuid) == 0:
                return Attempt(False, f"the way from rank {rank} to {peer} is PCIe, where 16 bytes may come in parts")
    return Attempt(True, "no pair of GPUs is joined by PCIe")
