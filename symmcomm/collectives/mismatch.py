"""Words for ranks that disagree: reads their descriptions of the call and names the argument and both values."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from symmcomm.collectives.call import Kind, decode
from symmcomm.errors import MismatchError
from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import CALL, COUNT, SOURCE, VOTE
from symmcomm.memory.signals import LINE_BYTES

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_UNITS = {Kind.all_reduce: "elements", Kind.reduce: "elements", Kind.reduce_scatter_tensor: "elements of output"}


def _line(address: int) -> dict[str, int]:
    fields = {"call": CALL, "count": COUNT, "source": SOURCE, "vote": VOTE}
    return {name: ctypes.c_int64.from_address(address + at).value for name, at in fields.items()}


def _words(call: int, count: int) -> dict[str, object]:
    """A call's arguments, with the count in its unit."""
    words = decode(call)
    if count < 0:
        return words | {"split sizes": "given"}
    return words | {"count": f"{count} {_UNITS.get(Kind[str(words['call'])], 'bytes')}"}


def _differences(who: str, mine: dict[str, object], whom: str, theirs: dict[str, object]) -> str:
    names = ["call"] if mine["call"] != theirs["call"] else [n for n in mine | theirs if mine.get(n) != theirs.get(n)]
    found = [f"{n} is {mine.get(n, 'none')} on {who}, {theirs.get(n, 'none')} on {whom}" for n in names]
    return f"ranks disagree in {mine['call']}: " + "; ".join(found)


def explain(comm: Communicator) -> MismatchError:
    """The error for the mismatch that the last kernel found."""
    rank, peer = comm.rank, comm.field(c.MISMATCH_PEER)
    place, epoch = comm.field(c.MISMATCH_PLACE), comm.field(c.EPOCH)
    if place in (c.AS_SENDER, c.AS_RECEIVER):
        sender, receiver = (rank, peer) if place == c.AS_SENDER else (peer, rank)
        sent = _words(comm.field(c.SENT_CALL), comm.field(c.SENT_COUNT))
        expected = _words(comm.field(c.EXPECTED_CALL), comm.field(c.EXPECTED_COUNT))
        return MismatchError(_differences(f"rank {sender}", sent, f"rank {receiver}", expected))
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
