"""What a plan must give, to the bit: runs its table with torch, a step at a time, in the types that it promises.

Partial results stay in the accumulator (``schedule.dtypes.partial_dtype`` loses nothing), so the result differs from
``oracle.emulate`` by the order of the sum alone, and the bounds of ``oracle`` hold as they are: γ_{W−1} bounds every
order of W − 1 additions (Higham, 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.plan import KEEP, Plan
from symmcomm.testing.oracle import combine_accumulators, finish_accumulator, widen


def emulate_plan(
    plan: Plan, inputs: Sequence[Sequence[Tensor]], dtype: DType, op: Op, lane: int = 0
) -> list[Tensor]:
    """For each segment the reduction of the ranks' parts of it, ``inputs[rank][segment]``, in a lane's order."""
    if plan.world_size == 1:
        return [inputs[0][0].clone()]
    sent: dict[tuple[int, int, int, int], Tensor] = {}
    kept: dict[int, Tensor] = {}
    waiting = sorted(
        ((step.round, rank, idx) for rank, steps in enumerate(plan.steps) for idx, step in enumerate(steps)),
    )
    for _, rank, idx in waiting:
        step = plan.steps[rank][idx]
        if not step.own or step.segment in kept or step.lane != lane:
            continue  # other lanes, and what only moves finished segments
        total = widen(inputs[rank][step.segment], dtype)
        for number, source in enumerate(step.sources):
            came = sent[source.sender, rank, step.segment, step.lane]
            pair = (came, total) if number == 0 else (total, came)
            total = combine_accumulators(*pair, dtype, op)
        if step.target == KEEP:
            kept[step.segment] = finish_accumulator(total, plan.world_size, dtype, op)
        else:
            sent[rank, step.target, step.segment, step.lane] = total
    return [kept[segment] for segment in range(plan.world_size)]
