"""What a product takes, and what the grid's collectives add to a unit: seconds of one micro-batch.

Every product moves as its flow says (buffer sizes in elements; col and row are the groups):

    flow  forward                                      gradient of the input (I)        of the weight (W)
    os    gather X[T, K] over col, W[K, N/col] over row    gather W, scatter dX over col    gather X, scatter dW over row
    ls    gather W over row, scatter Y[T, N] over col      gather dY over col, W over row   scatter dW over row
    ws    gather X over col, scatter Y over row            the reverse                      the smaller of both again
    summa what os moves, in `col` broadcasts that no ring overlaps

`auto` takes the one with the fewest bytes for each shape, as the engine does (tensor/costs.py). Weights are gathered one product
ahead and their gradients summed behind the next; in a backward, X is gathered while dX is computed, and dX scattered while dW
is. What is left is waited for where it stands, and so are the embedding's, the loss's and norms' and biases' small sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from fourfold.model.operators import Operator, UnitSpec
from fourfold.planner.lanes import Lanes, Step
from fourfold.planner.layout import Setting
from fourfold.tensor.costs import Product, choose_flow

__all__ = ["grid_moves", "product_times", "vector_sums"]

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


def product_times(setting: Setting, o: Operator, tokens: int, col: int, split: int) -> tuple[float, float, float]:
    """Seconds of the forward, of the gradient of the input and of that of the weight, in `split` slices."""
    cluster, dtype, width = setting.cluster, setting.precision.compute, setting.compute
    k, n = float(o.inputs), float(o.outputs)
    if o.outputs > o.inputs:
        n /= col * split
    else:
        k /= col * split
    count = o.flops * tokens / (2.0 * tokens * k * n * col)  # slices; more for batched products
    rows = float(tokens)
    return (
        count * cluster.product(rows, k, n, dtype, width),
        count * cluster.product(rows, n, k, dtype, width),
        count * cluster.product(k, rows, n, dtype, width),
    )


@lru_cache(maxsize=100_000)
def grid_moves(setting: Setting, kind: str, tokens: int, row: int, col: int, flow: str) -> tuple[float, float]:
    """Seconds that a unit's forward and backward wait for the grid's collectives."""
    unit, plane, products = setting.spec.kinds[kind], _Plane(setting, tokens, row, col), []
    there = back = 0.0
    if setting.spec.config is not None and unit.layer == 0:
        there, back = plane.table(unit)
    if col > 1 and unit.layer == setting.spec.layers - 1:
        there = plane.loss()
    for o in unit.operators:
        if o.kind == "product":
            f, i, w = product_times(setting, o, tokens, col, 1)
            moves = plane.product(o, flow, f, i, w)
            products.append((f, i + w, moves))
            there, back = there + moves.forward, back + moves.backward
    if row > 1 and products:
        ahead, behind = plane.rows(products)
        there, back = there + ahead, back + behind
    return there, back


class _Moves(NamedTuple):
    """Seconds of a product's collectives."""

    forward: float
    """Waited for in the forward."""
    backward: float
    """In the backward."""
    gather: float = 0.0
    """Of its weight over row, for each of them, ahead of it."""
    sum: float = 0.0
    """Of its weight's gradient over row, behind it."""


@dataclass(frozen=True)
class _Plane:
    """The grid's collectives: seconds of each, and how much of them computing hides."""

    setting: Setting
    tokens: int
    row: int
    col: int

    def over_col(self, kind: Kind, elements: float, width: int = 0) -> float:
        return self.setting.cluster.collective(kind, elements * (width or self.setting.compute), self.col, 1)

    def over_row(self, kind: Kind, elements: float, width: int = 0) -> float:
        return self.setting.cluster.collective(kind, elements * (width or self.setting.compute), self.row, self.col)

    def late(self, takes: float, window: float) -> float:
        """Seconds by which something lengthens the computing it runs beside."""
        hidden = min(takes, max(0.0, window))
        return takes - hidden + (1 - self.setting.cluster.overlap) * hidden

    def product(self, o: Operator, flow: str, f: float, i: float, w: float) -> _Moves:
        """What moves for a product whose forward, input's and weight's gradient take f, i and w."""
        k, b = -(-o.inputs // self.col), -(-o.outputs // self.col)
        enters = o.name not in (
            "out",
            "down",
        )  # products that leave the residual stream, and those that come back to it
        sizes = Product(self.tokens, o.inputs, o.outputs, k, b, enters, not enters, self.row, self.col)
        setting = self.setting
        chosen = choose_flow(sizes, flow, setting.compute, setting.reduce, moves_output=o.name != "proj")
        x, y, weight = self.tokens * o.inputs, self.tokens * o.outputs, o.inputs * o.outputs / self.col
        gather, total = self.over_row("all_gather", weight), self.over_row("reduce_scatter", weight, setting.reduce)
        turned = 0.0  # an all-to-all, where the flow's side is not the layer's
        if chosen == "os" and not enters:
            turned = self.over_col("all_gather", self.tokens * b)
        if chosen == "ls" and enters:
            turned = self.over_col("all_gather", self.tokens * k)
        match chosen:
            case "os":
                there, back = self.over_col("all_gather", x), self.over_col("reduce_scatter", x)
                behind = self.late(there, i) + self.late(back, w)
                return _Moves(there + turned, behind + turned, gather, total)
            case "ls":
                there, back = self.over_col("reduce_scatter", y), self.over_col("all_gather", y)
                return _Moves(there + turned, back + turned, gather, total)
            case "ws-in" | "ws-out":
                spread, held = (x, y) if chosen == "ws-in" else (y, x)
                there = self.over_row("all_gather", spread / self.col) + self.over_col("all_gather", spread)
                back = self.over_row("reduce_scatter", self.row * held / self.col)
                return _Moves(there + back, there + back + min(there, back))
        steps = self.col / (self.col - 1) if self.col > 1 else 1.0
        across, down = self.over_col("all_gather", x), self.over_row("all_gather", weight)
        sums = self.over_col("reduce_scatter", x), self.over_row("reduce_scatter", weight, setting.reduce)
        return _Moves(steps * (across + down), steps * (down + sums[0] + across + sums[1]))

    def rows(self, products: Sequence[tuple[float, float, _Moves]]) -> tuple[float, float]:
        """Seconds by which weights gathered ahead and gradients summed late lengthen a forward and a backward.

        `products`: seconds of each product's forward and backward. Units like this one follow each other.
        """

        def shown(chain: list[Step]) -> float:
            lanes = Lanes()
            for _ in range(2):
                began, moved, before = lanes.exposed, lanes.communicated, lanes.now
                lanes.run(chain, ready=before > 0, following=chain[0].gather)
            exposed, total = lanes.exposed - began, lanes.communicated - moved
            return exposed + (1 - self.setting.cluster.overlap) * max(0.0, total - exposed)

        forward = [Step(f, m.gather) for f, _, m in products]
        backward = [Step(b, m.gather, m.sum) for _, b, m in reversed(products)]
        return shown(forward), shown(backward)

    def table(self, unit: UnitSpec) -> tuple[float, float]:
        """Of the embedding: its rows gathered, columns' answers summed; the reverse."""
        rows, width = next(iter(unit.shapes.values()))
        x, weight = self.tokens * width, rows * width / self.col
        forward = self.over_row("all_gather", weight) + self.over_col("reduce_scatter", x)
        return forward, self.over_col("all_gather", x) + self.over_row("reduce_scatter", weight, self.setting.reduce)

    def loss(self) -> float:
        """The largest logit, the sum of exponentials and the target's logit over the columns: two small sums."""
        return self.over_col("all_reduce", self.tokens, 4) + self.over_col("all_reduce", 2 * self.tokens, 4)


def vector_sums(setting: Setting, unit: UnitSpec, row: int, col: int) -> float:
    """Seconds to sum gradients of norms and biases, which are copies over the plane or over rows, before a reduction."""
    if row * col == 1:
        return 0.0
    cluster = setting.cluster
    vectors = {name: math.prod(shape) for name, shape in unit.shapes.items() if len(shape) == 1}
    own = {name for name in vectors if name.startswith(("qkv", "up", "q.", "k.", "v."))}  # a part for each column
    everywhere = 4.0 * sum(size for name, size in vectors.items() if name not in own)
    of_column = 4.0 * sum(vectors[name] for name in own) / col
    return cluster.collective("all_reduce", everywhere, row * col) + cluster.collective(
        "all_reduce", of_column, row, col
    )
