"""Reduce-scatter and all-reduce by a plan: executes the table of any ``schedule.plan.Plan`` that ``simulate`` accepts.

Every rank takes the rows of its table in order, once for each chunk: waits for the messages that the row names, adds
its own part, writes the result into the slot that the row names, and signals. Messages lie in the staging memory of the
receiver (of the sender, for a plan that pulls), and are announced on a line of its own for each sender (``steps``).

**Signals.** ``STEP_EPOCH`` counts, alike on all ranks; a plan whose busiest pair exchanges K messages takes K of it
a chunk, so message j of chunk k is announced by ``STEP_EPOCH + k · K + j + 1``. The data is written before the signal
is stored with release, and read after the wait has loaded it with acquire. A pair that a plan does not use keeps an
old word: whenever the count passes a multiple of 2³⁰, all words are brought up to date, long before a signed
difference could mistake an old one for a new one.

**Reuse.** The opening barrier (``meet``) says that all earlier calls are over, so all staging slots are free for the
plan, in two sets that chunks use in turn. A rank that has finished chunk k holds a contribution of every rank to it;
so all have begun it, and finished chunk k - 1: set (k + 1) mod 2 may be written (``schedule.plan``). At the end a
rank has read all that came to it, and nobody writes to it any more: nothing needs to close a plan that pushes. One that
pulls closes with a barrier, as peers may still read this rank's slots.

**Order of the sum**: the plan's, ``(x[first source] ∘ own) ∘ x[second source] ∘ …``, hence the same bits on every run;
they differ from the direct algorithms', which sum in rank order. Partial sums travel unrounded, in the type that
``schedule.dtypes.partial_dtype`` gives (float32 for floats of 16 and 8 bits, int64 for an average of integers), so
that each result is rounded once, as elsewhere in the library: a partial sum in float8_e4m3fn would saturate, and one of
int8 would wrap before it is divided. What a rank sends first are elements as they are, which costs nothing more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, njit, types

from symmcomm.kernels.compile import compile_once
from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import delay, meet, signal, sync, wait
from symmcomm.kernels.cpu.context import TILE_ELEMENTS
from symmcomm.kernels.cpu.elements import combine, finish, load, load_accumulator, store, store_accumulator
from symmcomm.kernels.cpu.primitives import call_5, load_i64, memcpy, store_i64, store_release
from symmcomm.kernels.cpu.windows import STAGED, slice_start
from symmcomm.memory.signals import LINE_BYTES, NUM_SLOTS
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.plan import KEEP, ROW_FIELDS, SOURCE_FIELDS

# Words of the block that a call is told: see ``collectives.ring``.
CALL, ITEMSIZE, ADD_ONE, ADD_MANY, PARTIAL_ITEMSIZE, ROWS, NUM_ROWS, ROW_WORDS = 0, 1, 2, 3, 4, 5, 6, 7
NUM_PLAN_SLOTS, NUM_SIGNALS, NUM_LANES, PULL, NUM_BLOCKS, TILE, SOURCES = 8, 9, 10, 11, 12, 13, 14
_SEGMENT, _LANE, _OWN, _TARGET, _SLOT, _SIGNAL, _PARTIAL, _NUM_SOURCES = range(len(ROW_FIELDS))
_FIRST_SOURCE, _SOURCE_WORDS = len(ROW_FIELDS), len(SOURCE_FIELDS)
_SENDER, _SENT_SLOT, _SENT_SIGNAL, _SENT_PARTIAL = range(len(SOURCE_FIELDS))
_KEEP = KEEP
_LAST, _WORLD = 1 << 8, 1 << 16  # how a sum ends, beside its number of sources in the lowest byte
_REFRESH = 30  # bits

_SIGNATURE = types.int64(types.int64, types.int64, types.int64, types.int64, types.int64)


def build(dtype: int, partial: int, op: int, itemsize: int, partial_itemsize: int, cached: bool = True) -> Any:
    """Compiles ``add(destination, own, sources, how, count) -> 0`` of one source, in one pass; see ``build_many``."""
    differs = partial != dtype  # else LLVM drops the loops over partial sums

    @cfunc(_SIGNATURE, cache=cached)
    def add(destination, own, sources, how, count):  # type: ignore[no-untyped-def]
        last, world_size = how & _LAST, how // _WORLD
        source, wide = load_i64(sources), differs and load_i64(sources + 8) != 0
        if last and wide:
            for i in range(count):
                value = combine(load(source, i, partial, op), load(own, i, dtype, op), dtype, op)
                store(destination, i, finish(value, world_size, dtype, op), dtype, op)
        elif last:
            for i in range(count):
                value = combine(load(source, i, dtype, op), load(own, i, dtype, op), dtype, op)
                store(destination, i, finish(value, world_size, dtype, op), dtype, op)
        elif wide:
            for i in range(count):
                value = combine(load(source, i, partial, op), load(own, i, dtype, op), dtype, op)
                store(destination, i, value, partial, op)
        else:
            for i in range(count):
                value = combine(load(source, i, dtype, op), load(own, i, dtype, op), dtype, op)
                store(destination, i, value, partial, op)
        return 0

    return add


def build_many(dtype: int, partial: int, op: int, itemsize: int, partial_itemsize: int, cached: bool = True) -> Any:
    """Compiles ``add(destination, own, sources, how, count) -> 0`` for one type and operation, of sources.

    ``own``: address of elements. ``sources``: address of pairs (address, whether it holds partial sums); the word
    before them is the address of room for TILE_ELEMENTS accumulators. ``how``: the number of sources, 1 or more, + 256
    if the result is the final one, + 65536 · the number of ranks.
    """
    differs = partial != dtype

    @cfunc(_SIGNATURE, cache=cached)
    def add(destination, own, sources, how, count):  # type: ignore[no-untyped-def]
        num, last, world_size, tile = how & 0xFF, how & _LAST, how // _WORLD, load_i64(sources - 8)
        for start in range(0, count, TILE_ELEMENTS):
            n, mine = min(TILE_ELEMENTS, count - start), own + start * itemsize
            for s in range(num):
                wide = differs and load_i64(sources + 16 * s + 8) != 0
                source = load_i64(sources + 16 * s) + start * (partial_itemsize if wide else itemsize)
                if s == 0 and wide:
                    for i in range(n):
                        value = combine(load(source, i, partial, op), load(mine, i, dtype, op), dtype, op)
                        store_accumulator(tile, i, value, dtype, op)
                elif s == 0:
                    for i in range(n):
                        value = combine(load(source, i, dtype, op), load(mine, i, dtype, op), dtype, op)
                        store_accumulator(tile, i, value, dtype, op)
                elif wide:
                    for i in range(n):
                        value = combine(load_accumulator(tile, i, dtype, op), load(source, i, partial, op), dtype, op)
                        store_accumulator(tile, i, value, dtype, op)
                else:
                    for i in range(n):
                        value = combine(load_accumulator(tile, i, dtype, op), load(source, i, dtype, op), dtype, op)
                        store_accumulator(tile, i, value, dtype, op)
            target = destination + start * (itemsize if last else partial_itemsize)
            if last:
                for i in range(n):
                    store(target, i, finish(load_accumulator(tile, i, dtype, op), world_size, dtype, op), dtype, op)
            else:
                for i in range(n):
                    store(target, i, load_accumulator(tile, i, dtype, op), partial, op)
        return 0

    return add


@cache
def addition(dtype: DType, partial: DType, op: Op, many: bool) -> int:
    """Address of the compiled addition; it lives as long as the process."""
    numbers = (int(dtype), int(partial), int(op), dtype.itemsize, partial.itemsize)
    function = compile_once(lambda: (build_many if many else build)(*numbers))
    _keep.append(function)
    return int(function.address)


_keep: list[Any] = []


@njit(cache=True, nogil=True)
def _get(block: int, word: int) -> int:
    return load_i64(block + 8 * word)


@njit(cache=True, nogil=True)
def _slot(ctx: int, owner: int, chunk: int, num_slots: int, slot: int, slot_bytes: int) -> int:
    """Address of a slot in the owner's staging memory, in the set of this chunk."""
    return c.peer_address(ctx, owner, c.get(ctx, c.STAGING) + ((chunk & 1) * num_slots + slot) * slot_bytes)


@njit(cache=True, nogil=True)
def _hear(ctx: int, block: int, row: int, chunk: int, slot_bytes: int) -> bool:
    """Waits for the row's messages and notes where they lie. False: stopped."""
    rank, epoch = c.get(ctx, c.RANK), c.get(ctx, c.STEP_EPOCH) + chunk * _get(block, NUM_SIGNALS) + 1
    for s in range(_get(row, _NUM_SOURCES)):
        source = row + 8 * (_FIRST_SOURCE + s * _SOURCE_WORDS)
        sender = _get(source, _SENDER)
        word = c.peer_address(ctx, rank, c.get(ctx, c.STEPS) + sender * LINE_BYTES)
        if not wait(ctx, word, epoch + _get(source, _SENT_SIGNAL), sender):
            return False
        owner = sender if _get(block, PULL) else rank
        where = _slot(ctx, owner, chunk, _get(block, NUM_PLAN_SLOTS), _get(source, _SENT_SLOT), slot_bytes)
        store_i64(block + 8 * (SOURCES + 2 * s), where)
        store_i64(block + 8 * (SOURCES + 2 * s + 1), _get(source, _SENT_PARTIAL))
    return True


@njit(cache=True, nogil=True)
def _step(ctx: int, block: int, row: int, chunk: int, own: int, kept: int, n: int, slot_bytes: int) -> bool:
    """One row for one chunk: ``n`` elements of its lane, at ``own`` in this rank's part, to ``kept`` if the result
    stays. False: stopped."""
    rank, target, itemsize = c.get(ctx, c.RANK), _get(row, _TARGET), _get(block, ITEMSIZE)
    if not _hear(ctx, block, row, chunk, slot_bytes):
        return False
    destination = kept
    if target != _KEEP:
        owner = rank if _get(block, PULL) else target
        destination = _slot(ctx, owner, chunk, _get(block, NUM_PLAN_SLOTS), _get(row, _SLOT), slot_bytes)
    num = _get(row, _NUM_SOURCES)
    if num == 0 or _get(row, _OWN) == 0:
        source = own if num == 0 else _get(block, SOURCES)
        if source != destination:
            memcpy(destination, source, n * itemsize)
    else:
        how = num + (_LAST if target == _KEEP else 0) + _WORLD * c.get(ctx, c.WORLD_SIZE)
        add = _get(block, ADD_ONE) if num == 1 else _get(block, ADD_MANY)
        call_5(add, destination, own, block + 8 * SOURCES, how, n)
    if target != _KEEP:
        delay(ctx)
        epoch = c.get(ctx, c.STEP_EPOCH) + chunk * _get(block, NUM_SIGNALS) + _get(row, _SIGNAL) + 1
        signal(c.peer_address(ctx, target, c.get(ctx, c.STEPS) + rank * LINE_BYTES), epoch)
    return True


@njit(cache=True, nogil=True)
def _advance(ctx: int, by: int) -> None:
    """Counts the call's signals; all words are brought up to date now and then, see the module."""
    before = c.get(ctx, c.STEP_EPOCH)
    c.put(ctx, c.STEP_EPOCH, before + by)
    if before >> _REFRESH != (before + by) >> _REFRESH:
        rank = c.get(ctx, c.RANK)
        for peer in range(c.get(ctx, c.WORLD_SIZE)):
            word = c.peer_address(ctx, peer, c.get(ctx, c.STEPS) + rank * LINE_BYTES)
            store_release(word, (before + by) & 0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _chunk_elements(ctx: int, block: int, part: int) -> int:
    """Elements of a part that go at a time: as many chunks as asked for, or as fit the slots; whole lines a lane."""
    num_slots, lanes, itemsize = _get(block, NUM_PLAN_SLOTS), _get(block, NUM_LANES), _get(block, ITEMSIZE)
    slot_bytes = NUM_SLOTS * c.get(ctx, c.SLOT_BYTES) // (2 * num_slots)
    most = min(slot_bytes // _get(block, PARTIAL_ITEMSIZE), c.get(ctx, c.CHUNK_BYTES) // itemsize) // 64 * 64 * lanes
    num_chunks = max(1, _get(block, NUM_BLOCKS), -(-part // most))
    return min(most, -(-part // (num_chunks * lanes * 64)) * lanes * 64)


@njit(cache=True, nogil=True)
def _ring(ctx: int, block: int, output: int, tensor: int, count: int, whole: bool) -> int:
    world_size, itemsize = c.get(ctx, c.WORLD_SIZE), _get(block, ITEMSIZE)
    status = meet(ctx, _get(block, CALL), count, STAGED, 0)
    if status != c.OK:
        return status
    part = slice_start(count, world_size, 1, itemsize) if whole else count
    if part == 0:
        return c.OK
    per_chunk, num_rows = _chunk_elements(ctx, block, part), _get(block, NUM_ROWS)
    per_lane = per_chunk // _get(block, NUM_LANES)
    slot_bytes = per_lane * _get(block, PARTIAL_ITEMSIZE)
    num_chunks = -(-part // per_chunk)
    for chunk in range(num_chunks):
        for r in range(num_rows):
            row = _get(block, ROWS) + 8 * r * _get(block, ROW_WORDS)
            segment = _get(row, _SEGMENT)
            start = slice_start(count, world_size, segment, itemsize) if whole else segment * count
            size = slice_start(count, world_size, segment + 1, itemsize) - start if whole else count
            at = chunk * per_chunk + _get(row, _LANE) * per_lane
            own, kept = tensor + (start + at) * itemsize, output + ((start if whole else 0) + at) * itemsize
            n = max(0, min(per_lane, size - at))
            if not _step(ctx, block, row, chunk, own, kept, n, slot_bytes):
                return c.STOPPED
    _advance(ctx, num_chunks * _get(block, NUM_SIGNALS))
    if _get(block, PULL) and not sync(ctx):
        return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def ring(ctx: int, block: int, output: int, tensor: int, count: int, whole: int) -> int:
    """By the block's plan (see ``collectives.ring``): with ``whole``, the all-reduce of ``count`` elements at
    ``tensor``, which is the output too; else part ``rank`` of the reduction of ``world_size`` × ``count`` elements."""
    if not c.enter(ctx):
        return c.REFUSED
    if c.get(ctx, c.WORLD_SIZE) == 1:
        if output != tensor:
            memcpy(output, tensor, count * _get(block, ITEMSIZE))
        return c.leave(ctx, c.OK)
    return c.leave(ctx, _ring(ctx, block, output, tensor, count, whole != 0))
