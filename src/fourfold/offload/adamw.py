"""StreamedAdamW: bit-identical to torch's AdamW, with its state in host memory. A `torch.optim.Optimizer` for any loop.

    optimizer = StreamedAdamW(model.parameters(), lr=3e-4, clip=1.0, overlap=model)

Weights and gradients stay on the device (4 bytes per bf16 parameter); master weights and moments (10 bytes) are on the host and
are copied through the device in buckets (offload/streamer.py). The result equals that of `torch.optim.AdamW(fused=True)` on an
fp32 master copy of the weights.

Without `overlap`, the current stream waits in `step()` for all updates. With `overlap=model`, each layer of the model waits for
its own weights before its next forward, so updates and copies overlap with compute. With clipping or the guard, updates need the
norm of all gradients and start in `step()`; otherwise each starts as soon as its gradient is complete, in a backward that is run
under `with optimizer.last_backward():`. With `rollback` they start there, too, and are undone and repeated where the norm was
not fine.

[Note: reading weights elsewhere]
The model's forward, `model.state_dict()` and `optimizer.state_dict()` wait for pending updates. Call `optimizer.wait()` before
any other code that reads weights (a moving average of the weights, a direct forward of a submodule).

FSDP2 gathers a layer's weights before the layer's hooks run, on streams that wait for the current one only when the forward of
the whole model begins. So with FSDP2 the current stream waits in `step()`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fourfold.errors import ConfigError
from fourfold.offload.buckets import WeightBlock
from fourfold.offload.host import available_bytes
from fourfold.offload.queues import DeviceQueues
from fourfold.offload.split import join, split
from fourfold.offload.streamer import Streamer
from fourfold.offload_sizes import STREAM_BUCKET, STREAM_SLOTS

__all__ = ["StreamedAdamW", "room_on_device"]

_TYPES = (torch.bfloat16, torch.float32, torch.float64)


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW with its state on the host; see the module docstring.

    clip          maximum gradient norm, over all parameters (0: no clipping); the norm is in `norm`, on the device
    guard         skip the whole step if a gradient is not finite
    moments       torch.bfloat16 stores the moments in half the bytes (no longer bit-identical)
    placement     "host", "device", or "auto": as much state on the device as fits in `device_bytes`, first parameters first
                  (default: half of the free device memory when the optimizer is created)
    bucket        elements per bucket
    ring          number of buckets on the device at once; `staging` bytes enlarge it, for state prefetched before the norm
                  is known
    host_bytes    limit on host memory (default: what is available)
    rollback      host bytes for state that can be restored: with clipping or the guard, updates that have room in them start in
                  the backward, and `step()` waits for the norm; `rolled_back` says whether the last step's were undone
    consume       give `.grad` back in `last_backward()` as soon as its update has read it; not with clipping or the guard
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip: float = 0.0,
        guard: bool = False,
        overlap: nn.Module | None = None,
        moments: torch.dtype | None = None,
        placement: Literal["host", "device", "auto"] = "host",
        device_bytes: int | None = None,
        bucket: int = STREAM_BUCKET,
        ring: int = STREAM_SLOTS,
        staging: int = 0,
        host_bytes: int | None = None,
        rollback: int = 0,
        consume: bool = False,
        queues: DeviceQueues | None = None,
    ):
        if clip < 0:
            raise ConfigError(f"clip = {clip} must not be negative; 0 is no clipping")
        if moments not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"moments = {moments}: they are stored as torch.float32 or torch.bfloat16")
        if consume and (clip or guard or overlap is None):
            reason = (
                f"clip = {clip} needs"
                if clip
                else "guard = True needs"
                if guard
                else "without overlap=model, step() reads"
            )
            raise ConfigError(
                f"consume = True gives gradients back in the backward, but {reason} all of them at its end; use consume = False, "
                "or clip = 0, guard = False and overlap = model"
            )
        # the same keys as torch's AdamW, so that state dicts can be exchanged
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        defaults |= {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": True}
        self.clip, self.guard, self.norm = clip, guard, torch.zeros(())
        self._model, self._early, self._begun = overlap, False, False
        self._options: dict[str, Any] = {"bucket": bucket, "ring": ring, "staging": staging, "host_bytes": host_bytes}
        self._options |= {"moments": None if moments == torch.float32 else moments, "queues": queues}
        self._options |= {"consume": consume, "rollback": rollback if (clip or guard) and overlap is not None else 0}
        self._placement, self._device_bytes = placement, device_bytes
        self._blocks: dict[Tensor, WeightBlock] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        super().__init__(params, {**defaults, "decoupled_weight_decay": True})
        self._build()

    # ---- assembly ----

    def _build(self) -> None:
        """Create blocks, streamer and hooks for the current parameter groups."""
        settings = {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}
        order = list(settings)
        if self._model is not None:
            known = [p for p in self._model.parameters() if p in settings]
            order = [*known, *(p for p in order if p not in set(known))]
        for p in order:
            if p.dtype not in _TYPES:
                raise ConfigError(
                    f"a parameter of type {p.dtype}; StreamedAdamW updates bf16, fp32 and fp64: use model.to(torch.bfloat16)"
                )
        self._blocks = {p: _block(p, settings[p]) for p in order}
        if not self._blocks:
            raise ConfigError("StreamedAdamW got no parameter that requires a gradient")
        device = _local(order[0]).device
        if any(_local(p).device != device for p in order):
            raise ConfigError("the parameters are on several devices; make one StreamedAdamW for each")
        room = {"host": 0, "device": 1 << 62}.get(self._placement, self._device_bytes)
        if (before := getattr(self, "streamer", None)) is not None:
            before.finish()  # its copies may be under way, and its memory is about to be freed
        self.streamer = Streamer(
            list(self._blocks.values()),
            device_bytes=room_on_device(device) if room is None else room,
            backwards=not self._waits_for_norm,
            **self._options,
        )
        self.state.clear()
        for p, block in self._blocks.items():
            state = block.state()
            self.state[p] = {"step": block.step, **{k: _shaped(state[k], p) for k in ("exp_avg", "exp_avg_sq")}}
        self._register()

    def _register(self) -> None:
        _remove(self._hooks)
        self._called: set[nn.Module] = set()
        if self._model is None:
            return
        self._gathered = any(isinstance(module, FSDPModule) for module in self._model.modules())
        self._layers = {layer: self._blocks_of(layer.parameters()) for layer in _layers(self._model)}
        inside = {block for blocks in self._layers.values() for block in blocks}
        self._layers[self._model] = [b for b in self._blocks_of(self._model.parameters()) if b not in inside]
        self._outside = [b for b in self._blocks.values() if b not in inside and b not in self._layers[self._model]]
        before_forward, wait, on_grad = _weak(self._before_forward), _weak(self.wait), _weak(self._on_grad)
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(before_forward))
        self._hooks.append(self._model.register_state_dict_pre_hook(lambda *_: wait()))
        if self._starts_early:
            self._hooks += [p.register_post_accumulate_grad_hook(on_grad) for p in self._blocks]

    def _blocks_of(self, params: Iterable[Tensor]) -> list[WeightBlock]:
        return [self._blocks[p] for p in params if p in self._blocks]

    @property
    def _waits_for_norm(self) -> bool:
        return bool(self.clip) or self.guard

    @property
    def _starts_early(self) -> bool:
        return self._model is not None and (not self._waits_for_norm or self.streamer.rollback_bytes > 0)

    @property
    def rolled_back(self) -> bool | None:
        """Whether the last step's updates were undone and repeated; None: they did not start before the norm was known."""
        return self.streamer.rolled_back

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; the state of the other groups is kept."""
        before = self.state_dict()["state"] if self._blocks else {}
        super().add_param_group(param_group)
        if self._blocks:
            self._build()
            params = [p for g in self.param_groups for p in g["params"]]
            for index, state in before.items():
                self._fill(params[index], state)

    # ---- overlap ----

    def _before_forward(self, layer: nn.Module, _args: Any) -> None:
        self._called.add(layer)
        for block in self._layers[layer]:
            self.streamer.wait(block)

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        """Context for the last backward before `step()`: updates may start in it, so gradients must not change afterwards."""
        self._early = self._starts_early
        try:
            yield
        finally:
            self._early = False

    def _on_grad(self, p: Tensor) -> None:
        if not self._early:
            return
        if not self._begun:
            self.streamer.begin()
            self._begun = True
        block = self._blocks[p]
        block.grad = _flat_grad(p)
        self.streamer.ready(block)
        if self.streamer.consume:
            p.grad = None

    def wait(self) -> None:
        """Make the current stream wait for all pending updates."""
        self.streamer.wait_all()

    def _wait_unhooked(self) -> None:
        """After a step, wait for the blocks that no layer's forward hook will wait for."""
        if self._model is None or self._gathered:
            self.wait()
            return
        for block in self._outside:
            self.streamer.wait(block)
        for layer in self._layers:
            if layer not in self._called:  # its weights are used by an enclosing module, whose hook waits instead
                if layer is not self._model and self._model in self._called:
                    self._layers[self._model] += self._layers[layer]
                    self._layers[layer] = []
                else:
                    for block in self._layers[layer]:
                        self.streamer.wait(block)

    # ---- torch.optim.Optimizer ----

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Submit one update. Returns before it is done; blocks the host only with `rollback`, for the norm."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._begun:
            self.streamer.begin()
        for p, block in self._blocks.items():
            if block.grad is None:
                block.grad = _flat_grad(p)
        factor = skip = None
        if self._waits_for_norm:
            self.norm = _total_norm([p.grad for p in self._blocks if p.grad is not None])
            factor = (self.clip / (self.norm + 1e-6)).clamp(max=1.0) if self.clip else None
            skip = 1 - self.norm.isfinite().float() if self.guard else None
        self.streamer.step(factor, skip)
        self._begun = False
        self._wait_unhooked()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (kept alive until the update has read them), or zero them after the update."""
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    # ---- state ----

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state dict of `torch.optim.AdamW`; bf16 parameters also have their fp32 `master`."""
        self.streamer.finish()
        out = super().state_dict()
        params = [p for g in self.param_groups for p in g["params"]]
        out["state"] = {i: dict(state) for i, state in sorted(out["state"].items())}
        for i, state in out["state"].items():
            if "low" in self._blocks[params[i]].region.kinds:
                state["master"] = self.master(params[i])
        return out

    @torch.no_grad()
    def master(self, p: Tensor) -> Tensor:
        """A copy of a parameter's master weights: fp32 for bf16 weights; otherwise a copy of the weights."""
        block = self._blocks[p]
        self.streamer.finish()
        if "low" not in block.region.kinds:
            return p.detach().clone()
        low = block.state()["low"]
        out = torch.empty(low.numel(), dtype=torch.float32, device=low.device)
        join(block.value.to(low.device), low, out)
        return _shaped(out, p)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of `torch.optim.AdamW`.

        The weights of a bf16 parameter are set from its `master`; without one, the bf16 weights become the master.
        """
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the parameter groups of the loaded state dict do not match the optimizer's")
        if any(g.get("amsgrad") for g in saved):
            raise ConfigError("the loaded state has amsgrad = True; StreamedAdamW has no amsgrad")
        self.streamer.finish()
        for group, theirs in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in theirs.items() if k != "params"})
            for p, index in zip(group["params"], theirs["params"], strict=True):
                if p in self._blocks:
                    self._fill(p, state_dict["state"].get(index))

    def _fill(self, p: Tensor, state: dict[str, Any] | None) -> None:
        block = self._blocks[p]
        mine = block.state()
        self.streamer.reload()
        if not state:
            block.step.zero_()
            for value in mine.values():
                value.zero_()
            return
        block.step.copy_(torch.as_tensor(state["step"]))
        for kind in ("exp_avg", "exp_avg_sq"):
            mine[kind].copy_(_flat(_local(state[kind]), _local(p)))
        if "low" in mine:
            mine["low"].zero_()
            if "master" in state:
                wide = _flat(_local(state["master"]), _local(p)).to(block.value.device, torch.float32, copy=True)
                low = torch.empty_like(wide, dtype=torch.int16)
                split(wide, block.value, low)
                mine["low"].copy_(low)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """A weak reference to a method, callable as a hook: autograd's hooks are invisible to the garbage collector, so a strong
    reference would keep the optimizer alive."""
    found = weakref.WeakMethod(method)

    @torch.compiler.disable
    def call(*args: Any) -> None:
        target = found()
        if target is not None:
            target(*args)

    return call


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def room_on_device(device: torch.device) -> int:
    """Default bytes for optimizer state on a device: half of the free memory, to leave room for gradients and activations."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    return free // 2


def _block(p: Tensor, settings: dict[str, Any]) -> WeightBlock:
    value = _flat(_local(p).detach())
    step = torch.zeros((), dtype=torch.float32, device=value.device)
    return WeightBlock(value, [(0, value.numel(), settings)], step)


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _flat(t: Tensor, like: Tensor | None = None) -> Tensor:
    """The elements of `t` in the memory order of `like` (default: its own)."""
    like = t if like is None else like
    if t.stride() != like.stride():
        t = torch.empty_like(like, dtype=t.dtype, device=t.device).copy_(t)
    if t.numel() and 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) != t.numel():
        raise ConfigError(
            "a parameter has gaps or overlaps in memory; set parameter.data = parameter.data.contiguous()"
        )
    return t.as_strided((t.numel(),), (1,))


def _shaped(flat: Tensor, p: Tensor) -> Tensor:
    """View a flat tensor with a parameter's shape, strides and DTensor placements."""
    local = _local(p)
    view = flat.as_strided(local.size(), local.stride(), flat.storage_offset())
    if not isinstance(p, DTensor):
        return view
    return DTensor.from_local(view, p.device_mesh, p.placements, run_check=False, shape=p.size(), stride=p.stride())


def _flat_grad(p: Tensor) -> Tensor | None:
    if p.grad is None:
        return None
    if p.grad.is_sparse:
        raise ConfigError("a sparse gradient; AdamW needs dense ones: use sparse=False in the embedding")
    return _flat(_local(p.grad.detach()), _local(p))


def _total_norm(grads: list[Tensor]) -> Tensor:
    """2-norm of all gradients, accumulated in at least fp32: equals `clip_grad_norm_` of fp32 copies."""
    if any(isinstance(g, DTensor) for g in grads):
        total = torch.nn.utils.get_total_norm([g.float() if g.dtype == torch.bfloat16 else g for g in grads])
        return total.full_tensor() if isinstance(total, DTensor) else total
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norms = torch._foreach_norm(grads, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward hooks wait for their weights: the model's children, module lists expanded."""
    out: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            out += _layers(child)
        else:
            out.append(child)
    return [m for m in dict.fromkeys(out) if any(True for _ in m.parameters())]
