"""The options of a unit, and the fastest choice for all units of a rank within a memory budget.

A unit has options in two additive aspects: how it is sharded, and what it recomputes. Each option has seconds per step, bytes
held for the whole step, and transient bytes. The aspects are chosen independently: a backward that recomputes would overlap with
more of a gather than is counted here, so times are never underestimated; the replay of the whole plan decides about memory.

A rank's memory is the bytes that its units hold for the whole step, the bytes that they save for every micro-batch in flight, and
the largest transient of each aspect. The transients are not sums, so each of their few possible values is tried: options above it
are excluded, and it is subtracted from the budget; the rest is a knapsack (`knapsack`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any, Literal, NamedTuple

from fourfold.planner.knapsack import Chosen, Group, choose
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem, per_problem, rounded
from fourfold.planner.stage_partition import RankLoad
from fourfold.planner.unit_cost import UnitChoice, reduced_in_buckets, sharding_cost, unit_cost, unit_times
from fourfold.program import modes
from fourfold.shard.layout import JOIN

__all__ = [
    "AtEnd",
    "OptionTable",
    "RankChoice",
    "RankOptions",
    "UnitOption",
    "group_sizes",
    "rank_options",
    "sharding_options",
]

SPLITS = (2, 4, 8, 16)
GROUP_NODES = (1, 2, 4, 8)
"""Nodes of a group that parameters may be sharded in, besides all replicas."""
_BEFORE = {"attn": "mlp", "mlp": "attn", "head": "mlp", "embed": "attn"}
"""The unit that computes while a unit's parameters are gathered."""
_EPSILON = 1e-12
"""Epsilon in seconds: options that differ by less count as equally fast."""


class UnitOption(NamedTuple):
    """One value of one aspect of a unit."""

    choice: UnitChoice
    seconds: float
    memory: float
    """Bytes held for the whole step (sharding), or of one micro-batch (recomputation)."""
    transient: float
    first: float = 0.0
    """Part of `memory` that is held before any gradient exists."""
    last: float = 0.0
    """Part of `memory` that is held at the end of a step."""


class AtEnd(NamedTuple):
    """Whether a unit is at an end of its rank's only stage."""

    first: bool = False
    """Whether it is still gathered from the previous backward."""
    last: bool = False
    """Whether it is still gathered from its forward."""


# ---- options of a unit ----


def recompute_options(problem: PlanProblem, layout: ParallelLayout, kind: str, bound: bool = False) -> list[UnitOption]:
    """Recomputation options: seconds and bytes of a micro-batch; `bound`: lower bounds of the seconds.

    An op that computes for c seconds and moves activations to or from the host for d takes max(c, d) + (1 - overlap) · min(c, d).
    Both are sums over its units, which share the link; estimates charge each unit as if it were alone. A lower bound that is a
    sum over units is c + (1 - overlap) · d.
    """
    unit, overlap, out = problem.spec.kinds[kind], problem.cluster.overlap, []
    no_room = 0.0 if bound else _share_without_room(problem, layout)
    base = unit_times(problem, layout, kind, UnitChoice(), False).work
    candidates = [UnitChoice(recompute=r) for r in ("none", "selective", "full")]
    if "per-slice" in unit.saved and not layout.on_grid:
        candidates += [UnitChoice(recompute="per-slice", split=s) for s in SPLITS if problem.may_split(unit, s)]
    for choice in candidates:
        cost = unit_cost(problem, layout, kind, choice)
        t, moved = cost.times, cost.offloaded_bytes / problem.cluster.host.link
        seconds = t.work + t.recompute - base
        for work in (t.forward, t.input_grad + t.recompute) if moved else ():
            seconds += (1 - overlap) * moved if bound else max(work, moved) + (1 - overlap) * min(work, moved) - work
        transient = max(cost.backward_workspace, cost.forward_workspace)
        out.append(UnitOption(choice, seconds, cost.saved_bytes + no_room * cost.offloaded_bytes, transient))
    return out


@per_problem
def _share_without_room(problem: PlanProblem, layout: ParallelLayout) -> float:
    """Share of offloaded activations that do not fit on the host if nothing is recomputed: they stay on the device."""
    if layout.activations == "device" or problem.on_cpu:
        return 0.0
    flight = min(layout.micro_batches, layout.mesh.pipe) / layout.mesh.pipe
    kinds = Counter(u.kind for u in problem.spec.units)
    sizes = (n * unit_cost(problem, layout, kind, UnitChoice()).offloaded_bytes for kind, n in kinds.items())
    moves = flight * sum(sizes)
    return max(0.0, 1 - layout.host_activation_bytes(problem) / moves) if moves else 0.0


def group_sizes(problem: PlanProblem, layout: ParallelLayout) -> list[int]:
    """Sizes of groups that parameters may be sharded in (`within`): all replicas (0), or those of a few nodes; with a pipeline
    those of one node, since its units are gathered once a step if memory allows."""
    node, replicas = problem.cluster.devices // layout.replica_stride, layout.replicas
    sizes = (nodes * node for nodes in (GROUP_NODES if layout.mesh.pipe == 1 else GROUP_NODES[:1]))
    return [0, *(size for size in sizes if 1 < size < replicas and replicas % size == 0)]


def sharding_options(
    problem: PlanProblem,
    layout: ParallelLayout,
    kind: str,
    at_end: AtEnd = AtEnd(),  # noqa: B008
    bound: bool = False,
    wanted: str = "",
) -> list[UnitOption]:
    """All useful modes for these replicas, and the mode `wanted`.

    `bound`: lower bounds of the seconds, as if everything were recomputed, which overlaps with more communication, and as if
    all-reduces of replicas overlapped fully.
    """
    m, replicas = layout.micro_batches, layout.replicas
    choices = [UnitChoice()]
    if replicas > 1:
        groups = group_sizes(problem, layout)
        every: list[Literal["zero3", "keep", "zero2"]] = ["zero3"]
        if m > 1 or wanted == "keep":  # with one micro-batch, keep and zero2 are the same
            every.append("keep")
        if m == 1 or wanted == "zero2":
            every.append("zero2")
        reduces: list[Literal["step", "micro-batch"]] = ["step", "micro-batch"] if m > 1 else ["step"]
        choices += [UnitChoice(mode, reduce, g) for mode in every for reduce in reduces for g in groups]
    whole_ops = replace(layout, mesh=replace(layout.mesh, pipe=1))  # no backward is split
    before = _BEFORE.get(kind.partition(" ")[0], kind)
    before = before if before in problem.spec.kinds else kind
    other = unit_times(problem, whole_ops, before, UnitChoice())
    forward, backward = other.forward, other.input_grad + other.weight_grad
    if bound:
        forward, backward = 2 * forward, backward + 2 * forward
    if not layout.prefetch:  # no communication overlaps with computing
        forward = backward = 0.0
    piped, windows = layout.mesh.pipe > 1, (forward, backward)
    return [
        o for c in choices for o in _sharding_option(problem, whole_ops, kind, before, c, piped, windows, at_end, bound)
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
    """Options of one mode, with optimizer state on the device, on the host, or both.

    `windows`: seconds of computing that a gather or reduction in the forward and in the backward can overlap with.
    """
    m, overlap = layout.micro_batches, problem.cluster.overlap
    cost = sharding_cost(problem, layout, kind, choice)
    forward, backward = windows

    def exposed(takes: float, window: float) -> float:
        beyond = max(0.0, takes - window)
        return beyond + (1 - overlap) * (takes - beyond)

    sharded, each_op = modes.shards(choice.mode), modes.gathered_for_each_op(choice.mode)
    each_micro_batch = modes.reduces(choice.reduce, last=False)
    seconds = 0.0
    if each_op:
        seconds += (1 if at_end.first else m) * exposed(cost.gather, forward)
        seconds += 0.0 if at_end.last else m * exposed(cost.gather, backward)
    elif sharded:
        seconds += exposed(cost.gather, forward)
    reduce = cost.reduce
    in_bucket = reduced_in_buckets(cost, choice) and layout.optimizer == "device"
    if in_bucket and 0 < cost.gradient_bytes < JOIN:  # its share of a bucket's all-reduce
        reduce = problem.cluster.collective("all_reduce", JOIN, layout.replicas, layout.replica_stride)
        reduce = min(cost.reduce, cost.gradient_bytes / JOIN * reduce)
    if bound and not sharded:
        backward = reduce
    if bound or cost.own_link:
        sums = exposed(reduce, backward) + exposed(cost.across, backward)
    else:  # on one link, one after another
        sums = exposed(reduce + cost.across, backward)
    seconds += (m if each_micro_batch else 1) * sums
    if each_op and "weights" in layout.tensor.keep:  # the grid gathers them again
        again, once = (unit_times(problem, layout, kind, c).work for c in (choice, UnitChoice()))
        seconds += m * (again - once)
    first = cost.parameter_bytes + (cost.gathered_bytes if sharded and not each_op else 0.0)
    last = cost.parameter_bytes + cost.reduced_bytes
    reduced_at_once = sharded and (each_micro_batch or (m == 1 and not piped))
    memory = first + (cost.reduced_bytes if reduced_at_once else cost.gradient_bytes)
    transient = cost.transient_bytes + (cost.gradient_bytes if reduced_at_once or layout.consume else 0.0)
    if layout.consume:
        memory, last = first, cost.parameter_bytes
    if cost.transient_bytes and layout.prefetch:  # one unit is gathered ahead
        transient += sharding_cost(problem, layout, before, choice).transient_bytes
    state = cost.updated * (problem.state_bytes if layout.optimizer == "device" else problem.streamed_bytes)
    here = UnitOption(choice, seconds, memory + state, transient, first + state, last + state)
    crossing = state / problem.cluster.host.link
    there = UnitOption(choice, seconds + crossing, memory, transient, first, last)
    return {"device": [here], "host": [there]}.get(layout.optimizer, [here, there])


class OptionTable:
    """Options of every kind of unit under the user's constraints, cached by their inputs."""

    def __init__(self, problem: PlanProblem, fixed: dict[str, str]):
        self.problem, self.fixed = problem, fixed
        self.cache: dict[tuple[object, ...], Any] = {}
        """Cached options of units and ranks."""

    def key(self, layout: ParallelLayout) -> tuple[object, ...]:
        """The inputs of a rank's options; layouts that differ only in their schedules have the same key."""
        mesh = layout.mesh
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size, mesh.pipe > 1)
        where = (layout.optimizer, layout.consume, layout.activations, layout.tensor, layout.prefetch)
        return (*sizes, *where, layout.amortized_over)

    def sharding(
        self,
        layout: ParallelLayout,
        kind: str,
        at_end: AtEnd = AtEnd(),  # noqa: B008
        bound: bool = False,
    ) -> list[UnitOption]:
        """Modes, with seconds and bytes of a step; `bound`: lower bounds of the seconds, not estimates."""
        mesh = layout.mesh
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size, mesh.pipe > 1)
        key = (kind, *sizes, layout.optimizer, layout.consume, layout.tensor, layout.prefetch, at_end, bound)
        if key not in self.cache:
            options = sharding_options(self.problem, layout, kind, at_end, bound, self.fixed.get("mode", ""))
            self.cache[key] = self._useful(options, "mode")
        return self.cache[key]

    def recompute(self, layout: ParallelLayout, kind: str, bound: bool = False) -> list[UnitOption]:
        """Recomputation and splits, with seconds and bytes of a micro-batch."""
        mesh, bound = layout.mesh, bound and layout.activations == "host"
        sizes = (mesh.row, mesh.col, layout.micro_batch_size, layout.tensor, layout.amortized_over)
        no_room = 0.0 if bound else _share_without_room(self.problem, layout)
        key = (kind, *sizes, layout.activations, bound, no_room)
        if key not in self.cache:
            self.cache[key] = self._useful(recompute_options(self.problem, layout, kind, bound), "recompute")
        return self.cache[key]

    def _useful(self, options: list[UnitOption], aspect: str) -> list[UnitOption]:
        """Options that the constraints allow (all, if they allow none for a unit), without dominated ones."""
        fixed = self.fixed.get(aspect)
        kept: list[UnitOption] = []
        for o in [o for o in options if fixed in (None, getattr(o.choice, aspect))] or options:
            if not any(_dominates(p, o) for p in kept):
                kept = [p for p in kept if not _dominates(o, p)]
                kept.append(o)
        return kept


def _dominates(a: UnitOption, b: UnitOption) -> bool:
    return all(x <= y for x, y in zip(a[1:], b[1:], strict=True))


# ---- the choice for a rank ----

_Rows = list[tuple[int, list[UnitOption]]]
"""Kind by kind: number of units, and their options in one aspect."""


@dataclass(frozen=True)
class RankChoice:
    """A rank's choices; seconds are per step, beyond the compute time that no choice avoids."""

    seconds: float
    bound: float
    """Lower bound on the (additive) seconds of any choice within the budget."""
    needs: float
    """The smallest budget that allows this choice."""
    units: dict[str, list[UnitChoice]]
    """By kind: a choice for every unit, in order of increasing memory."""
    free: bool
    """Whether memory does not bind: more of it would change nothing."""

    @property
    def gap(self) -> float:
        return self.seconds - self.bound


class RankOptions:
    """The options of a rank's units, and the fastest choice within a memory budget."""

    def __init__(self, kinds: Sequence[str], sharding: _Rows, recompute: _Rows):
        self._kinds, self._aspects = kinds, (sharding, recompute)
        fast = [[(n, [o for o in options if _is_fastest(o, options)]) for n, options in rows] for rows in self._aspects]
        self._fastest = fast[0], fast[1]
        self.free, self._free_limits = _least_budget(self._fastest)
        """The smallest budget in which memory does not bind: every unit has its fastest option."""
        self._chosen: dict[float, RankChoice | None] = {}

    @cached_property
    def least(self) -> tuple[float, list[float]]:
        """The smallest budget that allows any choice, and its limits on transient bytes."""
        return _least_budget(self._aspects)

    def smallest(self) -> RankChoice:
        """The choices with the least memory."""
        return self._smallest(self._aspects, *self.least, False)

    def choose(self, budget: float) -> RankChoice | None:
        """The fastest choices within the budget, or None."""
        if budget not in self._chosen:
            free = budget >= self.free
            found = self._smallest(self._fastest, self.free, self._free_limits, True) if free else self._solve(budget)
            self._chosen[budget] = found
        return self._chosen[budget]

    def _smallest(self, aspects: tuple[_Rows, _Rows], needs: float, limits: Sequence[float], free: bool) -> RankChoice:
        """The smallest option of every row within the limits on transient bytes."""
        picked = [
            (n, min([o for o in options if o.transient <= limit], key=lambda o: (o.memory, o.seconds)))
            for rows, limit in zip(aspects, limits, strict=True)
            for n, options in rows
        ]
        seconds = sum(n * o.seconds for n, o in picked)
        return RankChoice(seconds, seconds, needs, self._by_kind([[(o, n)] for n, o in picked]), free)

    def _solve(self, budget: float) -> RankChoice | None:
        """The best knapsack over all pairs of limits on transient bytes (sharding, recomputation) that differ enough."""
        best: tuple[Chosen, list[list[UnitOption]]] | None = None
        bound, needs = inf, 0.0
        limits = [_spaced({o.transient for _, options in rows for o in options}) for rows in self._aspects]
        below: dict[tuple[int, float], list[tuple[list[UnitOption], Group]]] = {}

        def within(aspect: int, limit: float) -> list[tuple[list[UnitOption], Group]]:
            """Options with at most `limit` transient bytes."""
            if (aspect, limit) not in below:
                rows = [(n, [o for o in options if o.transient <= limit]) for n, options in self._aspects[aspect]]
                groups = [(options, Group([(o.memory, o.seconds) for o in options], n)) for n, options in rows]
                below[aspect, limit] = groups if all(options for options, _ in groups) else []
            return below[aspect, limit]

        for sharding_limit, recompute_limit in product(*limits):
            sharding, recompute = within(0, sharding_limit), within(1, recompute_limit)
            allowed = [*sharding, *recompute]
            groups = [group for _, group in allowed]
            room = budget - sharding_limit - recompute_limit
            if not sharding or not recompute or sum(g.smallest for g in groups) > room:
                continue
            if best is not None and sum(g.fastest for g in groups) >= best[0].seconds:
                continue
            chosen = choose(groups, room)
            if chosen is None:
                continue
            bound = min(bound, chosen.bound)
            if best is None or rounded(chosen.seconds) < rounded(best[0].seconds):
                best = chosen, [options for options, _ in allowed]
                needs = chosen.memory + sharding_limit + recompute_limit
        if best is None:
            return None
        picked = [[(row[k], n) for k, n in counts.items()] for counts, row in zip(best[0].counts, best[1], strict=True)]
        return RankChoice(best[0].seconds, bound, needs, self._by_kind(picked), False)

    def _by_kind(self, picked: list[list[tuple[UnitOption, int]]]) -> dict[str, list[UnitChoice]]:
        """`picked`: (option, number of units) for every kind, first of sharding, then of recomputation."""
        chosen = [
            [o.choice for o, n in sorted(row, key=lambda each: each[0].memory) for _ in range(n)] for row in picked
        ]
        half, out = len(self._kinds), {}
        for kind, sharded, again in zip(self._kinds, chosen[:half], chosen[half:], strict=True):
            pairs = zip(sharded, again, strict=True)
            out[kind] = [a._replace(split=b.split, recompute=b.recompute) for a, b in pairs]
        return out


def rank_options(table: OptionTable, layout: ParallelLayout, load: RankLoad) -> RankOptions:
    """The options of a rank, cached in the table."""
    key = (*table.key(layout), load)
    if key not in table.cache:
        m, flight = layout.micro_batches, load.in_flight
        sharding = [(count, table.sharding(layout, kind)) for kind, count in load.units]
        recompute = [
            (count, [UnitOption(o.choice, m * o.seconds, flight * o.memory, o.transient) for o in options])
            for count, options in ((count, table.recompute(layout, kind)) for kind, count in load.units)
        ]
        table.cache[key] = RankOptions([kind for kind, _ in load.units], sharding, recompute)
    found: RankOptions = table.cache[key]
    return found


def _is_fastest(o: UnitOption, options: Sequence[UnitOption]) -> bool:
    return o.seconds <= min([other.seconds for other in options]) + _EPSILON


def _least_budget(aspects: tuple[_Rows, _Rows]) -> tuple[float, list[float]]:
    """Bytes of the smallest options, and the corresponding limits on transient bytes (sharding, recomputation)."""
    found = []
    for rows in aspects:
        best = (inf, 0.0)
        for limit in {o.transient for _, options in rows for o in options}:
            least = ((n, [o.memory for o in options if o.transient <= limit]) for n, options in rows)
            best = min(best, (limit + sum(n * min(sizes, default=inf) for n, sizes in least), limit))
        found.append(best)
    return sum(total for total, _ in found), [limit for _, limit in found]


def _spaced(values: set[float]) -> list[float]:
    """Values in decreasing order, thinned so that neighbours differ by a tenth or more; the smallest is always included."""
    out: list[float] = []
    for value in sorted(values, reverse=True):
        if not out or value < 0.9 * out[-1]:
            out.append(value)
    smallest = min(values)
    return out if out[-1] == smallest else [*out, smallest]
