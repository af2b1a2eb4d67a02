"""A user's own model in a run: an ordered list of layers, each a unit, under pipelines and sharding.

    nn.Sequential(…), a list of layers, or a module whose method layers() returns them by name, in order

The arguments of a layer are the output of the previous one (a tensor, or a tuple of tensors); the first layer takes the batch's
`inputs`, and the output of the last is passed to the loss. Every rank builds the whole model and keeps its own stages' layers. A
function instead of a model is called after seeding torch with `train.seed`, so that all ranks have the same weights.

Names are those of the module's state dict, so checkpoints and `final/model.safetensors` open in plain torch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fourfold.errors import ConfigError
from fourfold.model.spec import OwnLayers
from fourfold.piece import whole
from fourfold.plan import Plan
from fourfold.program.stages import PipelineLayout
from fourfold.shard.joined import join
from fourfold.shard.sharing import Reductions
from fourfold.shard.split import Slice
from fourfold.shard.unit import Unit
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import RankUnits, make_sharing

__all__ = ["OwnModel", "make_own_units"]


@dataclass(frozen=True)
class OwnModel:
    """The layers of a user's model by name, in order, with their weights."""

    layers: dict[str, nn.Module]

    @classmethod
    def of(cls, model: Any, seed: int) -> OwnModel:
        """From a model, a list of layers, or a function that makes one; raises ConfigError if the layers have no order."""
        if not isinstance(model, nn.Module) and callable(model):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = model()
        if isinstance(model, Sequence) and all(isinstance(layer, nn.Module) for layer in model):
            model = nn.Sequential(*model)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model = a {type(model).__name__}: expected a module, a list of layers, or a function")
        layers = _layers(model)
        _check(model, layers)
        return cls(layers)

    @property
    def outline(self) -> OwnLayers:
        """What a plan needs to know about it."""
        counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in self.layers.items()}
        return OwnLayers(counts)

    @property
    def parameters(self) -> int:
        return sum(self.outline.parameters.values())

    def fingerprint(self) -> str:
        """Identifies the weights: equal on ranks with equal weights."""
        digest = hashlib.blake2b(digest_size=8)
        for name, layer in self.layers.items():
            for n, p in layer.named_parameters():
                digest.update(f"{name}.{n} {tuple(p.shape)} {float(p.detach().double().sum())!r}".encode())
        return digest.hexdigest()


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    kind = type(model).__name__
    if isinstance(model, nn.Sequential):
        found: Any = dict(model._modules)  # named_children() omits the second use of a layer
    elif inspect.ismethod(getattr(model, "layers", None)):
        found = model.layers()  # type: ignore[operator]
    else:
        raise ConfigError(
            f"model = a {kind}: the order of its layers is unknown; pass an nn.Sequential or a list of layers, or add a "
            "method layers() that returns them by name, in order (ff.parallelize takes any module, without pipe)"
        )
    if not isinstance(found, Mapping) or not all(isinstance(v, nn.Module) for v in found.values()):
        raise ConfigError(
            f"{kind}.layers() must return a dict of modules by name, in order; found {type(found).__name__}"
        )
    for name, layer in found.items():
        if dict(model.named_modules(remove_duplicate=False)).get(name) is not layer:
            raise ConfigError(f"{kind}.layers() has '{name}', which is not the module of that name in it")
    if not found:
        raise ConfigError(f"model = a {kind} without layers")
    return dict(found)


def _check(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise ConfigError for anything that could not be computed as in one process."""
    owner: dict[int, str] = {}
    for name, layer in layers.items():
        for n, p in layer.named_parameters():
            if id(p) in owner:
                raise ConfigError(
                    f"'{owner[id(p)]}' and '{name}.{n}' are one parameter in two layers, which may be on two ranks; make one "
                    "layer of both, or give each its own"
                )
            owner[id(p)] = f"{name}.{n}"
            if p.device.type == "meta":
                raise ConfigError(
                    f"'{name}.{n}' has no values (it is on the meta device); give the model its weights first"
                )
            if not p.requires_grad:
                raise ConfigError(
                    f"'{name}.{n}' is frozen (requires_grad = False); fit trains all parameters of your own model"
                )
        for n, child in layer.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.track_running_stats:
                where = f"{name}.{n}".rstrip(".")
                raise ConfigError(
                    f"'{where}' is a {type(child).__name__}, whose running statistics depend on how the batch is divided; use "
                    "LayerNorm or GroupNorm, or track_running_stats=False"
                )
    outside = [n for n, p in model.named_parameters() if id(p) not in owner]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise ConfigError(
            f"'{outside[0]}'{more} belongs to no layer: parameters used outside of the layers would not be trained; move it "
            "into the layer that uses it"
        )
    if not owner:
        raise ConfigError("the model has no parameters; there is nothing to train")


@torch.no_grad()
def make_own_units(
    own: OwnModel,
    plan: Plan,
    mesh: RankMesh,
    layout: PipelineLayout,
    *,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> RankUnits:
    """The units of this rank's stages. The model's weights become views of them; other layers are unchanged."""
    sharings = {shards: make_sharing(mesh, shards) for shards in sorted({c.shards for c in layout.choices.values()})}
    reductions = Reductions(min(plan.memory.prefetch, 1))
    here, copies = mesh.coordinates["pipe"], tuple(axis for axis in ("data", "depth") if mesh.size(axis) > 1)
    held = RankUnits({}, {}, {})
    for name, layer in own.layers.items():
        if layout.rank_of[name] != here:
            continue
        values = {n: p.detach() for n, p in layer.named_parameters()}
        for child in layer.modules():
            for n, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[n] = buffer.to(device, compute if buffer.is_floating_point() else None)
        aliases = _aliases(layer)
        unit = Unit.of(
            name,
            layer,
            pieces={n: (whole(f"{name}.{n}", tuple(v.shape), copies),) for n, v in values.items()},
            device=device,
            compute=compute,
            reduce=reduce,
            sharing=sharings[layout.choices[name].shards],
            reductions=reductions,
        )
        for n, parameter in unit.params.items():
            parameter.data.copy_(values[n])
        for alias, n in aliases.items():
            unit.alias(layer, alias, n)
        unit.scatter()
        held.units[name] = unit
        held.slices[name] = Slice(layer, unit.pieces)
    if plan.memory.optimizer == "device":
        alone = [c for c in layout.choices.values() if c.shards == 1 and c.reduce == "step"]
        names = {c.names[0] for c in alone}
        for stage, units in enumerate(layout.units):
            if layout.schedule.placement[stage] == here:
                join([held.units[name] for name in reversed(units) if name in names])
    return held


def _aliases(layer: nn.Module) -> dict[str, str]:
    """Further names of parameters that a layer uses twice."""
    first: dict[int, str] = {id(p): n for n, p in layer.named_parameters()}
    every = layer.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in every if first[id(p)] != n}
