"""The multiple-choice knapsack behind the choice unit by unit, with a bound on how good the answer is.

There are groups of identical units; every unit takes one option (bytes, seconds); the bytes must fit in a budget and the total
seconds be least. Only the lower convex hull of a group's options matters to the relaxed problem: walk down all hulls at once, the
steepest step (seconds saved per byte) first, until the budget ends inside a step. That step, taken in part, is the relaxed
optimum: no whole choice can be faster, so

    bound  ≤  optimum  ≤  what is returned          gap = seconds / bound - 1

The slope of the last step is the price of memory: seconds that one more byte would save. The remaining room goes to later,
smaller steps, and to options off the hull. With few units, all mixes are compared and the answer is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

__all__ = ["Chosen", "Group", "choose", "relaxed"]

_MOST_MIXES = 60_000
"""Mixes compared by the exact search, at most; with more, the approximate answer stands."""


@dataclass(frozen=True)
class Group:
    """`count` identical units, each takes one of the options (bytes, seconds)."""

    options: Sequence[tuple[float, float]]
    count: int = 1

    @cached_property
    def hull(self) -> list[int]:
        return _hull(self.options)

    @cached_property
    def smallest(self) -> float:
        """The least bytes of all its units."""
        return self.count * min(memory for memory, _ in self.options)

    @cached_property
    def fastest(self) -> float:
        """The least seconds of all its units."""
        return self.count * min(seconds for _, seconds in self.options)


@dataclass(frozen=True)
class Chosen:
    """How many units of every group take which option."""

    counts: tuple[dict[int, int], ...]
    """By group: {option: units}."""
    seconds: float
    memory: float
    bound: float
    """Lower bound on the seconds of any choice within the budget."""
    price: float
    """Seconds that one more byte would save; 0 where memory does not bind."""

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else 0.0


def choose(groups: Sequence[Group], budget: float, exact: bool = False, below: float = math.inf) -> Chosen | None:
    """The fastest choice within `budget` bytes, or None where not even the smallest fits.

    Where no choice can take less than `below` seconds, only the bound is computed. `exact`: compare all mixes.
    """
    chosen = relaxed(groups, budget)
    if chosen is None or chosen.gap <= 0 or chosen.bound >= below:
        return chosen
    chosen = _use_remaining(groups, chosen, budget)
    if exact and chosen.gap > 0:
        return _compare_mixes(groups, chosen, budget) or chosen
    return chosen


def relaxed(groups: Sequence[Group], budget: float) -> Chosen | None:
    """The relaxed problem: whole steps down the hulls that fit, and the bound."""
    hulls = [g.hull for g in groups]
    memory = sum(g.count * g.options[h[0]][0] for g, h in zip(groups, hulls, strict=True))
    if memory > budget:
        return None
    seconds = sum(g.count * g.options[h[0]][1] for g, h in zip(groups, hulls, strict=True))
    steps = []
    for i, (group, hull) in enumerate(zip(groups, hulls, strict=True)):
        options = group.options
        for a, b in pairwise(hull):
            more, less = options[b][0] - options[a][0], options[a][1] - options[b][1]
            steps.append((-less / more, i, a, b, more, less))
    steps.sort(key=lambda s: s[0])
    counts: list[dict[int, int]] = [{h[0]: g.count} for g, h in zip(groups, hulls, strict=True)]
    bound, price = None, 0.0
    for slope, i, a, b, more, less in steps:
        here = counts[i].get(a, 0)
        if not here:
            continue
        room = budget - memory
        fit = here if here * more <= room else int(room // more)
        if fit < here and bound is None:
            bound, price = seconds - less * room / more, -slope
        if fit:
            counts[i][a] = here - fit
            counts[i][b] = counts[i].get(b, 0) + fit
            memory += fit * more
            seconds -= fit * less
    counts = [{k: n for k, n in c.items() if n} for c in counts]
    return Chosen(tuple(counts), seconds, memory, seconds if bound is None else min(bound, seconds), price)


def _hull(options: Sequence[tuple[float, float]]) -> list[int]:
    """Options on the lower convex hull, from the smallest to the fastest."""
    order = sorted(range(len(options)), key=lambda i: options[i])
    hull: list[int] = []
    for i in order:
        memory, seconds = options[i]
        if hull and seconds >= options[hull[-1]][1]:
            continue
        while len(hull) >= 2:
            (m0, s0), (m1, s1) = options[hull[-2]], options[hull[-1]]
            if (s0 - s1) * (memory - m1) <= (s1 - seconds) * (m1 - m0):
                hull.pop()
            else:
                break
        hull.append(i)
    return hull


def _use_remaining(groups: Sequence[Group], chosen: Chosen, budget: float) -> Chosen:
    """Use the remaining room: any unit may change to any faster option that fits."""
    counts = [dict(c) for c in chosen.counts]
    seconds, memory = chosen.seconds, chosen.memory
    changed = True
    while changed:
        changed = False
        best: tuple[float, int, int, int, int] | None = None
        for i, group in enumerate(groups):
            for a, here in counts[i].items():
                if not here:
                    continue
                for b, (size, time) in enumerate(group.options):
                    more, less = size - group.options[a][0], group.options[a][1] - time
                    if less <= 0 or more > budget - memory:
                        continue
                    fit = here if more <= 0 else min(here, int((budget - memory) // more))
                    if fit and (best is None or less * fit > best[0]):
                        best = (less * fit, i, a, b, fit)
            if best is not None and len(groups) > 60:  # with many distinct units one pass is enough
                counts, seconds, memory = _move(groups, counts, seconds, memory, best)
                best = None
        if best is not None and best[0] > 0:
            counts, seconds, memory = _move(groups, counts, seconds, memory, best)
            changed = True
    kept = tuple({k: n for k, n in c.items() if n} for c in counts)
    return Chosen(kept, seconds, memory, min(chosen.bound, seconds), chosen.price)


def _move(
    groups: Sequence[Group],
    counts: list[dict[int, int]],
    seconds: float,
    memory: float,
    move: tuple[float, int, int, int, int],
) -> tuple[list[dict[int, int]], float, float]:
    less, i, a, b, fit = move
    counts[i][a] -= fit
    counts[i][b] = counts[i].get(b, 0) + fit
    return counts, seconds - less, memory + fit * (groups[i].options[b][0] - groups[i].options[a][0])


def _compare_mixes(groups: Sequence[Group], chosen: Chosen, budget: float) -> Chosen | None:
    """Dynamic programming over all mixes that are not dominated; None where there are too many.

    Price every byte: a mix whose options cost more than the gap above the cheapest ones is slower than what was chosen.
    """
    least = [min(o[0] for o in g.options) for g in groups]
    rest = [0.0] * (len(groups) + 1)
    for i in range(len(groups) - 1, -1, -1):
        rest[i] = rest[i + 1] + groups[i].count * least[i]
    gap = (chosen.seconds - chosen.bound) * (1 + 1e-9) + 1e-12 * chosen.seconds
    near: list[list[tuple[int, float, float, float]]] = []  # per group: option, bytes, seconds, extra priced cost
    for g in groups:
        paid = [s + chosen.price * m for m, s in g.options]
        cheapest = min(paid)
        near.append(
            [(k, *o, p - cheapest) for k, (o, p) in enumerate(zip(g.options, paid, strict=True)) if p - cheapest <= gap]
        )
    front: list[tuple[float, float, float, Any]] = [(0.0, 0.0, 0.0, None)]  # path: (earlier path, option)
    looked_at = 0
    places: list[tuple[int, int]] = [(i, n) for i, g in enumerate(groups) for n in range(g.count)]
    for i, n in places:
        left = rest[i + 1] + (groups[i].count - n - 1) * least[i]
        grown = [
            (m + size, s + time, more + extra, (path, k))
            for m, s, more, path in front
            for k, size, time, extra in near[i]
            if m + size + left <= budget and more + extra <= gap
        ]
        grown.sort(key=itemgetter(0, 1))
        front, fastest = [], math.inf
        for point in grown:
            if point[1] < fastest:
                front.append(point)
                fastest = point[1]
        looked_at += len(grown)
        if looked_at > _MOST_MIXES:
            return None
    if not front:
        return None
    memory, seconds, _, path = min(front, key=lambda x: x[1])
    counts: list[dict[int, int]] = [{} for _ in groups]
    for i, _ in reversed(places):
        path, k = path
        counts[i][k] = counts[i].get(k, 0) + 1
    return Chosen(tuple(counts), seconds, memory, seconds, chosen.price)
