"""Instructions that the NVLink switch carries out on all ranks' memory at once (NVLS), as PTX: ``multimem.ld_reduce``,
``multimem.st`` and ``multimem.red``. Addresses are ``Int64``, of a multicast mapping. As in ``primitives``, names of
types, operations and semantics are the ISA manual's, and this is straight-line code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int64, Uint32
from cutlass.cute.arch import inline_ptx

from symmcomm.kernels.gpu.primitives import operands, qualifier, split

_COMPARE, _BITWISE = ("min", "max"), ("and", "or", "xor")
_INTEGERS = {
    "u32": ("add", *_COMPARE), "s32": ("add", *_COMPARE), "b32": _BITWISE,
    "u64": ("add", *_COMPARE), "s64": _COMPARE, "b64": _BITWISE,
}  # fmt: skip
_ACCUMULATORS = {"f16x2": "f32", "bf16x2": "f32", "e4m3x4": "f16", "e5m2x4": "f16"}
_OPS = {
    "ld_reduce": {
        **_INTEGERS, "f32": ("add",), "f64": ("add",),
        **dict.fromkeys(_ACCUMULATORS, ("add", *_COMPARE)),
    },
    "red": {**_INTEGERS, **dict.fromkeys(("f32", "f64", "f16x2", "bf16x2"), ("add",))},
}  # fmt: skip
"""Types and their operations, as the tables of the PTX ISA have them: ``ptxas`` takes some more, which mean nothing."""


def multimem_ld_reduce(
    address: Any, kind: str, op: str, *, num: int = 4, acc: str = "", semantics: str = "relaxed", when: Any = None
) -> tuple[Any, ...]:
    """``num`` 32-bit words, each reduced over all ranks by the switch.

    ``kind``: ``f32`` (``add`` only), ``f16x2``, ``bf16x2``, ``e4m3x4``, ``e5m2x4`` (sm_100; ``add``, ``min``, ``max``),
    or with ``num`` 1 ``u32``, ``s32`` (the same) and ``b32`` (``and``, ``or``, ``xor``); ``num``: 1, 2 or 4; ``acc``:
    ``f32`` for 16-bit floats' ``add``, ``f16`` for 8-bit ones'. Raises ValueError if the ISA has no such instruction.
    """
    _check("ld_reduce", kind, op, 32)
    if num not in ((1, 2, 4) if kind == "f32" or kind in _ACCUMULATORS else (1,)):
        raise ValueError(f"multimem.ld_reduce has no vectors of {num} {kind}")
    if acc and (op != "add" or acc != _ACCUMULATORS.get(kind)):
        raise ValueError(f"multimem.ld_reduce has no accumulator {acc} for {op} of {kind}")
    vector = "" if num == 1 else f".v{num}"
    precision = f".acc::{acc}" if acc else ""
    code = (
        f"multimem.ld_reduce{qualifier(semantics, 'sys')}.global.{op}{precision}{vector}.{kind} "
        f"{operands('w', num)}, [{{$r0}}];"
    )
    loaded = inline_ptx(code, write_only_types=[Uint32] * num, read_only_args=[address], predicate=when)
    return (loaded,) if num == 1 else tuple(loaded)


def multimem_ld_reduce_64(
    address: Any, kind: str, op: str, *, semantics: str = "relaxed", when: Any = None
) -> tuple[Any, Any]:
    """One value reduced over all ranks by the switch, as its two words: a ``u64`` (``add``, ``min``, ``max``), ``s64``
    (``min``, ``max``), ``b64`` (``and``, ``or``, ``xor``) or ``f64`` (``add``)."""
    _check("ld_reduce", kind, op, 64)
    code = f"multimem.ld_reduce{qualifier(semantics, 'sys')}.global.{op}.{kind} {{$w0}}, [{{$r0}}];"
    type_ = cutlass.Float64 if kind == "f64" else Int64
    value = inline_ptx(code, write_only_types=[type_], read_only_args=[address], predicate=when)
    return split(value.bitcast(Int64))


def multimem_st(address: Any, words: Sequence[Any], *, semantics: str = "relaxed", when: Any = None) -> None:
    """Stores one, two or four 32-bit words at that place on every rank."""
    num = len(words)
    if num not in (1, 2, 4):
        raise ValueError(f"multimem.st has no vectors of {num} words")
    kind = "b32" if num == 1 else f"v{num}.f32"  # only float forms are vectors; the bits pass unchanged
    code = f"multimem.st{qualifier(semantics, 'sys')}.global.{kind} [{{$r0}}], {operands('r', num, 1)};"
    inline_ptx(code, read_only_args=[address, *words], predicate=when)


def multimem_red(address: Any, value: Any, kind: str, op: str = "add", *, semantics: str = "release") -> None:
    """Reduces ``value`` into that place on every rank; with ``release`` it signals all at once. ``kind``: of integers
    and their ``op`` as above, or ``f32``, ``f64``, ``f16x2`` or ``bf16x2``, which are added; of the value's size."""
    _check("red", kind, op, type(value).width)
    code = f"multimem.red{qualifier(semantics, 'sys')}.global.{op}.{kind} [{{$r0}}], {{$r1}};"
    inline_ptx(code, read_only_args=[address, value])


def _check(instruction: str, kind: str, op: str, width: int) -> None:
    """Of an architecture that lacks a form ``ptxas`` says so itself."""
    if op not in _OPS[instruction].get(kind, ()):
        raise ValueError(f"multimem.{instruction} has no {op} of {kind}")
    if width != (64 if kind.endswith("64") else 32):
        raise ValueError(f"{kind} has {96 - width} bits, not {width}")
