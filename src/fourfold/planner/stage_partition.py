"""Partitioning layers into pipeline stages, and what the ranks of a pipeline then hold.

Equal work per rank keeps ranks busy; equal work per stage keeps a pipeline's bubble small. Which counts more depends on the
schedule, so three partitions are simulated and the fastest is taken: equal ranks (`program.partition`), equal stages by time,
equal stages by number of layers. Before there is a schedule, `rank_loads` spreads blocks so that the busiest rank does least.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import NamedTuple

from fourfold.planner.compute_cost import unit_seconds
from fourfold.planner.evaluate import schedule_of
from fourfold.planner.layouts import GridShape, ParallelLayout
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import unit_times_on_grid
from fourfold.program.costs import Costs
from fourfold.program.engine import OpExtras, Problem, run
from fourfold.program.ops import Schedule, ends_of_step
from fourfold.program.partition import partition
from fourfold.program.schedules import loop, zigzag

__all__ = [
    "RankLoad",
    "StagePartition",
    "layer_times",
    "partition_layers",
    "partitions_of",
    "rank_loads",
]

_MOST_STAGES = 64
"""Stages up to which ranks are balanced by `program.partition`; with more it takes long and gains little."""
_PARTS_OF_A_LAYER = 4
"""Resolution of a layer's work: fine enough to balance, coarse enough for layouts to share partitions."""

FIW = tuple[float, float, float]
"""Seconds of F, I and W of a micro-batch."""


# ---- an even spread, before there is a schedule ----


@dataclass(frozen=True)
class RankLoad:
    """What one rank of a pipeline holds: units by kind, and micro-batches in flight."""

    units: tuple[tuple[str, int], ...]
    in_flight: float
    tied_copy: bool = False
    """It holds a copy of a tied weight."""


def in_flight(layout: ParallelLayout, rank: int) -> float:
    """The most micro-batches (of its share) that a rank holds, as the schedule's order has it or nearly so."""
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


def rank_loads(
    problem: PlanProblem, layout: ParallelLayout, splits_backward: bool | None = None
) -> tuple[list[RankLoad], list[FIW]]:
    """The distinct ranks of a pipeline: what each holds, and its F, I, W of a micro-batch.

    `splits_backward`: whether the grid's weight gradients have an op of their own (default: as in the layout).
    """
    mesh, zigzags = layout.mesh, layout.zigzag
    splits = layout.grid_splits_backward if splits_backward is None else splits_backward
    ranks, held, works = _spread(problem, mesh.pipe, zigzags, layout.grid(problem), splits)
    copy, last = problem.spec.tied and not zigzags and mesh.pipe > 1, mesh.pipe - 1
    loads = [
        RankLoad(units, in_flight(layout, rank), copy and rank == last) for rank, units in zip(ranks, held, strict=True)
    ]
    return loads, works


@lru_cache(maxsize=20_000)
def _spread(
    problem: PlanProblem, pipe: int, zigzags: bool, grid: GridShape, splits_backward: bool
) -> tuple[list[int], list[tuple[tuple[str, int], ...]], list[FIW]]:
    """The first rank, the last one, and of those between the first that holds such blocks."""
    spec, times = problem.spec, {}
    for kind in spec.kinds:
        c = unit_times_on_grid(problem, kind, grid, splits_backward=splits_backward)
        times[kind] = (c.forward, c.input_grad, c.weight_grad)

    def total(kinds: Counter[str]) -> FIW:
        f, i, w = (sum(times[k][part] * n for k, n in kinds.items()) for part in range(3))
        return f, i, w

    first, last = (Counter(u.kind for u in spec.of_layer(layer)) for layer in (0, spec.layers - 1))
    blocks = Counter(u.kind for u in spec.units if u.layer not in (0, spec.layers - 1))
    end = 0 if zigzags else pipe - 1
    extra = [0.0] * pipe
    extra[0] += sum(total(first))
    extra[end] += sum(total(last))
    share = _even_shares(spec.layers - 2, sum(total(blocks)) / max(1, spec.layers - 2), tuple(extra))
    ranks, held, works = [], [], []
    seen: set[tuple[tuple[str, int], ...]] = set()
    layers = iter(range(1, spec.layers - 1))
    for rank in range(pipe):
        counts = Counter(u.kind for layer in islice(layers, share[rank]) for u in spec.of_layer(layer))
        inner = tuple(counts.items())
        if rank in (0, pipe - 1) or inner not in seen:
            ranks.append(rank)
            seen |= {inner} if 0 < rank < pipe - 1 else set()
            counts.update((first if rank == 0 else Counter()) + (last if rank == end else Counter()))
            held.append(tuple(counts.items()))
            works.append(total(counts))
    return ranks, held, works


@lru_cache(maxsize=20_000)
def _even_shares(blocks: int, block: float, extra: tuple[float, ...]) -> tuple[int, ...]:
    """Blocks of every rank, so that the busiest does least; `extra`: seconds of the embedding and the head."""
    heap = [(m, i) for i, m in enumerate(extra)]
    heapq.heapify(heap)
    share = [0] * len(extra)
    for _ in range(blocks):
        load, i = heapq.heappop(heap)
        share[i] += 1
        heapq.heappush(heap, (load + block, i))
    return tuple(share)


# ---- partitions for a schedule ----


class StagePartition(NamedTuple):
    """Layers per stage, with the embedding and the head as layers; and the step's time if there were only computing."""

    counts: tuple[int, ...]
    seconds: float
    simulated: int
    """Micro-batches of those seconds."""
    busiest: float
    """Seconds of one more micro-batch, on the rank that has most."""

    def compute_bound(self, micro_batches: int) -> float:
        """Lower bound on the step time, whatever the units choose."""
        return self.seconds + (micro_batches - self.simulated) * self.busiest


def partition_layers(problem: PlanProblem, layout: ParallelLayout) -> tuple[Schedule, StagePartition]:
    """A layout's schedule, and the fastest partition for it."""
    schedule = schedule_of(layout.plan(problem, (), None), layout, problem.spec.layers)
    return schedule, _fastest_partition(problem, layout.grid(problem), schedule, layout.message_seconds(problem))


@lru_cache(maxsize=2048)
def _fastest_partition(problem: PlanProblem, grid: GridShape, schedule: Schedule, message: float) -> StagePartition:
    times = layer_times(problem, grid)
    at_ends = layer_times(problem, grid, True) if grid.amortized_over > 1 else times
    work = [sum(t) for t in times]
    if schedule.stages == 1:
        return StagePartition((len(work),), 0.0, 0, sum(work))
    candidates = _partitions(_relative_work(problem, *grid[:3]), schedule.placement)
    seconds = {counts: _simulate(times, at_ends, counts, schedule, message) for counts in candidates}
    best = min(seconds, key=seconds.__getitem__)
    ends = list(accumulate(best))
    by_stage = [sum(work[end - count : end]) for count, end in zip(best, ends, strict=True)]
    busiest = max(sum(by_stage[s] for s in held) for held in schedule.stages_of)
    return StagePartition(best, seconds[best], schedule.micro_batches, busiest)


def partitions_of(problem: PlanProblem, layout: ParallelLayout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The rank of every stage, and the partitions that are tried (not for synthesized schedules, which place stages)."""
    mesh = layout.mesh
    if mesh.pipe == 1:
        return (0,), ((problem.spec.layers,),)
    placement = (zigzag if layout.zigzag else loop)(mesh.pipe, layout.stages_per_rank)
    return placement, _partitions(_relative_work(problem, *layout.grid(problem)[:3]), placement)


@lru_cache(maxsize=4096)
def layer_times(problem: PlanProblem, grid: GridShape, once: bool | None = False) -> list[FIW]:
    """F, I and W of a micro-batch, layer by layer; `once` as in `unit_times_on_grid`."""
    spec = problem.spec
    kinds = {k: unit_times_on_grid(problem, k, grid, once=once) for k in spec.kinds}
    times: list[FIW] = []
    for layer in range(spec.layers):
        f, i, w = (float(sum(part)) for part in zip(*(kinds[u.kind][:3] for u in spec.of_layer(layer)), strict=True))
        times.append((f, i, w))
    return times


@lru_cache(maxsize=4096)
def _relative_work(problem: PlanProblem, tokens: int, row: int, col: int) -> tuple[int, ...]:
    """What the layers compute, in parts of the median one: the same for many layouts."""
    spec = problem.spec
    kinds = {k: sum(unit_seconds(problem, k, tokens, row, col)[:3]) for k in spec.kinds}
    work = [sum(kinds[u.kind] for u in spec.of_layer(layer)) for layer in range(spec.layers)]
    median = sorted(work)[len(work) // 2] or max(work) or 1.0
    return tuple(round(_PARTS_OF_A_LAYER * w / median) for w in work)


@lru_cache(maxsize=4096)
def _partitions(work: tuple[int, ...], placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Partitions of layers with this work."""
    stages = len(placement)
    found = {_equal_time(work, stages), _equal_count(len(work), stages)}
    if stages <= _MOST_STAGES:
        found.add(tuple(partition(work, placement)))
    return tuple(sorted(found))


def _equal_time(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """A boundary where the sum passes a stage's share; at least one layer each."""
    total, counts, at, done = sum(work), [], 0, 0.0
    for stage in range(stages):
        left = stages - stage - 1
        end = at + 1
        done += work[at]
        while end < len(work) - left and done + work[end] / 2 <= total * (stage + 1) / stages:
            done += work[end]
            end += 1
        if not left:
            end = len(work)
        counts.append(end - at)
        at = end
    return tuple(counts)


def _equal_count(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of blocks, the embedding with the first stage, the head with the last."""
    blocks = layers - 2
    counts = [blocks // stages + (s < blocks % stages) for s in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts) if min(counts) else _equal_time([1.0] * layers, stages)


def _simulate(
    times: Sequence[FIW], at_ends: Sequence[FIW], counts: Sequence[int], schedule: Schedule, message: float
) -> float:
    """Seconds of a step with nothing but computing; `at_ends`: the first forward and the last backward of every layer."""
    sums, at, more = [], 0, {}
    for stage, count in enumerate(counts):
        layers = slice(at, at + count)
        sums.append([sum(t[i] for t in times[layers]) for i in range(3)])
        if times is not at_ends:
            f, i, w = (max(0.0, sum(t[i] for t in at_ends[layers]) - sums[-1][i]) for i in range(3))
            more[stage] = {"F": f, "I": i, "W": w, "B": i + w}
        at += count
    costs = Costs(
        forward=tuple(s[0] for s in sums),
        input_grad=tuple(s[1] for s in sums),
        weight_grad=tuple(s[2] for s in sums),
        message=message,
        link="rank",
    )
    ops = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
    once: dict[tuple[int, str, int], OpExtras] = {}
    for order in schedule.order if more else ():
        for op in chain(*ends_of_step(order)):
            once[op] = OpExtras(longer := more[op.stage][op.kind], longer)
    return float(run(ops, schedule.order, more=once).makespan)
