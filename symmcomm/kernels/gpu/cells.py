"""LL cells: payload and flag in one store, so there is no barrier.

A thread packs 8 bytes of data and the flag of the channel's epoch into a 16-byte cell {low, flag, high, flag}, stores
it into a peer's slot for this rank, and polls its own slots until every cell shows the flag. Each 64-bit half is one
access of the memory model (a vector is not), and holds its own flag: so no half is mistaken for data, and no ordering
is needed.

When may a cell be overwritten? Slots alternate with the epoch's parity. Rank r fills p's cells at epoch e once r's
kernel of the channel's epoch e - 1 is done. In it every CTA received something from p that p sent at e - 1 (a cell
here, a signal in other kernels), and p sent that after its LL kernels of epochs before were done, with all that they
read at that parity. The argument is about kernels, not cells, so calls may change in size and kind; it asks of every
kernel that on each channel it uses all ranks hear from all. A cell that small calls leave alone holds an older flag, or
0 if it was never used. The flag is epoch | 1, as the last bit is the same for all epochs of a slot: never 0, and not
repeated before the 32-bit counter has gone round to the very epoch at which that cell was last used.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from symmcomm.kernels.gpu.context import Context, block, thread
from symmcomm.kernels.gpu.elements import load_vector, store_vector
from symmcomm.kernels.gpu.primitives import give_up, join, load, overdue, pick, split, store
from symmcomm.schedule.layout_gpu import Phase

_CELL_BYTES = 16
PAYLOAD_BYTES = 8


def first_byte(threads: int, cells: int) -> Any:
    """Where the thread's first payload lies in the data; its k-th is ``k · threads · PAYLOAD_BYTES`` further on."""
    return (Int64(block()) * cells * threads + thread()) * PAYLOAD_BYTES


def senders(ctx: Context) -> list[Any]:
    """Ranks whose slots are read: the other one of two, else all (the own one is not used, but has an index)."""
    if ctx.world_size == 2:
        return [Int32(1) - ctx.rank]
    return [Int32(peer) for peer in range(ctx.world_size)]


def send(ctx: Context, epoch: Any, peer: Any, cell: Any, payload: Any, when: Any = None) -> None:
    """Stores two words into cell ``cell`` of this rank's slot at the peer."""
    halves = [Uint64(join(word, epoch | Uint32(1))) for word in payload]
    address = ctx.ll_slot(peer, block(), epoch, ctx.rank) + Int64(cell) * _CELL_BYTES
    store(address, halves, semantics="relaxed", when=when)


@cute.jit
def receive(
    ctx: cutlass.Constexpr, epoch: Uint32, first: Int64, num_bytes: Int64, sender: Any, threads: cutlass.Constexpr,
    cells: cutlass.Constexpr,
) -> Any:  # fmt: skip
    """The thread's cells of all ``senders`` (or of the one rank ``sender``, unless it is None), and whether all came.

    The words are those of ``payload``; undefined where the data, of ``num_bytes``, has ended before a cell.
    """
    ranks = senders(ctx)
    num = len(ranks) * cells
    got = cute.make_rmem_tensor((2 * num,), Uint64)
    slots = [ctx.ll_slot(ctx.rank, block(), epoch, peer) + Int64(thread()) * _CELL_BYTES for peer in ranks]
    flag = epoch | 1
    tries, since, late, missing = Int32(0), Int64(0), Boolean(False), Uint32(1)
    while missing != 0 and not late:
        missing = Uint32(0)
        for i in cutlass.range_constexpr(num):
            address = slots[i // cells] + i % cells * threads * _CELL_BYTES
            got[2 * i], got[2 * i + 1] = load(address, Uint64, num=2, semantics="relaxed")
        for i in cutlass.range_constexpr(num):
            wrong = (split(got[2 * i])[1] ^ flag) | (split(got[2 * i + 1])[1] ^ flag)
            expected = first + i % cells * threads * PAYLOAD_BYTES < num_bytes
            if cutlass.const_expr(ctx.world_size > 2):
                expected = expected & (ctx.rank != i // cells)
            if cutlass.const_expr(sender is not None):
                expected = expected & ((sender < 0) | (sender == ranks[i // cells]))
            missing |= pick(expected, wrong, Uint32(0))
        tries += 1
        late, since = overdue(ctx.state, tries, since)
    if missing != 0:
        for i in cutlass.range_constexpr(num):
            seen, peer = split(got[2 * i])[1], ranks[i // cells]
            expected = first + i % cells * threads * PAYLOAD_BYTES < num_bytes
            if cutlass.const_expr(sender is not None):
                expected = expected & ((sender < 0) | (sender == peer))
            if seen != flag and expected and peer != ctx.rank:
                give_up(ctx.state, ctx.rank, peer, block(), flag, seen, Int32(Phase.data))
    return got, missing == 0


def payload(got: Any, sender: int, k: int, cells: int) -> list[Any]:
    """The two words of a sender's k-th cell; ``sender`` counts in ``senders``."""
    return [split(got[2 * (sender * cells + k) + half])[0] for half in range(2)]


def in_rank_order(rank: Any, own: Any, got: Any, k: int, cells: int, world_size: int) -> list[list[Any]]:
    """The words of all ranks: this one's ``own``, and the k-th cells of the others."""
    ordered = []
    for peer in range(world_size):
        other = payload(got, 0 if world_size == 2 else peer, k, cells)
        ordered.append([pick(rank == peer, mine, theirs) for mine, theirs in zip(own, other, strict=True)])
    return ordered


@cute.jit
def load_payload(tensor: Int64, at: Int64, num_bytes: Int64, itemsize: cutlass.Constexpr) -> Any:
    """Two words of the tensor from byte ``at`` on; zeros past its end."""
    low, high = Uint32(0), Uint32(0)
    if (tensor & 7) == 0 and at + PAYLOAD_BYTES <= num_bytes:
        low, high = load(tensor + at, num=2)
    else:
        for i in cutlass.range_constexpr(PAYLOAD_BYTES // itemsize):
            if at + i * itemsize < num_bytes:
                low, high = _insert(low, high, load_vector(tensor + at + i * itemsize, itemsize), i * itemsize)
    return low, high


def _insert(low: Any, high: Any, words: list[Any], byte: int) -> tuple[Any, Any]:
    """Puts an element at a byte of the pair."""
    if len(words) == 2:
        return words[0], words[1]
    moved = words[0] << Uint32(8 * (byte % 4))
    return (low | moved, high) if byte < 4 else (low, high | moved)


@cute.jit
def store_payload(tensor: Int64, at: Int64, num_bytes: Int64, itemsize: cutlass.Constexpr, words: list[Any]) -> None:
    """The opposite of ``load_payload``; nothing is written past the tensor's end."""
    if (tensor & 7) == 0 and at + PAYLOAD_BYTES <= num_bytes:
        store(tensor + at, words)
    else:
        for i in cutlass.range_constexpr(PAYLOAD_BYTES // itemsize):
            if at + i * itemsize < num_bytes:
                byte = i * itemsize
                element = words if itemsize == 8 else [words[byte // 4] >> Uint32(8 * (byte % 4))]
                store_vector(tensor + at + byte, element, itemsize)
