"""Reading another process's private memory (``process_vm_readv``), and whether it may be done.

The kernel allows it between processes of one user, unless a security module (Yama's ``ptrace_scope``) or a container's
filter forbids it. Nothing but a try tells; all ranks try, and only where all succeed is it used.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def read(pid: int, address: int, num_bytes: int) -> bytes:
    """Bytes of another process. Raises OSError if they cannot be read."""
    buffer = ctypes.create_string_buffer(num_bytes)
    local = _Vector(ctypes.addressof(buffer), num_bytes)
    remote = _Vector(address, num_bytes)
    copied = _libc.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if copied != num_bytes:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw


def agree_on_reading(rank: int, allowed: bool, all_gather: Callable[[bytes], list[bytes]]) -> bool:
    """Collective. Whether every rank can read every other's memory, and all have it ``allowed``."""
    secret = secrets.token_bytes(16)
    buffer = ctypes.create_string_buffer(secret, len(secret))
    offer = {"pid": os.getpid(), "address": ctypes.addressof(buffer), "secret": secret.hex()}
    offers = [json.loads(answer) for answer in all_gather(json.dumps(offer).encode())]
    good = allowed
    for peer, other in enumerate(offers):
        if good and peer != rank:
            try:
                good = read(other["pid"], other["address"], len(secret)).hex() == other["secret"]
            except OSError:
                good = False
    return all(answer == b"1" for answer in all_gather(b"1" if good else b"0"))
