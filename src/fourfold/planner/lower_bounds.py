"""Lower bounds on a layout's step time and memory over all choices of its units: for pruning, and for the certificate.

In the order in which the search tightens them:

    compute_bound      compute time of the whole model and the smallest bubble of any partition of its layers; then with the
                       grid's collectives and the busiest rank
    memory_bound       extra seconds that the units of the first and the last rank need to fit into a memory budget, relaxed;
                       then with the real schedule

**Memory.** A rank's memory is not a sum over units, but at some instants of a step it is known which tensors exist together. At
each of these instants the relaxed knapsack (`knapsack`) within the budget is a lower bound; the largest one is used.

    first       the number of micro-batches in flight is first at its maximum: their activations, no gradients yet
    between     gradients exist and the number of micro-batches in flight is at its maximum again: both
    last        the end of the step: gradients, reduced if they are sharded, and no activations
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES
from fourfold.planner.compute_cost import unit_seconds
from fourfold.planner.grid_cost import least_column_seconds
from fourfold.planner.knapsack import Group, choose
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem, per_problem
from fourfold.planner.stage_partition import (
    InFlight,
    in_flight_at_least,
    layer_times,
    placement_of,
    rank_loads,
    stage_counts,
    units_of_stages,
)
from fourfold.planner.unit_options import AtEnd, OptionTable, UnitOption
from fourfold.program.ops import Schedule

__all__ = ["compute_bound", "in_flight_of_schedule", "least_bytes", "memory_bound"]

# ---- computing and bubble ----


def compute_bound(problem: PlanProblem, layout: ParallelLayout, grid: bool = False) -> float:
    """Lower bound from compute time; `grid`: with the layout's partition and collectives, else with those that all flows need."""
    mesh, shape = layout.mesh, layout.grid(problem)
    if not grid:
        model, block = _least_model_seconds(problem, *shape[:3])
        blocks = -(-(problem.spec.layers - 2) // mesh.pipe) if problem.spec.alike else 0
        return _with_bubble(layout, model, max(model / mesh.pipe, blocks * block))
    model = sum(map(sum, layer_times(problem, shape, None)))
    if mesh.pipe > 1 and layout.schedule == "synthesized":  # it partitions layers itself
        return _with_bubble(layout, model, model / mesh.pipe)
    works = [sum(work) for work in rank_loads(problem, layout)[1]]
    bound = _with_bubble(layout, model, max(model / mesh.pipe, *works))
    return max(bound, layout.micro_batches * works[-1] + _wait_of_last_rank(problem, layout))


def _wait_of_last_rank(problem: PlanProblem, layout: ParallelLayout) -> float:
    """Idle seconds of the last rank before its first forward and after its last backward, while other ranks compute.

    If weight gradients are delayed, the rank may compute them last, so only the forwards of other ranks count.
    """
    before = sum(stage_counts(problem, layout.grid(problem), placement_of(layout))[: layout.mesh.pipe - 1])
    times, hops = layer_times(problem, layout.grid(problem), True)[:before], layout.mesh.pipe - 1
    hop = layout.message_seconds(problem)
    if layout.splits_backward:
        return sum(t[0] for t in times) + hops * hop
    return sum(map(sum, times)) + 2 * hops * hop


def _with_bubble(layout: ParallelLayout, model: float, busiest: float) -> float:
    """Lower bound over all partitions: one micro-batch takes `model` seconds on all ranks together, `busiest` on one.

    [Note: least bubble]
    Consider a rank that computes M seconds per micro-batch; the ranks before it compute A, the ranks after it Z. Its first F
    follows the F of the ranks before it, and its last B precedes theirs: A seconds. With 1F1B and k = p - rank micro-batches in
    flight, it waits for the B of the first micro-batch while it has only k - 1 others to compute, and once more for the B of the
    last one. So a step takes at least A + m M + max(0, 2 Z - (k - 1) M). For m > p, the minimum over all partitions is
    m M + max(0, 2 (A + M + Z) - (p + 1) M). With fewer micro-batches, A + m M remains for every rank; it is least if all of these
    are equal. Other schedules have smaller bubbles: a micro-batch passes through all stages, unless W is delayed.
    """
    p, m = layout.mesh.pipe, layout.micro_batches
    if layout.schedule == "1f1b" and m > p:
        return m * busiest + max(0.0, 2 * model - (p + 1) * busiest)
    if layout.schedule in ("1f1b", "gpipe"):
        return max(m * busiest, model / (1 - (1 - 1 / m) ** p))
    return max(m * busiest, model) if layout.schedule in ("interleaved", "wave") else m * busiest


@per_problem
def _least_model_seconds(problem: PlanProblem, tokens: int, row: int, col: int) -> tuple[float, float]:
    """Seconds of a micro-batch of the whole model, and of a block: the minimum over all flows."""
    spec, least = problem.spec, dict[str, float]()
    for kind in spec.kinds:
        either = (unit_seconds(problem, kind, tokens, row, col, keeps_gradients=keeps) for keeps in (False, True))
        least[kind] = min(sum(t[:3]) for t in either) + least_column_seconds(problem, kind, tokens, col)
    blocks = sum(least[u.kind] for u in spec.units if u.layer not in (0, spec.layers - 1))
    return sum(least[u.kind] for u in spec.units), blocks / max(1, spec.layers - 2)


# ---- micro-batches in flight ----


def in_flight_of_schedule(schedule: Schedule, rank: int) -> InFlight:
    """The micro-batches in flight, from the schedule's order."""
    held, ops = schedule.stages_of[rank], schedule.order[rank]
    now, left = dict.fromkeys(held, 0), Counter(op.stage for op in ops if op.kind == "F")
    begun: set[int] = set()
    first, between = (0,) * len(held), None
    for op in ops:
        if op.kind == "F":
            now[op.stage] += 1
            flying = tuple(now.values())
            if not begun:
                first = max(first, flying, key=sum)
            elif len(begun) == len(held) and all(left.values()):
                between = flying if between is None else max(between, flying, key=sum)
        elif op.kind != "W":
            now[op.stage] -= 1
            begun.add(op.stage)
        if op.kind == ("W" if schedule.split else "B"):
            left[op.stage] -= 1
    return first, between


# ---- memory ----

_Options = tuple[list[tuple[float, float]], int]
"""(bytes, seconds) of the options of identical units, and their number."""


class _Row(NamedTuple):
    """Identical units of a rank, with their micro-batches in flight at the instants first and between."""

    kind: str
    first: int
    between: int
    at_end: AtEnd
    units: int


class _RankRows(NamedTuple):
    rows: tuple[_Row, ...]
    turning: str
    """The kind of unit whose backward runs when most micro-batches are in flight; empty if unknown."""
    has_loss: bool
    """Whether the rank has the model's last unit, whose backward may directly follow its forward."""
    instants: tuple[Literal["first", "between", "last"], ...]
    """The instants at which it is known which tensors exist."""


def memory_bound(
    table: OptionTable, layout: ParallelLayout, limit: float, schedule: Schedule | None = None
) -> float | None:
    """Lower bound on the step time in `limit` bytes of a device; None if no plan of the layout fits.

    `schedule`: the layout's schedule; by default, micro-batches in flight are derived from its name.
    """
    if layout.mesh.pipe > 1 and layout.schedule == "synthesized":  # it partitions layers itself
        return 0.0
    works = rank_loads(table.problem, layout)[1]
    budget, bound = limit - _sent_bytes(table.problem, layout), 0.0
    for rank, work in zip(_end_ranks(table.problem, layout, schedule), (works[0], works[-1]), strict=False):
        least = _extra_seconds(table, layout, rank, budget)
        if least is None:
            return None
        bound = max(bound, least + layout.micro_batches * sum(work))
    return bound


def least_bytes(table: OptionTable, layout: ParallelLayout) -> float:
    """Lower bound on the bytes of a device that a plan of the layout needs."""
    most = 0.0
    for rank in _end_ranks(table.problem, layout):
        options = _options(table, layout, rank)
        for at in rank.instants:
            held, transient = _constraint(rank, options, at, 1)
            most = max(most, transient + sum(units * min(size for size, _ in each) for each, units in held))
    return most + _sent_bytes(table.problem, layout)


def _sent_bytes(problem: PlanProblem, layout: ParallelLayout) -> float:
    """Bytes of a message in flight."""
    return 0.0 if problem.on_cpu else layout.message_bytes(problem)


def _end_ranks(problem: PlanProblem, layout: ParallelLayout, schedule: Schedule | None = None) -> list[_RankRows]:
    """The first and the last rank of a pipeline."""
    placement, out = placement_of(layout), []
    stages = units_of_stages(problem.spec, stage_counts(problem, layout.grid(problem), placement))
    for rank in sorted({0, max(placement)}):
        flying = in_flight_at_least(layout, rank) if schedule is None else in_flight_of_schedule(schedule, rank)
        kinds = tuple(tuple(u.kind for u in stages[s]) for s, where in enumerate(placement) if where == rank)
        out.append(_rank_rows(problem, kinds, *flying, rank == placement[-1], layout.splits_backward))
    return out


@per_problem
def _rank_rows(
    problem: PlanProblem,
    stages: tuple[tuple[str, ...], ...],
    first: tuple[int, ...],
    between: tuple[int, ...] | None,
    has_last_stage: bool,
    splits_backward: bool,
) -> _RankRows:
    """`stages`: kinds of units, stage by stage."""
    alone, rows = len(stages) == 1, Counter[tuple[str, int, int, AtEnd]]()
    for kinds, a, b in zip(stages, first, between or [0] * len(stages), strict=True):
        end = len(kinds) - 1
        rows.update((kind, a, b, AtEnd(alone and i == 0, alone and i == end)) for i, kind in enumerate(kinds))
    found = tuple(_Row(*row, count) for row, count in rows.items())
    turning = stages[0][-1] if alone and not splits_backward else ""
    instants: tuple[Literal["first", "between", "last"], ...] = ("first", "last")
    if between is not None:  # this instant may dominate the others
        instants = ("between",) if all(r.between >= r.first for r in found) else ("first", "between")
    return _RankRows(found, turning, alone and has_last_stage, instants)


def _extra_seconds(table: OptionTable, layout: ParallelLayout, rank: _RankRows, budget: float) -> float | None:
    """Lower bound on a rank's seconds beyond compute time; None if nothing fits."""
    key = (*table.key(layout), layout.splits_backward, layout.grid_splits_backward, rank, budget)
    if key not in table.cache:
        options = _options(table, layout, rank)
        rows = [_constraint(rank, options, at, layout.micro_batches) for at in rank.instants]
        found = [_relaxed_seconds(held, budget - transient) for held, transient in rows]
        stays, cluster = 0.0, table.problem.cluster
        if (
            layout.activations == "host" and rank.has_loss
        ):  # its last bytes need not cross the link: its backward is next
            stays = layout.micro_batches * 2 * (1 - cluster.overlap) * ACTIVATION_BUFFER_BYTES / cluster.host.link
        table.cache[key] = (
            None if None in found else max(0.0, max(least for least in found if least is not None) - stays)
        )
    least: float | None = table.cache[key]
    return least


def _options(
    table: OptionTable, layout: ParallelLayout, rank: _RankRows
) -> list[tuple[list[UnitOption], list[UnitOption]]]:
    """For each row: the sharding and the recomputation options of its units, with lower bounds of the seconds."""
    return [
        (table.sharding(layout, r.kind, r.at_end, bound=True), table.recompute(layout, r.kind, bound=True))
        for r in rank.rows
    ]


def _constraint(
    rank: _RankRows, options: list[tuple[list[UnitOption], list[UnitOption]]], at: str, micro_batches: int
) -> tuple[list[_Options], float]:
    """Bytes and seconds of the options of units at an instant; and the transient bytes of that instant."""
    rows: list[_Options] = []
    transient, held = 0.0, {"between": "memory"}.get(at, at)  # a field of UnitOption
    for r, (sharding, recompute) in zip(rank.rows, options, strict=True):
        flight = {"first": r.first, "between": r.between, "last": 0}[at]
        rows.append(([(getattr(o, held), o.seconds) for o in sharding], r.units))
        rows.append(([(flight * o.memory, micro_batches * o.seconds) for o in recompute], r.units))
        if r.kind == rank.turning and at != "last":
            transient = min([o.transient for o in recompute])
    return rows, transient


def _relaxed_seconds(rows: list[_Options], room: float) -> float | None:
    """Lower bound on the seconds of all units within `room` bytes; None if they do not fit."""
    seconds = held = 0.0
    for options, units in rows:
        fastest, size = min([(takes, size) for size, takes in options])
        seconds, held = seconds + units * fastest, held + units * size
    if held <= room:
        return seconds
    chosen = choose([Group(*row) for row in rows], room)
    return None if chosen is None else chosen.bound
