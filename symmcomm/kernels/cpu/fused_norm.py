"""Collectives with RMSNorm inside: each row is summed over the ranks, normed and passed on while it is in the cache.

The row sums of ``norm.add`` take the ranks in order, and one row is computed from the same numbers wherever it is
computed: all ranks get the same bits, and those of ``all_reduce`` where the sum is kept as the new residual.

**All rows on every rank** (``ALL_REDUCE``; small, or two ranks): each rank copies its input into its slot, in chunks;
barrier; each sums all ranks' slots and norms every row. The next chunk is in its slot and signalled before that.

**Own rows** (``SCATTER``): as a reduce-scatter, rank r sums and norms rows r·⌈rows/W⌉ and on; each chunk has a lane
to each other rank for its rows. ``SCATTER_GATHER``, and ``ALL_REDUCE`` of more data, then pass the results on,
as an all-gather does. An ``ALL_REDUCE`` passes on two, out and new residual: with two ranks 1.5 times the data of the
first form. ``GATHER`` passes on rows that were normed without peers.

Steps, slots and waits are those of ``all_reduce``, ``reduce_scatter`` and ``all_gather``, by the rule of reuse
(``barrier``): what is in slot e, peers read after they pass e and before they arrive at e + 2. A symmetric input is
read where it lies. Then no rank may change it before all have read it: the barriers of passing on see to that, else
a closing one. In ``SCATTER`` and what begins like it rank r alone reads the rows r of all inputs, and before the
closing barrier writes no others, so results may take the input's place. In the first form they may not,
and an input that a result replaces is staged even if it is symmetric.

Where all ranks' outputs are symmetric, who norms a row writes it at all ranks (``_publish``), and out is not passed on.
It may be the input as well: a row is written when it is whole, so after all have staged all of it.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu import norm as job
from symmcomm.kernels.cpu.barrier import VOTE, arrive, await_peers, described, meet, sync
from symmcomm.kernels.cpu.primitives import call_2, call_5, load_i64, memcpy, store_i64
from symmcomm.kernels.cpu.windows import IN_LANE, STAGED, note_sources, own_lane, own_slot, source_of, window

ALL_REDUCE, SCATTER_GATHER, SCATTER, GATHER = 0, 1, 2, 3  # values of the job's FORM


@njit(cache=True, nogil=True)
def _field(task: int, field: int) -> int:
    return load_i64(task + 8 * field)


@njit(cache=True, nogil=True)
def _length(count: int, part: int, index: int) -> int:
    """Elements of part ``index`` of ``count`` cut into parts of ``part``: the last ones are shorter or empty."""
    return max(0, min(part, count - index * part))


@njit(cache=True, nogil=True)
def _publish(ctx: int, task: int, row: int) -> None:
    """Writes a normed row into the peers' outputs, whose offsets ``_agree_to_publish`` kept."""
    rank, world_size, pitch = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), _field(task, job.OUT_PITCH)
    for hop in range(1, world_size):
        peer = (rank + hop) % world_size
        offset = load_i64(c.get(ctx, c.INCOMING) + 8 * peer) + row * pitch
        memcpy(c.peer_address(ctx, peer, offset), _field(task, job.OUT) + row * pitch, pitch)


@njit(cache=True, nogil=True)
def _consume(ctx: int, task: int, at: int, count: int, num: int, publishes: bool) -> None:
    """Adds elements ``at`` and on of all rows, whose ``num`` sources' addresses are in ADDRESSES; norms each row that
    they complete."""
    hidden, itemsize, addresses = _field(task, job.HIDDEN), _field(task, job.ITEMSIZE), c.get(ctx, c.ADDRESSES)
    while count > 0:
        row, column = at // hidden, at % hidden
        n = min(count, hidden - column)
        call_5(_field(task, job.ADD), task, num, row, column, n)
        if column + n == hidden:
            call_2(_field(task, job.NORMALISE), task, row)
            if publishes:
                _publish(ctx, task, row)
        for source in range(num):
            store_i64(addresses + 8 * source, load_i64(addresses + 8 * source) + n * itemsize)
        at += n
        count -= n


@njit(cache=True, nogil=True)
def _per_chunk(ctx: int, num_areas: int, itemsize: int) -> int:
    """Elements of a chunk of each part: whole cache lines."""
    budget = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES))
    return max(64, budget // num_areas // 64 * 64) // itemsize


@njit(cache=True, nogil=True)
def _copy_in(ctx: int, task: int, epoch: int, at: int, num_areas: int) -> None:
    """Elements ``at`` and on of each part of the input into the epoch's lane to who sums it; of the one part that all
    sum, into the slot."""
    itemsize, tensor = _field(task, job.ITEMSIZE), _field(task, job.INPUT)
    count, part = _field(task, job.ROWS) * _field(task, job.HIDDEN), _part(task, num_areas)
    per_chunk = _per_chunk(ctx, num_areas, itemsize)
    for hop in range(max(num_areas - 1, 1)):
        area = (c.get(ctx, c.RANK) + 1 + hop) % num_areas
        n = min(per_chunk, _length(count, part, area) - at)
        if n > 0:
            target = own_lane(ctx, epoch, area) if num_areas > 1 else own_slot(ctx, epoch)
            memcpy(target, tensor + (area * part + at) * itemsize, n * itemsize)


@njit(cache=True, nogil=True)
def _part(task: int, num_areas: int) -> int:
    """Elements of a part: whole rows."""
    return -(-_field(task, job.ROWS) // num_areas) * _field(task, job.HIDDEN)


@njit(cache=True, nogil=True)
def _sum_rows(ctx: int, task: int, source: int, num_areas: int, num_staged: int, publishes: bool) -> bool:
    """Sums and norms the rows of this rank's part: all of them if there is one area, else part ``rank``. The first
    chunk is staged and signalled. False: stopped."""
    rank, world_size, addresses = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE), c.get(ctx, c.ADDRESSES)
    itemsize, part, area = _field(task, job.ITEMSIZE), _part(task, num_areas), rank if num_areas > 1 else 0
    count = _length(_field(task, job.ROWS) * _field(task, job.HIDDEN), part, area)
    in_slot = IN_LANE if num_areas > 1 else 0
    per_chunk = _per_chunk(ctx, num_areas, itemsize) if num_staged > 0 else max(part, 1)
    for at in range(0, part, per_chunk):
        epoch, more = c.get(ctx, c.EPOCH), at + per_chunk < part
        if more:
            if source == STAGED:
                _copy_in(ctx, task, epoch + 1, at + per_chunk, num_areas)
            arrive(ctx)
        start = area * part + at
        for peer in range(world_size):
            store_i64(addresses + 8 * peer, window(ctx, peer, epoch, in_slot, start * itemsize))
        store_i64(addresses + 8 * rank, _field(task, job.INPUT) + start * itemsize)
        _consume(ctx, task, start, min(per_chunk, count - at), world_size, publishes)
        if more and not await_peers(ctx, epoch + 1):
            return False
    return True


@njit(cache=True, nogil=True)
def _move(packed: int, rows: int, pitch: int, row_bytes: int, at: int, num_bytes: int, into_rows: bool) -> None:
    """Copies bytes ``at`` and on of rows, counted without the gaps between them, to or from a packed buffer."""
    if pitch == row_bytes:
        pitch = row_bytes = max(at + num_bytes, 1)  # one piece
    while num_bytes > 0:
        row, column = at // row_bytes, at % row_bytes
        n = min(num_bytes, row_bytes - column)
        piece = rows + row * pitch + column
        memcpy(piece if into_rows else packed, packed if into_rows else piece, n)
        packed += n
        at += n
        num_bytes -= n


@njit(cache=True, nogil=True)
def _pass_on(ctx: int, rows: int, pitch: int, row_bytes: int, num_rows: int, opened: bool) -> bool:
    """All-gather of the ranks' parts of the rows. ``opened``: the first chunk is staged and signalled. False:
    stopped."""
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    num_part = -(-num_rows // world_size)
    part = num_part * row_bytes
    per_chunk = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES))
    mine, count = rows + rank * num_part * pitch, _length(num_rows * row_bytes, part, rank)
    if not opened:
        _move(own_slot(ctx, c.get(ctx, c.EPOCH) + 1), mine, pitch, row_bytes, 0, min(per_chunk, count), False)
        if not sync(ctx):
            return False
    for at in range(0, part, per_chunk):
        epoch, following = c.get(ctx, c.EPOCH), at + per_chunk
        if following < part:
            n = min(per_chunk, count - following)
            _move(own_slot(ctx, epoch + 1), mine, pitch, row_bytes, following, n, False)
            arrive(ctx)
        for hop in range(1, world_size):
            peer = (rank + hop) % world_size
            n = min(per_chunk, _length(num_rows * row_bytes, part, peer) - at)
            _move(c.slot(ctx, epoch, peer), rows + peer * num_part * pitch, pitch, row_bytes, at, n, True)
        if following < part and not await_peers(ctx, epoch + 1):
            return False
    return True


@njit(cache=True, nogil=True)
def _pass_results_on(ctx: int, task: int, opened: bool, with_out: bool, with_kept: bool) -> int:
    num_rows, itemsize = _field(task, job.ROWS), _field(task, job.ITEMSIZE)
    hidden, kept, scales = _field(task, job.HIDDEN), _field(task, job.KEPT), _field(task, job.SCALES)
    out_bytes = hidden * _field(task, job.OUT_ITEMSIZE)
    if with_out and not _pass_on(ctx, _field(task, job.OUT), _field(task, job.OUT_PITCH), out_bytes, num_rows, opened):
        return c.STOPPED
    if scales != 0 and not _pass_on(ctx, scales, 4, 4, num_rows, False):
        return c.STOPPED
    pitch = _field(task, job.KEPT_PITCH)
    if with_kept and not _pass_on(ctx, kept, pitch, hidden * itemsize, num_rows, False):
        return c.STOPPED
    return c.OK


@njit(cache=True, nogil=True)
def _vote(ctx: int, task: int, whole: bool) -> int:
    """What this rank announces: the offset of its output if peers may write there, else -1."""
    rows_follow = _field(task, job.OUT_PITCH) == _field(task, job.HIDDEN) * _field(task, job.OUT_ITEMSIZE)
    if whole or _field(task, job.FORM) == SCATTER or not rows_follow:
        return -1
    return max(source_of(ctx, _field(task, job.OUT), False), -1)


@njit(cache=True, nogil=True)
def _agree_to_publish(ctx: int, epoch: int) -> bool:
    """Whether all ranks' outputs are symmetric; keeps their offsets."""
    agreed = True
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        offset = described(ctx, epoch, peer, VOTE)
        store_i64(c.get(ctx, c.INCOMING) + 8 * peer, offset)
        agreed = agreed and offset >= 0
    return agreed


@njit(cache=True, nogil=True)
def _reduce_norm(ctx: int, task: int) -> int:
    form, tensor, kept = _field(task, job.FORM), _field(task, job.INPUT), _field(task, job.KEPT)
    num_bytes = _field(task, job.ROWS) * _field(task, job.HIDDEN) * _field(task, job.ITEMSIZE)
    whole = form == ALL_REDUCE and num_bytes <= c.get(ctx, c.ONE_SHOT_BYTES)
    num_areas = 1 if whole else c.get(ctx, c.WORLD_SIZE)
    source = source_of(ctx, tensor, False) if num_bytes >= c.get(ctx, c.IN_PLACE_BYTES) else STAGED
    if whole and (tensor == _field(task, job.OUT) or tensor == kept):
        source = STAGED
    if source == STAGED:
        _copy_in(ctx, task, c.get(ctx, c.EPOCH) + 1, 0, num_areas)
    status = meet(ctx, _field(task, job.CALL), _field(task, job.ROWS), source, _vote(ctx, task, whole))
    if status != c.OK:
        return status
    num_symmetric, _, num_staged = note_sources(ctx, c.get(ctx, c.EPOCH), -1)
    publishes = _agree_to_publish(ctx, c.get(ctx, c.EPOCH))
    if not _sum_rows(ctx, task, source, num_areas, num_staged, publishes):
        return c.STOPPED
    passes_out = not whole and form != SCATTER and not publishes
    status = c.OK
    if not whole and form != SCATTER:
        status = _pass_results_on(ctx, task, False, passes_out, form == ALL_REDUCE and kept != 0)
    if status == c.OK and (num_symmetric > 0 or publishes) and not passes_out and not sync(ctx):
        return c.STOPPED
    return status


@njit(cache=True, nogil=True)
def _norm_gather(ctx: int, task: int) -> int:
    """Norms this rank's rows, which need no peer, before it opens the call with their first chunk."""
    rank, hidden = c.get(ctx, c.RANK), _field(task, job.HIDDEN)
    num_part = -(-_field(task, job.ROWS) // c.get(ctx, c.WORLD_SIZE))
    first, num_rows = rank * num_part, _length(_field(task, job.ROWS), num_part, rank)
    for row in range(first, first + num_rows):
        store_i64(c.get(ctx, c.ADDRESSES), _field(task, job.INPUT) + row * _field(task, job.INPUT_PITCH))
        _consume(ctx, task, row * hidden, hidden, 1, False)
    pitch, row_bytes = _field(task, job.OUT_PITCH), hidden * _field(task, job.OUT_ITEMSIZE)
    per_chunk = min(2 * c.get(ctx, c.CHUNK_BYTES), c.get(ctx, c.SLOT_BYTES), num_rows * row_bytes)
    mine = _field(task, job.OUT) + first * pitch
    _move(own_slot(ctx, c.get(ctx, c.EPOCH) + 1), mine, pitch, row_bytes, 0, per_chunk, False)
    status = meet(ctx, _field(task, job.CALL), _field(task, job.ROWS), STAGED, -1)
    return status if status != c.OK else _pass_results_on(ctx, task, True, True, False)


@njit(cache=True, nogil=True)
def fused_norm(ctx: int, task: int) -> int:
    """The collective that the job's FORM says. INPUT: all rows of this rank's contribution, without gaps; in GATHER
    this rank's rows at their place."""
    if not c.enter(ctx):
        return c.REFUSED
    store_i64(task + 8 * job.SOURCES, c.get(ctx, c.ADDRESSES))
    if c.get(ctx, c.WORLD_SIZE) == 1:
        job.norm_rows(task)
        return c.leave(ctx, c.OK)
    if _field(task, job.FORM) == GATHER:
        return c.leave(ctx, _norm_gather(ctx, task))
    return c.leave(ctx, _reduce_norm(ctx, task))
