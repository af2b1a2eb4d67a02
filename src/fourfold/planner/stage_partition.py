"""The schedule of a plan, its layers partitioned into stages, and units and compute times of the pipeline's ranks.

Stages have about equal time, or equal numbers of layers, whichever gives the busiest rank less work. The embedding and the head
count as layers. Simulating the schedule with several partitions and choosing the fastest would gain less than 1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec, UnitSpec
from fourfold.plan import Mesh, Plan
from fourfold.planner.layouts import GridShape, ParallelLayout, layout_of_plan
from fourfold.planner.problem import PlanProblem, per_problem, rounded
from fourfold.planner.unit_cost import unit_times_on_grid
from fourfold.program.costs import Costs
from fourfold.program.engine import OpExtras, Problem, run
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.ops import Schedule, ends_of_step
from fourfold.program.partition import partition
from fourfold.program.schedules import loop, zigzag

__all__ = [
    "InFlight",
    "RankLoad",
    "compute_only_seconds",
    "in_flight",
    "in_flight_at_least",
    "partition_layers",
    "placement_of",
    "rank_loads",
    "schedule_of",
    "stage_counts",
    "stage_layers",
    "units_of_stages",
]

_MOST_OPS = 30_000
"""Maximum ops of a simulated schedule; longer ones are simulated without some of the repeating micro-batches in the middle."""
FIW = tuple[float, float, float]
"""Seconds of F, I and W of a micro-batch."""


# ---- a plan's schedule and stages ----


def schedule_of(problem: PlanProblem, plan: Plan) -> Schedule:
    """A plan's schedule, with the number of micro-batches that is simulated."""
    pipeline, micro_batches = plan.pipeline, plan.micro_batches(problem.global_batch)
    if pipeline.schedule != "synthesized":  # a synthesized schedule chooses its number of stages itself
        pipeline = replace(pipeline, layers="auto")
    per, few = 3 * layout_of_plan(plan, problem).stages, 4 * plan.mesh.pipe
    if micro_batches * per > _MOST_OPS:
        micro_batches = max(few, _MOST_OPS // per // few * few)
    return _schedule(problem, Plan(mesh=Mesh(pipe=plan.mesh.pipe), pipeline=pipeline), micro_batches)


@per_problem
def _schedule(problem: PlanProblem, shape: Plan, micro_batches: int) -> Schedule:
    """`shape`: the values of a plan that determine its schedule."""
    return schedule_of_plan(shape, micro_batches, layers=problem.spec.layers)


def stage_layers(problem: PlanProblem, schedule: Schedule, requested: tuple[int, ...] | str) -> tuple[int, ...]:
    """Layers per stage, with the embedding and the head as layers: as requested, or partitioned by FLOPs."""
    layers, stages = problem.spec.layers - 2, schedule.stages
    if isinstance(requested, tuple):
        if len(requested) != stages or sum(requested) != layers:
            raise PlanError(
                f"pipeline.layers = {list(requested)} must be {stages} numbers that sum to the model's {layers} layers"
            )
        return tuple(n + (s == 0) + (s == stages - 1) for s, n in enumerate(requested))
    return _partition_by_flops(problem, schedule.placement)


@per_problem
def _partition_by_flops(problem: PlanProblem, placement: tuple[int, ...]) -> tuple[int, ...]:
    spec = problem.spec
    return partition([sum(u.flops for u in spec.of_layer(layer)) for layer in range(spec.layers)], placement)


def units_of_stages(spec: ModelSpec, counts: Sequence[int]) -> list[list[UnitSpec]]:
    """Units of every stage; `counts`: layers per stage, with the embedding and the head as layers."""
    ends = list(accumulate(counts))
    return [
        [u for layer in range(end - count, end) for u in spec.of_layer(layer)]
        for end, count in zip(ends, counts, strict=True)
    ]


# ---- stages of a layout ----


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
def layer_times(
    problem: PlanProblem, grid: GridShape, once: bool | None = False, splits_backward: bool = False
) -> list[FIW]:
    """F, I and W of a micro-batch, layer by layer; the options as in `unit_times_on_grid`."""
    spec = problem.spec
    kinds = {k: unit_times_on_grid(problem, k, grid, splits_backward=splits_backward, once=once) for k in spec.kinds}
    times = {units: _sum(kinds[k][:3] for k in units) for units in set(spec.kinds_of_layers)}
    return [times[units] for units in spec.kinds_of_layers]


def _sum(times: Iterable[FIW]) -> FIW:
    f, i, w = (float(sum(part)) for part in zip(*times, strict=True))
    return f, i, w


def _stage_sums(layers: Sequence[FIW], counts: Sequence[int]) -> list[FIW]:
    return [_sum(layers[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True)]


# ---- ranks ----


@dataclass(frozen=True)
class RankLoad:
    """Units of one rank of a pipeline by kind, and micro-batches in flight."""

    units: tuple[tuple[str, int], ...]
    in_flight: float
    tied_copy: bool = False
    """Whether it holds a copy of a tied weight."""


InFlight = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Micro-batches in flight for each stage of a rank: at first, and between (None: the instant may not exist)."""


def in_flight_at_least(layout: ParallelLayout, rank: int) -> InFlight:
    """Lower bound on the micro-batches in flight at one instant, for a named schedule. A test checks it against orders."""
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    if v == 1:
        most = m if layout.schedule == "gpipe" else min(m, p - rank)
        return (most,), (min(m - 1, most),) if m > 1 else None
    if layout.schedule == "interleaved":
        warm = 2 * (p - rank) - 1
        first = (min(m, max(p, warm)), *[min(m, p)] * (v - 2), min(m, p, warm))
        return first, first if m >= 2 * p else None
    if v == 2:  # a V
        first = (min(m, 2 * p - 1 - rank), min(m, rank + 1))
        return first, (first if layout.schedule == "zb-v" else (p, rank)) if m >= 2 * p else None
    if m <= p or p < 4:
        first = (*[min(m, p)] * (v - 1), min(m, rank + 1))
        return first, (*[p // 2] * (v - 1), 0) if m >= 2 * p else None
    whole = m % p == 0
    first = (*[p - 1] * (v - 1), rank) if whole else (*[3 * p // 4] * (v - 1), 0)
    return first, (*[p // 2 if whole else p // 3] * (v - 1), 0) if m >= 2 * p else None


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """Micro-batches in flight on a rank, in units of all its stages; close to the maximum of the schedule's order."""
    first, _ = in_flight_at_least(layout, rank)
    return sum(first) / len(first)


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
    counts = stage_counts(problem, grid, placement)
    found, units, held = _kinds_of_ranks(problem, placement, counts)
    layers, ends = layer_times(problem, grid, None, splits_backward), list(accumulate(counts))
    works = [_sum(_sum(layers[ends[s] - counts[s] : ends[s]]) for s in stages) for stages in held]
    return found, units, works


@per_problem
def _kinds_of_ranks(
    problem: PlanProblem, placement: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[list[int], list[tuple[tuple[str, int], ...]], list[list[int]]]:
    """The distinct ranks as in `_distinct_ranks`, their units by kind, and their stages."""
    units, last = units_of_stages(problem.spec, counts), max(placement)
    held: list[list[int]] = [[] for _ in range(last + 1)]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    kinds = [Counter(u.kind for s in stages for u in units[s]) for stages in held]
    ranks: dict[object, int] = {}
    for rank, of_rank in enumerate(kinds):
        ranks.setdefault(rank if rank in (0, last) else frozenset(of_rank.items()), rank)
    found = list(ranks.values())
    return found, [tuple(kinds[r].items()) for r in found], [held[r] for r in found]


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
