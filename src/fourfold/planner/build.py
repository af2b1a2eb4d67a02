"""Builds a plan from one layout: chooses the options of every rank's units, replays memory, simulates the schedule.

The knapsack adds up the bytes of a rank's units; the replay follows them through the step, where transient bytes may or may not
coincide. So a rank's budget is adjusted until the choice just fits in the replay. A rank's memory does not depend on other
ranks: each has its own budget, and the schedule is simulated only once all of them fit.

`least_memory_plan` builds the plan that needs the least memory of all layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from fourfold.errors import PlanError, ScheduleError
from fourfold.model.operators import UnitSpec
from fourfold.plan import Mesh, Plan
from fourfold.planner.evaluate import PlanEvaluation
from fourfold.planner.grid_cost import chosen_flows
from fourfold.planner.layouts import ParallelLayout, enumerate_layouts, may_consume
from fourfold.planner.lower_bounds import least_bytes
from fourfold.planner.prediction import Prediction
from fourfold.planner.problem import Constraints, PlanProblem, SearchConfig
from fourfold.planner.stage_partition import RankLoad, partition_layers, units_of_stages
from fourfold.planner.unit_cost import UnitChoice, rules_of
from fourfold.planner.unit_options import OptionTable, RankChoice, rank_options
from fourfold.program.costs import Costs
from fourfold.program.engine import Problem, peaks

__all__ = ["Candidate", "build_plan", "least_memory_plan"]

_MOST_REPLAYED = 40
"""Maximum number of layouts whose smallest plan is evaluated."""


@dataclass(frozen=True)
class Candidate:
    """A plan of a layout, with its prediction."""

    layout: ParallelLayout
    plan: Plan
    prediction: Prediction
    choice_gap: float = 0.0
    """Upper bound, in seconds, on the distance of the choice of units from the optimum of its knapsack."""
    price: float = 0.0
    """Seconds that one more GiB on every device would save in this layout; known for the best plan only."""
    with_more: tuple[float, float, str] | None = None
    """(extra bytes on every device, seconds that they would save over all layouts, the best layout then), if searched."""


class _PartitionedLayout:
    """A layout with its schedule and its layers partitioned into stages: the input of every rank's choice."""

    def __init__(self, problem: PlanProblem, layout: ParallelLayout):
        self.problem, self.layout = problem, layout
        schedule, counts = partition_layers(problem, layout)
        stages = units_of_stages(problem.spec, counts)
        flat = Costs(activation=tuple(1.0 / len(schedule.stages_of[r]) for r in schedule.placement))
        flight = peaks(Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, flat), schedule.order)
        self._units = [[u for s in held for u in stages[s]] for held in schedule.stages_of]
        tied = problem.spec.tied and schedule.placement[0] != schedule.placement[-1]
        self.loads = [
            RankLoad(tuple(Counter(u.kind for u in units).items()), flight[r], tied and r == schedule.placement[-1])
            for r, units in enumerate(self._units)
        ]
        last = schedule.stages - 1
        self._layers = tuple(n - (s == 0) - (s == last) for s, n in enumerate(counts))

    def plan(self, chosen: Sequence[RankChoice], limit: float) -> tuple[Plan, PlanEvaluation]:
        """The plan with every rank's choices, evaluated in `limit` bytes."""
        spec, choices = self.problem.spec, _assign(self._units, chosen)
        if spec.tied:  # the head uses the embedding's matrix, so both are sharded alike
            lender, head = choices[spec.units[0].name], spec.units[-1].name
            choices[head] = choices[head]._replace(mode=lender.mode, reduce=lender.reduce, within=lender.within)
        flows = chosen_flows(self.problem, self.layout)
        plan = self.layout.plan(self.problem, rules_of(choices), self._layers, flows=flows)
        return plan, PlanEvaluation(plan, self.problem, choices, limit)


class _RankBudget:
    """Searches the largest budget of a rank whose choice of units fits in the replay."""

    def __init__(self, choose: Callable[[float], RankChoice | None], limit: float, close: float, fills_up: bool):
        """`close`: bytes that may stay free. `fills_up`: optimizer state fills the free memory, so the peak does not show it."""
        self._choose, self._limit, self._close, self._fills_up = choose, limit, close, fills_up
        self._budget, self._low = limit, 0.0
        self._high = inf  # does not fit; `_low` fits, or is too small for any choice
        self.tried, self.settled = choose(limit), False
        self.best: RankChoice | None = None

    def update(self, peak: float) -> None:
        """The choice that was tried peaks at `peak` bytes: accept it and try a larger budget, or try a smaller one."""
        if self.tried is None or (self.settled and peak <= self._limit):
            return
        free = self._limit - peak
        if free < 0:
            if self.settled:  # with the other ranks' choices (a tied weight) it no longer fits
                self.best, self._low, self.settled = None, 0.0, False
            self._high = min(self._high, self.tried.needs)  # this budget or a larger one would give the same choice
        else:
            if self.best is None or self.tried.seconds <= self.best.seconds:
                self.best, self._low = self.tried, self._budget
            full = free <= self._close and not (self._fills_up and self._high < inf)
            self.settled = self.tried.free or full
        if self.settled or (self.best is not None and self._high - self._low <= self._close):
            self.settle()
            return
        budget = min(self._budget, self._high) + free
        self._try(budget if self._low < budget < self._high else (self._low + self._high) / 2)
        while self.tried is None and self.best is None and self._high - self._budget > 0.1 * self._close:
            self._low = self._budget
            self._try((self._budget + self._high) / 2)
        if self.tried is None:
            self.settle()

    def _try(self, budget: float) -> None:
        self._budget, self.tried = budget, self._choose(budget)

    def settle(self) -> RankChoice | None:
        """Accept the best choice that fits."""
        self.tried, self.settled = self.best, self.best is not None
        return self.tried


def build_plan(
    problem: PlanProblem, table: OptionTable, layout: ParallelLayout, limit: float, config: SearchConfig
) -> Candidate | None:
    """The plan of a layout with the choices of every rank; None if none fits into `limit` bytes."""
    partitioned = _PartitionedLayout(problem, layout)
    close, fills_up = config.budget_tolerance * limit, layout.optimizer == "auto"
    every = [rank_options(table, layout, load) for load in partitioned.loads]
    budgets = [_RankBudget(options.choose, limit, close, fills_up) for options in every]
    for round_ in range(config.budget_rounds):
        tried = [b.settle() if round_ == config.budget_rounds - 1 else b.tried for b in budgets]
        chosen: Sequence[RankChoice] = [c for c in tried if c is not None]
        if len(chosen) < len(budgets):
            break
        plan, found = partitioned.plan(chosen, limit)
        for budget, memory in zip(budgets, found.memory, strict=True):
            budget.update(memory.peak)
        if [b.tried for b in budgets] == tried and all(b.settled for b in budgets):
            gap = max(c.gap for c in chosen)
            return Candidate(layout, plan, found.prediction(), gap) if found.fits else None
    return None


def _assign(rank_units: list[list[UnitSpec]], chosen: Sequence[RankChoice]) -> dict[str, UnitChoice]:
    """A choice for every unit: within a rank and kind, the smallest choices go to the earlier layers."""
    out: dict[str, UnitChoice] = {}
    for units, choice in zip(rank_units, chosen, strict=True):
        by_kind: dict[str, list[str]] = {}
        for u in units:
            by_kind.setdefault(u.kind, []).append(u.name)
        for kind, names in by_kind.items():
            out.update(zip(names, choice.units[kind], strict=True))
    return out


# ---- the plan that needs the least memory ----


def least_memory_plan(problem: PlanProblem, constraints: Constraints, table: OptionTable | None = None) -> Candidate:
    """The plan that needs the fewest bytes on a device; if possible, one that fits on the hosts.

    A layout needs at least `least_bytes`, and at most the bytes of its plan with the smallest options of every unit. Layouts are
    tried in the order of their bounds until no other can need less: a few replays instead of a search.
    """
    table = table or OptionTable(problem, {k: str(v) for k, v in constraints.fixed.items()})
    bounds = sorted((least_bytes(table, c), i, c) for i, c in enumerate(_small_layouts(problem, constraints)))
    best: tuple[tuple[bool, float], ParallelLayout, Plan, PlanEvaluation] | None = None
    for bound, _, layout in bounds[:_MOST_REPLAYED]:
        if best is not None and (False, bound) >= best[0]:
            break
        try:
            partitioned = _PartitionedLayout(problem, layout)
        except ScheduleError:
            continue
        smallest = [rank_options(table, layout, load).smallest() for load in partitioned.loads]
        plan, found = partitioned.plan(smallest, 0.0)
        needs = any(m.host > problem.cluster.host_memory for m in found.memory), found.peak
        if best is None or needs < best[0]:
            best = needs, layout, plan, found
    assert best is not None, "enumerate_layouts explains when there is none"
    _, layout, plan, found = best
    return Candidate(layout, plan, found.prediction())


def _small_layouts(problem: PlanProblem, constraints: Constraints) -> Iterator[ParallelLayout]:
    """Candidates for the least memory: the smallest micro-batches, no prefetch, and as much as possible on the host."""
    of_mesh: dict[Mesh, ParallelLayout] = {}
    consuming = False
    for found in enumerate_layouts(problem, constraints):
        if found.mesh.pipe == 1 or found.schedule == (constraints.schedule or "1f1b"):
            other = of_mesh.setdefault(found.mesh, found)
            if found.micro_batch_size < other.micro_batch_size:
                of_mesh[found.mesh] = found
            hosted = replace(found, prefetch=0, optimizer=constraints.get("optimizer", "host"))
            if may_consume(problem, constraints.fixed, hosted):
                consuming = True
                yield replace(hosted, consume=True, tensor=replace(found.tensor, keep=()))
    if constraints.get("gradients") == "consume":
        if not consuming:
            raise PlanError(
                "--fix gradients=consume needs one micro-batch per step on every rank, and the engine fourfold; leave it out, or "
                "use a smaller --global-batch"
            )
        return
    for found in of_mesh.values():
        bare = replace(found, prefetch=0, tensor=replace(found.tensor, keep=()))
        if problem.on_cpu:
            yield bare
            continue
        homes: tuple[Literal["device", "host"], ...] = ("device", "host")
        for home in (constraints.fixed["activations"],) if "activations" in constraints.fixed else homes:
            yield replace(bare, optimizer=constraints.get("optimizer", "host"), activations=home)
