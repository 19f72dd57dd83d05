"""Send and receive with tags, in any order, and from any rank.

Messages of a pair arrive in the order sent. A receive takes the first message with its tag; those before it, which
nobody has asked for, are set aside. Sends go through a lane for each receiver, receives through one for each sender,
so that all go on at once, as in gloo: whatever the order of calls, a message that is received somewhere gets there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from symmcomm.checks import check_rank
from symmcomm.collectives.mismatch import explain_message
from symmcomm.communicator import Communicator
from symmcomm.distributed.calls import as_dense, settle
from symmcomm.distributed.channel import Channel, key_of, message_word
from symmcomm.distributed.lane import Lane
from symmcomm.distributed.work import FINISHED, FinishedWork, PendingWork
from symmcomm.errors import ArgumentError, WaitTimeoutError

_PAUSE_S = (0.00002, 0.001)  # first and longest pause of a receive from any rank
_LOOK_INTERVAL_S = 0.02  # how often it looks whether the peers are alive


class Receive(PendingWork):
    """A receive that waits for its message.

    Args:
        target: contiguous; where the message goes before it is copied to ``output``, or ``output`` itself.
    """

    def __init__(self, lane: Lane, word: int, target: torch.Tensor, output: torch.Tensor, peer: int | None) -> None:
        super().__init__(lane, bool, [output], peer)
        self.word, self.target = word, target

    def end(self, error: BaseException | None, source: int) -> None:
        """Ends the receive."""
        if error is None:
            settle(self.outputs[0], self.target)
        self.source = source
        self.finish(error)


class Outbox(Lane):
    """What goes to one rank."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        super().__init__(f"send of rank {channel.rank}", timeout_s)
        self.channel = channel

    def step(self, deadline: float) -> None:
        """Sends the next message."""
        self.channel.watch.deadline = deadline
        super().step(deadline)


class Inbox(Lane):
    """What comes from one rank. ``pending`` are the receives that wait; they are matched by tag, not by order.

    Attributes:
        aside: (word, bytes) of messages that came before anybody asked for them. Changed with ``mutex`` held, as are
            ``pending`` and ``from_any``.
    """

    can_stop = True

    def __init__(self, channel: Channel, mailbox: Mailbox) -> None:
        super().__init__(f"recv of rank {channel.rank}", mailbox.timeout_s)
        self.channel, self._mutex, self._from_any = channel, mailbox.mutex, mailbox.from_any
        self.aside: list[tuple[int, torch.Tensor]] = []

    def step(self, deadline: float) -> None:
        """Waits for the next message and hands it to its receive. A failure of the peer ends all receives."""
        try:
            head = self.channel.head(True, deadline)
            assert head is not None
            self.serve(*head)
        except WaitTimeoutError:
            raise
        except BaseException as error:
            with self._mutex:
                receives = list(self.pending)
                self.pending.clear()
            end_all(receives, error, self)
            if isinstance(error, KeyboardInterrupt):
                raise

    def serve(self, word: int, num_bytes: int) -> None:
        """Takes the message that is next in the queue: into the tensor of a receive, or aside."""
        receive = self._match(word)
        if receive is not None:
            error: BaseException | None = None
            try:
                self.channel.receive(receive.word, receive.target)
            except BaseException as caught:
                error = caught
            receive.end(error, self.channel.peer)
            return
        message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.channel.receive(word, message)
        receive = self._match(word, message)  # one that was posted in the meantime
        if receive is not None:
            self.hand_over(receive, word, message)

    def _match(self, word: int, message: torch.Tensor | None = None) -> Receive | None:
        """Removes and returns the first receive for a message of this word; without one, sets ``message`` aside."""
        key = key_of(word)
        with self._mutex:
            for queue in (self.pending, self._from_any):
                for receive in queue:
                    assert isinstance(receive, Receive)
                    if key_of(receive.word) == key:
                        queue.remove(receive)
                        receive.lane = self  # which is to complete its future
                        return receive
            if message is not None:
                self.aside.append((word, message))
        return None

    def claim_aside(self, key: int) -> tuple[int, torch.Tensor] | None:
        """Removes and returns the first message with this key that was set aside. With ``mutex`` held."""
        for index, (word, _) in enumerate(self.aside):
            if key_of(word) == key:
                return self.aside.pop(index)
        return None

    def hand_over(self, receive: Receive, word: int, message: torch.Tensor) -> None:
        """Ends the receive with a message that was set aside."""
        target, error = receive.target, None
        if word != receive.word or message.nbytes != target.nbytes:
            peer, rank = self.channel.peer, self.channel.rank
            error = explain_message(peer, word, message.nbytes, rank, receive.word, target.nbytes)
        elif message.nbytes:
            target.view(-1).view(torch.uint8).copy_(message)
        receive.end(error, self.channel.peer)


def end_all(receives: list[PendingWork], error: BaseException, lane: Lane) -> None:
    """Ends receives with an error, in a lane that this thread holds."""
    for receive in receives:
        assert isinstance(receive, Receive)
        receive.lane = lane
        receive.end(error, -1)


class AnySource(Lane):
    """Receives from any rank. Whoever waits for one goes round the inboxes."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(f"recv from any rank of rank {mailbox.comm.rank}", mailbox.timeout_s)
        self._mailbox, self.pending = mailbox, mailbox.from_any

    def complete(self, work: PendingWork, timeout_s: float) -> None:
        """Goes round until the work is done."""
        limit_s = timeout_s if timeout_s > 0 else self.timeout_s
        deadline = time.monotonic() + limit_s
        self._go_round(lambda: work.done or time.monotonic() > deadline)
        if not work.done:
            raise self.timed_out(work, limit_s)

    def step(self, deadline: float) -> None:
        """Goes round until nothing is waited for."""
        self._go_round(lambda: not self.pending)

    def _go_round(self, is_over: Callable[[], bool]) -> None:
        pause_s, looked = _PAUSE_S[0], time.monotonic()
        while not is_over():
            looks = time.monotonic() > looked + _LOOK_INTERVAL_S
            looked = time.monotonic() if looks else looked
            for source in range(self._mailbox.comm.world_size):
                inbox = self._mailbox.inbox(source)
                if not inbox.take():
                    continue  # somebody waits there, and serves all
                try:
                    inbox.inside = True
                    head = inbox.channel.head(False)
                    if head is not None:
                        inbox.serve(*head)
                    elif looks and (error := inbox.channel.failure()):
                        raise error
                except Exception as error:
                    with self._mailbox.mutex:
                        receives = list(self.pending)
                        self.pending.clear()
                    end_all(receives, error, inbox)
                finally:
                    inbox.inside = False
                    inbox.leave()
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _PAUSE_S[1])


class Mailbox:
    """All messages of one process group.

    Attributes:
        mutex: held for a few instructions, where receives meet messages.
        from_any: receives that wait for any rank.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self.comm, self.timeout_s = comm, timeout_s
        self.mutex = threading.Lock()
        self.from_any: deque[PendingWork] = deque()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._any = AnySource(self)
        self._received = [FinishedWork(source) for source in range(comm.world_size)]

    def inbox(self, source: int) -> Inbox:
        """The lane of what comes from a rank, made when it is first used."""
        inbox = self._inboxes.get(source)
        if inbox is None:
            with self.mutex:
                inbox = self._inboxes.get(source) or Inbox(Channel(self.comm, source), self)
                self._inboxes[source] = inbox
        return inbox

    def _outbox(self, receiver: int) -> Outbox:
        outbox = self._outboxes.get(receiver)
        if outbox is None:
            with self.mutex:
                outbox = self._outboxes.get(receiver) or Outbox(Channel(self.comm, receiver), self.timeout_s)
                self._outboxes[receiver] = outbox
        return outbox

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, internal: bool = False) -> FinishedWork | PendingWork:
        """Starts to send a tensor. Done at once if the queue has room."""
        check_rank(self.comm, dst, "dst")
        word, source, outbox = _word(tensor, tag, internal), as_dense(tensor), self._outbox(dst)
        if outbox.enter():
            try:
                outbox.inside = True
                if max(source.nbytes, 1) <= outbox.channel.room():
                    outbox.channel.send(word, source)
                    return FINISHED
            finally:
                outbox.inside = False
                outbox.leave()
        work = PendingWork(outbox, partial(outbox.channel.send, word, source), [tensor], dst)
        outbox.submit(work)
        return work

    def receive(self, tensor: torch.Tensor, src: int, tag: int = 0, internal: bool = False) -> FinishedWork | Receive:
        """Starts to receive into a tensor. Done at once if the message is there."""
        check_rank(self.comm, src, "src")
        word, target, inbox = _word(tensor, tag, internal), as_dense(tensor), self.inbox(src)
        if inbox.enter():
            try:
                inbox.inside = True
                head = None if inbox.aside or self.from_any else inbox.channel.head(False)
                if head is not None and key_of(head[0]) == key_of(word):
                    inbox.channel.receive(word, target)
                    settle(tensor, target)
                    return self._received[src]
            finally:
                inbox.inside = False
                inbox.leave()
        receive = Receive(inbox, word, target, tensor, src)
        self._post(receive, [inbox], inbox)
        return receive

    def receive_from_any(self, tensor: torch.Tensor, tag: int = 0) -> Receive:
        """Starts to receive into a tensor, from whichever rank sends first; the work then names it."""
        receive = Receive(self._any, _word(tensor, tag, False), as_dense(tensor), tensor, None)
        inboxes = [self.inbox(source) for source in range(self.comm.world_size)]
        self._post(receive, inboxes, self._any)
        return receive

    def _post(self, receive: Receive, inboxes: list[Inbox], lane: Lane) -> None:
        """Ends the receive with a message that came before it, else queues it."""
        key = key_of(receive.word)
        with self.mutex:
            for inbox in inboxes:
                if (message := inbox.claim_aside(key)) is not None:
                    break
            else:
                lane.pending.append(receive)
        if message is not None:
            inbox.hand_over(receive, *message)
        else:
            lane.wake()

    def set_timeout(self, timeout_s: float) -> None:
        """How long waits without a time limit of their own last from now on."""
        self.timeout_s = timeout_s
        for lane in (self._any, *self._inboxes.values(), *self._outboxes.values()):
            lane.timeout_s = timeout_s

    def is_interrupted(self) -> bool:
        """As ``Lane.is_interrupted``."""
        return any(lane.is_interrupted() for lane in (*self._inboxes.values(), *self._outboxes.values()))

    def close(self) -> None:
        """Ends what waits with ClosedError, and the threads."""
        boxes: list[Inbox | Outbox] = [*self._inboxes.values(), *self._outboxes.values()]
        for box in boxes:
            box.channel.close()
        self._any.close()
        for box in boxes:
            box.close()
            box.busy.acquire(timeout=self.timeout_s)  # nothing runs there any more
            box.channel.release()


def _word(tensor: torch.Tensor, tag: int, internal: bool) -> int:
    if not 0 <= tag < 1 << 31:
        raise ArgumentError(f"tag={tag} is not in 0..{(1 << 31) - 1}")
    return message_word(tensor.dtype, tag, internal)
