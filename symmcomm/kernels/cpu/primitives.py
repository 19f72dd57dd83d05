"""Operations below Numba's own: atomics with their ordering, futexes, yields, raw loads and stores, calls by address.

Addresses are ``int64``. Orderings are LLVM's, at system scope: an acquire load that reads a release store's value sees
all that the storing thread wrote before it, whichever process it runs in, since shared mappings are one memory. Aligned
accesses only. Nothing here takes or needs the GIL.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_SYS_PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}[platform.machine()]
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}[platform.machine()]  # 1: yield
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the PRIVATE forms: the word is shared between processes

memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


def _pointer(builder: Any, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _load(ordering: str, llvm: ir.Type, numba: types.Type) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_pointer(builder, args[0], llvm), ordering, llvm.width // 8, typ=llvm)

        return numba(types.int64), codegen

    return load


def _store(ordering: str, llvm: ir.Type, numba: types.Type) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store_atomic(args[1], _pointer(builder, args[0], llvm), ordering, llvm.width // 8)
            return context.get_dummy_value()

        return types.void(types.int64, numba), codegen

    return store


load_acquire = _load("acquire", _I32, types.uint32)
store_release = _store("release", _I32, types.uint32)
load_i64 = _load("monotonic", _I64, types.int64)
store_i64 = _store("monotonic", _I64, types.int64)


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """32-bit fetch-and-add, sequentially consistent; returns the word before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I32), args[1], "seq_cst")

    return types.uint32(types.int64, types.uint32), codegen


@intrinsic
def compare_and_swap(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """32-bit compare-and-swap, acquire and release; returns the word before (``expected`` where it succeeded)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _I32)
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire"), 0)

    return types.uint32(types.int64, types.uint32, types.uint32), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Sequentially consistent fence: orders an earlier store before a later load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, operands = _PAUSE
        function = builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), [_I32] * len(operands)))
        builder.call(function, [_I32(o) for o in operands])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def address_of_slot(typingctx: Any) -> Any:
    """Address of 32 bytes on the stack of the calling function, for a ``timespec`` or two ``iovec``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            slot = builder.alloca(ir.ArrayType(_I64, 4))
        return builder.ptrtoint(slot, _I64)

    return types.int64(), codegen


@intrinsic
def _copy_past_caches(typingctx: Any, target: Any, source: Any) -> Any:
    """Copies 64 bytes to an aligned address, by a store that leaves the line in no cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(_I64, 8)
        value = builder.load(_pointer(builder, args[1], line), align=1)
        stored = builder.store(value, _pointer(builder, args[0], line), align=64)
        stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _call(num_args: int) -> Any:
    @intrinsic
    def call(typingctx: Any, function: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            values = [values[0], *(builder.extract_value(values[1], i) for i in range(num_args))]
            kind = ir.FunctionType(_I64, [_I64] * num_args)
            return builder.call(_pointer(builder, values[0], kind), values[1:])

        return types.int64(types.int64, types.StarArgTuple.from_types([types.int64] * num_args)), codegen

    return call


call_1 = _call(1)  # int64 f(int64) at an address
call_2 = _call(2)
call_5 = _call(5)


@njit(cache=True, nogil=True)
def futex_wait(address: int, expected: int, timeout_ns: int) -> int:
    """Sleeps while the word equals ``expected``, at most ``timeout_ns``. 0: woken; else the word differed, time was up,
    or a signal arrived."""
    timespec = address_of_slot()
    store_i64(timespec, timeout_ns // 1_000_000_000)
    store_i64(timespec + 8, timeout_ns % 1_000_000_000)
    return _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, expected, timespec, 0, 0)


@njit(cache=True, nogil=True)
def futex_wake(address: int) -> int:
    """Wakes every sleeper on the word."""
    return _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


@njit(cache=True, nogil=True)
def memcpy_past_caches(target: int, source: int, num_bytes: int) -> None:
    """``memcpy`` of much that is not read soon: the target's lines are neither fetched first nor kept in a cache."""
    start = min(-target % 64, num_bytes)
    end = start + (num_bytes - start) // 256 * 256
    memcpy(target, source, start)
    for at in range(start, end, 256):
        for line in range(at, at + 256, 64):
            _copy_past_caches(target + line, source + line)
    memcpy(target + end, source + end, num_bytes - end)
    fence()  # such stores are ordered by no later release


@njit(cache=True, nogil=True)
def read_process(pid: int, remote: int, target: int, num_bytes: int) -> bool:
    """Copies from another process's memory in one pass, by the kernel. False: refused, or the process is gone."""
    vectors = address_of_slot()
    while num_bytes > 0:
        store_i64(vectors, target)
        store_i64(vectors + 8, num_bytes)
        store_i64(vectors + 16, remote)
        store_i64(vectors + 24, num_bytes)
        copied = _syscall(_SYS_PROCESS_VM_READV, pid, vectors, 1, vectors + 16, 1, 0)
        if copied <= 0:
            return False
        remote += copied
        target += copied
        num_bytes -= copied
    return True
