"""What a plan file says of every unit, for its picture (view/planned.py): seconds of its ops, gathers and reductions, and bytes.

Units with the same values share an entry, so that a plan of many layers stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import PlannedUnit, UnitChoice, sharding_cost

__all__ = ["UnitPrediction", "predict_units", "units_to_dict"]


class UnitPrediction(NamedTuple):
    """A unit; of a micro-batch, if it is not a collective. Collectives of the grid that are exposed belong to the ops."""

    name: str
    forward: float
    input_grad: float
    """With recomputation."""
    weight_grad: float
    recompute_seconds: float
    """The part of `input_grad` that recomputes activations."""
    gather: float
    """One all-gather of its parameters, alone on its link; 0 if they are not sharded."""
    reduce: float
    """One reduction of its gradients, alone on its link; 0 if another unit's reduction carries them."""
    gather_bytes: float
    reduce_bytes: float
    updated: float
    """Parameters that a rank updates."""
    mode: str
    reduce_after: str
    """A step or a micro-batch."""
    slices: int
    recompute: str


def predict_units(
    problem: PlanProblem, layout: ParallelLayout, stages: Sequence[Sequence[PlannedUnit]]
) -> tuple[tuple[UnitPrediction, ...], ...]:
    """The units of every stage, in forward order."""
    out = []
    for units in stages:
        found: list[UnitPrediction] = []
        joined = 0.0  # bytes of the gradients that a later reduction carries
        for u in reversed(units):
            c, t, choice = u.cost, u.cost.times, _as_run(problem, u, stages[0][0])
            alone = sharding_cost(problem, layout, u.spec.kind, choice)
            gather, reduce, size = c.gather, c.reduce + c.across, alone.gradient_bytes
            if choice != u.choice:
                gather, reduce = alone.gather, alone.reduce + alone.across
            elif (c.reduce, c.gradient_bytes) != (alone.reduce, alone.gradient_bytes):  # it is reduced with others
                joined += alone.gradient_bytes
                size = joined if c.reduce else 0.0
                joined = 0.0 if c.reduce else joined
            found.append(
                UnitPrediction(
                    u.spec.name,
                    t.forward,
                    t.input_grad + t.recompute,
                    t.weight_grad,
                    t.recompute,
                    gather,
                    reduce,
                    alone.gathered_bytes if gather else 0.0,
                    size if reduce else 0.0,
                    c.updated,
                    choice.mode if gather else "replicate",
                    choice.reduce if layout.replicas > 1 else "step",
                    c.slices,
                    "full" if choice.recompute == "per-slice" else choice.recompute,
                )
            )
        out.append(tuple(found[::-1]))
    return tuple(out)


def _as_run(problem: PlanProblem, u: PlannedUnit, first: PlannedUnit) -> UnitChoice:
    """A unit's choice; a tied head is sharded as the embedding is (program/choices.py)."""
    if not problem.spec.tied or u.spec.layer != problem.spec.layers - 1:
        return u.choice
    return u.choice._replace(mode=first.choice.mode, reduce=first.choice.reduce, within=first.choice.within)


def units_to_dict(stages: Sequence[Sequence[UnitPrediction]]) -> dict[str, Any]:
    """`units`: by stage, pairs of a name and a place in `unit_seconds`."""
    places: dict[tuple[Any, ...], int] = {}
    units = [[[u.name, places.setdefault(_rounded(u), len(places))] for u in stage] for stage in stages]
    return {"units": units, "unit_seconds": [dict(zip(UnitPrediction._fields[1:], row, strict=True)) for row in places]}


def _rounded(u: UnitPrediction) -> tuple[Any, ...]:
    return (*(float(f"{x:.6g}") for x in u[1:7]), *map(round, u[7:10]), *u[10:])
