"""What a plan will take and hold: the planner's judgement of any plan, its own or one written by hand.

Its ranks are followed through a step (`followed`); then comes the update, and the optimizer's state, on the device or on the
host. Nothing is fitted to the result; `fourfold calibrate` measures what the numbers are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.errors import PlanError, ScheduleError
from fourfold.model.operators import UnitSpec
from fourfold.plan import Plan
from fourfold.planner.followed import Followed, schedule_of, stage_layers
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.replay import RankMemory
from fourfold.planner.units import Choice

__all__ = ["Judged", "Prediction", "choice_of", "fits", "judged", "layout_of_plan", "predict"]

BUCKET, RING = 2**24, 4
"""Parameters of a bucket of the streamed update, and buckets that are on the device at once."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and bytes of every rank of a pipeline."""

    seconds: float
    compute: float
    """Of the busiest rank: computing, recomputation and the grid left out."""
    recompute: float
    grid: float
    exposed: float
    """Gathers and reductions that nothing hides."""
    bubble: float
    """The rest of the busiest rank's step: waiting for other ranks."""
    update: float
    memory: tuple[RankMemory, ...]
    tokens: int
    flops: float
    ranks: int
    rate: float
    """The devices' peak FLOP/s, one device."""
    device_state: float = 0.0
    """Bytes of optimizer state that the fullest rank keeps on its device, where the plan leaves that open."""
    computing: tuple[float, ...] = ()
    """Of every rank of a pipeline: computing, recomputation and update, were collectives and messages free."""
    stages: tuple[tuple[float, float, float], ...] = ()
    """Of every stage: seconds of F, I and W of a micro-batch, in the middle of a step."""
    message: float = 0.0
    """Seconds of a message between stages, the slowest."""
    host_state: float = 0.0
    """Of the optimizer's state, the share that is on the host."""

    @property
    def peak(self) -> RankMemory:
        """The rank that holds most."""
        return max(self.memory, key=lambda m: m.peak)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do; recomputation does not count."""
        return self.flops * self.tokens / (self.seconds * self.ranks * self.rate)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        parts = {
            name: round(getattr(self, name), 6)
            for name in ("seconds", "compute", "recompute", "grid", "exposed", "bubble", "update")
        }
        return {
            **parts,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "mfu": round(self.mfu, 4),
            "peak_bytes": round(self.peak.peak),
            "memory": [m.to_dict() for m in self.memory],
            "stages": [[float(f"{x:.6g}") for x in stage] for stage in self.stages],
            "message": float(f"{self.message:.6g}"),
            "host_state": round(self.host_state, 4),
        }


def fits(memory: Sequence[RankMemory], cluster: Cluster, limit: float) -> bool:
    """Whether all ranks have room for what they hold, `limit` bytes on their devices and what there is on their hosts."""
    return all(m.peak <= limit and m.host <= cluster.host_memory for m in memory)


def layout_of_plan(plan: Plan, setting: Setting) -> Layout:
    """The outer choices of a plan."""
    p, batch = plan.pipeline, setting.global_batch
    per_rank = {"wave": 2 * p.waves, "interleaved": p.stages_per_rank, "zb-v": 2}.get(p.schedule, 1)
    return Layout(
        plan.mesh,
        plan.micro_batches(batch),
        plan.micro_batch_size(batch),
        p.schedule,
        per_rank if plan.mesh.pipe > 1 else 1,
        plan.memory.optimizer,
        plan.memory.activations,
        plan.tensor,
        plan.memory.prefetch,
    )


def predict(plan: Plan, setting: Setting, limit: float | None = None) -> Prediction:
    """What a plan takes and holds; `limit`: bytes of a device, if not all that are usable."""
    return judged(plan, setting, limit=limit).prediction()


def judged(
    plan: Plan, setting: Setting, choices: dict[str, Choice] | None = None, limit: float | None = None
) -> Judged:
    """The same, found when asked for. `choices` by unit name, where they are at hand; else the plan's rules say them."""
    spec, layout = setting.spec, layout_of_plan(plan, setting)
    try:
        schedule = schedule_of(plan, layout, spec.layers)
        counts = stage_layers(setting, schedule, plan.pipeline.layers)
    except ScheduleError as e:
        raise PlanError(str(e)) from None
    if choices is None:
        choices = {u.name: choice_of(plan, u) for u in spec.units}
    followed = Followed(setting, layout, schedule, counts, choices)
    told = plan.memory.device_state
    on_device = float(schema.parse_bytes(told, "memory.device_state", PlanError)) if told else None
    staging = float(schema.parse_bytes(plan.memory.staging, "memory.staging", PlanError))
    return Judged(followed, setting.cluster.usable if limit is None else limit, on_device, staging)


def choice_of(plan: Plan, unit: UnitSpec) -> Choice:
    rule = plan.rule_for(unit.name)
    return Choice(rule.mode, rule.reduce, rule.within, min(rule.split, unit.slices), rule.recompute)


class Judged:
    """One plan in so much memory: of the optimizer's state, what finds room is on the device."""

    def __init__(self, followed: Followed, limit: float, state_on_device: float | None = None, staging: float = 0.0):
        self.followed, self.limit, self._given, self._staging = followed, limit, state_on_device, staging
        self.setting, self.layout = followed.setting, followed.layout
        self._streams = self.layout.streams(self.setting)
        self.share = self._share()

    def at(self, limit: float) -> Judged:
        """The same plan with another amount of memory."""
        return self if limit == self.limit else Judged(self.followed, limit, self._given, self._staging)

    @property
    def seconds(self) -> float:
        return self._slowest[0]

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What every rank of the pipeline holds."""
        held = zip(self.followed.memory, self.followed.local, strict=True)
        return tuple(m.with_state(*self._state(local, self.share)) for m, local in held)

    @property
    def peak(self) -> float:
        return max(m.peak for m in self.memory)

    @property
    def at_best(self) -> float:
        """Seconds, had all state room on the device."""
        if self.share == 1:
            return self.seconds
        ends = zip(self.followed.ends, self.followed.local, strict=True)
        return max(end.seconds + self._update(local, 1.0) for end, local in ends)

    @cached_property
    def room(self) -> float:
        """Bytes that units may hold more, and no more of the state crosses the host's link than the update hides."""
        if self.layout.optimizer != "auto":
            return self.limit - self.peak
        hidden = self._update(max(self.followed.local), 1.0) / self.rate
        return self._left(max(0.0, 1 - hidden / self._most_state()))

    @property
    def rate(self) -> float:
        """Seconds of a byte for which there is no room."""
        return 1 / self.setting.cluster.host.link if self.layout.optimizer == "auto" else inf

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.setting.cluster, self.limit)

    @cached_property
    def _slowest(self) -> tuple[float, float, float]:
        """Seconds of the rank that is done last, of its reductions after its last backward, and of its update."""
        ends = (
            (rank, self._update(local, self.share))
            for rank, local in zip(self.followed.ends, self.followed.local, strict=True)
        )
        return max((end.seconds + update, end.late, update) for end, update in ends)

    def prediction(self) -> Prediction:
        seconds, late, update = self._slowest
        setting, layout, followed = self.setting, self.layout, self.followed
        m, busiest = layout.micro_batches, followed.busiest
        grid = recompute = compute = 0.0
        for c in (u.cost for u in followed.units(busiest)):
            for times, p in ((m - 1, c.compute), (1, c.ends)):
                grid, recompute = grid + times * p.grid, recompute + times * p.again
                compute += times * (p.forward + p.input_grad + p.weight_grad - p.grid)
        exposed = max(0.0, followed.busy + late - compute - grid - recompute)
        spec = setting.spec
        return Prediction(
            seconds=seconds,
            compute=compute,
            recompute=recompute,
            grid=grid,
            exposed=exposed,
            bubble=max(0.0, seconds - compute - recompute - grid - exposed - update),
            update=update,
            memory=self.memory,
            tokens=setting.global_batch * spec.seq_len,
            flops=spec.flops_per_token,
            ranks=layout.mesh.ranks,
            rate=setting.cluster.device.peak(setting.precision.compute),
            device_state=self.share * self._most_state() if layout.optimizer == "auto" else 0.0,
            computing=tuple(self._computing(rank) for rank in range(followed.schedule.ranks)),
            stages=followed.stage_seconds,
            message=followed.message,
            host_state=0.0 if setting.cluster.device.kind == "cpu" else 1 - self.share,
        )

    def _computing(self, rank: int) -> float:
        once = sum(sum(u.cost.compute[:4]) - u.cost.compute.grid for u in self.followed.units(rank))
        return self.layout.micro_batches * once + self._update(self.followed.local[rank], self.share)

    def _update(self, local: float, share: float) -> float:
        """Seconds of the update of `local` parameters: as fast as memory, or as the host's link for what is there."""
        s, cluster = self.setting, self.setting.cluster
        # state is read and written; gradients are cleared, measured, clipped, read; narrow weights are rounded from a master:
        # in one pass by a GPU's kernel
        if s.compute < 4 and cluster.device.kind != "cpu":
            moved = 2 * s.state + 3 * s.reduce + s.compute
        else:
            moved = 2 * s.state + 5 * s.reduce + (45 if s.compute < 4 else 2 * s.compute)
        on_device = local * moved / cluster.device.memory_rate  # what is streamed is updated there, too
        return max(on_device, self._away(local, share) * s.streamed / cluster.host.link)

    def _away(self, local: float, share: float) -> float:
        """Of a rank's parameters, those whose state is on the host: each rank keeps as many bytes as the fullest its share."""
        return max(0.0, local - share * max(self.followed.local))

    def _share(self) -> float:
        """The share of the optimizer's state that is on the device."""
        if self.layout.optimizer == "device":
            return 1.0
        if self.layout.optimizer == "host":
            return 0.0
        most = self._most_state()
        if self._given is not None:
            return min(1.0, self._given / most)
        found = self._left(0.0) / most
        if 0 < found < 1 and (1 - found) * most < RING * BUCKET * self.setting.streamed:
            found += self._left(found) / most  # with little to stream, the ring is smaller, too
        return max(0.0, min(1.0, found))

    def _left(self, share: float) -> float:
        """Bytes that every rank has left with that share of its state on the device."""
        held = zip(self.followed.memory, self.followed.local, strict=True)
        return min(self.limit - m.peak - self._state(local, share)[0] for m, local in held)

    def _state(self, local: float, share: float) -> tuple[float, float]:
        """Bytes of the state of `local` parameters on the device, with what streams it, and on the host."""
        state = local * (self.setting.streamed if self._streams else self.setting.state)
        away = 0.0 if self.setting.cluster.device.kind == "cpu" else self._away(local, share) / max(1.0, local)
        return state * (1 - away) + self._buffers(local, share), state * away

    def _most_state(self) -> float:
        """Bytes of the optimizer's state of the rank that has most of it."""
        return max(1.0, *self.followed.local) * self.setting.streamed

    def _buffers(self, local: float, share: float) -> float:
        """Bytes of the streamed update's ring and scratch; narrow moments are widened there, wherever they are."""
        s = self.setting
        if not self._streams:
            return 0.0
        bucket = min(BUCKET, local)
        slots = min(max(RING, self._staging // (bucket * s.streamed)), -(-self._away(local, share) // BUCKET))
        scratch = max(4, s.compute) * (1 + (s.compute < 4) + 2 * (s.moments == "bf16"))
        if s.compute < 4 and s.cluster.device.kind != "cpu":
            scratch = 0  # one kernel does it all
        return bucket * (slots * s.streamed + scratch)
