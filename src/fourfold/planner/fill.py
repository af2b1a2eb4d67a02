"""The fastest plan without a pipeline filled up: what room is left goes to some of its units, and some make room for others.

All steps are measured by replay and simulation, one unit of a kind at a time; then as many of each are taken as would be best,
were seconds and bytes sums: a knapsack. What it chooses is judged as a whole; where that is not faster, as many of one step as
there is room for are tried, then so many of one that makes room with so many of another. Until nothing helps: from wherever this
starts, it mostly ends at the same plan, so that more memory ends at a faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any, NamedTuple

from fourfold.model.operators import UnitSpec
from fourfold.plan import Plan
from fourfold.planner.choice import Chosen, Group, choose
from fourfold.planner.layout import Setting
from fourfold.planner.options import SPLITS
from fourfold.planner.polish import Change, Known, Move, Walk, groups, in_mode, modes_of
from fourfold.planner.predict import Prediction
from fourfold.planner.rules import rules_of
from fourfold.planner.units import Choice

__all__ = ["Filled", "Filling", "filled", "turned"]

ROUNDS, TRADES = 24, 60
"""Times that all steps are measured, and exchanges of two that are tried."""
WIDER = (0.0, 0.001, -0.001, 0.003, -0.003, 0.01, -0.01, -0.05)
"""Of a device's memory: more or less room than there is, for which all steps are chosen at once."""
NEARBY, TURNS, HOPE = 0.002, 3, 0.0003
"""Of a step's seconds: what another choice of a large unit may cost more; how many are tried; and of those that then are no
slower by more, others' exchanges, too."""

GIB = 2**30


class Filled(NamedTuple):
    """A plan that uses what memory there is."""

    plan: Plan
    prediction: Prediction
    price: float
    """Seconds that a GiB more would save."""


Filling = Callable[[Setting, Plan, float, Known, Collection[str]], Filled]
"""From a plan to one that uses so many bytes of a device; what of "mode" and "recompute" is decided stays."""


class _Step(NamedTuple):
    """A change that units of a kind can make one by one, or (`together`) all at once, and what the first makes of the plan."""

    moves: list[tuple[str, Choice]]
    together: bool
    first: Change

    @property
    def most(self) -> int:
        return 1 if self.together else len(self.moves)

    def of(self, count: int) -> Move:
        return dict(self.moves if self.together and count else self.moves[:count])


def filled(setting: Setting, plan: Plan, limit: float, known: Known, fixed: Collection[str] = ()) -> Filled:
    """The plan, or a faster one with other modes, and more or less recomputed, for as many units as there is room for."""
    walk = Walk(setting, limit, plan, known, fixed)
    _climb(walk)
    return _done(walk)


def turned(setting: Setting, plan: Plan, limit: float, known: Known, fixed: Collection[str] = ()) -> Filled:
    """One that is filled, or a faster one in which the embedding or the head chooses something else, and all others with it.

    These are large, and hold most at other times than the layers: no step of one alone leads there.
    """
    walk = Walk(setting, limit, plan, known, fixed)
    for name, choice in _nearby(walk):
        other = Walk(setting, limit, replace(walk.plan, unit=rules_of(walk.choices | {name: choice})), known, fixed)
        _climb(other, name)
        if other.peak <= limit and other.least < (1 + HOPE) * walk.least:
            _climb(other)
            walk = other if other.least < walk.least else walk
    return _done(walk)


def _done(walk: Walk) -> Filled:
    steps, room = _steps(walk), walk.now.room
    now, more = (_knapsack(steps, room + extra)[0] for extra in (0, GIB))
    saved = now.seconds - more.seconds if now and more else 0.0
    return Filled(walk.plan, walk.now.prediction(), min(max(0.0, saved), walk.now.rate * GIB))


def _climb(walk: Walk, but: str = "") -> None:
    """From plan to plan, until nothing helps; `but`: a unit that stays as it is, while all others are chosen at once."""
    for _ in range(2 if but else ROUNDS):
        before, steps = walk.least, [s for s in _steps(walk) if but not in dict(s.moves)]
        for attempt in (_all_at_once,) if but else (_all_at_once, _many_of_one, _exchange):
            attempt(walk, steps)
            if walk.least < before:
                break
        else:
            break


def _nearby(walk: Walk) -> list[tuple[str, Choice]]:
    """What a unit that is alone in its kind could choose, and cost little more if bytes had their price; the least first."""
    spec = walk.setting.spec
    if spec.tied:  # these change together
        return []
    steps, few = _steps(walk), {spec.units[0].name, spec.units[-1].name}
    chosen, _ = _knapsack(steps, walk.now.room)
    if chosen is None:
        return []
    more = {  # modes that are alike here, once
        (s.first.seconds, s.first.peak): (s.first.seconds + chosen.price * s.first.peak, s.moves[0])
        for s in steps
        if s.moves[0][0] in few and s.first.peak
    }
    return [move for seconds, move in sorted(more.values()) if seconds <= NEARBY * walk.now.seconds][:TURNS]


def _steps(walk: Walk) -> list[_Step]:
    units = {u.name: u for u in walk.setting.spec.units}
    out = []
    for names, together in _alike(walk.setting, walk.choices):
        for change in _changes(walk):
            wished = [(n, change(units[n], walk.choices[n])) for n in names]
            moves = [(n, c) for n, c in wished if c != walk.choices[n]]
            if moves:
                out.append(_Step(moves, together, walk.change(dict(moves if together else moves[:1]))))
    return out


# ---- which steps, and how many of each ----


def _all_at_once(walk: Walk, steps: Sequence[_Step]) -> None:
    """The best of what a knapsack chooses, with a little more or less room than there is."""
    moves = [_chosen(steps, walk.now.room + share * walk.limit, exact=not share) for share in WIDER]
    walk.go(min(moves, key=walk.cost))


def _chosen(steps: Sequence[_Step], room: float, exact: bool) -> Move:
    """What would be best of all that they can do, were seconds and bytes sums."""
    chosen, kinds = _knapsack(steps, room, exact)
    move: Move = {}
    if chosen is not None:
        for counts, kind in zip(chosen.counts, kinds, strict=True):
            done = 0
            for option, n in counts.items():
                if option:
                    move.update(kind[option - 1].moves[done : done + n])
                    done += n
    return move


def _knapsack(steps: Sequence[_Step], room: float, exact: bool = False) -> tuple[Chosen | None, list[list[_Step]]]:
    """How many of each, by kind of unit; option 0 is to stay."""
    kinds: dict[str, list[_Step]] = {}
    for s in steps:
        if not s.together:
            kinds.setdefault(s.moves[0][0], []).append(s)
    lowest = min([0.0, *(s.first.peak for s in steps)])  # a knapsack's bytes and seconds are not below 0
    fastest = min([0.0, *(s.first.seconds for s in steps)])
    rows = []
    for kind in kinds.values():
        options = [(0.0, 0.0), *((s.first.peak, s.first.seconds) for s in kind)]
        rows.append(Group([(peak - lowest, seconds - fastest) for peak, seconds in options], kind[0].most))
    return choose(rows, room - lowest * sum(row.count for row in rows), exact=exact), list(kinds.values())


def _many_of_one(walk: Walk, steps: Sequence[_Step]) -> None:
    """Every step that helps, and as many of it as there is room for."""
    for s in steps:
        before = walk.least
        walk.go(s.of(1))
        if walk.least < before:
            if walk.now.rate < inf and s.first.peak > 0:  # state makes room, while that is hidden
                walk.go(s.of(1 + max(0, int(walk.now.room // s.first.peak))))
            walk.go(s.of(_most(walk, s)))
            count = 2
            while walk.least < before and count <= s.most:  # or as many as help
                before = walk.least
                walk.go(s.of(count))
                count *= 2


def _most(walk: Walk, step: _Step) -> int:
    """How many of it, one at least, fit."""
    low, high = 1, step.most + 1
    while high - low > 1:
        half = (low + high) // 2
        low, high = (half, high) if walk.fits(step.of(half)) else (low, half)
    return low


def _exchange(walk: Walk, steps: Sequence[_Step]) -> None:
    """So many of a step that makes room and so many of one that takes it, the most promising first, until that helps."""
    before = walk.least
    for move in _exchanges(steps, walk.now.room, walk.now.rate)[:TRADES]:
        if walk.fits(move):
            walk.go(move)
        if walk.least < before:
            return


def _exchanges(steps: Sequence[_Step], room: float, rate: float) -> list[Move]:
    """So many of a step that makes room and so many of one that takes it, as they add up, those that save most first.

    `rate`: seconds of a byte for which there is no room.
    """
    found: list[tuple[float, int, Move]] = []
    freeing, faster = [s for s in steps if s.first.peak < 0], [s for s in steps if s.first.seconds < 0]
    for a, b in product(freeing, faster):
        frees, saves = a.first, b.first
        if dict(a.moves).keys() & dict(b.moves).keys():
            continue
        best = (0.0, 0, 0)
        for count in range(1, a.most + 1):
            left = room - count * frees.peak
            full = max(0, min(b.most, int(left // saves.peak))) if saves.peak > 0 else b.most
            for others in {full, min(full + 1, b.most), b.most} if rate < inf else {full}:
                over = max(0.0, others * saves.peak - left) - max(0.0, -room)
                seconds = count * frees.seconds + others * saves.seconds + (rate * over if over else 0.0)
                best = min(best, (seconds, count, others))
        if best[0] < 0:
            found.append((best[0], len(found), a.of(best[1]) | b.of(best[2])))
    return [move for *_, move in sorted(found)]


# ---- the steps there are ----


def _alike(setting: Setting, choices: dict[str, Choice]) -> list[tuple[list[str], bool]]:
    """Units of a pattern that choose the same now, from the last; the first and the last alone; those that change together."""
    kinds: list[tuple[list[str], bool]] = []
    for names in groups(setting, choices)[1:]:
        if not (setting.spec.tied and names[0] == setting.spec.units[0].name):
            alike: dict[Any, list[str]] = {}
            for n in reversed(names):  # what is beside the first and the last is of another kind
                alike.setdefault(n if n in (names[0], names[-1]) else choices[n], []).append(n)
            kinds += [(each, False) for each in alike.values()]
        if len(names) > 1:
            kinds.append((names, True))
    return kinds


def _changes(walk: Walk) -> Iterator[Callable[[UnitSpec, Choice], Choice]]:
    """Other modes, and less or more to recompute, where that is open."""
    if "mode" not in walk.fixed:
        for mode, reduce in modes_of(walk.plan, walk.setting):
            yield partial(_moded, mode=mode, reduce=reduce)
    if "recompute" not in walk.fixed:
        splits = SPLITS if walk.plan.mesh.row * walk.plan.mesh.col == 1 else ()
        for name, split in [("none", 1), ("selective", 1), ("full", 1), *(("per-slice", s) for s in splits)]:
            yield partial(_redone, name=name, split=split)


def _moded(unit: UnitSpec, c: Choice, mode: Any, reduce: Any) -> Choice:
    return in_mode(c, mode, reduce)


def _redone(unit: UnitSpec, c: Choice, name: Any, split: int) -> Choice:
    """A choice that recomputes so, where the unit can."""
    if name not in unit.saved or (split > 1 and (c.mode == "replicate" or unit.slices < split)):
        return c
    return c._replace(recompute=name, split=split)
