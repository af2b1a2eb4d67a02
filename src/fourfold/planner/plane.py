"""The small sums of a grid: of the loss over columns, and of gradients that are copies over the plane. They are waited for."""

from __future__ import annotations

import math

from fourfold.cluster import Cluster
from fourfold.model.operators import UnitSpec

__all__ = ["loss_sums", "vector_sums"]


def loss_sums(cluster: Cluster, tokens: int, col: int) -> float:
    """Seconds to find the largest logit, and the sum of exponentials and the target's logit, over the columns."""
    return cluster.collective("all_reduce", 4 * tokens, col) + cluster.collective("all_reduce", 8 * tokens, col)


def vector_sums(cluster: Cluster, unit: UnitSpec, row: int, col: int) -> float:
    """Seconds to sum gradients of norms and biases, which are copies over the plane or over rows, before a reduction."""
    if row * col == 1:
        return 0.0
    vectors = {name: math.prod(shape) for name, shape in unit.shapes.items() if len(shape) == 1}
    own = {name for name in vectors if name.startswith(("qkv", "up", "q.", "k.", "v."))}  # a part for each column
    everywhere = 4.0 * sum(size for name, size in vectors.items() if name not in own)
    of_column = 4.0 * sum(vectors[name] for name in own) / col
    return cluster.collective("all_reduce", everywhere, row * col) + cluster.collective(
        "all_reduce", of_column, row, col
    )
