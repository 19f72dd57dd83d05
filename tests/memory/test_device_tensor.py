"""Tensors on memory that torch does not own: the device is the one named, and the owner lives as long as any view."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import torch

from symmcomm.memory.device_tensor import CPU, _alive, device_tensor


class Owner:
    """Something that can be watched."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint8 * 64)()


def test_views_share_the_memory_and_keep_its_owner() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    address = ctypes.addressof(owner.memory)
    before = len(_alive)
    tensor = device_tensor(0, address, 64, owner, device_type=CPU)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (torch.uint8, (64,), address)
    view = tensor.view(torch.bfloat16)[4:8].view(2, 2)
    view.fill_(2)
    assert bytes(owner.memory)[8:16] == b"\x00\x40" * 4
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None
    assert len(_alive) == before


def test_a_tensor_may_outlive_the_interpreter() -> None:
    program = """
import ctypes, sys, torch
from symmcomm.memory.device_tensor import CPU, device_tensor
memory = (ctypes.c_uint8 * 64)()
sys.kept = device_tensor(0, ctypes.addressof(memory), 64, memory, device_type=CPU)
torch.kept = sys.kept[3:]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
