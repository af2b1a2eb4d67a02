"""Local search from the plans that the search built: other modes and recomputation for some units, evaluated as whole plans.

The search chooses units by sums of estimates. What units do together (reductions in one bucket, gathers that overlap with each
other's matmuls, transient memory that coincides or not) only the evaluation of a whole plan knows. So neighbouring plans are
evaluated, and the first faster one that fits is taken, until there is none:

1. `_try_modes`: another mode for all units, or for all units of a name pattern. No plan is then slower, by the planner's own
   model, than one with a single mode that fits.
2. `_fill_memory` (without a pipeline): changes of single units are evaluated; then a knapsack chooses how many of each to make
   in the memory that is left, and the result is evaluated as a whole. Then the same with optimizer state on the host where the
   device has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fourfold.plan import Plan
from fourfold.planner.build import Candidate, build_plan
from fourfold.planner.evaluate import PlanEvaluation, evaluate, predict
from fourfold.planner.knapsack import Group, choose
from fourfold.planner.problem import Constraints, PlanProblem
from fourfold.planner.search_config import SearchConfig
from fourfold.planner.unit_cost import UnitChoice, choice_of, pattern_of, rules_of
from fourfold.planner.unit_options import SPLITS, OptionTable

__all__ = ["LocalSearch"]

GIB = 2**30
_MODES: tuple[tuple[Any, Any], ...] = (
    ("replicate", "step"),
    ("zero2", "step"),
    ("keep", "step"),
    ("zero3", "step"),
    ("keep", "micro-batch"),
    ("zero3", "micro-batch"),
)
"""(mode, reduce); the last two only with several micro-batches."""
_Move = dict[str, UnitChoice]
"""New choices of some units, by name."""


class LocalSearch:
    """Improves plans of layouts; `many`: of many layouts, the best plan alone."""

    def __init__(
        self,
        problem: PlanProblem,
        table: OptionTable,
        constraints: Constraints,
        config: SearchConfig,
        many: bool,
    ):
        self.problem, self.table, self.constraints, self.config, self.many = problem, table, constraints, config, many
        self.fixed = constraints.fixed.keys() & {"mode", "recompute", "optimizer"}
        self._evaluated: dict[Any, PlanEvaluation] = {}

    def improve(self, ranked: Sequence[Candidate]) -> Candidate:
        """Of some plans, the fastest first, and their neighbours: the fastest."""
        near = (1 + self.config.improved_share) * ranked[0].prediction.seconds
        starts = [c for c in ranked if c.prediction.seconds <= near][: 1 if self.many else self.config.most_improved]
        best = min((self._improve(c) for c in starts), key=lambda c: c.prediction.seconds)
        if self.problem.on_cpu:
            best = self._simplest(best)
        elif best.layout.mesh.pipe == 1 and best.layout.optimizer == "device" and "optimizer" not in self.fixed:
            plan = replace(best.plan, memory=replace(best.plan.memory, optimizer="auto"))
            layout = replace(best.layout, optimizer="auto")
            moved = self._improve(replace(best, layout=layout, plan=plan, prediction=predict(plan, self.problem)))
            best = min(best, moved, key=lambda c: c.prediction.seconds)
        price = self._price(best)
        if best.layout.optimizer == "auto":  # record how much of the optimizer's state stays on the device
            state = replace(best.plan.memory, device_state=str(int(best.prediction.device_state)))
            best = replace(best, plan=replace(best.plan, memory=state))
        return replace(best, price=price)

    def _improve(self, start: Candidate) -> Candidate:
        climb = _Climb(self.problem, start.plan, self._evaluated, self.fixed)
        if self.config.try_modes and start.layout.replicas > 1 and "mode" not in self.fixed:
            self._try_modes(climb)
        if start.layout.mesh.pipe == 1 and not {"mode", "recompute"} <= self.fixed:
            self._fill_memory(climb)
        if climb.plan == start.plan:
            return start
        return replace(start, plan=climb.plan, prediction=climb.now.prediction())

    def _modes(self, plan: Plan) -> tuple[tuple[Any, Any], ...]:
        return _MODES if plan.micro_batches(self.problem.global_batch) > 1 else _MODES[:4]

    # ---- the neighbours ----

    def _try_modes(self, climb: _Climb) -> None:
        for names in climb.groups():
            for mode in self._modes(climb.plan):
                climb.take_if_faster({n: _in_mode(climb.choices[n], *mode) for n in names})

    def _fill_memory(self, climb: _Climb) -> None:
        for _ in range(self.config.fill_rounds):
            before, changes = climb.now.seconds, self._unit_changes(climb)
            for share in self.config.fill_margins:
                climb.take_if_faster(_choose_changes(changes, climb.now.room + share * climb.now.limit))
            if climb.now.seconds >= before:
                for change in changes:  # the sums mislead: try as many of one change as fit
                    self._take_many(climb, change)
            if climb.now.seconds >= before:
                return

    def _take_many(self, climb: _Climb, change: _UnitChange) -> None:
        """Make a change of one unit if that is faster; then of as many as fit."""
        if not climb.take_if_faster(dict(change.moves[:1])):
            return
        low, high = 1, len(change.moves) + 1
        while high - low > 1:
            half = (low + high) // 2
            low, high = (half, high) if climb.evaluate(dict(change.moves[:half])).fits else (low, half)
        climb.take_if_faster(dict(change.moves[:low]))

    def _unit_changes(self, climb: _Climb) -> list[_UnitChange]:
        """What one unit of a kind could choose instead, and what that changes."""
        out = []
        for names in climb.identical_units():
            for choice in self._alternatives(climb, names[0]):
                moves = [(n, choice) for n in names]
                changed = climb.evaluate(dict(moves[:1]))
                seconds = changed.seconds_with_state_on_device - climb.now.seconds_with_state_on_device
                out.append(_UnitChange(moves, seconds, climb.now.room - changed.room))
        return out

    def _alternatives(self, climb: _Climb, name: str) -> Iterator[UnitChoice]:
        """Other choices of a unit, in one aspect."""
        now, unit = climb.choices[name], climb.units[name]
        found: list[UnitChoice] = []
        if "mode" not in self.fixed and climb.replicas > 1:
            found += [_in_mode(now, *mode) for mode in self._modes(climb.plan)]
        if "recompute" not in self.fixed:
            found += [now._replace(recompute=r, split=1) for r in ("none", "selective", "full")]
            if climb.plan.mesh.row * climb.plan.mesh.col == 1:
                found += [now._replace(recompute="per-slice", split=s) for s in SPLITS if unit.slices >= s]
        yield from dict.fromkeys(c for c in found if c != now and c.recompute in unit.saved)

    # ---- the result ----

    def _simplest(self, best: Candidate) -> Candidate:
        """On a CPU, whose clock and networks vary: a plan with a single mode that is nearly as fast, with the least memory."""
        if "mode" in self.fixed or best.layout.replicas == 1:
            return best
        climb, found = _Climb(self.problem, best.plan, self._evaluated, self.fixed), best
        for mode in self._modes(best.plan):
            tried = {n: _in_mode(c, *mode) for n, c in climb.choices.items()}
            single = climb.evaluate(tried)
            near = single.fits and single.seconds <= (1 + self.config.cpu_tie) * best.prediction.seconds
            if near and (found is best or single.peak < found.prediction.peak.peak):
                plan = replace(best.plan, unit=rules_of(climb.after(tried)))
                found = replace(best, plan=plan, prediction=single.prediction())
        return found

    def _price(self, best: Candidate) -> float:
        """Seconds that one more GiB would save in the best plan's layout; of many layouts, before local search."""
        cluster = self.problem.cluster
        more = replace(self.problem, cluster=cluster.what_if({"memory": str(cluster.memory + GIB)}))
        table = OptionTable(more, self.table.fixed)
        after = build_plan(more, table, best.layout, more.cluster.usable, self.config)
        if best.layout.mesh.pipe == 1 and not self.many:
            local = LocalSearch(more, table, self.constraints, self.config, self.many)
            starts = [replace(best, prediction=predict(best.plan, more)), *([after] if after else [])]
            return max(0.0, *(best.prediction.seconds - local._improve(c).prediction.seconds for c in starts))
        now = build_plan(self.problem, self.table, best.layout, cluster.usable, self.config)
        return max(0.0, now.prediction.seconds - after.prediction.seconds) if now and after else 0.0


class _UnitChange(NamedTuple):
    """The same change for identical units, and what it makes of the plan where one unit makes it."""

    moves: list[tuple[str, UnitChoice]]
    seconds: float
    peak: float


def _choose_changes(changes: Sequence[_UnitChange], room: float) -> _Move:
    """The best changes in `room` bytes, were seconds and bytes sums."""
    kinds: dict[str, list[_UnitChange]] = {}
    for change in changes:
        kinds.setdefault(change.moves[0][0], []).append(change)
    lowest = min([0.0, *(c.peak for c in changes)])  # a knapsack's bytes and seconds are not negative
    fastest = min([0.0, *(c.seconds for c in changes)])
    groups = []
    for kind in kinds.values():  # option 0: no change
        options = [(0.0, 0.0), *((c.peak, c.seconds) for c in kind)]
        groups.append(Group([(peak - lowest, seconds - fastest) for peak, seconds in options], len(kind[0].moves)))
    chosen = choose(groups, room - lowest * sum(g.count for g in groups))
    move: _Move = {}
    if chosen is not None:
        for counts, kind in zip(chosen.counts, kinds.values(), strict=True):
            done = 0
            for option, n in counts.items():
                if option:
                    move.update(kind[option - 1].moves[done : done + n])
                    done += n
    return move


class _Climb:
    """A plan that is replaced by faster neighbours that fit."""

    def __init__(self, problem: PlanProblem, plan: Plan, evaluated: dict[Any, PlanEvaluation], fixed: Any):
        self.problem, self.plan, self._evaluated, self.fixed = problem, plan, evaluated, fixed
        self.units = {u.name: u for u in problem.spec.units}
        self.replicas = plan.mesh.data * plan.mesh.depth
        self.choices = {u.name: choice_of(plan, u) for u in problem.spec.units}
        self.now = self.evaluate({})

    def take_if_faster(self, move: _Move) -> bool:
        """Make the move if the plan then is faster and fits."""
        found = self.evaluate(move)
        if found is self.now or not found.fits or found.seconds >= (1 - 1e-7) * self.now.seconds:
            return False
        self.choices, self.now = self.after(move), found
        self.plan = replace(self.plan, unit=rules_of(self.choices))
        return True

    def after(self, move: _Move) -> dict[str, UnitChoice]:
        """All choices after a move. A tied head is sharded as the embedding: it is one matrix."""
        if "recompute" in self.fixed:  # replicas cannot recompute per slice
            move = {name: c for name, c in move.items() if c.recompute == self.choices[name].recompute}
        choices = self.choices | move
        if self.problem.spec.tied:
            lender, head = (self.problem.spec.units[i].name for i in (0, -1))
            mode, reduce, within = choices[lender][:3]
            choices[head] = choices[head]._replace(mode=mode, reduce=reduce, within=within)
        return choices

    def evaluate(self, move: _Move) -> PlanEvaluation:
        """The plan after a move."""
        bare, choices = replace(self.plan, unit=()), self.after(move)
        key = (bare, tuple(choices.values()))
        if key not in self._evaluated:
            self._evaluated[key] = evaluate(bare, self.problem, choices)
        return self._evaluated[key]

    def groups(self) -> list[list[str]]:
        """Units that change their mode together: all, and those of a name pattern."""
        kinds: dict[str, list[str]] = {}
        for name in self.choices:
            kinds.setdefault(pattern_of(name), []).append(name)
        if self.problem.spec.tied:  # the head's matrix is the embedding's
            first, last = (pattern_of(self.problem.spec.units[i].name) for i in (0, -1))
            kinds[first] += kinds.pop(last)
        return [list(self.choices), *kinds.values()]

    def identical_units(self) -> list[list[str]]:
        """Units of a pattern that choose the same now, from the last; a pattern's first and last units apart."""
        out: dict[Any, list[str]] = {}
        for names in self.groups()[1:]:
            if self.problem.spec.tied and names[0] == self.problem.spec.units[0].name:
                continue
            for n in reversed(names):  # next to the first and the last unit are units of other kinds
                at_end = n in (names[0], names[-1])
                out.setdefault((pattern_of(n), n if at_end else self.choices[n]), []).append(n)
        return list(out.values())


def _in_mode(c: UnitChoice, mode: Any, reduce: Any) -> UnitChoice:
    """A choice in another mode; replicas are neither sliced nor sharded within groups."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return UnitChoice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
