"""What a call is, in one word that ranks compare: which collective, dtype, operation and root."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from functools import cache

import torch
import torch.distributed as dist

from symmcomm.errors import ArgumentError, DTypeError
from symmcomm.schedule.dtypes import DType, Op, supports


class Kind(IntEnum):
    """Collectives. The names are those of the methods."""

    barrier = 0
    all_reduce = 1
    reduce = 2
    reduce_scatter_tensor = 3
    all_gather_into_tensor = 4
    broadcast = 5
    gather = 6
    all_to_all_single = 7
    scatter = 8
    send = 9
    all_gather_bytes = 10
    all_reduce_rms_norm = 20
    reduce_scatter_rms_norm_all_gather = 21
    reduce_scatter_rms_norm = 22
    rms_norm_all_gather = 23


_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_NO_OP = 0xFF


def _code(dtype: torch.dtype) -> int:
    """The same number on every rank of one torch version."""
    return _DTYPES.index(dtype)


NUM_BLOCKS_LIMIT = 1 << 13
_SCHEDULES = ("All2All", "Ring1D", "Ring2D")


@cache
def encode(
    kind: Kind, dtype: torch.dtype, op: Op | None = None, root: int = -1, schedule: tuple[int, int] = (0, 0)
) -> int:
    """The word of a call; ``root`` is -1 where there is none. ``schedule``: the ring mode's number and the number of
    blocks, or 3 and a checksum of a plan, below NUM_BLOCKS_LIMIT."""
    where = (root + 1) << 32 | schedule[1] << 48 | schedule[0] << 61
    return kind | _code(dtype) << 8 | (_NO_OP if op is None else op) << 24 | where


def encode_norm(kind: Kind, dtype: torch.dtype, hidden: int, scaled: bool) -> int:
    """The word of a call with a norm: rows of ``hidden`` elements; ``scaled``: normalised to float8."""
    return encode(kind, dtype, root=hidden, schedule=(0, int(scaled)))


def decode(word: int) -> dict[str, object]:
    """Arguments of a call, by name, as its user wrote them."""
    kind, op, root = Kind(word & 0xFF), word >> 24 & 0xFF, (word >> 32 & 0xFFFF) - 1
    call: dict[str, object] = {"call": kind.name, "dtype": _DTYPES[word >> 8 & 0xFFFF]}
    if op != _NO_OP:
        call["op"] = Op(op).name
    mode, number = word >> 61, word >> 48 & (NUM_BLOCKS_LIMIT - 1)
    if kind >= Kind.all_reduce_rms_norm:
        return call | {"hidden": root, "scales": "given" if number else "none"}
    if mode == len(_SCHEDULES):
        call["ring_mode"] = f"a plan with checksum {number:#x}"
    elif mode:
        call |= {"ring_mode": _SCHEDULES[mode], "num_blocks": number}
    if root >= 0:
        call["src" if kind in (Kind.broadcast, Kind.scatter) else "dst"] = root
    return call


REDUCE_OPS = {
    Op.sum: dist.ReduceOp.SUM, Op.avg: dist.ReduceOp.AVG, Op.max: dist.ReduceOp.MAX, Op.min: dist.ReduceOp.MIN,
    Op.prod: dist.ReduceOp.PRODUCT, Op.band: dist.ReduceOp.BAND, Op.bor: dist.ReduceOp.BOR, Op.bxor: dist.ReduceOp.BXOR,
}  # fmt: skip
"""torch's names."""
_OPS = {theirs: ours for ours, theirs in REDUCE_OPS.items()}


@cache
def parse_dtype(dtype: torch.dtype) -> DType:
    """The library's own name. Raises DTypeError for a dtype that cannot be reduced."""
    name = str(dtype).removeprefix("torch.")
    if name not in DType.__members__:
        raise DTypeError(f"dtype {dtype} cannot be reduced; supported are {', '.join(DType.__members__)}")
    return DType[name]


def parse_reduction(dtype: torch.dtype, op: object) -> tuple[DType, Op]:
    """The library's own names. Raises DTypeError, or ArgumentError for an op that is none."""
    own = parse_dtype(dtype)
    if isinstance(op, str) and op in Op.__members__:
        parsed = Op[op]
    elif not isinstance(op, str) and isinstance(op, Hashable) and op in _OPS:
        parsed = _OPS[op]
    else:
        raise ArgumentError(f"op={op!r} is not a reduction; known are {', '.join(Op.__members__)}")
    if not supports(own, parsed):
        raise DTypeError(f"op={parsed.name} is not defined for dtype {dtype}")
    return own, parsed
