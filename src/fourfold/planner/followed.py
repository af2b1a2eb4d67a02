"""A plan's ranks followed through a step: when each is done, and what each holds, the optimizer's state left out.

Time: a rank without a pipeline is followed unit by unit (`stages`). A pipeline's schedule is simulated with the seconds of every
stage's ops; before it, what the first gathers add; after it, on every rank, the reductions that did not fit behind the last
backward. Memory: a replay of every rank (`replay`). Neither depends on how much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from fourfold.errors import PlanError
from fourfold.plan import Mesh, Plan
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.messages import message_bytes
from fourfold.planner.replay import Extra, RankMemory, replay_rank
from fourfold.planner.stages import (
    PlannedUnit,
    StageTimes,
    plan_units,
    rank_costs,
    stage_times,
    units_of_stages,
    whole_step,
)
from fourfold.planner.units import STASH, Choice, tied_elements
from fourfold.program.engine import More, Problem, run
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.ops import Op, Schedule, ends_of_step
from fourfold.program.partition import partition

__all__ = ["Followed", "schedule_of", "stage_layers"]

MOST_OPS = 30_000
"""Ops of a schedule that are simulated as they are; of longer ones, the middle repeats and is left out."""


def schedule_of(plan: Plan, layout: Layout, layers: int) -> Schedule:
    """A plan's schedule, of as many micro-batches as are simulated."""
    pipeline = plan.pipeline
    if pipeline.schedule != "synthesized":  # which has as many stages as there are layers for
        pipeline = replace(pipeline, layers="auto")
    return _schedule(Plan(mesh=Mesh(pipe=plan.mesh.pipe), pipeline=pipeline), _simulated(layout), layers)


@lru_cache(maxsize=4096)
def _schedule(shape: Plan, micro_batches: int, layers: int) -> Schedule:
    """`shape`: all of a plan that its schedule depends on."""
    return schedule_of_plan(shape, micro_batches, layers=layers)


def _simulated(layout: Layout) -> int:
    """Micro-batches to simulate: all, or as many as show the middle that repeats."""
    per = 3 * layout.stages
    few = 4 * layout.mesh.pipe
    return layout.micro_batches if layout.micro_batches * per <= MOST_OPS else max(few, MOST_OPS // per // few * few)


def stage_layers(setting: Setting, schedule: Schedule, wish: tuple[int, ...] | str) -> tuple[int, ...]:
    """Layers of every stage, embedding and head among them: as the plan says, or as they are dealt out by FLOPs."""
    spec, stages = setting.spec, schedule.stages
    if isinstance(wish, tuple):
        if len(wish) != stages or sum(wish) != spec.layers - 2:
            raise PlanError(
                f"pipeline.layers = {list(wish)} must be {stages} numbers that sum to the model's {spec.layers - 2} layers"
            )
        return tuple(n + (s == 0) + (s == stages - 1) for s, n in enumerate(wish))
    return _by_flops(setting, schedule.placement)


@lru_cache(maxsize=1024)
def _by_flops(setting: Setting, placement: tuple[int, ...]) -> tuple[int, ...]:
    spec = setting.spec
    return partition([sum(u.flops for u in spec.of_layer(layer)) for layer in range(spec.layers)], placement)


@lru_cache(maxsize=1024)
def _messages(setting: Setting, mesh: Mesh, placement: tuple[int, ...], size: float) -> tuple[tuple[float, ...], ...]:
    """Seconds of a message from every rank of a pipeline to those that have the next stages."""
    far, table = mesh.ranks // mesh.pipe, [[0.0] * mesh.pipe for _ in range(mesh.pipe)]
    for pair in set(pairwise(placement)):
        for a, b in (pair, pair[::-1]) if pair[0] != pair[1] else ():
            table[a][b] = setting.cluster.messages(size, a * far, b * far, far)
    return tuple(map(tuple, table))


def _once(ops: Sequence[Op], times: Sequence[StageTimes]) -> dict[tuple[int, str, int], More]:
    """How the first forwards and the last backwards of a rank's stages differ from others."""
    out: dict[tuple[int, str, int], More] = {}
    first, last = ends_of_step(ops)
    for op in first:
        t = times[op.stage]
        hidden = t.before if out else 0.0
        out[op] = t.first._replace(free=max(t.first.ready, t.first.free - hidden))
    for op in last:
        out[op] = times[op.stage].last[0 if op.kind == "I" else -1]
    return out


class End(NamedTuple):
    """A rank's step, the update left out."""

    seconds: float
    late: float
    """Of these, reductions after its last backward."""


class Followed:
    """One plan, as `choices` by unit name say, in a layout whose stages have so many layers, embedding and head among them."""

    def __init__(
        self,
        setting: Setting,
        layout: Layout,
        schedule: Schedule,
        counts: tuple[int, ...],
        choices: dict[str, Choice],
    ):
        self.setting, self.layout, self.schedule, self.counts = setting, layout, schedule, counts
        self.stages = plan_units(setting, layout, units_of_stages(setting.spec, counts), choices)
        self._times: dict[object, StageTimes] = {}  # of stages that are alike, once
        self._walks: dict[Any, Any] = {}
        self._message_bytes = layout.message(setting)
        self._tied_copy = setting.spec.tied and schedule.placement[0] != schedule.placement[-1]
        self._tied_elements = tied_elements(setting.spec, layout.mesh)

    def units(self, rank: int) -> list[PlannedUnit]:
        """The units of a rank of the pipeline."""
        return [u for stage in self.schedule.stages_of[rank] for u in self.stages[stage]]

    @cached_property
    def local(self) -> tuple[float, ...]:
        """Parameters that every rank updates."""
        return tuple(sum(u.cost.local for u in self.units(rank)) for rank in range(self.schedule.ranks))

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What every rank holds, the optimizer's state left out."""
        return tuple(self._memory(rank) for rank in range(self.schedule.ranks))

    # ---- time ----

    @property
    def ends(self) -> list[End]:
        """When every rank is done."""
        return self._ran[0]

    @property
    def busiest(self) -> int:
        """The rank whose ops take longest."""
        return self._ran[1]

    @property
    def busy(self) -> float:
        """Seconds of its ops, with what of its collectives is not hidden, those after its last backward left out."""
        return self._ran[2]

    @property
    def stage_seconds(self) -> tuple[tuple[float, float, float], ...]:
        """F, I and W of a micro-batch, stage by stage."""
        if self.schedule.ranks == 1:
            parts = [u.cost.compute for u in self.stages[0]]
            w = sum(p.weight_grad for p in parts)
            return ((sum(p.forward for p in parts), sum(p.input_grad + p.again for p in parts), w),)
        times = map(self._stage_times, range(self.schedule.stages))
        return tuple((t.forward, t.input_grad, t.weight_grad) for t in times)

    @property
    def message(self) -> float:
        """Seconds of the slowest message between stages."""
        return max(map(max, self._messages)) if self.schedule.ranks > 1 else 0.0

    @property
    def _messages(self) -> tuple[tuple[float, ...], ...]:
        return _messages(self.setting, self.layout.mesh, self.schedule.placement, self._message_bytes)

    @cached_property
    def _ran(self) -> tuple[list[End], int, float]:
        layout, schedule = self.layout, self.schedule
        if schedule.ranks == 1:
            step = whole_step(self.setting, self.stages[0], layout.micro_batches, layout.prefetch)
            return [End(step, 0.0)], 0, step
        times = [self._stage_times(s) for s in range(schedule.stages)]
        costs = rank_costs(times, self._messages)
        problem = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
        more = {op: m for ops in schedule.order for op, m in _once(ops, times).items()}
        ran = run(problem, schedule.order, more=more)
        work = [
            sum(times[s].forward + times[s].input_grad + times[s].weight_grad for s in held)
            for held in schedule.stages_of
        ]
        busiest = max(range(schedule.ranks), key=lambda r: work[r])
        once = sum(
            times[s].first.ready + sum(m.ready + m.after for m in times[s].last) for s in schedule.stages_of[busiest]
        )
        repeated = (layout.micro_batches - schedule.micro_batches) * work[busiest]
        ends = []
        for rank, ops in enumerate(schedule.order):
            end = ran.ends[rank][-1] + more[ops[-1]].after
            late = max(0.0, ran.lanes[rank] - end) + self._lent(rank)
            ends.append(End(end + late + repeated, late))
        return ends, busiest, layout.micro_batches * work[busiest] + once

    @cached_property
    def _steady(self) -> list[bool]:
        """By stage, whether it always has a micro-batch in flight between its first forward and its last backward."""
        flying, turned = [0] * self.schedule.stages, [0] * self.schedule.stages
        for ops in self.schedule.order:
            for op in ops:
                if op.kind != "W":
                    flying[op.stage] += 1 if op.kind == "F" else -1
                    turned[op.stage] += flying[op.stage] == 0
        return [turns == 1 for turns in turned]

    def _stage_times(self, stage: int) -> StageTimes:
        rank, units = self.schedule.placement[stage], self.stages[stage]
        steady, alone = self._steady[stage], len(self.schedule.stages_of[rank]) == 1
        key = (steady, alone, *((u.spec.kind, u.choice) for u in units))
        if key not in self._times:
            split = self.schedule.split
            self._times[key] = stage_times(
                self.setting, units, steady=steady, split=split, alone=alone, prefetch=self.layout.prefetch
            )
        return self._times[key]

    def _lent(self, rank: int) -> float:
        """Seconds in which a tied weight's gradient goes from the last stage to the first, and the new weight back."""
        place, s = self.schedule.placement, self.setting
        if not self._tied_copy or rank not in (place[0], place[-1]):
            return 0.0
        apart = self.layout.mesh.ranks // self.layout.mesh.pipe
        sizes = (self._tied_elements * width for width in (s.reduce, s.compute))
        return sum(s.cluster.messages(size, place[-1] * apart, place[0] * apart, apart) for size in sizes)

    # ---- memory ----

    def _away(self, rank: int) -> float:
        """Bytes of activations that are meant for the host when most micro-batches are in flight."""
        size = {s: sum(u.cost.offloaded for u in self.stages[s]) for s in self.schedule.stages_of[rank]}
        if not any(size.values()):
            return 0.0
        most = held = 0.0
        for op in self.schedule.order[rank]:
            if op.kind == "F":
                held += size[op.stage]
                most = max(most, held)
            elif op.kind != "I":  # of a backward in two parts, the second needs some still
                held -= size[op.stage]
        return most

    def _tables(self) -> float:
        """Bytes of a step's tokens and targets, and of rotary tables."""
        spec, mesh = self.setting.spec, self.layout.mesh
        tokens = self.setting.global_batch / mesh.batch_ways * spec.seq_len
        rotary = spec.config is not None and spec.config.family == "llama"
        return 16 * tokens + (8.0 * spec.seq_len * spec.config.head_dim if rotary and spec.config else 0.0)

    def _memory(self, rank: int) -> RankMemory:
        s, schedule = self.setting, self.schedule
        cpu = s.cluster.device.kind == "cpu"
        units = self.units(rank)
        first, last = schedule.placement[0], schedule.placement[-1]
        copy, owner = self._tied_copy and rank == last, self._tied_copy and rank == first
        tied = self._tied_elements * s.reduce
        whole = next(u.cost for u in self.stages[0])
        head = self.stages[-1][-1].cost
        away = self._away(rank)
        there = min(away, self.layout.host_room(s))
        # CPUs have no kernel that rounds a master in one pass
        rounding = 9.0 * max(u.cost.local for u in units) if s.compute < 4 and cpu else 0.0
        extra = Extra(
            parameters=(whole.parameters if copy else 0.0) + self._tables(),
            lent=head.borrowed if s.spec.tied and not self._tied_copy and rank == first else 0.0,
            copied=whole.gradients if copy else 0.0,
            taken=tied if owner else 0.0,
            messages=message_bytes(schedule, rank, self._message_bytes, cpu),
            pooled=self._message_bytes if cpu else 0.0,
            parked=0.0 if cpu else min(STASH, there) + away - there,
            host=0.0 if cpu else there,
            update=0.0 if self.layout.streams(s) else rounding,
            prefetch=self.layout.prefetch,
        )
        return replay_rank(schedule, rank, self.stages, extra, self._walks)
