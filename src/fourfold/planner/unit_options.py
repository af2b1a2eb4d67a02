"""The options of a unit, and the fastest choice for all units of a rank within a memory budget.

A unit has options in two aspects that add up: how it is sharded, and what it recomputes. Each option has seconds of a step, bytes
held for the whole step, and transient bytes. The aspects are chosen independently: a backward that recomputes would overlap more
of a gather than is counted here, so times are never too short; the replay of the whole plan decides about memory.

A rank's memory is what its units hold all step, what they save of every micro-batch in flight, and the largest transient of each
aspect. The latter is not a sum, so its few possible values are tried in turn: options above it are excluded, and it is taken off
the budget; the rest is a knapsack (`knapsack`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any, Literal, NamedTuple

from fourfold.planner.knapsack import Chosen, Group, choose
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem, rounded
from fourfold.planner.stage_partition import RankLoad
from fourfold.planner.unit_cost import UnitChoice, reduced_in_buckets, sharding_cost, unit_cost, unit_times
from fourfold.shard.layout import JOIN

__all__ = [
    "AtEnd",
    "OptionTable",
    "RankChoice",
    "UnitOption",
    "choose_for_rank",
    "free_bytes",
    "sharding_options",
    "smallest_bytes",
    "smallest_for_rank",
]

SPLITS = (2, 4, 8, 16)
_BEFORE = {"attn": "mlp", "mlp": "attn", "head": "mlp", "embed": "attn"}
"""The unit that computes while a unit's parameters are gathered."""
_EPSILON = 1e-12
"""Seconds: options that differ by less are equally fast."""

HostLinkWeights = tuple[float, float]
"""[Note: lower bound of the host's link]"""


class UnitOption(NamedTuple):
    """One value of one aspect of a unit."""

    choice: UnitChoice
    seconds: float
    memory: float
    """Bytes held for the whole step (sharding), or of one micro-batch (recomputation)."""
    transient: float
    first: float = 0.0
    """Of `memory`, bytes before any gradient is made."""
    last: float = 0.0
    """Of `memory`, bytes at the end of a step."""


class AtEnd(NamedTuple):
    """Whether a unit is at an end of its rank's only stage."""

    first: bool = False
    """It is still gathered from the backward before."""
    last: bool = False
    """It is still gathered from its forward."""


# ---- options of a unit ----


def recompute_options(
    problem: PlanProblem, layout: ParallelLayout, kind: str, weights: HostLinkWeights | None = None
) -> list[UnitOption]:
    """All ways to recompute: seconds and bytes of a micro-batch.

    [Note: lower bound of the host's link]
    An op that computes for c seconds and moves activations for d takes max(c, d) + (1 - overlap) · min(c, d). Both are sums over
    its units, which share the link, so none can be charged by itself. But the expression is convex: for each weight w in [0, 1]
    it is at least (1 - w) · (c + (1 - overlap) · d) + w · (d + (1 - overlap) · c), which is a sum over units. `weights`: for
    forwards, and for backwards, which compute more for the same bytes.
    """
    unit, out = problem.spec.kinds[kind], []
    no_room = _share_without_room(problem, layout) if weights is None else 0.0
    base = unit_times(problem, layout, kind, UnitChoice(), False).work
    candidates = [UnitChoice(recompute=r) for r in ("none", "selective", "full")]
    if "per-slice" in unit.saved and not layout.on_grid:
        candidates += [UnitChoice(recompute="per-slice", split=s) for s in SPLITS if unit.slices >= s]
    for choice in candidates:
        cost = unit_cost(problem, layout, kind, choice)
        t = cost.times
        seconds = t.work + t.recompute - base
        moved, overlap = cost.offloaded_bytes / problem.cluster.host.link, problem.cluster.overlap
        if weights is not None and layout.activations == "host":
            backward = t.input_grad + t.recompute + (0.0 if layout.splits_backward else t.weight_grad)
            for weight, work in zip(weights, (t.forward, backward), strict=True):
                seconds += (1 - overlap + weight * overlap) * moved - weight * overlap * work
        elif moved:
            for work in (t.forward, t.input_grad + t.recompute):
                seconds += max(work, moved) + (1 - overlap) * min(work, moved) - work
        held = cost.saved_bytes + no_room * cost.offloaded_bytes
        out.append(UnitOption(choice, seconds, held, max(cost.backward_workspace, cost.forward_workspace)))
    return out


@lru_cache(maxsize=4096)
def _share_without_room(problem: PlanProblem, layout: ParallelLayout) -> float:
    """Share of offloaded activations for which the host has no room if nothing is recomputed."""
    if layout.activations == "device" or problem.on_cpu:
        return 0.0
    flight = min(layout.micro_batches, layout.mesh.pipe) / layout.mesh.pipe
    kinds = Counter(u.kind for u in problem.spec.units)
    sizes = (n * unit_cost(problem, layout, kind, UnitChoice()).offloaded_bytes for kind, n in kinds.items())
    moves = flight * sum(sizes)
    return max(0.0, 1 - layout.host_activation_bytes(problem) / moves) if moves else 0.0


def sharding_options(
    problem: PlanProblem,
    layout: ParallelLayout,
    kind: str,
    piped: bool,
    at_end: AtEnd = AtEnd(),  # noqa: B008
    bound: bool = False,
    wanted: str = "",
) -> list[UnitOption]:
    """All modes that make sense for these replicas, and the one that is `wanted`.

    `bound`: seconds that no plan can beat: as if everything were recomputed, which overlaps more; and all-reduces of replicas may
    overlap with anything.
    """
    m, replicas = layout.micro_batches, layout.replicas
    choices = [UnitChoice()]
    if replicas > 1:
        node = problem.cluster.devices // layout.replica_stride
        groups = [0]
        if 1 < node < replicas and replicas % node == 0:
            groups.append(node)
        modes: list[Literal["zero2", "zero3", "keep"]] = ["zero3"]
        if m > 1 or wanted == "keep":  # keep and zero2 are the same in one micro-batch
            modes.append("keep")
        if m == 1 or wanted == "zero2":
            modes.append("zero2")
        reduces: list[Literal["step", "micro-batch"]] = ["step", "micro-batch"] if m > 1 else ["step"]
        choices += [UnitChoice(mode, reduce, g) for mode in modes for reduce in reduces for g in groups]
    whole_ops = replace(layout, mesh=replace(layout.mesh, pipe=1))  # no backward is split
    before = _BEFORE.get(kind.partition(" ")[0], kind)
    before = before if before in problem.spec.kinds else kind
    other = unit_times(problem, whole_ops, before, UnitChoice())
    forward, backward = other.forward, other.input_grad + other.weight_grad
    if bound:
        forward, backward = 2 * forward, backward + 2 * forward
    if not layout.prefetch:  # nothing is in flight while something computes
        forward = backward = 0.0
    return [
        o
        for c in choices
        for o in _sharding_option(problem, whole_ops, kind, before, c, piped, (forward, backward), at_end, bound)
    ]


def _sharding_option(
    problem: PlanProblem,
    layout: ParallelLayout,
    kind: str,
    before: str,
    choice: UnitChoice,
    piped: bool,
    windows: tuple[float, float],
    at_end: AtEnd,
    bound: bool,
) -> list[UnitOption]:
    """A mode, with its state on the device, on the host, or either.

    `windows`: seconds of computing that a gather or reduction in the forward and in the backward can overlap with.
    """
    m, overlap = layout.micro_batches, problem.cluster.overlap
    cost = sharding_cost(problem, layout, kind, choice)
    forward, backward = windows

    def exposed(takes: float, window: float) -> float:
        beyond = max(0.0, takes - window)
        return beyond + (1 - overlap) * (takes - beyond)

    sharded = choice.mode != "replicate"
    seconds = 0.0
    if choice.mode == "zero3":
        seconds += (1 if at_end.first else m) * exposed(cost.gather, forward)
        seconds += 0.0 if at_end.last else m * exposed(cost.gather, backward)
    elif sharded:
        seconds += exposed(cost.gather, forward)
    reduce = cost.reduce
    in_bucket = reduced_in_buckets(cost, choice) and layout.optimizer == "device"
    if in_bucket and 0 < cost.gradient_bytes < JOIN:  # its share of a bucket's sum
        reduce = problem.cluster.collective("all_reduce", JOIN, layout.replicas, layout.replica_stride)
        reduce = min(cost.reduce, cost.gradient_bytes / JOIN * reduce)
    if bound and not sharded:
        backward = reduce
    sums = exposed(reduce, backward) + exposed(cost.across, backward)
    seconds += (m if choice.reduce == "micro-batch" else 1) * sums
    if choice.mode == "zero3" and "weights" in layout.tensor.keep:  # the grid gathers them again
        again, once = (unit_times(problem, layout, kind, c).work for c in (choice, UnitChoice()))
        seconds += m * (again - once)
    first = cost.parameter_bytes + (cost.gathered_bytes if choice.mode in ("keep", "zero2") else 0.0)
    last = cost.parameter_bytes + cost.reduced_bytes
    reduced_at_once = sharded and (choice.reduce == "micro-batch" or (m == 1 and not piped))
    memory = first + (cost.reduced_bytes if reduced_at_once else cost.gradient_bytes)
    transient = cost.transient_bytes + (cost.gradient_bytes if reduced_at_once else 0.0)
    if cost.transient_bytes and layout.prefetch:  # one is gathered ahead
        transient += sharding_cost(problem, layout, before, choice).transient_bytes
    state = cost.updated * (problem.state_bytes if layout.optimizer == "device" else problem.streamed_bytes)
    here = UnitOption(choice, seconds, memory + state, transient, first + state, last + state)
    crossing = state / problem.cluster.host.link
    there = UnitOption(choice, seconds + crossing, memory, transient, first, last)
    return {"device": [here], "host": [there]}.get(layout.optimizer, [here, there])


class OptionTable:
    """Options of every kind of unit under the user's constraints, cached by what they depend on."""

    def __init__(self, problem: PlanProblem, fixed: dict[str, str]):
        self.problem, self.fixed = problem, fixed
        first, *_, last = [u.kind for u in problem.spec.units]
        kinds = Counter(u.kind for u in problem.spec.units)
        self._at_end = {k: AtEnd(k == first, k == last) for k in (first, last) if kinds[k] == 1}
        self._sharding: dict[tuple[object, ...], list[UnitOption]] = {}
        self._recompute: dict[tuple[object, ...], list[UnitOption]] = {}
        self.cache: dict[tuple[object, ...], Any] = {}
        """What is known of ranks and units, by `key` and more."""

    def key(self, layout: ParallelLayout) -> tuple[object, ...]:
        """What a rank's options depend on: layouts that differ only in their schedules share it."""
        mesh = layout.mesh
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size, mesh.pipe > 1)
        where = (layout.optimizer, layout.activations, layout.tensor, layout.prefetch, layout.amortized_over)
        return (*sizes, *where, layout.stages_per_rank > 1)

    def sharding(
        self,
        layout: ParallelLayout,
        kind: str,
        piped: bool,
        at_end: AtEnd | None = None,
        bound: bool = False,
    ) -> list[UnitOption]:
        """Modes, with seconds and bytes of a step; `bound`: lower bounds of the seconds, not estimates."""
        mesh = layout.mesh
        if at_end is None:
            at_end = self._at_end.get(kind, AtEnd()) if layout.stages_per_rank == 1 else AtEnd()
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size)
        key = (kind, *sizes, piped, layout.optimizer, layout.tensor, layout.prefetch, at_end, bound)
        if key not in self._sharding:
            options = sharding_options(self.problem, layout, kind, piped, at_end, bound, self.fixed.get("mode", ""))
            self._sharding[key] = self._useful(options, "mode")
        return self._sharding[key]

    def recompute(self, layout: ParallelLayout, kind: str, weights: HostLinkWeights | None = None) -> list[UnitOption]:
        """Recomputation and splits, with seconds and bytes of a micro-batch.

        `weights`: of the host's link in a lower bound, where activations are offloaded; without, as if each unit waited.
        """
        mesh = layout.mesh
        where: tuple[object, ...] = (layout.activations, weights, layout.splits_backward)
        if weights is None or layout.activations == "device":
            where = (layout.activations, _share_without_room(self.problem, layout))
        sizes = (mesh.row, mesh.col, layout.micro_batch_size, layout.tensor, layout.amortized_over)
        key = (kind, *sizes, *where)
        if key not in self._recompute:
            self._recompute[key] = self._useful(recompute_options(self.problem, layout, kind, weights), "recompute")
        return self._recompute[key]

    def _useful(self, options: list[UnitOption], aspect: str) -> list[UnitOption]:
        """Options as constrained (all, where a unit has none of these), without dominated ones."""
        fixed = self.fixed.get(aspect)
        kept: list[UnitOption] = []
        for o in [o for o in options if fixed in (None, getattr(o.choice, aspect))] or options:
            if not any(_dominates(p, o) for p in kept):
                kept = [p for p in kept if not _dominates(o, p)]
                kept.append(o)
        return kept


def _dominates(a: UnitOption, b: UnitOption) -> bool:
    return (
        a.seconds <= b.seconds
        and a.memory <= b.memory
        and a.transient <= b.transient
        and a.first <= b.first
        and a.last <= b.last
    )


# ---- the choice for a rank ----

_Rows = list[tuple[str, int, list[UnitOption]]]
"""(kind of unit, number of units, options): for every kind a row of sharding, then a row of recomputation."""


@dataclass(frozen=True)
class RankChoice:
    """A rank's choices; seconds are those of a step beyond what the units compute anyway."""

    seconds: float
    bound: float
    """No choice within the budget takes less, by these sums."""
    needs: float
    """The least budget in which the choice would be this one or better."""
    options: tuple[tuple[str, tuple[tuple[UnitChoice, int], ...], tuple[tuple[UnitChoice, int], ...]], ...]
    """By kind: how many units are sharded how, and how many recompute how."""
    free: bool
    """Memory does not bind: more of it would change nothing."""

    @property
    def gap(self) -> float:
        return self.seconds - self.bound

    def choices(self, kind: str) -> list[UnitChoice]:
        """A choice for every unit of a kind, those that hold least first."""
        for name, sharding, recompute in self.options:
            if name == kind:
                sharded = [c for c, n in sharding for _ in range(n)]
                again = [c for c, n in recompute for _ in range(n)]
                return [a._replace(split=b.split, recompute=b.recompute) for a, b in zip(sharded, again, strict=True)]
        return []


class _Rank:
    """A rank's rows of options; `free`: the least budget in which memory does not bind."""

    def __init__(self, rows: _Rows):
        self.rows, self.fastest = rows, []
        for kind, n, options in rows:
            least = min([o.seconds for o in options]) + _EPSILON
            self.fastest.append((kind, n, [o for o in options if o.seconds <= least]))
        self.free, self.free_limits = _least_budget(self.fastest)
        self.chosen: dict[float, RankChoice | None] = {}

    @cached_property
    def smallest(self) -> tuple[float, list[float]]:
        return _least_budget(self.rows)


def _rank(table: OptionTable, layout: ParallelLayout, load: RankLoad) -> _Rank:
    key = (*table.key(layout), load)
    known: _Rank | None = table.cache.get(key)
    if known is None:
        rows: _Rows = []
        m, flight, piped = layout.micro_batches, load.in_flight, layout.mesh.pipe > 1
        for kind, count in load.units:
            rows.append((kind, count, table.sharding(layout, kind, piped)))
            again = [
                UnitOption(o.choice, m * o.seconds, flight * o.memory, o.transient)
                for o in table.recompute(layout, kind)
            ]
            rows.append((kind, count, again))
        known = table.cache[key] = _Rank(rows)
    return known


def smallest_bytes(table: OptionTable, layout: ParallelLayout, load: RankLoad) -> float:
    """The least budget in which `choose_for_rank` finds something."""
    return _rank(table, layout, load).smallest[0]


def free_bytes(table: OptionTable, layout: ParallelLayout, load: RankLoad) -> float:
    """The least budget in which memory does not bind: every unit has the fastest of its options."""
    return _rank(table, layout, load).free


def choose_for_rank(table: OptionTable, layout: ParallelLayout, load: RankLoad, budget: float) -> RankChoice | None:
    """The fastest choices within the budget, or None."""
    rank = _rank(table, layout, load)
    if budget not in rank.chosen:
        if budget >= rank.free:
            rank.chosen[budget] = _smallest(rank.fastest, rank.free, rank.free_limits, True)
        else:
            rank.chosen[budget] = _solve(rank.rows, budget)
    return rank.chosen[budget]


def smallest_for_rank(table: OptionTable, layout: ParallelLayout, load: RankLoad) -> RankChoice:
    """The choices that hold least."""
    rank = _rank(table, layout, load)
    return _smallest(rank.rows, *rank.smallest, False)


def _least_budget(rows: _Rows) -> tuple[float, list[float]]:
    """Bytes that the smallest options need, and the limits on transient bytes (sharding, recomputation) for that."""
    total, limits = 0.0, []
    for aspect in (rows[0::2], rows[1::2]):
        best = (inf, 0.0)
        for limit in {o.transient for _, _, options in aspect for o in options}:
            held = 0.0
            for _, n, options in aspect:
                held += n * min([o.memory for o in options if o.transient <= limit], default=inf)
            best = min(best, (limit + held, limit))
        total += best[0]
        limits.append(best[1])
    return total, limits


def _smallest(rows: _Rows, needs: float, limits: Sequence[float], free: bool) -> RankChoice:
    """Of every row the smallest option within the limits on transient bytes."""
    picked = [
        [min([o for o in options if o.transient <= limits[i % 2]], key=lambda o: (o.memory, o.seconds))]
        for i, (_, _, options) in enumerate(rows)
    ]
    counts = [n for _, n, _ in rows]
    seconds = sum(n * o.seconds for n, (o,) in zip(counts, picked, strict=True))
    return _rank_choice(rows, tuple({0: n} for n in counts), picked, (seconds, seconds, needs), free)


def _solve(rows: _Rows, budget: float) -> RankChoice | None:
    best: tuple[Chosen, list[list[UnitOption]]] | None = None
    bound, needs = None, 0.0
    limits = [_spaced({o.transient for _, _, options in rows[i::2] for o in options}) for i in (0, 1)]
    below: dict[tuple[int, float], tuple[list[UnitOption], Group]] = {}

    def within(i: int, limit: float) -> tuple[list[UnitOption], Group]:
        """Options of a row with at most `limit` transient bytes."""
        if (i, limit) not in below:
            options = [o for o in rows[i][2] if o.transient <= limit]
            below[i, limit] = options, Group([(o.memory, o.seconds) for o in options], rows[i][1])
        return below[i, limit]

    for sharding_limit in limits[0]:
        for recompute_limit in limits[1]:
            allowed = [within(i, recompute_limit if i % 2 else sharding_limit) for i in range(len(rows))]
            if not all(options for options, _ in allowed):
                break  # nor with less
            groups = [group for _, group in allowed]
            if best is not None and sum(g.fastest for g in groups) >= best[0].seconds:
                break
            room = budget - sharding_limit - recompute_limit
            if sum(g.smallest for g in groups) > room:
                continue
            chosen = choose(groups, room)
            if chosen is None:
                continue
            bound = chosen.bound if bound is None else min(bound, chosen.bound)
            if best is None or rounded(chosen.seconds) < rounded(best[0].seconds):
                best = chosen, [options for options, _ in allowed]
                needs = chosen.memory + sharding_limit + recompute_limit
    if best is None or bound is None:
        return None
    return _rank_choice(rows, best[0].counts, best[1], (best[0].seconds, bound, needs), False)


def _spaced(values: set[float]) -> list[float]:
    """The largest first, the smallest last; between them those that differ by a tenth or more."""
    out: list[float] = []
    for value in sorted(values, reverse=True):
        if not out or value < 0.9 * out[-1]:
            out.append(value)
    smallest = min(values)
    return out if out[-1] == smallest else [*out, smallest]


def _rank_choice(
    rows: _Rows,
    counts: Sequence[dict[int, int]],
    allowed: list[list[UnitOption]],
    numbers: tuple[float, float, float],
    free: bool,
) -> RankChoice:
    picked = [
        tuple((options[k].choice, n) for k, n in sorted(row.items(), key=lambda item: options[item[0]].memory))
        for row, options in zip(counts, allowed, strict=True)
    ]
    options = tuple((rows[i][0], picked[i], picked[i + 1]) for i in range(0, len(rows), 2))
    return RankChoice(*numbers, options, free)
