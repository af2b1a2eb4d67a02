"""The planned panel of the timeline page: a row for every rank of the mesh, with collectives, waits and the update. No torch.

A plan file has the planner's seconds of every unit: its ops, one gather, one reduction (`predicted.units`). The plan is lowered
to the programs that training runs, and these are simulated with those seconds: a gather or reduction starts when the program
issues it and the rank's previous one has ended, and an op waits for the gathers of its units. The update is one span, after the
last reduction.

What differs from the planner's own total: collectives queue instead of sharing a link, an op's time is divided among its units in
the same proportions in F, B, I and W, and what the planner adds as a sum is left out (imperfect overlap, gathers and sums of the
tensor grid that happen once a step, the exchange of a tied weight, waiting for the gradient norm of all ranks).

Ranks that differ in other axes than the pipeline do the same: they share their spans, in memory and in the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.program.choices import slice_names
from fourfold.program.costs import Costs
from fourfold.program.from_plan import costs_of_plan, schedule_of_plan
from fourfold.program.groups import coordinates_of
from fourfold.program.instructions import (
    Gather,
    Instruction,
    ProgramBucket,
    Programs,
    ProgramUnit,
    Reduce,
    Send,
    UnitOp,
)
from fourfold.program.lowering import lower
from fourfold.program.ops import Op, Schedule
from fourfold.program.simulator import simulate
from fourfold.program.timeline import Timeline, TimelineSpan
from fourfold.view.page import PageSpan, Panel, Row, panel_of

__all__ = ["PlannedStep", "planned_panel", "planned_step", "rank_name", "with_update"]

MOST_UNIT_OPS = 40_000
"""Of a pipeline; a plan with more is drawn without its collectives."""


@dataclass(frozen=True)
class PlannedStep:
    """A simulated plan, and how many bytes its gathers, reductions and messages have."""

    timeline: Timeline
    sizes: Mapping[Instruction, int] = field(default_factory=dict)
    """By GATHER and REDUCE."""
    message_bytes: int = 0
    programs: Programs | None = None
    """What was simulated; None: the schedule alone."""


def planned_step(plan: Plan, micro_batches: int = 0) -> PlannedStep:
    """A plan's step: with its collectives if its prediction has them, else ops and messages only."""
    p, count = plan.predicted or {}, micro_batches or plan.batch.micro_batches or max(1, 2 * plan.mesh.pipe)
    units = p.get("units") or []
    costs = costs_of_plan(plan)
    schedule = schedule_of_plan(plan, count, costs=costs)
    if costs is None or len(units) != schedule.stages or 3 * count * sum(map(len, units)) > MOST_UNIT_OPS:
        return PlannedStep(simulate(schedule, costs))
    try:
        return _with_units(plan, schedule, p)
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise PlanError(f"predicted.units and predicted.unit_seconds cannot be read ({e}); plan again") from None


def _with_units(plan: Plan, schedule: Schedule, predicted: Mapping[str, Any]) -> PlannedStep:
    described: list[list[ProgramUnit]] = []
    stages: list[list[float]] = []
    gather: dict[str, float] = {}
    reduce: dict[str, float] = {}
    sizes: dict[Instruction, int] = {}
    for stage in predicted["units"]:
        described.append([])
        stages.append([0.0, 0.0, 0.0])
        for name, place in stage:
            row = predicted["unit_seconds"][place]
            seconds = [float(row[key]) for key in ("forward", "input_grad", "weight_grad")]
            parts = slice_names(name, row["slices"], row["recompute"])
            stages[-1] = [a + b for a, b in zip(stages[-1], seconds, strict=True)]
            for part in parts:
                weight = sum(seconds) / len(parts)
                described[-1].append(ProgramUnit(part, row["mode"], row["reduce_after"], weight))
                gather[part] = row["gather"] / len(parts)
                reduce[part] = row["reduce"] / len(parts)
                sizes[Gather(part)] = round(row["gather_bytes"] / len(parts))
                sizes[Reduce(part)] = round(row["reduce_bytes"] / len(parts))
    forward, input_grad, weight_grad = (tuple(s[i] for s in stages) for i in range(3))
    programs = with_update(schedule, described, plan.memory.prefetch)
    costs = Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        message=tuple(map(tuple, predicted["messages"])) or 0.0,
        link="rank",
        stream={b.name: t for b, t in zip(programs.buckets, predicted["updates"], strict=True)},
        gather=gather,
        reduce=reduce,
    )
    return PlannedStep(simulate(programs, costs), sizes, round(predicted["message_bytes"]), programs)


def with_update(schedule: Schedule, units: Sequence[Sequence[ProgramUnit]], prefetch: int) -> Programs:
    """The programs of a schedule, with one update of everything at the end of each: bucket r is that of pipeline rank r."""
    buckets = []
    for rank, stages in enumerate(schedule.stages_of):
        buckets.append(ProgramBucket(f"of pipe {rank}", tuple(u.name for s in stages for u in units[s])))
    return lower(schedule, units, buckets, prefetch=prefetch)


def planned_panel(plan: Plan, step: PlannedStep, name: str) -> Panel:
    """A row for every rank; with a prediction, memory in bytes and the limit."""
    timeline, p = step.timeline, plan.predicted or {}
    stride = plan.mesh.ranks // plan.mesh.pipe
    found = p.get("memory") or []
    panel = panel_of(name, timeline, peaks=found if len(found) == timeline.rows else ())
    curves = panel.memory
    if len(panel.peaks) == timeline.rows:
        curves = tuple(
            _in_bytes(points, peak, timeline, row)
            for row, (points, peak) in enumerate(zip(panel.memory, panel.peaks, strict=True))
        )
    over = " and ".join(axis for axis in ("data", "depth") if plan.mesh.degrees[axis] > 1)
    spans: list[list[PageSpan]] = [[] for _ in range(timeline.rows)]
    for s in timeline.spans():
        if s.start != s.end or s.lane == "compute":  # a gather of what is not sharded takes no time
            spans[s.row].append(_span(s, step, over))
    rows: list[Row] = []
    curve: list[tuple[tuple[float, float], ...]] = []
    marks: list[tuple[float, float, Mapping[str, float]]] = []
    length = float(timeline.makespan)
    for row in range(timeline.rows):
        waits = _waits(spans[row], length)
        shared = (*spans[row], *waits)
        lost = {
            "waiting": sum(w.end - w.start for w in waits if w.kind == "_"),
            "exposed": sum(w.end - w.start for w in waits if w.kind == "E"),
            "update": sum(s.end - s.start for s in shared if s.kind == "U"),
        }
        for rank in range(row * stride, (row + 1) * stride):
            rows.append(Row(rank_name(plan, rank), shared, {c: t for c, t in lost.items() if t > 0}))
            curve.append(curves[row])
            marks += panel.peaks[row : row + 1]
    path = tuple((s.row * stride, float(s.start), float(s.end)) for s in timeline.critical_path if s.lane != "message")
    if len(panel.peaks) != timeline.rows:
        return Panel(name, tuple(rows), path, tuple(curve))
    limit = p.get("usable_bytes", 0)
    return Panel(name, tuple(rows), path, tuple(curve), "memory, predicted", "bytes", limit, tuple(marks))


def _span(s: TimelineSpan, step: PlannedStep, over: str) -> PageSpan:
    start, end, what = float(s.start), float(s.end), s.what
    match what:
        case Op() | UnitOp():
            return PageSpan(start, end, what.kind, str(what))
        case Send(stage, kind, micro_batch, peer):
            told = f"{kind} of stage {stage}, micro-batch {micro_batch}, to pipe {peer}"
            return PageSpan(start, end, "M", told, step.message_bytes)
        case Gather(unit):
            return PageSpan(start, end, "G", f"gather {unit} over {over}", step.sizes.get(what, 0))
        case Reduce(unit):
            return PageSpan(start, end, "S", f"reduce {unit} over {over}", step.sizes.get(what, 0))
    return PageSpan(start, end, "U", "update")


def _in_bytes(points: Any, peak: Any, timeline: Timeline, row: int) -> tuple[tuple[float, float], ...]:
    """A curve of activations, scaled so that its highest point is the predicted peak."""
    _, most, parts = peak
    held, activations = float(timeline.peaks[row].memory) or 1.0, parts.get("activations", 0.0)
    return tuple((t, most - activations * (1 - x / held)) for t, x in points)


def _waits(spans: Sequence[PageSpan], length: float) -> list[PageSpan]:
    """The gaps between a rank's ops and its update: waits for a collective that ends there, or for another rank."""
    ends = {s.end: s.name for s in spans if s.kind in "GS"}
    out, at = [], 0.0
    for s in sorted((s for s in spans if s.kind in "FBIWU"), key=lambda s: s.start):
        if s.start > at:
            out.append(_wait(at, s.start, ends.get(s.start, "")))
        at = max(at, s.end)
    if ends and (last := max(ends)) > at:  # without an update
        out.append(_wait(at, last, ends[last]))
        at = last
    if length > at:
        out.append(PageSpan(at, length, "_", "waiting for other ranks"))
    return out


def _wait(start: float, end: float, collective: str) -> PageSpan:
    if collective:
        return PageSpan(start, end, "E", f"waiting: {collective}")
    return PageSpan(start, end, "_", "waiting for another stage")


def rank_name(plan: Plan, rank: int) -> str:
    """A rank and its coordinates on the axes that the plan uses."""
    degrees = plan.mesh.degrees
    place = " ".join(f"{axis} {c}" for axis, c in coordinates_of(degrees, rank).items() if degrees[axis] > 1)
    return f"rank {rank}" + (f" · {place}" if place else "")
