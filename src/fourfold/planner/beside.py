"""What the grid's collectives add to the units of a chain: products in order, and beside them what their flows move.

As linears do it (tensor/flows.py, tensor/late.py). A line of ranks (row, col) runs its collectives in the order in which they
were started; where a cluster says so (`small`), small ones run beside the others. Lines that cross one link share it (`link`).

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

ROW, COL, BESIDE = 0, 1, 2
"""Lines; and those of small collectives, where they run beside the others: BESIDE + ROW, BESIDE + COL."""
Moved = tuple[int, float]
"""A line, and seconds."""


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
    """An operator's part of an op: collectives where it starts them, and its computing."""

    before: Sequence[Moved] = ()
    """Waited for, one after another."""
    early: Moved | None = None
    """Started first, waited for before `second`."""
    weight: Moved | None = None
    """Taken, and the next one's started."""
    inputs: Moved | None = None
    """Started before the weight is taken, waited for after."""
    compute: float = 0.0
    scatter: Moved | None = None
    """Started then, waited for at the end."""
    second: float = 0.0
    """Computing of the weight gradient."""
    summed: Moved | None = None
    """Its sum."""
    after: Sequence[Moved] = ()


@lru_cache(maxsize=50_000)
def grid_times(
    setting: Setting,
    tokens: int,
    row: int,
    col: int,
    tensor: Tensor,
    steps: int,
    apart: bool = False,
    once: bool = True,
) -> dict[str, OnGrid]:
    """By kind of unit, what its collectives take in a micro-batch of `tokens` tokens on a row, of which a step has `steps`.

    `apart`: weight gradients are computed in an op of their own, so that nothing of the other one is beside them.
    `once`: of the first forward and the last backward of a step, in which what is kept is gathered and summed.
    """
    chain, cluster = _chain(setting), setting.cluster
    there, parts = _there(setting, tokens, row, col, tensor, steps, once)
    back = _Clock(cluster, row, col, apart).chain([parts[u.kind] for u in reversed(chain)])[::-1]
    out = {}
    for at in sorted(range(len(chain)), key=lambda i: -abs(2 * i + 1 - len(chain))):  # of two, the one inside
        f, b = there[at], back[at]
        kept = cluster.overlap
        out[chain[at].kind] = OnGrid(f.lines(kept), b.lines(kept), b.weight, f.cold, b.cold)
    return out


@lru_cache(maxsize=50_000)
def _there(
    setting: Setting, tokens: int, row: int, col: int, tensor: Tensor, steps: int, once: bool
) -> tuple[list[_Timed], dict[str, list[_Linear]]]:
    """The forward of the chain; and by kind of unit, what the backward starts."""
    chain = _chain(setting)
    kinds = {u.kind: u for u in chain}
    parts = {kind: _parts(setting, u, tokens, row, col, tensor, steps, once) for kind, u in kinds.items()}
    there = _Clock(setting.cluster, row, col).chain([parts[u.kind][0] for u in chain])
    return there, {kind: back for kind, (_, back) in parts.items()}


@lru_cache(maxsize=64)
def _chain(setting: Setting) -> list[UnitSpec]:
    """The model with two units of a kind at most."""
    seen: dict[str, int] = {}
    out = []
    for unit in setting.spec.units:
        seen[unit.kind] = seen.get(unit.kind, 0) + 1
        if seen[unit.kind] <= 2:
            out.append(unit)
    return out


# ---- what an operator starts, and when ----

Pair = tuple[list[_Linear], list[_Linear]]


def _parts(
    setting: Setting, unit: UnitSpec, tokens: int, row: int, col: int, tensor: Tensor, steps: int, once: bool
) -> Pair:
    """A unit's operators in the order of the forward, and in that of the backward."""
    there, back = [], []
    for o in unit.operators:
        f, i, w = operator_seconds(setting, o, tokens, row, col, 1, "gradients" in tensor.keep)
        moved = grid_moves(setting, o, tokens, row, col, tensor, steps, once)
        timed = [(m, (_line(setting, m, size), seconds)) for m, seconds, size in moved]
        there.append(_forward(timed, f, tensor.overlap))
        back.append(_backward(timed, i, w, tensor.overlap))
    if unit.layer == setting.spec.layers - 1:
        there.append(_Linear(before=[(COL, loss_sums(setting.cluster, tokens, col))]))
    return there, back[::-1]


def _line(setting: Setting, m: Move, size: float) -> int:
    return (ROW if m.axis == "row" else COL) + (BESIDE if size < setting.cluster.small else 0)


def _forward(timed: Sequence[tuple[Move, Moved]], compute: float, overlap: bool) -> _Linear:
    before: list[Moved] = []
    after: list[Moved] = []
    weight = inputs = None
    for m, moved in timed:
        if m.op != "F":
            continue
        if m.what == "weights" and m.hides and overlap:
            weight = moved
        elif m.kind == "all_gather" and overlap:
            inputs = moved
        else:
            (after if m.kind == "reduce_scatter" else before).append(moved)
    return _Linear(before, None, weight, inputs, compute, after=after)


def _backward(timed: Sequence[tuple[Move, Moved]], first: float, second: float, overlap: bool) -> _Linear:
    before: list[Moved] = []
    early = weight = inputs = scatter = summed = None
    for m, moved in timed:
        if m.op == "F":
            continue
        if not (overlap and (m.hides or (m.op == "I" and m.kind == "all_gather"))):
            before.append(moved)
        elif m.what == "gradients":
            summed = moved
        elif m.what == "weights":
            weight = moved
        elif m.op == "W":
            early = moved
        elif m.kind == "reduce_scatter":
            scatter = moved
        else:
            inputs = moved
    return _Linear(before, early, weight, inputs, first, scatter, second, summed)


# ---- when each ends ----


class _Timed:
    """A unit of a chain: seconds waited and seconds of all collectives, by line."""

    def __init__(self) -> None:
        self.shown, self.every = [0.0] * 4, [0.0] * 4
        self.weight = self.cold = 0.0

    def lines(self, overlap: float) -> tuple[Crossing, Crossing]:
        """Of what could hide, some does not."""
        return self._of(ROW, overlap), self._of(COL, overlap)

    def _of(self, line: int, overlap: float) -> Crossing:
        shown, every = self.shown[line] + self.shown[line + BESIDE], self.every[line] + self.every[line + BESIDE]
        return Crossing(shown + (1 - overlap) * max(0.0, every - shown), every)


class _Clock(Link):
    """A chain's computing, with its two lines beside it."""

    def __init__(self, cluster: Cluster, row: int, col: int, apart: bool = False):
        other = int(cluster.link(row, col) != cluster.link(col, 1))
        super().__init__((0, other) * 2, ((row - 1) * cluster.queue, (col - 1) * cluster.queue) * 2)
        self._unit, self._call, self._apart = _Timed(), cluster.call, apart
        self._sums: deque[tuple[int, int]] = deque()

    def chain(self, units: Sequence[Sequence[_Linear]]) -> list[_Timed]:
        weights = [o.weight for unit in units for o in unit if o.weight is not None]
        ahead, taken, out = 0, 0, []  # the number of the gather that was started for the next weight
        for unit in units:
            self._unit, first = _Timed(), True
            for o in unit:
                for moved in o.before:
                    self._shown(moved, self._moves(*moved))
                early = self._hides(*o.early) if o.early and not self._apart else 0
                inputs = self._moves(*o.inputs) if o.inputs else 0
                if o.weight is not None:
                    mine = ahead or self._moves(*o.weight)
                    taken += 1
                    ahead = self._hides(*weights[taken]) if taken < len(weights) else 0
                    waited = self._shown(o.weight, mine)
                    if first:
                        self._unit.cold, first = max(0.0, o.weight[1] - waited), False
                if o.inputs:
                    self._shown(o.inputs, inputs)
                self.run(o.compute)
                scatter = self._hides(*o.scatter) if o.scatter else 0
                if self._apart:
                    if o.scatter:
                        self._shown(o.scatter, scatter)
                    early = self._moves(*o.early) if o.early else 0
                if o.early:
                    self._unit.weight += self._shown(o.early, early)
                self.run(o.second)
                if o.summed is not None:
                    self._sums.append((o.summed[0], self._hides(*o.summed)))
                    if len(self._sums) > 1:
                        line, number = self._sums.popleft()
                        self._unit.weight += self._shown((line, 0.0), number)
                if o.scatter:
                    self._shown(o.scatter, scatter)
                for moved in o.after:
                    self._shown(moved, self._moves(*moved))
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

    def _shown(self, moved: Moved, number: int) -> float:
        """Wait for a collective."""
        line = moved[0]
        waited = self.wait(line, number)
        self._unit.shown[line] += waited
        return waited
