"""The optimizer of a rank with optimizer state on the host: each unit is a weight block of the streamer (offload/streamer.py).

Each rank streams the state of its own shards. The results are bit-identical to train/optim.py: bf16 weights keep 16 low bits of
their master (2 bytes) and two moments (8 bytes, or 4 as bf16) on the host, fp32 weights only their moments. A unit's update may
still run when the next step begins; code that uses or gathers its weights waits for the unit first.

With clipping or the guard, updates start when the norm of all gradients is known. Otherwise a unit's update starts in the
program, at STREAM, as soon as its gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.config import Config, OptimConfig
from fourfold.offload.activations import ActivationOffload
from fourfold.offload.adamw import room_on_device
from fourfold.offload.buckets import WeightBlock
from fourfold.offload.host import available_bytes
from fourfold.offload.queues import DeviceQueues
from fourfold.offload.split import join, split
from fourfold.offload.streamer import Streamer
from fourfold.offload_sizes import LEAST_ACTIVATION_BYTES as LEAST
from fourfold.offload_sizes import STREAM_BUCKET as BUCKET
from fourfold.plan import Memory, Plan
from fourfold.schema import parse_bytes
from fourfold.shard.unit import Unit
from fourfold.train.optim import AdamW

__all__ = ["StreamedUnits", "make_keeper", "make_optimizer"]


def make_optimizer(config: Config, plan: Plan, units: Sequence[Unit], ranks_here: int = 1) -> AdamW | StreamedUnits:
    """The optimizer of a plan; `ranks_here` ranks share this host's memory."""
    if plan.memory.optimizer == "device" and plan.memory.moments == "fp32":
        return AdamW(units, config.optim)
    return StreamedUnits(units, config.optim, plan.memory, early=plan.updates_early(config), ranks_here=ranks_here)


def make_keeper(plan: Plan, device: torch.device, ranks_here: int = 1) -> ActivationOffload | None:
    """The activation offload of a rank, or None; limited to this rank's share of the free host memory."""
    if plan.memory.activations == "device":
        return None
    budget = int(plan.memory.host_share * available_bytes() / ranks_here)
    return ActivationOffload(device, budget=budget, least=LEAST)


class StreamedUnits:
    """AdamW on units through the streamer, with the interface of train/optim.py's AdamW."""

    def __init__(
        self,
        units: Sequence[Unit],
        config: OptimConfig,
        memory: Memory,
        *,
        early: bool,
        ranks_here: int = 1,
        queues: DeviceQueues | None = None,
    ):
        self.units, self.config, self.memory, self.early = list(units), config, memory, early
        self._ranks_here, self._bucket, self._queues = ranks_here, BUCKET, queues
        self._staging = parse_bytes(memory.staging, "memory.staging")
        base = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        self._matrices = {**base, "weight_decay": config.weight_decay}
        self._vectors = {**base, "weight_decay": 0.0}
        self.blocks = {u.name: self._block(u) for u in self.units if u.shard.numel()}
        self._masters: dict[str, Tensor] = {}  # fp32 copies, between `flats` and `publish`
        self._streamer: Streamer | None = None
        self._counted = torch.zeros((), dtype=torch.float32, device=self.units[0].shard.device)
        self._ran = False
        for unit in self.units:
            unit.before_use = self.wait

    def _block(self, unit: Unit) -> WeightBlock:
        parts = [
            (start, stop, self._matrices if len(s.shape) > 1 else self._vectors) for s, start, stop in unit.slots()
        ]
        value = unit.shard.detach()
        return WeightBlock(value, parts, torch.zeros((), dtype=torch.float32, device=value.device))

    @property
    def streamer(self) -> Streamer:
        """Created at its first use, after a step has shown how much device memory is free."""
        if self._streamer is None:
            room = {"host": 0, "device": 1 << 62}.get(self.memory.optimizer)
            self._streamer = Streamer(
                list(self.blocks.values()),
                moments=torch.bfloat16 if self.memory.moments == "bf16" else None,
                bucket=self._bucket,
                staging=self._staging,
                device_bytes=self._room() if room is None else room,
                host_bytes=available_bytes() // self._ranks_here,
                backwards=self.early,
                queues=self._queues,
            )
        return self._streamer

    def _room(self) -> int:
        """Bytes of state kept on the device: as in the plan, or what a step leaves free."""
        if self.memory.device_state:
            return parse_bytes(self.memory.device_state, "memory.device_state")
        device = next(iter(self.blocks.values())).value.device
        if device.type != "cuda" or not self._ran:
            return room_on_device(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        rises = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        ring = max(self._staging, 4 * 10 * self._bucket) + 16 * self._bucket
        return max(0, free - rises - ring - total // 20)

    # ---- a step ----

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`."""
        self._masters.clear()
        self._matrices["lr"] = self._vectors["lr"] = lr
        if self._streamer is not None:
            self._streamer.begin()

    def stream(self, unit: Unit) -> None:
        """Submit a unit's update after its reduction, unless updates need the gradient norm first."""
        if self.early and self._streamer is not None and unit.name in self.blocks:
            unit.finish()
            block = self.blocks[unit.name]
            block.grad = unit.shard_grad
            self._streamer.ready(block)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, skip: Tensor | None) -> None:
        """Submit the remaining updates from the reduced gradients, clipped by their global `norm`.

        Nothing changes if `skip` is 1. Returns before the updates are done.
        """
        self._ran = True
        if not self.blocks:  # nothing here is trained; the steps are counted
            self._counted += 1 if skip is None else 1 - skip
            return
        is_new = self._streamer is None
        streamer = self.streamer
        if is_new:
            streamer.begin()
        for unit in self.units:
            if unit.name in self.blocks:
                self.blocks[unit.name].grad = unit.shard_grad
        factor = None
        if self.config.clip:
            factor = (self.config.clip / (norm + 1e-6)).clamp(max=1.0).to(streamer.regions[0].master)
        streamer.step(factor, skip)

    def wait(self, unit: Unit) -> None:
        """Make the caller's next operations wait for the updates of a unit's weights, borrowed ones included."""
        if self._streamer is not None:
            for each in (unit, *(borrowed.lender for borrowed in unit.borrowed.values())):
                if each.name in self.blocks:
                    self._streamer.wait(self.blocks[each.name])

    # ---- checkpoints ----

    @torch.no_grad()
    def publish(self, unit: Unit) -> None:
        """Set a unit's weights and state from the master that `flats` returned and the caller filled."""
        if not self.blocks:
            return
        self.streamer.reload()
        master = self._masters.pop(unit.name, None)
        if master is not None:
            block = self.blocks[unit.name]
            wide = master.to(block.value.device, copy=True)
            low = torch.empty_like(wide, dtype=torch.int16)
            split(wide, block.value, low)
            block.state()["low"].copy_(low)

    @torch.no_grad()
    def flats(self, unit: Unit) -> dict[str, Tensor]:
        """The tensors of a unit that a checkpoint stores, by name prefix; each has the layout of the unit's shard."""
        if self.blocks:
            self.streamer.finish()
        if unit.name not in self.blocks:
            return dict.fromkeys(("", "optim.exp_avg.", "optim.exp_avg_sq."), unit.shard.detach())
        block = self.blocks[unit.name]
        state = block.state()
        master = block.value
        if "low" in state:
            low = state["low"]
            master = self._masters[unit.name] = torch.empty(low.numel(), dtype=torch.float32, device=low.device)
            join(block.value.to(low.device), low, master)
        return {"": master, "optim.exp_avg.": state["exp_avg"], "optim.exp_avg_sq.": state["exp_avg_sq"]}

    @property
    def updates(self) -> int:
        """Number of steps that changed the weights (skipped ones do not count)."""
        if self._streamer is not None:
            self._streamer.finish()
        return int((next(iter(self.blocks.values())).step if self.blocks else self._counted).item())

    @updates.setter
    def updates(self, count: int) -> None:
        self._counted.fill_(count)
        for block in self.blocks.values():
            block.step.fill_(count)
