"""What the grid's collectives add to the units of a chain: products in order, and beside them what their flows move.

As linears do it (tensor/flows.py, tensor/late.py). A line of ranks (row, col) runs its collectives in the order in which they
were started; lines that cross the same link share it (`link`).

- Where a product takes W of all rows, the gather of the next product's is started first. An op's first one is not ahead.
- Inputs of all columns are waited for, after W. In the backward they come for the weight gradient, while the input's is computed;
  gradients of inputs are scattered while the weight's is.
- The sum over row of one weight gradient is under way while the next product is computed; a second waits for it.
- All else is waited for where it stands, and everything where the plan does not overlap.

A unit is timed in the middle of a chain, the units before and after it as in the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fourfold.cluster import Cluster
from fourfold.model.operators import UnitSpec
from fourfold.plan import Tensor
from fourfold.planner.layout import Setting
from fourfold.planner.link import Link
from fourfold.planner.products import grid_moves, loss_sums, operator_seconds
from fourfold.tensor.costs import Move

__all__ = ["NO_GRID", "Crossing", "OnGrid", "grid_times"]

ROW, COL = 0, 1


class Crossing(NamedTuple):
    """Seconds of a line's collectives in an op: those that are waited for, and all."""

    shown: float = 0.0
    every: float = 0.0


class OnGrid(NamedTuple):
    """A unit's collectives on the grid, in one micro-batch."""

    forward: tuple[Crossing, Crossing]
    """Over row, over col."""
    backward: tuple[Crossing, Crossing]
    weight: float
    """Seconds of the backward's that are waited for on behalf of weight gradients."""
    cold_forward: float
    """Seconds more where it is an op's first unit: its first weight is not gathered ahead."""
    cold_backward: float

    def of(self, op: str) -> tuple[Crossing, Crossing]:
        """The lines of an op; of a backward in two parts, each has its share of what is waited for."""
        if op in "FB":
            return self.forward if op == "F" else self.backward
        shown = self.backward[0].shown + self.backward[1].shown
        share = self.weight / shown if shown else 0.0
        share = share if op == "W" else 1 - share
        row, col = (Crossing(share * line.shown, share * line.every) for line in self.backward)
        return row, col


NO_GRID = OnGrid((Crossing(), Crossing()), (Crossing(), Crossing()), 0.0, 0.0, 0.0)


class _Linear(NamedTuple):
    """An operator's part of an op: seconds of collectives by line where it starts them, and its computing."""

    before: tuple[tuple[int, float], ...] = ()
    """Waited for, one after another."""
    early: tuple[int, float] | None = None
    """Started first, waited for before `second`."""
    weight: float | None = None
    """Over row: taken, and the next one's started."""
    inputs: tuple[int, float] | None = None
    """Started before the weight is taken, waited for after."""
    compute: float = 0.0
    scatter: tuple[int, float] | None = None
    """Started then, waited for at the end."""
    second: float = 0.0
    """Computing of the weight gradient."""
    summed: float | None = None
    """Over row: its sum."""
    after: tuple[tuple[int, float], ...] = ()


@lru_cache(maxsize=50_000)
def grid_times(setting: Setting, tokens: int, row: int, col: int, tensor: Tensor, steps: int) -> dict[str, OnGrid]:
    """By kind of unit, what its collectives take in a micro-batch of `tokens` tokens on a row."""
    chain, cluster = _chain(setting.spec.units), setting.cluster
    parts = {u.kind: _parts(setting, u, tokens, row, col, tensor, steps) for u in chain}
    there = _Clock(cluster, row, col).chain([parts[u.kind][0] for u in chain])
    back = _Clock(cluster, row, col).chain([parts[u.kind][1] for u in reversed(chain)])[::-1]
    out = {}
    for at in sorted(range(len(chain)), key=lambda i: -abs(2 * i + 1 - len(chain))):  # of two, the one inside
        f, b = there[at], back[at]
        kept = cluster.overlap
        out[chain[at].kind] = OnGrid(f.lines(kept), b.lines(kept), b.weight, f.cold, b.cold)
    return out


def _chain(units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """The model with two units of a kind at most."""
    seen: dict[str, int] = {}
    out = []
    for unit in units:
        seen[unit.kind] = seen.get(unit.kind, 0) + 1
        if seen[unit.kind] <= 2:
            out.append(unit)
    return out


# ---- what an operator starts, and when ----

Pair = tuple[list[_Linear], list[_Linear]]


def _parts(setting: Setting, unit: UnitSpec, tokens: int, row: int, col: int, tensor: Tensor, steps: int) -> Pair:
    """A unit's operators in the order of the forward, and in that of the backward."""
    there, back = [], []
    for o in unit.operators:
        f, i, w = operator_seconds(setting, o, tokens, row, col, 1)
        timed = grid_moves(setting, o, tokens, row, col, tensor, steps)
        there.append(_forward(timed, f, tensor.overlap))
        back.append(_backward(timed, i, w, tensor.overlap))
    if unit.layer == setting.spec.layers - 1:
        there.append(_Linear(before=((COL, loss_sums(setting.cluster, tokens, col)),)))
    return there, back[::-1]


def _forward(timed: Sequence[tuple[Move, float]], compute: float, overlap: bool) -> _Linear:
    before: list[tuple[int, float]] = []
    after: list[tuple[int, float]] = []
    weight = inputs = None
    for m, seconds in timed:
        line = ROW if m.axis == "row" else COL
        if m.op != "F":
            continue
        if m.what == "weights" and m.hides and overlap:
            weight = seconds
        elif m.kind == "all_gather" and overlap:
            inputs = line, seconds
        else:
            (after if m.kind == "reduce_scatter" else before).append((line, seconds))
    return _Linear(tuple(before), None, weight, inputs, compute, after=tuple(after))


def _backward(timed: Sequence[tuple[Move, float]], first: float, second: float, overlap: bool) -> _Linear:
    before: list[tuple[int, float]] = []
    early = weight = inputs = scatter = summed = None
    for m, seconds in timed:
        line = ROW if m.axis == "row" else COL
        if m.op == "F":
            continue
        if not (overlap and (m.hides or (m.op == "I" and m.kind == "all_gather"))):
            before.append((line, seconds))
        elif m.what == "gradients":
            summed = seconds
        elif m.what == "weights":
            weight = seconds
        elif m.op == "W":
            early = line, seconds
        elif m.kind == "reduce_scatter":
            scatter = line, seconds
        else:
            inputs = line, seconds
    return _Linear(tuple(before), early, weight, inputs, first, scatter, second, summed)


# ---- when each ends ----


class _Timed:
    """A unit of a chain: seconds waited and seconds of all collectives, by line."""

    def __init__(self) -> None:
        self.shown, self.every = [0.0, 0.0], [0.0, 0.0]
        self.weight = self.cold = 0.0

    def lines(self, overlap: float) -> tuple[Crossing, Crossing]:
        """Of what could hide, some does not."""
        row, col = (
            Crossing(shown + (1 - overlap) * max(0.0, every - shown), every)
            for shown, every in zip(self.shown, self.every, strict=True)
        )
        return row, col


class _Clock(Link):
    """A chain's computing, with its two lines beside it."""

    def __init__(self, cluster: Cluster, row: int, col: int):
        links = cluster.link(row, col), cluster.link(col, 1)
        super().__init__((0, int(links[0] != links[1])), ((row - 1) * cluster.queue, (col - 1) * cluster.queue))
        self._unit, self._call = _Timed(), cluster.call
        self._sums: deque[int] = deque()

    def chain(self, units: Sequence[Sequence[_Linear]]) -> list[_Timed]:
        weights = [o.weight for unit in units for o in unit if o.weight is not None]
        ahead, taken, out = 0, 0, []  # the number of the gather that was started for the next weight
        for unit in units:
            self._unit, first = _Timed(), True
            for o in unit:
                for line, seconds in o.before:
                    self._shown(line, self._moves(line, seconds))
                early = self._hides(*o.early) if o.early else 0
                inputs = self._moves(*o.inputs) if o.inputs else 0
                if o.weight is not None:
                    mine = ahead or self._moves(ROW, o.weight)
                    taken += 1
                    ahead = self._hides(ROW, weights[taken]) if taken < len(weights) else 0
                    waited = self._shown(ROW, mine)
                    if first:
                        self._unit.cold, first = max(0.0, o.weight - waited), False
                if o.inputs:
                    self._shown(o.inputs[0], inputs)
                self.run(o.compute)
                scatter = self._hides(*o.scatter) if o.scatter else 0
                if o.early:
                    self._unit.weight += self._shown(o.early[0], early)
                self.run(o.second)
                if o.summed is not None:
                    self._sums.append(self._hides(ROW, o.summed))
                    if len(self._sums) > 1:
                        self._unit.weight += self._shown(ROW, self._sums.popleft())
                if o.scatter:
                    self._shown(o.scatter[0], scatter)
                for line, seconds in o.after:
                    self._shown(line, self._moves(line, seconds))
            out.append(self._unit)
        return out

    def _moves(self, line: int, seconds: float) -> int:
        self._unit.every[line] += seconds
        return self.start(line, seconds)

    def _hides(self, line: int, seconds: float) -> int:
        """Start a collective that computing goes on beside."""
        if self._call:
            self._unit.shown[line] += self._call
            self.run(self._call)
        return self._moves(line, seconds)

    def _shown(self, line: int, number: int) -> float:
        """Wait for a collective."""
        waited = self.wait(line, number)
        self._unit.shown[line] += waited
        return waited
