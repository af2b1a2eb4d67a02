"""The cost of a unit on a layout: seconds and bytes for every choice of mode, split and recomputation.

**Compute**: its operators (`compute_cost`), and the exposed time of its collectives on the grid (`grid_cost`).

**Sharding**: over a group of S of the N replicas (`within`; 0: S = N), parameters of n elements are gathered and gradients
reduced over the group; with S < N, shards are also summed over the other N/S groups.

| mode | gathers per step | holds gathered parameters |
|---|---|---|
| replicate | none | (its parameters are whole) |
| keep | 1 | the whole step |
| zero2 | one per micro-batch if no other is in flight, else 1 | from F to B |
| zero3 | 2 per micro-batch | while it computes, and the next unit's |

**Memory**: activations saved for the backward, and the workspace of its ops (`memory_model.Workspace`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fourfold.model.operators import Held, ModelSpec, Moment, UnitSpec
from fourfold.offload_sizes import HOST_PAGE_BYTES, LEAST_ACTIVATION_BYTES
from fourfold.plan import Mesh, Plan, Tensor, UnitRule
from fourfold.planner.compute_cost import fp8_workspace, host_seconds, logit_rows, unit_seconds
from fourfold.planner.grid_cost import NO_GRID, AxisTime, GridTime, grid_times, vector_sums
from fourfold.planner.layouts import GridShape, ParallelLayout
from fourfold.planner.memory_model import Workspace, accumulates_early
from fourfold.planner.problem import PlanProblem, per_problem
from fourfold.program import modes
from fourfold.shard.layout import ALIGN

__all__ = [
    "PlannedUnit",
    "ShardingCost",
    "UnitChoice",
    "UnitCost",
    "UnitTimes",
    "choice_of",
    "pattern_of",
    "reduced_in_buckets",
    "rules_of",
    "sharding_cost",
    "tied_elements",
    "unit_cost",
    "unit_times",
    "unit_times_on_grid",
]


# ---- choices, and the rules of a plan ----


class UnitChoice(NamedTuple):
    """The options of a unit."""

    mode: Literal["replicate", "zero2", "zero3", "keep"] = "replicate"
    reduce: Literal["step", "micro-batch"] = "step"
    within: int = 0
    split: int = 1
    recompute: Literal["none", "selective", "full", "per-slice"] = "none"


def choice_of(plan: Plan, unit: UnitSpec) -> UnitChoice:
    """A unit's choice according to the plan's rules."""
    rule = plan.rule_for(unit.name)
    return UnitChoice(rule.mode, rule.reduce, rule.within, min(rule.split, unit.slices), rule.recompute)


def rules_of(choices: dict[str, UnitChoice]) -> tuple[UnitRule, ...]:
    """Equivalent rules, as few as possible: exceptions by name, then the most common choice of every name pattern."""
    patterns: dict[str, dict[UnitChoice, int]] = {}
    for name, choice in choices.items():
        votes = patterns.setdefault(pattern_of(name), {})
        votes[choice] = votes.get(choice, 0) + 1
    common = {p: max(votes, key=lambda c: votes[c]) for p, votes in patterns.items()}
    rules = [_rule(name, c) for name, c in choices.items() if common[pattern_of(name)] != c]
    if len(set(common.values())) == 1:
        return (*rules, _rule("*", next(iter(common.values()))))
    return (*rules, *(_rule(p, c) for p, c in common.items()))


def pattern_of(name: str) -> str:
    """A unit's name with its layer number replaced: blocks.3.mlp is blocks.*.mlp."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _rule(match: str, c: UnitChoice) -> UnitRule:
    return UnitRule(match=match, mode=c.mode, reduce=c.reduce, within=c.within, split=c.split, recompute=c.recompute)


# ---- time ----


class UnitTimes(NamedTuple):
    """Seconds of one micro-batch of a unit, exposed collectives on the grid included."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    """Added to the backward by recomputation."""
    grid: float
    """Part of forward and backward: exposed collectives of the grid."""
    on_grid: GridTime = NO_GRID
    """The grid's collectives by axis."""

    @property
    def work(self) -> float:
        """Forward and backward, without recomputation."""
        return self.forward + self.input_grad + self.weight_grad

    def exposed(self, op: str) -> float:
        """Exposed seconds of the grid's collectives in an op (F, B, I, W)."""
        return _exposed(self.on_grid.of(op))

    def cold(self, op: str) -> float:
        """Extra seconds of an op that begins with this unit: its first weight is not prefetched over the rows."""
        return self.on_grid.cold_forward if op == "F" else self.on_grid.cold_backward if op != "W" else 0.0


def _exposed(axes: tuple[AxisTime, AxisTime]) -> float:
    return axes[0].exposed + axes[1].exposed


@per_problem
def unit_times_on_grid(
    problem: PlanProblem,
    kind: str,
    grid: GridShape,
    split: int = 1,
    recompute: str = "none",
    splits_backward: bool = False,
    once: bool | None = None,
) -> UnitTimes:
    """Times of a micro-batch of a unit.

    `splits_backward`: weight gradients are a separate op. `once`: the first forward and the last backward of a step, in which the
    grid gathers and sums kept tensors (True); all others (False); the average over a step (None).
    """
    if once is None and grid.amortized_over > 1:
        where = (problem, kind, grid, split, recompute, splits_backward)
        usual, ends = unit_times_on_grid(*where, False), unit_times_on_grid(*where, True)
        f, i, w, again, moved = (u + (e - u) / grid.amortized_over for u, e in zip(usual[:5], ends[:5], strict=True))
        return UnitTimes(f, i, w, again, moved)
    c = unit_seconds(problem, kind, *grid[:3], split, "gradients" in grid.tensor.keep)
    moves = usual_moves = NO_GRID
    if grid.row * grid.col > 1:
        at_ends = once is not False or grid.amortized_over == 1
        moves, usual_moves = (grid_times(problem, grid, splits_backward, each)[kind] for each in (at_ends, False))
    forward, backward, again = (_exposed(axes) for axes in (moves.forward, moves.backward, usual_moves.forward))
    host_forward, host_backward = host_seconds(problem, kind, grid.row, grid.col, split)
    host_too = sum if problem.engine.synchronous else max  # the device waits for the host
    input_grad, weight_grad = c.input_grad + backward - moves.weight, c.weight_grad + moves.weight
    slower = host_too((host_backward, input_grad + weight_grad)) / max(1e-12, input_grad + weight_grad)
    return UnitTimes(
        host_too((host_forward, c.forward + forward)),
        slower * input_grad,
        slower * weight_grad,
        {"none": 0.0, "selective": c.cheap}.get(recompute, host_too((host_forward, c.forward + again - c.unread))),
        forward + backward,
        moves,
    )


def unit_times(
    problem: PlanProblem, layout: ParallelLayout, kind: str, choice: UnitChoice, once: bool | None = None
) -> UnitTimes:
    """Times of a micro-batch of a unit on a layout; `once` as in `unit_times_on_grid`."""
    grid = layout.grid(problem)._replace(tensor=_kept(layout.tensor, choice))
    how = choice.split, choice.recompute, layout.grid_splits_backward
    return unit_times_on_grid(problem, kind, grid, *how, once)


def _kept(tensor: Tensor, choice: UnitChoice) -> Tensor:
    """Tensors that the grid keeps for a unit: not weights that are released between F and B."""
    if modes.gathered_for_each_op(choice.mode) and "weights" in tensor.keep:
        return replace(tensor, keep=tuple(what for what in tensor.keep if what != "weights"))
    return tensor


# ---- sharding ----


@dataclass(frozen=True)
class ShardingCost:
    """A unit's parameters and gradients under a choice: seconds, and bytes on one rank."""

    gather: float
    """Seconds of one all-gather of its parameters."""
    reduce: float
    """Seconds of one reduction of its gradients, within its group."""
    across: float
    """Seconds of the sum across groups that follows."""
    own_link: bool
    """Whether that sum uses another network level than gathers and reductions."""
    gathered_bytes: float
    """Its parameters, gathered."""
    parameter_bytes: float
    """Held for the whole step: the whole parameters, or a shard."""
    gradient_bytes: float
    """Its gradient before it is reduced."""
    reduced_bytes: float
    """Its gradient after it is reduced (in place: the whole)."""
    updated: float
    """Parameters that this rank updates."""
    transient_bytes: float
    """Parameters that are gathered only while it computes (zero3)."""
    slices: int
    """Number of slices; each has its share of parameters and gradients, and gathers and reduces separately."""


@per_problem
def _elements(problem: PlanProblem, kind: str, row: int, col: int, trained: bool = True) -> float:
    """Elements of a unit's trained or frozen parameters on a rank.

    A grid divides matrices, except position and token-type embeddings, which are replicated. Of an adapter, it divides the factor
    that is not on the residual stream, over the columns.
    """
    unit = problem.spec.kinds[kind]

    def parts(name: str, shape: tuple[int, ...]) -> int:
        if ".adapter." in name:
            return col if name.startswith(("qkv.adapter.b", "up.adapter.b", "out.adapter.a", "down.adapter.a")) else 1
        return row * col if len(shape) > 1 and not name.startswith(("positions", "types")) else 1

    sizes = (
        math.prod(shape) / parts(name, shape)
        for name, shape in unit.shapes.items()
        if (name not in unit.frozen) == trained
    )
    return float(sum(_aligned(size, 1) for size in sizes))


def _aligned(elements: float, shards: int) -> float:
    """Elements of a flat buffer that `shards` ranks share."""
    step = ALIGN * shards
    return -(-elements // step) * step


def sharding_cost(problem: PlanProblem, layout: ParallelLayout, kind: str, choice: UnitChoice) -> ShardingCost:
    """Time and memory of sharding the unit."""
    unit, mesh, cluster = problem.spec.kinds[kind], layout.mesh, problem.cluster
    keep = _kept(layout.tensor, choice).keep
    replicas, stride = layout.replicas, layout.replica_stride
    group = choice.within or replicas
    sharded = group > 1 and modes.shards(choice.mode)
    shards = group if sharded else 1
    slices = choice.split if unit.slices > 1 else 1
    n, frozen = (_aligned(_elements(problem, kind, mesh.row, mesh.col, t), shards * slices) for t in (True, False))
    e, r = problem.compute_bytes, problem.reduce_bytes
    gather = across = 0.0
    if not sharded:
        reduce = cluster.collective("all_reduce", n * r, replicas, stride)
    else:
        gather = sum(cluster.collective("all_gather", each * e, group, stride) for each in (n, frozen) if each)
        if (
            modes.once_a_step(choice.mode, choice.reduce) and problem.engine.broadcasts
        ):  # as many latencies of a ring as there are ranks, in a step
            share = unit.parameters / problem.spec.parameters
            gather += share * group * cluster.collective("all_gather", 1.0, group, stride)
        reduce = cluster.collective("reduce_scatter", n * r, group, stride)
        across = cluster.collective("all_reduce", n * r / group, replicas // group, stride * group)
    kept_bytes = 0.0  # weights and gradients of all rows, which the grid keeps for the step
    if mesh.row > 1 and unit.flops:
        width = (e if "weights" in keep else 0) + (max(4, e) if "gradients" in keep and not unit.frozen else 0)
        kept_bytes = unit.matrices / mesh.col * width
    return ShardingCost(
        gather=gather,
        reduce=reduce,
        across=across,
        own_link=across > 0 and cluster.link(group, stride) != cluster.link(replicas // group, stride * group),
        gathered_bytes=(n + frozen) * e,
        parameter_bytes=(n + frozen) * problem.parameter_bytes / shards + kept_bytes,
        gradient_bytes=n * r,
        reduced_bytes=n * (max(r, problem.parameter_bytes) if sharded else r) / shards,
        updated=n / shards,
        transient_bytes=(n + frozen) * e / slices if sharded and modes.gathered_for_each_op(choice.mode) else 0.0,
        slices=slices,
    )


def reduced_in_buckets(cost: ShardingCost, choice: UnitChoice) -> bool:
    """Whether its gradient may be all-reduced in a bucket with others: it stays whole, and is reduced once a step."""
    return cost.reduced_bytes >= cost.gradient_bytes and cost.slices == 1 and choice.reduce == "step"


def tied_elements(spec: ModelSpec, mesh: Mesh) -> float:
    """Elements of the tied token matrix on one rank of a grid; 0 if weights are not tied."""
    if not spec.tied:
        return 0.0
    return math.prod(next(iter(spec.units[0].shapes.values()))) / (mesh.row * mesh.col)


# ---- everything of a unit ----


@dataclass(frozen=True)
class UnitCost(ShardingCost):
    """The costs of a unit under a choice on a layout. Workspace is transient memory of an op beyond saved activations."""

    times: UnitTimes
    times_at_ends: UnitTimes
    """Times of the first forward and the last backward of a step, in which the grid gathers and sums kept tensors."""
    vector_sums: float
    """Seconds of sums over the grid that a reduction waits for; without a reduction, the time to start them."""
    deferred_sums: float
    """Seconds of sums over the grid that only the end of the step waits for."""
    saved_bytes: float
    """Activations saved for one micro-batch, on the device."""
    saved_for_weight_grad: float
    """Part of these that is held from I to W."""
    forward_workspace: float
    backward_workspace: float
    """Gradients inside the unit, recomputed activations, and weight gradients as they are computed."""
    accumulate_workspace: float
    """Workspace while its weight gradients are accumulated, less its saved activations."""
    input_grad_workspace: float
    """Workspace of I, with inputs that are kept for W and that an unsplit backward would have released."""
    weight_grad_workspace: float
    """Of W: one matmul."""
    accumulates_early: bool = False
    """Whether weight gradients are accumulated as they are computed, not at the end of the unit's backward."""
    tied_gradient_bytes: float = 0.0
    """Gradient of a tied weight that belongs to another unit."""
    tied_parameter_bytes: float = 0.0
    """That unit's parameters, gathered with this one's; 0 if they are not released."""
    offloaded_bytes: float = 0.0
    """Activations that move to the host and back."""
    grid_shares_link: tuple[bool, bool] = (False, False)
    """Whether the grid's row and col use the link on which the unit is gathered and reduced."""

    def grid_on_link(self, times: UnitTimes, op: str) -> tuple[float, float]:
        """Seconds of an op's grid collectives on the link of gathers and reductions: exposed, and total."""
        shared = [axis for axis, on in zip(times.on_grid.of(op), self.grid_shares_link, strict=True) if on]
        return sum(axis.exposed for axis in shared), sum(axis.total for axis in shared)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a stage with its choice and cost."""

    spec: UnitSpec
    choice: UnitChoice
    cost: UnitCost


@per_problem
def unit_cost(problem: PlanProblem, layout: ParallelLayout, kind: str, choice: UnitChoice) -> UnitCost:
    """The unit under a choice. Times are of one micro-batch, one gather, one reduction."""
    unit, mesh, cluster = problem.spec.kinds[kind], layout.mesh, problem.cluster
    tokens, e = layout.micro_batch_size * problem.spec.seq_len, problem.compute_bytes
    if unit.cast and choice.split == 1:
        rows = logit_rows(problem, tokens, mesh.col)
        if rows and layout.tensor.flow != "summa":
            unit = _loss_in_chunks(problem, kind, tokens, rows)
        elif layout.on_grid:
            unit = _loss_on_grid(problem, kind)
    sharding = sharding_cost(problem, layout, kind, choice)
    deferred, calls = vector_sums(cluster, unit, mesh.row, mesh.col)
    vectors = calls * cluster.call
    if layout.replicas > 1 and deferred:
        vectors, deferred = deferred, 0.0
    last = unit.layer == problem.spec.layers - 1
    tied = tied_elements(problem.spec, mesh) if last else 0.0  # the head's matrix, which belongs to the embedding
    trains = 0.0 if unit.frozen else 1.0  # a tied weight that is frozen has no gradient
    weights = sharding.gradient_bytes / problem.reduce_bytes * e + tied * e * trains
    workspace = Workspace(problem, layout, unit, choice.recompute, tokens, weights, sharding.slices)
    saved = workspace.saved
    offloads = layout.activations == "host" and not last  # the last unit keeps them: its backward is next
    on_device = 0.0 if offloads else saved
    if offloads and problem.on_cpu:  # the host's memory is the device's: offloaded bytes count twice
        has_input = choice.recompute in ("full", "per-slice")  # the input is offloaded, however small
        offloaded = has_input or saved >= LEAST_ACTIVATION_BYTES
        on_device = saved + (-(-saved // HOST_PAGE_BYTES) * HOST_PAGE_BYTES if offloaded else 0.0)
    tied_parameters = 0.0
    if tied and sharding.transient_bytes:
        elements = _elements(problem, problem.spec.units[0].kind, mesh.row, mesh.col, not unit.frozen)
        tied_parameters = _aligned(elements, choice.within or layout.replicas) * e
    back_on_device = max(0.0, saved - on_device)
    if last and problem.spec.config is not None:  # the loss
        back_on_device += problem.engine.logits * problem.spec.config.vocab * tokens / mesh.col
    back_on_device += fp8_workspace(problem, unit.operators, tokens, sharding.slices)
    return UnitCost(
        **vars(sharding),
        times=unit_times(problem, layout, kind, choice, False),
        times_at_ends=unit_times(problem, layout, kind, choice, True),
        vector_sums=vectors,
        deferred_sums=deferred,
        saved_bytes=on_device,
        saved_for_weight_grad=unit.for_weight_grad.bytes(e) * tokens / mesh.col,
        forward_workspace=workspace.forward() + back_on_device,
        backward_workspace=workspace.backward() + back_on_device,
        accumulate_workspace=workspace.accumulate() - on_device,
        input_grad_workspace=workspace.input_grad() + back_on_device,
        weight_grad_workspace=workspace.weight_grad(),
        accumulates_early=accumulates_early(problem, layout),
        tied_gradient_bytes=tied * problem.reduce_bytes * trains,
        tied_parameter_bytes=tied_parameters,
        offloaded_bytes=saved if offloads else 0.0,
        grid_shares_link=_grid_shares_link(problem, layout),
    )


@per_problem
def _loss_on_grid(problem: PlanProblem, kind: str) -> UnitSpec:
    """On a grid, cross entropy saves the logits, not their softmax, and computes in one fp32 copy of them."""
    unit = problem.spec.kinds[kind]
    v, none = unit.cast, unit.saved["none"]
    narrow = v if problem.compute_bytes < 4 else 0.0  # the gradient, in addition to its fp32 copy

    def back(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        loss, matmul = moments
        return loss._replace(inner=Held(narrow, v)), matmul._replace(inner=Held())

    return replace(
        unit,
        saved={**unit.saved, "none": Held(none.narrow + v, none.wide - v)},
        forward={**unit.forward, "none": (Moment(inner=Held(0.0, v)), unit.forward["none"][1])},
        backward=back(unit.backward),
        split=back(unit.split),
        cast=0.0,
    )


@per_problem
def _loss_in_chunks(problem: PlanProblem, kind: str, tokens: int, rows: int) -> UnitSpec:
    """The head and its loss, computed in chunks of `rows` tokens (model/head_loss.py), in elements per token.

    A chunk's logits have an fp32 copy; dW is accumulated in fp32, in addition to a chunk's part of it in the compute type. Logits
    are not saved; dW exists from a forward to the backward that follows it, and is in the workspace of both.
    """
    unit, width = problem.spec.kinds[kind], problem.compute_bytes
    v, none = unit.cast, unit.saved["none"]
    chunk, d = v * rows / tokens, unit.closing / 2
    dw = 0.0 if unit.frozen else v * d / tokens
    capped = 1.0 if any(o.name == "softcap" for o in unit.operators) else 0.0
    logits = Held((1.0 + capped) * chunk, 0.0 if width >= 4 else chunk)
    sums = Held(d + (dw if width < 4 else 0.0), dw)
    saved = Held(none.narrow - capped * v + d, none.wide - v)
    full = (Moment(Held(d), logits), Moment(Held(d), full=d))
    return replace(
        unit,
        saved={**unit.saved, "none": saved, "selective": saved},
        forward={
            "none": (Moment(sums, logits, full=2 * d),),
            "selective": (Moment(sums, logits, full=2 * d),),
            "full": full,
        },
        backward=(Moment(sums, logits, full=2 * d), Moment(Held(d), grads=1.0, full=2 * d)),
        split=(Moment(sums, logits, full=2 * d), Moment(Held(d), full=2 * d)),
        cast=0.0,
        for_weight_grad=Held(max(0.0, unit.for_weight_grad.narrow - d - v)),
    )


def _grid_shares_link(problem: PlanProblem, layout: ParallelLayout) -> tuple[bool, bool]:
    mesh, cluster = layout.mesh, problem.cluster
    mine = cluster.link(layout.replicas, layout.replica_stride) if layout.replicas > 1 else 0
    return cluster.link(mesh.row, mesh.col) == mine, cluster.link(mesh.col, 1) == mine
