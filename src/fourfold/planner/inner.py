"""The inner search: for one layout and one rank of its pipeline, the choice of every unit.

A rank's memory is what its units hold all step, what they keep of every micro-batch in flight, and the largest of what they hold
for a while. The last is no sum, so the few values it can have are tried in turn: options above it are left out, and it comes
off the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from fourfold.planner.choice import Chosen, Group, choose
from fourfold.planner.layout import Layout
from fourfold.planner.options import Option, RankLoad, Solver
from fourfold.planner.units import Choice

__all__ = ["Solved", "free_bytes", "frugal_bytes", "frugal_rank", "solve_rank"]

SAME = 1e-12
"""Seconds: options that differ by less are as fast."""
Table = list[tuple[str, int, list[Option]]]
"""By kind of unit, its number and its options."""


@dataclass(frozen=True)
class Solved:
    """A rank's choices and their seconds in a step, beyond what the units compute anyway."""

    seconds: float
    bound: float
    memory: float
    """Bytes held, without those held for a while."""
    needs: float
    """The least budget in which the choice would be this one or better."""
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


class _Rank:
    """What is known of a rank: its table, and the least budget in which memory does not bind."""

    def __init__(self, table: Table):
        self.table, self.fastest = table, _fastest(table)
        self.free, self.limits = _least_budget(self.fastest)
        self.solved: dict[float, Solved | None] = {}

    @cached_property
    def frugal(self) -> float:
        return _least_budget(self.table)[0]


def _rank(solver: Solver, layout: Layout, load: RankLoad) -> _Rank:
    key = (*solver.key(layout), load)
    known: _Rank | None = solver.known.get(key)
    if known is None:
        known = solver.known[key] = _Rank(_table(solver, layout, load))
    return known


def frugal_bytes(solver: Solver, layout: Layout, load: RankLoad) -> float:
    """The least budget in which `solve_rank` finds something."""
    return _rank(solver, layout, load).frugal


def free_bytes(solver: Solver, layout: Layout, load: RankLoad) -> float:
    """The least budget in which memory does not bind: every unit has the fastest of its options."""
    return _rank(solver, layout, load).free


def _least_budget(table: Table) -> tuple[float, list[float]]:
    """Bytes that the smallest options need, and the limits of transient bytes (of sharding, of recomputation) for that."""
    total, limits = 0.0, []
    for rows in (table[0::2], table[1::2]):
        best = (inf, 0.0)
        for limit in {o.transient for _, _, options in rows for o in options}:
            held = 0.0
            for _, n, options in rows:
                held += n * min([o.memory for o in options if o.transient <= limit], default=inf)
            best = min(best, (limit + held, limit))
        total += best[0]
        limits.append(best[1])
    return total, limits


def _fastest(table: Table) -> Table:
    """Of every row the fastest options."""
    out = []
    for kind, n, options in table:
        least = min([o.seconds for o in options]) + SAME
        out.append((kind, n, [o for o in options if o.seconds <= least]))
    return out


def _table(solver: Solver, layout: Layout, load: RankLoad) -> Table:
    """For every kind of unit, how many there are and how they can be sharded; then what they can recompute."""
    table: Table = []
    m, flight, piped = layout.micro_batches, load.in_flight, layout.mesh.pipe > 1
    for kind, count in load.units:
        table.append((kind, count, solver.sharding(layout, kind, piped)))
        again = solver.recompute(layout, kind)
        table.append((kind, count, [Option(o.choice, m * o.seconds, flight * o.memory, o.transient) for o in again]))
    return table


def solve_rank(solver: Solver, layout: Layout, load: RankLoad, budget: float) -> Solved | None:
    """The fastest choices within the budget, or None."""
    rank = _rank(solver, layout, load)
    if budget not in rank.solved:
        free = budget >= rank.free  # the fastest option of every unit; of those, the smallest
        rank.solved[budget] = (
            _smallest(rank.fastest, rank.free, rank.limits, True) if free else _solve_rank(rank.table, budget)
        )
    return rank.solved[budget]


def frugal_rank(solver: Solver, layout: Layout, load: RankLoad) -> Solved:
    """The smallest choices."""
    table = _rank(solver, layout, load).table
    return _smallest(table, *_least_budget(table), False)


def _smallest(table: Table, needs: float, limits: Sequence[float], free: bool) -> Solved:
    """Of every row the smallest option that is within the limits of transient bytes (of sharding, of recomputation)."""
    picked = [
        [min([o for o in options if o.transient <= limits[i % 2]], key=lambda o: (o.memory, o.seconds))]
        for i, (_, _, options) in enumerate(table)
    ]
    counts = [n for _, n, _ in table]
    seconds = sum(n * o.seconds for n, (o,) in zip(counts, picked, strict=True))
    memory = sum(n * o.memory for n, (o,) in zip(counts, picked, strict=True))
    chosen = Chosen(tuple({0: n} for n in counts), seconds, memory, seconds, 0.0)
    return _solved(table, (chosen, picked), seconds, needs, free)


def _solve_rank(table: Table, budget: float) -> Solved | None:
    best: tuple[Chosen, list[list[Option]]] | None = None
    bound, needs = None, 0.0
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
            if sum(g.smallest for g in groups) > room:
                continue
            chosen = choose(groups, room, below=inf if best is None else best[0].seconds)
            if chosen is None:
                continue
            bound = chosen.bound if bound is None else min(bound, chosen.bound)
            if best is None or chosen.seconds < best[0].seconds - SAME:
                best, needs = (chosen, [options for options, _ in rows]), chosen.memory + height + work
    if best is None or bound is None:
        return None
    return _solved(table, best, bound, needs, free=False)


def _apart(values: set[float]) -> list[float]:
    """The largest first, the smallest last; between them those that differ by a tenth or more."""
    out: list[float] = []
    for value in sorted(values, reverse=True):
        if not out or value < 0.9 * out[-1]:
            out.append(value)
    smallest = min(values)
    return out if out[-1] == smallest else [*out, smallest]


def _solved(
    table: Table,
    best: tuple[Chosen, list[list[Option]]],
    bound: float,
    needs: float,
    free: bool,
) -> Solved:
    chosen, allowed = best
    picked = [
        tuple((options[k].choice, n) for k, n in sorted(counts.items(), key=lambda item: options[item[0]].memory))
        for counts, options in zip(chosen.counts, allowed, strict=True)
    ]
    options = tuple((table[i][0], picked[i], picked[i + 1]) for i in range(0, len(table), 2))
    return Solved(chosen.seconds, bound, chosen.memory, needs, options, free)
