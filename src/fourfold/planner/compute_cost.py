"""Compute time of operators on one device, in seconds, without communication.

A matmul of T tokens takes the device's time for [T, K] · [K, N/col]; attention is charged by FLOPs, everything else by bytes
at memory bandwidth. The backward of a matmul is two matmuls: of the input gradient (I) and of the weight gradient (W), which is
then added to the gradients of earlier micro-batches. With `precision.matmul = "fp8"`, the linears of blocks compute forward and
I at the fp8 rate, after their operands were quantised, at memory bandwidth. A loss that is computed in chunks of tokens is not
compiled, and is charged kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fourfold.cluster import NARROW_HEADS
from fourfold.model.operators import Operator
from fourfold.plan import Memory
from fourfold.planner.problem import PlanProblem, per_problem

__all__ = [
    "UnitSeconds",
    "fp8_workspace",
    "host_seconds",
    "logit_rows",
    "matmul_seconds",
    "operator_seconds",
    "unit_seconds",
]


class UnitSeconds(NamedTuple):
    """Compute time of one micro-batch of a unit, in seconds."""

    forward: float
    input_grad: float
    weight_grad: float
    cheap: float
    """Part of the forward that selective recomputation repeats: all but matmuls and attention."""
    unread: float
    """Part of the forward whose output the backward does not read: full recomputation skips it."""


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
    weight_grad = count * cluster.product(k, rows, n, dtype, width)
    if not problem.computes_in_fp8(o):
        return (
            count * cluster.product(rows, k, n, dtype, width),
            count * cluster.product(rows, n, k, dtype, width),
            weight_grad,
        )
    kind = "fp32" if problem.on_cpu else "fp8"  # CPUs emulate it
    # x, dy and W are read for the scales, then read and written in fp8, which for dx is also transposed
    x, dy, w = 5.0 * rows * k, 5.0 * rows * n, 5.0 * k * n
    if problem.engine.fp8_weight_grad:  # of operands that are in fp8 already
        weight_grad = count * cluster.product(k, rows, n, kind, width)
    return (
        count * (cluster.product(rows, k, n, kind, width) + cluster.memory_bound(x + w, fused=problem.compiled)),
        count * (cluster.product(rows, n, k, kind, width) + cluster.memory_bound(dy + 1.4 * w, fused=problem.compiled)),
        weight_grad,
    )


def fp8_workspace(problem: PlanProblem, operators: Iterable[Operator], tokens: int, split: int) -> float:
    """Bytes of a matmul's operands in fp8, and of one of them in fp32 while it is quantised; 0 without fp8."""
    most = 0.0
    for o in filter(problem.computes_in_fp8, operators):
        x, w = tokens * max(o.inputs, o.outputs), o.inputs * o.outputs
        most = max(most, float(x + w + 4 * max(x, w)) / split)
    return most


@per_problem
def operator_seconds(
    problem: PlanProblem, o: Operator, tokens: int, row: int, col: int, split: int, keeps_gradients: bool = False
) -> tuple[float, float, float]:
    """Forward, input gradient and weight gradient of an operator for `tokens` tokens.

    `keeps_gradients`: the grid accumulates the gradients of all rows over micro-batches.
    """
    cluster, width, reduce = problem.cluster, problem.compute_bytes, problem.reduce_bytes
    if o.kind == "product":
        f, i, w = matmul_seconds(problem, o, tokens, col, split)
        accumulated = width + 2.0 * reduce  # bytes per element: read the new one, read and write the sum
        if row > 1 and not keeps_gradients:  # cast for the sum over rows, then this row's part is accumulated
            accumulated = (width + reduce if width < reduce else 0) + 3 * reduce / row
        accumulated *= o.inputs * o.outputs / col
        # slicing, padding, concatenating and a separate bias; on a GPU the host does that ahead of the kernels
        extra = cluster.device.operator if row * col > 1 and problem.on_cpu else 0.0
        if o.frozen:
            return f + extra, i + extra, 0.0
        adds = 0.0 if problem.engine.fused_accumulation else cluster.memory_bound(accumulated, fused=True)
        return f + extra, i + extra, w + extra + adds
    compiled = problem.compiled
    if o.kind == "attention":
        seconds = _attention_seconds(problem, o, o.flops * tokens / col)
        return seconds, seconds * cluster.device.attention_backward * o.backward / 2.5, 0.0
    rows = logit_rows(problem, tokens, col) if o.name == "loss" and split == 1 else 0
    if rows:
        seconds = _chunked_loss_seconds(problem, tokens, col, rows) / (1 + o.backward)
        return seconds, seconds * o.backward, 0.0
    size = (o.moved * width + o.wide * max(4, width)) * tokens / col
    size *= 1.0 if compiled else problem.engine.traffic.get(o.name, 1.0)
    seconds = cluster.memory_bound(size, fused=compiled)
    return seconds, seconds * o.backward, 0.0


def logit_rows(problem: PlanProblem, tokens: int, col: int) -> int:
    """Tokens whose logits exist at a time, where Fourfold's head computes its loss in chunks; 0: no chunks."""
    config = problem.spec.config
    if config is None or problem.engine.name != "fourfold":
        return 0
    return Memory(logits=problem.logits).logit_rows(tokens, -(-config.vocab // col), problem.compute_bytes)


def _chunked_loss_seconds(problem: PlanProblem, tokens: int, col: int, rows: int) -> float:
    """The loss and its gradient in addition to the head's matmuls, kernel by kernel (model/head_loss.py).

    A logit is read and written in at least fp32: maximum (1), subtraction (2), exponential (2), sum (1), scaling (2). A narrower
    one is copied before and after that, and its dW is added to a wide sum; otherwise dW's matmul does that.
    """
    assert problem.spec.config is not None
    e, wide = problem.compute_bytes, max(4, problem.compute_bytes)
    words, chunks = -(-problem.spec.config.vocab // col), -(-tokens // rows)
    moved, operators = 8.0 * wide * tokens * words, 8 * chunks
    if e < wide:
        moved += 2 * (e + wide) * tokens * words
        moved += 0.0 if problem.spec.units[-1].frozen else chunks * (e + 2.0 * wide) * words * problem.spec.hidden
    return problem.cluster.memory_bound(moved, fused=True) + operators * problem.cluster.device.operator


def _attention_seconds(problem: PlanProblem, o: Operator, flops: float) -> float:
    """The forward: a fused kernel, or two batched matmuls, which are slow if the head width is not aligned."""
    config, dtype, cluster = problem.spec.config, problem.precision.compute, problem.cluster
    if config is None or not config.head_dim:
        return cluster.attention(flops, dtype)
    if o.backward != 2.5:
        return cluster.attention(flops / cluster.device.aligned(config.head_dim), dtype)
    keys = o.flops / (4 * config.heads * config.head_dim)
    speed = problem.engine.attention_speed(cluster.device)
    if config.head_dim <= NARROW_HEADS[0] and cluster.device.flash_2 < 1:
        speed *= NARROW_HEADS[1]
    return cluster.attention(flops / speed, dtype, min(problem.spec.seq_len, 2 * keys))


@per_problem
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
            skips = o.name == unit.unread and o.name in problem.engine.skipped
            unread += f if skips and row * col == split == 1 and not problem.compiled else 0.0
        elif o.name in unit.again or (o.kind == "memory" and not unit.again):
            cheap += f
    return UnitSeconds(forward, input_grad, weight_grad, cheap, unread)


def host_seconds(problem: PlanProblem, kind: str, row: int, col: int, split: int) -> tuple[float, float]:
    """Host seconds of a unit's forward and backward on a GPU: a lower bound of the unit's time. 0 on CPUs."""
    engine = problem.engine
    if problem.on_cpu or not (engine.host_unit or engine.host_matmul):
        return 0.0, 0.0
    matmuls = sum(o.kind == "product" for o in problem.spec.kinds[kind].operators)
    each = (engine.host_matmul if row * col > 1 else 0.0) + (engine.host_row if row > 1 else 0.0)
    seconds = split * (engine.host_unit + each * matmuls)
    return 0.4 * seconds, 0.6 * seconds
