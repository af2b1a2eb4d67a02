"""The stages of a plan as the planner sees them: which units each holds, under which choice, and the seconds of their ops.

A stage's op runs its units one after another; while one computes, the next one's parameters are gathered (zero3). What a
gather takes longer than the unit before it computes is exposed; of what could hide, the cluster's `overlap` says how much does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fourfold.model.operators import ModelSpec, UnitSpec
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.units import Choice, UnitCost, unit_cost
from fourfold.program.costs import Costs

__all__ = ["PlannedUnit", "StageTimes", "exposed", "rank_costs", "stage_times", "units_of_stages"]


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a stage with its choice and cost."""

    spec: UnitSpec
    choice: Choice
    cost: UnitCost


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's ops."""

    forward: float
    input_grad: float
    weight_grad: float
    first: float
    """How much longer the first forward of a step takes, since parameters that are kept are gathered in it."""


def units_of_stages(spec: ModelSpec, counts: Sequence[int]) -> list[list[UnitSpec]]:
    """Units of every stage, from the layers (embedding and head among them) of every stage."""
    ends = list(accumulate(counts))
    return [
        [u for layer in range(end - count, end) for u in spec.of_layer(layer)]
        for end, count in zip(ends, counts, strict=True)
    ]


def plan_units(
    setting: Setting, layout: Layout, stages: Sequence[Sequence[UnitSpec]], choices: dict[str, Choice]
) -> list[list[PlannedUnit]]:
    """The stages' units with their costs; `choices` by unit name."""
    return [
        [PlannedUnit(u, choices[u.name], unit_cost(setting, layout, u.kind, choices[u.name])) for u in units]
        for units in stages
    ]


def exposed(computes: Sequence[float], gathers: Sequence[float], before: float, overlap: float) -> float:
    """Seconds by which gathers, each one unit ahead, lengthen a chain of computations; `before` computes ahead of it."""
    total = sum(gathers)
    if not total:
        return 0.0
    clock, lane, began = 0.0, -before, -before
    for compute, gather in zip(computes, gathers, strict=True):
        lane = max(lane, began) + gather
        began = max(clock, lane) if gather else clock
        clock = began + compute
    late = clock - sum(computes)
    return late + (1 - overlap) * max(0.0, total - late)


def stage_times(setting: Setting, layout: Layout, units: Sequence[PlannedUnit], steady: bool) -> StageTimes:
    """Seconds of a stage's ops; `steady`: some micro-batch is always in flight, so zero2 gathers once a step."""
    overlap, link = setting.cluster.overlap, setting.cluster.host.link
    computes = [u.cost.compute for u in units]
    every = [u.cost.gather if _gathers(u, steady) else 0.0 for u in units]
    forward = [c.forward for c in computes]
    backward = [c.input_grad + c.again for c in computes][::-1]
    again = [u.cost.gather if u.choice.mode == "zero3" else 0.0 for u in units][::-1]
    reductions = sum(u.cost.reduce for u in units if u.choice.reduce == "micro-batch")
    work = sum(backward) + sum(c.weight_grad for c in computes)
    hidden = exposed(forward, every, forward[-1], overlap)
    late = exposed(backward, again, backward[-1], overlap)
    moved = sum(u.cost.offloaded for u in units) / link
    once = [u.cost.gather if u.choice.mode in ("keep", "zero2") and not _gathers(u, steady) else 0.0 for u in units]
    return StageTimes(
        forward=_beside(sum(forward) + hidden, moved, overlap),
        input_grad=_beside(sum(backward) + late, moved + reductions, overlap) if work else 0.0,
        weight_grad=sum(c.weight_grad for c in computes),
        first=exposed(forward, once, 0.0, overlap),
    )


def _gathers(u: PlannedUnit, steady: bool) -> bool:
    """Whether every forward gathers the unit."""
    return u.choice.mode == "zero3" or (u.choice.mode == "zero2" and not steady)


def _beside(compute: float, other: float, overlap: float) -> float:
    """Seconds of two things that run beside each other, as far as the cluster lets them."""
    return max(compute, other) + (1 - overlap) * min(compute, other)


def rank_costs(times: Sequence[StageTimes], message: float) -> Costs:
    """Costs of a schedule's simulation, stage by stage."""
    return Costs(
        forward=tuple(t.forward for t in times),
        input_grad=tuple(t.input_grad for t in times),
        weight_grad=tuple(t.weight_grad for t in times),
        message=message,
        activation=tuple(1.0 for _ in times),
    )
