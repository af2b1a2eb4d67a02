"""Local search from the plan that the search built: other modes and recomputation for some units, evaluated as whole plans.

The search chooses options of units by sums of estimates. Interactions of units (reductions in one bucket, gathers that overlap
with each other's matmuls, transient memory that may coincide) appear only in the evaluation of a whole plan. So, without a
pipeline, changes of single units are evaluated, a knapsack chooses how many of each to make in the free memory, and the result
is evaluated as a whole. This repeats until no change is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from fourfold.planner.build import Candidate, build_plan
from fourfold.planner.evaluate import PlanEvaluation
from fourfold.planner.knapsack import Group, choose
from fourfold.planner.problem import Constraints, PlanProblem, SearchConfig
from fourfold.planner.unit_cost import UnitChoice, choice_of, pattern_of, rules_of
from fourfold.planner.unit_options import SPLITS, OptionTable, group_sizes

__all__ = ["improve", "price_of_memory"]

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


def improve(problem: PlanProblem, constraints: Constraints, config: SearchConfig, start: Candidate) -> Candidate:
    """The fastest plan found by changing the units of a plan, or the plan itself."""
    best = start
    if start.layout.mesh.pipe == 1:
        climb = _Climb(problem, constraints, start)
        climb.shard_all_alike()
        climb.fill_memory(config.fill_rounds)
        best = climb.candidate() if climb.moved else start
    return _simplest(problem, constraints, config, best) if problem.on_cpu else best


def price_of_memory(problem: PlanProblem, table: OptionTable, config: SearchConfig, best: Candidate) -> float:
    """Seconds that one more GiB on every device would save in a plan's layout, before local search."""
    cluster = problem.cluster
    more = replace(problem, cluster=cluster.what_if({"memory": str(cluster.memory + GIB)}))
    now, after = (
        build_plan(p, OptionTable(p, table.fixed), best.layout, p.cluster.usable, config) for p in (problem, more)
    )
    return max(0.0, now.prediction.seconds - after.prediction.seconds) if now and after else 0.0


def _simplest(problem: PlanProblem, constraints: Constraints, config: SearchConfig, best: Candidate) -> Candidate:
    """On a CPU, where times vary: a plan with a single mode that is nearly as fast, the one with the least memory."""
    climb, found = _Climb(problem, constraints, best), best
    for mode in climb.modes:
        tried = {n: _in_mode(c, *mode) for n, c in climb.choices.items()}
        single = climb.evaluate(tried)
        near = single.fits and single.seconds <= (1 + config.cpu_tie) * best.prediction.seconds
        if near and (found is best or single.peak < found.prediction.peak.peak):
            plan = replace(best.plan, unit=rules_of(climb.after(tried)))
            found = replace(best, plan=plan, prediction=single.prediction())
    return found


class _Climb:
    """Local search: the current plan is replaced by a faster neighbour that fits."""

    def __init__(self, problem: PlanProblem, constraints: Constraints, start: Candidate):
        self.problem, self.start, self.moved = problem, start, False
        self._bare = replace(start.plan, unit=())
        self._units = {u.name: u for u in problem.spec.units}
        self._recomputes = "recompute" not in constraints.fixed
        self._evaluated: dict[Any, PlanEvaluation] = {}
        self.modes: tuple[tuple[Any, Any], ...] = ()
        if start.layout.replicas > 1 and "mode" not in constraints.fixed:
            self.modes = _MODES if start.layout.micro_batches > 1 else _MODES[:4]
        self._groups = group_sizes(problem, start.layout)
        self.choices = {u.name: choice_of(start.plan, u) for u in problem.spec.units}
        self.now = self.evaluate({})

    def candidate(self) -> Candidate:
        plan = replace(self._bare, unit=rules_of(self.choices))
        return replace(self.start, plan=plan, prediction=self.now.prediction())

    # ---- moves ----

    def evaluate(self, move: _Move) -> PlanEvaluation:
        """The plan after a move."""
        choices = self.after(move)
        key = tuple(choices.values())
        if key not in self._evaluated:
            self._evaluated[key] = PlanEvaluation(self._bare, self.problem, choices)
        return self._evaluated[key]

    def after(self, move: _Move) -> dict[str, UnitChoice]:
        """All choices after a move. A tied head is sharded like the embedding, since they share one matrix."""
        if not self._recomputes:  # replicas cannot recompute per slice
            move = {name: c for name, c in move.items() if c.recompute == self.choices[name].recompute}
        choices = self.choices | move
        if self.problem.spec.tied:
            lender, head = (self.problem.spec.units[i].name for i in (0, -1))
            mode, reduce, within = choices[lender][:3]
            choices[head] = choices[head]._replace(mode=mode, reduce=reduce, within=within)
        return choices

    def take_if_faster(self, move: _Move) -> bool:
        """Make the move if the resulting plan is faster and fits."""
        found = self.evaluate(move)
        if found is self.now or not found.fits or found.seconds >= (1 - 1e-7) * self.now.seconds:
            return False
        self.choices, self.now, self.moved = self.after(move), found, True
        return True

    def _patterns(self) -> list[list[str]]:
        """Units of every name pattern."""
        kinds: dict[str, list[str]] = {}
        for name in self.choices:
            kinds.setdefault(pattern_of(name), []).append(name)
        if self.problem.spec.tied:  # the head uses the embedding's matrix
            first, last = (pattern_of(self.problem.spec.units[i].name) for i in (0, -1))
            kinds[first] += kinds.pop(last)
        return list(kinds.values())

    # ---- changes of all units ----

    def shard_all_alike(self) -> None:
        """One mode and group for all units: where communication binds, no change of a single unit may be faster."""
        for mode, within in product(self.modes, self._groups):
            if mode[0] != "replicate":
                move = {name: _in_mode(c, *mode)._replace(within=within) for name, c in self.choices.items()}
                self.take_if_faster(move)

    # ---- changes of single units ----

    def fill_memory(self, rounds: int) -> None:
        for _ in range(rounds):
            if not self.take_if_faster(_choose_changes(self._unit_changes(), self.now.room)):
                return

    def _unit_changes(self) -> list[_UnitChange]:
        """Alternatives for one unit of each kind, with their effect on the plan."""
        out = []
        for names in self._identical_units():
            for choice in self._alternatives(names[0]):
                moves = [(n, choice) for n in names]
                changed = self.evaluate(dict(moves[:1]))
                now, then = (e.seconds_with_state_on_device for e in (self.now, changed))
                # [Note: ties]: seconds are rounded relative to the step, memory to a byte
                out.append(_UnitChange(moves, now * round(then / now - 1, 10), round(self.now.room - changed.room)))
        return out

    def _identical_units(self) -> list[list[str]]:
        """Units of a pattern with the same choice, the last one first; a pattern's first and last units are separate groups."""
        out: dict[Any, list[str]] = {}
        for names in self._patterns():
            if self.problem.spec.tied and names[0] == self.problem.spec.units[0].name:
                continue
            for n in reversed(names):  # the first and the last unit have neighbours of other kinds
                at_end = n in (names[0], names[-1])
                out.setdefault((pattern_of(n), n if at_end else self.choices[n]), []).append(n)
        return list(out.values())

    def _alternatives(self, name: str) -> Iterator[UnitChoice]:
        """Choices of a unit that differ in one aspect."""
        now, unit = self.choices[name], self._units[name]
        found = [_in_mode(now, *mode) for mode in self.modes]
        if self.modes and now.mode != "replicate":
            by_size = [*self._groups[1:], 0]
            i = by_size.index(now.within) if now.within in by_size else 0
            found += [now._replace(within=group) for group in by_size[max(0, i - 1) : i + 2]]
        if self._recomputes:
            found += [now._replace(recompute=r, split=1) for r in ("none", "selective", "full")]
            if not self.start.layout.on_grid:
                found += [
                    now._replace(recompute="per-slice", split=s) for s in SPLITS if self.problem.may_split(unit, s)
                ]
        yield from dict.fromkeys(c for c in found if c != now and c.recompute in unit.saved)


class _UnitChange(NamedTuple):
    """The same change for identical units, and its effect on the plan if one unit makes it."""

    moves: list[tuple[str, UnitChoice]]
    seconds: float
    peak: float


def _choose_changes(changes: Sequence[_UnitChange], room: float) -> _Move:
    """The best changes in `room` bytes, as if seconds and bytes were additive."""
    kinds: dict[str, list[_UnitChange]] = {}
    for change in changes:
        kinds.setdefault(change.moves[0][0], []).append(change)
    lowest = min([0.0, *(c.peak for c in changes)])  # a knapsack needs non-negative bytes and seconds
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


def _in_mode(c: UnitChoice, mode: Any, reduce: Any) -> UnitChoice:
    """A choice in another mode; replicas are neither sliced nor sharded within groups."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return UnitChoice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
