"""The search: branch and bound over layouts, the fastest plan that fits, and a certificate of how good it is.

1. Every layout has a lower bound (`lower_bounds`). The layout with the lowest bound is taken first, and its bound is tightened in
   steps of increasing cost: with the grid's collectives and its partition into stages, for each variant of kept tensors and
   placements, then with the relaxed choice of its units.
2. If it still has the lowest bound, a knapsack chooses the options of its units, which gives an estimate of the layout's time.
3. The layouts with the best estimates are built into plans (`build`), unless a simulation of their stages with compute time only
   is already too slow.
4. When the next lower bound is above the best plan, no remaining layout can be faster (with thousands of layouts: by more than a
   small share). The best plans are improved by local search (`local_search`).

The certificate: under the planner's model, no plan of the searched space takes less than `lower_bound`, the lowest of all
remaining bounds. `choice_gap` is the distance of the choice of units from the optimum of its knapsack; the bound does not use it.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from fourfold.errors import ScheduleError
from fourfold.plan import Tensor
from fourfold.planner.build import Candidate, build_plan, least_memory_plan
from fourfold.planner.layouts import ParallelLayout, enumerate_layouts, keep_options, may_consume
from fourfold.planner.local_search import improve, price_of_memory
from fourfold.planner.lower_bounds import compute_bound, memory_bound
from fourfold.planner.prediction import fits
from fourfold.planner.problem import Constraints, PlanProblem, SearchConfig, rounded
from fourfold.planner.report import explain_no_fit
from fourfold.planner.stage_partition import RankLoad, compute_only_seconds, in_flight, partition_layers, rank_loads
from fourfold.planner.unit_cost import tied_elements
from fourfold.planner.unit_options import OptionTable, rank_options

__all__ = ["Progress", "SearchResult", "search"]

Progress = Callable[[int, int, float | None], None]
"""Called with layouts done, layouts in total, and the best seconds so far."""


@dataclass(frozen=True)
class SearchResult:
    """What the search found."""

    best: Candidate
    ranked: tuple[Candidate, ...]
    """The best plan of every layout that was built, the fastest first."""
    certificate: dict[str, Any] = field(default_factory=dict)


class _Estimate(NamedTuple):
    seconds: float
    number: int
    layout: ParallelLayout
    bound: float


def search(
    problem: PlanProblem,
    constraints: Constraints,
    progress: Progress | None = None,
    top: int = 5,
    config: SearchConfig | None = None,
) -> SearchResult:
    """The fastest plan. If none fits, raises PlanError, which says what would fit."""
    began = time.perf_counter()
    run = _Search(problem, constraints, progress, top, config or SearchConfig())
    run.go()
    if not run.built:
        run.take_least_memory_plan()
    best = run.improved()
    seconds = best.prediction.seconds
    others = (c for c in _distinct(run.built) if _without_placement(c.layout) != _without_placement(best.layout))
    ranked = [best, *(c for c in others if c.prediction.seconds >= seconds)]
    lower = min(seconds, run.lower)
    certificate = {
        "lower_bound": math.floor(lower * 1e6) / 1e6,
        "gap": round(max(0.0, seconds / lower - 1), 6),
        "choice_gap": round(best.choice_gap / seconds, 8),
        "layouts": run.total,
        "too_large": run.too_large,
        "pruned": run.total - run.expanded,
        "simulated": run.simulated,
        "seconds": round(time.perf_counter() - began, 3),
        "model": problem.spec.fingerprint,
        "cluster": problem.cluster.fingerprint,
    }
    return SearchResult(best, tuple(ranked), certificate)


def _without_placement(layout: ParallelLayout) -> ParallelLayout:
    """The layout without its placements and kept tensors."""
    return replace(layout, optimizer="device", activations="device", tensor=Tensor())


def _distinct(built: list[Candidate]) -> list[Candidate]:
    """Plans sorted by time; of those that differ only in placements, the fastest, preferably with everything on the device."""
    best: dict[ParallelLayout, Candidate] = {}
    for c in sorted(built, key=lambda c: (c.layout.optimizer != "device") + (c.layout.activations != "device")):
        key = _without_placement(c.layout)
        if key not in best or rounded(c.prediction.seconds) < rounded(best[key].prediction.seconds):
            best[key] = c
    return sorted(best.values(), key=lambda c: (rounded(c.prediction.seconds), str(c.layout)))  # [Note: ties]


_Step = Callable[[ParallelLayout, float], None]


class _Search:
    def __init__(
        self,
        problem: PlanProblem,
        constraints: Constraints,
        progress: Progress | None,
        top: int,
        config: SearchConfig,
    ):
        self.problem, self.constraints, self.progress = problem, constraints, progress
        self.top, self.config = top, config
        self.limit = problem.cluster.usable
        self.table = OptionTable(problem, {k: str(v) for k, v in constraints.fixed.items()})
        self.queue: list[tuple[float, int, ParallelLayout, _Step]] = []
        """Layouts, the lowest bound first, with the next step that tightens the bound."""
        self.estimates: list[_Estimate] = []
        self.skipped: list[_Estimate] = []
        """Layouts that are not built because they cannot be, or are unlikely to be, the fastest."""
        self.built: list[Candidate] = []
        self.total = self.expanded = self.simulated = self.too_large = 0
        self.unexpanded = self.tried = self.lower = inf
        """Lowest bounds: of layouts still in the queue, of those that were built or pruned last, and of all."""
        self._number = 0

    # ---- branch and bound ----

    def go(self) -> None:
        for layout in enumerate_layouts(self.problem, self.constraints):
            self._push(compute_bound(self.problem, layout), layout, self._add_grid)
        self.total = len(self.queue)
        while self.queue:
            bound, _, layout, tighten = self.queue[0]
            while self.estimates and self.estimates[0].seconds <= bound and not self._enough():
                self._build(heapq.heappop(self.estimates))
            wanted = self.config.estimates_per_alternative * self.top
            enough = len(self.built) >= self.top or len(self.built) + len(self.estimates) >= wanted
            if (bound > self._cut() and enough) or self._enough():
                self.unexpanded = bound
                break
            heapq.heappop(self.queue)
            tighten(layout, bound)
        while self.estimates and not self._enough():
            self._build(heapq.heappop(self.estimates))
            self._report(self.expanded)
        self.lower = min(self.unexpanded, self.tried, self._lowest_skipped())
        self._report(self.total)

    def _report(self, done: int) -> None:
        if self.progress:
            self.progress(done, self.total, self._best())

    def _push(self, bound: float, layout: ParallelLayout, tighten: _Step) -> None:
        self._number += 1
        heapq.heappush(self.queue, (rounded((1 - 1e-9) * bound), self._number, layout, tighten))  # not above it

    @property
    def _many(self) -> bool:
        return self.total > self.config.many_layouts

    def _enough(self) -> bool:
        return len(self.built) >= self.config.most_built or self.simulated >= 4 * self.config.most_built

    def _best(self) -> float | None:
        return min((c.prediction.seconds for c in self.built), default=None)

    def _cut(self) -> float:
        """Layouts with a bound above this cannot be first or second; with many layouts, they cannot win by `least_gain`."""
        if self._many:
            best = self._best()
            return inf if best is None else best * (1 - self.config.least_gain)
        ranked = _distinct(self.built)[:2]
        return ranked[-1].prediction.seconds if len(ranked) > 1 else inf

    # ---- one layout, from its first bound to its estimate ----

    def _add_grid(self, layout: ParallelLayout, bound: float) -> None:
        self._push(max(bound, compute_bound(self.problem, layout, grid=True)), layout, self._expand)

    def _expand(self, layout: ParallelLayout, bound: float) -> None:
        """Variants of a layout: tensors kept on the grid, prefetching, and placement on the host."""
        if self.expanded % 50 == 0:
            self._report(self.expanded)
        self.expanded += 1
        fixed = self.constraints.fixed
        *richer, least = keep_options(layout.mesh, layout.micro_batches, layout.tensor, fixed.get("keep"))
        layout = replace(layout, tensor=least)
        variants = [layout]
        if fixed.get("optimizer") == "auto":  # `auto` may leave all state on the device
            variants.append(replace(layout, optimizer="device"))
        if self._memory_is_free(layout):  # there is room to keep something on the grid
            variants += [replace(layout, tensor=tensor) for tensor in richer]
        else:  # less prefetching, or the host's memory, may allow a faster choice
            if layout.replicas > 1 and self._may_not_fit(layout):
                variants.append(replace(layout, prefetch=0))
            if not self.problem.on_cpu:
                if "optimizer" not in fixed:
                    variants.append(replace(layout, optimizer="auto"))
                if "activations" not in fixed:
                    variants.append(replace(layout, activations="host"))
                if not {"optimizer", "activations"} & fixed.keys():
                    variants.append(replace(layout, optimizer="auto", activations="host"))
                variants += [replace(v, consume=True) for v in variants if may_consume(self.problem, fixed, v)]
        if fixed.get("gradients") == "consume":
            hosted = [v if v.optimizer != "device" else replace(v, optimizer="auto") for v in variants]
            variants = list(
                dict.fromkeys(replace(v, consume=True) for v in hosted if may_consume(self.problem, fixed, v))
            )
        for variant in variants:
            self._push(max(bound, compute_bound(self.problem, variant, grid=True)), variant, self._add_memory)

    def _memory_is_free(self, layout: ParallelLayout) -> bool:
        """Whether memory is no constraint."""
        loads = rank_loads(self.problem, layout)[0]
        return all(self._room(layout, load) >= rank_options(self.table, layout, load).free for load in loads)

    def _may_not_fit(self, layout: ParallelLayout) -> bool:
        """Whether possibly no choice of units fits."""
        loads = rank_loads(self.problem, layout)[0]
        needs = [rank_options(self.table, layout, load).least[0] * (1 + 1e-6) for load in loads]
        return any(self._room(layout, load) < need for load, need in zip(loads, needs, strict=True))

    def _add_memory(self, layout: ParallelLayout, bound: float) -> None:
        least = memory_bound(self.table, layout, self.limit)
        if least is None:
            self.too_large += 1
        else:
            self._push(max(bound, least), layout, self._estimate)

    def _estimate(self, layout: ParallelLayout, bound: float) -> None:
        """Estimate the time of a layout by choosing options for its distinct ranks; then queue it for building."""
        m = layout.micro_batches
        loads, works = rank_loads(self.problem, layout)
        worst, busiest = 0.0, (0.0, 0.0, 0.0)
        for load, work in zip(loads, works, strict=True):
            chosen = rank_options(self.table, layout, load).choose(self._room(layout, load))
            if chosen is None:
                self.too_large += 1
                return
            total = m * sum(work) + chosen.seconds
            if total > worst:
                worst, busiest = total, work
        seconds = worst + _bubble(layout, *busiest) + _message_waits(self.problem, layout, works)
        self._number += 1
        heapq.heappush(self.estimates, _Estimate(rounded(seconds), self._number, layout, bound))

    def _room(self, layout: ParallelLayout, load: RankLoad) -> float:
        """Bytes available to a rank's units."""
        problem, tied = self.problem, 0.0
        if load.tied_copy:
            tied = tied_elements(problem.spec, layout.mesh) * (problem.compute_bytes + problem.reduce_bytes)
        return self.limit - 6 * layout.message_bytes(problem) - tied

    # ---- one layout, built into a plan ----

    def _build(self, estimate: _Estimate) -> None:
        enough = len(self.built) >= self.top
        if enough and (estimate.bound > self._cut() or self._unlikely(estimate)):
            self.skipped.append(estimate)
            return
        try:
            bound = self._tightened(estimate)
            if bound is None:
                return
            self.tried = min(self.tried, bound)  # even if built: its units may have a better choice than the one tried
            if bound > self._cut() and enough:
                return
            self.simulated += 1
            candidate = build_plan(self.problem, self.table, estimate.layout, self.limit, self.config)
        except ScheduleError:
            return
        if candidate is not None:
            self.built.append(candidate)

    def _tightened(self, estimate: _Estimate) -> float | None:
        """The bound with the layout's schedule and partition into stages; None if nothing fits."""
        layout = estimate.layout
        schedule, counts = partition_layers(self.problem, layout)
        bound = max(estimate.bound, compute_only_seconds(self.problem, layout, schedule, counts))
        if bound > self._cut():
            return bound
        least = memory_bound(self.table, layout, self.limit, schedule)
        self.too_large += least is None
        return None if least is None else max(bound, least)

    def _lowest_skipped(self) -> float:
        """The lowest bound of layouts that were estimated but not built. Tightens the lowest one until it is tight already."""
        left = [(e.bound, e.number, e) for e in (*self.skipped, *self.estimates)]
        heapq.heapify(left)
        done: set[int] = set()
        while left and left[0][0] < min(self.unexpanded, self.tried) and len(done) < self.config.most_tightened:
            _, number, estimate = heapq.heappop(left)
            if number in done:
                return estimate.bound
            done.add(number)
            try:
                bound = self._tightened(estimate)
            except ScheduleError:
                continue
            if bound is not None:
                heapq.heappush(left, (bound, number, estimate._replace(bound=bound)))
        return left[0][0] if left else inf

    def _unlikely(self, estimate: _Estimate) -> bool:
        """Whether its estimate is well above the best plan."""
        best = self._best()
        return best is not None and estimate.seconds > (1 + self.config.unlikely) * best

    # ---- the result ----

    def improved(self) -> Candidate:
        """The best plan, after local search, with the price of memory."""
        problem, config = self.problem, self.config
        built = _distinct(self.built)
        near = (1 + config.improved_share) * built[0].prediction.seconds
        starts = [c for c in built if c.prediction.seconds <= near][: 1 if self._many else config.most_improved]
        found = [improve(problem, self.constraints, config, c) for c in starts]
        best = min(found, key=lambda c: rounded(c.prediction.seconds))
        prefetching = [c for c in built if c.layout.prefetch]
        if problem.on_cpu and not best.layout.prefetch and prefetching:
            # on CPUs, gathers and reductions do not slow each other on a link, but are predicted to
            other = improve(problem, self.constraints, config, prefetching[0])
            if best.prediction.seconds > (1 - config.cpu_link_gain) * other.prediction.seconds:
                best = other
        best = self._without_rows(best, built)
        best = self._outside_the_grid(best)
        price = price_of_memory(problem, self.table, config, best)
        full = best.prediction.peak.peak > 0.95 * self.limit
        more = self._with_more_memory(best) if full and not price and not problem.on_cpu else None
        if best.layout.optimizer == "auto":  # record how much of the optimizer's state stays on the device
            state = replace(best.plan.memory, device_state=str(int(best.prediction.device_state)))
            best = replace(best, plan=replace(best.plan, memory=state))
        return replace(best, price=price, with_more=more)

    def _without_rows(self, best: Candidate, built: list[Candidate]) -> Candidate:
        """On GPUs, the best plan without rows if rows gain next to nothing: no other system has them, and few measurements."""
        if best.layout.mesh.row == 1 or self.problem.on_cpu:
            return best
        plain = [c for c in built if c.layout.mesh.row == 1]
        unpiped = [c for c in plain if c.layout.mesh.pipe == 1][:1]
        unpiped = [improve(self.problem, self.constraints, self.config, c) for c in unpiped]
        found = min([*plain[:1], *unpiped], key=lambda c: rounded(c.prediction.seconds), default=best)
        worse = found.prediction.seconds > (1 + self.config.rows_gain) * best.prediction.seconds
        return best if worse else found

    def _outside_the_grid(self, best: Candidate) -> Candidate:
        """The best plan, or a faster one outside the searched space: rows without columns, or a synthesized schedule.

        Rows replace data parallelism, also that of a plan without a grid which is nearly as fast.
        """
        config, fixed = self.config, self.constraints.fixed
        near, tried = (1 + config.improved_share) * best.prediction.seconds, []
        plans = [best, *(c for c in _distinct(self.built) if c.prediction.seconds <= near)]
        flat = next((c.layout for c in plans if not c.layout.on_grid), None)
        if flat is not None and not {"row", "col", "data"} & fixed.keys():
            mesh = flat.mesh
            rows = [row for row in (2, 4, 8) if mesh.data % row == 0]
            tried += [replace(flat, mesh=replace(mesh, data=mesh.data // row, row=row)) for row in rows]
        if self.constraints.schedule is None:
            piped: dict[object, ParallelLayout] = {}  # the fastest of every mesh
            enough = (1 + config.synthesized_share) * best.prediction.seconds
            for c in [best, *_distinct(self.built)]:
                if 1 < c.layout.mesh.pipe <= config.synthesized_ranks and c.prediction.seconds <= enough:
                    piped.setdefault(c.layout.mesh, c.layout)
            few = list(piped.values())[: config.most_synthesized]
            tried += [replace(c, schedule="synthesized", stages_per_rank=1) for c in few]
        enough = (1 - config.outside_gain) * best.prediction.seconds
        for other in tried:
            if compute_bound(self.problem, other, grid=True) < enough:
                with suppress(ScheduleError):
                    found = build_plan(self.problem, self.table, other, self.limit, config)
                    if found is not None and found.prediction.seconds < enough:
                        best, enough = found, found.prediction.seconds
        return best

    def _with_more_memory(self, best: Candidate) -> tuple[float, float, str]:
        """Seconds that more memory would save over all layouts: branch and bound, starting from the best plan."""
        cluster, config = self.problem.cluster, self.config
        memory = int(config.more_memory * cluster.memory)
        problem = replace(self.problem, cluster=cluster.what_if({"memory": str(memory)}))
        few = replace(config, many_layouts=0, least_gain=0.005, most_built=4)
        run = _Search(problem, self.constraints, None, 1, few)
        run.built.append(best)
        run.go()
        other = min(run.built, key=lambda c: c.prediction.seconds)
        return memory - cluster.memory, best.prediction.seconds - other.prediction.seconds, str(other.layout)

    def take_least_memory_plan(self) -> None:
        """Use the plan with the least memory. If it does not fit, raises PlanError, which says what would fit."""
        found = least_memory_plan(self.problem, self.constraints, self.table)
        if not fits(found.prediction.memory, self.problem.cluster, self.problem.cluster.usable):
            explain_no_fit(self.problem, self.constraints, found)
        self.built.append(found)


# ---- estimates of a pipeline ----


def _bubble(layout: ParallelLayout, f: float, i: float, w: float) -> float:
    """Idle seconds of a rank whose micro-batch takes F, I and W, if messages take no time."""
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    match layout.schedule:
        case "interleaved":
            return (p - 1) * (f + i + w) / v
        case "wave":
            return (p - 1) * (i + w) / layout.waves
        case "zb-h1":
            return (p - 1) * max(0.0, f + i - w)
        case "zb-v":
            return (p - 1) * (f / 2 if m >= 2 * p - 1 else f)
        case "synthesized":
            return (p - 1) * f / 8
        case _:
            return (p - 1) * (f + i + w)


def _message_waits(problem: PlanProblem, layout: ParallelLayout, works: Sequence[tuple[float, float, float]]) -> float:
    """Seconds that messages add: one round trip, and for every micro-batch the part that those in flight do not cover.

    A micro-batch returns to the first stage after F and I (or B, if it is not split) of all stages and all hops. With k
    micro-batches in flight, the throughput is at most k per round trip.
    """
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    if p == 1:
        return 0.0
    hop = layout.message_seconds(problem)
    hops = v * (p - 1) if layout.zigzag else v * p - 1
    f, i, w = (sum(part) / len(works) for part in zip(*works, strict=True))
    loop = (f + i + (0.0 if layout.splits_backward else w)) * p + 2 * hops * hop
    return 2 * hops * hop + max(0.0, m - p) * max(0.0, loop / in_flight(layout, 0) - max(map(sum, works)))
