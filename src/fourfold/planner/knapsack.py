"""The multiple-choice knapsack that chooses the options of units, with a bound on the distance to the optimum.

There are groups of identical units. Every unit takes one option (bytes, seconds); the total bytes must fit in a budget, and the
total seconds are minimised. Only the lower convex hull of a group's options matters to the relaxed problem: walk down all hulls
at once, the steepest step (seconds saved per byte) first, until the budget ends inside a step. Taking this step fractionally
gives the relaxed optimum: no integral choice can be faster, so

    bound  ≤  optimum  ≤  seconds of the returned choice          gap = seconds / bound - 1

The remaining bytes are spent on later, smaller steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from fourfold.planner.problem import rounded

__all__ = ["Chosen", "Group", "choose"]


@dataclass(frozen=True)
class Group:
    """`count` identical units; each takes one of the options (bytes, seconds)."""

    options: Sequence[tuple[float, float]]
    count: int = 1

    @cached_property
    def hull(self) -> list[int]:
        return _hull(self.options)

    @cached_property
    def smallest(self) -> float:
        """Total bytes if every unit takes its smallest option."""
        return self.count * min(memory for memory, _ in self.options)

    @cached_property
    def fastest(self) -> float:
        """Total seconds if every unit takes its fastest option."""
        return self.count * min(seconds for _, seconds in self.options)


@dataclass(frozen=True)
class Chosen:
    """The number of units of each group that take each option."""

    counts: tuple[dict[int, int], ...]
    """By group: {option: units}."""
    seconds: float
    memory: float
    bound: float
    """Lower bound on the seconds of any choice within the budget."""

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else 0.0


def choose(groups: Sequence[Group], budget: float) -> Chosen | None:
    """A fast choice within `budget` bytes, with its bound; None if not even the smallest fits."""
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
            steps.append((rounded(-less / more), i, a, b, more, less))  # [Note: ties]
    steps.sort(key=itemgetter(0))
    counts: list[dict[int, int]] = [{h[0]: g.count} for g, h in zip(groups, hulls, strict=True)]
    bound = None
    for _, i, a, b, more, less in steps:
        here = counts[i].get(a, 0)
        if not here:
            continue
        room = budget - memory
        fit = here if here * more <= room else int(room // more)
        if fit < here and bound is None:
            bound = seconds - less * room / more
        if fit:
            counts[i][a] = here - fit
            counts[i][b] = counts[i].get(b, 0) + fit
            memory += fit * more
            seconds -= fit * less
    counts = [{k: n for k, n in c.items() if n} for c in counts]
    return Chosen(tuple(counts), seconds, memory, seconds if bound is None else min(bound, seconds))


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
