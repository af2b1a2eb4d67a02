"""AdamW over units: torch's fused kernel on slices of flat buffers; for bf16 weights on CUDA a bit-identical Triton kernel.

Per unit, each of the length of the unit's shard (of its full buffer, if it is not sharded):

    master       the weights that are updated: the weights themselves (fp32, fp64), or an fp32 copy of bf16 weights
    exp_avg, exp_avg_sq     the moments, of the master's dtype

bf16 weights are the master rounded half up (not half to even): then a weight and 16 low bits restore the master.
Matrices have weight decay, vectors (norms, biases) do not. A step whose `skip` flag is set changes nothing; the flag stays on
the device, so that the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch._dynamo  # torch.optim imports it at its first step, which takes a second: done once, before ranks are forked
from torch import Tensor

from fourfold.config import OptimConfig
from fourfold.kernels import have_kernels
from fourfold.offload.split import round_half_up, scale
from fourfold.shard.unit import Unit

__all__ = ["AdamW"]


class AdamW:
    """Decoupled weight decay, fused, on the slots of units."""

    def __init__(self, units: Sequence[Unit], config: OptimConfig):
        self.units, self.config = list(units), config
        self.rolled_back: bool | None = None  # updates on the device wait for the norm
        self.master: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        for u in self.units:
            wide = u.shard.dtype in (torch.float32, torch.float64)
            master = u.shard.detach() if wide else u.shard.detach().float()
            first, second = torch.zeros_like(master), torch.zeros_like(master)
            self.master[u.name], self.exp_avg[u.name], self.exp_avg_sq[u.name] = master, first, second
        narrow = [u for u in self.units if u.shard.dtype == torch.bfloat16 and have_kernels(u.shard)]
        self._updates: list[_Updates] = []
        if narrow:
            self._updates.append(_OnePass(self, narrow))
        if len(narrow) < len(self.units):
            self._updates.append(_Torch(self, [u for u in self.units if u not in narrow]))

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`."""

    def wait(self, unit: Unit) -> None:
        """Make the caller's next operations wait for a unit's update."""

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, skip: Tensor | None) -> None:
        """Update the weights from the reduced gradients, clipped by their global `norm`; no change if `skip` is 1."""
        factor = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) if self.config.clip else None
        for updates in self._updates:
            updates.step(lr, factor, skip)

    @torch.no_grad()
    def publish(self, unit: Unit) -> None:
        """Set a unit's weights from its master."""
        master = self.master[unit.name]
        if master.data_ptr() != unit.shard.data_ptr():
            round_half_up(master, unit.shard)

    def flats(self, unit: Unit) -> dict[str, Tensor]:
        """The tensors of a unit that a checkpoint stores, by name prefix; each has the layout of the unit's shard."""
        return {
            "": self.master[unit.name],
            "optim.exp_avg.": self.exp_avg[unit.name],
            "optim.exp_avg_sq.": self.exp_avg_sq[unit.name],
        }

    @property
    def updates(self) -> int:
        """Number of steps that changed the weights (skipped ones do not count)."""
        return max((int(c.item()) for u in self._updates for c in u.counts), default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for updates in self._updates:
            for c in updates.counts:
                c.fill_(count)


class _Updates(Protocol):
    """Updates of some units. `counts` are the numbers of applied steps, on the device."""

    counts: list[Tensor]

    def step(self, lr: float, factor: Tensor | None, skip: Tensor | None) -> None: ...


class _OnePass:
    """Updates of bf16 weights by one kernel per range of elements with equal weight decay."""

    def __init__(self, all_: AdamW, units: Sequence[Unit]):
        self._all = all_
        self._runs: list[tuple[Unit, slice, float]] = []
        for u in units:
            for slot, start, stop in u.slots():
                decay = all_.config.weight_decay if len(slot.shape) > 1 else 0.0
                if (
                    self._runs
                    and self._runs[-1][0] is u
                    and self._runs[-1][1].stop == start
                    and self._runs[-1][2] == decay
                ):
                    start = self._runs.pop()[1].start
                self._runs.append((u, slice(start, stop), decay))
        self.counts = [torch.zeros((), dtype=torch.float32, device=units[0].shard.device)]

    def step(self, lr: float, factor: Tensor | None, skip: Tensor | None) -> None:
        from fourfold.kernels.adamw import bias_corrections, update

        config, (count,) = self._all.config, self.counts
        count += 1
        factor = None if factor is None else factor.float()
        settings: dict[str, Any] = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        corrections = bias_corrections(count, settings["betas"])
        for u, run, decay in self._runs:
            master, first, second = (
                t[u.name][run] for t in (self._all.master, self._all.exp_avg, self._all.exp_avg_sq)
            )
            held = u.shard[run], master, first, second, _gradient(u)[run]
            update(*held, corrections, factor, skip, weight_decay=decay, **settings)
        if skip is not None:
            count -= skip


class _Torch:
    """Updates by torch's fused AdamW; gradients are scaled before, bf16 weights rounded after."""

    def __init__(self, all_: AdamW, units: Sequence[Unit]):
        self._all, self._units, config = all_, units, all_.config
        groups: dict[bool, list[Tensor]] = {True: [], False: []}  # whether they decay
        self._slots: list[tuple[Tensor, Unit, int, int]] = []  # start and stop in the shard
        state = {}
        for u in units:
            master, first, second = (t[u.name] for t in (all_.master, all_.exp_avg, all_.exp_avg_sq))
            for slot, start, stop in u.slots():
                p = master[start:stop]
                groups[len(slot.shape) > 1].append(p)
                count = torch.zeros((), dtype=torch.float32, device=master.device)
                state[p] = {"step": count, "exp_avg": first[start:stop], "exp_avg_sq": second[start:stop]}
                self._slots.append((p, u, start, stop))
        device = units[0].shard.device
        self.counts = [s["step"] for s in state.values()] or [torch.zeros((), dtype=torch.float32, device=device)]
        self._torch = torch.optim.AdamW(
            [{"params": ps, "weight_decay": config.weight_decay if d else 0.0} for d, ps in groups.items() if ps]
            or [{"params": [torch.zeros(0)]}],  # only padding here
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._torch.state.update(state)

    def step(self, lr: float, factor: Tensor | None, skip: Tensor | None) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
        grads = {
            u.name: self._scaled(u, factor) for u in self._units if u.layout.total
        }  # other units only borrow parameters
        for p, u, start, stop in self._slots:
            p.grad = grads[u.name][start:stop]
        if not self._slots:  # nothing here is trained; the steps are counted
            self.counts[0] += 1 if skip is None else 1 - skip
        self._torch.found_inf = skip  # type: ignore[attr-defined]  # read by the fused kernel
        self._torch.step()
        for p, *_ in self._slots:
            p.grad = None
        for u in self._units:
            self._all.publish(u)

    def _scaled(self, unit: Unit, factor: Tensor | None) -> Tensor:
        """A unit's gradient, of the master's dtype, times `factor`."""
        grad, master = _gradient(unit), self._all.master[unit.name]
        factor = None if factor is None else factor.to(master.dtype)
        if grad.dtype == master.dtype:
            return grad if factor is None else grad.mul_(factor)
        out = torch.empty_like(master)
        scale(grad, factor, out)
        return out


def _gradient(unit: Unit) -> Tensor:
    assert unit.shard_grad is not None, f"{unit.name} has no gradient"
    return unit.shard_grad
