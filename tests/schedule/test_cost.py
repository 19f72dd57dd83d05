"""The link model: who wins where, and by how much."""

from __future__ import annotations

import pytest

from symmcomm.errors import TopologyError
from symmcomm.schedule.cost import (
    FabricLevel,
    RingMode,
    choose,
    choose_from,
    cost,
    plan_of,
    rank_plans,
    scaling,
)
from symmcomm.schedule.machines import (
    MACHINES,
    NETWORK_BANDWIDTH,
    NETWORK_LATENCY,
    NUMA_BANDWIDTH,
    NVLINK_BANDWIDTH,
    NVLINK_LATENCY,
    cluster,
    nvlink,
    pcie,
)
from symmcomm.schedule.ring import grid_of, ring, ring_1d
from symmcomm.schedule.select import NEVER

PCIE = MACHINES["8 = 2 x 4 PCIe"]


def test_two_dimensions_win_by_what_the_numa_link_explains() -> None:
    """It carries 7 segments of a flat ring, 4 of a ring of rings, 16 of a direct exchange."""
    num_bytes = 256 << 20
    found = {mode: cost(plan_of(mode, PCIE), PCIE, num_bytes) for mode in RingMode}
    assert {mode: c.segments for mode, c in found.items()} == {
        RingMode.All2All: 16, RingMode.Ring1D: 7, RingMode.Ring2D: 4,
    }  # fmt: skip
    assert {c.bottleneck for c in found.values()} == {"numa"}
    for mode, segments in ((RingMode.Ring1D, 7), (RingMode.All2All, 16)):
        assert found[mode].seconds / found[RingMode.Ring2D].seconds == pytest.approx(segments / 4, rel=0.02)
    assert found[RingMode.Ring2D].seconds == pytest.approx(4 * num_bytes / 8 / NUMA_BANDWIDTH, rel=0.02)
    assert [entry.mode for entry in rank_plans(PCIE, num_bytes)][:4] == [RingMode.Ring2D] * 2 + [RingMode.Ring1D] * 2


def test_who_is_chosen() -> None:
    large, small = 64 << 20, 1 << 10
    assert choose(PCIE, large) is RingMode.Ring2D
    assert choose(PCIE, small) is RingMode.All2All  # one latency instead of four
    assert choose(nvlink(8), large) is RingMode.All2All
    assert choose(pcie((3, 5)), large) is RingMode.Ring1D  # domains differ in size
    assert choose(MACHINES["2 nodes x 8"], large) is RingMode.Ring2D
    assert choose(nvlink(1), large) is RingMode.All2All
    assert choose_from(nvlink(8)) == (RingMode.All2All, NEVER)
    mode, least = choose_from(PCIE)
    assert mode is RingMode.Ring2D
    assert choose(PCIE, least) is mode
    assert choose(PCIE, least // 2) is not mode


def test_both_directions_halve_a_one_way_ring() -> None:
    """On a full duplex link between two domains of a flat ring, each half carries half."""
    one = cost(ring_1d(PCIE), PCIE, 64 << 20)
    two = cost(ring_1d(MACHINES["15 = 3 x 5 PCIe"], both_directions=True), MACHINES["15 = 3 x 5 PCIe"], 64 << 20)
    assert one.segments == 7  # two domains: the ring crosses once in each direction already
    assert two.segments == 7  # three domains: 14 one way


def test_partial_sums_may_be_wider() -> None:
    """Of 7 messages a segment, the first carries elements."""
    plan = ring_1d(nvlink(8))
    narrow, wide = (cost(plan, nvlink(8), 64 << 20, partial_factor=f) for f in (1.0, 2.0))
    assert wide.bottleneck_seconds / narrow.bottleneck_seconds == pytest.approx(13 / 7)


def test_another_world_is_refused() -> None:
    with pytest.raises(TopologyError, match="is for 5 ranks, the topology for 8"):
        cost(ring_1d(nvlink(5)), PCIE, 1)


@pytest.mark.parametrize(("num_nodes", "num_bytes"), [(1, 1 << 20), (2, 64 << 20), (4, 1 << 30), (8, 64 << 20)])
def test_the_closed_form_is_the_model(num_nodes: int, num_bytes: int) -> None:
    machine = cluster(num_nodes, 8)
    levels = [
        FabricLevel(dim=8, bandwidth=NVLINK_BANDWIDTH, latency=2 * NVLINK_LATENCY),
        FabricLevel(dim=num_nodes, bandwidth=NETWORK_BANDWIDTH, latency=2 * NETWORK_LATENCY),
    ]
    found = scaling(levels, num_bytes)
    assert found.rings == pytest.approx(cost(plan_of(RingMode.Ring2D, machine), machine, num_bytes).seconds)
    assert found.flat == pytest.approx(cost(plan_of(RingMode.Ring1D, machine), machine, num_bytes).seconds, rel=0.05)
    assert found.bound <= found.rings <= found.flat * (1 + 1e-9)


def test_the_closed_form_of_three_levels() -> None:
    machine = cluster(8, 4, nodes_per_rack=4)
    levels = [
        FabricLevel(dim=4, bandwidth=NVLINK_BANDWIDTH, latency=2 * NVLINK_LATENCY),
        FabricLevel(dim=4, bandwidth=NETWORK_BANDWIDTH, latency=2 * NETWORK_LATENCY),
        FabricLevel(dim=2, bandwidth=NETWORK_BANDWIDTH / 2, latency=4 * NETWORK_LATENCY, above=True),
    ]
    for num_bytes in (1 << 20, 1 << 30):
        found = scaling(levels, num_bytes)
        assert found.rings == pytest.approx(cost(ring(grid_of(machine, 3)), machine, num_bytes).seconds)
        flat = cost(plan_of(RingMode.Ring1D, machine), machine, num_bytes).seconds
        assert found.flat == pytest.approx(flat, rel=0.05)
        assert found.bound <= found.rings <= found.flat


def test_three_levels_beat_two_where_racks_have_thin_uplinks() -> None:
    """The bound is what ports allow; rings of rings come near it, a flat ring does not."""
    machine = cluster(8, 4, nodes_per_rack=4)
    three, two = (cost(ring(grid_of(machine, n)), machine, 1 << 30).seconds for n in (3, 2))
    assert three <= two
