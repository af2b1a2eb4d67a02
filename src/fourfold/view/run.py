"""A traced step of a run, compared with its simulation: makespan, bubble, memory. No torch.

The measured timeline shows when each pipeline rank of the first replica computed what in one traced step. The simulated one
runs the plan's schedule with compute times from the trace: for every stage the median time of its F, B, I and W over all
traced steps but the first. The two differ by what the simulation leaves out: messages, the executor's overhead, and other load
on the machine.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fourfold import schema
from fourfold.errors import RunDirError, ScheduleError
from fourfold.model.spec import OwnLayers
from fourfold.program import Costs, Op, Schedule, Timeline, simulate
from fourfold.program.instructions import Gather, Instruction, Reduce
from fourfold.program.stages import PipelineLayout, lay_out_pipeline
from fourfold.train.rundir import RunDir, read_trace
from fourfold.view.page import PageSpan, Panel, Row
from fourfold.view.planned import PlannedStep, UnitBackward, rank_name, with_update
from fourfold.view.steps import Part, RankStep, TracedStep, axes_of, read_steps

__all__ = [
    "StepComparison",
    "compare_step",
    "layout_of_run",
    "measured_panel",
    "own_layers",
    "planned_with_measured_times",
]


@dataclass(frozen=True)
class StepComparison:
    """One traced step of a run, and its simulation."""

    step: int
    schedule: Schedule
    measured: Timeline
    simulated: Timeline


@dataclass(frozen=True)
class _TracedStep:
    """One line of a rank's trace, with unit ops merged into whole ops."""

    step: int
    origin: float
    ops: dict[Op, tuple[float, float]]


def own_layers(run: RunDir) -> OwnLayers | None:
    """The layers of a user's own model; None for a model of the config."""
    env = schema.read(run.env_file, RunDirError, follow=False) if run.env_file.exists() else {}
    found = env.get("own_layers")
    return OwnLayers({str(name): int(count) for name, count in found.items()}) if isinstance(found, dict) else None


def layout_of_run(run: RunDir) -> PipelineLayout:
    """Stages and programs of a run."""
    config, plan = run.read()
    return lay_out_pipeline(own_layers(run) or config.model, plan, config.train.global_batch)


def compare_step(run: RunDir, step: int | None = None) -> StepComparison:
    """Compare a traced step of a run (default: the last) with its simulation."""
    plan = run.read()[1]
    layout = layout_of_run(run)
    ranks = _ranks(run, plan.mesh.ranks // plan.mesh.pipe, plan.mesh.pipe)
    traces = [_read(run, rank, set(ops)) for rank, ops in zip(ranks, layout.schedule.order, strict=True)]
    common = sorted(set.intersection(*({s.step for s in t} for t in traces)))
    if not common:
        raise RunDirError(
            f"{run.path}: no step was traced by all ranks of a pipeline with the ops of its plan (damaged lines are skipped)"
        )
    chosen = common[-1] if step is None else step
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


_LETTERS = {
    "recompute": "R",
    "exposed": "E",
    "bubble": "_",
    "waiting": "_",
    "data": "D",
    "update": "U",
}
_LOST = ("bubble", "waiting", "exposed", "recompute", "data", "update", "norm", "host", "between")
_COLLECTIVES = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "S", "reduce": "S"}


def measured_panel(run: RunDir, step: int, steps: Sequence[TracedStep] | None = None, name: str = "") -> Panel:
    """What every rank of the mesh did in a traced step: ops, waits, messages, collectives, memory."""
    _, plan = run.read()
    traced = next((s for s in (steps or read_steps(run)) if s.step == step), None)
    if traced is None:
        raise RunDirError(f"{run.path}: no rank has a trace of step {step}")
    taken = {(e.peer, rank, e.what): e.end for rank, r in traced.ranks.items() for e in r.events if e.kind == "message"}
    order = {rank: row for row, rank in enumerate(traced.ranks)}
    rows, memory, peaks = [], [], []
    for rank, r in traced.ranks.items():
        spans = [PageSpan(p.start, p.end, _letter(p), _name(p)) for p in _by_unit(r)]
        for e in r.events:
            if e.ranks:
                over = f" over {axes_of(e.ranks, traced.degrees)}, ranks {_ranks_text(e.ranks)}"
                spans.append(PageSpan(e.issued, e.end, _COLLECTIVES.get(e.kind, "X"), e.what + over, e.size))
            elif e.kind == "send":
                end = max(e.end, taken.get((rank, e.peer, e.what), e.end))
                to = order[e.peer] - order[rank] if e.peer in order else 0
                spans.append(PageSpan(e.begun, end, "M", f"{e.what}, to rank {e.peer}", e.size, to))
            elif e.kind == "bucket" and r.lead is not None:
                spans.append(PageSpan(e.begun, e.end, "O", e.what, e.size))
        lost = {c: r.spent(c) for c in _LOST}
        rows.append(Row(rank_name(plan, rank), tuple(spans), lost))
        memory.append(tuple(r.memory))
        if r.peak is not None:
            at, used, parts = r.peak
            peaks.append((at, used, {**parts, "everything else": max(0.0, used - sum(parts.values()))}))
    path = tuple((order[rank], p.start, p.end) for rank, p in traced.path)
    on_gpu = any(r.lead is not None for r in traced.ranks.values())
    budget = (plan.predicted or {}).get("usable_bytes", 0) if on_gpu else 0
    return Panel(
        name or f"measured, step {step}",
        tuple(rows),
        path,
        tuple(memory) if any(memory) else (),
        "memory of tensors" if on_gpu else "memory of the process",
        "bytes",
        budget if isinstance(budget, int | float) else 0,
        tuple(peaks) if len(peaks) == len(rows) else (),
    )


def planned_with_measured_times(run: RunDir, steps: Sequence[TracedStep]) -> PlannedStep:
    """The plan's programs, simulated with what was measured: gathers, reductions and the update are in it.

    An op takes the median of its compute and its collectives on the grid, without waits. A message, gather or reduction takes
    the minimum measured time from its start on the last rank to the end of the first wait for it; an overlapped one ends before
    it is waited for. The update takes its median on the rank where that is longest.
    """
    layout = layout_of_run(run)
    prefetch = run.read()[1].memory.prefetch
    later = [s for s in steps if s.step > 1] or list(steps)
    ops: dict[tuple[int, str], list[float]] = {}
    exposed: dict[tuple[int, str], list[float]] = {}
    started: dict[tuple[Any, ...], float] = {}
    ended: dict[tuple[Any, ...], tuple[str, str, float]] = {}
    messages: list[float] = []
    sizes: dict[Instruction, int] = {}
    message_bytes = 0
    for s in later:
        sent = {(rank, e.peer, e.what): e.begun for rank, r in s.ranks.items() for e in r.events if e.kind == "send"}
        for rank, r in s.ranks.items():
            took: dict[Op, float] = {}
            moved: dict[Op, float] = {}
            starts = [start for _, start, _, _ in r.spans]
            for p in r.parts:
                i = bisect_right(starts, p.start) - 1
                if i < 0 or p.start >= r.spans[i][2] or p.cause in ("bubble", "waiting"):
                    continue  # outside ops
                if p.cause != "exposed" or not _unit(
                    p.what.partition(": ")[2]
                ):  # collectives of the grid belong to the op
                    op = Op.parse(r.spans[i][0].partition(" ")[0])
                    took[op] = took.get(op, 0.0) + p.seconds
                    moved[op] = moved.get(op, 0.0) + (p.seconds if p.cause == "exposed" else 0.0)
            for op, seconds in took.items():
                ops.setdefault((op.stage, op.kind), []).append(seconds)
                exposed.setdefault((op.stage, op.kind), []).append(moved[op])
            for e in r.events:
                if e.kind == "message" and (e.peer, rank, e.what) in sent:
                    messages.append(max(0.0, e.end - sent[e.peer, rank, e.what]))
                    message_bytes = max(message_bytes, e.size)
                if (unit := _unit(e.what)) and e.ranks:
                    key = s.step, e.group, e.ranks, e.number
                    started[key] = max(started.get(key, 0.0), e.issued)
                    sizes[Gather(unit) if e.kind == "all_gather" else Reduce(unit)] = e.size
                    ended[key] = e.kind, unit, min(ended[key][2] if key in ended else e.end, e.end)
    prices: dict[str, dict[str, float]] = {"gather": {}, "reduce": {}}
    for units in layout.units:
        for name in units:
            prices["gather"][name] = prices["reduce"][name] = 0.0
    least: dict[tuple[str, str], float] = {}
    for key, (kind, unit, end) in ended.items():
        what = ("gather" if kind == "all_gather" else "reduce", unit)
        least[what] = min(least.get(what, float("inf")), max(0.0, end - started[key]))
    for (field, unit), seconds in least.items():
        if unit in prices[field]:
            prices[field][unit] = seconds

    def of(kind: str) -> tuple[float, ...]:
        return tuple(median(ops.get((s, kind), [0.0])) for s in range(layout.schedule.stages))

    again: dict[str, list[float]] = {}
    for s in later:
        for r in s.ranks.values():
            for e in r.events:
                if e.kind == "recompute":
                    again.setdefault(e.what, []).append(e.end - e.begun)
    both = set.intersection(*(set(s.ranks) for s in later)) if later else set()
    update = max((median(s.ranks[r].spent("update") for s in later) for r in both), default=0.0)
    programs = with_update(layout.schedule, layout.programs.units, prefetch)
    backward = []
    for stage, described in enumerate(programs.units):
        recompute = {u.name: median(again.get(u.name, [0.0])) for u in described}
        rest = max(0.0, (of("I")[stage] or of("B")[stage]) - sum(recompute.values()))
        weight = sum(u.weight for u in described) or 1.0
        backward.append(
            tuple(
                UnitBackward(u.name, recompute[u.name], recompute[u.name] + rest * u.weight / weight, 0.0)
                for u in described
            )
        )
    stride, updates = len(later[-1].ranks) // layout.schedule.ranks if later else 1, []
    for row in range(layout.schedule.ranks):
        first = later[-1].ranks.get(row * stride) if later else None
        events = first.events if first is not None else []
        updates.append(tuple((e.what, e.end - e.begun) for e in events if e.kind == "bucket"))
    costs = Costs(
        forward=of("F"),
        input_grad=of("I"),
        weight_grad=of("W"),
        backward=of("B"),
        stream=update,
        message=min(messages, default=0.0),
        gather=prices["gather"],
        reduce=prices["reduce"],
    )
    on_grid: dict[tuple[int, str, str], float] = {}
    for (stage, kind), moved_in in exposed.items():
        if (part := sum(moved_in) / max(1e-12, sum(ops[stage, kind]))) > 0:
            on_grid |= {(stage, kind, unit): part for unit in ("", *(u.name for u in programs.units[stage]))}
    return PlannedStep(
        simulate(programs, costs), sizes, message_bytes, programs, tuple(backward), on_grid, tuple(updates)
    )


def _unit(what: str) -> str:
    """The unit whose parameters are gathered or whose gradients are summed; empty for other collectives."""
    if what.startswith("the parameters of "):
        return what.removeprefix("the parameters of ")
    return what.removeprefix("the sum of ").removesuffix("'s gradients") if what.endswith("'s gradients") else ""


def _by_unit(rank: RankStep) -> list[Part]:
    """The parts of a rank's step, where the forward of an op is divided into its units."""
    units = sorted((e.begun, e.end, e.what) for e in rank.events if e.kind == "unit")
    starts = [begun for begun, _, _ in units]
    out: list[Part] = []
    for p in rank.parts:
        if p.cause != "forward" or " " in p.what:
            out.append(p)
            continue
        at = p.start
        for begun, end, name in units[max(0, bisect_right(starts, p.start) - 1) :]:
            if begun >= p.end:
                break
            first, last = max(at, begun), min(p.end, end)
            if last > first:
                out += [p._replace(start=at, end=first)] if first > at else []
                out.append(p._replace(start=first, end=last, what=f"{p.what} {name}"))
                at = last
        out += [p._replace(start=at)] if p.end > at else []
    return out


def _letter(part: Part) -> str:
    if part.cause in ("forward", "backward", "weight"):
        return Op.parse(part.what.partition(" ")[0]).kind
    return _LETTERS.get(part.cause, "H")


def _name(part: Part) -> str:
    match part.cause:
        case "bubble" | "waiting":
            return (f"waiting for rank {part.peer}: " if part.peer >= 0 else "waiting: ") + part.what
        case "recompute":
            return f"recompute {part.what}"
        case "host":
            return "between ops"
        case "other":
            return "not explained"
    return part.what


def _ranks_text(ranks: Sequence[int]) -> str:
    """0-3 for neighbours, else 0, 4, 8 …"""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")


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
    """The traced steps of a rank with exactly the ops `ops`; damaged lines are skipped."""
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
