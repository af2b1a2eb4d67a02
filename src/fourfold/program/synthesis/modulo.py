"""Modulo scheduling: place the ops of a few micro-batches once and repeat them.

In a steady state every rank repeats the same pattern each `period`. So it is enough to find times for the ops of `unroll`
consecutive micro-batches such that no two ops of a rank overlap *modulo* unroll · period; repeated at that distance they fill
the whole schedule. The chain F ... F I ... I of a micro-batch is placed op by op into the first free gap, W after its I.
Short chains hold the least memory, so this finds schedules under low memory caps, where list scheduling uses more.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from typing import Any

from fourfold.program.engine import Problem

__all__ = ["modulo_schedule"]


def modulo_schedule(
    problem: Problem, rng: random.Random, *, unroll: int, delay: float = 0, split: bool = True
) -> list[list[tuple[int, str, int]]] | None:
    """An order that repeats every `unroll` micro-batches; None if some op finds no gap.

    Every op is delayed a little with probability `delay`, which sometimes makes room for others.
    """
    c = problem.costs
    length = problem.period * unroll
    busy = [_Circle(length) for _ in range(problem.ranks)]
    spacing = rng.randrange(1, int(problem.period) + 1) if unroll > 1 else 0
    in_turn = rng.random() < 0.5
    shift = max(1, problem.period // (3 * max(map(len, problem.stages_of))))

    def place(stage: int, ready: Any, takes: Any) -> Any:
        if rng.random() < delay:
            ready += rng.randrange(1, 4) * shift
        return busy[problem.placement[stage]].take(ready, takes)

    at: dict[tuple[int, str, int], Any] = {}
    backward, kind = (c.input_grad, "I") if split else (c.backward, "B")
    last = problem.stages - 1
    chain = [(s, "F", c.forward[s], c.down[s] if s < last else 0) for s in range(problem.stages)]
    chain += [(s, kind, backward[s], c.up[s - 1] if s else 0) for s in reversed(range(problem.stages))]
    ready = [spacing * u for u in range(unroll)]
    reached = [0] * unroll
    while min(reached) < len(chain):
        left = [u for u in range(unroll) if reached[u] < len(chain)]
        u = min(left, key=lambda u: (ready[u], u)) if in_turn else left[0]
        stage, letter, takes, hop = chain[reached[u]]
        start = place(stage, ready[u], takes)
        if start is None:
            return None
        at[stage, letter, u] = start
        ready[u] = start + takes + hop
        reached[u] += 1
    if split:
        for (stage, _, u), start in sorted((x for x in at.items() if x[0][1] == "I"), key=lambda x: (x[1], x[0])):
            begin = place(stage, start + c.input_grad[stage], c.weight_grad[stage])
            if begin is None:
                return None
            at[stage, "W", u] = begin
    return _repeated(problem, at, unroll, length)


def _repeated(
    problem: Problem, at: dict[tuple[int, str, int], Any], unroll: int, length: Any
) -> list[list[tuple[int, str, int]]]:
    """The pattern repeated for all micro-batches, renumbered so that every stage processes them in order.

    Micro-batches cost the same, so if one overtakes another, the two can exchange their numbers.
    """
    rows: list[list[tuple[Any, int, int, str]]] = [[] for _ in range(problem.ranks)]
    for (stage, letter, u), start in at.items():
        for turn, m in enumerate(range(u, problem.micro_batches, unroll)):
            rows[problem.placement[stage]].append((start + turn * length, m, stage, letter))
    order = []
    for row in rows:
        count: dict[tuple[int, str], int] = {}
        ops = []
        for _, _, stage, letter in sorted(row):
            m = count.get((stage, letter), 0)
            count[stage, letter] = m + 1
            ops.append((stage, letter, m))
        order.append(ops)
    return order


class _Circle:
    """The occupied intervals of a rank, modulo `length`."""

    def __init__(self, length: Any):
        self.length = length
        self.taken: list[tuple[Any, Any]] = []  # sorted, within [0, length)

    def take(self, ready: Any, takes: Any) -> Any:
        """Occupy the first free interval of length `takes` that starts at or after `ready`; its start, or None."""
        if takes == 0:
            return ready
        turn, point = divmod(ready, self.length)
        for start, end in self._gaps(point):
            if end - start >= takes:
                self._add(start % self.length, takes)
                return turn * self.length + start
        return None

    def _gaps(self, point: Any) -> list[tuple[Any, Any]]:
        """The free intervals of one period from `point` on, in order; they may extend past `length`."""
        if not self.taken:
            return [(point, point + self.length)]
        gaps = []
        first = bisect_right(self.taken, (point, self.length)) - 1
        position = point
        for k in range(len(self.taken) + 1):
            turn, index = divmod(first + k, len(self.taken))
            start, end = (x + turn * self.length for x in self.taken[index])
            if start > position:
                gaps.append((position, start))
            position = max(position, end)
        if position < point + self.length:
            turn, index = divmod(first + len(self.taken) + 1, len(self.taken))
            gaps.append((position, self.taken[index][0] + turn * self.length))
        return gaps

    def _add(self, start: Any, takes: Any) -> None:
        end = start + takes
        if end > self.length:
            insort(self.taken, (0, end - self.length))
            end = self.length
        insort(self.taken, (start, end))
