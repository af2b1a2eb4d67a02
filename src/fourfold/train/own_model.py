"""A user's own model in a run: an ordered list of layers, each a unit, under pipelines, sharding and, with rules, a tensor grid.

    nn.Sequential(…), a list of layers, or a module whose method layers() returns them by name, in order

The arguments of a layer are the output of the previous one (a tensor, or a tuple of tensors); the first layer takes the batch's
`inputs`, and the output of the last is passed to the loss. Every rank builds the whole model and keeps its own stages' layers. A
function instead of a model is called after seeding torch with `train.seed`, so that all ranks have the same weights.

Names are those of the module's state dict, so checkpoints and `final/model.safetensors` open in plain torch. Frozen parameters
are units of their own ([Note: frozen weights] in shard/unit.py); checkpoints do not have them, `final/` does. One parameter may
be used by two layers (a tied head); with the layers on two ranks, gradients and new weights are exchanged (shard/tied.py).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold import files
from fourfold.errors import ConfigError, RunDirError
from fourfold.model.spec import OwnLayers
from fourfold.piece import Piece
from fourfold.plan import Plan
from fourfold.program.stages import PipelineLayout
from fourfold.shard.joined import join_units
from fourfold.shard.sharing import Reductions
from fourfold.shard.split import Slice
from fourfold.shard.tied import TiedCopy, TiedOwner
from fourfold.shard.unit import Borrowed, Unit
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import GridSettings
from fourfold.tensor.own_layers import OwnRule, apply_rules
from fourfold.tensor.swap import GRID_MODULES, pieces_of
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import RankUnits, make_sharing

__all__ = ["OwnModel", "check_frozen", "make_own_units"]

FROZEN = "frozen.json"


class Tie(NamedTuple):
    """A parameter of two layers: (layer, its name there) of the first use and of the second."""

    first: str
    name: str
    second: str
    other: str


@dataclass(frozen=True)
class OwnModel:
    """The layers of a user's model by name, in order, with their weights."""

    layers: dict[str, nn.Module]
    tie: Tie | None = None
    rules: Mapping[type, OwnRule] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of parameters in the state dict."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Values of the frozen parameters, on the rank that writes final/."""

    @classmethod
    def of(cls, model: Any, seed: int, rules: Mapping[type, OwnRule] | None = None) -> OwnModel:
        """Take a model, a list of layers, or a function that makes one; raises ConfigError if it has no order of layers.

        `rules`: how modules of some classes lie on a tensor grid (tensor/own_layers.py).
        """
        if not isinstance(model, nn.Module) and callable(model):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = model()
        if isinstance(model, Sequence) and all(isinstance(layer, nn.Module) for layer in model):
            model = nn.Sequential(*model)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model = a {type(model).__name__}: expected a module, a list of layers, or a function")
        layers = _layers(model)
        if rules is not None:
            _check_rules(model, rules)
        return cls(layers, _check(model, layers), rules, _aliases(model))

    @property
    def outline(self) -> OwnLayers:
        """What a plan needs to know about it."""
        counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in self.layers.items()}
        tied = {} if self.tie is None else {self.tie.second: self.tie.first}
        return OwnLayers(counts, tied, grid=self.rules is not None)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in {id(p): p for layer in self.layers.values() for p in layer.parameters()}.values())

    def frozen_parameters(self) -> dict[str, Tensor]:
        found = {f"{name}.{n}": p for name, layer in self.layers.items() for n, p in layer.named_parameters()}
        return {name: p.detach() for name, p in found.items() if not p.requires_grad}

    def fingerprint(self, *, frozen: bool = False) -> str:
        """Names the weights, or the frozen ones: equal on ranks that have the same."""
        digest = hashlib.blake2b(digest_size=8)
        for name, layer in self.layers.items():
            for n, p in layer.named_parameters():
                if not (frozen and p.requires_grad):
                    digest.update(f"{name}.{n} {tuple(p.shape)} {float(p.detach().double().sum())!r}".encode())
        return digest.hexdigest()


def check_frozen(run: Path, fingerprint: str, *, first: bool) -> None:
    """Record which frozen weights a run began with (`first`), or refuse others; no checkpoint has them."""
    path = run / FROZEN
    if first:
        files.write_json(path, {"fingerprint": fingerprint}, RunDirError)
        return
    known = files.read_json(path, RunDirError, follow=False)
    if not isinstance(known, dict) or known.get("fingerprint") != fingerprint:
        raise ConfigError(
            "the frozen parameters of your model are not those that this run began with; give the same ones, or start a new run"
        )


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


def _check_rules(model: nn.Module, rules: Mapping[type, OwnRule]) -> None:
    kinds = {type(module) for module in model.modules()}
    for kind, rule in rules.items():
        if not isinstance(kind, type) or not callable(rule):
            raise ConfigError(f"grid_rules has {kind!r}: {rule!r}; expected a class of modules, and a function for it")
        if kind not in kinds:
            there = ", ".join(sorted(k.__name__ for k in kinds))
            raise ConfigError(
                f"grid_rules has a rule for {kind.__name__}, and no module of the model is one; there are {there}"
            )
    if not rules:
        raise ConfigError("grid_rules is empty; leave it out, or give a rule for a class of modules")


def _check(model: nn.Module, layers: dict[str, nn.Module]) -> Tie | None:
    """Raise ConfigError for what would be computed otherwise than in one process, or not at all; returns a shared parameter."""
    owner: dict[int, tuple[str, str]] = {}
    tie: Tie | None = None
    used: dict[int, str] = {}
    for name, layer in layers.items():
        if id(layer) in used and any(True for _ in layer.parameters()):
            raise ConfigError(
                f"'{used[id(layer)]}' and '{name}' are one layer, used twice; make two layers, which may share one parameter"
            )
        used[id(layer)] = name
        for n, p in layer.named_parameters():
            if id(p) in owner:
                if tie is not None:
                    raise ConfigError(
                        f"'{tie.first}.{tie.name}' and '{tie.second}.{tie.other}' are one parameter, and so are "
                        f"'{'.'.join(owner[id(p)])}' and '{name}.{n}'; only one parameter may be shared, by two layers: make one "
                        "layer of those that share more, or give each its own"
                    )
                tie = Tie(*owner[id(p)], name, n)
            owner.setdefault(id(p), (name, n))
            if p.device.type == "meta":
                raise ConfigError(
                    f"'{name}.{n}' has no values (it is on the meta device); give the model its weights first"
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
    if not any(p.requires_grad for layer in layers.values() for p in layer.parameters()):
        found = "all parameters are frozen" if owner else "the model has no parameters"
        raise ConfigError(f"{found}; there is nothing to train")
    return tie


@torch.no_grad()
def make_own_units(
    own: OwnModel,
    plan: Plan,
    mesh: RankMesh,
    grid: Grid,
    layout: PipelineLayout,
    setting: GridSettings,
    *,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> RankUnits:
    """The units of this rank's stages with the model's weights, which become views of them; other layers are left alone.

    A layer with frozen parameters is two units: its base has these, and the layer's own unit borrows them.
    """
    sharings = {shards: make_sharing(mesh, shards) for shards in sorted({c.shards for c in layout.choices.values()})}
    reductions = Reductions(min(plan.memory.prefetch, 1))
    here, place, tie = mesh.coordinates["pipe"], layout.rank_of, own.tie
    row, plane, on_grid = grid.row.group, mesh.group("row", "col"), grid.row.size * grid.col.size > 1
    held = RankUnits({}, {}, {})

    def make(name: str, of: str, borrow: dict[str, Borrowed]) -> Unit:
        layer = own.layers[of]
        serial = {f"{of}.{n}": p.detach() for n, p in layer.named_parameters()}
        frozen = {f"{of}.{n}" for n, p in layer.named_parameters() if not p.requires_grad}
        aliases = _aliases(layer)
        if on_grid and own.rules is not None:
            layer = own.layers[of] = apply_rules(layer, setting, own.rules)
        if _aliases(layer) != aliases:
            raise ConfigError(
                f"layer '{of}': a grid rule separates {next(iter(aliases))!r} from the parameter that it is"
            )
        for child in layer.modules():
            for n, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[n] = buffer.to(device, compute if buffer.is_floating_point() else None)
        pieces = pieces_of(layer, of, grid)
        for n, parameter in layer.named_parameters():
            if (found := serial.get(f"{of}.{n}")) is None or any(p.global_shape != found.shape for p in pieces[n]):
                raise ConfigError(
                    f"layer '{of}': a grid rule made the parameter '{n}', which the layer has not; keep names and shapes"
                )
            if tie is not None and (of, n) in (tie[:2], tie[2:]) and parameter.shape != found.shape:
                raise ConfigError(
                    f"'{tie.first}.{tie.name}' and '{tie.second}.{tie.other}' are one parameter, and a grid rule divides it; "
                    "leave its modules out of the rules"
                )
            parameter.requires_grad_(f"{of}.{n}" not in frozen)
        names = [n for n, _ in layer.named_parameters() if n not in borrow]
        base = [n for n in names if f"{of}.{n}" in frozen]
        lent = dict(borrow)
        if base:
            held.bases[name] = make_one(f"{name} (base)", of, layer, base, pieces, serial, {})
            lent |= {n: Borrowed(held.bases[name], n) for n in base}
        unit = make_one(name, of, layer, [n for n in names if n not in lent], pieces, serial, lent)
        for alias, n in aliases.items():
            (held.bases[name] if n in base else unit).alias(layer, alias, n)
        return unit

    def make_one(
        name: str,
        of: str,
        layer: nn.Module,
        names: list[str],
        pieces: dict[str, tuple[Piece, ...]],
        serial: dict[str, Tensor],
        lent: dict[str, Borrowed],
    ) -> Unit:
        over = {n: pieces[n][0].copies_over if pieces[n] else () for n in names}
        sums = {n: plane if "col" in axes else row for n, axes in over.items() if {"row", "col"} & {*axes}}
        kept = [n for n in names if "col" in over[n] and not isinstance(_owner(layer, n), GRID_MODULES)]
        unit = Unit.of(
            name,
            layer,
            pieces=pieces,
            borrow=lent,
            device=device,
            compute=compute,
            reduce=reduce,
            sharing=sharings[layout.choices[of].shards],
            reductions=reductions,
            sum_over={n: group for n, group in sums.items() if group is not None},
            names=names,
            silent=kept if grid.col.index else (),
        )
        if kept and grid.col.group is not None:
            unit.before_sums = _SameOnAllColumns(kept, grid.col)
        for n, parameter in unit.params.items():
            for piece in pieces[n]:
                value = serial[piece.name][tuple(slice(*s) for s in piece.global_slice)]
                parameter.data[tuple(slice(*s) for s in piece.local_slice)] = value.to(device, compute)
        unit.scatter()
        return unit

    separate = tie is not None and place[tie.first] != place[tie.second]
    exchanged = tie is not None and dict(own.layers[tie.first].named_parameters())[tie.name].requires_grad
    pair = None
    if tie is not None and separate and exchanged:
        pair = mesh.pair("pipe", place[tie.first], place[tie.second], use="tied")
    for name in own.layers:
        if place[name] != here:
            continue
        borrow: dict[str, Borrowed] = {}
        lender = None
        if tie is not None and name == tie.second:
            title = f"{tie.first} (copy)" if separate else tie.first
            lender = make(title, tie.first, {}) if separate else held.units[tie.first]
            lender = lender if exchanged else held.bases[title]
            borrow[tie.other] = Borrowed(lender, tie.name)
        held.units[name] = unit = make(name, name, borrow)
        held.slices[name] = Slice(own.layers[name], unit.pieces)
        if tie is not None and pair is not None and name == tie.first:
            held.ties[name] = TiedOwner(unit, pair, tie.name)
        elif tie is not None and pair is not None and lender is not None:
            held.ties[name] = TiedCopy(unit, lender, pair, tie.name)
    if plan.memory.optimizer == "device":
        shared = () if tie is None else (tie.first, tie.second)
        alone = [c for of, c in layout.choices.items() if c.shards == 1 and c.reduce == "step" and of not in shared]
        names = {c.names[0] for c in alone}
        for stage, units in enumerate(layout.units):
            if layout.schedule.placement[stage] == here:
                join_units([held.units[name] for name in reversed(units) if name in names])
    return held


def _owner(layer: nn.Module, name: str) -> nn.Module:
    return layer.get_submodule(name.rpartition(".")[0])


class _SameOnAllColumns:
    """Compares the gradients of kept parameters over the columns, in the first step: [Note: parameters that a layer keeps]."""

    def __init__(self, names: Sequence[str], col: Axis):
        self.names, self.col = names, col

    def __call__(self, unit: Unit) -> None:
        unit.before_sums = None
        found = torch.cat([unit.main_grad(n).flatten().double() for n in self.names])
        most, least = self.col.max(found), -self.col.max(-found)
        at = 0
        for n in self.names:
            size = unit.main_grad(n).numel()
            high, low = most[at : at + size], least[at : at + size]
            largest = float(torch.maximum(high.abs(), low.abs()).max())
            if float((high - low).max()) > 1e-3 * largest:
                raise ConfigError(
                    f"layer '{unit.name}': the gradient of '{n}' differs between columns, so it works on split features; a "
                    "parameter that a grid rule leaves alone must see all features: use on_grid(…, outputs='whole') before it"
                )
            at += size


def _aliases(layer: nn.Module) -> dict[str, str]:
    """Further names of parameters that a module uses twice."""
    first: dict[int, str] = {id(p): n for n, p in layer.named_parameters()}
    every = layer.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in every if first[id(p)] != n}
