"""What the machine is, read from /proc and /sys; what cannot be read is left out."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

from symmcomm.bench.method import Machine


def hardware() -> dict[str, Any]:
    """CPU model, cores (in all and usable by this process), NUMA nodes, memory in bytes, huge pages."""
    memory = _fields(Path("/proc/meminfo"))
    kibibytes = {name: int(value.split()[0]) for name, value in memory.items() if value}
    facts: dict[str, Any] = {
        "cpu": _fields(Path("/proc/cpuinfo")).get("model name", platform.machine()),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
    }
    if "MemTotal" in kibibytes:
        facts["memory_bytes"] = kibibytes["MemTotal"] << 10
        facts["available_memory_bytes"] = kibibytes.get("MemAvailable", 0) << 10
    if "HugePages_Total" in kibibytes:
        size_kib = kibibytes.get("Hugepagesize", 0)
        facts["huge_pages"] = f"{kibibytes['HugePages_Total']} of {size_kib} KiB"
    for name in ("enabled", "shmem_enabled"):
        if text := _read(Path("/sys/kernel/mm/transparent_hugepage") / name):
            facts[f"transparent_huge_pages_{name}"] = text.partition("[")[2].partition("]")[0]
    return facts


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def find_gpus() -> Machine:
    """The GPUs that this process sees, and what stands in the way of using them. Opens none."""
    count = torch.cuda.device_count()
    if not count:
        return Machine(num_gpus=0, obstacle="torch finds no GPU here")
    if torch.version.hip is not None:
        return Machine(num_gpus=count, obstacle="the kernels need NVIDIA GPUs, and torch is built for ROCm")
    if importlib.util.find_spec("cutlass") is None:
        return Machine(num_gpus=count, obstacle="the kernels need nvidia-cutlass-dsl (extra: cuda)")
    return Machine(num_gpus=count)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, str]:
    """``name : value`` lines; the first of each name."""
    found: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found
