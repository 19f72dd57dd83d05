"""What every kernel knows: the flat address space, who it is, and where pads and LL areas lie.

Peer p's heap is at ``base + p · stride``. CTA b is channel b: its epoch is a word of the rank's private state, read
when the CTA starts and advanced by that CTA when it ends. So a call needs no number from the host, a CUDA graph can be
replayed, and channels of ranks agree as long as all ranks make the same calls, with grids that follow from what they
know alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from symmcomm.kernels.gpu.primitives import load, pick, sleep, store
from symmcomm.schedule import layout_gpu as at
from symmcomm.schedule.layout_gpu import Layout


@dataclass(frozen=True)
class Context:
    """Put together while a kernel is traced; ``base``, ``stride`` and ``rank`` are values of the running kernel."""

    base: Any
    stride: Any
    rank: Any
    layout: Layout

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def state(self) -> Any:
        """Address of the rank's private state."""
        return self.peer_address(self.rank, 0)

    def peer_address(self, peer: Any, offset: Any) -> Any:
        """Where byte ``offset`` of the peer's heap is in this process."""
        return self.base + Int64(peer) * self.stride + Int64(offset)

    def neighbour(self, step: Any) -> Any:
        """The rank ``step`` (0 ≤ step ≤ world_size) after this one, round the ring."""
        peer = self.rank + Int32(step)
        return peer - Int32(peer >= Int32(self.world_size)) * Int32(self.world_size)

    @property
    def senders(self) -> list[Any]:
        """Ranks whose slots are read: the other one of two, else all (the own one is not used, but has an index)."""
        if self.world_size == 2:
            return [Int32(1) - self.rank]
        return [Int32(peer) for peer in range(self.world_size)]

    def in_rank_order(self, own: list[Any], came: list[list[Any]]) -> list[list[Any]]:
        """The numbers of all ranks: this one's ``own``, and those that came from the ``senders``."""
        others = came * 2 if self.world_size == 2 else came
        return [
            [pick(self.rank == peer, mine, theirs) for mine, theirs in zip(own, other, strict=True)]
            for peer, other in enumerate(others)
        ]

    def pad(self, peer: Any, channel: Any, sender: Any) -> Any:
        """The word in the peer's heap that ``sender`` signals on a channel."""
        offset = self.layout.pads + channel * Int32(self.layout.pad_bytes) + sender * Int32(4)
        return self.peer_address(peer, offset)

    def ll_slot(self, peer: Any, channel: Any, epoch: Any, sender: Any) -> Any:
        """Where ``sender`` puts LL cells for the channel's epoch, in the peer's heap."""
        slot = Int32(epoch & Uint32(1)) * Int32(self.world_size) + Int32(sender)
        in_channel = slot * Int32(self.layout.ll_slot_bytes)
        return self.peer_address(peer, Int64(self.layout.ll) + Int64(channel) * at.CHANNEL_LL_BYTES + Int64(in_channel))

    def staging_slot(self, peer: Any, channel: Any, number: Any, sender: Any) -> Any:
        """Where ``sender`` puts the channel's chunk of that number, in the peer's heap."""
        slot = Int32(number & Uint32(at.DEPTH - 1)) * Int32(self.world_size) + Int32(sender)
        in_channel = slot * Int32(self.layout.staging_slot_bytes)
        offset = Int64(self.layout.staging) + Int64(channel) * at.CHANNEL_STAGING_BYTES + Int64(in_channel)
        return self.peer_address(peer, offset)

    def split(self, peer: Any, channel: Any, number: Any, sender: Any) -> Any:
        """Where ``sender`` says how much it sends and awaits, beside the chunk of that number."""
        slot = Int32(number & Uint32(at.DEPTH - 1)) * Int32(self.world_size) + Int32(sender)
        index = channel * Int32(at.DEPTH * self.world_size) + slot
        return self.peer_address(peer, Int32(self.layout.splits) + index * Int32(at.SPLIT_BYTES))


def thread() -> Any:
    """Index of the thread in its CTA."""
    return cute.arch.thread_idx()[0]


def block() -> Any:
    """Index of the CTA, which is its channel."""
    return cute.arch.block_idx()[0]


def after_previous_kernel(early: bool) -> None:
    """``early``: the kernel is launched so that its CTAs may take their places while the one before still runs
    (programmatic dependent launch, from sm_90 on), and waits here until that one is done and its writes are seen; then
    it lets the one after it come, to wait here in turn. What is read sooner must be older than the kernel before. Only
    for small kernels, and not for ranks that share a GPU: a CTA that waits could take a place that the kernel for which
    the one before waits needs. Not ``early``: nothing."""
    if early:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def begin(ctx: cutlass.Constexpr, channel: Int32) -> Any:
    """Starts a CTA: whether the rank is in order, and the channel's epoch so far. An injected delay is served here."""
    failed = load(ctx.state + at.FAILED)[0]
    epoch = load(ctx.state + at.EPOCHS + Int64(channel) * 4)[0]
    if block() == 0:
        delay = load(ctx.state + at.DELAY_NS, Int64)[0]
        if delay > 0:
            sleep(delay)
    return failed != Uint32(at.GAVE_UP), epoch


@cute.jit
def end(ctx: cutlass.Constexpr, channel: Int32, epoch: Uint32) -> None:
    """Ends a CTA: keeps the epoch that it has come to, once all its threads have read the one before."""
    cute.arch.sync_threads()
    if thread() == 0:
        store(ctx.state + at.EPOCHS + Int64(channel) * 4, [epoch])
