"""Signals, waits and barriers on the pads of the flat address space.

**The barrier of epoch e** (``arrive`` then ``await_peers``). Rank r writes e to its line on every peer with release,
then waits, with acquire, until every peer's line in its own heap reads e. So all that any rank wrote before arriving is
visible to every rank that has passed.

**The rule of reuse**, on which every collective here stands. Lines exist twice: barrier e uses those of parity e & 1. A
rank looks at them after it has passed e and before it arrives at e + 1. They are written again only before arriving at
e + 2, so after passing e + 1, when all have arrived at e + 1: nobody overwrites a line that is still to be read, and
barriers are safe back to back. Staging slots exist three times: what a rank writes into slot e mod 3 before it arrives
at e, peers read after they pass e and before they arrive at e + 2. It is written again only before arriving at e + 3,
so after passing e + 2, when all have arrived at e + 2. Hence one barrier a step is enough, and a rank may arrive at
e + 1 first and read slot e while that signal is on its way.

**The rule of reuse of lanes**, where a rank has data for one peer alone. A lane carries data both ways in turn: what r
has for p at e, r wrote into a lane that p reads after passing e, and into which p itself then writes what it has for r
at e + 2 (``context.lane``: two sets, by parity of e; a lane of r's heap if e & 2 is 0, else of p's). Whoever writes a
lane has read it before, in the order of its own program, so nothing is overwritten unread; and what p writes at e + 2,
r reads after passing e + 2. It spares traffic: a rank fills the cache lines that it has just read, which are in its
cache and on many processors its own, where in a slot it would first have to get them back from the reader.

**Ring barrier.** Each rank only signals its successor and waits for its predecessor, world_size - 1 rounds; the word
counts rounds and is never reset. A rank sends its round k + 1 after it saw its predecessor's round k, so having seen
round world_size - 1 it knows that each of its world_size - 1 predecessors entered. A fast predecessor only raises the
count further (``>=`` below), so it too is safe back to back. (Flux's ring resets its flag, and is not.)

**Compare-and-swap variant** (``put_signal``, ``wait_signal``): a word goes 0 -> 1 by the sender and 1 -> 0 by the
receiver. A sender that is early waits for the 0, so it is safe back to back as well. Foreign kernels that take
``signal_pad_ptrs`` use it.

**Waiting** costs little while ranks have a core each (spin) and lets others run when they do not (yield, then sleep in
a futex). Lost wake-ups: the sleeper raises ``sleepers`` before it looks at the epoch again, the signaller stores the
epoch, fences, and then looks at ``sleepers``; whichever came second sees the other. A sleep is bounded, and each time
nothing came the rank asks ``POLL`` (deadline, dead peers, Ctrl-C) whether to go on. If not, it looks once more, as a
peer may signal and only then leave; but what a signal handler of its own raised must not be lost.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.primitives import (
    atomic_add,
    call_1,
    compare_and_swap,
    fence,
    futex_wait,
    futex_wake,
    load_acquire,
    load_i64,
    pause,
    sched_yield,
    store_i64,
    store_release,
)
from symmcomm.memory.signals import WAITING

POLL_INTERVAL_NS = 20_000_000
CALL, COUNT, SOURCE, VOTE = 8, 16, 24, 32  # offsets in a line
_SLEEPERS = 4


@njit(cache=True, nogil=True)
def reached(word: int, epoch: int) -> bool:
    """Whether the 32-bit word has come to the epoch; the difference is signed, so wrap-around is fine."""
    return ((load_acquire(word) - epoch) & 0xFFFFFFFF) < 0x80000000


@njit(cache=True, nogil=True)
def signal(word: int, epoch: int) -> None:
    """Stores the epoch with release and wakes who sleeps on it."""
    store_release(word, epoch & 0xFFFFFFFF)
    fence()
    if load_acquire(word + _SLEEPERS) != 0:
        futex_wake(word)


@njit(cache=True, nogil=True)
def show_waiting(ctx: int, whom: int) -> None:
    """Tells the peers whom this rank waits for (1 + rank, or 0): so that a time-out names who kept all waiting."""
    store_i64(c.peer_address(ctx, c.get(ctx, c.RANK), WAITING), whom)


@njit(cache=True, nogil=True)
def note_wait(ctx: int, word: int, expected: int, peer: int) -> None:
    """Leaves for ``POLL`` what is waited for; it notes the time itself when it finds WAIT_SINCE zero."""
    c.put(ctx, c.WAIT_WORD, word)
    c.put(ctx, c.WAIT_EXPECTED, expected)
    c.put(ctx, c.WAIT_PEER, peer)
    c.put(ctx, c.WAIT_SINCE, 0)
    show_waiting(ctx, peer + 1)


@njit(cache=True, nogil=True)
def wait(ctx: int, word: int, epoch: int, peer: int) -> bool:
    """Waits until the peer's word in this rank's heap has come to the epoch. False: ``POLL`` said to stop."""
    for _ in range(c.get(ctx, c.SPINS)):
        if reached(word, epoch):
            return True
        pause()
    for _ in range(c.get(ctx, c.YIELDS)):
        if reached(word, epoch):
            return True
        sched_yield()
    note_wait(ctx, word, epoch, peer)
    while True:
        atomic_add(word + _SLEEPERS, 1)
        seen = load_acquire(word)
        woken = 0
        if not reached(word, epoch):
            woken = futex_wait(word, seen, POLL_INTERVAL_NS)
        atomic_add(word + _SLEEPERS, 0xFFFFFFFF)
        if reached(word, epoch):
            show_waiting(ctx, 0)
            return True
        if woken != 0:
            answer = call_1(c.get(ctx, c.POLL), ctx)
            if answer != c.GO_ON:
                return answer == c.STOP and reached(word, epoch)


@njit(cache=True, nogil=True)
def delay(ctx: int) -> None:
    """Fault injection: sleeps before a signal, to prove that the others wait for it."""
    word = ctx + 8 * c.DELAY_NS
    if load_i64(word) != 0:
        futex_wait(word, load_acquire(word), load_i64(word))


@njit(cache=True, nogil=True)
def arrive(ctx: int) -> int:
    """Enters the next barrier: signals every peer. Returns its epoch."""
    delay(ctx)
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    epoch = c.get(ctx, c.EPOCH) + 1
    c.put(ctx, c.EPOCH, epoch)
    offset = c.line_offset(ctx, epoch, rank)
    for step in range(1, world_size):
        store_release(c.peer_address(ctx, (rank + step) % world_size, offset), epoch & 0xFFFFFFFF)
    fence()
    for step in range(1, world_size):
        word = c.peer_address(ctx, (rank + step) % world_size, offset)
        if load_acquire(word + _SLEEPERS) != 0:
            futex_wake(word)
    return epoch


@njit(cache=True, nogil=True)
def await_peers(ctx: int, epoch: int) -> bool:
    """Waits until every peer has arrived at the epoch. False: stopped."""
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        if not wait(ctx, c.peer_address(ctx, rank, c.line_offset(ctx, epoch, peer)), epoch, peer):
            return False
    return True


@njit(cache=True, nogil=True)
def sync(ctx: int) -> bool:
    """One barrier. False: stopped."""
    return await_peers(ctx, arrive(ctx))


@njit(cache=True, nogil=True)
def describe(ctx: int, call: int, count: int, source: int, vote: int) -> None:
    """Writes what this rank is about to do into its line of the next barrier, on all ranks and its own."""
    rank = c.get(ctx, c.RANK)
    offset = c.line_offset(ctx, c.get(ctx, c.EPOCH) + 1, rank)
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        line = c.peer_address(ctx, peer, offset)
        store_i64(line + CALL, call)
        store_i64(line + COUNT, count)
        store_i64(line + SOURCE, source)
        store_i64(line + VOTE, vote)


@njit(cache=True, nogil=True)
def described(ctx: int, epoch: int, peer: int, field: int) -> int:
    """What the peer wrote into a field of its line before it arrived at the epoch."""
    return load_i64(c.peer_address(ctx, c.get(ctx, c.RANK), c.line_offset(ctx, epoch, peer)) + field)


@njit(cache=True, nogil=True)
def meet(ctx: int, call: int, count: int, source: int, vote: int) -> int:
    """The barrier that opens a collective: all ranks arrive with a description of their call, and compare. Every rank
    sees every description, so all come to the same verdict: OK, STOPPED, or MISMATCH (which moved no data)."""
    describe(ctx, call, count, source, vote)
    epoch = arrive(ctx)
    if not await_peers(ctx, epoch):
        return c.STOPPED
    for peer in range(c.get(ctx, c.WORLD_SIZE)):
        if described(ctx, epoch, peer, CALL) != call or described(ctx, epoch, peer, COUNT) != count:
            return c.mismatch(ctx, peer, c.IN_OPENING)
    return c.OK


@njit(cache=True, nogil=True)
def all_to_all_barrier(ctx: int, call: int) -> int:
    """Epoch barrier of all ranks with all ranks."""
    if not c.enter(ctx):
        return c.REFUSED
    return c.leave(ctx, meet(ctx, call, 0, -1, 0))


@njit(cache=True, nogil=True)
def ring_barrier(ctx: int) -> int:
    """Epoch barrier over neighbours only."""
    if not c.enter(ctx):
        return c.REFUSED
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    following = c.peer_address(ctx, (rank + 1) % world_size, c.get(ctx, c.RING))
    own = c.peer_address(ctx, rank, c.get(ctx, c.RING))
    for _ in range(world_size - 1):
        round_ = c.get(ctx, c.RING_EPOCH) + 1
        c.put(ctx, c.RING_EPOCH, round_)
        delay(ctx)
        signal(following, round_)
        if not wait(ctx, own, round_, (rank - 1) % world_size):
            return c.leave(ctx, c.STOPPED)
    return c.leave(ctx, c.OK)


@njit(cache=True, nogil=True)
def swap(ctx: int, word: int, before: int, after: int, peer: int) -> bool:
    """Waits until the word is ``before`` and makes it ``after``. False: stopped."""
    spins = c.get(ctx, c.SPINS)
    tries = 0
    while compare_and_swap(word, before, after) != before:
        tries += 1
        if tries <= spins:
            pause()
            continue
        sched_yield()
        if tries == spins + 1:
            note_wait(ctx, word, before, peer)
        if tries % 1024 == 0:
            futex_wait(word, after, 1_000_000)
            answer = call_1(c.get(ctx, c.POLL), ctx)
            if answer != c.GO_ON:
                return answer == c.STOP and compare_and_swap(word, before, after) == before
    if tries > spins:
        show_waiting(ctx, 0)
    return True


@njit(cache=True, nogil=True)
def _put(ctx: int, channel: int, peer: int) -> int:
    """0 -> 1 in the peer's pad, once the peer has taken this rank's last signal on the channel."""
    index = channel * c.get(ctx, c.WORLD_SIZE) + c.get(ctx, c.RANK)
    delay(ctx)
    word = c.peer_address(ctx, peer, c.get(ctx, c.SIGNAL_PAD) + 4 * index)
    return c.OK if swap(ctx, word, 0, 1, peer) else c.STOPPED


@njit(cache=True, nogil=True)
def _take(ctx: int, channel: int, peer: int) -> int:
    """1 -> 0 in this rank's pad, once the peer has signalled."""
    index = channel * c.get(ctx, c.WORLD_SIZE) + peer
    word = c.peer_address(ctx, c.get(ctx, c.RANK), c.get(ctx, c.SIGNAL_PAD) + 4 * index)
    return c.OK if swap(ctx, word, 1, 0, peer) else c.STOPPED


@njit(cache=True, nogil=True)
def put_signal(ctx: int, channel: int, peer: int) -> int:
    """Signals a peer on a channel, as a call of its own."""
    return c.leave(ctx, _put(ctx, channel, peer)) if c.enter(ctx) else c.REFUSED


@njit(cache=True, nogil=True)
def wait_signal(ctx: int, channel: int, peer: int) -> int:
    """Takes a peer's signal on a channel, as a call of its own."""
    return c.leave(ctx, _take(ctx, channel, peer)) if c.enter(ctx) else c.REFUSED


@njit(cache=True, nogil=True)
def swap_barrier(ctx: int, channel: int, ring: int) -> int:
    """Barrier by compare-and-swap: all with all, or round a ring."""
    if not c.enter(ctx):
        return c.REFUSED
    rank, world_size = c.get(ctx, c.RANK), c.get(ctx, c.WORLD_SIZE)
    for step in range(1, world_size):
        following = (rank + 1) % world_size if ring else (rank + step) % world_size
        previous = (rank - 1) % world_size if ring else (rank - step) % world_size
        if _put(ctx, channel, following) != c.OK or _take(ctx, channel, previous) != c.OK:
            return c.leave(ctx, c.STOPPED)
    return c.leave(ctx, c.OK)
