"""The planned panel of the timeline page: a row for every rank of the mesh, with collectives, waits and the update. No torch.

A plan file has the planner's seconds of every unit: its ops, one gather, one reduction (`predicted.units`). The plan is lowered
to the programs that training runs, and these are simulated with those seconds: a gather or reduction starts when the program
issues it and the rank's previous one has ended, and an op waits for the gathers of its units. A backward begins with the
recomputation of its unit. The update comes after the last reduction; streamed state is updated by the buckets of
offload/buckets.py.

Simulated are whole ops and updates; a span is divided when it is drawn, in proportion to the predicted seconds. Exposed
collectives of the tensor grid are drawn at the end of the op that they belong to.

What differs from the planner's own total: collectives queue instead of sharing a link, an op's time is divided among its units in
the same proportions in F, B, I and W, and what the planner adds as a sum is left out (imperfect overlap, gathers and sums of the
tensor grid that happen once a step, the exchange of a tied weight, waiting for the gradient norm of all ranks).

Ranks that differ in other axes than the pipeline do the same: they share their spans, in memory and in the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fourfold.errors import PlanError
from fourfold.offload_sizes import STREAM_BUCKET, bucket_label
from fourfold.plan import Memory, Plan
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
from fourfold.schema import parse_bytes
from fourfold.view.page import PageSpan, Panel, Row, panel_of

__all__ = ["PlannedStep", "UnitBackward", "planned_panel", "planned_step", "rank_name", "with_update"]

MOST_UNIT_OPS = 100_000
"""Of a pipeline; a plan with more is drawn without its collectives."""
MOST_MEMORY_STEPS = 12
"""Steps in which the predicted memory changes during an op."""


class UnitBackward(NamedTuple):
    """Seconds of a unit in the backward of one micro-batch."""

    unit: str
    recompute: float
    input_grad: float
    """With recomputation."""
    weight_grad: float


@dataclass(frozen=True)
class PlannedStep:
    """A simulated plan, how many bytes its gathers, reductions and messages have, and what its spans consist of."""

    timeline: Timeline
    sizes: Mapping[Instruction, int] = field(default_factory=dict)
    """By GATHER and REDUCE."""
    message_bytes: int = 0
    programs: Programs | None = None
    """What was simulated; None: the schedule alone."""
    backward: tuple[tuple[UnitBackward, ...], ...] = ()
    """By stage: its units in forward order; empty: recomputation is not divided from the backward."""
    grid: Mapping[tuple[int, str, str], float] = field(default_factory=dict)
    """By stage, kind of op and unit ("": all of the stage's): the share of an op that is exposed collectives of the grid."""
    updates: tuple[tuple[tuple[str, float], ...], ...] = ()
    """By rank of the pipeline: names of the buckets that it updates, and their seconds; empty: one span."""


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
    backward: list[list[UnitBackward]] = []
    on_grid: dict[tuple[int, str, str], float] = {}
    updated: dict[str, float] = {}
    for number, stage in enumerate(predicted["units"]):
        exposed = 0.0
        described.append([])
        backward.append([])
        stages.append([0.0, 0.0, 0.0])
        for name, place in stage:
            row = predicted["unit_seconds"][place]
            seconds = [float(row[key]) for key in ("forward", "input_grad", "weight_grad")]
            parts = slice_names(name, row["slices"], row["recompute"])
            stages[-1] = [a + b for a, b in zip(stages[-1], seconds, strict=True)]
            again = float(row.get("recompute_seconds", 0.0))
            exposed += (moved := float(row.get("grid", 0.0)))
            for part in parts:
                weight = sum(seconds) / len(parts)
                on_grid |= {(number, kind, part): moved / max(1e-12, sum(seconds) - again) for kind in "FBIW"}
                backward[-1].append(UnitBackward(part, *(t / len(parts) for t in (again, *seconds[1:]))))
                updated[part] = row.get("updated", 0.0) / len(parts)
                described[-1].append(ProgramUnit(part, row["mode"], row["reduce_after"], weight))
                gather[part] = row["gather"] / len(parts)
                reduce[part] = row["reduce"] / len(parts)
                sizes[Gather(part)] = round(row["gather_bytes"] / len(parts))
                sizes[Reduce(part)] = round(row["reduce_bytes"] / len(parts))
        computing = sum(stages[-1]) - sum(u.recompute for u in backward[-1])
        on_grid |= {(number, kind, ""): exposed / max(1e-12, computing) for kind in "FBIW"}
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
    whole, alone = predicted["updates"], predicted.get("updates_on_device", ())
    updates = []
    for rank, stages_here in enumerate(schedule.stages_of if alone else ()):
        units = dict.fromkeys(u.name for s in stages_here for u in described[s])
        held = [(name, round(updated[name])) for name in units]
        updates.append(_buckets(plan, held, float(whole[rank]), float(alone[rank])))
    return PlannedStep(
        simulate(programs, costs),
        sizes,
        round(predicted["message_bytes"]),
        programs,
        tuple(map(tuple, backward)),
        {key: min(1.0, share) for key, share in on_grid.items() if share > 0},
        tuple(updates),
    )


def _buckets(
    plan: Plan, units: Sequence[tuple[str, int]], seconds: float, on_device: float
) -> tuple[tuple[str, float], ...]:
    """The buckets of a rank's streamed optimizer, cut as in offload/buckets.py, and their seconds; empty without.

    `units`: name and number of parameters. `seconds` of the update, and if all state were on the device: those parts of it are
    in proportion to parameters, the rest of the time is that of state on the host.
    """
    memory = plan.memory
    if memory.optimizer == "device" and memory.moments == "fp32":
        return ()
    room = {"host": 0.0, "device": float("inf")}.get(memory.optimizer)
    if room is None:
        whole_state = sum(count for _, count in units) * _state_bytes(plan, memory)
        room = whole_state * (1 - float((plan.predicted or {}).get("host_state", 1.0)))
        if memory.device_state:
            room = float(parse_bytes(memory.device_state, "memory.device_state"))
    homes: dict[bool, list[tuple[int, str, int]]] = {}  # by whether the state is on the host
    for place, (name, count) in enumerate(units):
        if not count:
            continue
        count = -(-count // 64) * 64
        size = count * _state_bytes(plan, memory)
        homes.setdefault(size > room, []).append((place, name, count))
        room -= size if size <= room else 0
    found: list[tuple[int, int, list[str], int, bool]] = []
    for on_host, blocks in homes.items():
        for group in [[b] for b in blocks] if memory.gradients == "consume" else [blocks]:
            end = sum(count for *_, count in group)
            for start in range(0, end, STREAM_BUCKET):
                stop, at, inside = min(start + STREAM_BUCKET, end), 0, []
                for place, name, count in group:
                    if at < stop and at + count > start:
                        inside.append((place, name))
                    at += count
                found.append((inside[0][0], start, [name for _, name in inside], stop - start, on_host))
    elements = {host: sum(count for *_, count, h in found if h == host) for host in (False, True)}
    quick = on_device * elements[False] / max(1, sum(elements.values())) if elements[True] else seconds
    whole = {False: min(quick, seconds), True: max(0.0, seconds - quick)}
    return tuple(
        (bucket_label(names, on_host=host), whole[host] * count / elements[host])
        for _, _, names, count, host in sorted(found, key=lambda b: b[:2])
    )


def _state_bytes(plan: Plan, memory: Memory) -> int:
    """Bytes of optimizer state per parameter, as the streamed optimizer holds it."""
    width = plan.precision.compute_bytes
    return 2 * (2 if memory.moments == "bf16" else max(4, width)) + (2 if width == 2 else 0)


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
    found_marks = panel.peaks
    if len(panel.peaks) == timeline.rows:
        curves = tuple(
            _in_bytes(points, peak, timeline, row)
            for row, (points, peak) in enumerate(zip(panel.memory, panel.peaks, strict=True))
        )
        tops = [max(points, key=lambda p: p[1])[0] for points in curves]
        found_marks = tuple((top, *peak[1:]) for top, peak in zip(tops, panel.peaks, strict=True))
    over = " and ".join(axis for axis in ("data", "depth") if plan.mesh.degrees[axis] > 1)
    spans: list[list[PageSpan]] = [[] for _ in range(timeline.rows)]
    for s in timeline.spans():
        if s.start != s.end or s.lane == "compute":  # a gather of what is not sharded takes no time
            spans[s.row] += _divided(s, _span(s, step, over, stride), step)
    rows: list[Row] = []
    curve: list[tuple[tuple[float, float], ...]] = []
    marks: list[tuple[float, float, Mapping[str, float]]] = []
    length = float(timeline.makespan)
    for row in range(timeline.rows):
        waits = _waits(spans[row], length)
        shared = (*spans[row], *waits)
        lost = {
            "bubble": sum(w.end - w.start for w in waits if w.kind == "_"),
            "exposed": sum(s.end - s.start for s in shared if s.kind == "E"),
            "recompute": sum(s.end - s.start for s in shared if s.kind == "R"),
            "update": sum(s.end - s.start for s in shared if s.kind == "U"),
        }
        for rank in range(row * stride, (row + 1) * stride):
            rows.append(Row(rank_name(plan, rank), shared, {c: t for c, t in lost.items() if t > 0}))
            curve.append(curves[row])
            marks += found_marks[row : row + 1]
    path = tuple((s.row * stride, float(s.start), float(s.end)) for s in timeline.critical_path if s.lane != "message")
    if len(panel.peaks) != timeline.rows:
        return Panel(name, tuple(rows), path, tuple(curve))
    limit = p.get("usable_bytes", 0)
    return Panel(name, tuple(rows), path, tuple(curve), "memory, predicted", "bytes", limit, tuple(marks))


def _span(s: TimelineSpan, step: PlannedStep, over: str, stride: int) -> PageSpan:
    start, end, what = float(s.start), float(s.end), s.what
    match what:
        case Op() | UnitOp():
            return PageSpan(start, end, what.kind, str(what))
        case Send(stage, kind, micro_batch, peer):
            title = f"{kind} of stage {stage}, micro-batch {micro_batch}, to pipe {peer}"
            return PageSpan(start, end, "M", title, step.message_bytes, (peer - s.row) * stride)
        case Gather(unit):
            return PageSpan(start, end, "G", f"gather {unit} over {over}", step.sizes.get(what, 0))
        case Reduce(unit):
            return PageSpan(start, end, "S", f"reduce {unit} over {over}", step.sizes.get(what, 0))
    return PageSpan(start, end, "U", "update")


def _divided(s: TimelineSpan, span: PageSpan, step: PlannedStep) -> list[PageSpan]:
    """An op divided into recomputation, compute and exposed collectives of the grid; an update into its buckets."""
    what, out = s.what, _with_recomputation(s, span, step)
    if not step.grid or not isinstance(what, Op | UnitOp):
        return out
    share = step.grid.get((what.stage, what.kind, what.unit if isinstance(what, UnitOp) else ""), 0.0)
    if share <= 0:
        return out
    return [
        each
        for p in out
        for each in (
            [p]
            if p.kind == "R"
            else _in_proportion(p, [(p.kind, p.name, 1 - share), ("E", f"{p.name}: collectives of the grid", share)])
        )
    ]


def _with_recomputation(s: TimelineSpan, span: PageSpan, step: PlannedStep) -> list[PageSpan]:
    what = s.what
    if span.kind == "U":
        return _in_proportion(span, [("U", *part) for part in step.updates[s.row]] if step.updates else [])
    if not isinstance(what, Op | UnitOp) or what.kind not in "BI" or not step.backward:
        return [span]
    units = [u for u in step.backward[what.stage] if isinstance(what, Op) or u.unit == what.unit]
    if not any(u.recompute for u in units):
        return [span]
    parts: list[tuple[str, str, float]] = []
    for u in reversed(units):
        rest = u.input_grad - u.recompute + (u.weight_grad if what.kind == "B" else 0.0)
        if len(units) == 1:
            rest = max(0.0, span.end - span.start - u.recompute)
        if u.recompute:
            parts.append(("R", f"recompute {u.unit}", u.recompute))
        if parts and parts[-1][0] != "R":
            rest += parts.pop()[2]
        parts.append((span.kind, span.name, rest))
    return _in_proportion(span, parts)


def _in_proportion(span: PageSpan, parts: Sequence[tuple[str, str, float]]) -> list[PageSpan]:
    """A span divided into parts of kind, name and seconds."""
    total = sum(seconds for *_, seconds in parts)
    if not total:
        return [span]
    out, done, start = [], 0.0, span.start
    for kind, name, seconds in parts:
        done += seconds
        end = span.start + (span.end - span.start) * min(1.0, done / total)
        out.append(PageSpan(start, end, kind, name))
        start = end
    out[-1] = out[-1]._replace(end=span.end)
    return out


def _in_bytes(points: Any, peak: Any, timeline: Timeline, row: int) -> tuple[tuple[float, float], ...]:
    """A curve of activations, scaled so that its highest point is the predicted peak."""
    _, most, parts = peak
    held, activations = float(timeline.peaks[row].memory) or 1.0, parts.get("activations", 0.0)
    return tuple((t, most - activations * (1 - x / held)) for t, x in _gradual(points, timeline, row))


def _gradual(points: Any, timeline: Timeline, row: int) -> list[tuple[float, float]]:
    """A curve of whole ops, where what a forward saves comes, and what a backward frees goes, evenly during the op."""
    bounds: dict[tuple[int, str, int], tuple[float, float]] = {}
    for op, first, last in zip(timeline.ops[row], timeline.starts[row], timeline.ends[row], strict=True):
        start, end = float(first * timeline.tick), float(last * timeline.tick)
        key = op.stage, op.kind, op.micro_batch
        bounds[key] = (bounds[key][0] if key in bounds else start, end)
    forwards = {start: end for (_, kind, _), (start, end) in bounds.items() if kind == "F"}
    backwards = {end: start for (_, kind, _), (start, end) in bounds.items() if kind != "F"}
    steps = max(1, min(MOST_MEMORY_STEPS, 20_000 // len(points)))
    changes, before = [], 0.0
    for t, held in points:
        at, change, before = float(t), float(held) - before, float(held)
        begin, end = (at, forwards.get(at, at)) if change > 0 else (backwards.get(at, at), at)
        count = steps if end > begin else 1
        changes += [(begin + (end - begin) * i / count, change / count) for i in range(1, count + 1)]
    out, now = [(0.0, 0.0)], 0.0
    for at, change in sorted(changes):
        out.append((at, now := now + change))
    return out


def _waits(spans: Sequence[PageSpan], length: float) -> list[PageSpan]:
    """The gaps between a rank's ops and its update: waits for a collective that ends there, or for another rank."""
    ends = {s.end: s.name for s in spans if s.kind in "GS"}
    out, at = [], 0.0
    for s in sorted((s for s in spans if s.kind in "FBIWREU"), key=lambda s: s.start):
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
