"""The tensor grid's collectives: the flow of each matmul, the time of its collectives, and the exposed part of that time.

Bytes and calls of a flow come from `fourfold.tensor.costs`, which describes what a run does; each axis of the grid has the
bandwidth and latency of the networks that it crosses. `flow = "auto"` chooses for every matmul the flow with the least exposed
time. The choice is written into the plan, so that ranks and later runs need not measure.

Exposure is simulated matmul by matmul, as linears run (tensor/flows.py, tensor/late.py). Each axis (row, col) is a channel of a
`SharedLink`; where a cluster has a `small` size, collectives below it run in a channel of their own.

- If a matmul needs W of all rows, the gather for the next matmul starts first. The first gather of an op is not prefetched.
- A matmul waits for W, then for the inputs of all columns. In the backward these inputs are for the weight gradient, and overlap
  with computing the input gradient; the scatter of input gradients overlaps with computing the weight gradient.
- The sum over rows of one weight gradient overlaps with the next matmul; the next sum waits for it.
- Everything else is exposed. If the plan does not overlap, everything is exposed.

A unit is timed in the middle of a chain of units, with the model's units before and after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fourfold.cluster import Cluster
from fourfold.model.operators import Operator, UnitSpec
from fourfold.plan import Flows, Tensor
from fourfold.planner.comm_overlap import SharedLink
from fourfold.planner.compute_cost import matmul_seconds, operator_seconds
from fourfold.planner.layouts import GridShape, ParallelLayout
from fourfold.planner.problem import PlanProblem, per_problem
from fourfold.tensor.blocks import round_up
from fourfold.tensor.costs import (
    FLOWS,
    MatmulSizes,
    Move,
    choose_flow,
    flows_of,
    lookup_moves,
    moves,
    passed,
    seconds,
    statistics_moves,
)
from fourfold.tensor.products import products_of

__all__ = [
    "NO_GRID",
    "AxisTime",
    "GridTime",
    "chosen_flows",
    "flow_of",
    "flow_report",
    "grid_axes",
    "grid_times",
    "least_column_seconds",
    "vector_sums",
]


# ---- flows ----


class GridAxes:
    """The axes of a grid on a cluster: columns are adjacent ranks, rows have a stride of `col` ranks."""

    def __init__(self, cluster: Cluster, row: int, col: int):
        self.cluster, self.axes = cluster, {"row": (row, col), "col": (col, 1)}
        self._known: dict[tuple[Move, int], float] = {}

    def seconds(self, m: Move, width: int) -> float:
        known = self._known.get((m, width))
        if known is None:
            members, stride = self.axes[m.axis]
            kind: Literal["all_gather", "reduce_scatter"] = "reduce_scatter" if "reduce" in m.kind else "all_gather"
            known = m.calls * self.cluster.collective(kind, self.size(m, width), members, stride)
            self._known[m, width] = known
        return known

    def size(self, m: Move, width: int) -> float:
        """Bytes of a call's full buffer."""
        members = self.axes[m.axis][0]
        return passed(m) * width / m.calls * members / (members - 1)


@per_problem
def grid_axes(problem: PlanProblem, row: int, col: int) -> GridAxes:
    return GridAxes(problem.cluster, row, col)


@per_problem
def _products(problem: PlanProblem, tokens: int, row: int, col: int, residual: str) -> dict[str, MatmulSizes] | None:
    config = problem.spec.config
    return None if config is None else products_of(config, row, col, tokens, residual)


def _sizes(problem: PlanProblem, o: Operator, grid: GridShape) -> MatmulSizes:
    tokens, row, col = grid[:3]
    known = _products(problem, tokens, row, col, grid.tensor.residual)
    if known is not None:
        return known[o.name]
    k, b = round_up(o.inputs, col) // col, round_up(o.outputs, col) // col
    back = o.inputs >= o.outputs
    return MatmulSizes(max(1, round(tokens * o.rows)), o.inputs, o.outputs, k, b, not back, back, row, col)


@per_problem
def flow_of(problem: PlanProblem, o: Operator, grid: GridShape) -> str:
    """The flow of a matmul."""
    tensor = grid.tensor
    if o.name == "proj" and problem.spec.tied:
        return "os"
    flow = getattr(tensor.flows, o.name, "auto")
    hides_behind = (
        sum(matmul_seconds(problem, o, grid.tokens, grid.col, 1)) * problem.cluster.overlap if tensor.overlap else 0.0
    )
    return choose_flow(
        _sizes(problem, o, grid),
        tensor.flow if flow == "auto" else flow,
        problem.compute_bytes,
        problem.reduce_bytes,
        moves_output=o.name != "proj",
        links=grid_axes(problem, grid.row, grid.col),
        keep=tensor.keep,
        micro_batches=grid.amortized_over,
        overlappable=hides_behind,
    )


def _collectives(problem: PlanProblem, o: Operator, grid: GridShape, once: bool) -> list[tuple[Move, float, float]]:
    """An operator's collectives in a micro-batch: (collective, its seconds alone on its axis, bytes of a call).

    `once`: include those that run in only one micro-batch of a step.
    """
    axes, config = grid_axes(problem, grid.row, grid.col), problem.spec.config
    every: Sequence[Move]
    if o.name == "norm of all heads":
        every = statistics_moves(grid.tokens, grid.col)
    elif o.kind != "product":
        words = config.vocab if config is not None and o.name == "lookup" else 0
        every = tuple(lookup_moves(words, problem.spec.hidden, *grid[:3])) if words else ()
    else:
        every = moves(_sizes(problem, o, grid), flow_of(problem, o, grid), grid.tensor.keep)
        every = [m for m in every if not o.frozen or m.op != "W"]
    out = []
    for m in every:
        if once or not m.once:
            width = problem.reduce_bytes if m.what == "gradients" else problem.compute_bytes
            out.append((m, axes.seconds(m, width), axes.size(m, width)))
    return out


@per_problem
def least_column_seconds(problem: PlanProblem, kind: str, tokens: int, col: int) -> float:
    """Lower bound on the exposed column collectives of a unit's forward, over all flows and rows."""
    axes, out = grid_axes(problem, 1, col), 0.0
    for o in problem.spec.kinds[kind].operators:
        if o.kind == "product" and col > 1:
            sizes, width = _sizes(problem, o, GridShape(tokens, 1, col, Tensor())), problem.compute_bytes
            out += min(sum(axes.seconds(m, width) for m in moves(sizes, flow) if m.op == "F") for flow in FLOWS)
    return out


def _loss_sums(cluster: Cluster, tokens: int, col: int) -> float:
    """Seconds of the loss's all-reduces over columns: the largest logit; the sum of exponentials and the target's logit."""
    return cluster.collective("all_reduce", 4 * tokens, col) + cluster.collective("all_reduce", 8 * tokens, col)


def vector_sums(cluster: Cluster, unit: UnitSpec, row: int, col: int) -> tuple[float, int]:
    """Seconds and number of all-reduces of the gradients of norms and biases, which are replicated on the grid."""
    if row * col == 1:
        return 0.0, 0
    vectors = {name: math.prod(shape) for name, shape in unit.trained.items() if len(shape) == 1}
    own = {name for name in vectors if name.startswith(("qkv", "up", "q.", "k.", "v."))}  # divided over columns
    everywhere = 4.0 * sum(size for name, size in vectors.items() if name not in own)
    of_column = 4.0 * sum(vectors[name] for name in own) / col
    both = (
        cluster.collective("all_reduce", everywhere, row * col),
        cluster.collective("all_reduce", of_column, row, col),
    )
    return max(both), sum(seconds > 0 for seconds in both)


def chosen_flows(problem: PlanProblem, layout: ParallelLayout) -> Flows:
    """The flow of every matmul of the model."""
    if not layout.on_grid or problem.spec.config is None:
        return Flows()
    grid = layout.grid(problem)
    chosen = {
        o.name: flow_of(problem, o, grid)
        for unit in problem.spec.kinds.values()
        for o in unit.operators
        if o.kind == "product"
    }
    return Flows(**chosen)  # type: ignore[arg-type]


def flow_report(problem: PlanProblem, layout: ParallelLayout) -> list[dict[str, Any]]:
    """For every matmul: its flow, and for every flow the exposed and the overlappable seconds of a micro-batch."""
    grid = layout.grid(problem)
    if not layout.on_grid or problem.spec.config is None:
        return []
    out, widths = [], (problem.compute_bytes, problem.reduce_bytes)
    axes = grid_axes(problem, grid.row, grid.col)
    for o in (o for unit in problem.spec.kinds.values() for o in unit.operators if o.kind == "product"):
        sizes = _sizes(problem, o, grid)
        costs = {}
        for flow in dict.fromkeys((*flows_of("auto", o.name != "proj"), *(("summa",) if grid.row == grid.col else ()))):
            parts = seconds(moves(sizes, flow, grid.tensor.keep), axes, *widths, grid.amortized_over).values()
            costs[flow] = [float(f"{sum(part[i] for part in parts):.4g}") for i in (0, 1)]
        flow = flow_of(problem, o, grid)
        matmul = float(f"{sum(matmul_seconds(problem, o, grid.tokens, grid.col, 1)):.4g}")
        out.append({"product": o.name, "flow": flow, "beside": matmul, "seconds": costs})
    return out


# ---- exposed time of a unit's collectives ----

_ROW, _COL, _SMALL = 0, 1, 2
"""Channels; small collectives have separate ones: _SMALL + _ROW, _SMALL + _COL."""
_Collective = tuple[int, float]
"""A channel, and seconds."""


class AxisTime(NamedTuple):
    """Seconds of one axis's collectives in an op."""

    exposed: float = 0.0
    total: float = 0.0


class GridTime(NamedTuple):
    """A unit's collectives on the grid, in one micro-batch."""

    forward: tuple[AxisTime, AxisTime]
    """Over row, over col."""
    backward: tuple[AxisTime, AxisTime]
    weight: float
    """Exposed seconds of the backward that are for weight gradients."""
    cold_forward: float
    """Extra seconds if the unit is the first of an op: its first weight is not prefetched."""
    cold_backward: float

    def of(self, op: str) -> tuple[AxisTime, AxisTime]:
        """Row and column times of an op; of a split backward (I, W), each part has the collectives that it waits for."""
        if op in "FB":
            return self.forward if op == "F" else self.backward
        exposed = self.backward[0].exposed + self.backward[1].exposed
        share = self.weight / exposed if exposed else 0.0
        share = share if op == "W" else 1 - share
        row, col = (AxisTime(share * axis.exposed, share * axis.total) for axis in self.backward)
        return row, col


NO_GRID = GridTime((AxisTime(), AxisTime()), (AxisTime(), AxisTime()), 0.0, 0.0, 0.0)


class _OperatorStep(NamedTuple):
    """An operator's part of an op: its collectives in the order in which they start, and its compute time."""

    before: Sequence[_Collective] = ()
    """Waited for, one after another."""
    early: _Collective | None = None
    """Started first, waited for before `second`."""
    weight: _Collective | None = None
    """Prefetched; when it is used, the next one starts."""
    inputs: _Collective | None = None
    """Started before the wait for the weight, waited for after it."""
    compute: float = 0.0
    scatter: _Collective | None = None
    """Started after `compute`, waited for at the end."""
    second: float = 0.0
    """Compute time of the weight gradient, in seconds."""
    summed: _Collective | None = None
    """Sum of the weight gradient over rows."""
    after: Sequence[_Collective] = ()


@per_problem
def grid_times(
    problem: PlanProblem, grid: GridShape, splits_backward: bool = False, once: bool = True
) -> dict[str, GridTime]:
    """By kind of unit: its collectives in a micro-batch.

    `splits_backward`: weight gradients are a separate op (W), so no collective of the input gradient overlaps with them.
    `once`: the first forward and the last backward of a step, in which kept tensors are gathered and summed.
    """
    chain, cluster = _chain(problem), problem.cluster
    forward, backward_steps = _forward_times(problem, grid, once)
    steps = [backward_steps[u.kind] for u in reversed(chain)]
    backward = _GridTimeline(cluster, grid, splits_backward).run(steps)[::-1]
    out = {}
    for at in sorted(range(len(chain)), key=lambda i: -abs(2 * i + 1 - len(chain))):  # the innermost of a kind wins
        f, b = forward[at], backward[at]
        axes = f.axes(cluster.overlap), b.axes(cluster.overlap)
        out[chain[at].kind] = GridTime(*axes, b.weight, f.cold, b.cold)
    return out


@per_problem
def _forward_times(
    problem: PlanProblem, grid: GridShape, once: bool
) -> tuple[list[_UnitTime], dict[str, list[_OperatorStep]]]:
    """The forward of the chain, timed; and by kind of unit, the steps of its backward."""
    chain = _chain(problem)
    kinds = {u.kind: u for u in chain}
    steps = {kind: _operator_steps(problem, u, grid, once) for kind, u in kinds.items()}
    forward = _GridTimeline(problem.cluster, grid).run([steps[u.kind][0] for u in chain])
    return forward, {kind: back for kind, (_, back) in steps.items()}


@per_problem
def _chain(problem: PlanProblem) -> list[UnitSpec]:
    """The model's units, at most two of each kind."""
    seen: dict[str, int] = {}
    out = []
    for unit in problem.spec.units:
        seen[unit.kind] = seen.get(unit.kind, 0) + 1
        if seen[unit.kind] <= 2:
            out.append(unit)
    return out


def _operator_steps(
    problem: PlanProblem, unit: UnitSpec, grid: GridShape, once: bool
) -> tuple[list[_OperatorStep], list[_OperatorStep]]:
    """A unit's operators in forward order and in backward order."""
    forward, backward = [], []
    for o in unit.operators:
        f, i, w = operator_seconds(problem, o, *grid[:3], 1, "gradients" in grid.tensor.keep)
        timed = []
        for m, takes, size in _collectives(problem, o, grid, once):
            channel = (_ROW if m.axis == "row" else _COL) + (_SMALL if size < problem.cluster.small else 0)
            timed.append((m, (channel, takes)))
        forward.append(_forward_step(timed, f, grid.tensor.overlap))
        backward.append(_backward_step(timed, i, w, grid.tensor.overlap))
    if unit.layer == problem.spec.layers - 1:
        forward.append(_OperatorStep(before=[(_COL, _loss_sums(problem.cluster, grid.tokens, grid.col))]))
    return forward, backward[::-1]


def _forward_step(timed: Sequence[tuple[Move, _Collective]], compute: float, overlap: bool) -> _OperatorStep:
    before: list[_Collective] = []
    after: list[_Collective] = []
    weight = inputs = None
    for m, collective in timed:
        if m.op != "F":
            continue
        if m.what == "weights" and m.overlaps and overlap:
            weight = collective
        elif m.kind == "all_gather" and overlap:
            inputs = collective
        else:
            (after if m.kind == "reduce_scatter" else before).append(collective)
    return _OperatorStep(before, None, weight, inputs, compute, after=after)


def _backward_step(
    timed: Sequence[tuple[Move, _Collective]], first: float, second: float, overlap: bool
) -> _OperatorStep:
    before: list[_Collective] = []
    early = weight = inputs = scatter = summed = None
    for m, collective in timed:
        if m.op == "F":
            continue
        if not (overlap and (m.overlaps or (m.op == "I" and m.kind == "all_gather"))):
            before.append(collective)
        elif m.what == "gradients":
            summed = collective
        elif m.what == "weights":
            weight = collective
        elif m.op == "W":
            early = collective
        elif m.kind == "reduce_scatter":
            scatter = collective
        else:
            inputs = collective
    return _OperatorStep(before, early, weight, inputs, first, scatter, second, summed)


class _UnitTime:
    """Seconds of a unit's collectives in a chain, by channel."""

    def __init__(self) -> None:
        self.exposed, self.total = [0.0] * 4, [0.0] * 4
        self.weight = self.cold = 0.0

    def axes(self, overlap: float) -> tuple[AxisTime, AxisTime]:
        """Row and column times; the cluster's `overlap` is the share of overlappable time that does overlap."""
        return self._axis(_ROW, overlap), self._axis(_COL, overlap)

    def _axis(self, channel: int, overlap: float) -> AxisTime:
        exposed, total = (x[channel] + x[channel + _SMALL] for x in (self.exposed, self.total))
        return AxisTime(exposed + (1 - overlap) * max(0.0, total - exposed), total)


class _GridTimeline(SharedLink):
    """A chain of units that compute, with the concurrent collectives of both axes."""

    def __init__(self, cluster: Cluster, grid: GridShape, splits_backward: bool = False):
        row, col = grid.row, grid.col
        other = int(cluster.link(row, col) != cluster.link(col, 1))
        super().__init__((0, other) * 2, ((row - 1) * cluster.queue, (col - 1) * cluster.queue) * 2)
        self._unit, self._call, self._splits = _UnitTime(), cluster.call, splits_backward
        self._sums: deque[tuple[int, int]] = deque()

    def run(self, units: Sequence[Sequence[_OperatorStep]]) -> list[_UnitTime]:
        weights = [o.weight for unit in units for o in unit if o.weight is not None]
        prefetched, taken, out = 0, 0, []  # `prefetched`: number of the gather in flight for the next weight
        for unit in units:
            self._unit, first = _UnitTime(), True
            for o in unit:
                for collective in o.before:
                    self._wait_for(collective, self._begin_exposed(*collective))
                early = self._begin_overlapped(*o.early) if o.early and not self._splits else 0
                inputs = self._begin_exposed(*o.inputs) if o.inputs else 0
                if o.weight is not None:
                    mine = prefetched or self._begin_exposed(*o.weight)
                    taken += 1
                    prefetched = self._begin_overlapped(*weights[taken]) if taken < len(weights) else 0
                    waited = self._wait_for(o.weight, mine)
                    if first:
                        self._unit.cold, first = max(0.0, o.weight[1] - waited), False
                if o.inputs:
                    self._wait_for(o.inputs, inputs)
                self.compute(o.compute)
                scatter = self._begin_overlapped(*o.scatter) if o.scatter else 0
                if self._splits:
                    if o.scatter:
                        self._wait_for(o.scatter, scatter)
                    early = self._begin_exposed(*o.early) if o.early else 0
                if o.early:
                    self._unit.weight += self._wait_for(o.early, early)
                self.compute(o.second)
                if o.summed is not None:
                    self._sums.append((o.summed[0], self._begin_overlapped(*o.summed)))
                    if len(self._sums) > 1:
                        channel, number = self._sums.popleft()
                        self._unit.weight += self._wait_for((channel, 0.0), number)
                if o.scatter:
                    self._wait_for(o.scatter, scatter)
                for collective in o.after:
                    self._wait_for(collective, self._begin_exposed(*collective))
            out.append(self._unit)
        return out

    def _begin_exposed(self, channel: int, takes: float) -> int:
        self._unit.total[channel] += takes
        return self.start(channel, takes)

    def _begin_overlapped(self, channel: int, takes: float) -> int:
        """Start a collective while computing continues; starting it takes `call` seconds of the host."""
        if self._call:
            self._unit.exposed[channel] += self._call
            self.compute(self._call)
        return self._begin_exposed(channel, takes)

    def _wait_for(self, collective: _Collective, number: int) -> float:
        channel = collective[0]
        waited = self.wait(channel, number)
        self._unit.exposed[channel] += waited
        return waited
