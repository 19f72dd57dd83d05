"""Kernels of messages, signals and words compile to PTX and machine code with no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import PER_ARCHITECTURE, ptx_of

from symmcomm.schedule.layout_gpu import NUM_MESSAGE_LANES, NUM_MESSAGE_SLOTS, Layout, MessageLayout

pytest.importorskip("cutlass")

from symmcomm.kernels.gpu.compile import compiled
from symmcomm.kernels.gpu.point_to_point import Message
from symmcomm.kernels.gpu.store_words import StoreWords
from symmcomm.kernels.gpu.swap_signal import SwapSignal


@PER_ARCHITECTURE
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("sends", [True, False])
def test_message(arch: str, world_size: int, sends: bool, tmp_path: Path) -> None:
    ptx = ptx_of(Message(world_size=world_size, sends=sends), arch, tmp_path)
    for access in ("st.release.sys.global.b32", "ld.acquire.sys.global.b32", "ld.relaxed.sys.global.v4.b32"):
        assert access in ptx


@PER_ARCHITECTURE
def test_signals_and_words(arch: str, tmp_path: Path) -> None:
    for puts in (True, False):
        assert "atom.acq_rel.sys.global.cas.b32" in ptx_of(SwapSignal(world_size=4, puts=puts), arch, tmp_path)
    assert ptx_of(StoreWords(num=5), arch, tmp_path).count("st.weak.global.b64") == 5


def test_words_are_a_tuple_of_python_numbers(tmp_path: Path) -> None:
    store = compiled(StoreWords(num=3), "sm_90a", tmp_path)
    with pytest.raises(ValueError, match="expected tuple size=3"):
        store(0, 0, 0, 0, (1, 2), 0)


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_queues_do_not_overlap(world_size: int) -> None:
    layout, lanes = MessageLayout.create(world_size), world_size * NUM_MESSAGE_LANES
    assert Layout.create(world_size).data <= layout.counters
    ends = [
        (layout.counters + 8 * lanes, layout.sent),
        (layout.sent + 4 * lanes, layout.taken),
        (layout.taken + 4 * lanes, layout.headers),
        (layout.headers + 8 * lanes * NUM_MESSAGE_SLOTS, layout.slots),
        (layout.slots + lanes * NUM_MESSAGE_SLOTS * layout.chunk_bytes, layout.end),
    ]
    assert all(end <= start for end, start in ends)
    assert layout.slots % 128 == 0
    assert layout.chunk_bytes % 128 == 0
