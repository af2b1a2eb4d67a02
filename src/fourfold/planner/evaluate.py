"""Time and memory of a plan: the planner's evaluation of any plan, its own or one written by hand.

Time: a rank without a pipeline runs its units (`op_times.whole_step`); a pipeline's schedule is simulated with the times of
every stage's ops. Reductions that do not overlap with the last backward follow, then the update. `PlanEvaluation.step_time`
adds them up: compute + recompute + grid + exposed + bubble + update.

Memory: a replay of every rank (`memory_model`), and the optimizer's state on the device or on the host. Nothing is fitted to
the result; `fourfold calibrate` measures the inputs of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from fourfold import schema
from fourfold.errors import PlanError, ScheduleError
from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES, STREAM_BUCKET, STREAM_SLOTS
from fourfold.plan import Plan
from fourfold.planner.layouts import layout_of_plan
from fourfold.planner.memory_model import RankExtras, RankMemory, message_buffer_bytes, replay_rank
from fourfold.planner.op_times import StageTimes, plan_units, stage_times, whole_step
from fourfold.planner.prediction import Prediction, StepTime, fits, predict_units
from fourfold.planner.problem import PlanProblem
from fourfold.planner.stage_partition import schedule_of, stage_layers, units_of_stages
from fourfold.planner.unit_cost import PlannedUnit, UnitChoice, choice_of, tied_elements
from fourfold.program import modes
from fourfold.program.costs import Costs
from fourfold.program.engine import OpExtras, Problem, run
from fourfold.program.ops import Op, ends_of_step

__all__ = ["PlanEvaluation", "predict"]


def predict(plan: Plan, problem: PlanProblem) -> Prediction:
    """Time and memory of a plan."""
    return PlanEvaluation(plan, problem).prediction()


class _StepEnds(NamedTuple):
    """A step without the update."""

    seconds: list[float]
    """Of every rank."""
    late: list[float]
    """Part of these seconds: communication after the rank's last backward."""
    busiest: int
    """The rank whose ops take longest."""
    busy: float
    """Seconds of its ops with their exposed communication, up to its last backward."""


class PlanEvaluation:
    """Time and memory of every rank for a plan, computed lazily.

    `choices` by unit name; by default they are read from the plan's rules. `limit`: bytes of a device, by default all usable.
    With `optimizer = "auto"`, state that fits is on the device, or `device_state` bytes of it.
    """

    def __init__(
        self,
        plan: Plan,
        problem: PlanProblem,
        choices: dict[str, UnitChoice] | None = None,
        limit: float | None = None,
    ):
        spec, memory, layout = problem.spec, plan.memory, layout_of_plan(plan, problem)
        try:
            schedule = schedule_of(problem, plan)
            counts = stage_layers(problem, schedule, plan.pipeline.layers)
        except ScheduleError as e:
            raise PlanError(str(e)) from None
        self.problem, self.layout, self.schedule = problem, layout, schedule
        self.limit = problem.cluster.usable if limit is None else limit
        if choices is None:
            choices = {u.name: choice_of(plan, u) for u in spec.units}
        self.stages = plan_units(problem, layout, units_of_stages(spec, counts), choices)
        self._state_on_device = _bytes(memory.device_state, "device_state") if memory.device_state else None
        self._staging = _bytes(memory.staging, "staging")  # of prefetched optimizer state
        self._streams = layout.optimizer != "device" or problem.moments != "fp32"  # by the streamed optimizer
        self._rollback = 0.0  # maximum host bytes for rolling updates back
        hosted = layout.optimizer != "device" and not problem.on_cpu and problem.engine.name == "fourfold"
        if hosted and problem.needs_norm:
            most = inf if not self._staging and plan.mesh.row == 1 else 0.0
            self._rollback = most if memory.rollback == "auto" else _bytes(memory.rollback, "rollback")
        self._message_bytes = layout.message_bytes(problem)
        self._tied_on_two_ranks = spec.tied and schedule.placement[0] != schedule.placement[-1]
        self._tied_elements = 0.0 if spec.lora else tied_elements(spec, layout.mesh)  # exchanged

    def units(self, rank: int) -> list[PlannedUnit]:
        """The units of a rank of the pipeline."""
        return [u for stage in self.schedule.stages_of[rank] for u in self.stages[stage]]

    @cached_property
    def updated(self) -> tuple[float, ...]:
        """Number of parameters that each rank updates."""
        return tuple(sum(u.cost.updated for u in self.units(rank)) for rank in range(self.schedule.ranks))

    def prediction(self) -> Prediction:
        problem, layout = self.problem, self.layout
        return Prediction(
            self.seconds,
            *self.step_time(),
            memory=self.memory,
            tokens=problem.global_batch * problem.spec.seq_len,
            flops=problem.spec.flops_per_token,
            ranks=layout.mesh.ranks,
            rate=problem.cluster.device.peak(problem.precision.compute),
            device_state=self.device_share * self._most_state if layout.optimizer == "auto" else 0.0,
            computing=tuple(self._computing(rank) for rank in range(self.schedule.ranks)),
            stages=self._stage_seconds(),
            message=max(map(max, self._messages)) if self.schedule.ranks > 1 else 0.0,
            host_state=0.0 if problem.on_cpu else 1 - self.device_share,
            usable=self.limit,
            host_memory=problem.cluster.host_memory,
            engine=problem.engine.name,
            units=predict_units(problem, layout, self.stages) if problem.engine.name == "fourfold" else (),
            updates=tuple(self._update(updated, self.device_share) for updated in self.updated),
            updates_on_device=tuple(self._update(updated, 1.0) for updated in self.updated),
            message_bytes=self._message_bytes if self.schedule.ranks > 1 else 0.0,
            messages=self._messages if self.schedule.ranks > 1 else (),
        )

    # ---- time ----

    def step_time(self) -> StepTime:
        """Where a step's seconds go, on the rank with the most work:

        seconds = compute + recompute + grid     sums over its units, for all micro-batches
                + exposed                        further time of its ops, and communication after its last backward
                + bubble                         its idle time, and the extra time of the rank that ends last
                + update                         the optimizer
        """
        seconds, late, update = self._slowest
        m, ends = self.layout.micro_batches, self._ends
        compute = recompute = grid = 0.0
        for c in (u.cost for u in self.units(ends.busiest)):
            for times, t in ((m - 1, c.times), (1, c.times_at_ends)):
                compute += times * (t.work - t.grid)
                recompute += times * t.recompute
                grid += times * t.grid
        exposed = max(0.0, ends.busy + late - compute - recompute - grid)
        bubble = max(0.0, seconds - compute - recompute - grid - exposed - update)
        return StepTime(compute, recompute, grid, exposed, bubble, update)

    @property
    def seconds(self) -> float:
        return self._slowest[0]

    @cached_property
    def _slowest(self) -> tuple[float, float, float]:
        """Seconds of the rank that ends last: its step, communication after its last backward, its update."""
        ends, updates = self._ends, [self._update(updated, self.device_share) for updated in self.updated]
        return max((e + u, late, u) for e, late, u in zip(ends.seconds, ends.late, updates, strict=True))

    @property
    def seconds_with_state_on_device(self) -> float:
        """Step time if all optimizer state fit on the device."""
        if self.device_share == 1:
            return self.seconds
        return max(e + self._update(updated, 1.0) for e, updated in zip(self._ends.seconds, self.updated, strict=True))

    @cached_property
    def _ends(self) -> _StepEnds:
        """One rank alone runs its units; a pipeline's schedule is simulated with the times of its stages."""
        layout, schedule = self.layout, self.schedule
        if schedule.ranks == 1:
            step = whole_step(self.problem, self.stages[0], layout.micro_batches, layout.prefetch)
            return _StepEnds([step], [0.0], 0, step)
        times = self._stage_times
        costs = Costs(
            forward=tuple(t.forward for t in times),
            input_grad=tuple(t.input_grad for t in times),
            weight_grad=tuple(t.weight_grad for t in times),
            message=self._messages,
            link="rank",  # a rank sends its messages one after another
            activation=tuple(1.0 for _ in times),
        )
        ops = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
        extras = {op: e for order in schedule.order for op, e in _first_and_last(order, times).items()}
        ran = run(ops, schedule.order, more=extras)
        work = [sum(times[s].work for s in held) for held in schedule.stages_of]
        busiest = max(range(schedule.ranks), key=lambda r: work[r])
        held = [times[s] for s in schedule.stages_of[busiest]]
        once = sum(t.first.ready + sum(e.ready + e.after for e in t.last) for t in held)
        repeated = (layout.micro_batches - schedule.micro_batches) * work[busiest]
        seconds, late = [], []
        for rank, order in enumerate(schedule.order):
            end = ran.ends[rank][-1] + extras[order[-1]].after
            late.append(max(0.0, ran.lanes[rank] - end) + self._exchange_tied(rank))
            late[-1] += sum(self._timed[s][0] for s in schedule.stages_of[rank])
            seconds.append(end + late[-1] + repeated)
        return _StepEnds(seconds, late, busiest, layout.micro_batches * work[busiest] + once)

    @cached_property
    def _timed(self) -> list[tuple[float, Sequence[PlannedUnit]]]:
        """By stage: seconds of collectives before its first forward and after its last backward; its units without them."""
        if not self.problem.engine.zero1_at_ends:
            return [(0.0, units) for units in self.stages]
        return [_collectives_at_ends(units) for units in self.stages]

    @cached_property
    def _stage_times(self) -> list[StageTimes]:
        """Times of every stage; identical stages are timed once."""
        schedule, known, out = self.schedule, dict[object, StageTimes](), []
        in_flight, emptied = [0] * schedule.stages, [0] * schedule.stages
        for op in (op for ops in schedule.order for op in ops if op.kind != "W"):
            in_flight[op.stage] += 1 if op.kind == "F" else -1
            emptied[op.stage] += in_flight[op.stage] == 0
        for stage, (_, units) in enumerate(self._timed):
            # steady: at least one micro-batch is in flight from its first forward to its last backward
            steady, alone = emptied[stage] == 1, len(schedule.stages_of[schedule.placement[stage]]) == 1
            key = (steady, alone, *((u.spec.kind, u.choice) for u in units))
            if key not in known:
                split, prefetch = schedule.split, self.layout.prefetch
                known[key] = stage_times(
                    self.problem, units, steady=steady, split=split, alone=alone, prefetch=prefetch
                )
            out.append(known[key])
        return out

    def _stage_seconds(self) -> tuple[tuple[float, float, float], ...]:
        """F, I and W of a micro-batch, stage by stage."""
        if self.schedule.ranks > 1:
            return tuple((t.forward, t.input_grad, t.weight_grad) for t in self._stage_times)
        parts = [u.cost.times for u in self.stages[0]]
        backward = sum(p.input_grad + p.recompute for p in parts)
        return ((sum(p.forward for p in parts), backward, sum(p.weight_grad for p in parts)),)

    @cached_property
    def _messages(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of a message between each pair of ranks with adjacent stages."""
        mesh, cluster = self.layout.mesh, self.problem.cluster
        stride, table = mesh.ranks // mesh.pipe, [[0.0] * mesh.pipe for _ in range(mesh.pipe)]
        for a, b in {*pairwise(self.schedule.placement), *pairwise(self.schedule.placement[::-1])}:
            if a != b:
                table[a][b] = cluster.messages(self._message_bytes, a * stride, b * stride, stride)
        return tuple(map(tuple, table))

    def _exchange_tied(self, rank: int) -> float:
        """Seconds to send a tied weight's gradient from the last stage to the first, and the new weight back."""
        place, p = self.schedule.placement, self.problem
        if not self._tied_on_two_ranks or not self._tied_elements or rank not in (place[0], place[-1]):
            return 0.0
        stride = self.layout.mesh.ranks // self.layout.mesh.pipe
        sizes = (self._tied_elements * width for width in (p.reduce_bytes, p.compute_bytes))
        return sum(p.cluster.messages(size, place[-1] * stride, place[0] * stride, stride) for size in sizes)

    def _computing(self, rank: int) -> float:
        once = sum(sum(u.cost.times[:4]) - u.cost.times.grid for u in self.units(rank))
        return self.layout.micro_batches * once + self._update(self.updated[rank], self.device_share)

    def _update(self, updated: float, device_share: float) -> float:
        """Seconds to update `updated` parameters: at memory bandwidth, or at the host link's for state on the host."""
        p, cluster = self.problem, self.problem.cluster
        # state is read and written; gradients are zeroed, their norm is computed, they are clipped and read; bf16 weights are
        # rounded from a master, on a GPU in one pass by a kernel, unless their shards are the master
        if p.compute_bytes < 4 and not p.on_cpu:
            weights = p.compute_bytes if p.parameter_bytes < 4 else 2 * p.parameter_bytes
            moved = 2 * p.state_bytes + 3 * p.reduce_bytes + weights
        else:
            moved = 2 * p.state_bytes + 5 * p.reduce_bytes + (45 if p.compute_bytes < 4 else 2 * p.compute_bytes)
        on_device = updated * moved / cluster.device.memory_rate  # streamed parameters are updated there, too
        streamed = self._on_host(updated, device_share) * p.streamed_bytes / cluster.host.link
        return max(on_device, streamed) + (0.0 if p.on_cpu else p.engine.host_step)

    # ---- memory ----

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of every rank of the pipeline."""
        held = zip(self._without_state, self.updated, strict=True)
        return tuple(self._with_state(m, updated) for m, updated in held)

    def _with_state(self, m: RankMemory, updated: float) -> RankMemory:
        """Add the optimizer's state. Rolling back may use at most 90 % of the host's memory, less what is used already."""
        on_device, on_host = self._state(updated, self.device_share)
        p = self.problem
        wanted = min(self._rollback, on_host * (1 + p.compute_bytes / p.streamed_bytes))
        return m.with_state(on_device, on_host, max(0.0, min(wanted, 0.9 * p.cluster.host_memory - m.host - on_host)))

    @property
    def peak(self) -> float:
        return max(m.peak for m in self.memory)

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.problem.cluster, self.limit)

    @cached_property
    def _without_state(self) -> list[RankMemory]:
        """Memory of every rank, without optimizer state."""
        p, schedule, layout = self.problem, self.schedule, self.layout
        place, two, known = schedule.placement, self._tied_on_two_ranks, dict[Any, Any]()
        embedding, head, out = self.stages[0][0].cost, self.stages[-1][-1].cost, []
        for rank in range(schedule.ranks):
            has_copy, has_owner = two and rank == place[-1], two and rank == place[0]
            offloaded = self._offloaded(rank)
            on_host = min(offloaded, layout.host_activation_bytes(p))
            # CPUs have no kernel that rounds a master in one pass
            rounding = 9.0 * max(u.cost.updated for u in self.units(rank)) if p.compute_bytes < 4 and p.on_cpu else 0.0
            extras = RankExtras(
                parameters=(embedding.parameter_bytes if has_copy else 0.0) + self._tables(),
                tied_here=head.tied_gradient_bytes if p.spec.tied and not two and rank == place[0] else 0.0,
                tied_sent=embedding.gradient_bytes if has_copy else 0.0,
                tied_received=self._tied_elements * p.reduce_bytes if has_owner else 0.0,
                messages=message_buffer_bytes(p, schedule, rank, self._message_bytes),
                pooled=self._message_bytes if p.on_cpu else 0.0,
                offload_buffers=0.0 if p.on_cpu else min(ACTIVATION_BUFFER_BYTES, on_host) + offloaded - on_host,
                host=0.0 if p.on_cpu else on_host,
                update=0.0 if self._streams else rounding,
                prefetch=layout.prefetch,
                consume=layout.consume,
                replicas=layout.replicas > 1,
            )
            out.append(replay_rank(p, schedule, rank, self.stages, extras, known))
        return out

    def _offloaded(self, rank: int) -> float:
        """Peak bytes of offloaded activations."""
        size = {s: sum(u.cost.offloaded_bytes for u in self.stages[s]) for s in self.schedule.stages_of[rank]}
        if not any(size.values()):
            return 0.0
        most = held = 0.0
        for op in self.schedule.order[rank]:
            if op.kind == "F":
                held += size[op.stage]
                most = max(most, held)
            elif op.kind != "I":  # W still needs some of them
                held -= size[op.stage]
        return most

    def _tables(self) -> float:
        """Bytes of a step's tokens and targets, and of rotary tables."""
        spec, mesh = self.problem.spec, self.layout.mesh
        tokens = self.problem.global_batch / mesh.batch_ways * spec.seq_len
        m = spec.config
        rotary = m.rope_dim * (2 if m.rope_local_theta else 1) if m is not None else 0
        return 16 * tokens + 8.0 * spec.seq_len * rotary

    # ---- optimizer state ----

    @cached_property
    def device_share(self) -> float:
        """Share of the optimizer's state on the device."""
        if self.layout.optimizer != "auto":
            return 1.0 if self.layout.optimizer == "device" else 0.0
        most = self._most_state
        if self._state_on_device is not None:
            return min(1.0, self._state_on_device / most)
        found = self._free(0.0) / most
        if 0 < found < 1 and (1 - found) * most < STREAM_SLOTS * STREAM_BUCKET * self.problem.streamed_bytes:
            found += self._free(found) / most  # with little state to stream, the buffers are smaller
        return max(0.0, min(1.0, found))

    @cached_property
    def room(self) -> float:
        """Bytes that units may use in addition while the streamed state still overlaps fully with the update."""
        if self.layout.optimizer != "auto":
            return self.limit - self.peak
        hidden = self._update(max(self.updated), 1.0) * self.problem.cluster.host.link
        return self._free(max(0.0, 1 - hidden / self._most_state))

    def _free(self, device_share: float) -> float:
        """Free bytes of the fullest rank with this share of its state on the device."""
        held = zip(self._without_state, self.updated, strict=True)
        return min(self.limit - m.peak - self._state(updated, device_share)[0] for m, updated in held)

    @property
    def _most_state(self) -> float:
        """Largest optimizer state of any rank, in bytes."""
        return max(1.0, *self.updated) * self.problem.streamed_bytes

    def _on_host(self, updated: float, device_share: float) -> float:
        """Parameters of a rank with state on the host; every rank keeps the same bytes of state on its device."""
        return max(0.0, updated - device_share * max(self.updated))

    def _state(self, updated: float, device_share: float) -> tuple[float, float]:
        """Bytes of the state of `updated` parameters: on the device, with streaming buffers, and on the host."""
        state = updated * (self.problem.streamed_bytes if self._streams else self.problem.state_bytes)
        on_host = 0.0 if self.problem.on_cpu else self._on_host(updated, device_share) / max(1.0, updated)
        return state * (1 - on_host) + self._buffers(updated, device_share), state * on_host

    def _buffers(self, updated: float, device_share: float) -> float:
        """Bytes of the streamed update's buffers and scratch; bf16 moments are cast to fp32 in the scratch."""
        p = self.problem
        if not self._streams:
            return 0.0
        bucket = min(STREAM_BUCKET, updated)
        if self.layout.consume:  # buckets end where units end
            bucket = min(bucket, max(u.cost.updated / u.cost.slices for s in self.stages for u in s))
        wanted = max(STREAM_SLOTS, self._staging // (bucket * p.streamed_bytes))
        slots = min(wanted, -(-self._on_host(updated, device_share) // bucket))
        scratch = max(4, p.compute_bytes) * (1 + (p.compute_bytes < 4) + 2 * (p.moments == "bf16"))
        if p.compute_bytes < 4 and not p.on_cpu:
            scratch = 0  # a single kernel needs none
        kept = p.compute_bytes if self._rollback else 0  # the previous weights pass through the slots
        return bucket * (slots * (p.streamed_bytes + kept) + scratch)


def _bytes(text: str, field: str) -> float:
    return float(schema.parse_bytes(text, f"memory.{field}", PlanError))


def _collectives_at_ends(units: Sequence[PlannedUnit]) -> tuple[float, list[PlannedUnit]]:
    """Seconds of a stage's collectives that run once per step; and the units without them."""
    seconds, out = 0.0, []
    for u in units:
        if modes.once_a_step(u.choice.mode, u.choice.reduce):
            seconds += u.cost.gather + u.cost.reduce + u.cost.across
            u = replace(u, cost=replace(u.cost, gather=0.0, reduce=0.0, across=0.0))
        out.append(u)
    return seconds, out


def _first_and_last(ops: Sequence[Op], times: Sequence[StageTimes]) -> dict[tuple[int, str, int], OpExtras]:
    """How the first forwards and the last backwards of a rank's stages differ from others."""
    out: dict[tuple[int, str, int], OpExtras] = {}
    first, last = ends_of_step(ops)
    for op in first:
        t = times[op.stage]
        overlapped = t.before if out else 0.0
        out[op] = t.first._replace(free=max(t.first.ready, t.first.free - overlapped))
    for op in last:
        out[op] = times[op.stage].last[0 if op.kind == "I" else -1]
    return out
