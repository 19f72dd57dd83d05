"""The one gate: where multicast is forbidden, no entry point of the driver is reached. And the steps, on a fake driver.

No test here touches a real driver. On machines with GPUs, multicast stays off.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import GRANULARITY, INVALID, FakeDriver, Machine, World, run_threads

import symmcomm
from symmcomm.env import Settings, multicast_vetoes
from symmcomm.errors import SymmCommError
from symmcomm.memory.cuda_driver import CudaDevice
from symmcomm.memory.cuda_vmm import VmmProvider
from symmcomm.memory.handle import SymmetricHandle
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.multicast import (
    HeapMulticast,
    MulticastSpace,
    MulticastUnavailableError,
    _Entry,
    multicast_allowed,
)
from symmcomm.schedule.topology_gpu import Attempt, Choice, GpuFacts, decide_multicast

VETOES = [
    ("SYMMCOMM_DISABLE_MULTICAST", "1"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("SYMMCOMM_DISABLE_MULTICAST", "maybe"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TRUE"),
    ("NCCL_NVLS_ENABLE", "off"),
    ("NVSHMEM_DISABLE_NVLS", "yes"),
]
PERMITS = {
    "SYMMCOMM_DISABLE_MULTICAST": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "",
    "NCCL_NVLS_ENABLE": "1",
    "NVSHMEM_DISABLE_NVLS": "false",
}
STEPS = ["cuMulticastGetGranularity", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"]


def entry_points(machine: Machine) -> list[str]:
    return [name for _, name in machine.log if name.startswith("cuMulticast")]


class Rank:
    """A rank with a VMM heap of one segment, a multicast space on it, and the multicast of a communicator."""

    def __init__(self, rank: int, world: World, machine: Machine, environ: dict[str, str], settings: Settings) -> None:
        self.driver = FakeDriver(machine, rank)
        device = CudaDevice(rank, self.driver)
        self.agree = lambda payload: world.all_gather(rank, payload)
        self.heap = SymmetricHeap(
            rank, world.world_size, 1 << 20, 64 << 20, world.exchange(rank), provider=VmmProvider(device),
            agree=self.agree,
        )  # fmt: skip
        self.space = MulticastSpace(device, self.heap, settings, environ)
        own = Attempt(*multicast_allowed(settings, 1, environ))
        facts = GpuFacts(device=Attempt(True, ""), uuid=str(rank), multicast=own).to_json()
        given = [GpuFacts.from_json(each) for each in self.agree(facts)]
        allowed = decide_multicast(given, Choice(provider="cuda_vmm", reason=""))
        self.multicast = HeapMulticast(allowed, self.agree, device, self.heap, settings, environ)
        self.before = self.state()

    def state(self) -> tuple[set[int], set[int]]:
        return set(self.driver.mappings), set(self.driver.reservations)

    def close(self) -> None:
        self.agree(b"")
        for _ in range(2):
            self.space.close()
            self.multicast.close()
        self.heap.close(self.agree)
        assert self.state() == (set(), set())


def raise_failures(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.mark.parametrize(("name", "value"), VETOES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_no_entry_point_is_reached_where_a_variable_forbids_it(name: str, value: str, everywhere: bool) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {name: value} if everywhere or rank == 1 else {}, Settings())
        for _ in range(2):
            with pytest.raises(MulticastUnavailableError, match=rf"rank [01]: forbidden by {name}={value}"):
                me.space.extend(me.agree)
        assert me.state() == me.before
        assert me.space.base == 0
        me.close()

    raise_failures(run_threads(2, body))
    assert entry_points(machine) == []


def test_settings_and_hardware_forbid_too() -> None:
    for machine, settings in (
        (Machine(), Settings(disable_multicast=True)),
        (Machine(attributes={"MULTICAST_SUPPORTED": 0}), Settings()),
    ):

        def body(rank: int, world: World, machine: Machine = machine, settings: Settings = settings) -> None:
            me = Rank(rank, world, machine, {}, settings)
            with pytest.raises(MulticastUnavailableError):
                me.space.extend(me.agree)
            me.close()

        raise_failures(run_threads(2, body))
        assert entry_points(machine) == []


def test_the_gate_is_a_pure_function_with_a_reason() -> None:
    assert multicast_allowed(Settings(), 1, {}) == (True, "the device supports it, and nothing forbids it")
    assert multicast_allowed(Settings(), 1, PERMITS)[0]
    assert multicast_allowed(Settings(), 0, {}) == (
        False, "the device does not support it (MULTICAST_SUPPORTED reads 0)",
    )  # fmt: skip
    assert multicast_allowed(Settings(disable_multicast=True), 1, {})[0] is False
    allowed, reason = multicast_allowed(Settings(), 1, dict(VETOES[:4]))
    assert not allowed
    assert all(f"{name}={value}" in reason for name, value in VETOES[:4])
    assert multicast_vetoes({}) == []


def test_every_entry_point_asks_the_gate_again() -> None:
    driver, environ = FakeDriver(Machine()), dict[str, str]()
    entry = _Entry(CudaDevice(0, driver), Settings(), environ)
    environ["NCCL_NVLS_ENABLE"] = "0"
    for name in (*STEPS, "cuMulticastUnbind"):
        with pytest.raises(SymmCommError, match=f"{name} must not be called: forbidden by NCCL_NVLS_ENABLE=0"):
            entry.call(name)
        entry.undo(name)
    assert entry_points(driver.machine) == []


def test_for_the_real_driver_the_process_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(Machine())
    real = types.ModuleType("stands_for_cuda_bindings_driver")
    real.__getattr__ = lambda name: getattr(fake, name)  # type: ignore[method-assign]
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    entry = _Entry(CudaDevice(0, real), Settings(), {})
    assert entry.allowed()[0] is False
    with pytest.raises(SymmCommError, match="NVSHMEM_DISABLE_NVLS=1"):
        entry.call("cuMulticastCreate")
    assert entry_points(fake.machine) == []


def test_no_other_file_names_an_entry_point() -> None:
    package = Path(symmcomm.__file__).parent
    naming = [path for path in package.rglob("*.py") if "cuMulticast" in path.read_text()]
    assert naming == [package / "memory" / "multicast.py"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_come_in_lockstep(world_size: int) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, PERMITS, Settings())
        me.agree(b"")
        if rank == 0:
            machine.log.clear()
        me.agree(b"")
        me.space.extend(me.agree)
        size, memory = me.driver.mappings[me.space.base]
        assert (size, memory.bound) == (GRANULARITY, world_size)  # bound by all before any rank goes on
        assert me.space.base in me.driver.accessible
        me.space.extend(me.agree)  # nothing new
        me.heap.allocate(8 << 20, "more", me.agree)
        me.space.extend(me.agree)
        assert me.driver.mappings[me.space.base + GRANULARITY][1].bound == world_size
        me.close()

    raise_failures(run_threads(world_size, body))
    first = [(rank, name) for rank, name in machine.log if not name.startswith("cuCtx")]
    names = [name for _, name in first]
    assert [rank for rank, name in first if name == "cuMulticastCreate"] == [0, 0]
    last_import = [i for i, name in enumerate(names) if name == "cuMemImportFromShareableHandle"][world_size - 2]
    adds = [i for i, name in enumerate(names) if name == "cuMulticastAddDevice"][:world_size]
    binds = [i for i, name in enumerate(names) if name == "cuMulticastBindMem"][:world_size]
    assert names.index("cuMulticastCreate") < last_import < adds[0]
    assert adds[-1] < binds[0]
    assert names.count("cuMulticastUnbind") == 2 * world_size
    assert machine.memories == {}


SHARED = ["cuMemRetainAllocationHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
ON_ONE_RANK = {"cuMulticastCreate": 0, "cuMemExportToShareableHandle": 0, "cuMemImportFromShareableHandle": 1}


@pytest.mark.parametrize(
    ("name", "failing"),
    [*ON_ONE_RANK.items(), *((name, rank) for name in STEPS + SHARED if name not in ON_ONE_RANK for rank in (0, 1))],
)
def test_a_step_that_fails_on_one_rank_is_undone_on_all(name: str, failing: int) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        if rank == failing:
            me.driver.failures[name] = (0, INVALID)
        with pytest.raises(MulticastUnavailableError, match=f"rank {failing}: {name} failed: CUDA_ERROR_INVALID_VALUE"):
            me.space.extend(me.agree)
        me.agree(b"")
        assert me.driver.mappings.keys() == me.before[0]
        me.space.extend(me.agree)  # the next attempt starts afresh
        assert me.driver.mappings[me.space.base][1].bound == 2
        me.close()

    raise_failures(run_threads(2, body))
    assert machine.memories == {}


def test_a_segment_that_does_not_fit_the_granularity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(FakeDriver, "_cuMulticastGetGranularity", lambda *_: 512 << 20)

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        with pytest.raises(MulticastUnavailableError, match="not aligned to the multicast granularity"):
            me.space.extend(me.agree)
        me.close()

    raise_failures(run_threads(2, body))
    assert "cuMulticastCreate" not in entry_points(machine)


def test_a_world_of_one_has_no_multicast() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        with pytest.raises(MulticastUnavailableError, match="a world of one"):
            me.space.extend(me.agree)
        me.close()

    raise_failures(run_threads(1, body))
    assert entry_points(machine) == []


@pytest.mark.parametrize(("name", "value"), VETOES)
def test_a_communicator_on_a_machine_that_forbids_it_reaches_no_entry_point(name: str, value: str) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {name: value} if rank == 1 else {}, Settings())
        for _ in range(2):
            assert me.multicast.extend(True) == 0
            assert me.multicast.allowed == Attempt(False, f"rank 1: forbidden by {name}={value}")
            me.heap.allocate(8 << 20, "more", me.agree)
        me.multicast.allowed = Attempt(True, "")  # as if it had been asked before the variable was set
        assert me.multicast.extend(True) == 0
        assert f"rank 1: forbidden by {name}={value}" in me.multicast.allowed.reason
        me.close()

    raise_failures(run_threads(2, body))
    assert entry_points(machine) == []


def test_nothing_is_tried_until_it_is_wanted() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        assert me.multicast.extend(False) == 0
        me.heap.allocate(8 << 20, "more", me.agree)
        assert me.multicast.extend(False) == 0
        assert me.multicast.allowed.works
        me.close()

    raise_failures(run_threads(2, body))
    assert entry_points(machine) == []


def test_multicast_follows_the_heap_and_ends_before_it() -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        base = me.multicast.extend(True)
        assert me.driver.mappings[base][1].bound == 2
        me.heap.allocate(8 << 20, "more", me.agree)
        assert me.multicast.extend(False) == base  # thresholds have changed; what is there stays, and grows
        mapped = {start - base: memory.bound for start, (_, memory) in me.driver.mappings.items() if memory.num_devices}
        assert mapped == {start: 2 for start, _ in me.heap.segments}
        assert len(mapped) == 2
        me.agree(b"")
        me.multicast.close()
        assert machine.log.count((rank, "cuMulticastUnbind")) == 2
        assert not any(memory.num_devices for _, memory in me.driver.mappings.values())
        assert me.heap.own_address in me.driver.mappings  # whose memory was bound
        me.close()

    raise_failures(run_threads(2, body))
    assert machine.memories == {}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at_first", [True, False])
def test_all_go_on_without_what_one_rank_cannot_have(failing: int, at_first: bool) -> None:
    machine = Machine()

    def body(rank: int, world: World) -> None:
        me = Rank(rank, world, machine, {}, Settings())
        base = 0 if at_first else me.multicast.extend(True)
        me.heap.allocate(8 << 20, "more", me.agree)
        if rank == failing:
            me.driver.failures["cuMulticastBindMem"] = (0, INVALID)
        assert me.multicast.extend(True) == 0
        assert f"rank {failing}: cuMulticastBindMem failed" in me.multicast.allowed.reason
        me.agree(b"")
        tried = len(entry_points(machine))
        me.agree(b"")
        assert me.multicast.extend(True) == 0  # no second attempt
        assert len(entry_points(machine)) == tried
        assert (base in me.driver.mappings) != at_first  # graphs may have its addresses
        me.close()

    raise_failures(run_threads(2, body))
    assert machine.memories == {}


def test_a_handle_has_an_address_where_there_is_a_mapping() -> None:
    heap = types.SimpleNamespace(base=1 << 30, stride=1 << 20)
    for base, expected in ((1 << 40, (1 << 40) + 512), (0, 0)):
        side: Any = types.SimpleNamespace(
            rank=0, world_size=2, heap=heap, signal_pad=0, device=torch.device("cpu"), multicast_base=base
        )
        assert SymmetricHandle(side, 512, 64).multicast_ptr == expected
