"""From a plan and a model to stages and programs: the units of each stage, and the instructions of each rank.

Layers are partitioned into stages so that the ranks' work is balanced (`partition`): the embedding is nearly free, the head
costs as much as its matmul. Or the plan's `layers` gives the number of blocks per stage; the embedding belongs to the first
stage, the head to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from fourfold.config import ModelConfig
from fourfold.errors import PlanError, ScheduleError
from fourfold.model.spec import OwnLayers, unit_flops
from fourfold.plan import Plan
from fourfold.program.choices import ResolvedUnit, resolve_units
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.instructions import ProgramBucket, Programs, ProgramUnit
from fourfold.program.lowering import lower
from fourfold.program.ops import Schedule
from fourfold.program.partition import partition
from fourfold.program.schedules import forward_only

__all__ = ["PipelineLayout", "lay_out_pipeline"]


@dataclass(frozen=True)
class PipelineLayout:
    """The pipeline of a plan: its schedule, stages and programs."""

    schedule: Schedule
    units: tuple[tuple[str, ...], ...]
    """Unit names of every stage, in forward order; the slices of a split unit are listed one by one."""
    programs: Programs
    evaluation: Programs
    choices: dict[str, ResolvedUnit]
    """By unit of the model."""

    @property
    def rank_of(self) -> dict[str, int]:
        """The pipeline rank that holds each unit."""
        return {unit: self.schedule.placement[s] for s, names in enumerate(self.units) for unit in names}

    def in_flight(self, stage: int) -> int:
        """The most micro-batches whose forward on a stage is done and whose backward is not, in the schedule's order."""
        most = now = 0
        for op in self.schedule.order[self.schedule.placement[stage]]:
            if op.stage == stage:
                now += {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
                most = max(most, now)
        return most

    def edges(self) -> set[tuple[int, int]]:
        """Pairs of pipeline ranks (sender, receiver) that exchange messages."""
        place = self.schedule.placement
        hops = [(a, b) for a, b in pairwise(place) if a != b]
        return {*hops, *((b, a) for a, b in hops)}


def lay_out_pipeline(
    model: ModelConfig | OwnLayers, plan: Plan, global_batch: int, *, early: bool = False
) -> PipelineLayout:
    """The stages and programs of a plan; raises PlanError if the plan does not suit the model.

    If optimizer state is streamed, every unit is a bucket; `early`: updates do not wait for the gradient norm.
    """
    micro_batches = plan.micro_batches(global_batch)
    layers, flops = _layers(model), _flops(model)
    try:
        schedule = schedule_of_plan(plan, micro_batches, layers=len(layers))
        counts = _counts(model, plan, [sum(flops[unit] for unit in layer) for layer in layers], schedule)
    except ScheduleError as e:
        raise PlanError(str(e)) from None
    ends = list(accumulate(counts))
    choices = resolve_units(model, plan)
    described = [
        [
            unit
            for layer in layers[end - count : end]
            for name in layer
            for unit in _describe(choices[name], flops[name])
        ]
        for end, count in zip(ends, counts, strict=True)
    ]
    evaluation = forward_only(schedule.placement, micro_batches)
    streamed = plan.memory.optimizer != "device"
    buckets = [ProgramBucket(unit.name, (unit.name,)) for units in described for unit in units] if streamed else []
    ahead = plan.memory.prefetch
    layout = PipelineLayout(
        schedule,
        tuple(tuple(unit.name for unit in units) for units in described),
        lower(schedule, described, buckets, prefetch=ahead, stream="early" if early else "last"),
        lower(evaluation, described, prefetch=ahead),
        choices,
    )
    tied = model.tied if isinstance(model, OwnLayers) else {"head": "embed"} if model.tie else {}
    for second, first in tied.items():
        _check_tied(first, second, layout, own=isinstance(model, OwnLayers))
    return layout


def _check_tied(first: str, second: str, layout: PipelineLayout, *, own: bool) -> None:
    """Check that a tied weight on two ranks is reduced once per step, and that its last gradient is there by then."""
    one, other = layout.choices[first], layout.choices[second]
    on_two_ranks = layout.rank_of[one.names[0]] != layout.rank_of[other.names[0]]
    if on_two_ranks and one.reduce == "micro-batch":
        theirs = f"that of '{second}'" if own else "the head's"
        raise PlanError(
            f"unit '{first}': reduce = 'micro-batch', but its weight is tied to {theirs} on another rank; use reduce = 'step'"
        )
    stage_of = {unit: stage for stage, units in enumerate(layout.units) for unit in units}
    two_stages = stage_of[one.names[0]] != stage_of[other.names[0]]
    if own and layout.schedule.split and two_stages and not on_two_ranks:
        raise PlanError(
            f"'{first}' and '{second}' share a parameter and are in two stages of one rank, whose weight gradients may come in "
            "any order when the backward is split; use pipeline.schedule = '1f1b', 'interleaved' or 'wave', or other "
            "pipeline.layers"
        )


def _flops(model: ModelConfig | OwnLayers) -> dict[str, float]:
    return model.flops if isinstance(model, OwnLayers) else unit_flops(model)


def _layers(model: ModelConfig | OwnLayers) -> list[list[str]]:
    if isinstance(model, OwnLayers):
        return [[name] for name in model.names]
    blocks = [[f"blocks.{i}.attn", f"blocks.{i}.mlp"] for i in range(model.layers)]
    return [["embed"], *blocks, ["head"]]


def _counts(model: ModelConfig | OwnLayers, plan: Plan, work: list[float], schedule: Schedule) -> list[int]:
    """Number of layers of every stage, embedding and head included; `work` is that of every layer."""
    given, stages = plan.pipeline.layers, schedule.stages
    own = isinstance(model, OwnLayers)
    if own and len(work) < stages:
        raise PlanError(
            f"your model has {len(work)} layers, which cannot fill {stages} stages; use {len(work)} at most"
        )
    if isinstance(given, tuple):
        if len(given) != stages:
            raise PlanError(
                f"pipeline.layers has {len(given)} numbers, but {schedule.name or 'the schedule'} has {stages} stages "
                f"on {schedule.ranks} ranks; give one for each"
            )
        there = len(work) if own else len(work) - 2  # an embedding and a head are no blocks
        if sum(given) != there:
            raise PlanError(f"pipeline.layers sums to {sum(given)}, but the model has {there} layers")
        counts = list(given) if own else [n + (s == 0) + (s == stages - 1) for s, n in enumerate(given)]
        if 0 in counts:
            raise PlanError(f"pipeline.layers leaves stage {counts.index(0)} empty; give it at least one layer")
        return counts
    return list(partition(work, schedule.placement))


def _describe(choice: ResolvedUnit, flops: float) -> list[ProgramUnit]:
    return [ProgramUnit(name, choice.mode, choice.reduce, weight=flops / len(choice.names)) for name in choice.names]
