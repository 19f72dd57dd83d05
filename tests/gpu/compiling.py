"""What the tests that compile kernels with no GPU have in common: the architectures, and what every kernel must be."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from symmcomm.schedule.dtypes import DType

ARCHITECTURES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}
PER_ARCHITECTURE = pytest.mark.parametrize("arch", ARCHITECTURES)
DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
MOST_STACK_BYTES = 16
"""A row and eight ranks' addresses can fill a thread's registers; then an address or two are put aside."""

_FRAME_SIZE, _REGCOUNT = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT


def ptx_of(kernel: Any, arch: str, directory: Path, *, shared: bool = False) -> str:
    """The PTX of a kernel that also becomes machine code and keeps its data in registers. ``shared``: whether it may
    have shared memory."""
    from symmcomm.kernels.gpu.compile import compile_kernel

    built = compile_kernel(kernel, arch, f"--keep-ptx --keep-cubin --dump-dir {directory}")
    ptx: str = built.__ptx__
    assert f".target {arch}" in ptx
    assert ".local" not in ptx  # nothing indexed at run time, nothing spilled by the compiler's front half
    assert stack_bytes(built.__cubin__) <= MOST_STACK_BYTES, kernel  # nor by its back half
    # Only norms have such memory: scripts/sanitize.sh looks for races in no other kernel.
    assert shared or ".shared" not in ptx
    return ptx


def stack_bytes(cubin: bytes) -> int:
    """Bytes a thread that the kernel keeps in local memory."""
    return _of_functions(cubin, _FRAME_SIZE)


def num_registers(cubin: bytes) -> int:
    """Registers a thread."""
    return _of_functions(cubin, _REGCOUNT)


def _of_functions(cubin: bytes, wanted: int) -> int:
    """The largest value of an attribute that functions have in the ELF file's ``.nv.info``."""
    table, (entry, num, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(num)]
    found = []
    for name, _, _, _, offset, size in sections:
        start = sections[names][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:  # the value is the length of what follows: a symbol, and a number
                if attribute == wanted:
                    found.append(struct.unpack_from("<I", cubin, at + 4)[0])
                at += value
    assert found
    return max(found)
