"""A last look at the plan that the search found: would another mode for all units, for some, or for one of a few be faster?

The search chooses by estimates of each unit alone. What units do together (sums that are joined, gathers that hide behind one
another's products, heights that meet or do not) only a simulation and a replay of the whole plan know, so plans nearby are tried,
until none of them is faster. No plan is then slower, by the planner's own account, than one of a single mode that fits.

Where units are few and large, one change can need another: what is faster but holds too much is paired with what makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

from fourfold.model.operators import UnitSpec
from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.options import SPLITS
from fourfold.planner.predict import Judged, Prediction, choice_of, judged
from fourfold.planner.rules import pattern, rules_of
from fourfold.planner.units import Choice

__all__ = ["FEW", "Known", "filled", "plainest", "polished"]

FEW = 16
"""Units that are tried one by one, and two by two, where memory binds."""
ROUNDS, PAIRS = 8, 240
"""Of few units: times that all is tried, and pairs of moves that are."""
FILLS, TRADES = 24, 60
"""Of kinds of units: the same."""
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


class _Change(NamedTuple):
    """What a move made of a plan."""

    move: Move
    seconds: float
    peak: float


class _Step(NamedTuple):
    """A change that units of a kind can make one by one, or all at once, and what the first of them made of the plan."""

    moves: list[tuple[str, Choice]]
    one: int
    change: _Change | None

    def of(self, count: int) -> Move:
        return dict(self.moves[: count * self.one])

    @property
    def most(self) -> int:
        return len(self.moves) // self.one


@dataclass
class _Walk:
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

    def go(self, move: Move) -> _Change | None:
        """Make the move, if it is for the better; what it would change, where its seconds were looked at."""
        tried = self._after(move)
        if tried == self.choices:
            return None
        found = self._judged(tried)
        if not self.few and self._cost(0.5 * self.now.seconds, found) >= self.least:
            return None
        change = _Change(move, found.at_best - self.now.at_best, self.now.room - found.room)
        if (cost := self._cost(found.seconds, found)) < (GAIN if self.few else 1.0) * self.least:
            self.now, self.peak, self.choices, self.least = found, found.peak, tried, cost
            self.plan = replace(self.plan, unit=rules_of(tried))
        return change

    def _after(self, move: Move) -> dict[str, Choice]:
        """What all units choose then. A tied head is sharded as the embedding is: it is one matrix."""
        tried = self.choices | move
        if self.setting.spec.tied:
            lender, head = (self.setting.spec.units[i].name for i in (0, -1))
            mode, reduce, within = tried[lender][:3]
            tried[head] = tried[head]._replace(mode=mode, reduce=reduce, within=within)
        return tried

    def pair(self, changes: Sequence[_Change | None], most: int) -> None:
        """Two moves at once, so many pairs at most, until one is for the better."""
        before = self.least
        for move in _pairs([c for c in changes if c is not None], self.now.room)[:most]:
            self.go(move)
            if self.least < before:
                break

    def step(self, moves: list[tuple[str, Choice]], one: int) -> _Step:
        """Make the first so many moves, if that is for the better, or as many as there is room for."""
        before, change = self.least, self.go(dict(moves[:one]))
        if change is not None and self.least < before and len(moves) > one:
            if self.now.rate < float("inf") and change.peak > 0:  # state makes room, while that is hidden
                self.go(dict(moves[: 1 + max(0, int(self.now.room // change.peak))]))
            self.go(dict(moves[: self.most(moves)]))
        return _Step(moves, one, change)

    def exchange(self, steps: Sequence[_Step]) -> None:
        """Some units of one kind make room for some of another; the most promising first, until that is for the better."""
        before = self.least
        for move in _exchanges(steps, self.now.room, self.now.rate)[:TRADES]:
            if self._cost(0.0, self._judged(self._after(move))) < float("inf"):
                self.go(move)
            if self.least < before:
                break

    def most(self, moves: list[tuple[str, Choice]]) -> int:
        """How many of them, the first at least, can be made at once."""
        low, high = 1, len(moves) + 1
        while high - low > 1:
            half = (low + high) // 2
            fits = self._cost(0.0, self._judged(self._after(dict(moves[:half])))) < float("inf")
            low, high = (half, high) if fits else (low, half)
        return low

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
    walk = _Walk(setting, limit, plan, few, known)
    modes = _modes(plan, setting) if few else MODES[:4]
    for _ in range(ROUNDS if few else 1):
        before = walk.least
        changes = [
            walk.go({n: _in_mode(walk.choices[n], *mode) for n in names})
            for names in _groups(setting, walk.choices, few)
            for mode in modes
        ]
        if walk.least == before and few:
            walk.pair(changes, PAIRS)
        if walk.least == before:
            break
    return walk.plan, walk.now.prediction()


def filled(setting: Setting, plan: Plan, limit: float, known: Known) -> tuple[Plan, Prediction]:
    """The plan, or a faster one in which as many of alike units as there is room for have another mode, or recompute less.

    Where that does not help, some of one kind make room for some of another. Without a pipeline: there all units' seconds count.
    """
    units = {u.name: u for u in setting.spec.units}
    walk = _Walk(setting, limit, plan, True, known)
    for _ in range(FILLS):
        before, steps = walk.least, []
        for way in (-1, 1):  # from the last unit, from the first
            for names, together in _alike(setting, walk.choices, way):
                for change in _changes(plan, setting):
                    wished = [(n, change(units[n], walk.choices[n])) for n in names]
                    moves = [(n, c) for n, c in wished if c != walk.choices[n]]
                    if moves:
                        steps.append(walk.step(moves, len(moves) if together else 1))
            if walk.least < before:
                break
        if walk.least == before:
            walk.exchange(steps)
        if walk.least == before:
            break
    return walk.plan, walk.now.prediction()


def plainest(setting: Setting, plan: Plan, prediction: Prediction, limit: float) -> tuple[Plan, Prediction]:
    """Of plans that have a single mode for all units, fit, and take hardly longer, by less than TIE, the one that holds least.

    The plan itself, where there is none.
    """
    choices = {u.name: choice_of(plan, u) for u in setting.spec.units}
    best, least = (plan, prediction), float("inf")
    for mode in _modes(plan, setting):
        tried = {n: _in_mode(c, *mode) for n, c in choices.items()}
        found = judged(replace(plan, unit=()), setting, tried, limit)
        if found.fits and found.seconds <= (1 + TIE) * prediction.seconds:
            single = found.prediction()
            if single.peak.peak < least:
                best, least = (replace(plan, unit=rules_of(tried)), single), single.peak.peak
    return best


def _modes(plan: Plan, setting: Setting) -> tuple[Mode, ...]:
    return MODES if plan.micro_batches(setting.global_batch) > 1 else MODES[:4]


def _changes(plan: Plan, setting: Setting) -> Iterator[Callable[[UnitSpec, Choice], Choice]]:
    """Other modes, and less or more to recompute."""
    for mode, reduce in _modes(plan, setting):
        yield partial(_moded, mode=mode, reduce=reduce)
    splits = SPLITS if plan.mesh.row * plan.mesh.col == 1 else ()
    for name, split in [("none", 1), ("selective", 1), ("full", 1), *(("per-slice", s) for s in splits)]:
        yield partial(_redone, name=name, split=split)


def _moded(unit: UnitSpec, c: Choice, mode: Any, reduce: Any) -> Choice:
    return _in_mode(c, mode, reduce)


def _redone(unit: UnitSpec, c: Choice, name: Any, split: int) -> Choice:
    """A choice that recomputes so, where the unit can."""
    if name not in unit.saved or (split > 1 and (c.mode == "replicate" or unit.slices < split)):
        return c
    return c._replace(recompute=name, split=split)


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
    return [move for *_, move in sorted(found)]


def _exchanges(steps: Sequence[_Step], room: float, rate: float) -> list[Move]:
    """So many of a step that makes room and so many of one that takes it, as they add up, those that save most first.

    `rate`: seconds of a byte for which there is no room.
    """
    found: list[tuple[float, int, Move]] = []
    freeing = [(s, s.change) for s in steps if s.change and s.change.peak < 0]
    faster = [(s, s.change) for s in steps if s.change and s.change.seconds < 0]
    for (a, frees), (b, saves) in product(freeing, faster):
        if dict(a.moves).keys() & dict(b.moves).keys():
            continue
        best = (0.0, 0, 0)
        for count in range(1, a.most + 1):
            left = room - count * frees.peak
            full = max(0, min(b.most, int(left // saves.peak))) if saves.peak > 0 else b.most
            for others in {full, min(full + 1, b.most), b.most} if rate < float("inf") else {full}:
                over = max(0.0, others * saves.peak - left) - max(0.0, -room)
                seconds = count * frees.seconds + others * saves.seconds + (rate * over if over else 0.0)
                best = min(best, (seconds, count, others))
        if best[0] < 0:
            found.append((best[0], len(found), a.of(best[1]) | b.of(best[2])))
    return [move for *_, move in sorted(found)]


def _alike(setting: Setting, choices: dict[str, Choice], way: int) -> list[tuple[list[str], bool]]:
    """Units of a pattern that choose the same now, from the first or (-1) from the last; those that change together."""
    kinds: list[tuple[list[str], bool]] = []
    for names in _groups(setting, choices, few=False)[1:]:
        alike: dict[Choice, list[str]] = {}
        for n in names[::way]:
            alike.setdefault(choices[n], []).append(n)
        tied = setting.spec.tied and names[0] == setting.spec.units[0].name
        kinds += [] if tied else [(each, False) for each in alike.values() if way < 0 or len(each) > 1]
        kinds += [(names, True)] if way < 0 and len(names) > 1 else []
    return kinds


def _in_mode(c: Choice, mode: Any, reduce: Any) -> Choice:
    """A choice in another mode; replicas are neither split nor shared in parts."""
    if (c.mode, c.reduce) == (mode, reduce):
        return c
    if mode == "replicate":
        return Choice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce=reduce)
