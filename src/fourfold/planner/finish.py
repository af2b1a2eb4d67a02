"""Plans of layouts, made once for each amount of memory; and a last look at the best.

[Note: a ladder of memory]
More memory or bandwidth must not make a plan slower, but the choice of units is a knapsack's, whose sums are not what replay and
simulation find: with less, something better may be found. So the plans of some lesser amounts are found, too, each as if there
were no more, some as if networks were slower, some with what the last unit recomputes decided: it holds most for a while.
Amounts are rungs of one ladder, whatever the memory: those that are tried for a little less memory are tried for a little more.
What is near the fastest of them, with other modes, is tried as well (`polish`). At last, without a pipeline, the memory that is
left is used up, unit by unit (`fill`): from wherever that starts, it mostly ends at the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from fourfold.plan import Plan
from fourfold.planner.build import Candidate, build_out
from fourfold.planner.fill import Filling, filled, turned
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import Constraints
from fourfold.planner.options import Solver
from fourfold.planner.polish import FEW, Known, plainest, polished
from fourfold.planner.predict import Prediction, fits, predict
from fourfold.planner.units import Choice

__all__ = ["Maker", "rung_below"]

HOPE, NEAR = 0.03, 0.01
"""Plans that are slower than the best by no more are polished; of those, the ones that are nearer are looked at once more."""
POLISHED = 6
"""Of what the best layout's units choose for several amounts of memory, how many are polished: the fastest; of others, two.
Where units are few: of the best layout's all, of others so many."""
SLOWER = (0.9, 0.6)
"""Of the networks' bandwidth: what is chosen as if there were so much may be better with all of it, too."""
RUNGS = 256
"""Amounts of memory for which plans are sought, of each doubling ([Note: a ladder of memory])."""
ABOVE = (0, 8, 18)
"""Rungs up from an amount: what is chosen for more than it may fit with little changed."""
FILLED = 3
"""Of the layouts that were polished, how many of the fastest are filled up."""
LOOKED = 3
"""Of plans within HOPE, how many are looked at with a little less memory."""


class _Start(NamedTuple):
    """What is polished, and the memory for which."""

    seconds: float
    candidate: Candidate
    limit: float


class Maker:
    """Makes plans of layouts in `limit` bytes of a device, and remembers them."""

    def __init__(self, setting: Setting, solver: Solver, wanted: Constraints, limit: float):
        self.setting, self.wanted, self.limit = setting, wanted, limit
        self._known: dict[tuple[Layout, float, float, Choice | None], Candidate | None] = {}
        self._judged: Known = {}
        self._others: dict[tuple[float, Choice | None], tuple[Setting, Solver]] = {(1.0, None): (setting, solver)}

    def fastest(self, ranked: list[Candidate], many: bool) -> Candidate:
        """Of some plans, the fastest first, and of what is near them the fastest; of `many` layouts, the first alone."""
        hope = (1 + HOPE) * ranked[0].prediction.seconds
        first = [self._polished(c, self.limit) for c in ranked[: 1 if many else None] if c.prediction.seconds <= hope]
        first = sorted(first, key=lambda c: c.prediction.seconds)[:LOOKED]
        few = len(self.setting.spec.units) <= FEW and any(c.price > 0 for c in first)
        limits = [self.limit, *_lower(self.limit)]
        best = [min([c.prediction.seconds, *(s.seconds for s in self._starts(c.layout, limits, many))]) for c in first]
        done = list(first)
        for c, seconds in zip(first, best, strict=True):
            if seconds <= (1 + NEAR) * min(best):
                leads = seconds == min(best)
                starts = self._starts(c.layout, limits, many, few, () if many else SLOWER)
                wanted = len(starts) if few and leads else POLISHED if few or leads else 2
                done += [self._polished(s.candidate, s.limit, few) for s in starts[:wanted]]
        done = [c for c in done if fits(c.prediction.memory, self.setting.cluster, self.limit)] or ranked[:1]
        done = sorted(done, key=lambda c: self._at(c, self.limit).seconds)
        chosen = min([self._settled(c) for c in [*done, *self._full(done, many)]], key=lambda c: c.prediction.seconds)
        return self._plainest(chosen) if self.setting.cluster.device.kind == "cpu" else chosen

    def _plainest(self, best: Candidate) -> Candidate:
        """The plan, or one with a single mode that takes hardly longer."""
        if "mode" in self.wanted.fixed or best.layout.replicas == 1:
            return best
        plan, prediction = plainest(self.setting, best.plan, best.prediction, self.limit)
        return replace(best, plan=plan, prediction=prediction)

    def _starts(
        self, layout: Layout, limits: list[float], many: bool, few: bool = False, slower: Sequence[float] = ()
    ) -> list[_Start]:
        """What is chosen for so much memory, for a little more, or with a slower network; the fastest, as it is here, first.

        With the optimizer's state on the device and where there is room, unless the user said where or layouts are many.
        """
        homes = [layout]
        if self._movable and not many:
            homes = [replace(layout, optimizer="device"), replace(layout, optimizer="auto")]
        found: dict[Plan, _Start] = {}
        for home, limit, up in product(homes, limits, ABOVE if few else ABOVE[:1]):
            c = self.built(home, _amount(_rung(limit) + up) if up else limit)
            if c is not None and c.plan not in found:
                found[c.plan] = _Start(self._at(c, self.limit).seconds, c, limit)
        lasts = self._lasts(layout) if layout.mesh.pipe == 1 and not (many or few) else []
        others = [*((share, None) for share in slower), *((1.0, last) for last in lasts)]
        for home, (share, last) in product(homes, others):
            c = self.built(home, self.limit, share, last)
            if c is not None and c.plan not in found:
                found[c.plan] = _Start(c.prediction.seconds, c, self.limit)
        return sorted(found.values(), key=lambda s: s.seconds)

    @property
    def _movable(self) -> bool:
        """Whether it is left open where the optimizer's state is."""
        return self.wanted.get("optimizer", "auto") == "auto" and self.setting.cluster.device.kind != "cpu"

    def _lasts(self, layout: Layout) -> list[Choice]:
        """What the last unit may recompute: it holds most for a while, of which the sums of units know least."""
        return [o.choice for o in self._others[1.0, None][1].recompute(layout, self.setting.spec.units[-1].kind)]

    def built(
        self, layout: Layout, limit: float, bandwidth: float = 1.0, last: Choice | None = None
    ) -> Candidate | None:
        """The layout's plan with so much memory, chosen as if networks had that share of their bandwidth.

        `last`: with what the last unit recomputes decided.
        """
        key = (layout, limit, bandwidth, last)
        if key not in self._known:
            setting, solver = self._with(bandwidth, last)
            c = build_out(setting, solver, layout, limit)
            if c is not None and setting is not self.setting:
                c = replace(c, prediction=predict(c.plan, self.setting, limit))
            self._known[key] = c
        return self._known[key]

    def _with(self, bandwidth: float, last: Choice | None) -> tuple[Setting, Solver]:
        if (bandwidth, last) not in self._others:
            setting, solver = self._others[1.0, None]
            if bandwidth != 1.0:
                setting = replace(setting, cluster=setting.cluster.what_if({"bandwidth": f"x{bandwidth}"}))
            self._others[bandwidth, last] = setting, Solver(setting, solver.fixed, last)
        return self._others[bandwidth, last]

    def _polished(self, c: Candidate, limit: float, few: bool = False) -> Candidate:
        if "mode" in self.wanted.fixed or c.layout.replicas == 1:
            return c
        plan, prediction = polished(self.setting, c.plan, limit, self._judged, few)
        return replace(c, plan=plan, prediction=prediction)

    def _full(self, done: list[Candidate], many: bool) -> list[Candidate]:
        """The fastest layouts' plans with what room is left given to some units; then with what state has no room elsewhere."""
        if {"mode", "recompute"} & self.wanted.fixed.keys():
            return []
        apart: dict[Layout, Candidate] = {}
        for c in sorted(done, key=lambda c: c.layout.optimizer != "device"):
            if c.layout.mesh.pipe == 1:
                apart.setdefault(replace(c.layout, optimizer="device"), c)
        first = sorted(apart.values(), key=lambda c: self._at(c, self.limit).seconds)[:FILLED]
        full = sorted((self._filled(c) for c in first), key=lambda c: c.prediction.seconds)
        if not full:
            return []
        best = full[0]
        if self._movable and best.layout.optimizer == "device":
            plan = replace(best.plan, memory=replace(best.plan.memory, optimizer="auto"))
            moved = self._filled(replace(best, layout=replace(best.layout, optimizer="auto"), plan=plan))
            best = min(best, moved, key=lambda c: c.prediction.seconds)
        return [*full, best if many else self._filled(best, turned)]

    def _filled(self, c: Candidate, by: Filling = filled) -> Candidate:
        full = by(self.setting, c.plan, self.setting.cluster.usable, self._judged)
        return replace(c, plan=full.plan, prediction=full.prediction, price=full.price)

    def _at(self, c: Candidate, limit: float) -> Prediction:
        """With so much memory, of which state may take what is left."""
        return c.prediction if c.layout.optimizer != "auto" else predict(c.plan, self.setting, limit)

    def _settled(self, c: Candidate) -> Candidate:
        """With as much of the optimizer's state on the device as there is room for, where that is left open."""
        if c.layout.optimizer != "auto":
            return c
        prediction = predict(c.plan, self.setting)
        state = replace(c.plan.memory, device_state=str(int(prediction.device_state)))
        return replace(c, plan=replace(c.plan, memory=state), prediction=prediction)


def rung_below(amount: float) -> float:
    """The highest amount on the ladder that is not above this one."""
    return _amount(_rung(amount))


def _rung(amount: float) -> int:
    """The highest that is not above the amount."""
    rung = math.floor(RUNGS * math.log2(amount))
    return rung + 1 if _amount(rung + 1) <= amount else rung if _amount(rung) <= amount else rung - 1


def _amount(rung: int) -> float:
    return float(math.floor(2.0 ** (rung / RUNGS)))


def _lower(amount: float) -> list[float]:
    """The amounts of some rungs below one, the highest first: of four rungs one, down to 4 percent less; of eight, to 8."""
    top = _rung(amount)
    return [_amount(k) for k in range(top - 1, top - 33, -1) if k % (4 if k >= top - 16 else 8) == 0]
