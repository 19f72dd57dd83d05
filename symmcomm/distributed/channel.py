"""One direction between two ranks: the message queue of ``kernels.cpu.point_to_point`` with a context of its own.

A kernel runs one call a context at a time. Each channel has a copy of the communicator's context, so that a receive
that waits keeps neither collectives nor other messages from going on.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import torch

from symmcomm.collectives.call import Kind, encode
from symmcomm.collectives.mismatch import explain
from symmcomm.communicator import Communicator
from symmcomm.distributed.lane import FOREVER
from symmcomm.errors import ClosedError, SymmCommError, WaitTimeoutError, retold
from symmcomm.kernels.cpu import context as c
from symmcomm.memory.signals import NUM_MESSAGE_SLOTS
from symmcomm.watch import Watch

_OP_SHIFT, _TAG_SHIFT = 24, 32  # where a call's word has its operation, and its root or tag


def message_word(dtype: torch.dtype, tag: int, internal: bool = False) -> int:
    """The word of a message, which holds its tag. Internal messages are apart from all of the user's."""
    return encode(Kind.send, dtype) + (tag << _TAG_SHIFT) - (internal << _OP_SHIFT)


def key_of(word: int) -> int:
    """What a receive matches: the tag, and whether the message is internal."""
    return word >> _OP_SHIFT


class _DeadlinePassedError(Exception):
    """Stops the wait of a caller whose time is up."""


class _ChannelWatch(Watch):
    """Looks at one peer. The deadline is the caller's: a queued receive has none until somebody waits for it."""

    deadline = FOREVER

    def trouble(self, peer: int) -> BaseException | None:
        """Why no message of the peer will come."""
        return self.interrupt or self._failure(peer)

    def _look(self) -> BaseException | None:
        if error := self.trouble(int(self._context[c.WAIT_PEER])):
            return error
        return _DeadlinePassedError() if time.monotonic() > self.deadline else None


class Channel:
    """The way of messages to a peer, and from it. Each direction is for one thread at a time; ``Lane`` sees to that."""

    def __init__(self, comm: Communicator, peer: int) -> None:
        if comm.field(c.STATE) in (c.CLOSED, c.FORKED):  # IN_CALL and FAILED concern its collectives alone
            comm.check_open()
        self.rank, self.world_size, self.peer = comm.rank, comm.world_size, peer
        self.heap, self.layout, self.kernels = comm.heap, comm.layout, comm.kernels
        fields = (ctypes.c_int64 * c.NUM_FIELDS).from_address(comm.ctx)
        self._comm = comm  # owns the tables that the fields point to
        self._context = np.ctypeslib.as_array(fields).copy()
        self._context[c.STATE] = c.OPEN
        self.ctx = self._context.ctypes.data
        pids = [pid if rank == peer else 0 for rank, pid in enumerate(comm.watch.pids)]
        self.watch = _ChannelWatch(comm.rank, pids, comm.watch.pages, self._context, FOREVER)
        self._context[c.POLL] = self.watch.address
        self._taken = ctypes.c_int64.from_address(comm.field(c.CHUNKS_TAKEN) + 8 * peer)
        self._queue = comm.heap.base + peer * comm.heap.stride + comm.layout.messages
        self._failure: SymmCommError | None = None
        comm.in_child.append(self._refuse)

    def field(self, number: int) -> int:
        """As ``Communicator.field``."""
        return int(self._context[number])

    def check_open(self) -> None:
        """Raises after ``close``, after a message was left half done, and in a forked child."""
        if self._failure is not None:
            raise retold(self._failure)

    def close(self) -> None:
        """Ends what waits and refuses what comes."""
        self.watch.interrupt = self._failure = ClosedError("the process group is destroyed")

    def _refuse(self, error: SymmCommError) -> None:
        self._failure = error

    def release(self) -> None:
        """Closes the descriptors; nothing runs any more."""
        self.watch.close()

    def _stopped(self) -> BaseException:
        error, self.watch.error = self.watch.error or KeyboardInterrupt(), None
        if isinstance(error, _DeadlinePassedError):
            return WaitTimeoutError(f"rank {self.rank} timed out: nothing moved from or to rank {self.peer} in time")
        return error

    def _check(self, status: int) -> None:
        if status == c.STOPPED:
            error = self._stopped()
            self._failure = retold(error)  # in the middle of a message: the channel is finished
            try:
                raise error
            finally:
                del error  # else its frames would hold it, and it them
        if status != c.OK:
            raise explain(self)

    def failure(self) -> BaseException | None:
        """What is wrong with the peer, if anything."""
        return self.watch.trouble(self.peer)

    def room(self) -> int:
        """Bytes that ``send`` takes without waiting."""
        self.check_open()
        return int(self.kernels.room(self.ctx, self.peer))

    def send(self, word: int, tensor: torch.Tensor) -> None:
        """Puts a contiguous tensor into the queue to the peer; waits while the queue is full."""
        self.check_open()
        self._check(self.kernels.send(self.ctx, word, tensor.data_ptr(), tensor.nbytes, self.peer))

    def head(self, waits: bool, deadline: float = FOREVER) -> tuple[int, int] | None:
        """(word, bytes) of the peer's next message; None if there is none now.

        Args:
            waits: until there is one. Then None is not returned, and WaitTimeoutError raised at ``deadline``
                (``time.monotonic``), after which the channel stays usable.
        """
        self.check_open()
        self.watch.deadline = deadline
        if self.kernels.probe(self.ctx, self.peer, waits) != c.OK:
            if not waits:
                return None
            raise self._stopped()
        self.watch.deadline = FOREVER
        index = self.rank * NUM_MESSAGE_SLOTS + (self._taken.value + 1) % NUM_MESSAGE_SLOTS
        slot = (ctypes.c_int64 * 2).from_address(self._queue + index * self.layout.message_bytes)
        return slot[0], slot[1]

    def receive(self, word: int, tensor: torch.Tensor) -> None:
        """Takes the peer's next message, which must be of this word and size."""
        self._check(self.kernels.receive(self.ctx, word, tensor.data_ptr(), tensor.nbytes, self.peer))
