"""The inner search: for one layout and one rank of its pipeline, the choice of every unit.

A rank's memory is what its units hold all step, what they keep of every micro-batch in flight, and the largest of what they hold
for a while. The last is no sum, so the few values it can have are tried in turn: options above it are left out, and it comes
off the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fourfold.planner.choice import Chosen, Group, choose
from fourfold.planner.layout import Layout
from fourfold.planner.options import Option, RankLoad, Solver
from fourfold.planner.units import Choice

__all__ = ["Solved", "frugal_bytes", "least_bytes", "rank_bound", "solve_rank"]


@dataclass(frozen=True)
class Solved:
    """A rank's choices and their seconds in a step, beyond what the units compute anyway."""

    seconds: float
    bound: float
    price: float
    memory: float
    options: tuple[tuple[str, tuple[tuple[Choice, int], ...], tuple[tuple[Choice, int], ...]], ...]
    """By kind: how many units are sharded how, and how many recompute how."""
    free: bool
    """Memory does not bind: more of it would change nothing."""

    @property
    def gap(self) -> float:
        return self.seconds - self.bound

    def choices(self, kind: str) -> list[Choice]:
        """A choice for every unit of a kind, those that hold least first."""
        for name, sharding, recompute in self.options:
            if name == kind:
                modes = [c for c, n in sharding for _ in range(n)]
                again = [c for c, n in recompute for _ in range(n)]
                return [a._replace(split=b.split, recompute=b.recompute) for a, b in zip(modes, again, strict=True)]
        return []


def frugal_bytes(solver: Solver, layout: Layout, load: RankLoad) -> float:
    """The least budget in which `solve_rank` finds something."""
    table = _table(solver, layout, load)
    heights = {o.transient for _, _, options in table[0::2] for o in options}
    works = {o.transient for _, _, options in table[1::2] for o in options}

    def least(rows: list[tuple[str, int, list[Option]]], limit: float) -> float:
        return sum(n * min((o.memory for o in options if o.transient <= limit), default=inf) for _, n, options in rows)

    return min(h + least(table[0::2], h) for h in heights) + min(w + least(table[1::2], w) for w in works)


def _table(solver: Solver, layout: Layout, load: RankLoad) -> list[tuple[str, int, list[Option]]]:
    """For every kind of unit, how many there are and how they can be sharded; then what they can recompute."""
    table: list[tuple[str, int, list[Option]]] = []
    for kind, count in load.units:
        table.append((kind, count, solver.sharding(layout, kind, layout.mesh.pipe > 1)))
        again = [
            o._replace(seconds=layout.micro_batches * o.seconds, memory=load.in_flight * o.memory)
            for o in solver.recompute(layout, kind)
        ]
        table.append((kind, count, again))
    return table


def solve_rank(solver: Solver, layout: Layout, load: RankLoad, budget: float, exact: bool = False) -> Solved | None:
    """The fastest choices within the budget, or None."""
    key = (*solver.key(layout), load, budget, exact)
    if key not in solver.solved:
        solver.solved[key] = _solve_rank(solver, layout, load, budget, exact)
    found: Solved | None = solver.solved[key]
    return found


def _solve_rank(solver: Solver, layout: Layout, load: RankLoad, budget: float, exact: bool) -> Solved | None:
    table = _table(solver, layout, load)
    ideal = sum(count * min(o.seconds for o in options) for _, count, options in table)
    best: tuple[Chosen, list[list[Option]]] | None = None
    bound = None
    heights = _apart({o.transient for _, _, options in table[0::2] for o in options})
    works = _apart({o.transient for _, _, options in table[1::2] for o in options})
    below: dict[tuple[int, float], tuple[list[Option], Group]] = {}  # of a row, options with no more transient bytes

    def row(i: int, limit: float) -> tuple[list[Option], Group]:
        if (i, limit) not in below:
            options = [o for o in table[i][2] if o.transient <= limit]
            below[i, limit] = options, Group([(o.memory, o.seconds) for o in options], table[i][1])
        return below[i, limit]

    for height in heights:
        for work in works:
            rows = [row(i, work if i % 2 else height) for i in range(len(table))]
            if not all(options for options, _ in rows):
                break  # nor with less
            groups = [group for _, group in rows]
            if best is not None and sum(g.fastest for g in groups) >= best[0].seconds:
                break
            room = budget - height - work
            chosen = choose(groups, room, exact) if sum(g.smallest for g in groups) <= room else None
            if chosen is None:
                continue
            bound = chosen.bound if bound is None else min(bound, chosen.bound)
            if best is None or chosen.seconds < best[0].seconds - 1e-12:
                best = (chosen, [options for options, _ in rows])
            if chosen.seconds <= ideal * (1 + 1e-12) + 1e-12:
                return _solved(table, best, ideal, free=True)
    if best is None or bound is None:
        return None
    return _solved(table, best, bound, free=False)


def _apart(values: set[float]) -> list[float]:
    """The largest first, the smallest last; between them those that differ by a tenth or more."""
    out: list[float] = []
    for value in sorted(values, reverse=True):
        if not out or value < 0.9 * out[-1]:
            out.append(value)
    smallest = min(values)
    return out if out[-1] == smallest else [*out, smallest]


def rank_bound(solver: Solver, layout: Layout, load: RankLoad, budget: float) -> float | None:
    """Seconds beyond computing that no choice of the rank's units can beat; None where none fits."""
    piped, m = layout.mesh.pipe > 1, layout.micro_batches
    groups, least = [], 0.0
    for kind, count in load.units:
        sharding = solver.sharding(layout, kind, piped, hopeful=True)
        again = solver.recompute(layout, kind)
        groups.append(Group([(o.memory, o.seconds) for o in sharding], count))
        groups.append(Group([(load.in_flight * o.memory, m * o.seconds) for o in again], count))
        least = max(least, min(o.transient for o in again))
    chosen = choose(groups, budget - least)
    return None if chosen is None else chosen.bound


def least_bytes(solver: Solver, layout: Layout, load: RankLoad) -> float:
    """The least bytes with which the rank's units can do."""
    piped = layout.mesh.pipe > 1
    total = transient = 0.0
    for kind, count in load.units:
        sharding, again = solver.sharding(layout, kind, piped), solver.recompute(layout, kind)
        best = min(
            (count * (a.memory + load.in_flight * b.memory) + a.transient + b.transient, a, b)
            for a in sharding
            for b in again
        )
        total += count * (best[1].memory + load.in_flight * best[2].memory)
        transient = max(transient, best[1].transient + best[2].transient)
    return total + transient


def _solved(
    table: list[tuple[str, int, list[Option]]],
    best: tuple[Chosen, list[list[Option]]],
    bound: float,
    free: bool,
) -> Solved:
    chosen, allowed = best
    picked = [
        tuple((options[k].choice, n) for k, n in sorted(counts.items(), key=lambda item: options[item[0]].memory))
        for counts, options in zip(chosen.counts, allowed, strict=True)
    ]
    options = tuple((table[i][0], picked[i], picked[i + 1]) for i in range(0, len(table), 2))
    return Solved(chosen.seconds, bound, 0.0 if free else chosen.price, chosen.memory, options, free)
