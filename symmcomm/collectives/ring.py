"""Reduce-scatter and all-reduce by ring schedules, or by a schedule of one's own."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from symmcomm.collectives.call import NUM_BLOCKS_LIMIT, Kind, encode, parse_reduction
from symmcomm.errors import ArgumentError, PlanError
from symmcomm.kernels.cpu import ring as kernel
from symmcomm.kernels.cpu.ring import addition
from symmcomm.memory.signals import NUM_SLOTS
from symmcomm.schedule.cost import RingMode, plan_of
from symmcomm.schedule.dtypes import partial_dtype
from symmcomm.schedule.plan import ROW_FIELDS, SOURCE_FIELDS, Plan, all_reduce_of
from symmcomm.schedule.simulate import simulate
from symmcomm.schedule.topology import Topology

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

_LEAST_SLOT_BYTES = 64 * 8  # of any type


def ring_block(
    self: Communicator, kind: Kind, dtype: torch.dtype, op: object, mode: RingMode | Plan | None, num_blocks: int
) -> int:
    """Address of what the ring kernel is told (words: ``kernels.cpu.ring``), prepared on the first such call; 0 if the
    mode is the direct exchange.

    Raises ArgumentError, DTypeError, TopologyError (no such ring on this topology), PlanError (a plan that is wrong).
    """
    key = ("ring", kind, dtype, op, mode, num_blocks)
    try:
        return self.reductions[key]
    except (KeyError, TypeError):  # new, or an op that cannot be looked up
        pass
    own_dtype, own_op = parse_reduction(dtype, op)
    plan = checked_plan(kind, mode, num_blocks, self.topology, self.world_size)
    if plan is None:
        return 0
    _check_room(self, plan)
    tag = (3, zlib.crc32(f"{plan!r}{num_blocks}".encode()) % NUM_BLOCKS_LIMIT)
    if isinstance(mode, RingMode):
        tag = (list(RingMode).index(mode), num_blocks)
    partial = partial_dtype(own_dtype, own_op)
    functions = [addition(own_dtype, partial, own_op, many and plan.num_sources > 1) for many in (False, True)]
    rows = np.array(plan.table(self.rank), dtype=np.int64)
    row_words = len(ROW_FIELDS) + len(SOURCE_FIELDS) * plan.num_sources
    words = np.zeros(kernel.SOURCES + 2 * max(plan.num_sources, 1), dtype=np.int64)
    words[: kernel.SOURCES] = [
        encode(kind, dtype, own_op, schedule=tag), own_dtype.itemsize, *functions, partial.itemsize,
        rows.ctypes.data, len(rows), row_words, max(plan.num_slots, 1), plan.num_signals, plan.num_lanes,
        int(plan.pull), num_blocks, self.tile_address,
    ]  # fmt: skip
    self.blocks += [rows, words]
    address: int = words.ctypes.data
    self.reductions[key] = address
    return address


def checked_plan(
    kind: Kind, mode: RingMode | Plan | None, num_blocks: int, topology: Topology, world_size: int
) -> Plan | None:
    """The plan that the two arguments of a call ask for; None for the direct exchange. Raises ArgumentError,
    TopologyError, and PlanError for a plan that does not do what the call is for."""
    if mode is None or mode is RingMode.All2All:
        if num_blocks != 0:
            raise ArgumentError(f"num_blocks={num_blocks} is for rings, ring_mode is {mode}")
        return None
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or not 0 <= num_blocks < NUM_BLOCKS_LIMIT:
        raise ArgumentError(f"num_blocks={num_blocks!r} is not a whole number of 0..{NUM_BLOCKS_LIMIT - 1}")
    if not isinstance(mode, RingMode | Plan):
        raise ArgumentError(f"ring_mode={mode!r} is not a RingMode, a Plan or None")
    gathers = kind is Kind.all_reduce
    if isinstance(mode, RingMode):
        plan = plan_of(mode, topology)
        return all_reduce_of(plan) if gathers else plan
    if mode.world_size != world_size:
        raise PlanError(f"{mode.name} is for {mode.world_size} ranks, the communicator has {world_size}")
    if not mode.reduces or mode.gathers != gathers:
        raise PlanError(f"{mode.name} is no {'all-reduce' if gathers else 'reduce-scatter'}")
    simulate(mode)
    return mode


def _check_room(self: Communicator, plan: Plan) -> None:
    """Raises PlanError unless staging memory holds two sets of the plan's slots."""
    room = NUM_SLOTS * self.layout.slot_bytes // (2 * max(plan.num_slots, 1))
    if room < _LEAST_SLOT_BYTES or plan.num_sources > 255:
        raise PlanError(
            f"{plan.name} needs {plan.num_slots} slots, which leaves {room} bytes of staging memory for each (at least "
            f"{_LEAST_SLOT_BYTES}), and adds up to {plan.num_sources} messages at once (at most 255)"
        )
