"""A traced step of a run, compared with its simulation: makespan, bubble, memory. No torch.

The measured timeline shows when each pipeline rank of the first replica computed what in one traced step. The simulated one
runs the plan's schedule with compute times from the trace: for every stage the median time of its F, B, I and W over all
traced steps but the first. The two differ by what the simulation leaves out: messages, the executor's overhead, and other load
on the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from fourfold.errors import RunDirError, ScheduleError
from fourfold.program import Costs, Op, Schedule, Timeline, simulate
from fourfold.program.groups import coordinates_of
from fourfold.program.stages import lay_out_pipeline
from fourfold.train.rundir import RunDir, read_trace
from fourfold.view.page import PageSpan, Panel, Row

__all__ = ["StepComparison", "compare_step", "measured_panel"]


@dataclass(frozen=True)
class StepComparison:
    """One traced step of a run, and its simulation."""

    step: int
    schedule: Schedule
    measured: Timeline
    simulated: Timeline

    @property
    def summary(self) -> str:
        """How long the step took, and how long its simulation takes."""
        measured, simulated = self.measured, self.simulated
        return (
            f"Step {self.step} took {float(measured.makespan):.4g} s on the first replica, with a bubble of "
            f"{float(measured.bubble):.1%}. Simulated with the median times of its ops it takes "
            f"{float(simulated.makespan):.4g} s: the difference is messages, waiting and overhead."
        )


@dataclass(frozen=True)
class _TracedStep:
    """One line of a rank's trace, with unit ops merged into whole ops."""

    step: int
    origin: float
    ops: dict[Op, tuple[float, float]]


def compare_step(run: RunDir, step: int | None = None) -> StepComparison:
    """Compare a traced step of a run (default: the last) with its simulation."""
    config, plan = run.read()
    layout = lay_out_pipeline(config.model, plan, config.train.global_batch)
    ranks = _ranks(run, plan.mesh.ranks // plan.mesh.pipe, plan.mesh.pipe)
    traces = [_read(run, rank, set(ops)) for rank, ops in zip(ranks, layout.schedule.order, strict=True)]
    common = sorted(set.intersection(*({s.step for s in t} for t in traces)))
    chosen = common[-1] if step is None and common else step
    if chosen not in common:
        raise RunDirError(f"{run.path}: step {step} was not traced; traced: {', '.join(map(str, common)) or 'none'}")
    rows = [next(s for s in t if s.step == chosen) for t in traces]
    later = [s for t in traces for s in t if s.step > common[0]] or rows
    placement, costs = layout.schedule.placement, _costs(layout.schedule, later)
    simulated = simulate(layout.schedule, costs)
    times = _times(rows)
    measured = Timeline(
        ops=tuple(tuple(row.ops) for row in rows),
        starts=tuple(tuple(start for start, _ in row) for row in times),
        ends=tuple(tuple(end for _, end in row) for row in times),
        tick=1.0,
        costs=costs.of_stages(placement, layout.schedule.ranks),
        placement=placement,
        lower_bound=simulated.lower_bound,
    )
    return StepComparison(chosen, Schedule.of((row.ops for row in rows), "measured"), measured, simulated)


def measured_panel(run: RunDir, step: int) -> Panel:
    """What every rank of the mesh did in a traced step: its ops and unit ops, and the waits before them."""
    _, plan = run.read()
    found: dict[int, dict[str, Any]] = {}
    for rank in range(plan.mesh.ranks):
        path = run.path / "trace" / f"rank{rank}.jsonl"
        lines = read_trace(path) if path.is_file() else ()
        line = next((line for line in lines if line is not None and line["step"] == step), None)
        if line is not None and line["spans"]:
            found[rank] = line
    if not found:
        raise RunDirError(f"{run.path}: no rank has a trace of step {step}")
    first = min(found.values(), key=lambda line: line["origin"])["origin"]
    rows = []
    for rank, line in found.items():
        at, spans = line["origin"] - first, []
        for what, start, end, waited in line["spans"]:
            if waited > 0:
                spans.append(PageSpan(at + start - waited, at + start, "_", f"before {what}"))
            spans.append(PageSpan(at + start, at + end, Op.parse(what.partition(" ")[0]).kind, what))
        place = " ".join(
            f"{axis} {c}" for axis, c in coordinates_of(plan.mesh.degrees, rank).items() if plan.mesh.degrees[axis] > 1
        )
        rows.append(Row(f"rank {rank}" + (f" · {place}" if place else ""), tuple(spans)))
    return Panel(f"measured, step {step}", tuple(rows))


def _times(rows: list[_TracedStep]) -> list[list[tuple[float, float]]]:
    """By row: start and end of its ops, relative to the first start of all."""
    offset = [row.origin - rows[0].origin for row in rows]  # differences first: a float time of day rounds microseconds
    begin = min(x + start for x, row in zip(offset, rows, strict=True) for start, _ in row.ops.values())
    return [[(x + a - begin, x + b - begin) for a, b in row.ops.values()] for x, row in zip(offset, rows, strict=True)]


def _ranks(run: RunDir, stride: int, pipe: int) -> list[int]:
    """The ranks of the first replica's pipeline: `pipe` is the slowest axis of the mesh."""
    if not (run.path / "trace").is_dir():
        raise RunDirError(f"{run.path}: the run has no trace; train with --log.trace 10")
    return [p * stride for p in range(pipe)]


def _read(run: RunDir, rank: int, ops: set[Op]) -> list[_TracedStep]:
    """The traced steps of a rank that did all of `ops` and nothing else; damaged lines are left out."""
    path = run.path / "trace" / f"rank{rank}.jsonl"
    if not path.is_file():
        raise RunDirError(f"{run.path}: the trace of rank {rank} is missing")
    steps = []
    for line in read_trace(path):
        with contextlib.suppress(ScheduleError):
            if line is not None and (step := _step(line)).ops.keys() == ops:
                steps.append(step)
    return steps


def _step(line: dict[str, Any]) -> _TracedStep:
    """Merge the unit ops of an op (`3F0 blocks.1.mlp`); the time between them counts as the op's."""
    ops: dict[Op, tuple[float, float]] = {}
    for what, start, end, _ in line["spans"]:
        op = Op.parse(what.partition(" ")[0])
        ops[op] = (ops[op][0] if op in ops else start, end)
    return _TracedStep(line["step"], line["origin"], ops)


def _costs(schedule: Schedule, steps: Iterable[_TracedStep]) -> Costs:
    """Median time of every stage's ops, by kind."""
    times: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for op, (start, end) in step.ops.items():
            times.setdefault((op.stage, op.kind), []).append(end - start)

    def of(kind: str) -> tuple[float, ...]:
        return tuple(median(times.get((s, kind), [0.0])) for s in range(schedule.stages))

    shares = [1 / len(schedule.stages_of[schedule.placement[s]]) for s in range(schedule.stages)]
    return Costs(forward=of("F"), input_grad=of("I"), weight_grad=of("W"), backward=of("B"), activation=tuple(shares))
