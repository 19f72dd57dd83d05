"""Operations below CuTe's own, as PTX: loads and stores with semantics and scope, atomics, clocks, signals. Those that
the NVLink switch carries out are in ``multimem_instructions``.

Addresses are ``Int64`` in the global window. The names of semantics (``weak``, ``relaxed``, ``acquire``, ``release``)
and scopes are the ISA manual's. A release store at system scope, read by an acquire load, makes all visible that
happened before the store, whichever GPU wrote it: other threads' writes count if a CTA barrier lies between, earlier
kernels' of the stream always do.

Functions without ``@cute.jit`` are straight-line code, put together while the kernel is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_

from symmcomm.schedule import layout_gpu as at

_POLLS = 1024  # polls between two looks at the clock


def qualifier(semantics: str, scope: str) -> str:
    """``weak`` accesses and ``volatile`` ones have no scope."""
    return f".{semantics}" if semantics in ("weak", "volatile") else f".{semantics}.{scope}"


def operands(prefix: str, num: int, start: int = 0) -> str:
    """``num`` registers of ``inline_ptx``, as a vector if there are several."""
    listed = ", ".join(f"{{${prefix}{i}}}" for i in range(start, start + num))
    return listed if num == 1 else f"{{{listed}}}"


def load(
    address: Any, kind: Any = Uint32, *, num: int = 1, semantics: str = "weak", scope: str = "sys", when: Any = None
) -> tuple[Any, ...]:
    """``num`` values of a 32- or 64-bit kind by one instruction; address aligned to all of them (at most 16 bytes).

    Each value is one access of the memory model; the vector as a whole is not. Where ``when`` is false nothing is read
    and the values are undefined.
    """
    vector = "" if num == 1 else f".v{num}"
    code = f"ld{qualifier(semantics, scope)}.global{vector}.b{kind.width} {operands('w', num)}, [{{$r0}}];"
    loaded = inline_ptx(code, write_only_types=[kind] * num, read_only_args=[address], predicate=when)
    return (loaded,) if num == 1 else tuple(loaded)


def store(
    address: Any, values: Sequence[Any], *, semantics: str = "weak", scope: str = "sys", when: Any = None
) -> None:
    """Values of one 32- or 64-bit kind by one instruction; address aligned to all of them (at most 16 bytes)."""
    num, width = len(values), type(values[0]).width
    vector = "" if num == 1 else f".v{num}"
    code = f"st{qualifier(semantics, scope)}.global{vector}.b{width} [{{$r0}}], {operands('r', num, 1)};"
    inline_ptx(code, read_only_args=[address, *values], predicate=when)


def load_128(address: Any) -> tuple[Any, Any]:
    """16 bytes by one relaxed access at system scope, as two ``Uint64``; address aligned to them. Unlike a vector, a
    ``.b128`` is one value whose access is not divided, as 16-byte atomics of the CUDA C++ library have it too."""
    code = "{\n.reg .b128 both;\nld.relaxed.sys.global.b128 both, [{$r0}];\nmov.b128 {{$w0}, {$w1}}, both;\n}"
    return tuple(inline_ptx(code, write_only_types=[Uint64, Uint64], read_only_args=[address]))


def store_128(address: Any, low: Any, high: Any, *, when: Any = True) -> None:
    """The opposite of ``load_128``; nothing where ``when`` is false."""
    code = (
        "{\n.reg .b128 both;\n.reg .pred live;\nsetp.ne.s32 live, {$r3}, 0;\nmov.b128 both, {{$r1}, {$r2}};\n"
        "@live st.relaxed.sys.global.b128 [{$r0}], both;\n}"
    )
    inline_ptx(code, read_only_args=[address, Uint64(low), Uint64(high), Int32(when)])


def load_narrow(
    address: Any, num_bytes: int, *, semantics: str = "weak", scope: str = "sys", when: Any = None
) -> Any:
    """One or two bytes, zero-extended."""
    code = f"ld{qualifier(semantics, scope)}.global.u{8 * num_bytes} {{$w0}}, [{{$r0}}];"
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[address], predicate=when)


def store_narrow(
    address: Any, value: Any, num_bytes: int, *, semantics: str = "weak", scope: str = "sys", when: Any = None
) -> None:
    """The low one or two bytes of a word."""
    code = f"st{qualifier(semantics, scope)}.global.u{8 * num_bytes} [{{$r0}}], {{$r1}};"
    inline_ptx(code, read_only_args=[address, value], predicate=when)


def compare_and_swap(address: Any, expected: Any, desired: Any, *, semantics: str, scope: str = "sys") -> Any:
    """32-bit compare-and-swap; returns the word before (``expected`` where it succeeded)."""
    code = f"atom.{semantics}.{scope}.global.cas.b32 {{$w0}}, [{{$r0}}], {{$r1}}, {{$r2}};"
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[address, Uint32(expected), Uint32(desired)])


def exchange(address: Any, value: Any, *, semantics: str, scope: str = "sys") -> Any:
    """Puts a 32-bit word; returns the one before."""
    code = f"atom.{semantics}.{scope}.global.exch.b32 {{$w0}}, [{{$r0}}], {{$r1}};"
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[address, Uint32(value)])


def reduce_add(address: Any, value: Any, *, semantics: str = "relaxed", scope: str = "sys") -> None:
    """Adds to a 32-bit word; nothing comes back."""
    inline_ptx(f"red.{semantics}.{scope}.global.add.u32 [{{$r0}}], {{$r1}};", read_only_args=[address, Uint32(value)])


def globaltimer() -> Any:
    """Nanoseconds, the same clock on all SMs."""
    return Int64(cute.arch.globaltimer())


def nanosleep(nanoseconds: int) -> None:
    """Lets the warp sleep up to twice as long; at most a millisecond."""
    inline_ptx(f"nanosleep.u32 {nanoseconds};")


def pick(condition: Any, if_true: Any, if_false: Any) -> Any:
    """One of two values of one kind, without a branch."""
    return type(if_true)(select_(condition, if_true, if_false))


def opaque(value: Any) -> Any:
    """A 64-bit value of which the compiler knows nothing. A loop up to it is not unrolled: registers are dear here."""
    return inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[type(value)], read_only_args=[value])


def agree(flag: Any) -> Any:
    """CTA barrier of all threads; true on all if ``flag`` was on all."""
    kind = nvvm.BarrierReduxKind.AND
    return Boolean(nvvm.barrier_cta_red(Boolean(flag).ir_value(), Int32(0).ir_value(), kind, aligned=True))


def join(low: Any, high: Any) -> Any:
    """64 bits from two words."""
    return Int64(Uint32(low)) | (Int64(Uint32(high)) << Int64(32))


def split(value: Any) -> tuple[Any, Any]:
    """The low and the high word of 64 bits."""
    return Uint32(value), Uint32(value >> Int64(32))


def warp_reduce(value: Any, combine: Any, width: int = 32) -> Any:
    """``combine`` over ``width`` neighbouring lanes, a butterfly: the same bits in all of them if it commutes."""
    step = width // 2
    while step:
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=step))
        step //= 2
    return value


@cute.jit
def sleep(nanoseconds: Int64) -> None:
    """Fault injection: holds the thread that long."""
    until = globaltimer() + nanoseconds
    while globaltimer() < until:
        nanosleep(1000)


@cute.jit
def give_up(
    state: Int64, rank: Int32, peer: Int32, channel: Int32, expected: Uint32, seen: Uint32, phase: Int32
) -> None:
    """Bars later kernels, and leaves a Record for the host unless there is one, be it a complaint: what came first may
    be why the peer is missing, and a Record that is there is never written again under the host's eyes."""
    if exchange(state + at.FAILED, at.GAVE_UP, semantics="relaxed", scope="gpu") == Uint32(0):
        _leave_record(state, rank, peer, channel, expected, seen, phase)


@cute.jit
def complain(
    state: Int64, rank: Int32, peer: Int32, channel: Int32, expected: Uint32, seen: Uint32, phase: Int32
) -> None:
    """Leaves a Record for the host unless there is one. Nothing is barred: CTAs that start later do their part."""
    if compare_and_swap(state + at.FAILED, 0, at.COMPLAINED, semantics="relaxed", scope="gpu") == Uint32(0):
        _leave_record(state, rank, peer, channel, expected, seen, phase)


def _leave_record(state: Any, *fields: Any) -> None:
    """What a Record says, in its order, ``valid`` excepted."""
    record = load(state + at.RECORD, Int64)[0]
    for i, value in enumerate(fields, 1):
        store(record + 4 * i, [Uint32(value)], semantics="relaxed")
    store(record, [Uint32(1)], semantics="release")


@cute.jit
def overdue(state: Int64, tries: Int32, since: Int64) -> Any:
    """Whether a wait that has polled ``tries`` times is past its deadline, and since when it is timed (0: not yet)."""
    late = Boolean(False)
    if tries % _POLLS == 0:
        now = globaltimer()
        if since == 0:
            since = now
        late = now - since > load(state + at.TIMEOUT_NS, Int64, semantics="relaxed")[0]  # the host may cut it short
    return late, since


def signal(word: Any, epoch: Any) -> None:
    """Stores the epoch into a peer's pad: who acquires it sees all that happened here before."""
    store(word, [epoch], semantics="release")


@cute.jit
def wait(
    state: Int64, rank: Int32, word: Int64, epoch: Uint32, peer: Int32, channel: Int32, phase: Int32
) -> Any:
    """Waits until a word of the own pad has come to the epoch. False: the deadline passed, a record is written."""
    seen = load(word, semantics="acquire")[0]
    tries, since, late = Int32(0), Int64(0), Boolean(False)
    while Int32(seen - epoch) < 0 and not late:
        tries += 1
        late, since = overdue(state, tries, since)
        seen = load(word, semantics="acquire")[0]
    reached = Int32(seen - epoch) >= 0
    if not reached:
        give_up(state, rank, peer, channel, epoch, seen, phase)
    return reached


@cute.jit
def _swap(
    state: Int64, rank: Int32, word: Int64, before: Uint32, after: Uint32, peer: Int32, channel: Int32, phase: Int32
) -> Any:
    seen = compare_and_swap(word, before, after, semantics="acq_rel")
    tries, since, late = Int32(0), Int64(0), Boolean(False)
    while seen != before and not late:
        tries += 1
        late, since = overdue(state, tries, since)
        seen = compare_and_swap(word, before, after, semantics="acq_rel")
    if seen != before:
        give_up(state, rank, peer, channel, before, seen, phase)
    return seen == before


def put_signal(state: Any, rank: Any, word: Any, peer: Any, channel: Any) -> Any:
    """0 → 1 in a peer's pad, once the peer has taken the last one. False: the deadline passed."""
    return _swap(state, rank, word, Uint32(0), Uint32(1), peer, channel, Int32(at.Phase.put))


def wait_signal(state: Any, rank: Any, word: Any, peer: Any, channel: Any) -> Any:
    """1 → 0 in the own pad, once the peer has signalled. False: the deadline passed."""
    return _swap(state, rank, word, Uint32(1), Uint32(0), peer, channel, Int32(at.Phase.take))
