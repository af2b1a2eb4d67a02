"""The search: every layout, every unit's choice, the fastest plan that fits; and the proof of how good it is.

1. Every layout gets a floor (`layouts`). The lowest is taken first, and its floor raised: by what its busiest rank computes and
   the grid moves, for each of what may be kept and where, then by the relaxed choice of its units (`inner`). A floor counts
   no idling but what cannot be avoided.
2. Where it still is the lowest, every rank's units are chosen by the knapsack: an estimate of the layout's time.
3. The best estimates are built out, unless their layers as dealt out to stages, simulated with nothing but computing, are too
   slow: every rank's own choice, the schedule simulated, memory replayed; where the replay disagrees with the budget, the
   budget is moved and the rank chosen again, until it fits.
4. When the next floor is above the best simulated time, nothing that is left can win (of thousands of layouts: by more than a
   hundredth). The winner's neighbours, with other modes, are simulated too (`polish`).
5. Where nothing fits, all is done once more for plans that save most: nothing gathered ahead, and choices whose sum is
   above the budget (by less than STRETCH), since heights that are summed need not meet; the replay decides.

The certificate says: under the planner's model, no plan of the searched space takes less than `lower_bound`, the lowest of all
floors that are left. Within a layout the choice of units is that close to the best of its knapsack (`choice_gap`); the bound
does not lean on that, since the knapsack adds up what the simulation overlaps.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from fourfold.errors import PlanError, ScheduleError
from fourfold.plan import Plan, Tensor
from fourfold.planner.deal import Deal, deal_layers, least_idle
from fourfold.planner.inner import Solved, free_bytes, frugal_bytes, rank_bound, solve_rank
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import Constraints, bound, bubble, computed, layouts, loads, mean, waits
from fourfold.planner.options import RankLoad, Solver
from fourfold.planner.polish import polished
from fourfold.planner.predict import BUFFERS, Prediction, _schedule, _shape_of, _simulated, judged
from fourfold.planner.products import chosen_flows, ladder
from fourfold.planner.rules import rules_of
from fourfold.planner.stages import units_of_stages
from fourfold.planner.units import Choice
from fourfold.program.costs import Costs
from fourfold.program.engine import Problem, peaks
from fourfold.program.ops import Schedule

__all__ = ["Candidate", "Found", "Progress", "search"]

STRETCH = 1.4
"""Of the budget: what a choice of the frugal search may add up to."""
MANY, LITTLE = 2000, 0.01
"""Of more layouts than that, those that could win by less than this share are left out; the certificate's gap says so."""
SIMULATED = 48
"""Layouts that are built out at most."""
OTHERS = 4
"""Layouts that are estimated for each that is to be shown, where those that may be best are fewer."""
Progress = Callable[[int, int, float | None], None]
"""Called with layouts done, layouts in all, and the best seconds so far."""


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, with what it takes."""

    layout: Layout
    plan: Plan
    prediction: Prediction
    price: float
    """Seconds that another byte on every device would save."""
    choice_gap: float
    """Seconds by which the choice of units may be above the best one."""


@dataclass(frozen=True)
class Found:
    """What the search found."""

    best: Candidate
    ranked: tuple[Candidate, ...]
    """The best plan of every layout that was built out, the fastest first."""
    certificate: dict[str, Any] = field(default_factory=dict)


class _Estimate(NamedTuple):
    seconds: float
    number: int
    layout: Layout
    floor: float


def search(setting: Setting, wanted: Constraints, progress: Progress | None = None, top: int = 5) -> Found:
    """The fastest plan; raises PlanError, with what would do, where none fits."""
    began = time.perf_counter()
    run = _Search(setting, wanted, progress, top)
    run.go()
    if not run.built:
        run = _Search(setting, wanted, progress, top, frugal=True)
        run.go()
    if not run.built:
        run.explain_misfit()
    ranked = _distinct(run.built)
    best = ranked[0]
    if "mode" not in wanted.fixed and best.layout.replicas > 1:
        plan, prediction = polished(setting, best.plan, best.prediction)
        best = ranked[0] = replace(best, plan=plan, prediction=prediction)
    seconds = best.prediction.seconds
    lower = min([seconds, run.unsolved, run.passed, *(e.floor for e in run.pending)])
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


def _distinct(built: list[Candidate]) -> list[Candidate]:
    """The fastest first; of plans that differ in placements alone the fastest, on the device where that costs nothing."""
    best: dict[Layout, Candidate] = {}
    for c in sorted(built, key=lambda c: (c.layout.optimizer != "device") + (c.layout.activations != "device")):
        key = replace(c.layout, optimizer="device", activations="device", tensor=Tensor())
        if key not in best or c.prediction.seconds < 0.998 * best[key].prediction.seconds:
            best[key] = c
    return sorted(best.values(), key=lambda c: c.prediction.seconds)


class _Search:
    def __init__(
        self, setting: Setting, wanted: Constraints, progress: Progress | None, top: int, *, frugal: bool = False
    ):
        self.setting, self.wanted, self.progress, self.top, self.frugal = setting, wanted, progress, top, frugal
        self.solver = Solver(setting, {k: str(v) for k, v in wanted.fixed.items()})
        self.waiting: list[tuple[float, int, Layout, Callable[[Layout, float], None]]] = []
        """The lowest floor first: what is done next for a layout; each raises its floor, at more cost than the one before."""
        self.pending: list[_Estimate] = []
        self.built: list[Candidate] = []
        self.total = self.solved = self.simulated = self.too_large = 0
        self.unsolved = self.passed = float("inf")
        self._number = 0

    # ---- outside ----

    def go(self) -> None:
        for layout in layouts(self.setting, self.wanted):
            self._wait(computed(self.setting, layout), layout, self._move)
        self.total = len(self.waiting)
        while self.waiting:
            floor, _, layout, step = self.waiting[0]
            while self.pending and self.pending[0].seconds <= floor and self.simulated < SIMULATED:
                self._build(heapq.heappop(self.pending))
            enough = len(self.built) >= self.top or len(self.built) + len(self.pending) >= OTHERS * self.top
            if (floor > self._cut() and enough) or self.simulated >= SIMULATED:
                self.unsolved = floor
                break
            heapq.heappop(self.waiting)
            step(layout, floor)
        left: list[_Estimate] = []
        while self.pending and self.simulated < SIMULATED:
            estimate = heapq.heappop(self.pending)
            if estimate.floor > self._cut() and len(self.built) >= self.top:
                left.append(estimate)
                continue
            self._build(estimate)
            if self.progress:
                self.progress(self.solved, self.total, self._best())
        self.pending += left
        if self.progress:
            self.progress(self.total, self.total, self._best())

    def _wait(self, floor: float, layout: Layout, step: Callable[[Layout, float], None]) -> None:
        self._number += 1
        heapq.heappush(self.waiting, (floor, self._number, layout, step))

    def _best(self) -> float | None:
        return min((c.prediction.seconds for c in self.built), default=None)

    def _cut(self) -> float:
        """Layouts above this cannot win, or by little."""
        best = self._best()
        return float("inf") if best is None else best * (1 - (LITTLE if self.total > MANY else 0.0))

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
        if self.frugal and layout.replicas > 1:
            self._start(replace(layout, prefetch=0), floor)
        if self._free(layout):  # there is room to keep something on the grid
            for tensor in richer:
                other = replace(layout, tensor=tensor)
                self._start(other, floor)
                if self._free(other):
                    break
            return
        if self.setting.cluster.device.kind == "cpu":
            return
        # memory binds: what the host takes may buy a faster choice
        if "optimizer" not in self.wanted.fixed:
            self._start(replace(layout, optimizer="auto"), floor)
        if "activations" not in self.wanted.fixed:
            self._start(replace(layout, activations="host"), floor)
        if self.frugal and not {"optimizer", "activations"} & self.wanted.fixed.keys():
            self._start(replace(layout, optimizer="auto", activations="host"), floor)

    def _free(self, layout: Layout) -> bool:
        """Whether memory is no constraint."""
        for load in loads(self.setting, layout)[0]:
            room = self._room(layout, load)
            if room < free_bytes(self.solver, layout, load):
                return False
            solved = solve_rank(self.solver, layout, load, room)
            if solved is None or self._stream(layout, load, self._budget(layout) - solved.memory):
                return False
        return True

    def _start(self, layout: Layout, floor: float) -> None:
        """Its own computing is known."""
        busiest = max(map(sum, loads(self.setting, layout)[1]))
        self._wait(max(floor, layout.micro_batches * busiest), layout, self._hope)

    def _hope(self, layout: Layout, floor: float) -> None:
        """What its ranks' units add at least, each rank's kinds by themselves."""
        m, budget = layout.micro_batches, self._budget(layout)
        for load, work in zip(*loads(self.setting, layout), strict=True):
            room = self._room(layout, load)
            if layout.activations == "device" and room >= free_bytes(self.solver, layout, load):
                solved = solve_rank(self.solver, layout, load, room)
                least = solved.bound if solved is not None else None
            else:
                least = rank_bound(self.solver, layout, load, budget)
            if least is None and not self.frugal:
                self.too_large += 1
                return
            floor = max(floor, m * sum(work) + (least or 0.0))
        self._wait(floor, layout, self._solve)

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
            stream = self._stream(layout, load, self._budget(layout) - solved.memory)
            total = m * sum(work) + solved.seconds + stream
            if total > worst:
                worst, parts = total, work
        idle = bubble(layout, *parts) + waits(setting, layout, mean(works), max(map(sum, works)))
        self._number += 1
        heapq.heappush(self.pending, _Estimate(worst + idle, self._number, layout, floor))

    def _room(self, layout: Layout, load: RankLoad) -> float:
        """Bytes for a rank's units."""
        room = self._budget(layout) - self._tied(layout, load)
        return stretched(self.solver, layout, load, room) if self.frugal else room

    def _budget(self, layout: Layout) -> float:
        """Bytes for units on a device."""
        return self.setting.cluster.usable - 6 * layout.message(self.setting)

    def _tied(self, layout: Layout, load: RankLoad) -> float:
        if not load.tied_copy:
            return 0.0
        elements = self.setting.spec.units[0].matrices / (layout.mesh.row * layout.mesh.col)
        return elements * (self.setting.compute + self.setting.reduce)

    def _stream(self, layout: Layout, load: RankLoad, room: float) -> float:
        """Seconds of a streamed update of what does not fit on the device."""
        if layout.optimizer == "device":
            return 0.0
        s = self.setting
        grid = layout.mesh.row * layout.mesh.col
        kinds = s.spec.kinds
        held = sum(n * (kinds[k].matrices / grid + kinds[k].vectors) for k, n in load.units)
        share = 0.0
        if layout.optimizer == "auto":
            room -= min(BUFFERS, held) * s.streamed
            share = max(0.0, min(1.0, room / (held * s.streamed)))
        return (1 - share) * held / layout.replicas * s.streamed / s.cluster.host.link

    # ---- one layout, built out ----

    def _build(self, estimate: _Estimate) -> None:
        floor = estimate.floor
        if floor > self._cut() and len(self.built) >= self.top:
            self.passed = min(self.passed, floor)
            return
        try:
            floor = max(floor, dealt_out(self.setting, estimate.layout)[1].least(estimate.layout.micro_batches))
            self.passed = min(self.passed, floor)  # built or not: its units may have a better choice than the one tried
            if floor > self._cut() and len(self.built) >= self.top:
                return
            self.simulated += 1
            candidate = build_out(self.setting, self.solver, estimate.layout, 1.02 * self._cut(), frugal=self.frugal)
        except ScheduleError:
            return
        if candidate is not None:
            self.built.append(candidate)

    def explain_misfit(self) -> None:
        from fourfold.planner.misfit import explain_misfit

        explain_misfit(self.setting, self.wanted, self.solver, partial(any_fits, progress=self.progress))


def any_fits(setting: Setting, wanted: Constraints, progress: Progress | None = None) -> bool:
    """Whether the search finds a plan."""
    for frugal in (False, True):
        run = _Search(setting, wanted, progress, 1, frugal=frugal)
        try:
            run.go()
        except PlanError:  # the batch cannot be spread over so many
            return False
        if run.built:
            return True
    return False


def stretched(solver: Solver, layout: Layout, load: RankLoad, budget: float) -> float:
    """The budget, or a little more where that is the least with which there is a choice."""
    least = frugal_bytes(solver, layout, load)
    return least * (1 + 1e-9) if budget < least < STRETCH * budget else budget


def build_out(
    setting: Setting, solver: Solver, layout: Layout, cut: float = float("inf"), *, frugal: bool = False
) -> Candidate | None:
    """The plan of a layout with every rank's own choices, simulated and replayed; None where it does not fit.

    Above `cut` seconds, a plan that fits is not made better.
    """
    schedule, deal = dealt_out(setting, layout)
    counts = deal.counts
    stages = units_of_stages(setting.spec, counts)
    flat = Costs(activation=tuple(1.0 / len(schedule.stages_of[r]) for r in schedule.placement))
    shape = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, flat)
    flight = peaks(shape, schedule.order)
    rank_units = [[u for s in held for u in stages[s]] for held in schedule.stages_of]
    tied = setting.spec.tied and schedule.placement[0] != schedule.placement[-1]
    usable = setting.cluster.usable
    budgets = [float(usable)] * schedule.ranks
    layers = tuple(n - (s == 0) - (s == schedule.stages - 1) for s, n in enumerate(counts))
    best: Candidate | None = None
    before: float | None = None
    for turn in range(6):
        solved: list[Solved] = []
        for rank, units in enumerate(rank_units):
            kinds: dict[str, int] = {}
            for u in units:
                kinds[u.kind] = kinds.get(u.kind, 0) + 1
            load = RankLoad(tuple(kinds.items()), flight[rank], tied and rank == schedule.placement[-1])
            if frugal and turn == 0:
                budgets[rank] = stretched(solver, layout, load, budgets[rank])
            answer = solve_rank(solver, layout, load, budgets[rank])
            if answer is None:
                return best
            solved.append(answer)
        choices = _assigned(rank_units, solved)
        if setting.spec.tied:  # its matrix is the embedding's, and so is what is done with it
            lender = choices[setting.spec.units[0].name]
            head = setting.spec.units[-1].name
            choices[head] = choices[head]._replace(mode=lender.mode, reduce=lender.reduce, within=lender.within)
        plan = layout.plan(setting, rules_of(choices), layers, flows=chosen_flows(setting, layout))
        found = judged(plan, setting, choices)
        over = [m.peak - usable for m in found.memory]
        if found.fits and (best is None or found.seconds < best.prediction.seconds):
            prediction = found.prediction()
            if layout.optimizer == "auto":
                plan = replace(plan, memory=replace(plan.memory, device_state=str(int(prediction.device_state))))
            price = max(s.price for s in solved)
            if layout.optimizer == "auto" and found.share < 1:  # a byte of state that finds room need not cross
                price = max(price, 1 / setting.cluster.host.link)
            gap = max(s.gap for s in solved)
            best = Candidate(layout, plan, prediction, price, gap)
            if prediction.seconds > cut or (before is not None and prediction.seconds > 0.9995 * before):
                break
            before = prediction.seconds
        moved = False
        for rank, excess in enumerate(over):
            if excess > 0 or (not solved[rank].free and -excess > 0.01 * usable):
                budgets[rank] -= excess if excess > 0 else 0.95 * excess
                moved = True
        if not moved:
            break
    return best


def dealt_out(setting: Setting, layout: Layout) -> tuple[Schedule, Deal]:
    """A layout's schedule and its layers by stage."""
    schedule = _schedule(_shape_of(layout.plan(setting, (), None)), _simulated(layout), setting.spec.layers)
    return schedule, deal_layers(setting, layout, schedule, layout.message_seconds(setting))


def _assigned(rank_units: list[list[Any]], solved: list[Solved]) -> dict[str, Choice]:
    """A choice for every unit: within a rank and kind, those that hold least go to the earlier layers."""
    out: dict[str, Choice] = {}
    for units, answer in zip(rank_units, solved, strict=True):
        by_kind: dict[str, list[str]] = {}
        for u in units:
            by_kind.setdefault(u.kind, []).append(u.name)
        for kind, names in by_kind.items():
            out.update(zip(names, answer.choices(kind), strict=True))
    return out
