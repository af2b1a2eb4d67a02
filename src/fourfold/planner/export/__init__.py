"""A plan as options of other systems, each with what is lost in translation.

torchtitan: command-line overrides (and the schedule as CSV). Megatron-LM: arguments. Neither has a choice per unit, so the
commonest one is taken and the rest is reported as lost; where that no longer fits, more is recomputed, or it is reported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fourfold import schema
from fourfold.errors import PlanError
from fourfold.plan import Plan, UnitRule
from fourfold.planner.evaluate import fits, predict
from fourfold.planner.problem import PlanProblem
from fourfold.schema import format_bytes, format_seconds

__all__ = ["ExportedPlan", "common_losses", "export", "uniform_units"]

RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""From the least recomputation to the most."""


@dataclass(frozen=True)
class ExportedPlan:
    """Options for another system."""

    system: str
    options: tuple[str, ...]
    lost: tuple[str, ...] = ()
    """What of the plan the other system cannot do."""
    files: dict[str, str] = field(default_factory=dict)
    """Files the options refer to, by name."""
    predicted: str = ""
    """What the plan takes and holds there."""

    def __str__(self) -> str:
        lines = [f"# {self.system}", *self.options]
        lines += [f"# predicted there: {self.predicted}"] if self.predicted else []
        lines += [f"# lost: {what}" for what in self.lost]
        return "\n".join(lines)

    def write(self) -> None:
        """Write the files."""
        for name, text in self.files.items():
            schema.write_text(Path(name), text)


def export(plan: Plan, problem: PlanProblem, system: Literal["torchtitan", "megatron"], csv: str = "") -> ExportedPlan:
    """The plan for another system. `csv`: name of the schedule's file, where one is needed."""
    if system not in ("torchtitan", "megatron"):
        raise PlanError(f"plans are exported to torchtitan and megatron; found '{system}'")
    problem = replace(
        problem, precision=plan.precision, moments=plan.memory.moments, logits=plan.memory.logits
    ).with_engine(system)
    if system == "torchtitan":
        from fourfold.planner.export.torchtitan import to_torchtitan

        return to_torchtitan(plan, problem, csv)
    from fourfold.planner.export.megatron import to_megatron

    return to_megatron(plan, problem)


def _commonest(plan: Plan, problem: PlanProblem, name: str) -> tuple[Any, bool]:
    """The commonest value of a unit rule's field over the model's units, and whether all have it."""
    counts = Counter(getattr(plan.rule_for(u.name), name) for u in problem.spec.units if u.layer > 0)
    value, count = counts.most_common(1)[0]
    return value, count == sum(counts.values())


def uniform_units(
    plan: Plan, problem: PlanProblem, lost: list[str], optimizer: Literal["device", "host", "auto"]
) -> dict[str, Any]:
    """The commonest choice, for all units; `optimizer`: where the other system keeps its state."""
    out: dict[str, Any] = {}
    for name in ("mode", "reduce", "within", "split"):
        out[name], uniform = _commonest(plan, problem, name)
        if not uniform:
            lost.append(f"`{name}` is chosen unit by unit; the commonest, {out[name]!r}, is used for all")
    if out["split"] > 1:
        lost.append(f"operator splitting (split = {out['split']})")
    return out | _recompute_that_fits(plan, problem, out, optimizer, lost)


def _recompute_that_fits(
    plan: Plan,
    problem: PlanProblem,
    units: dict[str, Any],
    optimizer: Literal["device", "host", "auto"],
    lost: list[str],
) -> dict[str, Any]:
    """Recomputation for all units with which the translated plan fits by the planner's model; and the share of the optimizer's
    state on the host then."""
    commonest, uniform = _commonest(plan, problem, "recompute")
    wanted = commonest if commonest in RECOMPUTE else "full"
    base = UnitRule(match="*", mode=units["mode"], reduce=units["reduce"], within=units["within"])
    base = replace(base, mode="keep") if plan.mesh.pipe > 1 and base.mode == "zero3" else base
    memory = replace(plan.memory, activations="device", optimizer=optimizer, device_state="")
    for level in RECOMPUTE[RECOMPUTE.index(wanted) :]:
        found = predict(replace(plan, unit=(replace(base, recompute=level),), memory=memory), problem)
        fit = fits(found.memory, problem.cluster, problem.cluster.usable)
        if fit:
            break
    if not uniform or level != wanted:
        why = f"the commonest, {level!r}," if level == wanted else f"{level!r}, with which the plan fits,"
        lost.append(f"`recompute` as chosen; {why} is used for all")
    if not fit:
        need, there = format_bytes(found.peak.peak), format_bytes(problem.cluster.usable)
        lost.append(f"what made it fit: with these options about {need} are needed on a device, which has {there}")
    held = f"{format_bytes(found.peak.peak)} of {format_bytes(problem.cluster.usable)} on a device"
    predicted = f"{format_seconds(found.seconds)} a step, {held}" + ("" if fit else ", which does not fit")
    return {"recompute": level, "host_state": found.host_state, "predicted": predicted}


def common_losses(plan: Plan, lost: list[str]) -> None:
    if plan.mesh.row > 1 or plan.mesh.depth > 1:
        lost.append(
            f"the grid's rows and depth ({plan.mesh.row} × {plan.mesh.depth}): they become data parallelism, "
            "so activations and weights are laid out differently"
        )
    if plan.pipeline.executor == "message-driven":
        lost.append("the message-driven executor")
    if plan.precision.compute == "fp64":
        lost.append("fp64: fp32 is used")
    if plan.memory.moments != "fp32":
        lost.append(f"the optimizer's moments in {plan.memory.moments}: fp32 is used")
