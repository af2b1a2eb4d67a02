"""Seconds that operators compute on one device, without communication.

A matmul of T tokens takes what [T, K] · [K, N/col] takes on the device; attention is charged by FLOPs, everything else by bytes
at memory bandwidth. The backward of a matmul is two matmuls: of the input gradient (I) and of the weight gradient (W), which is
then added to the gradients of earlier micro-batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fourfold.model.operators import Operator
from fourfold.planner.problem import PlanProblem

__all__ = ["UnitSeconds", "matmul_seconds", "operator_seconds", "unit_seconds"]


class UnitSeconds(NamedTuple):
    """Seconds that one micro-batch of a unit computes."""

    forward: float
    input_grad: float
    weight_grad: float
    cheap: float
    """Part of the forward that selective recomputation repeats: all but matmuls and attention."""
    unread: float
    """Part of the forward whose output the backward does not read: full recomputation leaves it out."""


def matmul_seconds(problem: PlanProblem, o: Operator, tokens: int, col: int, split: int) -> tuple[float, float, float]:
    """Forward, input gradient and weight gradient of a matmul, computed in `split` slices."""
    cluster, dtype, width = problem.cluster, problem.precision.compute, problem.compute_bytes
    k, n = float(o.inputs), float(o.outputs)
    if o.outputs > o.inputs:
        n /= col * split
    else:
        k /= col * split
    rows = tokens * o.rows
    count = o.flops * tokens / (2.0 * rows * k * n * col)  # slices; more for batched matmuls
    return (
        count * cluster.product(rows, k, n, dtype, width),
        count * cluster.product(rows, n, k, dtype, width),
        count * cluster.product(k, rows, n, dtype, width),
    )


@lru_cache(maxsize=50_000)
def operator_seconds(
    problem: PlanProblem, o: Operator, tokens: int, row: int, col: int, split: int, keeps_gradients: bool = False
) -> tuple[float, float, float]:
    """Forward, input gradient and weight gradient of an operator for `tokens` tokens.

    `keeps_gradients`: the grid keeps gradients of all rows over micro-batches, and adds to them.
    """
    cluster, width, reduce = problem.cluster, problem.compute_bytes, problem.reduce_bytes
    if o.kind == "product":
        f, i, w = matmul_seconds(problem, o, tokens, col, split)
        accumulated = width + 2.0 * reduce  # bytes per element: read the new one, read and write the sum
        if row > 1 and not keeps_gradients:  # widened for the sum over rows, then this row's part is added
            accumulated = (width + reduce if width < reduce else 0) + 3 * reduce / row
        accumulated *= o.inputs * o.outputs / col
        # slicing, padding, joining and a separate bias; on a GPU the host does that ahead of the kernels
        extra = cluster.device.operator if row * col > 1 and problem.on_cpu else 0.0
        return f + extra, i + extra, w + extra + cluster.memory_bound(accumulated, fused=True)
    if o.kind == "attention":
        seconds = cluster.attention(o.flops * tokens / col, problem.precision.compute)
        return seconds, seconds * cluster.device.attention_backward * o.backward / 2.5, 0.0
    size = (o.moved * width + o.wide * max(4, width)) * tokens / col
    seconds = cluster.memory_bound(size, fused=problem.precision.compile)
    return seconds, seconds * o.backward, 0.0


@lru_cache(maxsize=50_000)
def unit_seconds(
    problem: PlanProblem, kind: str, tokens: int, row: int, col: int, split: int = 1, keeps_gradients: bool = False
) -> UnitSeconds:
    """Sum over the operators of a unit."""
    unit = problem.spec.kinds[kind]
    forward = input_grad = weight_grad = cheap = unread = 0.0
    for o in unit.operators:
        f, i, w = operator_seconds(problem, o, tokens, row, col, split, keeps_gradients)
        forward, input_grad, weight_grad = forward + f, input_grad + i, weight_grad + w
        if o.kind == "product":
            unread += f if o.name == unit.unread and row * col == split == 1 and not problem.precision.compile else 0.0
        elif o.name in unit.again or (o.kind == "memory" and not unit.again):
            cheap += f
    return UnitSeconds(forward, input_grad, weight_grad, cheap, unread)
