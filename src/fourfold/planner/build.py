"""One layout built out: every rank's own choice of units, memory replayed, the schedule simulated.

The knapsack adds up what a rank's units hold; the replay follows them, and finds heights that meet or do not. So a rank's budget
is moved until what is chosen with it just fits by the replay. Ranks hold what they hold whatever the others choose: each has its
own budget, and the schedule is simulated only when all of them fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fourfold.plan import Plan
from fourfold.planner.deal import Deal, deal_layers
from fourfold.planner.followed import schedule_of
from fourfold.planner.inner import Solved, frugal_bytes, frugal_rank, solve_rank
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.options import RankLoad, Solver
from fourfold.planner.predict import Judged, Prediction, judged
from fourfold.planner.products import chosen_flows
from fourfold.planner.replay import RankMemory
from fourfold.planner.rules import rules_of
from fourfold.planner.stages import units_of_stages
from fourfold.planner.units import Choice
from fourfold.program.costs import Costs
from fourfold.program.engine import Problem, peaks
from fourfold.program.ops import Schedule

__all__ = ["Candidate", "build_out", "dealt_out", "frugal", "stretched"]

STRETCH = 1.4
"""Of the budget: what a choice may add up to. Heights that are summed need not meet: the replay decides."""
TURNS = 12
"""Choices of a rank that are replayed at most."""
CLOSE, FINE = 0.01, 0.001
"""Of a device's memory: as near to all of it as a choice is brought, and to one that is too large as others are sought."""


LARGER = (1.04, 1.08, 1.12, 1.16, 1.2, 1.3, 1.4)
"""Of a device's memory: budgets that are tried besides."""
_Planned = tuple[Plan, Judged, Sequence[Solved]]


@dataclass(frozen=True)
class Candidate:
    """A plan, with what it takes."""

    layout: Layout
    plan: Plan
    prediction: Prediction
    choice_gap: float = 0.0
    """Seconds by which the choice of units may be above the best one."""
    price: float = 0.0
    """Seconds that a GiB more on every device would save; the search knows it of the best plan."""


class _Seat:
    """A rank of the pipeline, and the budget with which what its units choose just fits."""

    def __init__(self, solver: Solver, layout: Layout, load: RankLoad, budget: float, usable: float):
        self._solver, self._layout, self._load, self._usable = solver, layout, load, usable
        self._budget, self._enough, self._too_much, self._stride = budget, 0.0, inf, 1.0
        self._too_little, self._fills = 0.0, layout.optimizer == "auto"  # with state, whatever was chosen
        self.tried, self.settled = self._choose(), False
        self.fits: Solved | None = None

    def choice(self, budget: float) -> Solved | None:
        return solve_rank(self._solver, self._layout, self._load, budget)

    def _choose(self) -> Solved | None:
        return self.choice(self._budget)

    def weigh(self, peak: float) -> None:
        """What was tried holds so much at its height: keep it, and try a little more, or try less."""
        if self.tried is None or (self.settled and peak <= self._usable):
            return
        if (excess := peak - self._usable) > 0:
            if self.settled:  # with others' choices, as of a tied weight, it no longer fits
                self.fits, self._enough, self.settled = None, 0.0, False
            self._too_much = min(self._too_much, self.tried.needs)  # with as much or more it would be chosen again
            self._budget, self._stride = self._too_much - self._stride * excess, 2 * self._stride
        else:
            if self.fits is None or self.tried.seconds <= self.fits.seconds:
                self.fits, self._enough = self.tried, self._budget
            full = -excess <= CLOSE * self._usable and not (self._fills and self._too_much < inf)
            self.settled = self.tried.free or full
            self._budget, self._stride = self._budget - 0.95 * excess, 1.0
        least = self._too_little if self.fits is None else self._enough
        if not least < self._budget < self._too_much:
            self._budget = (least + self._too_much) / 2
        if self.fits is not None:
            self.settled = self.settled or self._too_much - self._enough <= CLOSE * self._usable
        if not self.settled:
            self.tried = self._choose()
        while self.tried is None and self.fits is None and self._too_much - self._budget > FINE * self._usable:
            self._too_little, self._budget = self._budget, (self._budget + self._too_much) / 2
            self.tried = self._choose()
        if self.settled or self.tried is None:
            self.settle()

    def settle(self) -> Solved | None:
        """Take the best that fits."""
        self.tried, self.settled = self.fits, self.fits is not None
        return self.tried


class _Site:
    """A layout with its schedule and its layers dealt out: what every rank of its pipeline has to choose for."""

    def __init__(self, setting: Setting, layout: Layout):
        self.setting, self.layout = setting, layout
        schedule, deal = dealt_out(setting, layout)
        stages = units_of_stages(setting.spec, deal.counts)
        flat = Costs(activation=tuple(1.0 / len(schedule.stages_of[r]) for r in schedule.placement))
        flight = peaks(Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, flat), schedule.order)
        self._units = [[u for s in held for u in stages[s]] for held in schedule.stages_of]
        tied = setting.spec.tied and schedule.placement[0] != schedule.placement[-1]
        self.loads = [
            RankLoad(tuple(Counter(u.kind for u in units).items()), flight[r], tied and r == schedule.placement[-1])
            for r, units in enumerate(self._units)
        ]
        self._layers = tuple(n - (s == 0) - (s == schedule.stages - 1) for s, n in enumerate(deal.counts))

    def planned(self, solved: Sequence[Solved], limit: float) -> tuple[Plan, Judged]:
        """The plan with every rank's choices, in so much memory."""
        spec, choices = self.setting.spec, _assigned(self._units, solved)
        if spec.tied:  # its matrix is the embedding's, and so is what is done with it
            lender, head = choices[spec.units[0].name], spec.units[-1].name
            choices[head] = choices[head]._replace(mode=lender.mode, reduce=lender.reduce, within=lender.within)
        flows = chosen_flows(self.setting, self.layout)
        plan = self.layout.plan(self.setting, rules_of(choices), self._layers, flows=flows)
        return plan, judged(plan, self.setting, choices, limit)


def build_out(setting: Setting, solver: Solver, layout: Layout, limit: float) -> Candidate | None:
    """The plan of a layout with every rank's own choices, simulated and replayed; None where none fits into `limit` bytes."""
    site = _Site(setting, layout)
    seats = [_Seat(solver, layout, load, stretched(solver, layout, load, limit), limit) for load in site.loads]

    def planned(solved: Sequence[Solved]) -> tuple[Plan, Judged]:
        return site.planned(solved, limit)

    for turn in range(TURNS):
        tried = [s.settle() if turn == TURNS - 1 else s.tried for s in seats]
        solved: Sequence[Solved] = [s for s in tried if s is not None]
        if len(solved) < len(seats):
            break
        plan, found = planned(solved)
        for seat, memory in zip(seats, found.memory, strict=True):
            seat.weigh(memory.peak)
        if [s.tried for s in seats] == tried and all(s.settled for s in seats):
            if len(seats) == 1:
                plan, found, solved = _above(seats[0], planned, (plan, found, solved), limit)
            gap = max(s.gap for s in solved)
            return Candidate(layout, plan, found.prediction(), gap) if found.fits else None
    return None


def frugal(setting: Setting, solver: Solver, layout: Layout) -> tuple[Sequence[RankMemory], Callable[[], Candidate]]:
    """What ranks hold where every unit holds as little as it can, by their sums; and the plan."""
    site = _Site(setting, layout)
    solved = [frugal_rank(solver, layout, load) for load in site.loads]
    plan, held = site.planned(solved, 0.0)
    return held.memory, lambda: Candidate(layout, plan, held.prediction(), max(s.gap for s in solved))


def _above(
    seat: _Seat, planned: Callable[[Sequence[Solved]], tuple[Plan, Judged]], best: _Planned, limit: float
) -> _Planned:
    """The plan, or a faster one that is chosen with a larger budget, and fits: what is held need not grow with it."""
    for share in LARGER:
        more = seat.choice(share * limit)
        if more is None or more.seconds >= best[2][0].seconds:
            continue
        plan, found = planned([more])
        if found.fits:
            best = plan, found, [more]
    return best


def stretched(solver: Solver, layout: Layout, load: RankLoad, budget: float) -> float:
    """The budget, or a little more where that is the least with which there is a choice."""
    least = frugal_bytes(solver, layout, load)
    return least * (1 + 1e-9) if budget < least < STRETCH * budget else budget


def dealt_out(setting: Setting, layout: Layout) -> tuple[Schedule, Deal]:
    """A layout's schedule and its layers by stage."""
    schedule = schedule_of(layout.plan(setting, (), None), layout, setting.spec.layers)
    return schedule, deal_layers(setting, layout, schedule, layout.message_seconds(setting))


def _assigned(rank_units: list[list[Any]], solved: Sequence[Solved]) -> dict[str, Choice]:
    """A choice for every unit: within a rank and kind, those that hold least go to the earlier layers."""
    out: dict[str, Choice] = {}
    for units, answer in zip(rank_units, solved, strict=True):
        by_kind: dict[str, list[str]] = {}
        for u in units:
            by_kind.setdefault(u.kind, []).append(u.name)
        for kind, names in by_kind.items():
            out.update(zip(names, answer.choices(kind), strict=True))
    return out
