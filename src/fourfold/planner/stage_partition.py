"""Partitioning layers into pipeline stages; units and compute times of the pipeline's ranks.

Stages have about equal time, or equal numbers of layers, whichever gives the busiest rank less work. The embedding and the head
count as layers. Simulating the schedule with several partitions and choosing the fastest would gain less than 1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from fourfold.planner.evaluate import schedule_of
from fourfold.planner.layouts import GridShape, ParallelLayout
from fourfold.planner.op_times import units_of_stages
from fourfold.planner.problem import PlanProblem, per_problem, rounded
from fourfold.planner.unit_cost import unit_times_on_grid
from fourfold.program.costs import Costs
from fourfold.program.engine import OpExtras, Problem, run
from fourfold.program.ops import Schedule, ends_of_step
from fourfold.program.schedules import loop, zigzag

__all__ = [
    "RankLoad",
    "compute_only_seconds",
    "in_flight",
    "partition_layers",
    "placement_of",
    "rank_loads",
    "stage_counts",
]

FIW = tuple[float, float, float]
"""Seconds of F, I and W of a micro-batch."""


# ---- stages ----


def partition_layers(problem: PlanProblem, layout: ParallelLayout) -> tuple[Schedule, tuple[int, ...]]:
    """A layout's schedule, and the layers of every stage."""
    schedule = schedule_of(problem, layout.plan(problem, (), None))
    return schedule, stage_counts(problem, layout.grid(problem), schedule.placement)


def placement_of(layout: ParallelLayout) -> tuple[int, ...]:
    """The rank of every stage (approximate for a synthesized schedule, which places stages itself)."""
    return (zigzag if layout.zigzag else loop)(layout.mesh.pipe, layout.stages_per_rank)


@per_problem
def stage_counts(problem: PlanProblem, grid: GridShape, placement: tuple[int, ...]) -> tuple[int, ...]:
    """Layers per stage, at least one each: of two partitions, the one whose busiest rank has less work."""
    work, stages = [sum(t) for t in layer_times(problem, grid)], len(placement)

    def busiest(counts: Sequence[int]) -> float:
        ranks, ends = [0.0] * (max(placement) + 1), list(accumulate(counts))
        for rank, count, end in zip(placement, counts, ends, strict=True):
            ranks[rank] += sum(work[end - count : end])
        return rounded(max(ranks))  # [Note: ties]

    return min(_equal_time(work, stages), _equal_count(len(work), stages), key=busiest)


def _equal_time(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """Stages of about equal time: each boundary is where the cumulative time reaches the stages' share."""
    total, counts, at, done = (1 + 1e-9) * sum(work), [], 0, 0.0  # [Note: ties]
    for stage in range(stages):
        left = stages - stage - 1
        end = at + 1
        done += work[at]
        while end < len(work) - left and done + work[end] / 2 <= total * (stage + 1) / stages:
            done += work[end]
            end += 1
        counts.append((end if left else len(work)) - at)
        at = end
    return tuple(counts)


def _equal_count(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of blocks, one more in earlier stages; the embedding is in the first stage, the head in the last."""
    counts = [(layers - 2) // stages + (s < (layers - 2) % stages) for s in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts) if min(counts) else _equal_time([1.0] * layers, stages)


@per_problem
def layer_times(problem: PlanProblem, grid: GridShape, once: bool | None = False) -> list[FIW]:
    """F, I and W of a micro-batch, layer by layer; `once` as in `unit_times_on_grid`."""
    spec = problem.spec
    kinds = {k: unit_times_on_grid(problem, k, grid, once=once) for k in spec.kinds}
    times: list[FIW] = []
    for layer in range(spec.layers):
        f, i, w = (float(sum(part)) for part in zip(*(kinds[u.kind][:3] for u in spec.of_layer(layer)), strict=True))
        times.append((f, i, w))
    return times


# ---- ranks ----


@dataclass(frozen=True)
class RankLoad:
    """Units of one rank of a pipeline by kind, and micro-batches in flight."""

    units: tuple[tuple[str, int], ...]
    in_flight: float
    tied_copy: bool = False
    """Whether it holds a copy of a tied weight."""


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """Maximum micro-batches in flight on a rank, in units of all its stages; close to that of the schedule's order."""
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    match layout.schedule:
        case "gpipe":
            return m
        case "1f1b":
            return min(m, p - rank)
        case "interleaved":
            return min(m, ((v - 1) * p + 2 * (p - rank - 1) + 1) / v)
        case _:
            return min(m, p)


def rank_loads(problem: PlanProblem, layout: ParallelLayout) -> tuple[list[RankLoad], list[FIW]]:
    """The distinct ranks of a pipeline: units of each, and its seconds of F, I, W for a micro-batch."""
    ranks, held, works = _distinct_ranks(
        problem, placement_of(layout), layout.grid(problem), layout.grid_splits_backward
    )
    copy, last = problem.spec.tied and not layout.zigzag and layout.mesh.pipe > 1, layout.mesh.pipe - 1
    loads = [
        RankLoad(units, in_flight(layout, rank), copy and rank == last) for rank, units in zip(ranks, held, strict=True)
    ]
    return loads, works


@per_problem
def _distinct_ranks(
    problem: PlanProblem, placement: tuple[int, ...], grid: GridShape, splits_backward: bool
) -> tuple[list[int], list[tuple[tuple[str, int], ...]], list[FIW]]:
    """The first rank, the last rank, and one of each group of equal ranks between them; their units and times."""
    times: dict[str, FIW] = {}
    for kind in problem.spec.kinds:
        t = unit_times_on_grid(problem, kind, grid, splits_backward=splits_backward)
        times[kind] = (t.forward, t.input_grad, t.weight_grad)
    last = max(placement)
    of_rank: list[Counter[str]] = [Counter() for _ in range(last + 1)]
    for rank, units in zip(
        placement, units_of_stages(problem.spec, stage_counts(problem, grid, placement)), strict=True
    ):
        of_rank[rank].update(u.kind for u in units)
    ranks: dict[object, int] = {}
    for rank, kinds in enumerate(of_rank):
        ranks.setdefault(rank if rank in (0, last) else frozenset(kinds.items()), rank)
    works: list[FIW] = []
    for rank in ranks.values():
        f, i, w = (float(sum(n * times[k][part] for k, n in of_rank[rank].items())) for part in range(3))
        works.append((f, i, w))
    return list(ranks.values()), [tuple(of_rank[rank].items()) for rank in ranks.values()], works


# ---- a step with compute time and messages only ----


def compute_only_seconds(
    problem: PlanProblem, layout: ParallelLayout, schedule: Schedule, counts: Sequence[int]
) -> float:
    """Step time with compute time and messages only: a lower bound for any choice of units."""
    grid, extra = layout.grid(problem), {}
    times = _stage_sums(layer_times(problem, grid), counts)
    work = [sum(t) for t in times]
    busiest = max(sum(work[s] for s in held) for held in schedule.stages_of)
    if schedule.stages == 1:
        return layout.micro_batches * busiest
    if grid.amortized_over > 1:  # the first forward gathers the kept tensors, the last backward sums them
        for stage, ends in enumerate(_stage_sums(layer_times(problem, grid, True), counts)):
            f, i, w = (e - t for e, t in zip(ends, times[stage], strict=True))
            extra[stage] = {op: max(0.0, x) for op, x in (("F", f), ("I", i), ("W", w), ("B", i + w))}
    costs = Costs(
        forward=tuple(t[0] for t in times),
        input_grad=tuple(t[1] for t in times),
        weight_grad=tuple(t[2] for t in times),
        message=layout.message_seconds(problem),
        link="rank",
    )
    ops = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
    more: dict[tuple[int, str, int], OpExtras] = {}
    for order in schedule.order if extra else ():
        for op in chain(*ends_of_step(order)):
            more[op] = OpExtras(longer := extra[op.stage][op.kind], longer)
    return (
        float(run(ops, schedule.order, more=more).makespan) + (layout.micro_batches - schedule.micro_batches) * busiest
    )


def _stage_sums(layers: Sequence[FIW], counts: Sequence[int]) -> list[FIW]:
    out, ends = [], list(accumulate(counts))
    for end, count in zip(ends, counts, strict=True):
        f, i, w = (sum(t[part] for t in layers[end - count : end]) for part in range(3))
        out.append((f, i, w))
    return out
