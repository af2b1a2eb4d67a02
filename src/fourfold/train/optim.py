"""AdamW over units: torch's fused kernel on slices of flat buffers.

Per unit, all of the length of the unit's shard (its whole buffer, where it is not sharded):

    master       what is updated: the weights themselves (fp32, fp64), or an fp32 copy of bf16 weights
    exp_avg, exp_avg_sq     the moments, of the master's type

bf16 weights are the master rounded half up (not half to even): then a weight and 16 more bits restore the master.
Matrices decay, vectors (norms, biases) do not. A step whose `skip` flag is set changes nothing, and asks the host
nothing: the flag stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch._dynamo  # torch.optim imports it at its first step, a second of work: do it once, before ranks are forked
from torch import Tensor

from fourfold.config import OptimConfig
from fourfold.offload.split import round_half_up, scale
from fourfold.shard.unit import Unit

__all__ = ["AdamW"]


class AdamW:
    """Decoupled weight decay, fused, on the slots of units."""

    def __init__(self, units: Sequence[Unit], config: OptimConfig):
        self.units, self.config = list(units), config
        self.master: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        state = {}
        self._slots: list[tuple[Tensor, Unit, int, int]] = []  # start and stop in the shard
        for u in self.units:
            wide = u.shard.dtype in (torch.float32, torch.float64)
            master = u.shard.detach() if wide else u.shard.detach().float()
            first, second = torch.zeros_like(master), torch.zeros_like(master)
            self.master[u.name], self.exp_avg[u.name], self.exp_avg_sq[u.name] = master, first, second
            for slot, start, stop in u.slots():
                p = master[start:stop]
                (matrices if len(slot.shape) > 1 else vectors).append(p)
                steps = torch.zeros((), dtype=torch.float32, device=master.device)
                state[p] = {"step": steps, "exp_avg": first[start:stop], "exp_avg_sq": second[start:stop]}
                self._slots.append((p, u, start, stop))
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [g for g in groups if g["params"]] or [{"params": [torch.zeros(0)]}]  # only padding here
        self._torch = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        self._torch.state.update(state)

    def begin(self, lr: float) -> None:
        """A step begins that will use learning rate `lr`."""

    def wait(self, unit: Unit) -> None:
        """What the caller does next may use a unit's weights."""

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, skip: Tensor | None) -> None:
        """One update from the units' reduced gradients, clipped by their global `norm`; nothing where `skip` is 1."""
        for group in self._torch.param_groups:
            group["lr"] = lr
        factor = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) if self.config.clip else None
        grads = {u.name: self._scaled(u, factor) for u in self.units if u.layout.total}  # others borrow all they use
        for p, u, start, stop in self._slots:
            p.grad = grads[u.name][start:stop]
        self._torch.found_inf = skip  # type: ignore[attr-defined]  # read by the fused kernel
        self._torch.step()
        for p, *_ in self._slots:
            p.grad = None
        for u in self.units:
            self.publish(u)

    def _scaled(self, unit: Unit, factor: Tensor | None) -> Tensor:
        """A unit's gradient, of the master's dtype, times `factor`."""
        assert unit.shard_grad is not None, f"{unit.name} has no gradient"
        grad, master = unit.shard_grad, self.master[unit.name]
        factor = None if factor is None else factor.to(master.dtype)
        if grad.dtype == master.dtype:
            return grad if factor is None else grad.mul_(factor)
        out = torch.empty_like(master)
        scale(grad, factor, out)
        return out

    @torch.no_grad()
    def publish(self, unit: Unit) -> None:
        """Give a unit the weights of its master."""
        master = self.master[unit.name]
        if master.data_ptr() != unit.shard.data_ptr():
            round_half_up(master, unit.shard)

    def flats(self, unit: Unit) -> dict[str, Tensor]:
        """What a checkpoint holds of a unit, by the prefix of its names; all laid out as the unit is."""
        return {
            "": self.master[unit.name],
            "optim.exp_avg.": self.exp_avg[unit.name],
            "optim.exp_avg_sq.": self.exp_avg_sq[unit.name],
        }

    @property
    def updates(self) -> int:
        """Steps that changed the weights (skipped ones are not among them); 0 on a rank that holds nothing but padding."""
        return int(self._torch.state[self._slots[0][0]]["step"].item()) if self._slots else 0

    @updates.setter
    def updates(self, count: int) -> None:
        for p, *_ in self._slots:
            self._torch.state[p]["step"].fill_(count)
