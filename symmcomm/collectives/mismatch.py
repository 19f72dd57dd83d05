"""Words for ranks that disagree: reads their descriptions of the call and names the argument and both values."""

from __future__ import annotations

import ctypes
from typing import Protocol

from symmcomm.collectives.call import Kind, decode
from symmcomm.errors import MismatchError
from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import CALL, COUNT, SOURCE, VOTE
from symmcomm.memory.heap import SymmetricHeap
from symmcomm.memory.signals import LINE_BYTES, ControlLayout

_UNITS = {Kind.all_reduce: "elements", Kind.reduce: "elements", Kind.reduce_scatter_tensor: "elements of output"}


def _line(address: int) -> dict[str, int]:
    fields = {"call": CALL, "count": COUNT, "source": SOURCE, "vote": VOTE}
    return {name: ctypes.c_int64.from_address(address + at).value for name, at in fields.items()}


def _words(call: int, count: int) -> dict[str, object]:
    """A call's arguments, with the count in its unit."""
    words = decode(call)
    if count < 0:
        return words | {"split sizes": "given"}
    if "hidden" in words:
        return words | {"rows": count}
    return words | {"count": f"{count} {_UNITS.get(Kind[str(words['call'])], 'bytes')}"}


def _differences(who: str, mine: dict[str, object], whom: str, theirs: dict[str, object]) -> str:
    names = ["call"] if mine["call"] != theirs["call"] else [n for n in mine | theirs if mine.get(n) != theirs.get(n)]
    found = [f"{n} is {mine.get(n, 'none')} on {who}, {theirs.get(n, 'none')} on {whom}" for n in names]
    return f"ranks disagree in {mine['call']}: " + "; ".join(found)


class Caller(Protocol):
    """Whose kernel found a mismatch: a communicator, or a channel of one."""

    rank: int
    world_size: int
    heap: SymmetricHeap
    layout: ControlLayout

    def field(self, number: int) -> int: ...


def explain_message(
    sender: int, sent: int, sent_bytes: int, receiver: int, expected: int, expected_bytes: int
) -> MismatchError:
    """The error for a message that is not what its receiver expected; ``sent`` and ``expected`` are words of calls."""
    return MismatchError(
        _differences(f"rank {sender}", _words(sent, sent_bytes), f"rank {receiver}", _words(expected, expected_bytes))
    )


def explain(comm: Caller) -> MismatchError:
    """The error for the mismatch that the last kernel found."""
    rank, peer = comm.rank, comm.field(c.MISMATCH_PEER)
    place, epoch = comm.field(c.MISMATCH_PLACE), comm.field(c.EPOCH)
    if place in (c.AS_SENDER, c.AS_RECEIVER):
        sender, receiver = (rank, peer) if place == c.AS_SENDER else (peer, rank)
        sent = comm.field(c.SENT_CALL), comm.field(c.SENT_COUNT)
        return explain_message(sender, *sent, receiver, comm.field(c.EXPECTED_CALL), comm.field(c.EXPECTED_COUNT))
    first = comm.heap.own_address + comm.layout.lines + (epoch & 1) * comm.world_size * LINE_BYTES
    mine, theirs = _line(first + rank * LINE_BYTES), _line(first + peer * LINE_BYTES)
    if place == c.IN_VOTES:
        return MismatchError(
            f"ranks disagree in {decode(mine['call'])['call']}: split sizes: rank {peer} expects "
            f"{theirs['count']} bytes from rank {theirs['vote'] - 1}, which sends {theirs['source']}"
        )
    return MismatchError(
        _differences(
            f"rank {rank}", _words(mine["call"], mine["count"]), f"rank {peer}", _words(theirs["call"], theirs["count"])
        )
    )
