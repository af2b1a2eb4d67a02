"""Times of a stage's ops: its units one after another, with concurrent gathers and reductions (`comm_overlap`).

The cluster's `overlap` is the share of overlappable communication that does overlap with computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fourfold.model.operators import UnitSpec
from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES
from fourfold.planner.comm_overlap import UnitStep, UnitTimeline
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import PlannedUnit, UnitChoice, reduced_in_buckets, unit_cost
from fourfold.program import modes
from fourfold.program.engine import OpExtras
from fourfold.shard.layout import joined

__all__ = ["StageTimes", "plan_units", "stage_times", "whole_step"]


def plan_units(
    problem: PlanProblem,
    layout: ParallelLayout,
    stages: Sequence[Sequence[UnitSpec]],
    choices: dict[str, UnitChoice],
) -> list[list[PlannedUnit]]:
    """The stages' units with their costs; `choices` by unit name."""
    out = []
    for units in stages:
        planned = [PlannedUnit(u, choices[u.name], unit_cost(problem, layout, u.kind, choices[u.name])) for u in units]
        out.append(_reduce_in_buckets(problem, layout, planned))
    return out


def _reduce_in_buckets(problem: PlanProblem, layout: ParallelLayout, units: list[PlannedUnit]) -> list[PlannedUnit]:
    """A stage's units, with small whole gradients reduced together (shard/joined.py).

    In the backward, the first unit of a bucket allocates the buffer, and the last one reduces the whole bucket.
    """
    if layout.optimizer != "device" or layout.replicas == 1:
        return units
    tied = (0, problem.spec.layers - 1) if problem.spec.tied else ()
    order = [
        i
        for i, u in reversed(list(enumerate(units)))
        if reduced_in_buckets(u.cost, u.choice) and u.cost.gradient_bytes and u.spec.layer not in tied
    ]
    out = list(units)
    for bucket in joined([units[i].cost.gradient_bytes for i in order]):
        if len(bucket) == 1:
            continue
        size = sum(units[order[k]].cost.gradient_bytes for k in bucket)
        together = problem.cluster.collective("all_reduce", size, layout.replicas, layout.replica_stride)
        for k in bucket:
            held, seconds = (size if k == bucket[0] else 0.0), (together if k == bucket[-1] else 0.0)
            u = units[order[k]]
            cost = replace(u.cost, gradient_bytes=held, reduced_bytes=held, reduce=seconds)
            out[order[k]] = replace(u, cost=cost)
    return out


# ---- ops with their collectives ----


@dataclass(frozen=True)
class _StageOp:
    """An op of a stage, and whether it is the first forward or the last backward of a step."""

    kind: Literal["F", "B", "I", "W"]
    first: bool = False
    last: bool = False


class _StageRunner:
    """Ops of one stage on a rank, one after another.

    `steady`: some micro-batch is always in flight, so zero2 gathers once a step. `alone`: the rank has no other stage, so the
    last unit of an op is still gathered when the next op starts.
    """

    def __init__(
        self,
        problem: PlanProblem,
        prefetch: int,
        *,
        steady: bool,
        split: bool,
        alone: bool = True,
        sums_link: int = 0,
    ):
        self.problem, self.cluster, self.prefetch = problem, problem.cluster, prefetch
        self.steady, self.split, self.alone = steady, split, alone
        self.timeline, self._charged = UnitTimeline(self.cluster.queue, sums_link), 0.0
        self._last_used, self._deferred = "", 0.0
        self._known: dict[object, UnitStep] = {}

    def run(self, ops: Sequence[tuple[Sequence[PlannedUnit], _StageOp]], resident: int = 0) -> list[float]:
        """Seconds of every op; `resident`: units of the first op that need no gather."""
        chains = [self._steps(units, op) for units, op in ops]
        chains[0] = [s._replace(gather=0.0) if i < resident else s for i, s in enumerate(chains[0])]
        out = []
        for i, (units, op) in enumerate(ops):
            following = chains[i + 1][0].gather if i + 1 < len(chains) else 0.0
            timeline = self.timeline
            began, exposed, communicated = timeline.now, timeline.exposed, timeline.communicated
            timeline.run(chains[i], started=i > 0, following=following)
            computing = sum(step.compute + step.grid_exposed + step.other_links for step in chains[i])
            imperfect = max(0.0, self._not_overlapped(exposed, communicated))
            self._charged += imperfect
            out.append(timeline.now - began + imperfect + self._offload(units, op, computing))
        return out

    def finish(self) -> float:
        """Seconds until all reductions end."""
        timeline = self.timeline
        began, exposed, communicated = timeline.now, timeline.exposed, timeline.communicated
        timeline.finish()
        imperfect = self._not_overlapped(exposed, communicated)
        return timeline.now - began + max(imperfect, -self._charged) + self._deferred

    def _not_overlapped(self, exposed: float, communicated: float) -> float:
        """Seconds of an op's overlappable communication that do not overlap; negative if some of it was exposed later."""
        overlapped = (self.timeline.communicated - communicated) - (self.timeline.exposed - exposed)
        return (1 - self.cluster.overlap) * overlapped

    def _steps(self, units: Sequence[PlannedUnit], op: _StageOp) -> list[UnitStep]:
        out: list[UnitStep] = []
        if not self.alone:
            self._last_used = ""
        for u in units if op.kind == "F" else units[::-1]:
            resident = u.spec.name == self._last_used
            key = (id(u.cost), u.choice, op, resident, not out)
            step = self._known.get(key)
            if step is None:
                step = self._known[key] = self._step(u, op, resident=resident, first=not out)
            out += [step] * u.cost.slices
            self._deferred = u.cost.deferred_sums if self._reduces(u, op) else 0.0
            self._last_used = u.spec.name
        return out

    def _step(self, u: PlannedUnit, op: _StageOp, resident: bool, first: bool) -> UnitStep:
        """A unit's part of an op; `resident`: its parameters are already gathered; `first`: it is the op's first unit."""
        c, parts = u.cost.times_at_ends if op.first or op.last else u.cost.times, u.cost.slices
        seconds = {
            "F": c.forward,
            "B": c.input_grad + c.recompute + c.weight_grad,
            "I": c.input_grad + c.recompute,
            "W": c.weight_grad,
        }[op.kind]
        none_in_flight = op.first or not self.steady
        gathers = modes.gathers(u.choice.mode, op.kind, first=op.first, none_in_flight=none_in_flight)
        gather = u.cost.gather if gathers and not resident else 0.0
        reduces, sharded = self._reduces(u, op), modes.shards(u.choice.mode)
        exposed, total = u.cost.grid_on_link(c, op.kind)
        grid = c.exposed(op.kind)
        # starting a collective takes host time, except for all-reduces of replicas
        calls = self.cluster.call * ((gather > 0) + (reduces and sharded and u.cost.reduce > 0))
        other_links = grid - exposed + (c.cold(op.kind) if gather or first else 0.0)
        reduce = across = 0.0
        if reduces:
            reduce, across = u.cost.reduce, u.cost.across
            exposed_sums = u.cost.vector_sums
        else:
            exposed_sums = 0.0
        overlapped = total - exposed
        exposed += exposed_sums
        if not self.prefetch:  # nothing overlaps
            exposed, gather = exposed + gather, 0.0
            if sharded:
                exposed, reduce, across = exposed + reduce + across, 0.0, 0.0
        return UnitStep(
            (seconds - grid) / parts + calls,
            gather / parts,
            reduce / parts,
            across / parts,
            sharded,
            exposed / parts,
            overlapped / parts,
            other_links / parts,
        )

    def _reduces(self, u: PlannedUnit, op: _StageOp) -> bool:
        return op.kind == ("W" if self.split else "B") and modes.reduces(u.choice.reduce, last=op.last)

    def _offload(self, units: Sequence[PlannedUnit], op: _StageOp, computing: float) -> float:
        """Extra seconds of an op whose activations move to the host, or back.

        If a micro-batch's backward directly follows its forward, bytes not yet copied are still on the device and cost nothing.
        """
        follows = self.alone and not self.steady and not self.problem.on_cpu
        stay = ACTIVATION_BUFFER_BYTES if follows else 0.0
        moved = max(0.0, sum(u.cost.offloaded_bytes for u in units) - stay) / self.cluster.host.link
        if not moved or op.kind == "W":
            return 0.0
        return max(0.0, moved - computing) + (1 - self.cluster.overlap) * min(computing, moved)


def _sums_link(units: Sequence[PlannedUnit]) -> int:
    """1 if sums across groups use a network level that no unit's gathers or reductions use; else 0."""
    return int(all(u.cost.own_link for u in units if u.cost.reduce))


def _backward(split: bool, last: bool = False) -> tuple[_StageOp, ...]:
    return (_StageOp("I", last=last), _StageOp("W", last=last)) if split else (_StageOp("B", last=last),)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's ops in the middle of a step, and how its first and last ops differ."""

    forward: float
    input_grad: float
    weight_grad: float
    first: OpExtras
    """The first forward of a step, which gathers kept parameters; those of the first two units while it waits for its input."""
    before: float
    """Seconds of the first gather that overlap with the last unit of the previous op."""
    last: tuple[OpExtras, ...]
    """The last backward, or its two parts (I, W); its reductions overlap with computing."""

    @property
    def work(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


def stage_times(
    problem: PlanProblem, units: Sequence[PlannedUnit], *, steady: bool, split: bool, alone: bool, prefetch: int
) -> StageTimes:
    """Times of a stage in steady state, some micro-batches after its first; flags as in `_StageRunner`."""

    def runner(steady: bool) -> _StageRunner:
        link = _sums_link(units)
        return _StageRunner(problem, prefetch, steady=steady, split=split, alone=alone, sums_link=link)

    usual = [(units, op) for op in (_StageOp("F"), *_backward(split))]
    first = [(units, _StageOp("F", first=True)), *usual[1:]]
    found = runner(steady).run(first + usual * 2)
    middle = found[-3:] if split else found[-2:]
    forward, backward = middle[0], sum(middle[1:])
    weight = min(backward, sum(u.cost.times.weight_grad for u in units))
    warm = runner(steady).run(first[:1], resident=1 + prefetch)[0]
    gather = units[0].cost.gather / units[0].cost.slices  # 0 for replicas
    before = min(gather, forward / len(units)) if prefetch else 0.0
    return StageTimes(
        forward,
        backward - weight,
        weight,
        OpExtras(max(0.0, found[0] - forward), max(0.0, warm - forward)),
        before,
        _last_backward(units, split, usual=runner(True), last=runner(True)),
    )


def _last_backward(
    units: Sequence[PlannedUnit], split: bool, usual: _StageRunner, last: _StageRunner
) -> tuple[OpExtras, ...]:
    """How the last backward of a stage, or its two parts (I, W), differ from others.

    Its input gradient is sent as soon as it is computed; the last unit's reduction follows.
    """
    without = usual.run([(units, op) for op in _backward(split)], resident=1)
    found = last.run([(units, op) for op in _backward(split, True)], resident=1)
    late, done = last.timeline.since_compute, last.finish()
    out = [OpExtras(x := max(0.0, a - b), x) for a, b in zip(found, without, strict=True)]
    left = max(0.0, out[-1].free - late)
    reduced = [u for u in units[::-1] if u.cost.reduce]
    puts = sum(u.cost.reduce + u.cost.across for u in reduced)
    lead = None
    if reduced and modes.shards(reduced[0].choice.mode):
        c = units[-1].cost.times_at_ends
        lead = c.weight_grad if split else c.input_grad + c.recompute + c.weight_grad
    out[-1] = OpExtras(left, left, out[-1].free - left, puts, found[-1] + done, lead)
    return tuple(out)


def whole_step(problem: PlanProblem, units: Sequence[PlannedUnit], micro_batches: int, prefetch: int) -> float:
    """Step time of one rank without a pipeline, without the update; repeating micro-batches are timed once."""
    runner = _StageRunner(problem, prefetch, steady=False, split=False, sums_link=_sums_link(units))
    simulated = min(micro_batches, 3)
    ops = [
        (units, op)
        for m in range(simulated)
        for op in (_StageOp("F", first=m == 0), _StageOp("B", last=m == simulated - 1))
    ]
    found = runner.run(ops)
    middle = found[-4] + found[-3] if simulated > 2 else 0.0
    return sum(found) + runner.finish() + (micro_batches - simulated) * middle
