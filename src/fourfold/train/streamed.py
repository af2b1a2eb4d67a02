"""The optimizer of a rank with optimizer state on the host: each unit is a weight block of the streamer (offload/streamer.py).

Each rank streams the state of its own shards. The results are bit-identical to train/optim.py: bf16 weights keep 16 low bits of
their master (2 bytes) and two moments (8 bytes, or 4 as bf16) on the host, fp32 weights only their moments. A unit's update may
still run when the next step begins; code that uses or gathers its weights waits for the unit first.

A unit's update starts in the program, at STREAM, as soon as its gradients are reduced. With clipping or the guard, which need the
norm of all gradients, only those that can be undone start there (`memory.rollback`; [Note: rolling back] in the streamer); the
others start when the norm is known. With `memory.gradients = "consume"` a unit's gradient is freed at STREAM, or one unit later.

A reduction over replicas overlaps with the next unit's backward: its update is submitted at the STREAM after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

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
from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES as BUFFER
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
    return StreamedUnits(
        units,
        config.optim,
        plan.memory,
        early=plan.updates_early(config),
        rolls_back=plan.rolls_back(config),
        background_saves=config.checkpoint.mode == "async",
        ranks_here=ranks_here,
    )


def make_keeper(plan: Plan, device: torch.device, ranks_here: int = 1) -> ActivationOffload | None:
    """The activation offload of a rank, or None; limited to this rank's share of the free host memory."""
    if plan.memory.activations == "device":
        return None
    budget = int(plan.memory.host_share * available_bytes() / ranks_here)
    return ActivationOffload(device, budget=budget, least=LEAST, ahead=BUFFER, stash=BUFFER)


class StreamedUnits:
    """AdamW on units through the streamer, with the interface of train/optim.py's AdamW."""

    def __init__(
        self,
        units: Sequence[Unit],
        config: OptimConfig,
        memory: Memory,
        *,
        early: bool,
        rolls_back: bool = False,
        background_saves: bool = False,
        ranks_here: int = 1,
        queues: DeviceQueues | None = None,
    ):
        self.units, self.config, self.memory, self.early = list(units), config, memory, early
        self.consume = memory.gradients == "consume"
        self.measure: Callable[[Unit], None] | None = None
        """Called before a unit's gradient is consumed."""
        self._rolls_back, self._background_saves = rolls_back, background_saves
        self._reducing: deque[Unit] = deque()  # units whose updates can be submitted when their reductions are done
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
        step = torch.zeros((), dtype=torch.float32, device=value.device)
        return WeightBlock(value, parts, step, name=unit.name)

    @property
    def streamer(self) -> Streamer:
        """Created at first use, after a step, when the free device memory is known."""
        if self._streamer is None:
            self._streamer = Streamer(
                list(self.blocks.values()),
                moments=torch.bfloat16 if self.memory.moments == "bf16" else None,
                bucket=self._bucket,
                staging=self._staging,
                device_bytes=self._device_bytes(),
                host_bytes=available_bytes() // self._ranks_here,
                rollback=self._rollback(),
                backwards=self.early and not self._rolls_back,
                consume=self.consume,
                queues=self._queues,
            )
        return self._streamer

    def _device_bytes(self) -> int:
        """Bytes of state kept on the device: none, all, as in the plan, or what a step leaves free."""
        if self.memory.optimizer != "auto":
            return 0 if self.memory.optimizer == "host" else 1 << 62
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

    def _rollback(self) -> int:
        """Host bytes for state that can be restored. On the CPU by `auto` none: its copies overlap with nothing."""
        if not self._rolls_back:
            return 0
        if self.memory.rollback != "auto":
            return parse_bytes(self.memory.rollback, "memory.rollback")
        first = next(iter(self.blocks.values())).value
        if first.device.type != "cuda":
            return 0
        moment = 2 if self.memory.moments == "bf16" else max(4, first.itemsize)
        elements = sum(b.elements for b in self.blocks.values())
        free = available_bytes() // self._ranks_here * 9 // 10 - elements * (
            2 * moment + (2 if first.itemsize == 2 else 0)
        )
        if self.memory.optimizer == "auto":
            free += self._device_bytes()
        # a save in the background copies the masters and the moments; where they do not fit anyway, they are not waited for
        save = elements * 12 if self._background_saves else 0
        return max(0, free - save if free > save + 4 * elements else free)

    # ---- a step ----

    def begin(self, lr: float) -> None:
        """Begin a step with learning rate `lr`."""
        self._masters.clear()
        self._reducing.clear()
        self._matrices["lr"] = self._vectors["lr"] = lr
        if self._streamer is not None or (self.consume and self.blocks):
            self.streamer.begin()

    def stream(self, unit: Unit) -> None:
        """Submit a unit's update after its reduction, unless updates wait for the gradient norm."""
        if not self.early or self._streamer is None or unit.name not in self.blocks:
            return
        if self._rolls_back and not self._streamer.optimistic:
            return
        self._reducing.append(unit)
        while len(self._reducing) > (1 if unit.sharing.shards * unit.sharing.copies > 1 else 0):
            self._start(self._reducing.popleft())

    def _start(self, unit: Unit) -> None:
        unit.finish()
        block = self.blocks[unit.name]
        block.grad = unit.shard_grad
        if self.consume:
            if self.measure is not None:
                self.measure(unit)
            unit.shard_grad = None
        self.streamer.ready(block)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, skip: Tensor | None) -> None:
        """Submit the remaining updates from the reduced gradients, clipped by their global `norm`.

        Nothing changes if `skip` is 1. Returns before the updates are done.
        """
        self._ran = True
        if not self.blocks:  # nothing here is trained; the steps are counted
            self._counted += 1 if skip is None else 1 - skip
            return
        self._reducing.clear()  # what it holds has the norm now
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

    @property
    def rolled_back(self) -> bool | None:
        """Whether the last step's updates were undone and repeated; None: none started before the norm was known."""
        return self._streamer.rolled_back if self._streamer is not None else None

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
            lent = self.streamer.lend(4 * low.numel()) if low.device.type == "cpu" else None
            if lent is None:
                lent = torch.empty(4 * low.numel(), dtype=torch.uint8, device=low.device)
            master = self._masters[unit.name] = lent.view(torch.float32)
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
