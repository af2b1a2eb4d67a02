"""Straggler detection: ranks that take longer than their replicas for the same ops.

Every step, each rank adds the seconds it spent in forwards, in backwards (of inputs) and in weight gradients to the vector that
all ranks exchange anyway. Ranks that hold the same stages and the same part of every matrix do the same work, so their times are
compared: a rank whose time for a kind of op is `FACTOR` times the median of its peers, in `WINDOWS` windows of `WINDOW` steps in
a row, is reported. Time in which an op waits for a collective counts: if ranks wait for each other inside ops (a tensor grid,
gathers that are not overlapped), a slow rank makes its neighbours look slow, too. Without replicas nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fourfold.program.groups import coordinates_of

__all__ = ["KINDS", "WINDOW", "WINDOWS", "Stragglers", "op_seconds"]

KINDS = ("F", "B", "W")
WINDOW, WINDOWS, FACTOR = 10, 3, 1.3
SAME = ("pipe", "row", "col")
"""Axes along which ranks do different work."""


def op_seconds(spans: Iterable[Any], seconds: Callable[[Any, Any], float]) -> tuple[float, float, float]:
    """Seconds in forwards, backwards (B and I) and weight gradients of a step."""
    total = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        kind = next(c for c in span.what if c.isalpha())
        total["B" if kind == "I" else kind] += seconds(span.start, span.end)
    return total["F"], total["B"], total["W"]


class Stragglers:
    """Collects all ranks' times per kind of op; reports after each window whether a rank is slow."""

    def __init__(self, degrees: Mapping[str, int], ranks: int):
        places = [coordinates_of(dict(degrees), rank) for rank in range(ranks)]
        keys = [tuple(place[axis] for axis in SAME) for place in places]
        self._peers = [[r for r in range(ranks) if r != me and keys[r] == keys[me]] for me in range(ranks)]
        self._sums = [[0.0] * len(KINDS) for _ in range(ranks)]
        self._steps = 0
        self._slow: dict[tuple[int, str], int] = {}  # windows in a row

    def add(self, times: Sequence[Sequence[float]]) -> dict[str, Any] | None:
        """Add a step, [ranks, kinds] seconds; at the end of a window, return the slowest rank if it was slow in several."""
        for total, seconds in zip(self._sums, times, strict=True):
            for k, value in enumerate(seconds):
                total[k] += value
        self._steps += 1
        if self._steps < WINDOW:
            return None
        found: list[tuple[float, dict[str, Any]]] = []
        windows: dict[tuple[int, str], int] = {}
        for rank, peers in enumerate(self._peers):
            for k, kind in enumerate(KINDS):
                usual = median(self._sums[p][k] for p in peers) if peers else 0.0
                if usual and self._sums[rank][k] > FACTOR * usual:
                    windows[rank, kind] = self._slow.get((rank, kind), 0) + 1
                    if windows[rank, kind] >= WINDOWS:
                        mine = self._sums[rank][k]
                        found.append((mine - usual, {"rank": rank, "op": kind, "slower": round(mine / usual, 2)}))
        self._slow, self._steps = windows, 0
        self._sums = [[0.0] * len(KINDS) for _ in self._sums]
        return max(found, key=lambda item: item[0])[1] if found else None
