"""The search: every layout, every unit's choice, the fastest plan that fits; and the proof of how good it is.

1. Every layout gets a floor (`layouts`). The lowest is taken first, and its floor raised: by what its busiest rank computes and
   the grid moves, for each of what may be kept and where, then by the relaxed choice of its units (`inner`). A floor counts
   no idling but what cannot be avoided.
2. Where it still is the lowest, every rank's units are chosen by the knapsack: an estimate of the layout's time.
3. The best estimates are built out (`build`), unless their layers as dealt out to stages, simulated with nothing but computing,
   are too slow. A choice whose sum is above the budget by less than STRETCH may be built out, too: heights that are summed
   need not meet, and the replay decides.
4. When the next floor is above the best simulated time, nothing that is left can win (of thousands of layouts: by more than
   LITTLE). The best are looked at once more (`finish`).

The certificate says: under the planner's model, no plan of the searched space takes less than `lower_bound`, the lowest of all
floors that are left. Within a layout the choice of units is that close to the best of its knapsack (`choice_gap`); the bound
does not lean on that, since the knapsack adds up what the simulation overlaps.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fourfold.errors import ScheduleError
from fourfold.plan import Tensor
from fourfold.planner.build import Candidate, dealt_out, stretched
from fourfold.planner.constraints import Constraints
from fourfold.planner.deal import least_idle
from fourfold.planner.finish import Maker, rung_below
from fourfold.planner.floors import floor_in, floor_of
from fourfold.planner.inner import free_bytes, frugal_bytes, solve_rank
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import bound, bubble, computed, layouts, loads, mean, waits
from fourfold.planner.misfit import explain_misfit, least
from fourfold.planner.options import RankLoad, Solver
from fourfold.planner.predict import fits
from fourfold.planner.products import ladder
from fourfold.planner.units import tied_elements

__all__ = ["Candidate", "Found", "Progress", "search"]

MANY, LITTLE, UNLIKELY = 2000, 0.02, 0.02
"""Of more layouts than MANY, those are left out that could win by less than a share of LITTLE, or whose estimate, put
right by what was built of their sort, is above the best by more than UNLIKELY; the certificate's gap says so."""
SIMULATED = 48
"""Layouts that are built out at most, and of which the plan fits (of more layouts than MANY, half); of those that turn out not to
fit, three times as many."""
OTHERS = 4
"""Layouts that are estimated for each that is to be shown, where those that may be best are fewer."""
APART = 0.25
"""Without a pipeline: of what units would wait for the host's link, each for its own, the share that shows (0.1 to 0.4)."""
RAISED = 200
"""Floors that are raised for the certificate alone, at most."""
SEEN = 3
"""So many of a sort are built before it is believed how far off its estimates are."""
PASSING = 0.05
"""On CPUs, gathers and reductions pass each other on the link, and are predicted as if they shared it: so much may be gained."""
Progress = Callable[[int, int, float | None], None]
"""Called with layouts done, layouts in all, and the best seconds so far."""


@dataclass(frozen=True)
class Found:
    """What the search found."""

    best: Candidate
    ranked: tuple[Candidate, ...]
    """The best plan of every layout that was built out, the fastest first."""
    certificate: dict[str, Any] = field(default_factory=dict)


class _Estimate(NamedTuple):
    seconds: float
    """Put right by what others of its sort took."""
    number: int
    layout: Layout
    floor: float
    first: float
    """As they were before."""


def search(setting: Setting, wanted: Constraints, progress: Progress | None = None, top: int = 5) -> Found:
    """The fastest plan; raises PlanError, with what would do, where none fits."""
    began = time.perf_counter()
    run = _Search(setting, wanted, progress, top)
    run.go()
    if not run.built:
        run.last_resort()
    best = run.fastest()
    seconds = best.prediction.seconds
    others = (c for c in _distinct(run.built) if _plain(c.layout) != _plain(best.layout))
    ranked = [best, *(c for c in others if c.prediction.seconds >= seconds)]
    lower = min(seconds, run.lower)
    certificate = {
        "lower_bound": math.floor(lower * 1e6) / 1e6,
        "gap": round(max(0.0, seconds / lower - 1), 6),
        "choice_gap": round(best.choice_gap / seconds, 8),
        "layouts": run.total,
        "too_large": run.too_large,
        "pruned": run.total - run.solved,
        "simulated": run.simulated,
        "seconds": round(time.perf_counter() - began, 3),
        "model": setting.spec.fingerprint,
        "cluster": setting.cluster.fingerprint,
    }
    return Found(best, tuple(ranked), certificate)


def _plain(layout: Layout, grids: bool = False) -> Layout:
    """Without its placements and, but for `grids`, what it keeps on the grid."""
    return replace(layout, optimizer="device", activations="device", tensor=layout.tensor if grids else Tensor())


def _distinct(built: list[Candidate], grids: bool = False) -> list[Candidate]:
    """The fastest first; of plans that differ in placements alone the fastest, on the device where that costs nothing.

    `grids`: what they keep on the grid counts as a difference, too.
    """
    best: dict[Layout, Candidate] = {}
    for c in sorted(built, key=lambda c: (c.layout.optimizer != "device") + (c.layout.activations != "device")):
        key = _plain(c.layout, grids)
        if key not in best or c.prediction.seconds < best[key].prediction.seconds:
            best[key] = c
    return sorted(best.values(), key=lambda c: c.prediction.seconds)


def _sort(layout: Layout) -> tuple[object, ...]:
    """What estimates are wrong about alike."""
    mesh = layout.mesh
    return layout.schedule, mesh.pipe > 1, mesh.row > 1, mesh.col > 1, layout.micro_batches > 1, layout.activations


class _Search:
    def __init__(
        self,
        setting: Setting,
        wanted: Constraints,
        progress: Progress | None,
        top: int,
    ):
        self.limit = rung_below(setting.cluster.usable)
        self.setting, self.wanted, self.progress, self.top = setting, wanted, progress, top
        self.solver = Solver(setting, {k: str(v) for k, v in wanted.fixed.items()})
        self.maker = Maker(setting, self.solver, wanted, self.limit)
        self.waiting: list[tuple[float, int, Layout, Callable[[Layout, float], None]]] = []
        """The lowest floor first: what is done next for a layout; each raises its floor, at more cost than the one before."""
        self.pending: list[_Estimate] = []
        self.left: list[_Estimate] = []
        """Not built, since it could not win, or is not likely to."""
        self.built: list[Candidate] = []
        self.total = self.solved = self.simulated = self.too_large = 0
        self.unsolved = self.passed = self.lower = float("inf")
        self.over: dict[Any, list[float]] = defaultdict(list)
        """By sort of layout: what was built took, over its estimate."""
        self._number = 0

    # ---- outside ----

    def go(self) -> None:
        for layout in layouts(self.setting, self.wanted):
            self._wait(computed(self.setting, layout), layout, self._move)
        self.total = len(self.waiting)
        while self.waiting:
            floor, _, layout, step = self.waiting[0]
            while self.pending and self.pending[0].seconds <= floor and not self._enough():
                self._try_next()
            enough = len(self.built) >= self.top or len(self.built) + len(self.pending) >= OTHERS * self.top
            if (floor > self._cut() and enough) or self._enough():
                self.unsolved = floor
                break
            heapq.heappop(self.waiting)
            step(layout, floor)
        while self.pending and not self._enough():
            self._try_next()
            if self.progress:
                self.progress(self.solved, self.total, self._best())
        self.lower = min(self.unsolved, self.passed, self._left_floor())
        if self.progress:
            self.progress(self.total, self.total, self._best())

    def _wait(self, floor: float, layout: Layout, step: Callable[[Layout, float], None]) -> None:
        self._number += 1
        heapq.heappush(self.waiting, (floor, self._number, layout, step))

    def _enough(self) -> bool:
        most = SIMULATED // 2 if self.total > MANY else SIMULATED
        return len(self.built) >= most or self.simulated >= 4 * most

    def _best(self) -> float | None:
        return min((c.prediction.seconds for c in self.built), default=None)

    def _cut(self) -> float:
        """Layouts above this can neither win nor come second; of many, those that could win by little are left out, too."""
        if self.total > MANY:
            best = self._best()
            return float("inf") if best is None else best * (1 - LITTLE)
        ranked = _distinct(self.built)[:2]
        return ranked[-1].prediction.seconds if len(ranked) > 1 else float("inf")

    # ---- one layout, from its bound to its estimate ----

    def _move(self, layout: Layout, floor: float) -> None:
        self._wait(max(floor, computed(self.setting, layout, moved=True)), layout, self._bound)

    def _bound(self, layout: Layout, floor: float) -> None:
        self._wait(max(floor, bound(self.setting, layout), least_idle(self.setting, layout)), layout, self._vary)

    def _vary(self, layout: Layout, floor: float) -> None:
        """What it may keep on the grid and where: all that could be best."""
        if self.progress and self.solved % 50 == 0:
            self.progress(self.solved, self.total, self._best())
        self.solved += 1
        *richer, least = ladder(layout.mesh, layout.micro_batches, layout.tensor, self.wanted.get("keep"))
        layout = replace(layout, tensor=least)
        self._start(layout, floor)
        if self.wanted.get("optimizer") == "auto":  # which may leave all of it there
            self._start(replace(layout, optimizer="device"), floor)
        if self._free(layout):  # there is room to keep something on the grid
            for tensor in richer:
                self._start(replace(layout, tensor=tensor), floor)
            return
        # memory binds: what is not gathered ahead, or what the host takes, may buy a faster choice
        if layout.replicas > 1 and (self.total <= MANY or self._tight(layout)):
            self._start(replace(layout, prefetch=0), floor)
        if self.setting.cluster.device.kind == "cpu":
            return
        if "optimizer" not in self.wanted.fixed:
            self._start(replace(layout, optimizer="auto"), floor)
        if "activations" not in self.wanted.fixed:
            self._start(replace(layout, activations="host"), floor)
        if not {"optimizer", "activations"} & self.wanted.fixed.keys():
            self._start(replace(layout, optimizer="auto", activations="host"), floor)

    def _free(self, layout: Layout) -> bool:
        """Whether memory is no constraint."""
        ranks = loads(self.setting, layout)[0]
        return all(self._room(layout, load) >= free_bytes(self.solver, layout, load) for load in ranks)

    def _tight(self, layout: Layout) -> bool:
        """Whether it is not sure that there is a choice at all."""
        ranks = loads(self.setting, layout)[0]
        return any(self._room(layout, load) < frugal_bytes(self.solver, layout, load) * (1 + 1e-6) for load in ranks)

    def _start(self, layout: Layout, floor: float) -> None:
        """Its own computing is known."""
        busiest = max(map(sum, loads(self.setting, layout)[1]))
        self._wait(max(floor, layout.micro_batches * busiest), layout, self._hope)

    def _hope(self, layout: Layout, floor: float) -> None:
        """What its ranks' units add at least."""
        least = floor_in(self.solver, layout, self.limit, floor, self._cut())
        if least is None:
            self.too_large += 1
        else:
            self._wait(least, layout, self._solve)

    def _solve(self, layout: Layout, floor: float) -> None:
        """The kinds of ranks, each with its own choice."""
        setting, m = self.setting, layout.micro_batches
        ranks, works = loads(setting, layout)
        worst, parts = 0.0, (0.0, 0.0, 0.0)
        for load, work in zip(ranks, works, strict=True):
            solved = solve_rank(self.solver, layout, load, self._room(layout, load))
            if solved is None:
                self.too_large += 1
                return
            total = m * sum(work) + solved.seconds
            if total > worst:
                worst, parts = total, work
        seconds = worst + bubble(layout, *parts) + waits(setting, layout, mean(works), max(map(sum, works)))
        if layout.activations == "host" and layout.mesh.pipe == 1:
            # so far as if each unit waited for its own, where most hide behind others, as in the floor
            seconds = floor + APART * (seconds - floor)
        self._number += 1
        heapq.heappush(self.pending, _Estimate(seconds, self._number, layout, floor, seconds))

    def _room(self, layout: Layout, load: RankLoad) -> float:
        """Bytes for a rank's units."""
        room = self.limit - 6 * layout.message(self.setting) - self._tied(layout, load)
        return stretched(self.solver, layout, load, room)

    def _tied(self, layout: Layout, load: RankLoad) -> float:
        if not load.tied_copy:
            return 0.0
        return tied_elements(self.setting.spec, layout.mesh) * (self.setting.compute + self.setting.reduce)

    # ---- one layout, built out ----

    def _try_next(self) -> None:
        """Build the lowest estimate, unless it is the lowest no more once it is put right."""
        estimate = heapq.heappop(self.pending)
        right = estimate.first * self._over(estimate.layout)
        if right > estimate.seconds and self.pending and right > self.pending[0].seconds:
            heapq.heappush(self.pending, estimate._replace(seconds=right))
        else:
            self._build(estimate)

    def _over(self, layout: Layout) -> float:
        """Half of what layouts of its sort took at least above their estimates: the next may do better."""
        found = self.over[_sort(layout)]
        return (1 + min(found)) / 2 if len(found) >= SEEN else 1.0

    def _build(self, estimate: _Estimate) -> None:
        shown = len(self.built) >= self.top
        if shown and (estimate.floor > self._cut() or self._unlikely(estimate)):
            self.left.append(estimate)
            return
        try:
            floor = self._raised(estimate)
            if floor is None:
                return
            self.passed = min(self.passed, floor)  # built or not: its units may have a better choice than the one tried
            if floor > self._cut() and shown:
                return
            self.simulated += 1
            candidate = self.maker.built(estimate.layout, self.limit)
        except ScheduleError:
            return
        if candidate is not None:
            self.built.append(candidate)
            self.over[_sort(estimate.layout)].append(candidate.prediction.seconds / estimate.first)

    def _raised(self, estimate: _Estimate) -> float | None:
        """Its floor with its layers dealt out to stages; None where nothing fits then."""
        schedule, deal = dealt_out(self.setting, estimate.layout)
        floor = max(estimate.floor, deal.least(estimate.layout.micro_batches))
        if floor > self._cut():
            return floor
        least = floor_of(self.solver, estimate.layout, schedule, deal.counts, self.limit, floor)
        self.too_large += least is None
        return least

    def _left_floor(self) -> float:
        """The lowest floor of what was estimated and not built: the lowest is raised until it has been, or RAISED of them."""
        left = [(e.floor, e.number, e) for e in (*self.left, *self.pending)]
        heapq.heapify(left)
        known: set[int] = set()
        while left and left[0][0] < min(self.unsolved, self.passed) and len(known) < RAISED:
            _, number, estimate = heapq.heappop(left)
            if number in known:
                return estimate.floor
            known.add(number)
            try:
                floor = self._raised(estimate)
            except ScheduleError:
                continue
            if floor is not None:
                heapq.heappush(left, (floor, number, estimate._replace(floor=floor)))
        return left[0][0] if left else float("inf")

    def _unlikely(self, estimate: _Estimate) -> bool:
        """Whether it would have to be much better than its sort."""
        best = self._best()
        if best is None or self.total <= MANY:
            return False
        return estimate.first * self._over(estimate.layout) > (1 + UNLIKELY) * best

    def fastest(self) -> Candidate:
        """Of what was built out, and what is near it."""
        built, many = _distinct(self.built, grids=True), self.total > MANY
        best = self.maker.fastest(built, many)
        ahead = [c for c in built if c.layout.prefetch]
        if self.setting.cluster.device.kind == "cpu" and not best.layout.prefetch and ahead:
            other = self.maker.fastest(ahead, many)
            if best.prediction.seconds > (1 - PASSING) * other.prediction.seconds:
                return other
        return best

    def last_resort(self) -> None:
        """The plan that needs least; raises PlanError, with what would do, where not even that fits."""
        found = least(self.setting, self.wanted, self.solver)
        if not fits(found.prediction.memory, self.setting.cluster, self.setting.cluster.usable):
            explain_misfit(self.setting, self.wanted, found)
        self.built.append(found)
