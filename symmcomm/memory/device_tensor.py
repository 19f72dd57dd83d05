"""GPU memory that this library mapped, as a torch tensor.

The way in is a DLPack capsule, because it says which device the tensor belongs to: a peer's memory mapped here is used
by this rank's kernels and streams, whatever GPU it lies on. Other ways ask the driver where the address lies and get
the peer's GPU.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import ClassVar

import torch

CPU, CUDA = 1, 2
"""Device types as DLPack numbers them."""
_UNSIGNED = 1


class _DLTensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_: ClassVar = [("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_alive: dict[int, tuple[_DLManagedTensor, object, object]] = {}
"""By address of the structure that torch holds: the structure, its shape and the memory's owner."""


def _forget(address: int) -> None:
    """Called by torch when the last view of the tensor is gone."""
    _alive.pop(address, None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


@atexit.register
def _leave_to_the_system() -> None:
    """Tensors that outlive the interpreter must not call back into it; their memory goes with the process."""
    for managed, _, _ in _alive.values():
        managed.deleter = None


def device_tensor(
    ordinal: int, address: int, num_bytes: int, owner: object, *, device_type: int = CUDA
) -> torch.Tensor:
    """``num_bytes`` at ``address`` as a tensor of uint8 on device ``ordinal``.

    Args:
        owner: kept alive as long as any view of the tensor.
    """
    shape = (ctypes.c_int64 * 1)(num_bytes)
    managed = _DLManagedTensor()
    managed.tensor = _DLTensor(
        data=address,
        device_type=device_type,
        device_id=ordinal,
        ndim=1,
        type_code=_UNSIGNED,
        type_bits=8,
        type_lanes=1,
        shape=shape,
    )
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    key = ctypes.addressof(managed)
    _alive[key] = managed, shape, owner
    try:
        return torch.utils.dlpack.from_dlpack(_new_capsule(key, b"dltensor", None))
    except BaseException:
        del _alive[key]
        raise
