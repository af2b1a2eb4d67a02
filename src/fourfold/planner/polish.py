"""A last look at the plan that the search found: would another mode for all units, or for all of a kind, be faster?

The search chooses by estimates of each unit alone. What units do together (sums that are joined, gathers that hide behind one
another's products, heights that meet or do not) only a simulation and a replay of the whole plan know, so plans nearby are tried,
until none of them is faster. No plan is then slower, by the planner's own account, than one of a single mode that fits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.predict import Judged, Prediction, choice_of, judged
from fourfold.planner.rules import pattern, rules_of
from fourfold.planner.units import Choice

__all__ = ["Change", "Known", "Move", "Walk", "groups", "in_mode", "modes_of", "plainest", "polished"]

TIE = 0.01
"""What a CPU's clock and its networks leave open: plans that are as near take the same."""
GAIN = 1 - 1e-7
"""What is hardly faster is not worth another mode."""
PENALTY = 20.0
"""Of a plan that needs a hundredth too much memory: so many hundredths of its seconds."""
Mode = tuple[Any, Any]
MODES: tuple[Mode, ...] = (
    ("replicate", "step"),
    ("zero2", "step"),
    ("keep", "step"),
    ("zero3", "step"),
    ("keep", "micro-batch"),
    ("zero3", "micro-batch"),
)
"""The last two, where there are several micro-batches."""
Move = dict[str, Choice]
"""What units are to choose instead."""
Known = dict[Any, Judged]
"""Plans that were judged, by layout and choices: ways from several plans, with several amounts of memory, cross."""


class Change(NamedTuple):
    """What a move would make of a plan: how much longer it takes, and how much more it holds."""

    seconds: float
    peak: float


@dataclass
class Walk:
    """A way from plan to plan, each better than the one before."""

    setting: Setting
    limit: float
    plan: Plan
    known: Known
    fixed: Collection[str] = ()
    """Of "mode" and "recompute", what is decided."""

    def __post_init__(self) -> None:
        self.choices = {u.name: choice_of(self.plan, u) for u in self.setting.spec.units}
        self.now = self._judged(self.choices)
        self.peak = self.now.peak
        self.least = self._cost(self.now.seconds, self.now)

    def _cost(self, seconds: float, held: Judged) -> float:
        """Once the plan fits, it goes on fitting; before, what is too much counts."""
        host = self.setting.cluster.host_memory
        over = held.peak / self.limit - 1
        if any(m.host > host for m in held.memory) or (over > 0 and self.peak <= self.limit):
            return float("inf")
        return seconds * (1 + PENALTY * max(0.0, over))

    def go(self, move: Move) -> None:
        """Make the move, if it is for the better."""
        tried = self._after(move)
        found = self._judged(tried)
        if tried == self.choices or self._cost(0.5 * self.now.seconds, found) >= self.least:
            return
        if (cost := self._cost(found.seconds, found)) < GAIN * self.least:
            self.now, self.peak, self.choices, self.least = found, found.peak, tried, cost
            self.plan = replace(self.plan, unit=rules_of(tried))

    def change(self, move: Move) -> Change:
        """What it would make of the plan."""
        found = self._judged(self._after(move))
        return Change(found.at_best - self.now.at_best, self.now.room - found.room)

    def cost(self, move: Move) -> float:
        """Of the plan after it, in seconds; infinite, where it does not fit."""
        found = self._judged(self._after(move))
        return self._cost(found.seconds, found) if self.fits(move) else float("inf")

    def fits(self, move: Move) -> bool:
        return self._cost(0.0, self._judged(self._after(move))) < float("inf")

    def _after(self, move: Move) -> dict[str, Choice]:
        """What all units choose then. A tied head is sharded as the embedding is: it is one matrix."""
        if "recompute" in self.fixed:  # slices are not for replicas
            move = {name: c for name, c in move.items() if c.recompute == self.choices[name].recompute}
        tried = self.choices | move
        if self.setting.spec.tied:
            lender, head = (self.setting.spec.units[i].name for i in (0, -1))
            mode, reduce, within = tried[lender][:3]
            tried[head] = tried[head]._replace(mode=mode, reduce=reduce, within=within)
        return tried

    def _judged(self, choices: dict[str, Choice]) -> Judged:
        bare = replace(self.plan, unit=())
        key = (bare, tuple(choices.values()))
        if key not in self.known:
            self.known[key] = judged(bare, self.setting, choices, self.limit)
        return self.known[key].at(self.limit)


def polished(
    setting: Setting, plan: Plan, limit: float, known: Known, fixed: Collection[str] = ()
) -> tuple[Plan, Prediction]:
    """The plan, or a faster one with other modes that fits; from one that does not, the way leads to one that does, if any."""
    walk = Walk(setting, limit, plan, known, fixed)
    for names in groups(setting, walk.choices):
        for mode in modes_of(plan, setting):
            walk.go({n: in_mode(walk.choices[n], *mode) for n in names})
    return walk.plan, walk.now.prediction()


def plainest(setting: Setting, plan: Plan, prediction: Prediction, limit: float) -> tuple[Plan, Prediction]:
    """Of plans that have a single mode for all units, fit, and take hardly longer, by less than TIE, the one that holds least.

    The plan itself, where there is none.
    """
    choices = {u.name: choice_of(plan, u) for u in setting.spec.units}
    best, least = (plan, prediction), float("inf")
    for mode in modes_of(plan, setting):
        tried = {n: in_mode(c, *mode) for n, c in choices.items()}
        found = judged(replace(plan, unit=()), setting, tried, limit)
        if found.fits and found.seconds <= (1 + TIE) * prediction.seconds:
            single = found.prediction()
            if single.peak.peak < least:
                best, least = (replace(plan, unit=rules_of(tried)), single), single.peak.peak
    return best


def modes_of(plan: Plan, setting: Setting) -> tuple[Mode, ...]:
    return MODES if plan.micro_batches(setting.global_batch) > 1 else MODES[:4]


def groups(setting: Setting, choices: dict[str, Choice]) -> list[list[str]]:
    """Units that change together: all, and those of a pattern."""
    kinds: dict[str, list[str]] = {}
    for name in choices:
        kinds.setdefault(pattern(name), []).append(name)
    if setting.spec.tied:  # the head's matrix is the embedding's
        first, last = (pattern(setting.spec.units[i].name) for i in (0, -1))
        kinds[first] += kinds.pop(last)
    return [list(choices), *kinds.values()]


def in_mode(c: Choice, mode: Any, reduce: Any) -> Choice:
    """A choice in another mode; replicas are neither split nor shared in parts."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return Choice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
