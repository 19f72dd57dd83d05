"""A ``torch.cuda.MemPool`` on the heap: tensors made inside it are symmetric from birth.

torch asks its pool for segments (2 MiB and more) through two C functions, and keeps a lock of its own meanwhile. Python
must not be entered there: a thread that holds the interpreter and waits for torch's lock would never let this one have
the interpreter. So the functions are compiled by Numba, know their table by its address, and lock with pthread.

Nothing is communicated. Ranks that allocate the same sizes in the same order get the same offsets, first fit in a block
of the heap that was allocated, collectively, before; ``Communicator.rendezvous`` compares the offsets.
"""
# mypy: allow-untyped-decorators, no-warn-return-any

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from symmcomm.errors import ArgumentError, OutOfSymmetricMemoryError

MAX_BLOCKS = 4096
"""Blocks and holes together. torch's segments are large, so a pool has few."""
_ALIGNMENT = 512
_BASE, _NUM_BLOCKS, _NUM_REFUSED, _LARGEST_REFUSED, _HEADER = 0, 1, 2, 3, 4  # words at the start of the table
_OFFSET, _SIZE, _USED, _FIELDS = 0, 1, 2, 3  # words of a block

_libc = ctypes.CDLL(None)
_lock, _unlock = _libc.pthread_mutex_lock, _libc.pthread_mutex_unlock
for _function in (_lock, _unlock):
    _function.argtypes, _function.restype = [ctypes.c_size_t], ctypes.c_int


@intrinsic
def _words(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to 64-bit words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@numba.njit(nogil=True)
def _take(table: Any, num_bytes: int) -> int:
    """First fit. Address of the block, 0 if there is no room."""
    size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
    count = table[_NUM_BLOCKS]
    for number in range(count):
        at = _HEADER + number * _FIELDS
        left = table[at + _SIZE] - size
        if table[at + _USED] or left < 0 or (left > 0 and count == MAX_BLOCKS):
            continue
        if left > 0:
            for word in range(_HEADER + count * _FIELDS - 1, at + _FIELDS - 1, -1):
                table[word + _FIELDS] = table[word]
            hole = at + _FIELDS
            table[hole + _OFFSET], table[hole + _SIZE], table[hole + _USED] = table[at + _OFFSET] + size, left, 0
            table[_NUM_BLOCKS] = count + 1
        table[at + _SIZE], table[at + _USED] = size, 1
        return table[_BASE] + table[at + _OFFSET]
    table[_NUM_REFUSED] += 1
    table[_LARGEST_REFUSED] = max(table[_LARGEST_REFUSED], num_bytes)
    return 0


@numba.njit(nogil=True)
def _merge(table: Any, number: int) -> None:
    """Joins a hole with the block after it, if that is a hole too."""
    count = table[_NUM_BLOCKS]
    at, following = _HEADER + number * _FIELDS, _HEADER + (number + 1) * _FIELDS
    if number < 0 or number + 1 >= count or table[at + _USED] or table[following + _USED]:
        return
    table[at + _SIZE] += table[following + _SIZE]
    for word in range(following, _HEADER + (count - 1) * _FIELDS):
        table[word] = table[word + _FIELDS]
    table[_NUM_BLOCKS] = count - 1


@numba.njit(nogil=True)
def _give(table: Any, address: int) -> None:
    """Returns a block; an address that is none changes nothing."""
    for number in range(table[_NUM_BLOCKS]):
        at = _HEADER + number * _FIELDS
        if table[_BASE] + table[at + _OFFSET] == address and table[at + _USED]:
            table[at + _USED] = 0
            _merge(table, number)
            _merge(table, number - 1)
            return


class BlockTable:
    """Blocks of ``num_bytes`` at ``address``, taken and given back by compiled functions.

    Attributes:
        alloc_address, free_address: of ``void *(size_t bytes, int device, void *stream)`` and
            ``void (void *block, size_t bytes, int device, void *stream)``, callable from any thread.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        if num_bytes < _ALIGNMENT:
            raise ArgumentError(f"num_bytes={num_bytes} is less than one block of {_ALIGNMENT}")
        self.num_bytes = num_bytes // _ALIGNMENT * _ALIGNMENT
        self._table = np.zeros(_HEADER + MAX_BLOCKS * _FIELDS, dtype=np.int64)
        self._table[[_BASE, _NUM_BLOCKS, _HEADER + _SIZE]] = address, 1, self.num_bytes
        self._mutex = np.zeros(16, dtype=np.int64)  # zeros are an unlocked pthread mutex
        self._functions = _compile(self._table.ctypes.data, self._mutex.ctypes.data, self._table.size)
        self.alloc_address, self.free_address = (int(function.address) for function in self._functions)

    def blocks(self) -> list[tuple[int, int, bool]]:
        """(offset, bytes, whether it is taken) of all blocks and holes, by offset."""
        count = int(self._table[_NUM_BLOCKS])
        rows = self._table[_HEADER : _HEADER + count * _FIELDS].reshape(count, _FIELDS).tolist()
        return [(offset, size, bool(used)) for offset, size, used in rows]

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks taken."""
        return sum(size for _, size, used in self.blocks() if used)

    @property
    def refused(self) -> tuple[int, int]:
        """(how many requests found no room, bytes of the largest of them)."""
        return int(self._table[_NUM_REFUSED]), int(self._table[_LARGEST_REFUSED])


def _compile(table_address: int, mutex_address: int, num_words: int) -> tuple[Any, Any]:
    """The two functions for one table, whose address is a constant in them."""

    @numba.cfunc("int64(int64, int32, int64)")
    def alloc(num_bytes: int, device: int, stream: int) -> int:
        _lock(mutex_address)
        address = _take(numba.carray(_words(table_address), (num_words,)), num_bytes)
        _unlock(mutex_address)
        return address

    @numba.cfunc("void(int64, int64, int32, int64)")
    def free(address: int, num_bytes: int, device: int, stream: int) -> None:
        _lock(mutex_address)
        _give(numba.carray(_words(table_address), (num_words,)), address)
        _unlock(mutex_address)

    return alloc, free


class SymmetricPool:
    """A pool on a block of the heap::

        pool = SymmetricPool(memory)
        with torch.cuda.use_mem_pool(pool.mempool):
            model = Model().cuda()

    Args:
        memory: a symmetric tensor of uint8, the same on every rank; it is the pool's until ``close``.

    Attributes:
        mempool: the ``torch.cuda.MemPool``.
        table: which blocks torch has taken.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        if not memory.is_cuda or not memory.is_contiguous():
            raise ArgumentError(
                f"memory is on {memory.device}, contiguous: {memory.is_contiguous()}; expected cuda, True"
            )
        self.memory = memory
        self.table = BlockTable(memory.data_ptr(), memory.nbytes)
        # torch has no public way to hand over functions that are not in a library of their own.
        allocator = torch._C._cuda_customAllocator(self.table.alloc_address, self.table.free_address)
        self.mempool: torch.cuda.MemPool | None = torch.cuda.MemPool(allocator)
        self._allocator = allocator
        _kept.append(self)  # torch may call the functions as long as a tensor lives

    def describe_refusal(self) -> str:
        """What torch's out of memory error does not say; empty if no request was refused."""
        count, largest = self.table.refused
        if not count:
            return ""
        return (
            f"the symmetric pool of {self.table.num_bytes} bytes refused {count} requests, the largest of {largest} "
            f"bytes; {self.table.used_bytes} bytes are taken"
        )

    def close(self) -> None:
        """Gives the pool up. ``memory`` can be freed afterwards.

        Raises OutOfSymmetricMemoryError while tensors of the pool are alive; it can be called again.
        """
        self.mempool = None  # torch returns the segments that hold no tensor
        if self.table.used_bytes:
            torch.cuda.empty_cache()
        if used := self.table.used_bytes:
            raise OutOfSymmetricMemoryError(f"{used} bytes of the symmetric pool are in use: drop their tensors first")
        if self in _kept:
            _kept.remove(self)


_kept: list[SymmetricPool] = []
