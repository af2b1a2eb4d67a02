"""From a plan and a model to stages and programs: which units each stage holds, and what each rank does in a step.

Layers are dealt out so that no rank has much more to do than another (`partition`), the embedding being nearly free and the
head as dear as its product; or as the plan's `layers` says, in blocks: the embedding goes with the first stage, the head
with the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from fourfold.config import ModelConfig
from fourfold.errors import PlanError, ScheduleError
from fourfold.model.spec import unit_flops
from fourfold.plan import Plan
from fourfold.program.choices import UnitChoice, unit_choices
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.instructions import BucketSpec, Programs, UnitSpec
from fourfold.program.lowering import lower
from fourfold.program.ops import Schedule
from fourfold.program.partition import partition
from fourfold.program.schedules import forward_only

__all__ = ["PipelineLayout", "lay_out_pipeline"]


@dataclass(frozen=True)
class PipelineLayout:
    """What a plan's pipeline is made of."""

    schedule: Schedule
    units: tuple[tuple[str, ...], ...]
    """Units of every stage, in the order of the forward; slices of a split unit one by one."""
    programs: Programs
    evaluation: Programs
    choices: dict[str, UnitChoice]
    """By unit of the model."""

    @property
    def rank_of(self) -> dict[str, int]:
        """The pipeline rank that holds each unit."""
        return {unit: self.schedule.placement[s] for s, names in enumerate(self.units) for unit in names}

    def edges(self) -> set[tuple[int, int]]:
        """Pairs of pipeline ranks (source, target) between which messages go."""
        place = self.schedule.placement
        steps = [(a, b) for a, b in pairwise(place) if a != b]
        return {*steps, *((b, a) for a, b in steps)}


def lay_out_pipeline(model: ModelConfig, plan: Plan, global_batch: int, *, early: bool = False) -> PipelineLayout:
    """The stages and programs of a plan; raises PlanError where they cannot be made.

    Where optimizer state is not on the device, every unit is a bucket; `early`: updates need not wait for the norm.
    """
    micro_batches = plan.micro_batches(global_batch)
    layers = _layers(model)
    try:
        schedule = schedule_of_plan(plan, micro_batches, layers=len(layers))
        counts = _counts(model, plan, layers, schedule)
    except ScheduleError as e:
        raise PlanError(str(e)) from None
    ends = list(accumulate(counts))
    choices, flops = unit_choices(model, plan), unit_flops(model)
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
    buckets = [BucketSpec(unit.name, (unit.name,)) for units in described for unit in units] if streamed else []
    ahead = plan.memory.prefetch
    layout = PipelineLayout(
        schedule,
        tuple(tuple(unit.name for unit in units) for units in described),
        lower(schedule, described, buckets, prefetch=ahead, stream="early" if early else "last"),
        lower(evaluation, described, prefetch=ahead),
        choices,
    )
    _check_tied(model, layout)
    return layout


def _check_tied(model: ModelConfig, layout: PipelineLayout) -> None:
    """A weight that two ranks use is exchanged once a step."""
    embed, head = layout.choices["embed"], layout.choices["head"]
    apart = layout.rank_of[embed.names[0]] != layout.rank_of[head.names[0]]
    if model.tie and apart and embed.reduce == "micro-batch":
        raise PlanError(
            "unit 'embed': reduce = 'micro-batch', but its weight is tied to the head's on another rank; use reduce = 'step'"
        )


def _layers(model: ModelConfig) -> list[list[str]]:
    blocks = [[f"blocks.{i}.attn", f"blocks.{i}.mlp"] for i in range(model.layers)]
    return [["embed"], *blocks, ["head"]]


def _counts(model: ModelConfig, plan: Plan, layers: list[list[str]], schedule: Schedule) -> list[int]:
    """Layers (embedding and head among them) of every stage."""
    wish, stages = plan.pipeline.layers, schedule.stages
    if isinstance(wish, tuple):
        if len(wish) != stages:
            raise PlanError(
                f"pipeline.layers has {len(wish)} numbers, but {schedule.name or 'the schedule'} has {stages} stages "
                f"on {schedule.ranks} ranks; give one for each"
            )
        if sum(wish) != model.layers:
            raise PlanError(f"pipeline.layers sums to {sum(wish)}, but the model has {model.layers} layers")
        counts = [n + (s == 0) + (s == stages - 1) for s, n in enumerate(wish)]
        if 0 in counts:
            raise PlanError(f"pipeline.layers leaves stage {counts.index(0)} empty; give it at least one layer")
        return counts
    flops = unit_flops(model)
    return list(partition([sum(flops[unit] for unit in layer) for layer in layers], schedule.placement))


def _describe(choice: UnitChoice, flops: float) -> list[UnitSpec]:
    return [UnitSpec(name, choice.mode, choice.reduce, weight=flops / len(choice.names)) for name in choice.names]
