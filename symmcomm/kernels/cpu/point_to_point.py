"""Send and receive: a queue of NUM_MESSAGE_SLOTS chunks between each ordered pair of ranks, in the sender's heap.

Chunk number n (counted from 1 over all messages of the pair) lies in slot n mod NUM_MESSAGE_SLOTS. The sender waits
until the receiver's TAKEN line has come to n - NUM_MESSAGE_SLOTS, so that the slot is free; it writes header and
payload, and signals n on the receiver's SENT line. The receiver waits for n, copies, and signals n on the sender's
TAKEN line. Small messages therefore leave the sender before they are received. A receiver that expected something else
drops the whole message and says so in the TAKEN line; its sender learns it there.
"""

from __future__ import annotations

from numba import njit

from symmcomm.kernels.cpu import context as c
from symmcomm.kernels.cpu.barrier import CALL, COUNT, SOURCE, VOTE, delay, reached, signal, wait
from symmcomm.kernels.cpu.primitives import load_acquire, load_i64, memcpy, store_i64
from symmcomm.memory.signals import LINE_BYTES, NUM_MESSAGE_SLOTS

_HEADER_BYTES = 64  # call, bytes of the whole message


@njit(cache=True, nogil=True)
def _slot(ctx: int, sender: int, receiver: int, chunk: int) -> int:
    index = receiver * NUM_MESSAGE_SLOTS + chunk % NUM_MESSAGE_SLOTS
    return c.peer_address(ctx, sender, c.get(ctx, c.MESSAGES) + index * c.get(ctx, c.MESSAGE_BYTES))


@njit(cache=True, nogil=True)
def _next(ctx: int, counters: int, peer: int) -> int:
    """Counts one chunk."""
    address = c.get(ctx, counters) + 8 * peer
    store_i64(address, load_i64(address) + 1)
    return load_i64(address)


@njit(cache=True, nogil=True)
def _keep(ctx: int, expected_call: int, expected_count: int, sent_call: int, sent_count: int) -> None:
    """What the receiver expected and what was sent, for the error."""
    c.put(ctx, c.EXPECTED_CALL, expected_call)
    c.put(ctx, c.EXPECTED_COUNT, expected_count)
    c.put(ctx, c.SENT_CALL, sent_call)
    c.put(ctx, c.SENT_COUNT, sent_count)


@njit(cache=True, nogil=True)
def _send(ctx: int, call: int, tensor: int, num_bytes: int, receiver: int) -> int:
    rank = c.get(ctx, c.RANK)
    taken = c.peer_address(ctx, rank, c.get(ctx, c.TAKEN) + receiver * LINE_BYTES)
    capacity = c.get(ctx, c.MESSAGE_BYTES) - _HEADER_BYTES
    for at in range(0, max(num_bytes, 1), capacity):
        chunk = _next(ctx, c.CHUNKS_SENT, receiver)
        if not wait(ctx, taken, chunk - NUM_MESSAGE_SLOTS, receiver):
            return c.STOPPED
        slot = _slot(ctx, rank, receiver, chunk)
        store_i64(slot, call)
        store_i64(slot + 8, num_bytes)
        memcpy(slot + _HEADER_BYTES, tensor + at, min(capacity, num_bytes - at))
        delay(ctx)
        signal(c.peer_address(ctx, receiver, c.get(ctx, c.SENT) + rank * LINE_BYTES), chunk)
    if load_i64(taken + VOTE) != 0:
        _keep(ctx, load_i64(taken + CALL), load_i64(taken + COUNT), load_i64(taken + VOTE), load_i64(taken + SOURCE))
        store_i64(taken + VOTE, 0)
        return c.mismatch(ctx, receiver, c.AS_SENDER)
    return c.OK


@njit(cache=True, nogil=True)
def _receive(ctx: int, call: int, tensor: int, num_bytes: int, sender: int) -> int:
    rank = c.get(ctx, c.RANK)
    sent = c.peer_address(ctx, rank, c.get(ctx, c.SENT) + sender * LINE_BYTES)
    taken = c.peer_address(ctx, sender, c.get(ctx, c.TAKEN) + rank * LINE_BYTES)
    capacity = c.get(ctx, c.MESSAGE_BYTES) - _HEADER_BYTES
    status, at, total = c.OK, 0, 1
    while at < total:
        chunk = _next(ctx, c.CHUNKS_TAKEN, sender)
        if not wait(ctx, sent, chunk, sender):
            return c.STOPPED
        slot = _slot(ctx, sender, rank, chunk)
        total = max(load_i64(slot + 8), 1)
        if at == 0 and (load_i64(slot) != call or load_i64(slot + 8) != num_bytes):
            status = c.mismatch(ctx, sender, c.AS_RECEIVER)
            _keep(ctx, call, num_bytes, load_i64(slot), load_i64(slot + 8))
            store_i64(taken + CALL, call)
            store_i64(taken + COUNT, num_bytes)
            store_i64(taken + SOURCE, load_i64(slot + 8))
            store_i64(taken + VOTE, load_i64(slot))
        if status == c.OK:
            memcpy(tensor + at, slot + _HEADER_BYTES, min(capacity, num_bytes - at))
        at += capacity
        delay(ctx)
        signal(taken, chunk)
    return status


@njit(cache=True, nogil=True)
def send(ctx: int, call: int, tensor: int, num_bytes: int, receiver: int) -> int:
    """Sends ``num_bytes`` at ``tensor``; returns once the last chunk is in the queue."""
    if not c.enter(ctx):
        return c.REFUSED
    return c.leave(ctx, _send(ctx, call, tensor, num_bytes, receiver))


@njit(cache=True, nogil=True)
def receive(ctx: int, call: int, tensor: int, num_bytes: int, sender: int) -> int:
    """Receives the sender's next message, which must be of ``num_bytes`` and the same dtype."""
    if not c.enter(ctx):
        return c.REFUSED
    return c.leave(ctx, _receive(ctx, call, tensor, num_bytes, sender))


@njit(cache=True, nogil=True)
def probe(ctx: int, sender: int, waits: int) -> int:
    """OK if the sender's next chunk is in the queue; else STOPPED, at once or (``waits``) when ``POLL`` says so."""
    sent = c.peer_address(ctx, c.get(ctx, c.RANK), c.get(ctx, c.SENT) + sender * LINE_BYTES)
    chunk = load_i64(c.get(ctx, c.CHUNKS_TAKEN) + 8 * sender) + 1
    if waits:
        return c.OK if wait(ctx, sent, chunk, sender) else c.STOPPED
    return c.OK if reached(sent, chunk) else c.STOPPED


@njit(cache=True, nogil=True)
def room(ctx: int, receiver: int) -> int:
    """Bytes that ``send`` to the receiver can take at once, without waiting."""
    taken = c.peer_address(ctx, c.get(ctx, c.RANK), c.get(ctx, c.TAKEN) + receiver * LINE_BYTES)
    in_queue = (load_i64(c.get(ctx, c.CHUNKS_SENT) + 8 * receiver) - load_acquire(taken)) & 0xFFFFFFFF
    return (NUM_MESSAGE_SLOTS - in_queue) * (c.get(ctx, c.MESSAGE_BYTES) - _HEADER_BYTES)
