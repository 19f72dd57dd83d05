"""Every form of the switch's instructions that a primitive offers compiles, and no others are offered. Which there are
says the PTX ISA, in its tables of operations and types, vectors and accumulators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compiling import ptx_of

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Float64, Int64, Uint32, Uint64

from symmcomm.kernels.gpu.multimem_instructions import (
    multimem_ld_reduce,
    multimem_ld_reduce_64,
    multimem_red,
    multimem_st,
)
from symmcomm.kernels.gpu.primitives import store

COMPARED, BITWISE = {"min", "max"}, {"and", "or", "xor"}
INTEGERS = {
    "u32": {"add"} | COMPARED, "s32": {"add"} | COMPARED, "b32": BITWISE,
    "u64": {"add"} | COMPARED, "s64": COMPARED, "b64": BITWISE,
}  # fmt: skip
FLOATS = {"f32": {"add"}, "f64": {"add"}}
LD_REDUCE = INTEGERS | FLOATS | {"f16x2": {"add"} | COMPARED, "bf16x2": {"add"} | COMPARED}
RED = INTEGERS | FLOATS | {"f16x2": {"add"}, "bf16x2": {"add"}}
LD_REDUCE_FLOAT8 = {"e4m3x4": {"add"} | COMPARED, "e5m2x4": {"add"} | COMPARED}
ACCUMULATORS = {"f16x2": "f32", "bf16x2": "f32", "e4m3x4": "f16", "e5m2x4": "f16"}
OPS = ("add", "min", "max", "and", "or", "xor", "mul")
KINDS = (*LD_REDUCE, *LD_REDUCE_FLOAT8, "f16", "bf16")


@dataclass(frozen=True)
class Form:
    """One instruction. Attributes: ``num`` words of 32 bits."""

    instruction: str
    kind: str
    op: str = ""
    num: int = 1
    acc: str = ""

    @property
    def code(self) -> str:
        """Its name in PTX."""
        op, acc, vector = self.op and f".{self.op}", self.acc and f".acc::{self.acc}", f".v{self.num}"
        semantics = "release" if self.instruction == "red" else "relaxed"
        return f"multimem.{self.instruction}.{semantics}.sys.global{op}{acc}{vector * (self.num > 1)}.{self.kind} "

    @property
    def is_wide(self) -> bool:
        """Whether it is of 64 bits."""
        return self.kind[1:] == "64"

    def operand(self, bits: Any) -> Any:
        """What it stores or adds, of 64 bits of a kernel."""
        if self.kind in FLOATS and self.instruction == "red":
            return bits.bitcast(Float64) if self.is_wide else Uint32(bits).bitcast(Float32)
        return bits if self.is_wide else Uint32(bits)

    def emit(self, multicast: Any, operand: Any, kept: Any) -> None:
        """The instruction in a kernel."""
        if self.instruction == "st":
            multimem_st(multicast, [operand] * self.num)
        elif self.instruction == "red":
            multimem_red(multicast, operand, self.kind, self.op)
        elif self.is_wide:
            store(kept, list(multimem_ld_reduce_64(multicast, self.kind, self.op)))
        else:
            store(kept, list(multimem_ld_reduce(multicast, self.kind, self.op, num=self.num, acc=self.acc)))


@dataclass(frozen=True)
class Forms:
    """A kernel of nothing but those instructions."""

    forms: tuple[Form, ...]

    def arguments(self) -> tuple[Any, ...]:
        return (Int64(0), Int64(0), Int64(0))

    @cute.jit
    def __call__(self, multicast: Int64, bits: Int64, kept: Int64, stream: cuda.CUstream) -> None:
        self.kernel(multicast, bits, kept).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, multicast: Int64, bits: Int64, kept: Int64) -> None:
        self.emit(multicast, bits, kept)

    def emit(self, multicast: Any, bits: Any, kept: Any) -> None:
        for form in self.forms:
            form.emit(multicast, form.operand(bits), kept)


def forms(instruction: str, ops: dict[str, set[str]]) -> Iterator[Form]:
    """All that there are of those types and operations."""
    for kind, each in ops.items():
        for op in sorted(each):
            nums = (1, 2, 4) if instruction == "ld_reduce" and (kind in ACCUMULATORS or kind == "f32") else (1,)
            for num in nums:
                yield Form(instruction, kind, op, num)
                if instruction == "ld_reduce" and op == "add" and kind in ACCUMULATORS:
                    yield Form(instruction, kind, op, num, ACCUMULATORS[kind])


STORES = (Form("st", "b32"), Form("st", "f32", num=2), Form("st", "f32", num=4))
ALL = (*forms("ld_reduce", LD_REDUCE), *forms("red", RED), *STORES)
FLOAT8 = tuple(forms("ld_reduce", LD_REDUCE_FLOAT8))


@pytest.mark.parametrize(("arch", "known"), [("sm_90a", ALL), ("sm_100a", ALL + FLOAT8)], ids=["sm_90a", "sm_100a"])
def test_every_form_compiles(arch: str, known: tuple[Form, ...], tmp_path: Path) -> None:
    ptx = ptx_of(Forms(known), arch, tmp_path)
    assert len(set(known)) == len(known) == len(re.findall(r"multimem\.", ptx))
    for form in known:
        assert form.code in ptx


@pytest.mark.parametrize(("arch", "form"), [("sm_80", ALL[0]), ("sm_80", STORES[0]), ("sm_90a", FLOAT8[0])], ids=str)
def test_what_an_architecture_lacks_does_not_compile(arch: str, form: Form, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"(?s)ptxas.*(not supported on|requires)\s+\.target"):
        ptx_of(Forms((form,)), arch, tmp_path)


def test_no_other_form_is_offered() -> None:
    """Neither one that ``ptxas`` refuses, nor one that it takes for another."""
    known, tried = {*ALL, *FLOAT8}, 0
    for kind in KINDS:
        for op in OPS:
            for instruction, nums in (("ld_reduce", (1, 2, 3, 4, 8)), ("red", (1,))):
                for num in nums:
                    for acc in ("", "f16", "f32") if instruction == "ld_reduce" else ("",):
                        form = Form(instruction, kind, op, num, acc)
                        if form in known or (form.is_wide and (num > 1 or acc)):
                            continue  # the primitive of 64 bits has no such arguments
                        tried += 1
                        with pytest.raises(ValueError, match=rf"multimem\.{instruction} has no "):
                            form.emit(None, Uint64(1) if form.is_wide else Uint32(1), None)
    assert tried > 500


def test_words_are_of_a_primitives_size() -> None:
    for kind in ("u64", "f64"):
        with pytest.raises(ValueError, match=f"{kind} has 64 bits"):
            multimem_ld_reduce(None, kind, "add", num=1)
        with pytest.raises(ValueError, match=f"{kind} has 64 bits"):
            multimem_red(None, Uint32(1), kind)
    with pytest.raises(ValueError, match="f32 has 32 bits"):
        multimem_ld_reduce_64(None, "f32", "add")
    with pytest.raises(ValueError, match="u32 has 32 bits"):
        multimem_red(None, Uint64(1), "u32")
    for num in (0, 3, 8):
        with pytest.raises(ValueError, match=rf"multimem\.st has no vectors of {num} "):
            multimem_st(None, [Uint32(0)] * num)
