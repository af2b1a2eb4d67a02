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
from fourfold.planner.predict import Prediction, choice_of, judged
from fourfold.planner.rules import pattern, rules_of
from fourfold.planner.units import Choice

__all__ = ["FEW", "polished"]

FEW = 16
"""Units that are tried one by one, and two by two, where memory binds."""
ROUNDS, PAIRS = 8, 240
GAIN = 0.999
"""Of few units, what is not faster by a thousandth is not worth another mode."""
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
Move = dict[str, Mode]


class _Change(NamedTuple):
    """What a move made of a plan."""

    move: Move
    seconds: float
    peak: float


@dataclass
class _Walk:
    """A way from plan to plan, each better than the one before."""

    setting: Setting
    limit: float
    plan: Plan
    prediction: Prediction
    choices: dict[str, Choice]
    few: bool

    def __post_init__(self) -> None:
        self.least = self._cost(self.prediction.seconds, self.prediction)

    @property
    def peak(self) -> float:
        return self.prediction.peak.peak

    def _cost(self, seconds: float, held: Any) -> float:
        """Once the plan fits, it goes on fitting; before, what is too much counts."""
        host = self.setting.cluster.host_memory
        over = max(m.peak for m in held.memory) / self.limit - 1
        if any(m.host > host for m in held.memory) or (over > 0 and self.peak <= self.limit):
            return float("inf")
        return seconds * (1 + PENALTY * max(0.0, over))

    def go(self, move: Move) -> _Change | None:
        """Make the move, if it is for the better; what it would change, where its seconds were looked at."""
        tried = self.choices | {n: _in_mode(self.choices[n], *mode) for n, mode in move.items()}
        if tried == self.choices:
            return None
        plan = replace(self.plan, unit=rules_of(tried))
        found = judged(plan, self.setting, tried, self.limit)
        now, then = self.prediction, max(m.peak for m in found.memory)
        if not self.few and self._cost(0.5 * now.seconds, found) >= self.least:
            return None
        change = _Change(move, found.seconds - now.seconds, then - self.peak)
        if (cost := self._cost(found.seconds, found)) < (GAIN if self.few else 1.0) * self.least:
            self.plan, self.prediction, self.choices, self.least = plan, found.prediction(), tried, cost
        return change


def polished(
    setting: Setting, plan: Plan, prediction: Prediction, limit: float, few: bool = False
) -> tuple[Plan, Prediction]:
    """The plan, or a faster one with other modes that fits; from one that does not, the way leads to one that does, if any.

    `few`: units are tried one by one and two by two.
    """
    walk = _Walk(setting, limit, plan, prediction, {u.name: choice_of(plan, u) for u in setting.spec.units}, few)
    modes = MODES[: None if few and plan.micro_batches(setting.global_batch) > 1 else 4]
    for _ in range(ROUNDS if few else 1):
        before = walk.least
        changes = [
            walk.go(dict.fromkeys(names, mode)) for names in _groups(setting, walk.choices, few) for mode in modes
        ]
        if walk.least == before and few:
            for move in _pairs([c for c in changes if c is not None], limit - walk.peak):
                walk.go(move)
                if walk.least < before:
                    break
        if walk.least == before:
            break
    return walk.plan, walk.prediction


def _groups(setting: Setting, choices: dict[str, Choice], few: bool) -> list[list[str]]:
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


def _pairs(changes: Sequence[_Change], room: float) -> list[Move]:
    """Two moves that may be faster together, the most promising first.

    By the sums of what each does alone, and by how much more they would hold than there is room for: peaks do not add up.
    """
    found: list[tuple[float, float, int, Move]] = []
    for a, b in combinations(changes, 2):
        seconds, over = a.seconds + b.seconds, max(0.0, a.peak + b.peak - room)
        if seconds < 0 and not a.move.keys() & b.move.keys():
            found.append((over, seconds, len(found), a.move | b.move))
    return [move for *_, move in sorted(found)[:PAIRS]]


def _in_mode(c: Choice, mode: Any, reduce: Any) -> Choice:
    """A choice in another mode; replicas are neither split nor shared in parts."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return Choice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
