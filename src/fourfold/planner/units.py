"""What a unit costs on a layout: time, bytes moved and bytes held, for every choice of mode, split and recomputation.

**Compute.** A product of T tokens takes what [T, K] · [K, N/col] takes on the device; attention and memory-bound operators their
FLOPs and bytes. The backward of a product is two products: of the input (I) and of the weight (W), whose result is then
added to the gradients of the micro-batches before.

**The grid.** Every product moves as its flow says (`products`): what nothing hides is waited for where it stands; the rest runs
beside the unit's own computing, forward and backward each, as far as that lasts and the cluster overlaps.

**Sharding.** Over a group of S of the N replicas (`within`; S = N: all): parameters of n elements are gathered, gradients
reduced, over the group; with S < N the shards are summed over the other N/S, too.

| mode | gathers a step | holds gathered parameters |
|---|---|---|
| replicate | none | (its parameters are whole) |
| keep | 1 | all step |
| zero2 | one a micro-batch where none is in flight, else 1 | from F to B |
| zero3 | 2 a micro-batch | while it computes, and the next unit's |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from fourfold.model.operators import Held, UnitSpec
from fourfold.plan import Tensor
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.products import grid_seconds, kept_bytes, product_seconds
from fourfold.shard.layout import ALIGN

__all__ = ["Choice", "Compute", "UnitCost", "compute_times", "unit_cost"]

Recompute = Literal["none", "selective", "full", "per-slice"]


class Choice(NamedTuple):
    """What can be chosen for a unit."""

    mode: Literal["replicate", "zero2", "zero3", "keep"] = "replicate"
    reduce: Literal["step", "micro-batch"] = "step"
    within: int = 0
    split: int = 1
    recompute: Recompute = "none"


class Compute(NamedTuple):
    """Seconds of one micro-batch of a unit, the grid's collectives included."""

    forward: float
    input_grad: float
    weight_grad: float
    again: float
    """What recomputation adds to the backward."""
    grid: float
    """Of forward and backward, what the grid's collectives take."""


@dataclass(frozen=True)
class UnitCost:
    """A unit under a choice on a layout: seconds, and bytes on one rank."""

    compute: Compute
    gather: float
    """Seconds of one gather of its parameters."""
    reduce: float
    """Seconds of one reduction of its gradients."""
    whole: float
    """Bytes of its parameters, gathered."""
    parameters: float
    """Bytes that are always there: the whole, or a shard."""
    gradients: float
    """Bytes of its gradient before it is reduced."""
    reduced: float
    """Bytes of its gradient after it is reduced (with it in place: the whole)."""
    optimizer: float
    """Bytes of optimizer state."""
    local: float
    """Parameters that this rank updates."""
    activation: float
    """Bytes kept of one micro-batch."""
    kept_for_weight_grad: float
    """Bytes that are held from I to W."""
    workspace: float
    """Bytes that its backward holds for a while: gradients inside, what is recomputed, weight gradients as they are made."""
    split_workspace: float
    """What I holds for a while: inputs that a whole backward would have given back by then wait for W."""
    product: float
    """What W holds for a while: one product."""
    forward_workspace: float
    transient: float
    """Bytes of parameters that are gathered while it computes, if gathered for that only."""
    offloaded: float = 0.0
    """Bytes of activations that move to the host and back."""
    stays: float = 0.0
    """Bytes of weights and gradients of all rows that are kept over a step."""
    ahead: float = 0.0
    """Bytes of the next weight of all rows, and of a gradient that is being summed over row."""


@lru_cache(maxsize=200_000)
def compute_times(
    setting: Setting, kind: str, tokens: int, row: int, col: int, tensor: Tensor, steps: int, split: int, recompute: str
) -> Compute:
    """Seconds of one micro-batch of `tokens` tokens on a rank, of which a step has `steps` where something is kept over them."""
    unit, cluster, width = setting.spec.kinds[kind], setting.cluster, setting.compute
    forward = input_grad = weight_grad = cheap = 0.0
    shown, hidden = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for o in unit.operators:
        if o.kind == "product":
            f, i, w = product_seconds(setting, o, tokens, col, split)
            added = o.inputs * o.outputs / (row * col) * (width + 2 * setting.reduce)  # to the gradient so far
            forward, input_grad = forward + f, input_grad + i
            weight_grad += w + cluster.memory_bound(added)
        elif o.kind == "attention":
            time = cluster.attention(o.flops * tokens / col, setting.precision.compute)
            forward, input_grad = forward + time, input_grad + time * o.backward
            cheap += time if o.name in unit.again else 0.0
        else:
            time = cluster.memory_bound(o.moved * tokens * width / col)
            forward, input_grad = forward + time, input_grad + time * o.backward
            cheap += time if not unit.again or o.name in unit.again else 0.0
        if row * col > 1:
            moved = grid_seconds(setting, o, tokens, row, col, tensor, steps)
            for op, part in enumerate(moved.values()):
                shown[op] += part[0]
                hidden[op] += part[1]
    overlap = cluster.overlap if tensor.overlap else 0.0
    times = (forward, input_grad, weight_grad)
    late = [shown[op] + hidden[op] - overlap * min(hidden[op], times[op]) for op in range(3)]
    again = {"none": 0.0, "selective": cheap}.get(recompute, forward + late[0])
    return Compute(forward + late[0], input_grad + late[1], weight_grad + late[2], again, sum(late))


def _rounded(elements: float, shards: int) -> float:
    """Elements of a flat buffer that `shards` ranks share."""
    step = ALIGN * shards
    return -(-elements // step) * step


@lru_cache(maxsize=200_000)
def unit_cost(setting: Setting, layout: Layout, kind: str, choice: Choice) -> UnitCost:
    """The unit under a choice. Times are of one micro-batch, one gather, one reduction."""
    unit, mesh, cluster = setting.spec.kinds[kind], layout.mesh, setting.cluster
    tokens = layout.micro_batch_size * setting.spec.seq_len
    tensor, steps = layout.tensor, layout.steps
    if choice.mode == "zero3" and "weights" in tensor.keep:  # released between F and B
        tensor = replace(tensor, keep=tuple(what for what in tensor.keep if what != "weights"))
    compute = compute_times(setting, kind, tokens, mesh.row, mesh.col, tensor, steps, choice.split, choice.recompute)
    replicas, stride = layout.replicas, layout.replica_stride
    group = choice.within or replicas
    mode = choice.mode if replicas > 1 else "replicate"
    shards = 1 if mode == "replicate" else group
    n = _rounded(unit.matrices / (mesh.row * mesh.col) + unit.vectors, shards)
    e, r = setting.compute, setting.reduce
    gather = 0.0 if mode == "replicate" else cluster.collective("all_gather", n * e, group, stride)
    if mode == "replicate":
        reduce = cluster.collective("all_reduce", n * r, replicas, stride)
    else:
        reduce = cluster.collective("reduce_scatter", n * r, group, stride)
        reduce += cluster.collective("all_reduce", n * r / group, replicas // group, stride * group)
    on_device = setting.state if layout.optimizer == "device" else 0.0
    scale = tokens / mesh.col
    kept = _bytes(setting, unit.saved.get(choice.recompute, unit.saved["full"]), unit, choice.recompute) * scale
    full = _bytes(setting, unit.saved["none"], unit, "none") * scale
    stays, ahead, inputs = _grid_bytes(setting, unit, replace(layout, tensor=tensor))
    kept += inputs if choice.recompute == "none" else 0.0
    slices = choice.split if choice.recompute == "per-slice" else 1
    inside = max(0.0, full - kept) / slices if choice.recompute != "none" else 0.0
    grads = n * e / choice.split  # weight gradients, before they are added up
    within = inside + unit.workspace.bytes(e) * scale / slices
    work = max(within + unit.late * grads, grads + unit.output * e * scale - kept)
    more = (
        2 * tokens * setting.spec.hidden * e if mesh.col > 1 else 0.0
    )  # a gathered input, a gradient not yet scattered
    more += unit.matrices / mesh.col * e if mesh.row > 1 else 0.0
    return UnitCost(
        compute=compute,
        gather=gather,
        reduce=reduce,
        whole=n * e,
        parameters=n * e / shards,
        gradients=n * r,
        reduced=n * r / shards,
        optimizer=n / shards * on_device,
        local=n / shards,
        activation=kept if layout.activations == "device" else 0.0,
        kept_for_weight_grad=unit.for_weight_grad.bytes(e) * scale,
        workspace=work + more + (kept if layout.activations == "host" else 0.0),
        split_workspace=within + more + unit.last_input * e * scale,
        product=max(unit.late, 1 - unit.late) * grads,
        forward_workspace=(unit.forward_workspace.bytes(e) + unit.output * e + (4 * unit.cast if e < 4 else 0)) * scale
        + (full - kept if choice.recompute in ("full", "per-slice") else 0.0) / slices,
        transient=n * e / choice.split if mode == "zero3" else 0.0,
        offloaded=kept if layout.activations == "host" else 0.0,
        stays=stays,
        ahead=ahead,
    )


def _grid_bytes(setting: Setting, unit: UnitSpec, layout: Layout) -> tuple[float, float, float]:
    """Bytes of all rows that products keep over a step, and that overlap holds; of inputs that they keep of a micro-batch."""
    mesh, products = layout.mesh, [o for o in unit.operators if o.kind == "product"]
    if mesh.row * mesh.col == 1 or not products:
        return 0.0, 0.0, 0.0
    kept = [kept_bytes(setting, o, layout) for o in products] if layout.tensor.keep else [(0.0, 0.0, 0.0)]
    most = max(o.inputs * o.outputs for o in products) / mesh.col if mesh.row > 1 and layout.tensor.overlap else 0.0
    ahead = most * (setting.compute + max(4, setting.reduce))
    return sum(k[0] + k[1] for k in kept), ahead, sum(k[2] for k in kept)


def _bytes(setting: Setting, held: Held, unit: UnitSpec, recompute: str) -> float:
    """Bytes for one token, with what a CPU's RMSNorm keeps besides."""
    size = held.bytes(setting.compute)
    if recompute == "none" and setting.cluster.device.kind == "cpu":
        size += unit.unfused * max(4, setting.compute) * (2 if setting.compute < 4 else 1)
    return size
