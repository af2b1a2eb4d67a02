"""Shards any nn.Module, unit by unit, for your own training loop.

    model = ff.parallelize(module, plan)                    # on every rank, with the same weights
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for inputs, targets in batches:                         # this rank's part of the batch
        loss = model.step((inputs, targets))                # the mean over all ranks
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()

The module takes a batch's tensors and returns its mean loss. Its units are the modules that a rule names, outermost first; then
the elements of every nn.ModuleList among the remaining modules; and `rest`, all other parameters. A rule with `split` that names
an nn.Linear splits it along its inputs. `recompute` and `precision.compile` apply to every unit except `rest`, which is not a
module. `parameters()` are flat ranges of this rank's shards, one per parameter that overlaps them, for any elementwise optimizer.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fourfold import schema
from fourfold.collectives import Pending, all_reduce
from fourfold.errors import PlanError
from fourfold.piece import whole
from fourfold.plan import Plan, UnitRule
from fourfold.runtime.stage import keep_products
from fourfold.shard.hooks import HookDriver, Hooked
from fourfold.shard.joined import join
from fourfold.shard.sharing import Reductions, Sharing
from fourfold.shard.split import LinearSlice, slices_of
from fourfold.shard.split_linear import SplitLinear
from fourfold.shard.unit import Unit
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import make_sharing

__all__ = ["Parallel", "parallelize"]

REST = "rest"


def parallelize(module: nn.Module, plan: Plan, mesh: RankMesh | None = None) -> Parallel:
    """Shard `module` by the plan's rules. Its weights must be equal on all ranks; its parameters are replaced."""
    if mesh is None:
        mesh = RankMesh(plan.mesh, dist.get_rank() if dist.is_initialized() else 0)
    return Parallel(module, plan, mesh)


class Parallel:
    """A module whose units are driven by hooks."""

    def __init__(self, module: nn.Module, plan: Plan, mesh: RankMesh):
        _check(plan)
        self.module, self.plan, self.mesh = module, plan, mesh
        self.micro_batches = plan.batch.micro_batches or 1
        self.replicas = mesh.size("data", "depth")
        self.world = mesh.group("data", "depth", use="gradients")
        split = _split_names(module, plan)
        names = _unit_names(module, plan, split)
        shards = {n: _shards(plan, n, self.replicas) for n in [*names, *split]}
        sharings = {count: make_sharing(mesh, count) for count in sorted(set(shards.values()))}
        reductions = Reductions(min(plan.memory.prefetch, 1))
        parts: list[Hooked] = []
        for name in split:
            parts += self._split(name, sharings[shards[name]], reductions)
        # largest unit last: the others have only their shards by then
        order = sorted(names, key=lambda n: sum(p.numel() for p in module.get_submodule(_path(n)).parameters()))
        made = {n: _make_unit(n, module, names, sharings[shards[n]], reductions, plan) for n in order}
        for name in names:
            unit, rule = made[name], plan.rule_for(name)
            mode = rule.mode if shards[name] > 1 else "replicate"
            part = module.get_submodule(_path(name))
            if name != REST:
                _wrap(part, rule, compiled=plan.precision.compile)
            parts.append(Hooked(unit, part, mode, rule.reduce))
        wholes = [
            p.unit for p in reversed(parts) if (p.mode, p.reduce) == ("replicate", "step") and p.unit.name in names
        ]
        join(sorted(wholes, key=lambda unit: unit.name == REST))  # `rest` is complete after all others
        self.driver = HookDriver(parts, plan.memory.prefetch)
        self.units = [part.unit for part in parts]
        self._flat = {
            f"{unit.name}.{slot.name}" if unit.name != REST else slot.name: (
                nn.Parameter(unit.shard[start:stop]),
                unit,
                start,
                stop,
            )
            for unit in self.units
            for slot, start, stop in unit.slots()
        }

    def _split(self, name: str, sharing: Sharing, reductions: Reductions) -> list[Hooked]:
        """Replace an nn.Linear by a SplitLinear, whose slices are units without module hooks."""
        linear, rule = self.module.get_submodule(name), self.plan.rule_for(name)
        mode = rule.mode if sharing.shards > 1 else "replicate"
        values = {f"{name}.{n}": p.detach() for n, p in linear.named_parameters()}
        first = values[f"{name}.weight"]
        parts, slices = [], []
        for i, each in enumerate(slices_of(name, linear, rule.split)):
            unit = Unit.of(
                f"{name}/{i}",
                each.module,
                pieces=each.pieces,
                device=first.device,
                compute=first.dtype,
                reduce=torch.promote_types(torch.float32, first.dtype),
                sharing=sharing,
                reductions=reductions,
            )
            for n, (piece,) in each.pieces.items():
                unit.params[n].data.copy_(values[piece.name][tuple(slice(*s) for s in piece.global_slice)])
            unit.scatter()
            assert isinstance(each.module, LinearSlice)
            slices.append((unit, each.module))
            parts.append(Hooked(unit, each.module, mode, rule.reduce))
        owner, _, leaf = name.rpartition(".")
        made = SplitLinear(
            slices,
            prefetch=self.plan.memory.prefetch,
            kept=lambda: mode in ("zero2", "keep") and torch.is_grad_enabled(),
            made=lambda i: self.driver.made(parts[i]),
        )
        setattr(self.module.get_submodule(owner), leaf, made)
        return parts

    # ---- a step ----

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        """Forward and backward of this rank's batch, in micro-batches; returns the mean loss over all ranks."""
        total: Tensor | None = None
        for m, part in enumerate(self._parts(batch)):
            last = m == self.micro_batches - 1
            self.driver.open(last=last)
            loss = self.module(*part) / (self.micro_batches * self.replicas)
            total = loss.detach().clone() if total is None else total + loss.detach()
            if last:  # overlaps with the backward
                summed = self._start_sum(total, "the loss")
            loss.backward()
            self.driver.close()
        self.driver.finish()
        for parameter, unit, start, stop in self._flat.values():
            assert unit.shard_grad is not None
            parameter.grad = unit.shard_grad[start:stop].to(parameter.dtype)
        assert total is not None
        summed.wait()
        return total

    @torch.no_grad()
    def eval_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The mean loss over all ranks, without gradients."""
        training = self.module.training
        self.module.eval()
        try:
            self.driver.open(last=True)
            loss = self.module(*batch) / self.replicas
            self.driver.close()
        finally:
            self.module.train(training)
        return self._sum(loss, "the loss")

    def zero_grad(self) -> None:
        """Discard the gradients and free their memory."""
        for parameter, *_ in self._flat.values():
            parameter.grad = None
        for unit in self.units:
            unit.zero_grad()

    @torch.no_grad()
    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `limit`; returns the norm before."""
        squares = torch.zeros((), dtype=torch.float64, device=self.units[0].full.device)
        for parameter, unit, *_ in self._flat.values():
            if parameter.grad is not None and unit.sharing.copy == 0:
                squares += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        norm = self._sum(squares, "the gradient norm").sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for parameter, *_ in self._flat.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        return norm

    # ---- weights ----

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's shards, flat."""
        return (parameter for parameter, *_ in self._flat.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, (parameter, *_) in self._flat.items())

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The whole serial state, on every rank; one unit is gathered at a time."""
        out: dict[str, Tensor] = {}
        for unit in self.units:
            unit.gather()
            unit.need()
            for n, pieces in unit.pieces.items():
                for piece in pieces:
                    whole = out.setdefault(piece.name, unit.params[n].new_empty(piece.global_shape))
                    part = unit.params[n].detach()[tuple(slice(*s) for s in piece.local_slice)]
                    whole[tuple(slice(*s) for s in piece.global_slice)] = part
            unit.release()
        return out

    # ---- parts ----

    def _parts(self, batch: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        sizes = {len(t) for t in batch}
        if len(sizes) != 1 or next(iter(sizes)) % self.micro_batches:
            raise PlanError(
                f"a batch of {sorted(sizes)} does not divide into batch.micro_batches = {self.micro_batches} equal parts"
            )
        return zip(*(t.chunk(self.micro_batches) for t in batch), strict=True)

    def _sum(self, value: Tensor, what: str) -> Tensor:
        self._start_sum(value, what).wait()
        return value

    def _start_sum(self, value: Tensor, what: str) -> Pending:
        return all_reduce(value, self.world, what) if self.world is not None else Pending(None, what)


def _check(plan: Plan) -> None:
    for axis in ("pipe", "row", "col"):
        if getattr(plan.mesh, axis) > 1:
            raise PlanError(
                f"mesh.{axis} = {getattr(plan.mesh, axis)}: parallelize runs a module as it is, on data and depth alone; "
                f"use {axis} = 1"
            )
    for name in ("optimizer", "activations"):
        if getattr(plan.memory, name) == "host":
            instead = "give parameters() to ff.StreamedAdamW" if name == "optimizer" else "use recompute"
            raise PlanError(f"memory.{name} = 'host': parallelize leaves {name} to your loop; {instead}")
    plan.check_sharding([rule.match for rule in plan.unit])


def _wrap(module: nn.Module, rule: UnitRule, *, compiled: bool) -> None:
    """Wrap a unit's forward for recomputation or compilation; its hooks stay outside."""
    run = module.forward
    if rule.recompute != "none":
        context = keep_products if rule.recompute == "selective" else noop_context_fn
        run = functools.partial(checkpoint, run, use_reentrant=False, context_fn=context)
    if compiled:
        run = torch.compile(run)
    if run != module.forward:
        module.forward = run


def _unit_names(module: nn.Module, plan: Plan, split: list[str]) -> list[str]:
    """The unsplit units in the order of the module, then `rest` if there is one."""
    everything = [name for name, child in module.named_modules() if name and any(True for _ in child.parameters())]
    for rule in plan.unit:
        if rule.match not in ("*", REST) and not fnmatch.filter(everything, rule.match):
            raise PlanError(f"no module matches '{rule.match}'{schema.nearest(rule.match, everything)}")
    lists = tuple(name for name, child in module.named_modules() if isinstance(child, nn.ModuleList))
    named = [n for n in everything if any(r.match != "*" and fnmatch.fnmatchcase(n, r.match) for r in plan.unit)]
    whole = {n for n, _ in module.named_parameters() if n.rpartition(".")[0] not in split}
    chosen: list[str] = []
    for name in [*named, *(n for n in everything if n.rpartition(".")[0] in lists)]:
        inside = any(name == c or name.startswith(f"{c}.") or c.startswith(f"{name}.") for c in chosen)
        holds = any(n.startswith(f"{name}.") for n in whole)
        if not inside and holds and not isinstance(module.get_submodule(name), nn.ModuleList):
            chosen.append(name)
    chosen.sort(key=everything.index)
    left = [n for n in whole if not any(n.startswith(f"{c}.") for c in chosen)]
    for rule in plan.unit:
        if rule.recompute != "none" and not any(plan.rule_for(name) is rule for name in [*chosen, *split]):
            raise PlanError(
                f"unit '{rule.match}': recompute = '{rule.recompute}': what is computed again is a module's forward, and "
                f"'{REST}' has none; name modules, such as '{next(iter(everything), '*')}'"
            )
    return [*chosen, REST] if left else chosen


def _split_names(module: nn.Module, plan: Plan) -> list[str]:
    """The linear layers that rules split."""
    out = []
    for name, child in module.named_modules():
        rule = next((r for r in plan.unit if r.match != "*" and fnmatch.fnmatchcase(name, r.match)), None)
        if rule is None or rule.split == 1:
            continue
        if type(child) is not nn.Linear:
            raise PlanError(
                f"unit '{rule.match}': split = {rule.split}: '{name}' is no nn.Linear; name one, or use split = 1"
            )
        if rule.split > child.in_features:
            raise PlanError(
                f"unit '{rule.match}': split = {rule.split} is wider than '{name}', which has {child.in_features} inputs; "
                f"use at most {child.in_features}"
            )
        out.append(name)
    return out


def _shards(plan: Plan, name: str, replicas: int) -> int:
    rule = plan.rule_for(name)
    return 1 if rule.mode == "replicate" else rule.within or replicas


def _path(name: str) -> str:
    """A unit's module; for `rest`, the root module."""
    return "" if name == REST else name


@torch.no_grad()
def _make_unit(
    name: str, root: nn.Module, names: list[str], sharing: Sharing, reductions: Reductions, plan: Plan
) -> Unit:
    """Make a unit of a module, with the module's weights."""
    module = root.get_submodule(_path(name))
    others = tuple(f"{n}." for n in names if n != REST) if name == REST else ()
    values = {n: p.detach() for n, p in module.named_parameters() if not n.startswith(others)}
    prefix = "" if name == REST else f"{name}."
    same = _aliases(root, prefix, values)
    first = next(iter(values.values()))
    reduce: torch.dtype = torch.promote_types(torch.float32, first.dtype)
    unit = Unit.of(
        name,
        module,
        names=list(values),
        pieces={n: (whole(prefix + n, tuple(v.shape)),) for n, v in values.items()},
        device=first.device,
        compute=first.dtype,
        reduce=reduce,
        sharing=sharing,
        reductions=reductions,
    )
    for n, value in values.items():
        unit.params[n].data.copy_(value)
    for alias, n in same.items():
        unit.put(module, alias, unit.params[n])
    unit.scatter()
    return unit


def _aliases(root: nn.Module, prefix: str, values: dict[str, Tensor]) -> dict[str, str]:
    """Further names of a unit's shared parameters inside the unit; raises if a parameter is shared with another unit."""
    every = dict(root.named_parameters(remove_duplicate=False))
    out = {}
    for name in values:
        for other, parameter in every.items():
            if parameter is every[prefix + name] and other != prefix + name:
                if not other.startswith(prefix):
                    raise PlanError(
                        f"'{prefix}{name}' and '{other}' are one parameter in two units; let one rule match a module that "
                        "holds both, or none"
                    )
                out[other.removeprefix(prefix)] = name
    return out
