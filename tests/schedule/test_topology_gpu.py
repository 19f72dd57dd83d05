"""Which way GPUs share memory, decided from facts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from symmcomm.schedule.topology_gpu import (
    Attempt,
    Choice,
    GpuFacts,
    decide_devices,
    decide_links,
    decide_multicast,
    decide_provider,
    decide_vectors,
    numa_domains,
)

YES = Attempt(True, "seen to work")
NO = Attempt(False, "seen to fail")


def gpu(number: int, **other: Any) -> GpuFacts:
    """An H200 of one host, that reaches the others over NVLink."""
    facts = GpuFacts(
        device=YES,
        host="host",
        network_namespace=1,
        pid_namespace=2,
        ordinal=number,
        uuid=f"uuid{number}",
        name="NVIDIA H200",
        compute_capability=(9, 0),
        num_sms=132,
        total_bytes=140 << 30,
        numa_node=number // 4,
        granularity_bytes=2 << 20,
        cuda_vmm=YES,
        fabric=NO,
        cuda_ipc=YES,
        multicast=NO,
        peers={f"uuid{peer}": YES for peer in range(8) if peer != number},
        links={f"uuid{peer}": 18 for peer in range(8) if peer != number},
    )
    return replace(facts, **other)


def test_facts_survive_the_exchange() -> None:
    facts = gpu(3, multicast=YES, fabric_domain="ab/1", mig=True)
    assert GpuFacts.from_json(facts.to_json()) == facts
    absent = GpuFacts(device=NO)
    assert GpuFacts.from_json(absent.to_json()) == absent


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_vmm_is_taken_where_it_works(world_size: int) -> None:
    choice = decide_provider([gpu(number) for number in range(world_size)])
    assert choice == Choice(provider="cuda_vmm", reason="cuda_vmm: seen to work", granularity_bytes=2 << 20)


def test_the_greatest_granularity_counts() -> None:
    assert decide_provider([gpu(0), gpu(1, granularity_bytes=4 << 20)]).granularity_bytes == 4 << 20


def test_one_rank_without_vmm_takes_all_to_the_next_provider() -> None:
    choice = decide_provider([gpu(0), gpu(1, cuda_vmm=NO)])
    assert choice.provider == "cuda_ipc"
    assert choice.refused == (("cuda_vmm", "rank 1: seen to fail"), ("fabric", "rank 0: seen to fail"))
    assert decide_provider([gpu(0, fabric=YES), gpu(1, cuda_vmm=NO, fabric=YES)]).provider == "fabric"


def test_legacy_handles_are_for_two_ranks() -> None:
    choice = decide_provider([gpu(number, cuda_vmm=NO) for number in range(3)])
    assert choice.provider is None
    assert "legacy handles give 3 ranks no memory at equal distances" in choice.reason
    assert [name for name, _ in choice.refused] == ["cuda_vmm", "fabric", "cuda_ipc"]


@pytest.mark.parametrize(
    ("other", "provider", "reason"),
    [
        ({"network_namespace": 9}, "cuda_ipc", "in different network namespaces"),
        ({"network_namespace": 9, "pid_namespace": 9}, None, "do not pass between pid namespaces"),
        ({"host": "elsewhere"}, None, "on different hosts"),
        ({"peers": {"uuid0": NO}}, None, "the GPU of rank 1 cannot reach that of rank 0: seen to fail"),
        ({"peers": {}}, "cuda_vmm", ""),
    ],
)
def test_places_and_links_of_the_ranks_count(other: dict[str, Any], provider: str | None, reason: str) -> None:
    choice = decide_provider([gpu(0), gpu(1, **other)])
    assert choice.provider == provider
    assert reason in " ".join(why for _, why in choice.refused)


def test_fabric_spans_hosts_of_one_domain_only() -> None:
    def facts(domain: str) -> list[GpuFacts]:
        return [gpu(0, fabric=YES, fabric_domain="a/1"), gpu(1, fabric=YES, fabric_domain=domain, host="elsewhere")]

    assert decide_provider(facts("a/1")).provider == "fabric"
    assert "not in one fabric domain" in decide_provider(facts("a/2")).reason


def test_a_provider_that_was_asked_for_is_taken_or_nothing() -> None:
    assert decide_provider([gpu(0), gpu(1)], "cuda_ipc").provider == "cuda_ipc"
    choice = decide_provider([gpu(0), gpu(1)], "fabric")
    assert (choice.provider, choice.reason) == (
        None, "GPU memory cannot be shared: fabric: rank 0: seen to fail",
    )  # fmt: skip


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    assert decide_devices([gpu(0), gpu(1)], False) == Attempt(True, "2 × NVIDIA H200")
    shared = [gpu(0), gpu(1), gpu(0)]
    assert "ranks 0 and 2 use the same GPU" in decide_devices(shared, False).reason
    assert decide_devices(shared, True).works
    assert decide_devices([gpu(0), gpu(0, host="elsewhere")], False).works
    assert decide_provider(shared).provider == "cuda_vmm"


def test_a_device_that_is_absent_or_too_old_is_named() -> None:
    assert decide_devices([gpu(0), GpuFacts(device=NO)], True).reason == "rank 1 has no usable GPU: seen to fail"
    old = decide_devices([gpu(0), gpu(1, name="Tesla V100", compute_capability=(7, 0))], False)
    assert old == Attempt(False, "rank 1: Tesla V100 has compute capability 7.0, the kernels need 8.0")
    mixed = decide_devices([gpu(0), gpu(1, compute_capability=(10, 0))], False)
    assert mixed == Attempt(True, "compute capabilities differ: 9.0, 10.0")


def test_multicast_needs_every_rank_s_permission() -> None:
    allowed = [gpu(0, multicast=YES), gpu(1, multicast=YES)]
    vmm = decide_provider(allowed)
    assert decide_multicast(allowed, vmm).works
    assert decide_multicast([allowed[0], gpu(1)], vmm) == Attempt(False, "rank 1: seen to fail")
    assert not decide_multicast(allowed, decide_provider(allowed, "cuda_ipc")).works
    assert not decide_multicast(allowed[:1], vmm).works
    assert not decide_multicast([allowed[0]] * 2, vmm).works


def test_numa_domains_and_links() -> None:
    facts = [gpu(number) for number in (0, 5, 1, 4)]
    assert numa_domains(facts) == [[0, 2], [1, 3]]
    assert decide_links(facts).works
    assert decide_links([gpu(0), gpu(0)]).works
    assert decide_links([gpu(0), gpu(1, links={"uuid0": 0})]).reason.endswith("ranks 1 and 0: PCIe")
    assert not decide_links([gpu(0), gpu(1, links={})]).works


def test_vectors_come_whole_unless_the_way_is_known_to_be_pcie() -> None:
    assert decide_vectors([gpu(0), gpu(1)]).works
    assert decide_vectors([gpu(0), gpu(1, links={})]).works
    assert decide_vectors([gpu(0, links={"uuid0": 0})] * 2).works, "ranks on one GPU"
    refused = decide_vectors([gpu(0), gpu(1, links={"uuid0": 0})])
    assert refused == Attempt(False, "the way from rank 1 to 0 is PCIe, where 16 bytes may come in parts")
