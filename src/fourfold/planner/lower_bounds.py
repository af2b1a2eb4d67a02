"""Lower bounds on a layout's step time and memory, which no choice of its units can beat: for pruning, and for the certificate.

In the order in which the search tightens them:

    compute_bound      computing of the whole model with the bubble that no partition of its layers avoids; then with the grid
    partition_bound    the busiest rank with whole layers; and waiting for the first micro-batch, for the best partition tried
    memory_bound       seconds that the first and the last rank's units add to fit into a memory budget, relaxed
    schedule_bound     the same with the real schedule and partition

**Memory.** A rank's memory is not a sum over units, but at some instants of a step it is known what is held together. At each of
them the relaxed knapsack (`knapsack.relaxed`) within the budget is a lower bound; the highest counts.

    first       when most micro-batches are in flight for the first time: their activations, and no gradients yet
    between     when gradients have been made and most are in flight again: both
    last        at the end: gradients, reduced where they are sharded, and no activations

The average of two constraints is also a valid constraint, and still a sum over units.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES
from fourfold.plan import Tensor
from fourfold.planner.compute_cost import unit_seconds
from fourfold.planner.grid_cost import least_column_seconds
from fourfold.planner.knapsack import Group, relaxed
from fourfold.planner.layouts import GridShape, ParallelLayout
from fourfold.planner.op_times import units_of_stages
from fourfold.planner.problem import PlanProblem
from fourfold.planner.stage_partition import layer_times, partitions_of, rank_loads
from fourfold.planner.unit_cost import UnitChoice, unit_times, unit_times_on_grid
from fourfold.planner.unit_options import AtEnd, HostLinkWeights, OptionTable, UnitOption
from fourfold.program.ops import Schedule

__all__ = [
    "compute_bound",
    "in_flight_at_least",
    "in_flight_of_schedule",
    "least_bytes",
    "memory_bound",
    "partition_bound",
    "schedule_bound",
]

# ---- computing and bubble ----


def compute_bound(problem: PlanProblem, layout: ParallelLayout, grid: bool = False) -> float:
    """Lower bound from computing; `grid`: with the layout's collectives, else those that any flow has."""
    mesh, shape = layout.mesh, layout.grid(problem)
    model, block = _model_seconds(problem, shape if grid else shape._replace(tensor=Tensor(), amortized_over=0))
    blocks = -(-(problem.spec.layers - 2) // mesh.pipe) if problem.spec.alike else 0
    return _with_bubble(layout, model, max(model / mesh.pipe, blocks * block))


def _with_bubble(layout: ParallelLayout, model: float, busiest: float) -> float:
    """Lower bound over all partitions: one micro-batch takes `model` seconds on all ranks together, `busiest` on one.

    [Note: least bubble]
    A rank's F of the first micro-batch follows those of the ranks before it, its B of the last one precedes theirs; and with one
    F, one B in turn and k = p - rank in flight, it waits for B of the first, having k - 1 others to compute, and once more for
    that of the last. So with A and Z seconds on the ranks before and after one that has M, a step takes at least
    A + m M + max(0, 2 Z - (k - 1) M). Over all A + M + Z the least is m M + max(0, 2 (A + M + Z) - (p + 1) M), where m > p. With
    fewer micro-batches, A + m M for every rank remains; least where all are equal. Other schedules idle less: a micro-batch goes
    through all stages, unless W is delayed.
    """
    p, m = layout.mesh.pipe, layout.micro_batches
    if layout.schedule == "1f1b" and m > p:
        return m * busiest + max(0.0, 2 * model - (p + 1) * busiest)
    if layout.schedule in ("1f1b", "gpipe"):
        return max(m * busiest, model / (1 - (1 - 1 / m) ** p))
    return max(m * busiest, model) if layout.schedule in ("interleaved", "wave") else m * busiest


@lru_cache(maxsize=20_000)
def _model_seconds(problem: PlanProblem, grid: GridShape) -> tuple[float, float]:
    """Seconds of a micro-batch of the whole model, and of a block; amortized over 0: the least, over all flows."""
    spec, total, blocks = problem.spec, 0.0, 0.0
    every = Counter(u.kind for u in spec.units)
    inner = Counter(u.kind for u in spec.units if u.layer not in (0, spec.layers - 1))
    for kind, count in every.items():
        if not grid.amortized_over:
            seconds = sum(unit_seconds(problem, kind, *grid[:3])[:3])
            seconds += least_column_seconds(problem, kind, grid.tokens, grid.col)
        else:
            seconds = unit_times_on_grid(problem, kind, grid).work
        total, blocks = total + count * seconds, blocks + inner[kind] * seconds
    return total, blocks / max(1, spec.layers - 2)


def partition_bound(problem: PlanProblem, layout: ParallelLayout) -> float:
    """Lower bound with whole layers on ranks."""
    busiest = 0.0
    if problem.spec.alike:
        _, works = rank_loads(problem, layout, splits_backward=False)  # which overlaps most, and is found faster
        busiest = layout.micro_batches * max(map(sum, works))
    return max(busiest, _first_micro_batch_bound(problem, layout))


def _first_micro_batch_bound(problem: PlanProblem, layout: ParallelLayout) -> float:
    """A rank starts when a micro-batch has passed the stages before its first one; after its last backward, which is of that
    stage, those stages have theirs to do. Where weight gradients are delayed, they may be what it does last."""
    mesh, m = layout.mesh, layout.micro_batches
    if mesh.pipe == 1 or layout.schedule == "synthesized":  # which partitions layers itself
        return 0.0
    grid = layout.grid(problem)
    placement, partitions = partitions_of(problem, layout)
    split, hop = layout.splits_backward, layout.message_seconds(problem)
    work = [0.0, *accumulate(sum(t) for t in layer_times(problem, grid, None))]
    first = [0.0, *accumulate(t[0] if split else sum(t) for t in layer_times(problem, grid, True))]
    best = inf
    for counts in partitions:
        ends = [0, *accumulate(counts)]
        own = [0.0] * mesh.pipe
        for stage, rank in enumerate(placement):
            own[rank] += work[ends[stage + 1]] - work[ends[stage]]
        waits = [first[ends[rank]] + (1 if split else 2) * rank * hop for rank in range(mesh.pipe)]
        best = min(best, max(m * o + w for o, w in zip(own, waits, strict=True)))
    return best


# ---- micro-batches in flight ----

InFlight = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Micro-batches of each stage of a rank in flight: first, and between (None: there need be no such instant)."""


def in_flight_at_least(layout: ParallelLayout, rank: int) -> InFlight:
    """Micro-batches that are in flight at one instant, at least, for a named schedule. A test checks them against orders."""
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


def in_flight_of_schedule(schedule: Schedule, rank: int) -> InFlight:
    """The same, from the schedule's order."""
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

_WEIGHTS: tuple[HostLinkWeights, ...] = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0))
"""Weights of the host's link that are tried ([Note: lower bound of the host's link])."""
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
    """The kind of unit whose backward comes when most are in flight; empty where that is unknown."""
    has_loss: bool
    """The model's last unit is here, and its backward may follow its forward."""
    has_between: bool


class _Instant(NamedTuple):
    """Weights of the three instants in a constraint."""

    first: float = 0
    between: float = 0
    last: float = 0


class _RankUnits(NamedTuple):
    """What a rank holds, in one partition or in several."""

    rank: int
    stages: tuple[tuple[str, ...], ...]
    """Kinds of units of its stages that are there in all of the partitions."""
    has_last_stage: bool
    partitions: tuple[tuple[tuple[str, int], ...], ...]
    """Units by kind, in each."""


def memory_bound(
    table: OptionTable, layout: ParallelLayout, limit: float, bound: float = 0.0, enough: float = inf
) -> float | None:
    """Lower bound on the step time in `limit` bytes of a device; None where no plan of the layout fits.

    At least `bound`, which is known already; it need not be tight above `enough`.
    """
    if layout.mesh.pipe > 1 and layout.schedule == "synthesized":  # which partitions layers itself
        return bound
    held = _rank_units(table.problem, *partitions_of(table.problem, layout))
    return _bound_of_ranks(table, layout, held, limit, bound, enough, None)


def schedule_bound(
    table: OptionTable,
    layout: ParallelLayout,
    schedule: Schedule,
    counts: tuple[int, ...],
    limit: float,
    bound: float,
) -> float | None:
    """The same with a schedule and layers per stage."""
    held = _rank_units(table.problem, schedule.placement, (counts,))
    return _bound_of_ranks(table, layout, held, limit, bound, inf, schedule)


def least_bytes(table: OptionTable, layout: ParallelLayout) -> float:
    """Lower bound on the bytes of a device that a plan of the layout needs."""
    found = []
    for ranks in _rank_units(table.problem, *partitions_of(table.problem, layout)):
        most = 0.0
        for h in ranks:
            flying = in_flight_at_least(layout, h.rank)
            rank = _rank_rows(h.stages, *flying, h.has_last_stage, layout.splits_backward)
            kinds = _kinds(table, layout, rank)
            again = [k.recompute[0] for k in kinds]
            for at in _instants(rank):
                rows, transient = _constraint(rank, kinds, again, at, 0, 1)
                held = sum(units * min(size for size, _ in options) for options, units in rows)
                most = max(most, transient + held)
        found.append(most)
    return min(found) + _sent_bytes(table.problem, layout)


def _sent_bytes(problem: PlanProblem, layout: ParallelLayout) -> float:
    """A message that is being sent."""
    return 0.0 if problem.on_cpu else layout.message_bytes(problem)


@lru_cache(maxsize=4096)
def _rank_units(
    problem: PlanProblem, placement: tuple[int, ...], partitions: tuple[tuple[int, ...], ...]
) -> tuple[tuple[_RankUnits, ...], ...]:
    """The first and the last rank, for all partitions at once; where layers differ, for each."""
    spec, last = problem.spec, max(placement)
    every = [[tuple(u.kind for u in units) for units in units_of_stages(spec, counts)] for counts in partitions]
    out = []
    for some in [every] if spec.alike else [[stages] for stages in every]:
        ranks = []
        for rank in sorted({0, last}):
            mine = [[stages[s] for s in range(len(placement)) if placement[s] == rank] for stages in some]
            fewest = tuple(min(kinds, key=len) for kinds in zip(*mine, strict=True))
            counts = (Counter(kind for kinds in stages for kind in kinds) for stages in mine)
            ranks.append(_RankUnits(rank, fewest, rank == placement[-1], tuple(tuple(c.items()) for c in counts)))
        out.append(tuple(ranks))
    return tuple(out)


def _bound_of_ranks(
    table: OptionTable,
    layout: ParallelLayout,
    held: tuple[tuple[_RankUnits, ...], ...],
    limit: float,
    bound: float,
    enough: float,
    schedule: Schedule | None,
) -> float | None:
    problem, grid, splits = table.problem, layout.grid(table.problem), layout.grid_splits_backward
    work = {
        kind: layout.micro_batches * unit_times_on_grid(problem, kind, grid, splits_backward=splits).work
        for kind in problem.spec.kinds
    }
    budget = limit - _sent_bytes(problem, layout)
    best: float | None = None
    for ranks in held:
        bounds, fit = [bound] * len(ranks[0].partitions), True
        for h in ranks:
            flying = in_flight_at_least(layout, h.rank) if schedule is None else in_flight_of_schedule(schedule, h.rank)
            rank = _rank_rows(h.stages, *flying, h.has_last_stage, layout.splits_backward)
            least = _extra_seconds(table, layout, rank, budget)
            if least is None:
                fit = False
                break
            for i, units in enumerate(h.partitions):
                bounds[i] = max(bounds[i], least + sum([n * work[kind] for kind, n in units]))
            if min(bounds) > enough:
                break
        if fit:
            best = min(bounds) if best is None else min(best, *bounds)
    return best


@lru_cache(maxsize=20_000)
def _rank_rows(
    stages: tuple[tuple[str, ...], ...],
    first: tuple[int, ...],
    between: tuple[int, ...] | None,
    has_last_stage: bool,
    splits_backward: bool,
) -> _RankRows:
    alone, rows = len(stages) == 1, Counter[tuple[str, int, int, AtEnd]]()
    for kinds, a, b in zip(stages, first, between or [0] * len(stages), strict=True):
        end = len(kinds) - 1
        rows.update((kind, a, b, AtEnd(alone and i == 0, alone and i == end)) for i, kind in enumerate(kinds))
    found = tuple(_Row(*row, count) for row, count in rows.items())
    turning = stages[0][-1] if alone and not splits_backward else ""
    return _RankRows(found, turning, alone and has_last_stage, between is not None)


def _extra_seconds(table: OptionTable, layout: ParallelLayout, rank: _RankRows, budget: float) -> float | None:
    """Lower bound on a rank's seconds beyond computing; None where nothing fits."""
    key = (*table.key(layout), layout.splits_backward, layout.grid_splits_backward, rank, budget)
    if key not in table.cache:
        table.cache[key] = _relax(table, layout, rank, _kinds(table, layout, rank), budget)
    least: float | None = table.cache[key]
    return least


def _kinds(table: OptionTable, layout: ParallelLayout, rank: _RankRows) -> list[_KindOptions]:
    """Row by row."""
    base, out = (*table.key(layout), layout.splits_backward, layout.grid_splits_backward), []
    for r in rank.rows:
        key = (*base, r.kind, r.at_end)
        if key not in table.cache:
            table.cache[key] = _KindOptions.of(table, layout, r)
        out.append(table.cache[key])
    return out


class _KindOptions(NamedTuple):
    """Options of a unit, with lower bounds of their seconds.

    All-reduces of replicas may overlap with anything, and count in two ways, both less than what a plan takes: overlapped as far
    as anything can be; or all of them, less what they can overlap with, which is one backward of every unit.
    """

    sharding: list[UnitOption]
    window: float
    """Seconds that its all-reduce can overlap with."""
    without_recompute: tuple[float, float]
    """The fastest of its modes with nothing recomputed, in both ways."""
    recompute: list[list[UnitOption]]
    """What it may recompute, for all _WEIGHTS where activations are offloaded."""

    @classmethod
    def of(cls, table: OptionTable, layout: ParallelLayout, row: _Row) -> _KindOptions:
        piped, overlap = layout.mesh.pipe > 1, table.problem.cluster.overlap
        sharding = table.sharding(layout, row.kind, piped, row.at_end, "all recompute")
        plain = table.sharding(layout, row.kind, piped, row.at_end, "no recompute")
        t = unit_times(table.problem, layout, row.kind, UnitChoice())
        backward = overlap * (t.input_grad + t.weight_grad)
        fastest = min(o.seconds for o in plain), min(o.seconds + o.queued for o in plain) - backward
        weights = _WEIGHTS if layout.activations == "host" else _WEIGHTS[:1]
        recompute = [table.recompute(layout, row.kind, w) for w in weights]
        return cls(sharding, backward + overlap * t.forward, fastest, recompute)


def _relax(
    table: OptionTable, layout: ParallelLayout, rank: _RankRows, kinds: list[_KindOptions], budget: float
) -> float | None:
    m, least = layout.micro_batches, 0.0
    which, stays = _best_weights(table, layout, rank, kinds) if layout.activations == "host" else (0, 0.0)
    again = [k.recompute[which] for k in kinds]
    pairs = list(zip(rank.rows, kinds, strict=True))
    queues = sum([r.units * (max([o.queued for o in k.sharding]) - k.window) for r, k in pairs])
    for queued in (0, 1) if queues > 0 else (0,):
        binds = False
        for at in _instants(rank):
            if max(at) < 1 and not binds:
                break
            rows, transient = _constraint(rank, kinds, again, at, queued, m)
            found = _relaxed_seconds(rows, budget - transient)
            if found is None:
                return None
            binds, least = binds or found[1], max(least, found[0] - stays)
    if layout.activations != "host":  # recomputation hides no more than it takes
        for way in (0, 1):
            least = max(least, sum([r.units * k.without_recompute[way] for r, k in pairs]))
    return least


def _constraint(
    rank: _RankRows,
    kinds: list[_KindOptions],
    again: list[list[UnitOption]],
    at: _Instant,
    queued: int,
    micro_batches: int,
) -> tuple[list[_Options], float]:
    """Bytes that units may hold at an instant, with their seconds; and transient bytes then."""
    rows: list[_Options] = []
    transient = 0.0
    for r, k, options in zip(rank.rows, kinds, again, strict=True):
        flight = at.first * r.first + at.between * r.between
        sharded = [
            (at.first * o.first + at.between * o.memory + at.last * o.last, o.seconds + queued * (o.queued - k.window))
            for o in k.sharding
        ]
        rows += [(sharded, r.units), ([(flight * o.memory, micro_batches * o.seconds) for o in options], r.units)]
        if r.kind == rank.turning:
            transient = min([o.transient for o in options])
    return rows, (at.first + at.between) * transient


def _best_weights(
    table: OptionTable, layout: ParallelLayout, rank: _RankRows, kinds: list[_KindOptions]
) -> tuple[int, float]:
    """The weights of the host's link with the highest bound; and seconds of bytes that need not cross it."""
    m, cluster, found = layout.micro_batches, table.problem.cluster, []
    for i, weights in enumerate(_WEIGHTS):
        stays = 0.0
        if rank.has_loss:  # its backward may be next, and then the last bytes stay
            crossing = ACTIVATION_BUFFER_BYTES / cluster.host.link
            stays = m * sum(1 - cluster.overlap + w * cluster.overlap for w in weights) * crossing
        pairs = zip(rank.rows, kinds, strict=True)
        least = m * sum([r.units * min([o.seconds for o in k.recompute[i]]) for r, k in pairs]) - stays
        found.append((least, i, stays))
    _, i, stays = max(found)
    return i, stays


def _relaxed_seconds(rows: list[_Options], room: float) -> tuple[float, bool] | None:
    """Lower bound on the seconds of all units within `room` bytes, and whether memory binds."""
    seconds = held = 0.0
    for options, units in rows:
        fastest, size = min([(takes, size) for size, takes in options])
        seconds, held = seconds + units * fastest, held + units * size
    if held <= room:
        return seconds, False
    chosen = relaxed([Group(*row) for row in rows], room)
    return None if chosen is None else (chosen.bound, True)


def _instants(rank: _RankRows) -> list[_Instant]:
    """The instants that are known of a rank; then averages of two."""
    if not rank.has_between:
        return [_Instant(first=1), _Instant(last=1), _Instant(first=0.5, last=0.5)]
    if all(r.between >= r.first for r in rank.rows):
        return [_Instant(between=1)]
    return [_Instant(first=1), _Instant(between=1), _Instant(first=0.5, between=0.5)]
