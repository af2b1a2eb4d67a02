"""Plans of layouts, each made once; and a last look at the best.

[Note: several beginnings]
The choice of units is a knapsack's, whose sums are not what replay and simulation find: one that is a little worse as sums may be
better as a plan. So several are made of the layouts that are near the fastest: with the optimizer's state on the device or where
there is room, as if networks were slower; without a pipeline, with what the last unit recomputes decided (it holds most for a
while). What is near the fastest of them, with other modes, is tried as well (`polish`).

More memory or bandwidth should not make a plan slower. Without a pipeline, the memory that is left is used up at last, unit by
unit (`fill`), which mostly ends at the same plan, wherever it starts. With one, plans of some lesser amounts are found, too, each
as if there were no more. Amounts are rungs of one ladder: those that are tried for a little less are tried for a little more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from fourfold.plan import Plan
from fourfold.planner.build import Candidate, build_out
from fourfold.planner.constraints import Constraints
from fourfold.planner.fill import GIB, Filling, filled, turned
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.options import Solver
from fourfold.planner.polish import Known, plainest, polished
from fourfold.planner.predict import Prediction, fits, predict
from fourfold.planner.units import Choice

__all__ = ["Maker", "rung_below"]

HOPE, NEAR = 0.03, 0.02
"""Plans that are slower than the best by no more are polished; of those, the ones that are nearer are looked at once more."""
POLISHED = 6
"""Of a layout's plans, how many of the fastest are polished; where it is not itself the fastest, two."""
SLOWER = (0.9, 0.8, 0.6)
"""Of the networks' bandwidth: what is chosen as if there were so much may be better with all of it, too."""
RUNGS = 256
"""Amounts of memory for which plans are sought, of each doubling."""
FILLED = 3
"""Of the layouts that were polished, how many of the fastest are filled up, each from its STARTS fastest plans; of many,
from its fastest."""
STARTS = 2
LOOKED = 3
"""Of plans within HOPE, how many are looked at once more."""


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
        done = sorted(first, key=lambda c: c.prediction.seconds)[:LOOKED]
        least = done[0].prediction.seconds
        for c in list(done):
            if c.prediction.seconds <= (1 + NEAR) * least:
                wanted = POLISHED if c.prediction.seconds == least else 2
                done += [self._polished(start, limit) for start, limit in self._starts(c.layout, many)[:wanted]]
        done = [c for c in done if fits(c.prediction.memory, self.setting.cluster, self.limit)] or ranked[:1]
        done = sorted(done, key=lambda c: self._at(c, self.limit).seconds)
        full = [self._settled(c) for c in self._full(done, many)]
        chosen = min([*map(self._settled, done), *full], key=lambda c: c.prediction.seconds)
        chosen = self._plainest(chosen) if self.setting.cluster.device.kind == "cpu" else chosen
        filled = [c.price for c in full if c.plan == chosen.plan]
        return replace(chosen, price=max([0.0, *filled]) or self._price(chosen.layout))

    def _price(self, layout: Layout) -> float:
        """Seconds that a GiB more would save, as the layout's units choose."""
        cluster = self.setting.cluster
        more = replace(self.setting, cluster=cluster.what_if({"memory": str(cluster.memory + GIB)}))
        solver = Solver(more, self._others[1.0, None][1].fixed)
        now, then = self.built(layout, self.limit), build_out(more, solver, layout, rung_below(more.cluster.usable))
        return max(0.0, now.prediction.seconds - then.prediction.seconds) if now and then else 0.0

    def _plainest(self, best: Candidate) -> Candidate:
        """The plan, or one with a single mode that takes hardly longer."""
        if "mode" in self.wanted.fixed or best.layout.replicas == 1:
            return best
        plan, prediction = plainest(self.setting, best.plan, best.prediction, self.limit)
        return replace(best, plan=plan, prediction=prediction)

    def _starts(self, layout: Layout, many: bool) -> list[tuple[Candidate, float]]:
        """What is chosen as [Note: several beginnings] says, and with how much memory, the fastest first; of many, one."""
        whole = self.limit
        if many:
            ways: list[tuple[float, float, Choice | None]] = [(whole, 1.0, None)]
        elif layout.mesh.pipe == 1:
            ways = [(whole, share, None) for share in (1.0, *SLOWER)] + [(whole, 1.0, c) for c in self._lasts(layout)]
        else:
            ways = [
                (limit, share, None)
                for share in (1.0, *SLOWER)
                for limit in (whole, *_lower(whole)[:: 1 if share == 1 else 2])
            ]
        homes = [layout]
        if self._movable and not many:
            homes = [replace(layout, optimizer="device"), replace(layout, optimizer="auto")]
        found: dict[Plan, tuple[Candidate, float]] = {}
        for home, (limit, share, last) in product(homes, ways):
            c = self.built(home, limit, share, last)
            if c is not None:
                found.setdefault(c.plan, (c, limit))
        return sorted(found.values(), key=lambda start: self._at(start[0], whole).seconds)

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

    def _polished(self, c: Candidate, limit: float) -> Candidate:
        if "mode" in self.wanted.fixed or c.layout.replicas == 1:
            return c
        plan, prediction = polished(self.setting, c.plan, limit, self._judged, self.wanted.fixed)
        return replace(c, plan=plan, prediction=prediction)

    def _full(self, done: list[Candidate], many: bool) -> list[Candidate]:
        """The fastest layouts' plans with what room is left given to some units; then with what state has no room elsewhere.

        `done`: the fastest first.
        """
        if {"mode", "recompute"} <= self.wanted.fixed.keys():
            return []
        apart: dict[Layout, dict[Plan, Candidate]] = {}
        for c in done:
            if c.layout.mesh.pipe == 1:
                apart.setdefault(replace(c.layout, optimizer="device"), {}).setdefault(c.plan, c)
        first = [c for each in list(apart.values())[:FILLED] for c in list(each.values())[: 1 if many else STARTS]]
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
        full = by(self.setting, c.plan, self.setting.cluster.usable, self._judged, self.wanted.fixed)
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
    """The highest amount of the ladder that is not above this one."""
    return _amount(_rung(amount))


def _rung(amount: float) -> int:
    rung = math.floor(RUNGS * math.log2(amount))
    return max(k for k in (rung - 1, rung, rung + 1) if _amount(k) <= amount)


def _amount(rung: int) -> float:
    return float(math.floor(2.0 ** (rung / RUNGS)))


def _lower(amount: float) -> list[float]:
    """The amounts of some rungs below one, the highest first: of four rungs one, down to 4 percent less; of eight, to 8."""
    top = _rung(amount)
    return [_amount(k) for k in range(top - 1, top - 33, -1) if k % (4 if k >= top - 16 else 8) == 0]
