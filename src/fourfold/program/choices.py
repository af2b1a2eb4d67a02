"""Resolves a plan's rules for each unit of a model: mode, number of shards, operator splitting, recomputation.

- On a replica group of one, or with `within = 1`, every mode is `replicate`.
- A tied head shares the embedding's matrix, so it takes the embedding's mode, `within` and `reduce`.
- `split` divides the MLP along its hidden size and the head along the vocabulary, into *slices* that are separate units,
  named `head/0`, `head/1`, …; other units are not split. An MLP slice is one unit if it is recomputed (`per-slice` or
  `full`), otherwise two: `blocks.3.mlp/0.up` and `blocks.3.mlp/0.down`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.spec import OwnLayers, unit_names
from fourfold.plan import Plan
from fourfold.program.modes import Mode, ReduceAfter

__all__ = ["ResolvedUnit", "resolve_units", "slice_names"]


@dataclass(frozen=True)
class ResolvedUnit:
    """The resolved options of one unit of the model."""

    names: tuple[str, ...]
    """Names of the units it is run as: itself, or its slices in order."""
    mode: Mode
    reduce: ReduceAfter
    shards: int
    recompute: Literal["none", "selective", "full"]
    """Activation recomputation; slices are recomputed one by one."""
    slices: int = 1


def resolve_units(model: ModelConfig | OwnLayers, plan: Plan) -> dict[str, ResolvedUnit]:
    """The options of every unit of the model, by name, in forward order."""
    replicas = plan.mesh.data * plan.mesh.depth
    out = {}
    for name in model.names if isinstance(model, OwnLayers) else unit_names(model):
        rule = sharing = plan.rule_for(name)
        if isinstance(model, OwnLayers):
            slices = _own_slices(name, rule.split)
            sharing = plan.rule_for(model.tied.get(name, name))
        else:
            slices = _slices(name, rule.split, model, plan)
            sharing = plan.rule_for("embed") if name == "head" and model.tie else rule
        shards = 1 if sharing.mode == "replicate" else sharing.within or replicas
        recompute = "full" if rule.recompute == "per-slice" else rule.recompute
        out[name] = ResolvedUnit(
            names=slice_names(name, slices, recompute),
            slices=slices,
            mode=sharing.mode if shards > 1 else "replicate",
            reduce=sharing.reduce if replicas > 1 else "step",
            shards=shards,
            recompute=recompute,
        )
    return out


def slice_names(name: str, slices: int, recompute: str) -> tuple[str, ...]:
    """Names of the units that a unit of the model is run as."""
    if slices == 1:
        return (name,)
    parts = ("",) if name == "head" or recompute == "full" else (".up", ".down")
    return tuple(f"{name}/{i}{part}" for i in range(slices) for part in parts)


def _own_slices(name: str, split: int) -> int:
    if split > 1:
        raise PlanError(f"unit '{name}': split = {split}: layers of your own model are not split; use split = 1")
    return 1


def _slices(name: str, split: int, model: ModelConfig, plan: Plan) -> int:
    """Number of slices of a unit; on a grid, each column slices its own block."""
    if name != "head" and not name.endswith(".mlp"):
        return 1
    if split > 1 and name != "head" and model.block in ("output", "sandwich"):
        raise PlanError(
            f"unit '{name}': split = {split}, but this MLP has a norm of its output (block = '{model.block}'), which needs the "
            f'sum of all slices; use split = 1 for it (the head can be split: match = "head")'
        )
    assert model.ffn is not None
    width, what, ways = model.ffn, "hidden features", plan.mesh.col
    if name == "head":
        width, what, ways = model.vocab, "vocabulary entries", plan.mesh.col * plan.mesh.row
    most = -(-width // ways)
    if split > most:
        cut = f"{most} of {width} {what} on a rank of the grid" if ways > 1 else f"{width} {what}"
        raise PlanError(f"unit '{name}': split = {split} exceeds the layer's width of {cut}; use at most {most}")
    return split
