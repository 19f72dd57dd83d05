"""What this process can do with its GPUs, found out by trying. Nothing here raises: an error is a refusal's reason.

Attributes of a device are hints only: on some machines the fabric attribute reads 1 and the allocation is refused, or
multicast is reported and must not be touched. So each way to share memory is tried on one small segment; for multicast
the one gate is asked, and the driver never.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from symmcomm.bootstrap.host import host_identity
from symmcomm.env import Settings
from symmcomm.errors import in_words
from symmcomm.memory.cuda_driver import CudaDevice, call, load_driver
from symmcomm.memory.cuda_ipc import IpcProvider
from symmcomm.memory.cuda_vmm import VmmProvider, device_granularity
from symmcomm.memory.multicast import multicast_allowed
from symmcomm.schedule.topology_gpu import Attempt, GpuFacts

_PATTERN = 0x53594D4D


def _never_raises(probe: Callable[..., Attempt]) -> Callable[..., Attempt]:
    @functools.wraps(probe)
    def guarded(*args: Any) -> Attempt:
        try:
            return probe(*args)
        except Exception as error:
            return Attempt(False, in_words(error))

    return guarded


@_never_raises
def probe_driver() -> Attempt:
    """The CUDA driver, and torch built for it."""
    if torch.version.hip is not None:
        return Attempt(False, f"torch {torch.__version__} is built for ROCm; the GPU kernels need an NVIDIA GPU")
    if torch.version.cuda is None:
        return Attempt(False, f"torch {torch.__version__} is built without CUDA")
    driver = load_driver()
    version, count = call(driver, "cuDriverGetVersion"), call(driver, "cuDeviceGetCount")
    if count == 0:
        return Attempt(False, "the driver shows no GPU to this process")
    return Attempt(True, f"{count} GPUs, driver for CUDA {version // 1000}.{version % 1000 // 10}")


@_never_raises
def probe_vmm(device: CudaDevice, fabric: bool = False) -> Attempt:
    """A segment created, exported, imported and mapped a second time; written there and read here."""
    if not device.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        return Attempt(False, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED reads 0")
    kind = "FABRIC" if fabric else "POSIX_FILE_DESCRIPTOR"
    if not device.attribute(f"HANDLE_TYPE_{kind}_SUPPORTED"):
        return Attempt(False, f"HANDLE_TYPE_{kind}_SUPPORTED reads 0")
    provider = VmmProvider(device, fabric=fabric)
    size = provider.granularity_bytes
    base = provider.reserve(2 * size)
    mapped: list[int] = []
    try:
        segment = provider.create(base, size)
        mapped.append(base)
        try:
            provider.map(base + size, size, segment.offer)
        finally:
            if isinstance(segment.offer, int):
                os.close(segment.offer)
        mapped.append(base + size)
        seen = _write_and_read(device, base + size, base)
    finally:
        for address in mapped:
            provider.unmap(address, size)
        provider.unreserve(base, 2 * size)
        provider.reclaim()
    if seen != _PATTERN:
        return Attempt(False, f"wrote {_PATTERN:#x} through one mapping, read {seen:#x} through the other")
    what = "a fabric handle" if fabric else "a descriptor"
    return Attempt(True, f"shared by {what}, mapped twice, written and read (granularity {size} bytes)")


def _write_and_read(device: CudaDevice, write_address: int, read_address: int) -> int:
    device.call("cuMemsetD32", write_address, _PATTERN, 1)
    device.call("cuCtxSynchronize")
    word = bytearray(4)
    device.call("cuMemcpyDtoH", word, read_address, 4)
    return int(struct.unpack("<I", word)[0])


@_never_raises
def probe_ipc(device: CudaDevice) -> Attempt:
    """A legacy handle of a small allocation. Only another process can open it, so that is tried where it is needed."""
    provider = IpcProvider(device)
    segment = provider.create(0, provider.granularity_bytes)
    provider.unmap(segment.address, provider.granularity_bytes)
    provider.reclaim()
    return Attempt(True, "a legacy handle was given; whether it opens shows in another process")


@_never_raises
def probe_multicast(device: CudaDevice, settings: Settings) -> Attempt:
    """What the gate says. No multicast function of the driver is called."""
    attribute = device.attribute("MULTICAST_SUPPORTED")
    allowed, reason = multicast_allowed(settings, attribute)
    return Attempt(allowed, f"{reason}; MULTICAST_SUPPORTED reads {attribute}" if attribute else reason)


@_never_raises
def probe_peer(device: CudaDevice, peer: CudaDevice) -> Attempt:
    """Whether one GPU of this process can reach another."""
    if not call(device.driver, "cuDeviceCanAccessPeer", device.handle, peer.handle):
        return Attempt(False, f"cuDeviceCanAccessPeer says no for {device} to {peer}")
    return Attempt(True, f"cuDeviceCanAccessPeer says yes for {device} to {peer}")


def device_uuid(device: CudaDevice) -> str:
    """The UUID as nvidia-smi prints it, without its ``GPU-`` or ``MIG-``."""
    name = "cuDeviceGetUuid_v2" if hasattr(device.driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return str(uuid.UUID(bytes=bytes(call(device.driver, name, device.handle).bytes)[:16]))


def probe_facts(ordinal: int, settings: Settings, driver: Any = None, nvml: Any = None) -> GpuFacts:
    """Everything that decisions about this rank's GPU need. Never raises.

    Args:
        ordinal: of the device, as torch counts.
        driver, nvml: in place of ``cuda.bindings.driver`` and ``pynvml``.
    """
    usable = probe_driver() if driver is None else Attempt(True, "given")
    if not usable.works:
        return GpuFacts(device=usable)
    try:
        return _facts(CudaDevice(ordinal, driver), settings, nvml)
    except Exception as error:
        return GpuFacts(device=Attempt(False, f"GPU {ordinal}: {in_words(error)}"))


def _facts(device: CudaDevice, settings: Settings, nvml: Any) -> GpuFacts:
    own, host = device_uuid(device), host_identity()
    peers = _visible_peers(device)
    links: dict[str, int] = {}
    mig, fabric_domain = False, ""
    with _nvml(nvml) as library:
        if library is not None:
            handle, mig = _nvml_handle(library, own)
            if handle is not None:
                more, links = _nvml_peers(library, handle)
                peers = more | peers
                fabric_domain = _fabric_domain(library, handle)
    kinds = device.driver.CUmemAllocationHandleType
    vmm = probe_vmm(device)
    granularity = device_granularity(device, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) if vmm.works else 0
    return GpuFacts(
        device=Attempt(True, "its context could be opened"),
        host=host.boot_id,
        network_namespace=host.network_namespace,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        ordinal=device.ordinal,
        uuid=own,
        name=_name(device),
        compute_capability=(
            device.attribute("COMPUTE_CAPABILITY_MAJOR"),
            device.attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=device.attribute("MULTIPROCESSOR_COUNT"),
        total_bytes=device.memory()[1],
        numa_node=_numa_node(device),
        mig=mig,
        fabric_domain=fabric_domain,
        granularity_bytes=granularity,
        cuda_vmm=vmm,
        fabric=probe_vmm(device, True),
        cuda_ipc=probe_ipc(device),
        multicast=probe_multicast(device, settings),
        peers=peers,
        links=links,
    )


def _name(device: CudaDevice) -> str:
    raw = call(device.driver, "cuDeviceGetName", 128, device.handle)
    return str(raw.split(b"\0")[0].decode()) if isinstance(raw, bytes) else str(raw)


def _numa_node(device: CudaDevice) -> int:
    numbers = [device.attribute(f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE")]
    path = "/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0/numa_node".format(*numbers)
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return -1


def _visible_peers(device: CudaDevice) -> dict[str, Attempt]:
    """Peer access to the other GPUs that this process sees, by UUID."""
    peers = {}
    for ordinal in range(int(call(device.driver, "cuDeviceGetCount"))):
        if ordinal != device.ordinal:
            peer = CudaDevice(ordinal, device.driver)
            peers[device_uuid(peer)] = probe_peer(device, peer)
    return peers


# NVML sees GPUs that CUDA_VISIBLE_DEVICES hides from this process. What it cannot say stays unknown.


@contextlib.contextmanager
def _nvml(library: Any) -> Iterator[Any]:
    try:
        library = importlib.import_module("pynvml") if library is None else library
        library.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield library
    finally:
        with contextlib.suppress(Exception):
            library.nvmlShutdown()


def _nvml_handle(nvml: Any, own: str) -> tuple[Any, bool]:
    """(handle or None, whether it is a MIG instance)."""
    for prefix in ("GPU-", "MIG-"):
        with contextlib.suppress(Exception):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + own), prefix == "MIG-"
    return None, False


def _nvml_peers(nvml: Any, handle: Any) -> tuple[dict[str, Attempt], dict[str, int]]:
    """By UUID: whether the GPU can write to that one, and its active NVLinks if the way goes over them."""
    peers: dict[str, Attempt] = {}
    links: dict[str, int] = {}
    active = _active_links(nvml, handle)
    for number in range(_count(nvml)):
        with contextlib.suppress(Exception):
            other = nvml.nvmlDeviceGetHandleByIndex(number)
            name = nvml.nvmlDeviceGetUUID(other)
            peer = (name.decode() if isinstance(name, bytes) else name).removeprefix("GPU-")
            status = nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_WRITE)
            works = status == nvml.NVML_P2P_STATUS_OK
            peers[peer] = Attempt(works, f"NVML's status of peer-to-peer writes is {status}")
            over_nvlink = nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            links[peer] = max(1, active) if over_nvlink == nvml.NVML_P2P_STATUS_OK else 0
    return peers, links


def _count(nvml: Any) -> int:
    with contextlib.suppress(Exception):
        return int(nvml.nvmlDeviceGetCount())
    return 0


def _active_links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        with contextlib.suppress(Exception):
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
    return active


def _fabric_domain(nvml: Any, handle: Any) -> str:
    """Cluster and clique of an NVLink fabric that has been set up; "" if there is none."""
    with contextlib.suppress(Exception):
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(info))
        cluster = bytes(bytearray(ord(c) if isinstance(c, str) else int(c) & 255 for c in info.clusterUuid))
        if info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster):
            return f"{cluster.hex()}/{info.cliqueId}"
    return ""


def gpu_probes(facts: Sequence[GpuFacts]) -> dict[str, Attempt]:
    """For ``symmcomm doctor``: every way to share memory on every one of these GPUs, which are numbered as listed."""
    found: dict[str, Attempt] = {}
    for ordinal, fact in enumerate(facts):
        if not fact.device.works:
            found[f"GPU {ordinal}"] = fact.device
            continue
        found[f"GPU {ordinal}"] = Attempt(True, _described(fact))
        for name in ("cuda_vmm", "fabric", "cuda_ipc", "multicast"):
            found[f"GPU {ordinal} {name}"] = getattr(fact, name)
        for peer, attempt in fact.peers.items():
            if peer != fact.uuid:
                links = fact.links.get(peer, 0)
                way = f"; {links} NVLinks" if links else "; no NVLink known"
                found[f"GPU {ordinal} to {peer[:8]}"] = Attempt(attempt.works, attempt.reason + way)
    return found


def _described(fact: GpuFacts) -> str:
    major, minor = fact.compute_capability
    return (
        f"{fact.name} {fact.uuid[:8]}, sm_{major}{minor}, {fact.num_sms} SMs, {fact.total_bytes >> 30} GiB, "
        f"NUMA node {fact.numa_node}{', a MIG instance' if fact.mig else ''}"
    )
