"""Chooses the number of waves: more waves shorten the bubble and add messages.

With W waves, B = P micro-batches and every message exposed, a rank idles  (P - 1) T_B / W + (4 W (P - 1) + 2 P - 4) T_C,  and a
fixed cost t per instruction adds 4 W B t. The sum is minimal at

    W* = sqrt( (P - 1) T_B / (4 (P - 1) T_C + 4 B t) )          without fixed costs t:  sqrt(T_B / (4 T_C)), whatever P

where the search starts; candidates are then compared by simulation.
"""

from __future__ import annotations

import math

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs, Number
from fourfold.program.engine import Problem, peaks, run
from fourfold.program.schedules import MOST_STAGES, at_least, build

__all__ = ["choose_waves", "first_guess"]


def first_guess(ranks: int, micro_batches: int, costs: Costs) -> float:
    """W* of the formula; infinite if messages and instructions cost nothing."""
    if isinstance(costs.message, tuple):
        message = max(costs.hop(a, b, ranks) for a in range(ranks) for b in range(ranks))
    else:
        message = costs.message
    backward = costs.backward if costs.backward is not None else _share(costs.input_grad) + _share(costs.weight_grad)
    price = 4 * (ranks - 1) * message + 4 * micro_batches * costs.instruction
    return math.sqrt((ranks - 1) * _share(backward) / price) if price else math.inf


def _share(value: Number | tuple[Number, ...]) -> Number:
    if isinstance(value, tuple):
        raise ScheduleError("the number of waves is chosen from costs per rank; give single numbers, not one per stage")
    return value


def choose_waves(
    ranks: int, micro_batches: int, costs: Costs, *, most: int = 8, memory_cap: Number | None = None
) -> int:
    """The number of waves, at most `most` (layers / 2P), with the fastest schedule within the cap; local search from W*."""
    at_least(ranks=(ranks, 1), micro_batches=(micro_batches, 1), most=(most, 1))
    most = min(most, MOST_STAGES // 2)
    timed: dict[int, float] = {}

    def time(waves: int) -> float:
        if waves not in timed:
            schedule = build("wave", ranks, micro_batches, waves=waves)
            problem = Problem.of(schedule.placement, ranks, micro_batches, costs)
            fits = memory_cap is None or max(peaks(problem, schedule.order)) <= memory_cap * (1 + 1e-9)
            timed[waves] = run(problem, schedule.order).makespan * problem.tick if fits else math.inf
        return timed[waves]

    best = max(1, min(most, round(min(first_guess(ranks, micro_batches, costs), most))))
    while True:
        better = min((w for w in (best - 1, best, best + 1) if 1 <= w <= most), key=lambda w: (time(w), w))
        if better == best:
            break
        best = better
    if timed[best] == math.inf:
        raise ScheduleError(
            f"no wave schedule of {micro_batches} micro-batches fits in {float(memory_cap or 0):g}; "
            f"use a cap of at least {min(ranks, micro_batches)}, or synthesize"
        )
    return best
