"""Local search on an order: swaps on its critical path, and fusing I and W where the split gains nothing.

**Swaps.** A schedule gets shorter only if two adjacent ops of one rank on the critical path are swapped. Each iteration
times one such swap and keeps it unless the makespan (or, if equal, the sum of the ranks' end times) grows. This is the
classical neighbourhood of job-shop scheduling.

**Fusing.** A split backward costs one instruction more than B, and often more time. An I directly followed by its own W
becomes B if no other rank waits for the I.
"""

from __future__ import annotations

import random
from typing import Any

from fourfold.program.engine import OpTimes, Order, Problem, levels, run

__all__ = ["fuse", "improve"]

_Op = tuple[int, str, int]


def improve(problem: Problem, order: Order, rng: random.Random, evaluations: int) -> tuple[list[list[_Op]], int]:
    """(order, number of swaps timed): at most `evaluations` swaps; never slower than before, never over the memory cap."""
    budget = evaluations
    best = [list(ops) for ops in order]
    where = {op: (rank, i) for rank, ops in enumerate(best) for i, op in enumerate(ops)}
    times = run(problem, best)
    value = _value(times)
    while evaluations > 0:
        pairs = _swappable(best, where, times)
        rng.shuffle(pairs)
        improved = False
        for rank, i in pairs:
            if evaluations <= 0:
                break
            ops = best[rank]
            ops[i], ops[i + 1] = ops[i + 1], ops[i]
            if problem.cap is None or max(levels(problem, ops)) <= problem.cap:
                evaluations -= 1
                tried = run(problem, best)
                if not tried.stuck and (_value(tried) < value or (_value(tried) == value and rng.random() < 0.5)):
                    where[ops[i]], where[ops[i + 1]] = (rank, i), (rank, i + 1)
                    times, value, improved = tried, _value(tried), True
                    break
            ops[i], ops[i + 1] = ops[i + 1], ops[i]
        if not improved:
            break
    return best, budget - evaluations


def _value(times: OpTimes) -> tuple[Any, Any]:
    return times.makespan, sum(row[-1] for row in times.ends if row)


def _swappable(order: list[list[_Op]], where: dict[_Op, tuple[int, int]], times: OpTimes) -> list[tuple[int, int]]:
    """(rank, index) of ops on a critical path that run directly before the next op of their rank and may swap with it."""
    rank = max(range(len(order)), key=lambda r: times.ends[r][-1] if times.ends[r] else -1)
    i = len(order[rank]) - 1
    pairs = []
    while times.starts[rank][i] > 0:
        op, start = order[rank][i], times.starts[rank][i]
        if i and times.ends[rank][i - 1] == start:
            i -= 1
            before = order[rank][i]
            if op[:2] != before[:2] and not _needs(op, before):  # stages process micro-batches in order
                pairs.append((rank, i))
        else:
            source = _source(op, where)
            if source is None:
                break
            rank, i = where[source]
    return pairs


def _needs(op: _Op, other: _Op) -> bool:
    """Whether `op` needs the result of `other`, an op of the same rank."""
    (stage, kind, m), (stage2, kind2, m2) = op, other
    if m != m2:
        return False
    if stage == stage2:
        return (kind, kind2) in {("B", "F"), ("I", "F"), ("W", "I")}
    if kind == "F":
        return kind2 == "F" and stage2 == stage - 1
    return kind in "BI" and kind2 in "BI" and stage2 == stage + 1


def _source(op: _Op, where: dict[_Op, tuple[int, int]]) -> _Op | None:
    stage, kind, m = op
    if kind == "F":
        return (stage - 1, "F", m)
    return next((source for k in "BI" if (source := (stage + 1, k, m)) in where), None)


def fuse(problem: Problem, order: Order) -> list[list[_Op]]:
    """The order with adjacent I and W fused to B where that delays no consumer of the gradient."""
    times = run(problem, order)
    start_of = {op: times.starts[rank][i] for rank, ops in enumerate(order) for i, op in enumerate(ops)}
    c = problem.costs
    out: list[list[_Op]] = []
    for rank, ops in enumerate(order):
        row: list[_Op] = []
        for i, op in enumerate(ops):
            stage, kind, m = op
            if kind == "I" and i + 1 < len(ops) and ops[i + 1] == (stage, "W", m):
                whole = times.starts[rank][i] + c.backward[stage] + (c.up[stage - 1] if stage else 0)
                reader = next((x for k in "BI" if (x := (stage - 1, k, m)) in start_of), None)
                if reader is None or whole <= start_of[reader]:
                    row.append((stage, "B", m))
                    continue
            if kind == "W" and row and row[-1] == (stage, "B", m):
                continue
            row.append(op)
        out.append(row)
    return out
