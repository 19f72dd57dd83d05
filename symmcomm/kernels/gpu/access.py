"""Rows of elements in memory as vectors of 16 bytes: zeros beyond the end are loaded, and not stored.

The vector ``index`` of a row is its elements from ``index · per_vector`` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from symmcomm.kernels.gpu.elements import store_vector
from symmcomm.schedule.layout_gpu import VECTOR_BYTES


def load_or_zero(address: Any, num_bytes: int, when: Any, semantics: str = "weak") -> list[Any]:
    """``num_bytes`` (1, 2, 4 or 16, and aligned to that) as words; zeros where ``when`` is false.

    As ``load`` with a predicate, but the words are written either way. Else, in a loop, registers would have to keep
    their values of the iteration before.
    """
    num = -(-num_bytes // 4)
    words = [f"{{$w{i}}}" for i in range(num)]
    kind = {1: ".u8", 2: ".u16", 4: ".b32", 16: ".v4.b32"}[num_bytes]
    operand = words[0] if num == 1 else f"{{{', '.join(words)}}}"
    order = "" if semantics == "weak" else f".{semantics}.sys"
    zeros = "\n".join(f"mov.b32 {word}, 0;" for word in words)
    code = (
        f"{{\n.reg .pred live;\nsetp.ne.s32 live, {{$r1}}, 0;\n{zeros}\n"
        f"@live ld{order}.global{kind} {operand}, [{{$r0}}];\n}}"
    )
    loaded = inline_ptx(code, write_only_types=[Uint32] * num, read_only_args=[address, Int32(when)])
    return [loaded] if num == 1 else list(loaded)


@dataclass(frozen=True, kw_only=True)
class Access:
    """To vectors of rows of ``hidden`` elements with ``itemsize`` bytes, ``per_vector`` of them a vector. ``aligned``:
    rows start and end on 16-byte boundaries; else single elements are moved."""

    itemsize: int
    per_vector: int
    aligned: bool
    hidden: Any

    def load(self, row: Any, index: Any, live: Any, semantics: str = "weak") -> list[Any]:
        """Vector ``index`` of the row at that address: four words, zeros where not ``live`` and where the row has
        ended."""
        if self.aligned:
            address = row + Int64(index) * VECTOR_BYTES
            return load_or_zero(address, VECTOR_BYTES, live & self.inside(index), semantics)
        words = [Uint32(0)] * 4
        for i in range(self.per_vector):
            here = live & (index * self.per_vector + i < self.hidden)
            address = row + Int64(index * self.per_vector + i) * self.itemsize
            byte = i * self.itemsize
            moved = load_or_zero(address, self.itemsize, here, semantics)[0] << Uint32(8 * (byte % 4))
            words[byte // 4] = words[byte // 4] | moved
        return words

    def store(self, row: Any, index: Any, words: list[Any], live: Any) -> None:
        """Stores a vector of ``per_vector`` elements, up to the end of the row."""
        num_bytes = self.per_vector * self.itemsize
        address = row + Int64(index) * num_bytes
        if self.aligned:
            store_vector(address, words, num_bytes, when=live & self.inside(index))
            return
        for i in range(self.per_vector):
            byte = i * self.itemsize
            word = words[byte // 4] >> Uint32(8 * (byte % 4))
            here = live & (index * self.per_vector + i < self.hidden)
            store_vector(address + byte, [word], self.itemsize, when=here)

    def inside(self, index: Any) -> Any:
        """Whether the row has a vector of that index."""
        return index * self.per_vector < self.hidden
