"""A last look at the plan that the search found: would another mode for all units, for some, or for one of a few be faster?

The search chooses by estimates of each unit alone. What units do together (sums that are joined, gathers that hide behind one
another's products, heights that meet or do not) only a simulation and a replay of the whole plan know, so plans nearby are tried,
until none of them is faster. No plan is then slower, by the planner's own account, than one of a single mode that fits.

Where units are few and large, one change can need another: what is faster but holds too much is paired with what makes room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.predict import Judged, Prediction, choice_of, judged
from fourfold.planner.rules import pattern, rules_of
from fourfold.planner.units import Choice

__all__ = ["FEW", "Change", "Known", "Move", "Walk", "groups", "in_mode", "modes_of", "plainest", "polished"]

FEW = 16
"""Units that are tried one by one, and two by two, where memory binds."""
ROUNDS, PAIRS = 8, 240
"""Of few units: times that all is tried, and pairs of moves that are."""
GAIN = 1 - 1e-7
"""Of few units, what is hardly faster is not worth another mode."""
TIE = 0.01
"""What a CPU's clock and its networks leave open: plans that are as near take the same."""
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
"""The last two, where there are few units and several micro-batches."""
Move = dict[str, Choice]
"""What units are to choose instead."""
Known = dict[Any, Judged]
"""Plans that were judged, by layout and choices: ways from several plans, with several amounts of memory, cross."""


class Change(NamedTuple):
    """What a move made of a plan."""

    move: Move
    seconds: float
    peak: float


@dataclass
class Walk:
    """A way from plan to plan, each better than the one before."""

    setting: Setting
    limit: float
    plan: Plan
    few: bool
    known: Known

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

    def go(self, move: Move) -> Change | None:
        """Make the move, if it is for the better; what it would change, where its seconds were looked at."""
        tried = self._after(move)
        found = self._judged(tried)
        if tried == self.choices or (not self.few and self._cost(0.5 * self.now.seconds, found) >= self.least):
            return None
        change = self.change(move)
        if (cost := self._cost(found.seconds, found)) < (GAIN if self.few else 1.0) * self.least:
            self.now, self.peak, self.choices, self.least = found, found.peak, tried, cost
            self.plan = replace(self.plan, unit=rules_of(tried))
        return change

    def change(self, move: Move) -> Change:
        """What it would make of the plan."""
        found = self._judged(self._after(move))
        return Change(move, found.at_best - self.now.at_best, self.now.room - found.room)

    def cost(self, move: Move) -> float:
        """Of the plan after it, in seconds; infinite, where it does not fit."""
        found = self._judged(self._after(move))
        return self._cost(found.seconds, found) if self.fits(move) else float("inf")

    def fits(self, move: Move) -> bool:
        return self._cost(0.0, self._judged(self._after(move))) < float("inf")

    def _after(self, move: Move) -> dict[str, Choice]:
        """What all units choose then. A tied head is sharded as the embedding is: it is one matrix."""
        tried = self.choices | move
        if self.setting.spec.tied:
            lender, head = (self.setting.spec.units[i].name for i in (0, -1))
            mode, reduce, within = tried[lender][:3]
            tried[head] = tried[head]._replace(mode=mode, reduce=reduce, within=within)
        return tried

    def pair(self, changes: Sequence[Change | None], most: int) -> None:
        """Two moves at once, so many pairs at most, until one is for the better."""
        before = self.least
        for move in _pairs([c for c in changes if c is not None], self.now.room)[:most]:
            self.go(move)
            if self.least < before:
                break

    def _judged(self, choices: dict[str, Choice]) -> Judged:
        bare = replace(self.plan, unit=())
        key = (bare, tuple(choices.values()))
        if key not in self.known:
            self.known[key] = judged(bare, self.setting, choices, self.limit)
        return self.known[key].at(self.limit)


def polished(setting: Setting, plan: Plan, limit: float, known: Known, few: bool) -> tuple[Plan, Prediction]:
    """The plan, or a faster one with other modes that fits; from one that does not, the way leads to one that does, if any.

    `few`: units are tried one by one and two by two.
    """
    walk = Walk(setting, limit, plan, few, known)
    modes = modes_of(plan, setting) if few else MODES[:4]
    for _ in range(ROUNDS if few else 1):
        before = walk.least
        changes = [
            walk.go({n: in_mode(walk.choices[n], *mode) for n in names})
            for names in groups(setting, walk.choices, few)
            for mode in modes
        ]
        if walk.least == before and few:
            walk.pair(changes, PAIRS)
        if walk.least == before:
            break
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


def groups(setting: Setting, choices: dict[str, Choice], few: bool) -> list[list[str]]:
    """Units that change together: all, those of a pattern; of a few also those of a pattern that are alike now, and each."""
    kinds: dict[str, list[str]] = {}
    for name in choices:
        kinds.setdefault(pattern(name), []).append(name)
    if setting.spec.tied:  # the head's matrix is the embedding's
        first, last = (pattern(setting.spec.units[i].name) for i in (0, -1))
        kinds[first] += kinds.pop(last)
    groups = [list(choices), *kinds.values()]
    if few:
        for names in kinds.values():
            alike: dict[Choice, list[str]] = {}
            for n in names:
                alike.setdefault(choices[n], []).append(n)
            groups += [each for each in alike.values() if len(each) < len(names)]
        groups += [] if setting.spec.tied else [[n] for n in choices]
    return groups


def _pairs(changes: Sequence[Change], room: float) -> list[Move]:
    """Two moves that may be faster together, the most promising first.

    By the sums of what each does alone, and by how much more they would hold than there is room for: peaks do not add up.
    """
    found: list[tuple[float, float, int, Move]] = []
    for a, b in combinations(changes, 2):
        seconds, over = a.seconds + b.seconds, max(0.0, a.peak + b.peak - room)
        if seconds < 0 and not a.move.keys() & b.move.keys():
            found.append((over, seconds, len(found), a.move | b.move))
    return [move for *_, move in sorted(found)]


def in_mode(c: Choice, mode: Any, reduce: Any) -> Choice:
    """A choice in another mode; replicas are neither split nor shared in parts."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return Choice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
