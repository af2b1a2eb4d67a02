"""What a plan's rules come to for each unit of a model: its mode, in how many shards and slices, what is computed again.

- A mode on a replica group of one, or `within = 1`, shards nothing: it is `replicate`.
- A tied head's matrix is the embedding's, so the head follows the embedding's mode, `within` and `reduce`.
- `split` cuts the MLP along its hidden size and the head along the vocabulary, into *slices* that are units of their own,
  named `head/0`, `head/1`, …; other units stay whole. An MLP's slice is one unit where it is computed again (`per-slice` or
  `full`), else two, `blocks.3.mlp/0.up` and `blocks.3.mlp/0.down`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.spec import unit_names
from fourfold.plan import Plan

__all__ = ["UnitChoice", "unit_choices"]


@dataclass(frozen=True)
class UnitChoice:
    """How one unit of the model is run."""

    names: tuple[str, ...]
    """The units it becomes: itself, or its slices in order."""
    mode: Literal["replicate", "zero2", "zero3", "keep"]
    reduce: Literal["step", "micro-batch"]
    shards: int
    recompute: Literal["none", "selective", "full"]
    """Slices are computed again one by one."""
    slices: int = 1


def unit_choices(model: ModelConfig, plan: Plan) -> dict[str, UnitChoice]:
    """The choice for every unit of the model, by name, in forward order."""
    replicas = plan.mesh.data * plan.mesh.depth
    out = {}
    for name in unit_names(model):
        rule = plan.rule_for(name)
        sharing = plan.rule_for("embed") if name == "head" and model.tie else rule
        shards = 1 if sharing.mode == "replicate" else sharing.within or replicas
        slices = _slices(name, rule.split, model, plan)
        recompute = "full" if rule.recompute == "per-slice" else rule.recompute
        out[name] = UnitChoice(
            names=_names(name, slices, recompute),
            slices=slices,
            mode=sharing.mode if shards > 1 else "replicate",
            reduce=sharing.reduce if replicas > 1 else "step",
            shards=shards,
            recompute=recompute,
        )
    return out


def _names(name: str, slices: int, recompute: str) -> tuple[str, ...]:
    if slices == 1:
        return (name,)
    parts = ("",) if name == "head" or recompute == "full" else (".up", ".down")
    return tuple(f"{name}/{i}{part}" for i in range(slices) for part in parts)


def _slices(name: str, split: int, model: ModelConfig, plan: Plan) -> int:
    """Into how many slices a unit is cut: on a grid, each column's block of it."""
    if name != "head" and not name.endswith(".mlp"):
        return 1
    assert model.ffn is not None
    width, what, ways = model.ffn, "hidden features", plan.mesh.col
    if name == "head":
        width, what, ways = model.vocab, "words", plan.mesh.col * plan.mesh.row
    most = -(-width // ways)
    if split > most:
        cut = f"{most} of {width} {what} on a rank of the grid" if ways > 1 else f"{width} {what}"
        raise PlanError(f"unit '{name}': split = {split} is wider than the layer, which has {cut}; use at most {most}")
    return split
