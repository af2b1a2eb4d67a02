"""Products on the grid: what each takes, by which flow it moves, and what that takes on the cluster's links.

A product of T tokens takes what [T, K] · [K, N/col] takes on the device. What its flow moves, in bytes and calls, is
`fourfold.tensor.costs`, as the run does it; each line of the grid has the rate and the latency of the networks it crosses
(`links_of`). `auto` takes for every product the flow that shows least: what can hide (weights of all rows, sums of weight
gradients, gradients of inputs) counts where it outlasts the product. The choice is written into the plan, so that ranks and
later runs have it without measuring. The loss's and vectors' small sums are waited for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from fourfold.cluster import Cluster
from fourfold.model.operators import Operator, UnitSpec
from fourfold.plan import Flows, Kept, Mesh, Tensor
from fourfold.planner.layout import Layout, Setting
from fourfold.tensor.blocks import round_up
from fourfold.tensor.costs import FLOWS, Move, Product, choose_flow, flows_of, lookup_moves, moves, passed, seconds
from fourfold.tensor.products import products_of

__all__ = [
    "chosen_flows",
    "column_seconds",
    "flow_of",
    "flow_report",
    "grid_moves",
    "ladder",
    "links_of",
    "loss_sums",
    "operator_seconds",
    "product_seconds",
    "vector_sums",
]


def product_seconds(setting: Setting, o: Operator, tokens: int, col: int, split: int) -> tuple[float, float, float]:
    """Seconds of the forward, of the gradient of the input and of that of the weight, in `split` slices."""
    cluster, dtype, width = setting.cluster, setting.precision.compute, setting.compute
    k, n = float(o.inputs), float(o.outputs)
    if o.outputs > o.inputs:
        n /= col * split
    else:
        k /= col * split
    rows = tokens * o.rows
    count = o.flops * tokens / (2.0 * rows * k * n * col)  # slices; more for batched products
    return (
        count * cluster.product(rows, k, n, dtype, width),
        count * cluster.product(rows, n, k, dtype, width),
        count * cluster.product(k, rows, n, dtype, width),
    )


class ClusterLinks:
    """The lines of a plane on a cluster: columns are neighbours, rows lie `col` apart."""

    def __init__(self, cluster: Cluster, row: int, col: int):
        self.cluster, self.lines = cluster, {"row": (row, col), "col": (col, 1)}
        self._known: dict[tuple[Move, int], float] = {}

    def seconds(self, m: Move, width: int) -> float:
        known = self._known.get((m, width))
        if known is None:
            known = self._known[m, width] = self._seconds(m, width)
        return known

    def _seconds(self, m: Move, width: int) -> float:
        members, stride = self.lines[m.axis]
        kind: Literal["all_gather", "reduce_scatter"] = "reduce_scatter" if "reduce" in m.kind else "all_gather"
        return m.calls * self.cluster.collective(kind, self.size(m, width), members, stride)

    def size(self, m: Move, width: int) -> float:
        """Bytes of a call's whole buffer."""
        members = self.lines[m.axis][0]
        return passed(m) * width / m.calls * members / (members - 1)


@lru_cache(maxsize=4096)
def links_of(setting: Setting, row: int, col: int) -> ClusterLinks:
    return ClusterLinks(setting.cluster, row, col)


@lru_cache(maxsize=20_000)
def _products(setting: Setting, tokens: int, row: int, col: int, residual: str) -> dict[str, Product] | None:
    config = setting.spec.config
    return None if config is None else products_of(config, row, col, tokens, residual)


def _sizes(setting: Setting, o: Operator, tokens: int, row: int, col: int, residual: str) -> Product:
    known = _products(setting, tokens, row, col, residual)
    if known is not None:
        return known[o.name]
    k, b = round_up(o.inputs, col) // col, round_up(o.outputs, col) // col
    back = o.inputs >= o.outputs
    return Product(max(1, round(tokens * o.rows)), o.inputs, o.outputs, k, b, not back, back, row, col)


@lru_cache(maxsize=200_000)
def flow_of(setting: Setting, o: Operator, tokens: int, row: int, col: int, tensor: Tensor, micro_batches: int) -> str:
    """The flow of a product."""
    if o.name == "proj" and setting.spec.tied:
        return "os"
    wish = getattr(tensor.flows, o.name, "auto")
    beside = sum(product_seconds(setting, o, tokens, col, 1)) * setting.cluster.overlap if tensor.overlap else 0.0
    return choose_flow(
        _sizes(setting, o, tokens, row, col, tensor.residual),
        tensor.flow if wish == "auto" else wish,
        setting.compute,
        setting.reduce,
        moves_output=o.name != "proj",
        links=links_of(setting, row, col),
        keep=tensor.keep,
        micro_batches=micro_batches,
        beside=beside,
    )


@lru_cache(maxsize=50_000)
def operator_seconds(
    setting: Setting, o: Operator, tokens: int, row: int, col: int, split: int, whole: bool = False
) -> tuple[float, float, float]:
    """Seconds that an operator of a micro-batch computes: forward, gradients of its input and of its weight.

    `whole`: gradients of all rows are kept, and added to.
    """
    cluster, width, reduce = setting.cluster, setting.compute, setting.reduce
    if o.kind == "product":
        f, i, w = product_seconds(setting, o, tokens, col, split)
        added = width + 2.0 * reduce  # bytes of an element: the product is added to the gradient so far
        if row > 1 and not whole:  # all rows' is made as wide as it is summed, and this row's is added
            added = (width + reduce if width < reduce else 0) + 3 * reduce / row
        added *= o.inputs * o.outputs / col
        # what moves is cut, padded and joined, and a bias is apart; a GPU's host does that ahead of it
        around = cluster.device.operator if row * col > 1 and cluster.device.kind == "cpu" else 0.0
        return f + around, i + around, w + around + cluster.memory_bound(added, fused=True)
    if o.kind == "attention":
        time = cluster.attention(o.flops * tokens / col, setting.precision.compute)
        return time, time * cluster.device.attention_backward * o.backward / 2.5, 0.0
    size = (o.moved * width + o.wide * max(4, width)) * tokens / col
    time = cluster.memory_bound(size, fused=setting.precision.compile)
    return time, time * o.backward, 0.0


def grid_moves(
    setting: Setting, o: Operator, tokens: int, row: int, col: int, tensor: Tensor, micro_batches: int, once: bool
) -> list[tuple[Move, float, float]]:
    """An operator's collectives in a micro-batch, the seconds of each, alone on its line, and the bytes of a call.

    `once`: those are among them that one micro-batch of a step has.
    """
    links, config = links_of(setting, row, col), setting.spec.config
    if o.kind != "product":
        words = config.vocab if config is not None and o.name == "lookup" else 0
        every = tuple(lookup_moves(words, setting.spec.hidden, tokens, row, col)) if words else ()
    else:
        flow = flow_of(setting, o, tokens, row, col, tensor, micro_batches)
        every = moves(_sizes(setting, o, tokens, row, col, tensor.residual), flow, tensor.keep)
    out = []
    for m in every:
        if once or not m.once:
            width = setting.reduce if m.what == "gradients" else setting.compute
            out.append((m, links.seconds(m, width), links.size(m, width)))
    return out


@lru_cache(maxsize=4096)
def column_seconds(setting: Setting, kind: str, tokens: int, col: int) -> float:
    """Seconds of a micro-batch for which a unit's forward waits for its columns at least, whatever the flows and the rows."""
    links, out = links_of(setting, 1, col), 0.0
    for o in setting.spec.kinds[kind].operators:
        if o.kind == "product" and col > 1:
            sizes = _sizes(setting, o, tokens, 1, col, "sequence")
            times = ([links.seconds(m, setting.compute) for m in moves(sizes, flow) if m.op == "F"] for flow in FLOWS)
            out += min(map(sum, times))
    return out


def loss_sums(cluster: Cluster, tokens: int, col: int) -> float:
    """Seconds to find the largest logit, and the sum of exponentials and the target's logit, over the columns."""
    return cluster.collective("all_reduce", 4 * tokens, col) + cluster.collective("all_reduce", 8 * tokens, col)


def vector_sums(cluster: Cluster, unit: UnitSpec, row: int, col: int) -> tuple[float, int]:
    """Seconds and number of sums of the gradients of norms and biases, which are copies over the plane or over rows."""
    if row * col == 1:
        return 0.0, 0
    vectors = {name: math.prod(shape) for name, shape in unit.shapes.items() if len(shape) == 1}
    own = {name for name in vectors if name.startswith(("qkv", "up", "q.", "k.", "v."))}  # a part for each column
    everywhere = 4.0 * sum(size for name, size in vectors.items() if name not in own)
    of_column = 4.0 * sum(vectors[name] for name in own) / col
    both = (
        cluster.collective("all_reduce", everywhere, row * col),
        cluster.collective("all_reduce", of_column, row, col),
    )
    return max(both), sum(seconds > 0 for seconds in both)


def ladder(mesh: Mesh, micro_batches: int, tensor: Tensor, wish: str | None = None) -> list[Tensor]:
    """Ways to keep what moves on this grid, the most first."""
    return _ladder(mesh.row > 1, mesh.col > 1, micro_batches > 1, tensor, wish)


@lru_cache(maxsize=256)
def _ladder(rows: bool, cols: bool, many: bool, tensor: Tensor, wish: str | None) -> list[Tensor]:
    useful = {"weights": rows, "inputs": cols, "gradients": rows and many}
    every: tuple[Kept, ...] = ("weights", "inputs", "gradients")
    steps = [every, every[:2], every[:1], ()]
    if wish is not None:
        steps = [tuple(what for what in every if wish in (what, "all"))]
    kept = [tuple(what for what in step if useful[what]) for step in steps]
    return [replace(tensor, keep=each) for each in dict.fromkeys(kept)]


def chosen_flows(setting: Setting, layout: Layout) -> Flows:
    """The flow of every product of the model."""
    mesh = layout.mesh
    if mesh.row * mesh.col == 1 or setting.spec.config is None:
        return Flows()
    tokens = layout.micro_batch_size * setting.spec.seq_len
    chosen = {
        o.name: flow_of(setting, o, tokens, mesh.row, mesh.col, layout.tensor, layout.steps)
        for unit in setting.spec.kinds.values()
        for o in unit.operators
        if o.kind == "product"
    }
    return Flows(**chosen)  # type: ignore[arg-type]


def flow_report(setting: Setting, layout: Layout) -> list[dict[str, Any]]:
    """For every product: its flow, and by flow what it would show and could hide, in seconds of a micro-batch."""
    mesh, tensor, tokens = layout.mesh, layout.tensor, layout.micro_batch_size * setting.spec.seq_len
    if mesh.row * mesh.col == 1 or setting.spec.config is None:
        return []
    out = []
    for o in (o for unit in setting.spec.kinds.values() for o in unit.operators if o.kind == "product"):
        p, links = (
            _sizes(setting, o, tokens, mesh.row, mesh.col, tensor.residual),
            links_of(setting, mesh.row, mesh.col),
        )
        costs = {}
        for flow in dict.fromkeys((*flows_of("auto", o.name != "proj"), *(("summa",) if mesh.row == mesh.col else ()))):
            parts = seconds(moves(p, flow, tensor.keep), links, setting.compute, setting.reduce, layout.steps).values()
            costs[flow] = [float(f"{sum(part[i] for part in parts):.4g}") for i in (0, 1)]
        flow = flow_of(setting, o, tokens, mesh.row, mesh.col, tensor, layout.steps)
        out.append(
            {
                "product": o.name,
                "flow": flow,
                "beside": float(f"{sum(product_seconds(setting, o, tokens, mesh.col, 1)):.4g}"),
                "seconds": costs,
            }
        )
    return out
