"""What a plan will take and hold: the planner's judgement of any plan, its own or one written by hand.

Time: a rank without a pipeline is followed unit by unit through its step (`stages`). A pipeline's schedule is simulated with the
seconds of every stage's ops; before it, what the first gathers add; after it, on every rank, the reductions that did not fit
behind the last backward. Then comes the update. Memory: a replay of every rank
(`replay`). Nothing is fitted to the result; `fourfold calibrate` measures what the numbers are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.errors import PlanError, ScheduleError
from fourfold.model.operators import UnitSpec
from fourfold.plan import Mesh, Plan
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.messages import message_bytes
from fourfold.planner.replay import Extra, RankMemory, replay_rank
from fourfold.planner.stages import (
    PlannedUnit,
    StageTimes,
    plan_units,
    rank_costs,
    stage_times,
    tail,
    units_of_stages,
    whole_step,
)
from fourfold.planner.units import STASH, Choice
from fourfold.program.engine import Problem, run
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.ops import Schedule
from fourfold.program.partition import partition

__all__ = ["Judged", "Prediction", "choice_of", "fits", "judged", "layout_of_plan", "predict", "stage_layers"]

BUCKET, RING = 2**24, 4
"""Parameters of a bucket of the streamed update, and buckets that are on the device at once."""
MOST_OPS = 150_000
"""Ops of a schedule that are simulated as they are; of longer ones, the middle repeats and is left out."""


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
    layers: tuple[int, ...] = ()
    device_state: float = 0.0
    """Bytes of optimizer state that the fullest rank keeps on its device, where the plan leaves that open."""
    computing: tuple[float, ...] = ()
    """Of every rank of a pipeline: computing, recomputation and update, were collectives and messages free."""
    warnings: tuple[str, ...] = field(default=())

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


@lru_cache(maxsize=4096)
def _schedule(plan: Plan, micro_batches: int, layers: int) -> Schedule:
    return schedule_of_plan(plan, micro_batches, layers=layers)


def _shape_of(plan: Plan) -> Plan:
    """All of a plan that its schedule depends on."""
    pipeline = plan.pipeline
    if pipeline.schedule != "synthesized":  # which has as many stages as there are layers for
        pipeline = replace(pipeline, layers="auto")
    return Plan(mesh=Mesh(pipe=plan.mesh.pipe), pipeline=pipeline)


def stage_layers(setting: Setting, schedule: Schedule, wish: tuple[int, ...] | str) -> tuple[int, ...]:
    """Layers of every stage, embedding and head among them: as the plan says, or as they are dealt out by FLOPs."""
    spec, stages = setting.spec, schedule.stages
    if isinstance(wish, tuple):
        if len(wish) != stages or sum(wish) != spec.layers - 2:
            raise PlanError(
                f"pipeline.layers = {list(wish)} must be {stages} numbers that sum to the model's {spec.layers - 2} layers"
            )
        return tuple(n + (s == 0) + (s == stages - 1) for s, n in enumerate(wish))
    return _by_flops(setting, schedule.placement)


@lru_cache(maxsize=1024)
def _by_flops(setting: Setting, placement: tuple[int, ...]) -> tuple[int, ...]:
    spec = setting.spec
    return partition([sum(u.flops for u in spec.of_layer(layer)) for layer in range(spec.layers)], placement)


def predict(plan: Plan, setting: Setting, limit: float | None = None) -> Prediction:
    """What a plan takes and holds; `limit`: bytes of a device, if not all that are usable."""
    return judged(plan, setting, limit=limit).prediction()


def judged(
    plan: Plan, setting: Setting, choices: dict[str, Choice] | None = None, limit: float | None = None
) -> Judged:
    """The same, found when asked for. `choices` by unit name, where they are at hand; else the plan's rules say them."""
    spec, layout = setting.spec, layout_of_plan(plan, setting)
    try:
        schedule = _schedule(_shape_of(plan), _simulated(layout), spec.layers)
        counts = stage_layers(setting, schedule, plan.pipeline.layers)
    except ScheduleError as e:
        raise PlanError(str(e)) from None
    if choices is None:
        choices = {u.name: choice_of(plan, u) for u in spec.units}
    stages = plan_units(setting, layout, units_of_stages(spec, counts), choices)
    told = plan.memory.device_state
    on_device = float(schema.parse_bytes(told, "memory.device_state", PlanError)) if told else None
    limit = setting.cluster.usable if limit is None else limit
    return Judged(setting, layout, schedule, stages, counts, on_device, plan.memory.prefetch, limit)


def choice_of(plan: Plan, unit: UnitSpec) -> Choice:
    rule = plan.rule_for(unit.name)
    return Choice(rule.mode, rule.reduce, rule.within, min(rule.split, unit.slices), rule.recompute)


def _simulated(layout: Layout) -> int:
    """Micro-batches to simulate: all, or as many as show the middle that repeats."""
    per = 3 * layout.stages
    few = 4 * layout.mesh.pipe
    return layout.micro_batches if layout.micro_batches * per <= MOST_OPS else max(few, MOST_OPS // per // few * few)


class Judged:
    """One plan being judged."""

    def __init__(
        self,
        setting: Setting,
        layout: Layout,
        schedule: Schedule,
        stages: list[list[PlannedUnit]],
        counts: Sequence[int],
        state_on_device: float | None,
        prefetch: int,
        limit: float,
    ):
        self.prefetch, self.limit = prefetch, limit
        self._times: dict[object, StageTimes] = {}  # of stages that are alike, once
        self._tails: dict[object, float] = {}
        self.walks: dict[Any, Any] = {}
        self.setting, self.layout, self.schedule, self.stages = setting, layout, schedule, stages
        self.counts = tuple(counts)
        mesh = layout.mesh
        self.message_bytes, self.message = layout.message(setting), layout.message_seconds(setting)
        last = schedule.placement[-1]
        self.tied_copy = setting.spec.tied and schedule.placement[0] != last
        embed = setting.spec.units[0]
        self.tied_elements = embed.matrices / (mesh.row * mesh.col)
        self.streams = layout.optimizer != "device" or setting.moments != "fp32"  # the streamed engine updates
        self.share = self._share(state_on_device)

    @property
    def seconds(self) -> float:
        return self._timed[0]

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What every rank of the pipeline holds."""
        return tuple(self._memory(rank) for rank in range(self.schedule.ranks))

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.setting.cluster, self.limit)

    @cached_property
    def _timed(self) -> tuple[float, int, float, float]:
        """Seconds; the busiest rank; seconds of its ops, with what of its collectives is not hidden; those of the update."""
        setting, layout, schedule = self.setting, self.layout, self.schedule
        if schedule.ranks == 1:
            step = whole_step(setting, self.stages[0], layout.micro_batches, self.prefetch)
            update = self._update(sum(u.cost.local for u in self.stages[0]))
            return step + update, 0, step, update
        times = [self._stage_times(s) for s in range(schedule.stages)]
        costs = rank_costs(times, self.message)
        problem = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
        ran = run(problem, schedule.order)
        more = layout.micro_batches - schedule.micro_batches
        work = [
            sum(times[s].forward + times[s].input_grad + times[s].weight_grad for s in held)
            for held in schedule.stages_of
        ]
        busiest = max(range(schedule.ranks), key=lambda r: work[r])
        start = sum(t.first for t in times)
        repeated = more * work[busiest]
        ends = []
        for rank in range(schedule.ranks):
            late, update = self._tail(rank), self._update(self._local(rank))
            ends.append((start + ran.ends[rank][-1] + repeated + late + update, late, update))
        seconds, late, update = max(ends)
        return seconds, busiest, layout.micro_batches * work[busiest] + start + late, update

    def prediction(self) -> Prediction:
        seconds, busiest, work, update = self._timed
        setting, layout, m = self.setting, self.layout, self.layout.micro_batches
        units = [u for s in self.schedule.stages_of[busiest] for u in self.stages[s]]
        parts = [u.cost.compute for u in units]
        grid = m * sum(p.grid for p in parts)
        recompute = m * sum(p.again for p in parts)
        compute = m * sum(p.forward + p.input_grad + p.weight_grad for p in parts) - grid
        late = max(0.0, work - compute - grid - recompute)
        spec = setting.spec
        return Prediction(
            seconds=seconds,
            compute=compute,
            recompute=recompute,
            grid=grid,
            exposed=late,
            bubble=max(0.0, seconds - compute - recompute - grid - late - update),
            update=update,
            memory=self.memory,
            tokens=setting.global_batch * spec.seq_len,
            flops=spec.flops_per_token,
            ranks=layout.mesh.ranks,
            rate=setting.cluster.device.matrix[setting.precision.compute],
            layers=self.counts,
            device_state=self.share * self._most_state() if layout.optimizer == "auto" else 0.0,
            computing=tuple(self._computing(rank) for rank in range(self.schedule.ranks)),
        )

    def _computing(self, rank: int) -> float:
        units = [u.cost for s in self.schedule.stages_of[rank] for u in self.stages[s]]
        once = sum(sum(c.compute[:4]) - c.compute.grid for c in units)
        return self.layout.micro_batches * once + self._update(sum(c.local for c in units))

    def _steady(self, rank: int) -> bool:
        """Whether a rank always has a micro-batch in flight between its first forward and its last backward."""
        if self.schedule.ranks == 1:
            return False
        return len(self.schedule.stages_of[rank]) > 1 or rank < self.schedule.ranks - 1

    def _stage_times(self, stage: int) -> StageTimes:
        rank, units = self.schedule.placement[stage], self.stages[stage]
        steady, alone = self._steady(rank), len(self.schedule.stages_of[rank]) == 1
        key = (steady, alone, *((u.spec.kind, u.choice) for u in units))
        if key not in self._times:
            split = self.schedule.split
            self._times[key] = stage_times(
                self.setting, units, steady=steady, split=split, alone=alone, prefetch=self.prefetch
            )
        return self._times[key]

    def _tail(self, rank: int) -> float:
        """Seconds after a rank's last backward: reductions still under way."""
        schedule, cluster = self.schedule, self.setting.cluster
        last = {op.stage: i for i, op in enumerate(schedule.order[rank]) if op.kind in "BW"}
        stages = [self.stages[s] for s in sorted(last, key=lambda s: last[s])]
        key = tuple((i, u.spec.kind, u.choice) for i, units in enumerate(stages) for u in units)
        if key not in self._tails:
            self._tails[key] = tail(self.setting, stages, split=schedule.split, prefetch=self.prefetch)
        late = self._tails[key]
        if self.tied_copy and rank in (schedule.placement[0], schedule.placement[-1]):
            size = self.tied_elements * self.setting.reduce
            late += cluster.message(size, self.layout.mesh.ranks // self.layout.mesh.pipe)
        return late

    def _local(self, rank: int) -> float:
        """Parameters that a rank updates."""
        return sum(u.cost.local for s in self.schedule.stages_of[rank] for u in self.stages[s])

    def _update(self, local: float) -> float:
        """Seconds of the update of `local` parameters: as fast as memory, or as the host's link for what is there."""
        s, cluster = self.setting, self.setting.cluster
        # state is read and written; gradients are cleared, measured, clipped, read; narrow weights are rounded from a master:
        # in one pass by a GPU's kernel
        if s.compute < 4 and cluster.device.kind != "cpu":
            moved = 2 * s.state + 3 * s.reduce + s.compute
        else:
            moved = 2 * s.state + 5 * s.reduce + (45 if s.compute < 4 else 2 * s.compute)
        on_device = local * moved / cluster.device.memory_rate  # what is streamed is updated there, too
        return max(on_device, local * (1 - self.share) * s.streamed / cluster.host.link)

    def _share(self, given: float | None) -> float:
        """The share of the optimizer's state that is on the device."""
        if self.layout.optimizer == "device":
            return 1.0
        if self.layout.optimizer == "host":
            return 0.0
        if given is not None:
            return min(1.0, given / self._most_state())
        self.share, most = 0.0, self._most_state()
        found = self._room() / most
        if 0 < found < 1 and (1 - found) * most < RING * BUCKET * self.setting.streamed:
            self.share = found  # with little to stream, the ring is smaller, too
            found += self._room() / most
        return max(0.0, min(1.0, found))

    def _room(self) -> float:
        """Bytes that every rank has left."""
        return min(self.limit - self._memory(r).peak for r in range(self.schedule.ranks))

    def _most_state(self) -> float:
        """Bytes of the optimizer's state of the rank that has most of it."""
        held = [sum(u.cost.local for s in stages for u in self.stages[s]) for stages in self.schedule.stages_of]
        return max(1.0, *held) * self.setting.streamed

    def _tables(self) -> float:
        """Bytes of a step's tokens and targets, and of rotary tables."""
        spec, mesh = self.setting.spec, self.layout.mesh
        tokens = self.setting.global_batch / mesh.batch_ways * spec.seq_len
        rotary = spec.config is not None and spec.config.family == "llama"
        return 16 * tokens + (8.0 * spec.seq_len * spec.config.head_dim if rotary and spec.config else 0.0)

    def _memory(self, rank: int) -> RankMemory:
        s, schedule = self.setting, self.schedule
        cpu = s.cluster.device.kind == "cpu"
        units = [u for stage in schedule.stages_of[rank] for u in self.stages[stage]]
        first, last = schedule.placement[0], schedule.placement[-1]
        copy, owner = self.tied_copy and rank == last, self.tied_copy and rank == first
        tied = self.tied_elements * s.reduce
        whole = next(u.cost for u in self.stages[0])
        head = self.stages[-1][-1].cost
        flight = min(self.layout.micro_batches, self.layout.stages)
        # CPUs have no kernel that rounds a master in one pass
        rounding = 9.0 * max(u.cost.local for u in units) if s.compute < 4 and cpu else 0.0
        extra = Extra(
            parameters=(whole.parameters if copy else 0.0) + self._tables(),
            lent=head.borrowed if s.spec.tied and not self.tied_copy and rank == first else 0.0,
            copied=whole.gradients if copy else 0.0,
            taken=tied if owner else 0.0,
            messages=message_bytes(schedule, rank, self.message_bytes, cpu),
            pooled=self.message_bytes if cpu else 0.0,
            parked=0.0 if cpu else min(STASH, flight * sum(u.cost.offloaded for u in units)),
            buffers=self._buffers(sum(u.cost.local for u in units)),
            update=0.0 if self.streams else rounding,
            state_on_device=1.0 if cpu else self.share,
            state=s.streamed if self.streams else s.state,
            prefetch=self.prefetch,
        )
        return replay_rank(schedule, rank, self.stages, extra, self.walks)

    def _buffers(self, local: float) -> float:
        """Bytes of the streamed update's ring and scratch; narrow moments are widened there, wherever they are."""
        s = self.setting
        if not self.streams:
            return 0.0
        bucket = min(BUCKET, local)
        slots = min(RING, -(-local * (1 - self.share) // BUCKET))
        scratch = max(4, s.compute) * (1 + (s.compute < 4) + 2 * (s.moments == "bf16"))
        if s.compute < 4 and s.cluster.device.kind != "cpu":
            scratch = 0  # one kernel does it all
        return bucket * (slots * s.streamed + scratch)
