"""Partitions layers into stages, so that the ranks' work is balanced.

Layers differ (an embedding is nearly free, a head costs as much as several blocks), and with several stages per rank the
rank's sum counts. Starting from an even split, the busiest rank gives up one layer at a time while that helps: all boundaries
between one of its stages and some other stage shift by one. Partitions are compared lexicographically: the busiest rank
first, then the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs, Number

__all__ = ["Layer", "partition", "stage_costs"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Costs of one layer for one micro-batch."""

    forward: Number
    input_grad: Number
    weight_grad: Number
    activation: Number = 1

    @property
    def work(self) -> Number:
        return self.forward + self.input_grad + self.weight_grad

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ScheduleError(f"layer.{name} = {getattr(self, name)} must be at least 0; use 0 for 'free'")


def partition(work: Sequence[Number], placement: Sequence[int]) -> tuple[int, ...]:
    """Number of layers of every stage, at least one each."""
    stages, layers = len(placement), len(work)
    if layers < stages:
        raise ScheduleError(
            f"{layers} layers, embedding and head among them, cannot fill {stages} stages; use {layers} at most"
        )
    ends = [layers * (s + 1) // stages for s in range(stages)]  # stage s: layers ends[s - 1] to ends[s]
    before: list[Any] = [0, *accumulate(work)]
    loads = _loads(ends, before, placement)
    while True:
        best, best_loads = None, loads
        busiest = max(range(len(loads)), key=lambda r: loads[r])
        for giver in (s for s, rank in enumerate(placement) if rank == busiest):
            for taker in range(stages):
                moved = _moved(ends, giver, taker)
                if moved is not None:
                    new = _loads(moved, before, placement)
                    if sorted(new, reverse=True) < sorted(best_loads, reverse=True):
                        best, best_loads = moved, new
        if best is None:
            return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
        ends, loads = best, best_loads


def _moved(ends: Sequence[int], giver: int, taker: int) -> list[int] | None:
    """The boundaries with one layer moved from `giver` towards `taker`; None if a stage would become empty."""
    new = list(ends)
    if giver < taker:
        for s in range(giver, taker):
            new[s] -= 1
    else:
        for s in range(taker, giver):
            new[s] += 1
    starts = [0, *new[:-1]]
    return new if giver != taker and all(a < b for a, b in zip(starts, new, strict=True)) else None


def _loads(ends: Sequence[int], before: Sequence[Any], placement: Sequence[int]) -> list[Any]:
    loads: list[Any] = [0] * (max(placement) + 1)
    start = 0
    for end, rank in zip(ends, placement, strict=True):
        loads[rank] += before[end] - before[start]
        start = end
    return loads


def stage_costs(layers: Sequence[Layer], counts: Sequence[int], costs: Costs) -> Costs:
    """`costs` with the times and memory of every stage, summed over its layers."""
    ends = list(accumulate(counts))
    runs = [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def sums(name: str) -> tuple[Number, ...]:
        return tuple(sum(getattr(layer, name) for layer in run) for run in runs)

    return replace(
        costs,
        forward=sums("forward"),
        input_grad=sums("input_grad"),
        weight_grad=sums("weight_grad"),
        backward=None,
        activation=sums("activation"),
        weight_grad_activation=None,
    )
