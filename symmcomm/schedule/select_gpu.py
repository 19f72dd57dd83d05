"""Which GPU kernel, and how large: pure functions of what all ranks know alike, so that all launch the same grid.

``*_shape`` says what can be done and how, ``choose_*`` what should be. *Part* is what goes from one rank to one other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import (
    LL_CELL_BYTES,
    MOST_VECTORS,
    NUM_CHANNELS,
    NUM_LAMPORT_CHANNELS,
    NUM_STAGED_CHANNELS,
    VECTOR_BYTES,
    Layout,
    ll_words,
)
from symmcomm.schedule.select import NEVER

_WAVES = (  # threads, LL cells (or vectors) a thread, and CTAs up to which they are used
    (128, 1, 64), (256, 1, 80), (512, 1, 128), (384, 2, 128), (1024, 1, 128), (512, 3, 128), (1024, 1, NUM_CHANNELS),
    (1024, 2, NUM_CHANNELS), (512, 4, NUM_CHANNELS),
)  # fmt: skip
_MANY_RANKS = 4  # more than which a thread has one vector a turn, and more registers
_LAMPORT_THREADS = ((128, 256, 512), (128, 256, 384))
_EARLY_THREADS = 2560  # a CTA, times two more than there are ranks
_WAIT_BYTES = 512 << 10  # that pass a link while a rank waits once more: so many more than two shots may one shot send
_SWITCH_ALIGNMENT = 16  # bytes that the switch takes at once
_LAMPORT_FROM = 48 << 10  # bytes of a part, from which on flags cost more than that slots are cleared
_STAGED_SHAPES = ((1 << 20, 8 << 10, 256), (8 << 20, 16 << 10, 256))  # parts below, bytes of a chunk, threads
_LARGEST_STAGED = (32 << 10, 512)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Sizes at which the choice changes, the same on all ranks. The defaults are where the curves measured on two H200s
    cross; ``symmcomm tune`` measures some of them elsewhere (``bench.tune.CONTESTS``).

    Attributes:
        lamport_bytes: of a part, up to which the Lamport protocol (``kernels.gpu.lamport``) is used; it never lost
            where measured, hence no bound. The next four apply where it cannot be used: small calls, and some sizes
            between three ranks and more.
        all_reduce_ll_bytes: of the tensor, up to which LL pays in an all-reduce between two ranks.
        one_shot_bytes: that an all-reduce sends in one shot, up to which it pays where LL does not.
        ll_bytes: of a part, up to which LL pays in the other calls between two ranks.
        pull_bytes: of a part, from which on pulling from symmetric sources beats staging, in a reduce-scatter.
        all_reduce_push_bytes: of a symmetric tensor, from which on pushing beats all else in an all-reduce.
        gather_push_bytes: of a part, from which on pushing into symmetric targets does in the calls that move data;
            pulling from symmetric sources is next there, beyond ``lamport_bytes``.
        copy_engine_bytes: of a part, from which on the copy engines beat kernels.
        multimem_bytes: of a symmetric tensor, from which on the NVLink switch moves and reduces it. Never by default:
            nobody has seen it pay yet.
    """

    lamport_bytes: int = NEVER
    all_reduce_ll_bytes: int = 3 << 19
    one_shot_bytes: int = 2 << 20
    ll_bytes: int = 7 << 18
    pull_bytes: int = 8 << 20
    all_reduce_push_bytes: int = 16 << 20
    gather_push_bytes: int = 64 << 20
    copy_engine_bytes: int = 128 << 20
    multimem_bytes: int = NEVER


DEFAULT = Thresholds()


class Algorithm(Enum):
    """How the data goes."""

    ll = "LL"
    lamport = "Lamport"
    ll_two_shot = "LL two-shot"
    one_shot = "one-shot"
    two_shot = "two-shot"
    push = "push"
    pull = "pull"
    staged = "staged"
    copy_engine = "copy engine"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel's shape.

    Attributes:
        grid: CTAs.
        threads: threads a CTA.
        unroll: LL cells, or vectors in flight, a thread.
        chunk_bytes: of a part at a time, in staged kernels.
        slots: Lamport: 0 for one turn, 1 if all turns fit one slot, 2 if they need more.
        multimem: whether the NVLink switch moves and reduces, in kernels that can.
    """

    algorithm: Algorithm
    grid: int
    threads: int
    unroll: int
    chunk_bytes: int = 0
    slots: int = 0
    multimem: bool = False


def without_ll(at: Thresholds) -> Thresholds:
    """The same where links may deliver 16 bytes in parts (``topology_gpu.decide_vectors``): neither LL nor
    Lamport."""
    return replace(at, lamport_bytes=0, ll_bytes=0, all_reduce_ll_bytes=0)


def slice_bytes(num_bytes: int, world_size: int) -> int:
    """What each rank reduces of an all-reduce in two shots, the last ranks' excepted."""
    return -(-num_bytes // (16 * world_size)) * 16


def ll_shape(
    part_bytes: int, world_size: int, num_sms: int, algorithm: Algorithm = Algorithm.ll, itemsize: int = 1
) -> Launch | None:
    """The LL kernel for parts of that size, with elements of ``itemsize``: one wave, as few cells a thread as do; None
    where it does not fit."""
    room = Layout.create(world_size).ll_slot_bytes // LL_CELL_BYTES
    return _wave_shape(max(1, -(-part_bytes // (4 * ll_words(itemsize)))), num_sms, algorithm, room)


def _wave_shape(num_units: int, num_sms: int, algorithm: Algorithm, room: int) -> Launch | None:
    """As few units a thread as do, at most ``room`` a CTA; None where one wave does not hold them."""
    for threads, unroll, most in _WAVES:
        grid = -(-num_units // (threads * unroll))
        if grid <= min(most, num_sms) and threads * unroll <= room:
            return Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll)
    return None


def granule(bits: int) -> int:
    """The largest of 16, 4, 2, 1 of which numbers are multiples that, or-ed, are ``bits``."""
    return next(each for each in (16, 4, 2, 1) if bits % each == 0)


def lamport_shape(part_bytes: int, world_size: int, num_sms: int) -> Launch | None:
    """The Lamport kernel for parts of that size: one turn of as few threads as do, else several, of as many vectors a
    thread as registers hold of all ranks, at least two of which fit a slot: no turn waits for a signal just sent (see
    ``kernels.gpu.lamport``). None where a thread has no room for a vector of each rank."""
    sizes, unroll = _LAMPORT_THREADS[world_size > _MANY_RANKS], 2 if world_size <= _MANY_RANKS else 1
    if world_size * unroll > MOST_VECTORS:
        return None
    room = Layout.create(world_size).lamport_slot_bytes // VECTOR_BYTES
    num_vectors, most = max(1, -(-part_bytes // VECTOR_BYTES)), max(1, min(NUM_LAMPORT_CHANNELS, num_sms))
    fitting = [each for each in sizes if each <= room and each * most >= num_vectors]
    unroll = 1 if fitting else unroll
    threads = fitting[0] if fitting else min(sizes[-1], room // (64 * unroll) * 32)
    assert threads >= world_size, "each thread signals one"
    pieces = -(-num_vectors // (threads * unroll))
    grid = min(most, pieces)
    slots = 0 if fitting else 1 if -(-pieces // grid) * threads * unroll <= room else 2
    return Launch(algorithm=Algorithm.lamport, grid=grid, threads=threads, unroll=unroll, slots=slots)


def may_start_early(shape: Launch, world_size: int, granule: int = 16) -> bool:
    """Whether a kernel may take its place while the last one still runs (``kernels.gpu.context``): if it is so small
    that a CTA of it, one that waits behind it, and one of another communicator fit on an SM together. Its threads have
    registers for what comes from each rank; those of the Lamport protocol need more where tensors are not aligned."""
    is_small = shape.algorithm in (Algorithm.ll, Algorithm.lamport, Algorithm.ll_two_shot) and shape.unroll == 1
    has_room = shape.threads * (world_size + 2) <= _EARLY_THREADS
    return is_small and has_room and shape.slots == 0 and granule == 16


def two_shot_shape(num_bytes: int, dtype: DType, world_size: int, num_sms: int) -> Launch:
    """The two-shot kernel: enough CTAs to fill the links, enough loads in flight to cover their latency."""
    unroll = _unroll(dtype, world_size)
    grid, threads = 128, 1024
    if num_bytes <= 4 << 20:
        grid, threads = 64, 256
    elif unroll < 4 or dtype.itemsize > 4:  # 1024 threads have 64 registers each
        grid, threads = 64, 512
    elif num_bytes <= 64 << 20:
        grid, threads, unroll = 128, 256, 2 * unroll
    vectors = -(-num_bytes // (16 * world_size))
    grid = min(grid, num_sms, max(1, -(-vectors // threads)))
    return Launch(algorithm=Algorithm.two_shot, grid=grid, threads=threads, unroll=unroll)


def staged_shape(
    part_bytes: int, world_size: int, num_sms: int, dtype: DType | None = None, algorithm: Algorithm = Algorithm.staged
) -> Launch:
    """A staged kernel, which reduces elements of ``dtype`` or moves bytes: small chunks until a CTA has several."""
    slot = Layout.create(world_size).staging_slot_bytes
    shapes = [shape for below, *shape in _STAGED_SHAPES if part_bytes < below]
    chunk_bytes, threads = shapes[0] if shapes else _LARGEST_STAGED
    chunk_bytes = min(chunk_bytes, slot)
    most = 4 if dtype is None else _unroll(dtype, world_size)
    return Launch(
        algorithm=algorithm,
        grid=max(1, min(NUM_STAGED_CHANNELS, num_sms, -(-part_bytes // chunk_bytes))),
        threads=threads,
        unroll=max(1, min(most, chunk_bytes // (16 * threads))),
        chunk_bytes=chunk_bytes,
    )


def uneven_shape(world_size: int, num_sms: int) -> Launch:
    """The uneven all-to-all: nobody knows all its sizes, so there is one shape."""
    slot = Layout.create(world_size).staging_slot_bytes
    grid = min(NUM_STAGED_CHANNELS // 2, num_sms)
    chunk_bytes, threads = _LARGEST_STAGED
    chunk_bytes = min(slot, chunk_bytes)
    return Launch(algorithm=Algorithm.staged, grid=grid, threads=threads, unroll=4, chunk_bytes=chunk_bytes)


def direct_shape(
    part_bytes: int, num_sms: int, algorithm: Algorithm, dtype: DType | None = None, world_size: int = 1
) -> Launch:
    """The push and pull kernels; with a ``dtype`` they reduce."""
    unroll = 8 if dtype is None else _unroll(dtype, world_size)
    threads = 256 if part_bytes <= (1 << 20 if dtype is not None else 16 << 20) else 512
    if unroll == 4 and dtype is not None and dtype.itemsize <= 4 and part_bytes > 4 << 20:
        threads = 1024
    grid = min(64 if part_bytes <= 4 << 20 else 128, num_sms, max(1, -(-part_bytes // (16 * threads))))
    return Launch(algorithm=algorithm, grid=grid, threads=threads, unroll=unroll)


def by_switch(num_bytes: int, offset: int, pitch: int, at: Thresholds) -> bool:
    """Whether the NVLink switch should move or reduce a symmetric tensor of ``num_bytes`` at that heap offset, whose
    parts are ``pitch`` bytes apart (0: it has one), if it can."""
    return num_bytes >= at.multimem_bytes and (offset | pitch) % _SWITCH_ALIGNMENT == 0


def switch_shape(num_bytes: int, dtype: DType, world_size: int, num_sms: int) -> Launch:
    """The all-reduce by the switch. With one shot, which spares a wait for stores, every rank fetches all of the sum,
    so a link carries ``world_size`` times the data to the switch, not 1 + 1 / world_size times. Only where the order of
    a sum, which the switch may choose anew for each rank, cannot show: all ranks get the same bits."""
    shape: Launch | None = None
    more = num_bytes * world_size - num_bytes * (world_size + 1) // world_size
    in_any_order = world_size == 2 or not dtype.is_floating_point
    if in_any_order and more <= _WAIT_BYTES and num_bytes % _SWITCH_ALIGNMENT == 0:
        shape = _wave_shape(num_bytes // _SWITCH_ALIGNMENT, num_sms, Algorithm.pull, NEVER)
    return replace(shape or two_shot_shape(num_bytes, dtype, world_size, num_sms), multimem=True)


def choose(
    num_bytes: int, dtype: DType, world_size: int, num_sms: int, symmetric: bool = True, at: Thresholds = DEFAULT,
    multimem: bool = False,
) -> Launch:  # fmt: skip
    """The all-reduce for tensors of ``num_bytes`` on a device with ``num_sms`` SMs for this rank. Unless ``symmetric``,
    one that takes any tensors. ``multimem``: the switch reduces them (``by_switch``).

    LL sends world_size - 1 times the data, and a third of it as flags, but waits once, and so do Lamport and one-shot,
    without flags; two-shot kernels send 2 - 2 / world_size times the data (LL with flags) and wait twice.
    """
    if multimem:
        return switch_shape(num_bytes, dtype, world_size, num_sms)
    sent, part = num_bytes * (world_size - 1), slice_bytes(num_bytes, world_size)
    shape: Launch | None = None
    if symmetric and num_bytes >= at.all_reduce_push_bytes:
        shape = staged_shape(part, world_size, num_sms, dtype, Algorithm.push)
    if shape is None:
        pays = sent - sent * 8 // (3 * world_size) <= _WAIT_BYTES
        is_small = sent * world_size <= 2 * at.all_reduce_ll_bytes
        shape = _one_way(num_bytes, world_size, num_sms, is_small, at.lamport_bytes if pays else 0, dtype.itemsize)
    if shape is None and sent <= at.one_shot_bytes:
        shape = staged_shape(num_bytes, world_size, num_sms, dtype, Algorithm.one_shot)
    if shape is None and not symmetric:
        if at.ll_bytes:
            shape = ll_shape(part, world_size, num_sms, Algorithm.ll_two_shot, dtype.itemsize)
        shape = shape or staged_shape(part, world_size, num_sms, dtype)
    return shape or two_shot_shape(num_bytes, dtype, world_size, num_sms)


def choose_reduce_scatter(
    part_bytes: int, dtype: DType, world_size: int, num_sms: int, source_symmetric: bool = False,
    at: Thresholds = DEFAULT, multimem: bool = False,
) -> Launch:  # fmt: skip
    """The reduce-scatter of parts of that size. ``source_symmetric`` (pull) asks that no output but the own part is in
    an input. ``multimem``: the switch reduces them, which asks for the same."""
    if multimem:
        return replace(direct_shape(part_bytes, num_sms, Algorithm.pull, dtype, world_size), multimem=True)
    is_small = _is_small(part_bytes, world_size, at)
    shape = _one_way(part_bytes, world_size, num_sms, is_small, at.lamport_bytes, dtype.itemsize)
    if shape is not None:
        return shape
    if source_symmetric and part_bytes >= at.pull_bytes:
        return direct_shape(part_bytes, num_sms, Algorithm.pull, dtype, world_size)
    return staged_shape(part_bytes, world_size, num_sms, dtype)


def choose_all_gather(
    part_bytes: int, world_size: int, num_sms: int, source_symmetric: bool = False, target_symmetric: bool = False,
    at: Thresholds = DEFAULT, copy_engine: bool = False, multimem: bool = False,
) -> Launch:  # fmt: skip
    """All-gather, even all-to-all, broadcast or scatter of parts of that size.

    ``target_symmetric`` (push) asks that the source is not in the target, but for the part that stays;
    ``source_symmetric`` (pull) that nothing is written where peers read; ``copy_engine`` that the caller has a
    ``kernels.gpu.copy_engine``, which is no kernel. ``multimem``: the switch brings the same to all, which asks for
    what push does.
    """
    if multimem:
        return replace(direct_shape(part_bytes, num_sms, Algorithm.push), multimem=True)
    if target_symmetric and part_bytes >= at.gather_push_bytes:
        if copy_engine and part_bytes >= at.copy_engine_bytes:
            return Launch(algorithm=Algorithm.copy_engine, grid=1, threads=32, unroll=1)
        return direct_shape(part_bytes, num_sms, Algorithm.push)
    shape = _one_way(part_bytes, world_size, num_sms, _is_small(part_bytes, world_size, at), at.lamport_bytes)
    if shape is None and source_symmetric and part_bytes >= at.gather_push_bytes:
        shape = direct_shape(part_bytes, num_sms, Algorithm.pull)
    return shape or staged_shape(part_bytes, world_size, num_sms)


def _one_way(
    part_bytes: int, world_size: int, num_sms: int, is_small: bool, lamport_bytes: int, itemsize: int = 1
) -> Launch | None:
    """LL for parts that are small, Lamport for the others up to ``lamport_bytes``; None where neither fits."""
    flagged = ll_shape(part_bytes, world_size, num_sms, itemsize=itemsize) if is_small else None
    if flagged is not None and part_bytes < _LAMPORT_FROM:
        return flagged
    lamport = lamport_shape(part_bytes, world_size, num_sms) if part_bytes <= lamport_bytes else None
    return lamport or flagged


def _is_small(part_bytes: int, world_size: int, at: Thresholds) -> bool:
    return part_bytes * world_size * (world_size - 1) <= 2 * at.ll_bytes


def _unroll(dtype: DType, num_sources: int) -> int:
    """Vectors of each source that a thread's registers hold at once."""
    unroll = 4 if num_sources == 2 else 2 if num_sources <= 4 else 1
    return min(unroll, 2) if dtype.itemsize == 1 else unroll  # many accumulators a vector
