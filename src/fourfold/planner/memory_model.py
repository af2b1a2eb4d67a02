"""Memory: the workspace of a unit's ops, and a replay of every rank that finds its peak and the instant of it.

`Workspace` counts transient bytes of one unit. `replay_rank` walks a rank's ops link by link (a link is a unit, or one slice of
it), as the lowered program runs them:

    gather      one link ahead of its use, unless the unit is already gathered (program/modes.py)
    compute     adds its workspace; a forward saves activations, a backward releases them
    accumulate  a backward's weight gradients are added to those of earlier micro-batches
    reduce      the shard is allocated; the whole gradient is released when the next link's reduction has started
    release     according to the unit's mode, unless the next op uses the unit again

The step ends with the update. The peak of an op and the bytes it leaves depend on its stage, its kind and its neighbours in the
order, so they are computed once for each combination. Floats are added with `math.fsum`: `sum` rounds differently from Python
3.12 on, and a last digit can decide between two choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fourfold.model.operators import Held, Moment, UnitSpec
from fourfold.planner.grid_cost import flow_of
from fourfold.planner.layouts import ParallelLayout
from fourfold.planner.problem import PlanProblem, per_problem
from fourfold.program import modes
from fourfold.program.costs import Costs
from fourfold.program.instructions import Recv
from fourfold.program.lowering import receives_of
from fourfold.program.ops import Schedule
from fourfold.runtime.sizes import HEADER_BYTES, INLINE, light_sends, room_for

if TYPE_CHECKING:
    from fourfold.planner.unit_cost import PlannedUnit

__all__ = [
    "CATEGORIES",
    "RankExtras",
    "RankMemory",
    "Workspace",
    "accumulates_early",
    "message_buffer_bytes",
    "replay_rank",
]


# ---- one unit ----


def accumulates_early(problem: PlanProblem, layout: ParallelLayout) -> bool:
    """Whether each weight gradient is accumulated as soon as it is computed: on a grid, and by the hooks of a user's module."""
    return layout.on_grid or problem.spec.config is None


class Workspace:
    """Bytes that a unit saves for a micro-batch (`saved`), and the peak workspace of its ops beyond that."""

    def __init__(
        self,
        problem: PlanProblem,
        layout: ParallelLayout,
        unit: UnitSpec,
        recompute: str,
        tokens: int,
        weights: float,
        slices: int,
    ):
        """`weights`: bytes of the gradients of the unit's parameters, in the compute type."""
        mesh, self.overlap = layout.mesh, layout.tensor.overlap
        self.problem, self.unit, self.mesh, self.slices = problem, unit, mesh, slices
        self.recompute, self.tokens, self.grads = recompute, tokens, weights / slices
        self.width, self.scale = problem.compute_bytes, tokens / mesh.col
        self.accumulates_early = accumulates_early(problem, layout)
        sizes = [math.prod(s) for s in unit.trained.values() if len(s) > 1]
        self.largest = max(sizes, default=0) / max(1, sum(sizes))  # share of the largest weight
        frozen = [math.prod(s) for name, s in unit.shapes.items() if len(s) > 1 and name in unit.frozen]
        self.largest_matrix = max(frozen) / unit.matrices if frozen else self.largest
        self.saved_without_recompute = (
            _saved_per_token(problem, unit.saved["none"], unit, "none") + self._shared_keys
        ) * self.scale
        saved = unit.saved.get(recompute, unit.saved["full"])
        self.saved = _saved_per_token(problem, saved, unit, recompute) * self.scale
        self.gathered_inputs = 0.0  # inputs of all columns, kept for the backward
        if "inputs" in layout.tensor.keep and mesh.col > 1 and unit.flops and recompute != "selective":
            self.gathered_inputs = problem.spec.hidden * self.width * (tokens - self.scale)
        self.block = 0.0  # activations of the unit before it, which are recomputed with it
        before = problem.spec.before_in_block(unit.kind) if problem.engine.recomputes_blocks else None
        if recompute == "full" and before is not None:
            whole, kept = (_saved_per_token(problem, before.saved[how], before, how) for how in ("none", "full"))
            self.block, self.saved = (whole - kept) * self.scale, 0.0
        if recompute == "none":  # every slice has a dropout mask
            masks = (slices - 1) * unit.mask * (self.width if problem.on_cpu else 1)
            self.saved = self.saved_without_recompute + self.gathered_inputs + masks * self.scale
        self.flow_bytes = self._flow_bytes(layout) if mesh.row > 1 and unit.output else 0.0

    def _flow_bytes(self, layout: ParallelLayout) -> float:
        """Extra bytes compared with `os` and `ls`: `ws` gathers activations over the rows, `summa` copies the tensors it sums."""
        mesh, hidden, grid = self.mesh, self.problem.spec.hidden, layout.grid(self.problem)
        matmuls = [o for o in self.unit.operators if o.kind == "product"]
        flows = {flow_of(self.problem, o, grid) for o in matmuls}
        widest = max((max(o.inputs, o.outputs) for o in matmuls), default=0)
        if flows & {"ws-in", "ws-out"}:
            return self.width * (((mesh.row - 1) * widest + 2 * hidden) * self.scale + hidden * self.tokens)
        return self.width * (widest + 2 * hidden) * self.scale if "summa" in flows else 0.0

    @property
    def _shared_keys(self) -> float:
        """Extra bytes per token if there are fewer key heads than columns: every column has a whole head (keys before and after
        the rotary embedding, and values)."""
        config, col = self.problem.spec.config, self.mesh.col
        if (
            not self.unit.kind.startswith("attn")
            or config is None
            or config.kv_heads is None
            or config.head_dim is None
        ):
            return 0.0
        return 3.0 * max(0, col - config.kv_heads) * config.head_dim * self.width

    def _peak(self, moments: tuple[Moment, ...]) -> float:
        return max((self._bytes(m) for m in moments), default=0.0)

    def _bytes(self, m: Moment) -> float:
        e, mesh = self.width, self.mesh
        size = (m.held.bytes(e) + m.inner.bytes(e) / self.slices) * self.scale
        size += min(m.grads, self.largest if self.accumulates_early else 1.0) * self.grads
        if mesh.col > 1:
            size += m.full * self.tokens * e
        if mesh.row > 1:  # gathered, or (a gradient) not yet summed over the rows
            wide = 4 if m.grads and e < 4 and not self.unit.frozen else 0
            prefetched = self.largest_matrix if m.weights and self.overlap else 0.0
            size += (m.weights * (e + wide) + prefetched * e) * self.unit.matrices / mesh.col
        return size

    @property
    def _recomputed(self) -> float:
        """Bytes of activations that are recomputed before a backward begins."""
        if self.recompute == "none":
            return 0.0
        size = max(0.0, self.saved_without_recompute - self.saved) / self.slices + self.gathered_inputs + self.block
        if self.recompute == "selective":
            size += self.unit.output * self.width * self.scale  # the output of the last matmul, which is not read
        return size

    @property
    def _slice_sum(self) -> float:
        """Bytes of the output buffer into which slices accumulate."""
        return self.problem.spec.hidden * self.width * self.scale if self.slices > 1 else 0.0

    def forward(self) -> float:
        name = "full" if self.recompute == "per-slice" else self.recompute
        cast = 4 * self.unit.cast / self.slices if self.width < 4 else 0.0
        return self._peak(self.unit.forward[name]) + cast * self.scale + self._slice_sum + self.flow_bytes

    def backward(self) -> float:
        """Recomputed activations exist before the backward begins; during recomputation there is also a forward's workspace."""
        if self.slices > 1:
            probabilities = self.unit.cast * max(4, self.width) / self.slices * self.scale
            return max(self.input_grad() + probabilities, self._first_slice)
        most = self._recomputed + self._peak(self.unit.backward) + self.flow_bytes
        if self.recompute != "none":
            output = self.unit.output * self.width * self.scale
            most = max(most, self._recomputed + self._peak(self.unit.forward["none"]) + output)
        return most

    def input_grad(self) -> float:
        """Workspace of I, if weight gradients are a separate op."""
        return self._recomputed + self._peak(self.unit.split) + self._slice_sum + self.flow_bytes

    def accumulate(self) -> float:
        """Workspace while weight gradients are accumulated, including all saved activations (slices share them)."""
        if self.slices > 1:
            return self.saved + self._first_slice + self.grads / 4  # a quarter of a matmul at a time
        return self.unit.closing * self.width * self.scale + (0.0 if self.accumulates_early else self.grads)

    @property
    def _first_slice(self) -> float:
        """Workspace in the backward of the norm, which the first slice has: gradients of the sum, of the slices' input and of the
        unit's input, and inputs of the weight-gradient matmuls."""
        hidden, e = self.problem.spec.hidden, self.width
        waits = self.unit.for_weight_grad.narrow - (2 if self.unit.output else 1) * hidden
        unfused = 4 * self.unit.unfused * max(4, e) if self.problem.on_cpu else 0.0
        gathered = hidden * e * (self.tokens + self.scale) if self.mesh.col > 1 else 0.0
        return 4 * self._slice_sum + (waits * e / self.slices + unfused) * self.scale + gathered

    def weight_grad(self) -> float:
        """Workspace of W: the largest weight gradient."""
        return self.largest * self.grads


def _saved_per_token(problem: PlanProblem, held: Held, unit: UnitSpec, recompute: str) -> float:
    """Bytes saved per token, with the dropout mask, and with the extra tensors that RMSNorm and attention save on a CPU."""
    e, size = problem.compute_bytes, held.bytes(problem.compute_bytes)
    if not problem.on_cpu:
        return size + (unit.mask if recompute == "none" else 0.0)
    wide = unit.scores * {"none": 3, "selective": 1}.get(recompute, 0)
    if recompute == "none":
        size += unit.mask * e
        copies = (2 if e < 4 else 1) - bool(
            unit.frozen
        )  # normalised values are kept for the gradient of the norm's weight
        wide += unit.unfused * copies + _unfused_heads(problem, unit)
    return size + wide * max(4, e)


def _unfused_heads(problem: PlanProblem, unit: UnitSpec) -> float:
    """Extra elements if a CPU's attention is not fused: keys and values of every head, in fp32 or wider."""
    config = problem.spec.config
    if not unit.scores or config is None:
        return 0.0
    assert config.kv_heads
    assert config.head_dim
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    narrower = (q + 2 * kv) * (1 - problem.compute_bytes / 4) if problem.compute_bytes < 4 else 0.0
    return 2 * (q - kv) / (2 if config.qk_norm else 1) + narrower


# ---- messages between stages ----


def message_buffer_bytes(problem: PlanProblem, schedule: Schedule, rank: int, size: float) -> float:
    """Bytes of message buffers on a rank; a message has `size` bytes.

    On CPUs, messages are received into buffers that are reused and never freed. Their number is the maximum that is in use at one
    time: posted, used as inputs or gradients of a stage, or being sent (short messages, which are copied). On GPUs a message
    is allocated from its arrival to its last use; it is a stage's input, which is counted with the saved activations.
    """
    if schedule.ranks == 1:
        return 0.0
    if not problem.on_cpu:
        return size  # one message in flight
    if size <= INLINE:
        light = light_sends(int(size) + HEADER_BYTES)
        return _most_buffers(problem, schedule, light)[rank] * (size + HEADER_BYTES)
    return _most_buffers(problem, schedule, 0)[rank] * (room_for(int(size)) + HEADER_BYTES) + size


@per_problem
def _most_buffers(problem: PlanProblem, schedule: Schedule, light: int) -> list[int]:
    """By rank: the maximum number of buffers in use; at most `light` of them hold messages that are being sent to one rank."""
    posted = receives_of(schedule, Costs(), 2)
    return [_most_buffers_of_rank(schedule, rank, posted[rank], light) for rank in range(schedule.ranks)]


def _most_buffers_of_rank(schedule: Schedule, rank: int, posted: dict[int, list[Recv]], light: int) -> int:
    place, last = schedule.placement, schedule.stages - 1
    split = any(op.kind == "W" for op in schedule.order[rank])
    taken = most = 0
    received: Counter[tuple[int, int]] = Counter()  # by stage and micro-batch
    sent: Counter[int] = Counter()
    for index, op in enumerate(schedule.order[rank]):
        stage, kind, micro_batch = op
        taken += len(posted.get(index, ()))
        source = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= source <= last and place[source] != rank:  # the op begins with a message
            received[stage, micro_batch] += 1
        most = max(most, taken + sum(min(light, n) for n in sent.values()))
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to <= last and place[to] != rank:
            sent[place[to]] += 1
            most = max(most, taken + sum(min(light, n) for n in sent.values()))
        if kind == ("W" if split else "B"):
            taken -= received.pop((stage, micro_batch), 0)
    return most


# ---- one rank ----

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "workspace", "messages")
_PARAMETERS, _GATHERED, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _WORKSPACE, _MESSAGES = range(7)


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of a rank in bytes, with its instant and its breakdown."""

    rank: int
    at: str
    """The op at the peak, or `update`."""
    by_category: tuple[float, ...]
    host: float = 0.0
    """Bytes on its host: activations, optimizer state, and copies for rolling updates back."""
    host_activations: float = 0.0
    host_rollback: float = 0.0

    @cached_property
    def peak(self) -> float:
        return math.fsum(self.by_category)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by category."""
        return dict(zip(CATEGORIES, self.by_category, strict=True))

    def with_state(self, optimizer: float, host: float, rollback: float) -> RankMemory:
        """Add optimizer state, which is held for the whole step: bytes on the device, on the host, and for rolling back."""
        held = list(self.by_category)
        held[_OPTIMIZER] += optimizer
        return RankMemory(self.rank, self.at, tuple(held), self.host + host + rollback, self.host_activations, rollback)

    def to_dict(self) -> dict[str, object]:
        parts = {name: round(size) for name, size in zip(CATEGORIES, self.by_category, strict=True) if size >= 1}
        host = {"host": round(self.host), "host_activations": round(self.host_activations)}
        host |= {"host_rollback": round(self.host_rollback)} if self.host_rollback else {}
        return {"rank": self.rank, "bytes": round(self.peak), "at": self.at, **parts, **host}


@dataclass(frozen=True)
class RankExtras:
    """Bytes of a rank that do not depend on the choices of units."""

    parameters: float = 0.0
    """Copies of a tied weight, tables."""
    tied_here: float = 0.0
    """Gradient of a tied weight, computed by the head and reduced with the embedding, both on this rank."""
    tied_sent: float = 0.0
    """Gradient of the embedding's unit that is sent to its owner on another rank."""
    tied_received: float = 0.0
    """Gradient of a tied weight, received from the head's rank before the embedding's is reduced."""
    messages: float = 0.0
    """Buffers of messages between stages."""
    pooled: float = 0.0
    """Bytes of one message if received inputs and gradients of stages are counted as buffers."""
    offload_buffers: float = 0.0
    """Activations being copied to or from the host, and those that do not fit there."""
    host: float = 0.0
    """Activations on the host."""
    update: float = 0.0
    """Workspace of the update: rounding of masters."""
    prefetch: int = 1
    """Links gathered ahead."""
    consume: bool = False
    """Whether gradients are consumed: each is freed once the next link's update has been submitted."""
    replicas: bool = False
    """Whether there are replicas: updates are then submitted one link later, so that reductions overlap."""


class _OpContext(NamedTuple):
    """An op's position in its rank's order."""

    kind: str
    first: bool
    """First of its kind in the step."""
    last: bool
    none_in_flight: bool
    """No other micro-batch of the stage is in flight (before a forward, after a backward)."""
    resident: bool
    """The first link is still gathered from the op before."""
    stays: bool
    """The last link is used by the op after."""


class _OpKey(NamedTuple):
    """All inputs of the replay of an op, except its stage's units."""

    context: _OpContext
    prefetched: float
    """Bytes gathered for the op after while the last link computes."""
    reducing: tuple[float, float]
    """A reduction in flight: bytes of its whole gradient, and other bytes that are released when it ends."""


class _OpMemory(NamedTuple):
    """Bytes that an op adds at its peak, and bytes that it leaves."""

    peak: float
    at_peak: tuple[float, ...]
    change: float
    left: tuple[tuple[int, float], ...]
    """(category, bytes)."""
    reducing: tuple[float, float]


def replay_rank(
    problem: PlanProblem,
    schedule: Schedule,
    rank: int,
    stages: Sequence[Sequence[PlannedUnit]],
    extras: RankExtras,
    cache: dict[Any, dict[_OpKey, _OpMemory]],
) -> RankMemory:
    """Replay one rank's ops; `stages[s]` are the units of stage s; `cache` is shared between ranks of one plan.

    Optimizer state is not included: it is held for the whole step.
    """
    held = schedule.stages_of[rank]
    base = [0.0] * len(CATEGORIES)
    base[_PARAMETERS] = extras.parameters + math.fsum(u.cost.parameter_bytes for s in held for u in stages[s])
    base[_MESSAGES] = extras.messages
    base[_ACTIVATIONS] = extras.offload_buffers
    received = _receiving_ops(schedule, rank) if extras.pooled else frozenset()
    tied = (extras.tied_here, extras.tied_sent, extras.tied_received)
    known: dict[int, dict[_OpKey, _OpMemory]] = {}  # by stage; identical stages share it
    ahead: dict[tuple[int, _OpContext], float] = {}  # bytes gathered for an op while the last link before it computes
    for s in held:
        alike = tuple((id(u.cost), u.choice) for u in stages[s])
        key = (alike, (s, "F") in received, (s, "B") in received, tied)
        known[s] = cache.setdefault(key, {})
    best, most, best_at = list(base), 0.0, "update"
    total, reducing = math.fsum(base), (0.0, 0.0)
    ops, contexts = schedule.order[rank], _contexts(problem, schedule, rank, extras.prefetch > 0)
    for i, (op, context) in enumerate(zip(ops, contexts, strict=True)):
        prefetched = 0.0
        if extras.prefetch and i + 1 < len(ops) and not context.stays:
            following = ops[i + 1].stage, contexts[i + 1]
            if following not in ahead:
                u = stages[following[0]][0 if following[1].kind == "F" else -1]
                ahead[following] = _link_bytes(u) if _gathers(u, following[1]) else 0.0
            prefetched = ahead[following]
        op_key = _OpKey(context, prefetched, reducing)
        memory = known[op.stage].get(op_key)
        if memory is None:
            memory = known[op.stage][op_key] = _replay_op(op_key, op.stage, stages[op.stage], extras, received)
        if total + memory.peak > most:
            most, best_at = total + memory.peak, str(op)
            best = [b + h for b, h in zip(base, memory.at_peak, strict=True)]
        for category, change in memory.left:
            base[category] += change
        total += memory.change
        reducing = memory.reducing
    base[_GRADIENTS] -= math.fsum(reducing)
    at_update = list(base)
    at_update[_WORKSPACE] += extras.update
    if math.fsum(at_update) > math.fsum(best):
        best, best_at = at_update, "update"
    return RankMemory(rank, best_at, tuple(best), extras.host, extras.host)


@per_problem
def _contexts(problem: PlanProblem, schedule: Schedule, rank: int, prefetch: bool) -> list[_OpContext]:
    """The context of every op of a rank."""
    ops = schedule.order[rank]
    last_of = {(op.stage, op.kind): i for i, op in enumerate(ops)}
    begun: set[tuple[int, str]] = set()
    in_flight = dict.fromkeys((op.stage for op in ops), 0)
    resident, out = False, []
    for i, (stage, kind, _) in enumerate(ops):
        none_in_flight = in_flight[stage] == 0
        if kind != "W":
            in_flight[stage] += 1 if kind == "F" else -1
            none_in_flight = none_in_flight if kind == "F" else in_flight[stage] == 0
        following = ops[i + 1] if i + 1 < len(ops) and ops[i + 1].kind != "W" else None
        turns = following is not None and following.stage == stage and (following.kind == "F") != (kind == "F")
        stays = turns and prefetch and kind != "W"
        key = (stage, kind)
        out.append(_OpContext(kind, key not in begun, last_of[key] == i, none_in_flight, resident, stays))
        begun.add(key)
        resident = stays
    return out


def _receiving_ops(schedule: Schedule, rank: int) -> frozenset[tuple[int, str]]:
    """Stages of a rank whose forward ("F") or backward ("B") begins with a message."""
    place, last = schedule.placement, schedule.stages - 1
    inputs = {(s, "F") for s in schedule.stages_of[rank] if s and place[s - 1] != rank}
    return frozenset(inputs | {(s, "B") for s in schedule.stages_of[rank] if s < last and place[s + 1] != rank})


class _Meter:
    """Bytes held inside an op: now, and at the peak."""

    __slots__ = ("_at_peak", "_peak", "activations", "gathered", "gradients")

    def __init__(self) -> None:
        self.gathered = self.gradients = self.activations = self._peak = 0.0
        self._at_peak = (0.0, 0.0, 0.0, 0.0)

    def mark(self, workspace: float = 0.0, gathered: float = 0.0, gradients: float = 0.0) -> None:
        """Record an instant with these additional bytes."""
        gathered, gradients = self.gathered + gathered, self.gradients + gradients
        held = gathered + gradients + self.activations + workspace
        if held > self._peak:
            self._peak, self._at_peak = held, (gathered, gradients, self.activations, workspace)

    def result(self, reducing: tuple[float, float]) -> _OpMemory:
        high = [0.0] * len(CATEGORIES)
        high[_GATHERED], high[_GRADIENTS], high[_ACTIVATIONS], high[_WORKSPACE] = self._at_peak
        now = ((_GATHERED, self.gathered), (_GRADIENTS, self.gradients), (_ACTIVATIONS, self.activations))
        change = self.gathered + self.gradients + self.activations
        return _OpMemory(self._peak, tuple(high), change, tuple((i, size) for i, size in now if size), reducing)


def _replay_op(
    key: _OpKey, stage: int, units: Sequence[PlannedUnit], extras: RankExtras, received: frozenset[tuple[int, str]]
) -> _OpMemory:
    """One op, link by link."""
    context, reducing = key.context, key.reducing
    kind, meter, prefetch = context.kind, _Meter(), extras.prefetch
    links = [(u, part) for u in units for part in range(u.cost.slices)]
    if kind != "F":
        links.reverse()
    gathers = [_gathers(u, context) and not (i == 0 and context.resident) for i, (u, _) in enumerate(links)]
    sizes = [_link_bytes(u) for u, _ in links]
    if gathers[0]:
        meter.gathered += sizes[0]
    for i, (u, part) in enumerate(links):
        c, last = u.cost, i == len(links) - 1
        if i and not prefetch and gathers[i]:
            meter.gathered += sizes[i]
        if not last and prefetch and gathers[i + 1]:
            meter.gathered += sizes[i + 1]
        prefetched = key.prefetched if last else 0.0
        pooled = extras.pooled if u is units[0] and (stage, "F") in received else 0.0  # saved input in a message buffer
        if kind == "F":
            if part == 0:
                meter.activations += c.saved_bytes - pooled
            meter.mark(c.forward_workspace, prefetched)
        else:
            # whether this op allocates the gradient: it is the first of a step, or the previous gradient was reduced and freed
            each_time = modes.reduces(u.choice.reduce, last=False) and kind == "B"
            allocates = kind != "W" and (context.first or (each_time and c.reduced_bytes < c.gradient_bytes))
            grad = extras.pooled if i == 0 and kind != "W" and (stage, "B") in received else 0.0
            early = c.gradient_bytes / c.slices if c.accumulates_early and kind == "B" and allocates else 0.0
            workspaces = {"B": c.backward_workspace, "I": c.input_grad_workspace, "W": c.weight_grad_workspace}
            meter.mark(workspaces[kind] - grad, prefetched, early)
            if c.slices > 1 and not extras.consume:  # its gradient waits for the reductions before it
                meter.gradients -= math.fsum(reducing)
                reducing = (0.0, 0.0)
            if allocates:
                meter.gradients += (c.gradient_bytes + c.tied_gradient_bytes) / c.slices
            meter.mark({"B": c.accumulate_workspace, "I": 0.0, "W": c.weight_grad_workspace}[kind], prefetched)
            if kind != "I":
                reducing = _reduce(u, part, context, reducing, meter, extras)
            if part == 0:
                kept, saved = c.saved_for_weight_grad, c.saved_bytes - pooled
                meter.activations -= {"B": saved, "I": saved - kept, "W": kept}[kind]
        if kind != "W" and _releases(u, context) and not (last and context.stays):
            meter.gathered -= sizes[i]
    return meter.result(reducing)


def _reduce(
    u: PlannedUnit,
    part: int,
    context: _OpContext,
    reducing: tuple[float, float],
    meter: _Meter,
    extras: RankExtras,
) -> tuple[float, float]:
    """A link's gradient is complete: reduce it, now or in the last op. Returns the reduction in flight."""
    c, each_time = u.cost, modes.reduces(u.choice.reduce, last=False)
    whole, shard = c.gradient_bytes / c.slices, c.reduced_bytes / c.slices
    if not modes.reduces(u.choice.reduce, last=context.last):
        return reducing
    if c.tied_gradient_bytes and extras.tied_sent and part == 0:
        meter.mark(gradients=extras.tied_sent)
        meter.gradients += extras.tied_sent - c.tied_gradient_bytes
    if u.spec.layer == 0:
        meter.mark(gradients=extras.tied_received)
        meter.gradients -= extras.tied_here
    if extras.consume:
        return _consume(whole, shard, reducing, meter, extras)
    if c.reduced_bytes >= c.gradient_bytes:  # it stays whole; the second one is added to it when the third begins
        meter.gradients += whole if each_time and context.first and not context.last else 0.0
        return reducing
    meter.mark(gradients=shard)
    meter.gradients += shard - reducing[0] - reducing[1]
    if each_time and context.kind == "W" and not context.last:  # the next micro-batch has already allocated its own
        meter.gradients += whole
    added = shard if each_time and not context.first else 0.0
    if not extras.prefetch:  # computing waits for the reduction
        meter.gradients -= whole + added
        return 0.0, 0.0
    return whole, added


def _consume(
    whole: float, shard: float, waiting: tuple[float, float], meter: _Meter, extras: RankExtras
) -> tuple[float, float]:
    """A link's gradient is reduced; `waiting`: bytes to free now, and after the next link. Returns the new `waiting`."""
    if shard < whole:
        meter.mark(gradients=shard)
        meter.gradients += shard
    meter.gradients -= waiting[0]
    if not extras.replicas:
        return whole, 0.0
    reduced_away = whole if shard < whole else 0.0  # freed when the next reduction starts
    if not extras.prefetch:
        meter.gradients -= reduced_away
        reduced_away = 0.0
    return waiting[1] + reduced_away, shard


def _link_bytes(u: PlannedUnit) -> float:
    """Bytes that are gathered for one link."""
    return u.cost.gathered_bytes / u.cost.slices + u.cost.tied_parameter_bytes if u.cost.gather else 0.0


def _gathers(u: PlannedUnit, op: _OpContext) -> bool:
    known = {"first": op.first, "none_in_flight": op.none_in_flight}
    return u.cost.gather > 0 and modes.gathers(u.choice.mode, op.kind, **known)


def _releases(u: PlannedUnit, op: _OpContext) -> bool:
    backward = op.kind != "F"
    known = {"last": backward and op.last, "none_in_flight": backward and op.none_in_flight}
    return u.cost.gather > 0 and modes.releases(u.choice.mode, **known)
