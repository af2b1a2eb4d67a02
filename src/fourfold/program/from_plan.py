"""The pipeline schedule of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.errors import PlanError, ScheduleError
from fourfold.plan import Plan
from fourfold.program.costs import Costs
from fourfold.program.ops import Schedule
from fourfold.program.schedules import build, fused, names, split
from fourfold.program.synthesis.synthesizer import synthesize
from fourfold.program.validator import validate

__all__ = ["costs_of_plan", "schedule_of_plan"]


def costs_of_plan(plan: Plan) -> Costs | None:
    """The stage costs that the planner predicted for a plan, in seconds; None if the plan has no prediction."""
    predicted = plan.predicted or {}
    if not predicted.get("stages"):
        return None
    stages, message = predicted["stages"], predicted.get("message", 0.0)
    if not (isinstance(stages, list) and all(isinstance(row, list) and len(row) == 3 for row in stages)) or not all(
        isinstance(x, int | float) and 0 <= x < 1e9 for x in (message, *(x for row in stages for x in row))
    ):
        raise PlanError("predicted.stages must have three times per stage, and predicted.message one; plan again")
    forward, input_grad, weight_grad = zip(*stages, strict=True)
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, message=message)


def schedule_of_plan(
    plan: Plan, micro_batches: int, *, layers: int | None = None, costs: Costs | None = None
) -> Schedule:
    """A plan's schedule: by name, from a file, or synthesized for `costs` with the memory of 1F1B.

    `layers`, if given, limits the number of stages of a synthesized schedule.
    """
    pipeline, ranks = plan.pipeline, plan.mesh.pipe
    options: dict[str, Any] = {
        "wave": {"waves": pipeline.waves},
        "interleaved": {"stages_per_rank": pipeline.stages_per_rank},
        "1f1b": {"slack": pipeline.slack},
    }.get(pipeline.schedule, {})
    if pipeline.schedule == "synthesized":
        counts = [c for c in (1, 2, 4) if layers is None or ranks * c <= layers]
        if isinstance(pipeline.layers, tuple):
            counts = [len(pipeline.layers) // ranks]
        return synthesize(
            ranks,
            micro_batches,
            costs,
            ranks + pipeline.slack,
            stages_per_rank=counts,
            split_backward=pipeline.split_backward,
        )
    if pipeline.schedule in names():
        schedule = build(pipeline.schedule, ranks, micro_batches, **options)
    else:
        schedule = _loaded(pipeline.schedule, ranks, micro_batches)
    if pipeline.split_backward is True:
        schedule = split(schedule)
    elif pipeline.split_backward is False:
        schedule = fused(schedule)
    return schedule


def _loaded(path: str, ranks: int, micro_batches: int) -> Schedule:
    schedule = Schedule.load(path)
    if (schedule.ranks, schedule.micro_batches) != (ranks, micro_batches):
        raise ScheduleError(
            f"{path}: the schedule is for {schedule.ranks} ranks and {schedule.micro_batches} micro-batches; "
            f"the plan has mesh.pipe = {ranks} and {micro_batches} micro-batches"
        )
    validate(schedule)
    return replace(schedule, name=schedule.name or Path(path).stem)
