"""LL cells: data and flag in one store, so there is no barrier.

A thread packs 12 bytes of data and the flag of the channel's epoch into a 16-byte cell, stores it into a peer's slot
for this rank, and polls its own slots until every cell shows the flag. A cell is written and read by single accesses of
16 bytes (``store_128``): so old data is never taken for new, and no ordering is needed. A cell of 8-byte elements holds
one.

A row is a cell of each of the CTA's threads. Word j of lane l of a warp is word ``32 · j + l`` of what the row's warp
holds, so a warp loads and stores whole lines; a cell is in use if its first word is.

When may a cell be overwritten? Slots alternate with the epoch's parity. Rank r fills p's cells at epoch e once r's
kernel of the channel's epoch e - 1 is done. In it every CTA received something from p that p sent at e - 1 (a cell
here, a signal in other kernels), and p sent that after its LL kernels of epochs before were done, with all that they
read at that parity. The argument is about kernels, not cells, so calls may change in size and kind; it asks of every
kernel that on each channel it uses all ranks hear from all. A cell that small calls leave alone holds an older flag, or
0 if it was never used. The flag is epoch | 1, as the last bit is the same for all epochs of a slot: never 0, and not
repeated before the 32-bit counter has gone round to the very epoch at which that cell was last used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from symmcomm.kernels.gpu.context import Context, block, thread
from symmcomm.kernels.gpu.elements import load_vector, store_vector
from symmcomm.kernels.gpu.primitives import (
    give_up,
    join,
    load,
    load_128,
    overdue,
    pick,
    signal,
    split,
    store,
    store_128,
)
from symmcomm.schedule.layout_gpu import LL_CELL_BYTES, Phase, ll_words

_WARP = 32
_REMIND = (1 << 20) - 1


@dataclass(frozen=True)
class Cells:
    """How the cells of a CTA lie in the data. Attributes: ``threads`` a CTA, ``num`` cells a thread, ``itemsize`` of an
    element in bytes."""

    threads: int
    num: int
    itemsize: int

    @property
    def num_words(self) -> int:
        """Words of data in a cell."""
        return ll_words(self.itemsize)

    @property
    def row_bytes(self) -> int:
        """Data of the thread's next cell is that much further on."""
        return self.threads * self.num_words * 4

    def first_byte(self) -> Any:
        """Where the thread's first word lies in the data."""
        words = self.num_words
        in_row = thread() * (4 * words)
        if words == 3:
            lane = thread() % _WARP
            in_row = (thread() - lane) * (4 * words) + lane * 4
        return Int64(block()) * (self.num * self.row_bytes) + Int64(in_row)

    def word(self, index: int) -> int:
        """A cell's word is that many bytes after its first."""
        return 4 * index * (_WARP if self.num_words == 3 else 1)


@cute.jit
def remind(ctx: cutlass.Constexpr, epoch: Uint32) -> None:
    """Cells leave the pads alone, whose words would be taken for later ones when 2³¹ epochs have passed: so now and
    then a CTA tells the peers to what epoch its channel has come. LL kernels advance by one or two, or signal."""
    if (epoch & _REMIND) < 2:
        peer = thread()
        if peer < ctx.world_size and peer != ctx.rank:
            signal(ctx.pad(peer, block(), ctx.rank), epoch)


def send(ctx: Context, epoch: Any, peer: Any, cell: Any, words: Any) -> None:
    """Stores two or three words into cell ``cell`` of this rank's slot at the peer."""
    third = words[2] if len(words) == 3 else Uint32(0)
    address = ctx.ll_slot(peer, block(), epoch, ctx.rank) + Int64(cell) * LL_CELL_BYTES
    store_128(address, join(words[0], words[1]), join(third, epoch | Uint32(1)))


@cute.jit
def exchange(
    ctx: cutlass.Constexpr, cells: cutlass.Constexpr, epoch: Uint32, first: Int64, num_bytes: Int64,
    own: cutlass.Constexpr,
) -> Any:  # fmt: skip
    """Sends the thread's cells, and receives (see ``receive``). ``own[k][hop]``: the words of the k-th for the rank
    ``hop`` after this one."""
    for k in cutlass.range_constexpr(cells.num):
        if first + k * cells.row_bytes < num_bytes:
            for hop in cutlass.range_constexpr(1, ctx.world_size):
                send(ctx, epoch, ctx.neighbour(hop), k * cells.threads + thread(), own[k][hop])
    return receive(ctx, cells, epoch, first, num_bytes, None)


@cute.jit
def receive(
    ctx: cutlass.Constexpr, cells: cutlass.Constexpr, epoch: Uint32, first: Int64, num_bytes: Int64, sender: Any
) -> Any:
    """The thread's cells of ``ctx.senders`` (or of the one rank ``sender``, unless it is None), and whether all came.

    The words are those of ``words_of``; undefined where the data, of ``num_bytes``, has ended before a cell.
    """
    ranks = ctx.senders
    num = len(ranks) * cells.num
    got = cute.make_rmem_tensor((2 * num,), Uint64)
    slots = [ctx.ll_slot(ctx.rank, block(), epoch, peer) + Int64(thread()) * LL_CELL_BYTES for peer in ranks]
    flag = epoch | 1
    tries, since, late, missing = Int32(0), Int64(0), Boolean(False), Uint32(1)
    while missing != 0 and not late:
        missing = Uint32(0)
        for i in cutlass.range_constexpr(num):
            address = slots[i // cells.num] + i % cells.num * cells.threads * LL_CELL_BYTES
            got[2 * i], got[2 * i + 1] = load_128(address)
        for i in cutlass.range_constexpr(num):
            expected = first + i % cells.num * cells.row_bytes < num_bytes
            if cutlass.const_expr(ctx.world_size > 2):
                expected = expected & (ctx.rank != i // cells.num)
            if cutlass.const_expr(sender is not None):
                expected = expected & ((sender < 0) | (sender == ranks[i // cells.num]))
            missing |= pick(expected, split(got[2 * i + 1])[1] ^ flag, Uint32(0))
        tries += 1
        late, since = overdue(ctx.state, tries, since)
    if missing != 0:
        for i in cutlass.range_constexpr(num):
            seen, peer = split(got[2 * i + 1])[1], ranks[i // cells.num]
            expected = first + i % cells.num * cells.row_bytes < num_bytes
            if cutlass.const_expr(sender is not None):
                expected = expected & ((sender < 0) | (sender == peer))
            if seen != flag and expected and peer != ctx.rank:
                give_up(ctx.state, ctx.rank, peer, block(), flag, seen, Int32(Phase.data))
    return got, missing == 0


def words_of(cells: Cells, got: Any, sender: int, k: int) -> list[Any]:
    """The words of a sender's k-th cell; ``sender`` counts in ``ctx.senders``."""
    at = 2 * (sender * cells.num + k)
    return [*split(got[at]), split(got[at + 1])[0]][: cells.num_words]


def in_rank_order(ctx: Context, cells: Cells, own: Any, got: Any, k: int) -> list[list[Any]]:
    """The words of all ranks: this one's ``own``, and the k-th cells of the others."""
    return ctx.in_rank_order(own, [words_of(cells, got, sender, k) for sender in range(len(ctx.senders))])


def load_words(tensor: Any, at: Any, end: Any, cells: Cells) -> list[Any]:
    """A cell's words from byte ``at`` of the tensor on; undefined from byte ``end`` on."""
    return list(_load_words(tensor, at, end, cells))[: cells.num_words]


def load_parts(ctx: Context, cells: Cells, tensor: Any, pitch: Any, at: Any, end: Any) -> list[list[Any]]:
    """``load_words`` of the parts for this rank and the ones after it, which are ``pitch`` bytes apart; None: they are
    one."""
    if pitch is None:
        return [load_words(tensor, at, end, cells)] * ctx.world_size
    parts = [tensor + Int64(ctx.neighbour(hop)) * pitch for hop in range(ctx.world_size)]
    return [load_words(part, at, end, cells) for part in parts]


@cute.jit
def _load_words(tensor: Int64, at: Int64, end: Int64, cells: cutlass.Constexpr) -> Any:
    low, middle, high = Uint32(0), Uint32(0), Uint32(0)
    if cutlass.const_expr(cells.itemsize == 8):
        low, middle = load(tensor + at, num=2, when=at < end)
    else:
        if _are_words(tensor, end):
            low, middle, high = _words(tensor, at, end, cells)
        else:
            low, middle, high = _elements(tensor, at, end, cells)
    return low, middle, high


def _are_words(tensor: Any, end: Any) -> Any:
    """Whether words are whole: the same on all threads."""
    return ((tensor | end) & 3) == 0


def _words(tensor: Any, at: Any, end: Any, cells: Cells) -> tuple[Any, ...]:
    here = [at + cells.word(j) for j in range(3)]
    return tuple(load(tensor + byte, when=byte < end)[0] for byte in here)


def _elements(tensor: Any, at: Any, end: Any, cells: Cells) -> tuple[Any, ...]:
    """An undefined element spoils only those behind it in its word, which are past the end too."""
    words = []
    for j in range(3):
        word = Uint32(0)
        for byte in range(0, 4, cells.itemsize):
            here = at + (cells.word(j) + byte)
            word = word | (load_vector(tensor + here, cells.itemsize, when=here < end)[0] << Uint32(8 * byte))
        words.append(word)
    return tuple(words)


@cute.jit
def store_words(tensor: Int64, at: Int64, end: Int64, cells: cutlass.Constexpr, words: list[Any]) -> None:
    """The opposite of ``load_words``; nothing is written from byte ``end`` on."""
    if cutlass.const_expr(cells.itemsize == 8):
        store(tensor + at, words, when=at < end)
    else:
        if _are_words(tensor, end):
            for j in cutlass.range_constexpr(3):
                here = at + cells.word(j)
                store(tensor + here, [words[j]], when=here < end)
        else:
            _store_elements(tensor, at, end, cells, words)


def _store_elements(tensor: Any, at: Any, end: Any, cells: Cells, words: list[Any]) -> None:
    for j in range(3):
        for byte in range(0, 4, cells.itemsize):
            here = at + (cells.word(j) + byte)
            store_vector(tensor + here, [words[j] >> Uint32(8 * byte)], cells.itemsize, when=here < end)
