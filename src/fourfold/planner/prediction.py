"""What is predicted of a plan: `Prediction` has the parts of a step, the memory of every rank, and the units, for its file.

Units with the same values share an entry of the file, so that a plan of many layers stays small (view/planned.py draws them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from fourfold.cluster import Cluster
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.memory_model import RankMemory
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import PlannedUnit, UnitChoice, sharding_cost

__all__ = ["Prediction", "StepTime", "UnitPrediction", "fits", "predict_units"]


class StepTime(NamedTuple):
    """Where the seconds of a step go, on the pipeline rank with the most work."""

    compute: float
    """Forward and backward of all micro-batches."""
    recompute: float
    """Recomputation of activations in the backward."""
    grid: float
    """Exposed collectives of the tensor grid."""
    exposed: float
    """Exposed gathers, reductions and copies to and from the host."""
    bubble: float
    """Waiting for other ranks of the pipeline."""
    update: float
    """The optimizer's step."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by part, bytes by part for every rank of a pipeline, tokens/s and MFU.

    `memory[rank].peak` is the peak of a rank in bytes, `.parts` its breakdown, `.at` its instant; ranks along the other axes hold
    the same.
    """

    seconds: float
    compute: float
    recompute: float
    grid: float
    exposed: float
    bubble: float
    update: float
    """The parts of a step: see `StepTime`."""
    memory: tuple[RankMemory, ...]
    tokens: int
    flops: float
    """Model FLOPs per token."""
    ranks: int
    rate: float
    """Peak FLOP/s of a device."""
    device_state: float = 0.0
    """Bytes of optimizer state that the fullest rank keeps on its device, if the plan's optimizer is `auto`."""
    computing: tuple[float, ...] = ()
    """Per rank of a pipeline: compute, recomputation and update, without any communication."""
    stages: tuple[tuple[float, float, float], ...] = ()
    """Per stage: seconds of F, I and W of a micro-batch, in the middle of a step."""
    message: float = 0.0
    """Seconds of the slowest message between stages."""
    host_state: float = 0.0
    """Share of the optimizer's state on the host."""
    usable: float = inf
    """Bytes of a device that are available to tensors."""
    host_memory: float = inf
    """Bytes of a host's memory for each device."""
    engine: str = "fourfold"
    """The system that it is predicted for."""
    units: tuple[tuple[UnitPrediction, ...], ...] = ()
    """Per stage: its units, with the seconds and bytes of their gathers and reductions."""
    updates: tuple[float, ...] = ()
    """Per rank of a pipeline: seconds of the optimizer's step."""
    updates_on_device: tuple[float, ...] = ()
    """The same if all optimizer state were on the device."""
    message_bytes: float = 0.0
    """Bytes of a message between stages."""
    messages: tuple[tuple[float, ...], ...] = ()
    """Seconds of a message from each rank of a pipeline to each other; 0 between ranks without adjacent stages."""

    @property
    def parts(self) -> StepTime:
        """The parts of a step; they sum to `seconds`."""
        return StepTime(*(getattr(self, name) for name in StepTime._fields))

    @property
    def fits(self) -> bool:
        """Whether every rank's tensors fit on its device, and what it keeps on the host fits there."""
        return all(m.peak <= self.usable and m.host <= self.host_memory for m in self.memory)

    @property
    def peak(self) -> RankMemory:
        """Memory of the fullest rank."""
        return max(self.memory, key=lambda m: m.peak)

    @property
    def mfu(self) -> float:
        """Model FLOPs divided by the peak of the devices; recomputation does not count."""
        return self.flops * self.tokens / (self.seconds * self.ranks * self.rate)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: round(getattr(self, name), 6) for name in ("seconds", *StepTime._fields)},
            "tokens_per_second": round(self.tokens_per_second, 1),
            "mfu": round(self.mfu, 4),
            "engine": self.engine,
            "peak_bytes": round(self.peak.peak),
            "memory": [m.to_dict() for m in self.memory],
            "stages": [[float(f"{x:.6g}") for x in stage] for stage in self.stages],
            "message": float(f"{self.message:.6g}"),
            "message_bytes": round(self.message_bytes),
            "messages": [[float(f"{x:.6g}") for x in row] for row in self.messages],
            **_units_to_dict(self.units),
            "updates": [float(f"{x:.6g}") for x in self.updates],
            "updates_on_device": [float(f"{x:.6g}") for x in self.updates_on_device],
            "host_state": round(self.host_state, 4),
        }


def fits(memory: Sequence[RankMemory], cluster: Cluster, limit: float) -> bool:
    """Whether all ranks fit into `limit` bytes of their devices, and into their hosts."""
    return all(m.peak <= limit and m.host <= cluster.host_memory for m in memory)


# ---- units ----


class UnitPrediction(NamedTuple):
    """A unit; of a micro-batch, if it is not a collective. Collectives of the grid that are exposed belong to the ops."""

    name: str
    forward: float
    input_grad: float
    """With recomputation."""
    weight_grad: float
    recompute_seconds: float
    """The part of `input_grad` that recomputes activations."""
    grid: float
    """The part of the forward and the gradients that is exposed collectives of the tensor grid."""
    gather: float
    """One all-gather of its parameters, alone on its link; 0 if they are not sharded."""
    reduce: float
    """One reduction of its gradients, alone on its link; 0 if another unit's reduction carries them."""
    gather_bytes: float
    reduce_bytes: float
    updated: float
    """Parameters that a rank updates."""
    mode: str
    reduce_after: str
    """A step or a micro-batch."""
    slices: int
    recompute: str


def predict_units(
    problem: PlanProblem, layout: ParallelLayout, stages: Sequence[Sequence[PlannedUnit]]
) -> tuple[tuple[UnitPrediction, ...], ...]:
    """The units of every stage, in forward order."""
    out = []
    for units in stages:
        found: list[UnitPrediction] = []
        joined = 0.0  # bytes of the gradients that a later reduction carries
        for u in reversed(units):
            c, t, choice = u.cost, u.cost.times, _as_run(problem, u, stages[0][0])
            alone = sharding_cost(problem, layout, u.spec.kind, choice)
            gather, reduce, size = c.gather, c.reduce + c.across, alone.gradient_bytes
            if choice != u.choice:
                gather, reduce = alone.gather, alone.reduce + alone.across
            elif (c.reduce, c.gradient_bytes) != (alone.reduce, alone.gradient_bytes):  # it is reduced with others
                joined += alone.gradient_bytes
                size = joined if c.reduce else 0.0
                joined = 0.0 if c.reduce else joined
            found.append(
                UnitPrediction(
                    u.spec.name,
                    t.forward,
                    t.input_grad + t.recompute,
                    t.weight_grad,
                    t.recompute,
                    t.grid,
                    gather,
                    reduce,
                    alone.gathered_bytes if gather else 0.0,
                    size if reduce else 0.0,
                    c.updated,
                    choice.mode if gather else "replicate",
                    choice.reduce if layout.replicas > 1 else "step",
                    c.slices,
                    "full" if choice.recompute == "per-slice" else choice.recompute,
                )
            )
        out.append(tuple(found[::-1]))
    return tuple(out)


def _as_run(problem: PlanProblem, u: PlannedUnit, first: PlannedUnit) -> UnitChoice:
    """A unit's choice; a tied head is sharded as the embedding is (program/choices.py)."""
    if not problem.spec.tied or u.spec.layer != problem.spec.layers - 1:
        return u.choice
    return u.choice._replace(mode=first.choice.mode, reduce=first.choice.reduce, within=first.choice.within)


def _units_to_dict(stages: Sequence[Sequence[UnitPrediction]]) -> dict[str, Any]:
    """`units`: by stage, pairs of a name and a place in `unit_seconds`."""
    places: dict[tuple[Any, ...], int] = {}
    units = [[[u.name, places.setdefault(_rounded(u), len(places))] for u in stage] for stage in stages]
    return {"units": units, "unit_seconds": [dict(zip(UnitPrediction._fields[1:], row, strict=True)) for row in places]}


def _rounded(u: UnitPrediction) -> tuple[Any, ...]:
    return (*(float(f"{x:.6g}") for x in u[1:8]), *map(round, u[8:11]), *u[11:])
