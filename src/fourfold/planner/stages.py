"""The stages of a plan as the planner sees them: which units each holds, under which choice, and the seconds of their ops.

A stage's op runs its units one after another, with gathers and reductions beside them (`lanes`); of what could hide behind
computing, the cluster's `overlap` says how much does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from fourfold.model.operators import ModelSpec, UnitSpec
from fourfold.planner.lanes import Lanes, Step
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.units import STASH, Choice, UnitCost, joins, unit_cost
from fourfold.program.costs import Costs
from fourfold.program.engine import More
from fourfold.shard.layout import joined

__all__ = [
    "PlannedUnit",
    "StageTimes",
    "plan_units",
    "rank_costs",
    "stage_times",
    "units_of_stages",
    "whole_step",
]


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a stage with its choice and cost."""

    spec: UnitSpec
    choice: Choice
    cost: UnitCost


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's ops."""

    forward: float
    input_grad: float
    weight_grad: float
    first: More
    """How the first forward of a step differs: what is kept is gathered in it, the first two units' while it has no input."""
    before: float
    """Seconds of the first gather that hide behind an op before: its last unit's computing."""
    last: tuple[More, ...]
    """How the last backward differs, or its two parts: gradients are reduced in it, behind what computes."""


def units_of_stages(spec: ModelSpec, counts: Sequence[int]) -> list[list[UnitSpec]]:
    """Units of every stage, from the layers (embedding and head among them) of every stage."""
    ends = list(accumulate(counts))
    return [
        [u for layer in range(end - count, end) for u in spec.of_layer(layer)]
        for end, count in zip(ends, counts, strict=True)
    ]


def plan_units(
    setting: Setting, layout: Layout, stages: Sequence[Sequence[UnitSpec]], choices: dict[str, Choice]
) -> list[list[PlannedUnit]]:
    """The stages' units with their costs; `choices` by unit name."""
    return [
        _join(
            setting,
            layout,
            [PlannedUnit(u, choices[u.name], unit_cost(setting, layout, u.kind, choices[u.name])) for u in units],
        )
        for units in stages
    ]


def _join(setting: Setting, layout: Layout, units: list[PlannedUnit]) -> list[PlannedUnit]:
    """A stage's units, of which whole gradients are summed together (shard/joined.py).

    In the backward, the first of such a group takes the buffer for all, and the last one's sum is that of all.
    """
    if layout.optimizer != "device" or layout.replicas == 1:
        return units
    tied = (0, setting.spec.layers - 1) if setting.spec.tied else ()
    order = [
        i
        for i, u in reversed(list(enumerate(units)))
        if joins(u.cost, u.choice) and u.cost.gradients and u.spec.layer not in tied
    ]
    out = list(units)
    for group in joined([units[i].cost.gradients for i in order]):
        if len(group) == 1:
            continue
        size = sum(units[order[k]].cost.gradients for k in group)
        together = setting.cluster.collective("all_reduce", size, layout.replicas, layout.replica_stride)
        for k in group:
            held, seconds = (size if k == group[0] else 0.0), (together if k == group[-1] else 0.0)
            u = units[order[k]]
            out[order[k]] = replace(u, cost=replace(u.cost, gradients=held, reduced=held, reduce=seconds))
    return out


# ---- ops with their collectives ----


@dataclass(frozen=True)
class _Op:
    """An op of a stage as it runs: its kind, and whether it is the first (forward) or the last (backward) of a step."""

    kind: Literal["F", "B", "I", "W"]
    first: bool = False
    last: bool = False


class _Running:
    """Ops of stages on one rank, one after another, with their gathers and reductions beside them."""

    turns = True
    """Whether a stage's backward may follow its forward."""

    def __init__(self, setting: Setting, steady: bool, split: bool, prefetch: int):
        self.cluster, self.steady, self.split, self.prefetch = setting.cluster, steady, split, prefetch
        self.lanes, self._charged = Lanes(self.cluster.queue), 0.0
        self._before, self._behind = "", 0.0
        self._known: dict[object, Step] = {}

    def run(self, ops: Sequence[tuple[Sequence[PlannedUnit], _Op]], there: int = 0) -> list[float]:
        """Seconds of every op; `there`: so many units of the first one are, and need no gather."""
        chains = [self._steps(units, op) for units, op in ops]
        chains[0] = [s._replace(gather=0.0) if i < there else s for i, s in enumerate(chains[0])]
        out = []
        for i, (units, op) in enumerate(ops):
            following = chains[i + 1][0].gather if i + 1 < len(chains) else 0.0
            lanes = self.lanes
            began, shown, moved = lanes.now, lanes.exposed, lanes.communicated
            lanes.run(chains[i], ready=i > 0, following=following)
            computing = sum(step.compute + step.moves + step.apart for step in chains[i])
            late = max(0.0, self._kept_from_hiding(shown, moved))
            self._charged += late
            out.append(lanes.now - began + late + self._offload(units, op, computing))
        return out

    def finish(self) -> float:
        """Seconds until all reductions have ended."""
        began, shown, moved = self.lanes.now, self.lanes.exposed, self.lanes.communicated
        self.lanes.finish()
        late = self._kept_from_hiding(shown, moved)
        return self.lanes.now - began + max(late, -self._charged) + self._behind

    def _kept_from_hiding(self, shown: float, moved: float) -> float:
        """Of what an op started and did not wait for, what does not hide; below 0: some was waited for after all."""
        hidden = (self.lanes.communicated - moved) - (self.lanes.exposed - shown)
        return (1 - self.cluster.overlap) * hidden

    def _steps(self, units: Sequence[PlannedUnit], op: _Op) -> list[Step]:
        out: list[Step] = []
        for u in units if op.kind == "F" else units[::-1]:
            key = (id(u.cost), u.choice, op, u.spec.name == self._before, not out)
            step = self._known.get(key)
            if step is None:
                step = self._known[key] = self._step(u, op, there=u.spec.name == self._before, first=not out)
            out += [step] * u.cost.slices
            self._behind = u.cost.behind if self._reduces(u, op) else 0.0
            self._before = u.spec.name  # what was used last is still there
        return out

    def _step(self, u: PlannedUnit, op: _Op, there: bool, first: bool) -> Step:
        """A unit's part of an op; `there`: its parameters are; `first`: nothing is before it."""
        c, parts = u.cost.ends if op.first or op.last else u.cost.compute, u.cost.slices
        seconds = {"F": c.forward, "B": c.input_grad + c.again + c.weight_grad, "I": c.input_grad + c.again}
        gather = u.cost.gather if self._gathers(u, op) and not there else 0.0
        reduces = self._reduces(u, op)
        shown, every = u.cost.crossing(c, op.kind)
        holds = u.choice.mode != "replicate"  # whose sums take none of the host's time
        moves = c.shown(op.kind)
        calls = self.cluster.call * ((gather > 0) + (reduces and holds and u.cost.reduce > 0))
        hidden = moves - shown + (c.cold(op.kind) if gather or first else 0.0)
        reduce, across, vectors = (u.cost.reduce, u.cost.across, u.cost.vectors) if reduces else (0.0, 0.0, 0.0)
        waited = shown + vectors
        if not self.prefetch:  # what could be under way meanwhile is waited for
            waited, gather = waited + gather, 0.0
            if holds:
                waited, reduce, across = waited + reduce + across, 0.0, 0.0
        return Step(
            (seconds.get(op.kind, c.weight_grad) - moves) / parts + calls,
            gather / parts,
            reduce / parts,
            across / parts,
            holds,
            waited / parts,
            (every - shown) / parts,
            hidden / parts,
        )

    def _reduces(self, u: PlannedUnit, op: _Op) -> bool:
        return op.kind == ("W" if self.split else "B") and (op.last or u.choice.reduce == "micro-batch")

    def _gathers(self, u: PlannedUnit, op: _Op) -> bool:
        match u.choice.mode:
            case "zero3":
                return op.kind != "W"
            case "zero2":
                return op.kind == "F" and (op.first or not self.steady)
            case "keep":
                return op.first
        return False

    def _offload(self, units: Sequence[PlannedUnit], op: _Op, computing: float) -> float:
        """How much longer an op takes since its activations move to the host, or back.

        Where a micro-batch's backward follows its forward, what still waits to go out is there, and nobody waits for it.
        """
        there = STASH if self.turns and not self.steady and self.cluster.device.kind != "cpu" else 0.0
        moved = max(0.0, sum(u.cost.offloaded for u in units) - there) / self.cluster.host.link
        if not moved or op.kind == "W":
            return 0.0
        return max(0.0, moved - computing) + (1 - self.cluster.overlap) * min(computing, moved)


def _backward(split: bool, last: bool = False) -> tuple[_Op, ...]:
    return (_Op("I", last=last), _Op("W", last=last)) if split else (_Op("B", last=last),)


def stage_times(
    setting: Setting, units: Sequence[PlannedUnit], *, steady: bool, split: bool, alone: bool, prefetch: int
) -> StageTimes:
    """Seconds of a stage's ops in the middle of a step, some micro-batches after its first.

    `steady`: some micro-batch is always in flight, so zero2 gathers once a step. `alone`: the rank has no other stage, so that
    what an op used last is there for the next.
    """
    kind = _Running if alone else _Apart
    usual = [(units, op) for op in (_Op("F"), *_backward(split))]
    first = [(units, _Op("F", first=True)), *usual[1:]]
    found = kind(setting, steady, split, prefetch).run(first + usual * 2)
    middle = found[-3:] if split else found[-2:]
    forward, backward = middle[0], sum(middle[1:])
    weight = min(backward, sum(u.cost.compute.weight_grad for u in units))
    warm = kind(setting, steady, split, prefetch).run(first[:1], there=1 + prefetch)[0]
    gather = units[0].cost.gather / units[0].cost.slices if units[0].choice.mode != "replicate" else 0.0
    before = min(gather, forward / len(units)) if prefetch else 0.0
    return StageTimes(
        forward,
        backward - weight,
        weight,
        More(max(0.0, found[0] - forward), max(0.0, warm - forward)),
        before,
        _endings(setting, units, split, prefetch, kind),
    )


def _endings(
    setting: Setting, units: Sequence[PlannedUnit], split: bool, prefetch: int, kind: type[_Running]
) -> tuple[More, ...]:
    """How the last backward of a stage differs from others, or its two parts.

    Its input's gradient leaves when it has computed; what the last unit's reduction waits for comes after that.
    """
    usual, last = kind(setting, True, split, prefetch), kind(setting, True, split, prefetch)
    without = usual.run([(units, op) for op in _backward(split)], there=1)
    found = last.run([(units, op) for op in _backward(split, True)], there=1)
    late, done = last.lanes.since_work, last.finish()
    out = [More(x := max(0.0, a - b), x) for a, b in zip(found, without, strict=True)]
    left = max(0.0, out[-1].free - late)
    reduced = [u for u in units[::-1] if u.cost.reduce]
    puts = sum(u.cost.reduce + u.cost.across for u in reduced)
    lead = None
    if reduced and reduced[0].choice.mode != "replicate":
        c = units[-1].cost.ends
        lead = c.weight_grad if split else c.input_grad + c.again + c.weight_grad
    out[-1] = More(left, left, out[-1].free - left, puts, found[-1] + done, lead)
    return tuple(out)


class _Apart(_Running):
    """Ops between which another stage runs: nothing is left of the one before."""

    turns = False

    def _steps(self, units: Sequence[PlannedUnit], op: _Op) -> list[Step]:
        self._before = ""
        return super()._steps(units, op)


def whole_step(setting: Setting, units: Sequence[PlannedUnit], micro_batches: int, prefetch: int) -> float:
    """Seconds of a step of one rank without a pipeline, the update left out: exact but for a middle that repeats."""
    run = _Running(setting, steady=False, split=False, prefetch=prefetch)
    simulated = min(micro_batches, 3)
    ops = [(units, op) for m in range(simulated) for op in (_Op("F", first=m == 0), _Op("B", last=m == simulated - 1))]
    found = run.run(ops)
    middle = found[-4] + found[-3] if simulated > 2 else 0.0
    return sum(found) + run.finish() + (micro_batches - simulated) * middle


def rank_costs(times: Sequence[StageTimes], message: tuple[tuple[float, ...], ...]) -> Costs:
    """Costs of a schedule's simulation, stage by stage. What a rank sends, it sends one after another."""
    return Costs(
        forward=tuple(t.forward for t in times),
        input_grad=tuple(t.input_grad for t in times),
        weight_grad=tuple(t.weight_grad for t in times),
        message=message,
        link="rank",
        activation=tuple(1.0 for _ in times),
    )
