"""Shards any nn.Module, unit by unit, for your own training loop.

    model = ff.parallelize(module, plan)                    # on every rank; all start with rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in batches:                                   # this rank's part of the batch
        loss = model.step(batch)                            # the mean over all ranks
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()

Under torchrun or srun it joins the job's process group, unless one exists already; a plan without a mesh has data = ranks. The
module takes a batch's tensors (by position, or by name from a dict) and returns its mean loss, or an output with `loss`, as the
models of transformers do. Its units are the modules that a rule names, outermost first; then the elements of every nn.ModuleList
among the remaining modules; and `rest`, all other parameters. A rule with `split` that names an nn.Linear splits it along its
inputs. `recompute` and `precision.compile` apply to every unit except `rest`, which is not a module.

`parameters()` are flat ranges of this rank's shards, one per parameter that overlaps them, for any elementwise optimizer. A rank
whose shards are padding or frozen has one dummy zero parameter, so that every rank can make the same optimizer.

`save` and `load` store weights and optimizer state as a torch distributed checkpoint (DCP), each rank its own part, under the
module's names. A checkpoint saved under one plan loads under any other, and in plain torch.
"""

from __future__ import annotations

import atexit
import dataclasses
import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fourfold import schema
from fourfold.checkpoint.dcp import open_dcp
from fourfold.checkpoint.holdings import Chunks, Holding, chunks_of, held_boxes, holding_of
from fourfold.checkpoint.save_load import ChunkPlanner
from fourfold.collectives import Pending, all_reduce, broadcast
from fourfold.errors import CheckpointError, ConfigError, PlanError
from fourfold.launch.place import current_place, join_group, leave
from fourfold.piece import whole
from fourfold.plan import Mesh, Plan, UnitRule
from fourfold.program.modes import gathered_for_each_op
from fourfold.runtime.compiled import compiled
from fourfold.runtime.stage import keep_products
from fourfold.shard.hooks import HookDriver, Hooked, tensors_in
from fourfold.shard.joined import join_units
from fourfold.shard.sharing import Reductions, Sharing
from fourfold.shard.split import LinearSlice, slices_of
from fourfold.shard.split_linear import SplitLinear
from fourfold.shard.unit import Unit
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import make_sharing

__all__ = ["Parallel", "parallelize"]

REST = "rest"
IGNORE = -100
"""Label that a loss ignores, by the convention of torch and transformers."""
JOIN_SECONDS = 300.0


def parallelize(module: nn.Module, plan: Plan | None = None, mesh: RankMesh | None = None) -> Parallel:
    """Shard `module` by the plan's rules; call it on every rank of the job. Its parameters are replaced.

    Uses the existing process group, or joins that of torchrun or srun; without either, this process is the only rank. Without a
    plan, or a mesh in it, data = ranks. All ranks start with the weights of rank 0.
    """
    device, plan, place = _device(module), plan or Plan(), current_place()
    if plan.mesh == Mesh():
        plan = dataclasses.replace(plan, mesh=Mesh(data=place.ranks))
    _check(plan)
    plan.check_ranks(place.ranks)
    if place.ranks > 1 and not dist.is_initialized():
        join_group(place, None, device, JOIN_SECONDS)
        if device.type == "cpu":
            atexit.register(leave)
    return Parallel(module, plan, mesh or RankMesh(plan.mesh, place.rank))


class _FlatPart(NamedTuple):
    """A parameter of `parameters()`: elements [start, stop) of a unit's shard; `name`: the serial parameter's, or ""."""

    parameter: nn.Parameter
    unit: Unit
    start: int
    stop: int
    name: str


class Parallel:
    """A module whose units are driven by hooks."""

    def __init__(self, module: nn.Module, plan: Plan, mesh: RankMesh):
        _check(plan)
        _device(module)
        self.module, self.plan, self.mesh = module, plan, mesh
        self.micro_batches = plan.batch.micro_batches or 1
        self.replicas = self.ranks = mesh.size("data", "depth")
        self.rank = mesh.index("data", "depth")
        self.world = mesh.group("data", "depth", use="gradients")
        self._weighed = False  # whether labels were checked
        if self.world is not None:
            for value in [*module.parameters(), *module.buffers()]:
                sent = value.detach().contiguous()  # NCCL needs contiguous tensors
                broadcast(sent, 0, self.world, "the initial weights").wait()
                value.detach().copy_(sent)
        self._aliases = _all_aliases(module)
        self._buffer_names = sorted(dict(module.named_buffers()).keys() & module.state_dict().keys())
        self._frozen = {n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        split = _split_names(module, plan)
        names = _unit_names(module, plan, split)
        shards = {n: _shards(plan, n, self.replicas) for n in [*names, *split]}
        sharings = {count: make_sharing(mesh, count) for count in sorted(set(shards.values()))}
        reductions = Reductions(min(plan.memory.prefetch, 1))
        parts: list[Hooked] = []
        for name in split:
            parts += self._split(name, sharings[shards[name]], reductions)
        # largest unit last, when the others hold only their shards
        order = sorted(names, key=lambda n: sum(p.numel() for p in module.get_submodule(_path(n)).parameters()))
        made = {n: _make_unit(n, module, names, sharings[shards[n]], reductions) for n in order}
        for name in names:
            unit, rule = made[name], plan.rule_for(name)
            mode = rule.mode if shards[name] > 1 else "replicate"
            part = module.get_submodule(_path(name))
            if name != REST:
                _wrap(part, rule, compile=plan.precision.compile is True)
            parts.append(Hooked(unit, part, mode, rule.reduce))
        wholes = [
            p.unit for p in reversed(parts) if (p.mode, p.reduce) == ("replicate", "step") and p.unit.name in names
        ]
        join_units(sorted(wholes, key=lambda unit: unit.name == REST))  # `rest` is complete after all others
        self.driver = HookDriver(parts, plan.memory.prefetch)
        self.units = [part.unit for part in parts]
        self._flat = self._flat_parts()

    def _flat_parts(self) -> dict[str, _FlatPart]:
        """The trainable parts of this rank's shards by name; a dummy zero if there are none."""
        parts: dict[str, _FlatPart] = {}
        for unit in self.units:
            for slot, start, stop in unit.slots():
                serial = unit.pieces[slot.name][0].name
                if serial not in self._frozen:
                    name = slot.name if unit.name == REST else f"{unit.name}.{slot.name}"
                    parts[name] = _FlatPart(nn.Parameter(unit.shard[start:stop]), unit, start, stop, serial)
        if not parts:
            unit = self.units[0]
            parts["padding"] = _FlatPart(nn.Parameter(torch.zeros_like(unit.shard[:1])), unit, 0, 0, "")
        return parts

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
            kept=lambda: not gathered_for_each_op(mode) and torch.is_grad_enabled(),
            made=lambda i: self.driver.made(parts[i]),
        )
        setattr(self.module.get_submodule(owner), leaf, made)
        return parts

    # ---- a step ----

    def step(self, batch: Any, *, weight: Callable[[Any], Any] | None = None) -> Tensor:
        """Forward and backward of this rank's batch, in micro-batches; returns the mean loss over all ranks.

        `batch` is a tensor, a sequence of tensors, or a dict of them, which is passed by keyword; other values are passed to
        every micro-batch unchanged. The module's loss is a mean over its micro-batch. By default these means have equal weight;
        otherwise `weight(part)` returns the number of items that each is the mean of, and the result is the mean over all items.
        A weight on the GPU is waited for, since one of 0 changes what is computed; a number, or a tensor on the host, is not.
        """
        parts = self._parts(batch)
        shares = self._shares(parts, weight)
        total: Tensor | None = None
        for m, (part, share) in enumerate(zip(parts, shares, strict=True)):
            last = m == self.micro_batches - 1
            self.driver.open(last=last)
            loss = _loss_of(self._run(part), part, share)
            total = loss.detach().clone() if total is None else total + loss.detach()
            if last:  # overlaps with the backward
                summed = self._start_sum(total, "the loss")
            loss.backward()
            self.driver.close()
        self.driver.finish()
        for parameter, unit, start, stop, name in self._flat.values():
            assert unit.shard_grad is not None
            parameter.grad = unit.shard_grad[start:stop].to(parameter.dtype) if name else torch.zeros_like(parameter)
        assert total is not None
        summed.wait()
        return total

    @torch.no_grad()
    def eval_step(self, batch: Any, *, weight: Callable[[Any], Any] | None = None) -> Tensor:
        """The mean loss over all ranks, without gradients; dropout is off."""
        training = self.module.training
        self.module.eval()
        try:
            (share,) = self._shares([batch], weight)
            self.driver.open(last=True)
            loss = _loss_of(self._run(batch), batch, share)
            self.driver.close()
        finally:
            self.module.train(training)
        return self._sum(loss, "the loss")

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, without gradients (`step` trains). All ranks call it together if a unit is sharded."""
        self.driver.open(last=True)
        try:
            return self.module(*args, **kwargs)
        finally:
            self.driver.close()

    def train(self, mode: bool = True) -> Parallel:
        """Set training mode (dropout on), as in nn.Module."""
        self.module.train(mode)
        return self

    def eval(self) -> Parallel:
        """Set evaluation mode (dropout off)."""
        return self.train(False)

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
        """The whole serial state with the module's buffers, on every rank; one unit is gathered at a time."""
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
        return out | {name: value.clone() for name, value in self._buffers().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the weights and buffers of a serial state dict; every rank passes all of it, or at least its own part.

        A further name of a shared parameter is ignored. `strict`: raise if a name is missing or unknown.
        """
        wanted = {p.name: p.global_shape for u in self.units for pieces in u.pieces.values() for p in pieces}
        wanted |= {name: tuple(value.shape) for name, value in self._buffers().items()}
        missing = sorted(wanted.keys() - state.keys())
        unknown = sorted(state.keys() - wanted.keys() - self._aliases)
        if strict and (missing or unknown):
            what = f"has no '{missing[0]}'" if missing else f"has '{unknown[0]}', which the module does not have"
            more = f" (and {len(missing) + len(unknown) - 1} more)" if len(missing) + len(unknown) > 1 else ""
            raise CheckpointError(f"the state dict {what}{more}; strict=False loads the names in common")
        for name in wanted.keys() & state.keys():
            if tuple(state[name].shape) != wanted[name]:
                raise CheckpointError(
                    f"'{name}' is {list(state[name].shape)} in the state dict, not {list(wanted[name])}"
                )
        for unit in self.units:
            for piece, box, view in held_boxes(self._holding(unit)):
                if piece.name in state:
                    view.copy_(state[piece.name][tuple(slice(*s) for s in box)])
        for name, value in self._buffers().items():
            if name in state:
                value.copy_(state[name])

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write weights, buffers and the optimizer's state as a distributed checkpoint; all ranks call it together.

        A checkpoint in the folder is replaced.
        """
        _check_same_folder(folder)
        state = self._held(optimizer, optimizer.state_dict() if optimizer is not None else None)
        writer, alone = dcp.FileSystemWriter(folder), not dist.is_initialized()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            dcp.save(state, storage_writer=writer, planner=ChunkPlanner(), no_dist=alone)

    @torch.no_grad()
    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what `save` wrote, under any plan, or any distributed checkpoint with the module's names."""
        found: dict[str, Any] | None = None
        if optimizer is not None:
            _make_state(optimizer)
            found = optimizer.state_dict()
            for values in found["state"].values():  # filled below, then taken by the optimizer
                values.update({k: v.clone() for k, v in values.items() if isinstance(v, Tensor)})
        source = open_dcp(Path(folder))
        for name, chunks in self._held(optimizer, found).items():
            if name not in source.tensors:
                raise CheckpointError(f"{folder}: has no '{name}'{schema.nearest(name, source.tensors)}")
            if source.tensors[name][0] != tuple(chunks.shape):
                stored = list(source.tensors[name][0])
                raise CheckpointError(f"{folder}: '{name}' is {stored} there, but {list(chunks.shape)} in the module")
            for offset, view in chunks.views.items():
                view.copy_(source.read(name, tuple((at, at + n) for at, n in zip(offset, view.shape, strict=True))))
        if optimizer is not None and found is not None:
            optimizer.load_state_dict(found)

    # ---- parts ----

    def _held(self, optimizer: torch.optim.Optimizer | None, found: dict[str, Any] | None) -> dict[str, Chunks]:
        """This rank's parts of the weights, the buffers and the tensors of an optimizer's state dict `found`."""
        holdings = [self._holding(unit) for unit in self.units]
        holdings += [holding_of(name, value) for name, value in self._buffers().items()]
        if optimizer is not None and found is not None:
            holdings += self._optimizer_state(optimizer, found)
        return chunks_of(holdings)

    def _holding(self, unit: Unit, prefix: str = "", flat: Tensor | None = None, start: int = 0) -> Holding:
        """A unit's shard, or `flat`, which belongs to its elements from `start` on."""
        at = unit.shard_range[0] + start
        return Holding(prefix, unit.shard.detach() if flat is None else flat, at, unit.layout, unit.pieces)

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dict of the module has."""
        return {name: self.module.get_buffer(name) for name in self._buffer_names}

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> list[Holding]:
        """The tensors of an optimizer's state dict under serial names: optim.<key>.<parameter>."""
        mine = {id(part.parameter): part for part in self._flat.values()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        holdings = []
        for index, values in found["state"].items():
            part = mine.get(id(params[index]))
            if part is None:
                raise ConfigError("the optimizer has a parameter that is not of this model; make it from parameters()")
            for key, value in values.items() if part.name else ():
                prefix, size = f"optim.{key}.", part.stop - part.start
                if isinstance(value, Tensor) and value.dim() and value.numel() == size:
                    holdings.append(self._holding(part.unit, prefix, value.view(-1), part.start))
                elif isinstance(value, Tensor) and value.numel() == 1:
                    holdings.append(holding_of(prefix + part.name, value.view(1)))
                else:
                    kind = f"the shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise ConfigError(
                        f"the optimizer's '{key}' is of {kind}, for {size} elements of '{part.name}'; what is saved has one "
                        "number per element, or is a tensor of one number: the state of an elementwise optimizer"
                    )
        return holdings

    def _run(self, part: Any) -> Any:
        if isinstance(part, Mapping):
            return self.module(**part)
        return self.module(part) if isinstance(part, Tensor) else self.module(*part)

    def _parts(self, batch: Any) -> list[Any]:
        """The batch in micro-batches, each with the batch's structure."""
        named = isinstance(batch, Mapping)
        values = dict(batch) if named else {0: batch} if isinstance(batch, Tensor) else dict(enumerate(batch))
        tensors = {key: v for key, v in values.items() if isinstance(v, Tensor) and v.dim()}
        sizes = {len(t) for t in tensors.values()}
        if len(sizes) != 1 or next(iter(sizes)) % self.micro_batches:
            raise PlanError(
                f"a batch of {sorted(sizes)} does not divide into batch.micro_batches = {self.micro_batches} equal parts"
            )
        cut = {key: t.chunk(self.micro_batches) for key, t in tensors.items()}
        parts = [values | {key: chunks[m] for key, chunks in cut.items()} for m in range(self.micro_batches)]
        if named:
            return parts
        return [p[0] if isinstance(batch, Tensor) else tuple(p.values()) for p in parts]

    def _shares(self, parts: list[Any], weight: Callable[[Any], Any] | None) -> list[Tensor | float]:
        """The weight of each micro-batch's mean in the mean over all micro-batches and ranks; 0.0: it is a mean over nothing."""
        if weight is None:
            self._check_labels(parts)
            return [1.0 / (len(parts) * self.replicas)] * len(parts)
        given = [float(weight(part)) for part in parts]
        found = torch.zeros(len(parts), dtype=torch.float64, device=self.units[0].full.device)
        for m, value in enumerate(given):
            found[m].fill_(value)  # a copy from the host would wait for the device
        whole = self._sum(found.sum(), "the weight of the batch")
        shares = found / whole.clamp(min=torch.finfo(found.dtype).tiny)
        return [share if value else 0.0 for share, value in zip(shares, given, strict=True)]

    def _check_labels(self, parts: list[Any]) -> None:
        """Check the first batch: with ignored labels, micro-batch means are over different numbers of labels."""
        if self._weighed:
            return
        self._weighed = True
        labels = [part["labels"] for part in parts if isinstance(part, Mapping) and "labels" in part]
        if len(labels) * self.replicas > 1 and any(bool((t == IGNORE).any()) for t in labels):
            raise ConfigError(
                f"the batch has labels of {IGNORE}, which the loss ignores, so the means of micro-batches and ranks are over "
                "different numbers of labels, and their mean would depend on the plan; pass the numbers: "
                f"step(batch, weight=lambda part: (part['labels'][:, 1:] != {IGNORE}).sum()), without [:, 1:] if the "
                "model does not shift the labels, or weight=lambda part: 1 for equal weights"
            )

    def _sum(self, value: Tensor, what: str) -> Tensor:
        self._start_sum(value, what).wait()
        return value

    def _start_sum(self, value: Tensor, what: str) -> Pending:
        return all_reduce(value, self.world, what) if self.world is not None else Pending(None, what)


def _device(module: nn.Module) -> torch.device:
    """The device of all parameters."""
    found = sorted({str(p.device) for p in module.parameters()})
    if not found:
        raise ConfigError(f"the module ({type(module).__name__}) has no parameters; there is nothing to train")
    if found != found[:1] or found == ["meta"]:
        where = "without values (on the meta device)" if "meta" in found else f"on several devices ({', '.join(found)})"
        raise ConfigError(f"the module's parameters are {where}; put them on one: module.to(device)")
    return torch.device(found[0])


def _loss_of(output: Any, batch: Any, share: Tensor | float) -> Tensor:
    """The loss in a module's output, times `share`. A share of 0.0 means that the loss is a mean over nothing, NaN."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if loss is None:
        given = f"; the batch has {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        hint = " (models of transformers compute one if the batch has 'labels')" if hasattr(output, "loss") else ""
        raise ConfigError(f"the module's output, a {type(output).__name__}, has no loss{hint}{given}")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"the loss must be one number, the mean over the batch; found {found}")
    if isinstance(share, Tensor):  # not read: that would wait for the device
        return loss.reshape(()) * share.to(loss.dtype)
    if share:
        return loss.reshape(()) * share
    others = [t for t in tensors_in(output) if t is not loss and t.is_floating_point()]
    if not others:
        raise ConfigError(
            "a micro-batch has weight 0, and the module's output has nothing but its loss, a mean over nothing; "
            "leave such a micro-batch out, or let the module return its logits, too"
        )
    return torch.stack([t.sum().to(loss.dtype) * 0 for t in others]).sum()  # so that every rank runs a backward


def _check_same_folder(folder: str | Path) -> None:
    """Raise on every rank if ranks would write to different folders, none of which would then be a whole checkpoint."""
    if not dist.is_initialized():
        return
    named = [""] * dist.get_world_size()
    dist.all_gather_object(named, str(folder))
    for rank, name in enumerate(named):
        if name != named[0]:
            raise CheckpointError(
                f"rank 0 saves to '{named[0]}' and rank {rank} to '{name}'; use one folder, which all ranks can write to"
            )


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an unused optimizer create its state, by a step with learning rate 0."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p in optimizer.state for p in params):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _check(plan: Plan) -> None:
    for axis in ("pipe", "row", "col"):
        if getattr(plan.mesh, axis) > 1:
            raise PlanError(
                f"mesh.{axis} = {getattr(plan.mesh, axis)}: parallelize runs a module unchanged, on data and depth only; "
                f"use {axis} = 1"
            )
    for name in ("optimizer", "activations"):
        if getattr(plan.memory, name) == "host":
            instead = "give parameters() to ff.StreamedAdamW" if name == "optimizer" else "use recompute"
            raise PlanError(f"memory.{name} = 'host': parallelize leaves {name} to your loop; {instead}")
    plan.check_sharding([rule.match for rule in plan.unit])


def _wrap(module: nn.Module, rule: UnitRule, *, compile: bool) -> None:
    """Wrap a unit's forward for recomputation or compilation; its hooks stay outside."""
    run = module.forward
    if rule.recompute != "none":
        context = keep_products if rule.recompute == "selective" else noop_context_fn
        run = functools.partial(checkpoint, run, use_reentrant=False, context_fn=context)
    if compile:
        run = compiled(run)
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
                f"unit '{rule.match}': recompute = '{rule.recompute}': recomputation runs a module's forward again, and "
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
def _make_unit(name: str, root: nn.Module, names: list[str], sharing: Sharing, reductions: Reductions) -> Unit:
    """Make a unit of a module, with the module's weights."""
    module = root.get_submodule(_path(name))
    others = tuple(f"{n}." for n in names if n != REST) if name == REST else ()
    values = {n: p.detach() for n, p in module.named_parameters() if not n.startswith(others)}
    prefix = "" if name == REST else f"{name}."
    same = _aliases(root, prefix, values)
    first = next(iter(values.values()))
    if other := next((n for n, v in values.items() if v.dtype != first.dtype), None):
        raise PlanError(
            f"unit '{name}' has parameters of {first.dtype} and of {values[other].dtype} ('{prefix}{other}'), and a unit has one "
            "type; use module.to(dtype), or let a rule name the modules that differ"
        )
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
        unit.alias(module, alias, n)
    unit.scatter()
    return unit


def _all_aliases(root: nn.Module) -> set[str]:
    """Additional names of shared parameters."""
    return {n for n, _ in root.named_parameters(remove_duplicate=False)} - {n for n, _ in root.named_parameters()}


def _aliases(root: nn.Module, prefix: str, values: dict[str, Tensor]) -> dict[str, str]:
    """Additional names of a unit's shared parameters in the unit; raises if a parameter is shared with another unit."""
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
