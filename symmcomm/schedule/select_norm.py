"""Which GPU kernel norms rows, alone or fused with a collective, and how large: pure functions of what all ranks know
alike, so that all launch the same grid.

``*_shape`` says what can be done and how (None: it cannot), ``choose_*`` what should be. Sizes are where the curves
measured on two H200s cross. ``hidden`` is the elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import MOST_VECTORS, NUM_LAMPORT_CHANNELS, NUM_STAGED_CHANNELS, VECTOR_BYTES, Layout

MAX_HIDDEN = 32768
"""The largest row, in elements."""
MAX_CTAS = 64
"""Most CTAs that a caller can hold a kernel on symmetric memory to."""
DTYPES = (DType.float32, DType.float16, DType.bfloat16)
HEAD_DIMS = (64, 128, 256)

_CLUSTERS_FROM = 90
_LAMPORT_BYTES = 16 << 20  # of all rows, up to which it was measured to pay between two ranks
_TWO_SHOT_FROM = 4  # ranks, from which on two shots send less
_ONE_SHOT_BYTES = 8 << 20  # sent by a rank, up to which that does not pay for two kernels more (modelled)
_STAGED_THREADS = 512  # a CTA: each has registers for its vectors of three rows
_MOST_STAGED = 8  # ranks whose vectors a thread's registers hold at once
_MOST_PIECES = 8  # of a row, whose sums registers hold
_MANY_CHUNKS = 8  # a CTA: about where lines through the times of both chunk sizes cross
_DIRECT_GRID = 64
_QK_WARPS = 4


class Form(Enum):
    """How the ranks' rows come together."""

    lamport = "Lamport"
    staged = "staged"
    direct = "direct"


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """A norm kernel's shape.

    Attributes:
        grid: CTAs. threads: a row (Lamport: a CTA). rows: of a CTA at a time.
        unroll: vectors of 16 bytes a thread; staged: of each piece.
        cluster: CTAs a row, Lamport only.
        pieces: chunks a row, staged only.
    """

    form: Form | None
    grid: int
    threads: int
    unroll: int
    rows: int = 1
    cluster: int = 1
    pieces: int = 1


@dataclass(frozen=True, kw_only=True)
class HeadLaunch:
    """The shape of QK-norm's kernel, which has the CTAs that heads and tokens need.

    Attributes:
        lanes: threads a head. vectors: of 16 bytes a thread.
        tokens: of a head at a time. warps: a CTA.
    """

    lanes: int
    vectors: int
    tokens: int
    warps: int


def part_rows(rows: int, world_size: int) -> int:
    """Rows that every rank owns, the last ranks' excepted: ``torch.chunk``'s rule."""
    return -(-rows // world_size)


def slice_rows(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The first row that the rank owns, and how many."""
    part = part_rows(rows, world_size)
    first = min(rank * part, rows)
    return first, min(part, rows - first)


def row_vectors(hidden: int, dtype: DType) -> int:
    """Vectors of 16 bytes that hold a row."""
    return -(-hidden * dtype.itemsize // VECTOR_BYTES)


def are_aligned(hidden: int, dtype: DType, *bytes_: int) -> bool:
    """Whether rows are whole vectors, and all given addresses and pitches are multiples of one."""
    bits = hidden * dtype.itemsize
    for value in bytes_:
        bits |= value
    return bits % VECTOR_BYTES == 0


def norm_shape(rows: int, hidden: int, dtype: DType, num_sms: int) -> RowLaunch:
    """RMSNorm alone. Decode: as many threads a row as it has vectors, so that each has one; prefill: fewer threads with
    more vectors each, which keeps more in flight."""
    vectors = row_vectors(hidden, dtype)
    if vectors <= 32:
        threads = _team_threads(vectors)
        a_cta = max(1, min(8, -(-rows // num_sms))) * max(1, 32 // threads)
        return RowLaunch(form=None, grid=max(1, -(-rows // a_cta)), threads=threads, unroll=1, rows=a_cta)
    unroll = 1 if rows <= 2 * num_sms else 4 if vectors >= 512 else 2
    threads = min(1024, max(32, -(-vectors // (32 * unroll)) * 32))
    return RowLaunch(form=None, grid=rows, threads=threads, unroll=-(-vectors // threads))


def qk_norm_shape(tokens: int, heads: int, head_dim: int, dtype: DType, num_sms: int) -> HeadLaunch:
    """QK-norm of that many heads a token, queries' and keys'."""
    vectors = row_vectors(head_dim, dtype)
    lanes = min(32, vectors)
    teams = 32 * _QK_WARPS // lanes
    together = 1 if tokens * heads <= 8 * teams * num_sms else 2
    return HeadLaunch(lanes=lanes, vectors=vectors // lanes, tokens=together, warps=_QK_WARPS)


def lamport_shape(rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int, arch: int) -> RowLaunch | None:
    """The Lamport kernel for that many rows: as many CTAs a row, and as few vectors a thread, as one wave allows; or a
    CTA for several rows, as far as they fit a slot."""
    room = Layout.create(world_size).lamport_slot_bytes // VECTOR_BYTES
    vectors, most = row_vectors(hidden, dtype), max(1, min(NUM_LAMPORT_CHANNELS, num_sms))
    for unroll in [each for each in (1, 2, 4) if world_size * each <= MOST_VECTORS]:
        for cluster in (8, 4, 2, 1) if arch >= _CLUSTERS_FROM else (1,):
            threads = -(-max(vectors, world_size * unroll * cluster) // (32 * unroll * cluster)) * 32
            if cluster > 1 and threads < 128:
                continue  # more warps pay more than more CTAs
            turns = -(-rows // most) if cluster == 1 else 1
            if threads <= 1024 and turns * threads * unroll <= room and (turns > 1 or rows * cluster <= most):
                grid = min(most, rows * cluster)
                return RowLaunch(form=Form.lamport, grid=grid, threads=threads, unroll=unroll, cluster=cluster)
    return None


def staged_shape(rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int) -> RowLaunch | None:
    """The staged kernel for that many rows on each rank; None where a row takes too many pieces, or there are too many
    ranks for a thread's registers. Large chunks once a CTA has several, small ones before."""
    vectors, slot = row_vectors(hidden, dtype), Layout.create(world_size).staging_slot_bytes // VECTOR_BYTES
    most = max(1, min(NUM_STAGED_CHANNELS, num_sms))
    unroll = 1 if world_size > 4 else 2 if world_size > 2 or rows * vectors < _MANY_CHUNKS * most * slot else 4
    for pieces in range(1, _MOST_PIECES + 1 if world_size <= _MOST_STAGED else 0):
        threads = _team_threads(-(-vectors // (pieces * unroll)))
        room = min(_STAGED_THREADS // threads, slot // (threads * unroll))
        if room > 0:
            a_warp = max(1, 32 // threads)
            together = min(room, max(1, -(-rows // (most * a_warp))) * a_warp) if pieces == 1 else 1
            grid = max(1, min(most, -(-rows // together)))
            return RowLaunch(
                form=Form.staged, grid=grid, threads=threads, unroll=unroll, rows=together, pieces=pieces
            )
    return None


def _team_threads(num: int) -> int:
    """At least that many threads: a power of two up to a warp, else whole warps."""
    return 1 << max(0, num - 1).bit_length() if num <= 32 else -(-num // 32) * 32


def direct_shape(
    rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int, max_ctas: int | None = None
) -> RowLaunch:
    """The kernel on symmetric memory, for that many rows on each rank. A CTA has several in flight, where registers
    hold them."""
    vectors = row_vectors(hidden, dtype)
    grid = max(1, min(rows, num_sms, _DIRECT_GRID if max_ctas is None else max_ctas))
    threads = min(1024, -(-vectors // 32) * 32)
    unroll = -(-vectors // threads)
    batch = 2 if world_size == 2 and unroll == 1 and rows > grid else 1
    return RowLaunch(form=Form.direct, grid=grid, threads=threads, unroll=unroll, rows=batch)


def choose_all_reduce_norm(
    rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int, arch: int, symmetric: bool = False,
    lamport: bool = True,
) -> RowLaunch | None:
    """All-reduce and norm of ``rows`` rows; None: reduce-scatter and norm, then all-gathers, which send less between
    many ranks. ``symmetric``: source and both outputs are, at the same offsets on all ranks; else the form is one for
    ordinary tensors. ``lamport``: whether 16 bytes reach a peer in one piece, which that protocol needs."""
    sent = rows * hidden * dtype.itemsize * (world_size - 1)
    if lamport and sent * world_size <= 2 * _LAMPORT_BYTES:
        shape = lamport_shape(rows, hidden, dtype, world_size, num_sms, arch)
        if shape is not None:
            return shape
    if symmetric and world_size >= _TWO_SHOT_FROM:
        return direct_shape(part_rows(rows, world_size), hidden, dtype, world_size, num_sms, num_sms)
    if world_size < _TWO_SHOT_FROM or sent <= _ONE_SHOT_BYTES:
        return staged_shape(rows, hidden, dtype, world_size, num_sms)
    return None


def choose_reduce_scatter_norm(
    rows: int, hidden: int, dtype: DType, world_size: int, num_sms: int, arch: int, lamport: bool = True
) -> RowLaunch | None:
    """Reduce-scatter and norm of ``rows`` rows in all, of any tensors; None: a reduce-scatter, then a norm."""
    part = part_rows(rows, world_size)
    if lamport and part * hidden * dtype.itemsize * world_size * (world_size - 1) <= 2 * _LAMPORT_BYTES:
        shape = lamport_shape(part, hidden, dtype, world_size, num_sms, arch)
        if shape is not None:
            return shape
    return staged_shape(part, hidden, dtype, world_size, num_sms)
