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

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from fourfold.cluster import Cluster
from fourfold.model.operators import Held, ModelSpec, Moment, UnitSpec
from fourfold.plan import Mesh, Tensor
from fourfold.planner.beside import NO_GRID, Crossing, OnGrid, grid_times
from fourfold.planner.heights import Heights, at_once
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.products import operator_seconds, vector_sums
from fourfold.shard.layout import ALIGN

__all__ = [
    "STASH",
    "Choice",
    "Compute",
    "Shared",
    "UnitCost",
    "compute_times",
    "computes",
    "computing",
    "joins",
    "shared",
    "tied_elements",
    "unit_cost",
]

Recompute = Literal["none", "selective", "full", "per-slice"]
LEAST, PAGE = 1 << 20, 1 << 16
"""Bytes: smaller activations are not sent to the host; and what buffers there are multiples of."""
STASH = 2 << 30
"""Bytes of activations that wait on the device for their way to the host, or are back before they are needed."""


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
    lines: OnGrid = NO_GRID
    """The same, line by line."""

    def shown(self, op: str) -> float:
        """Seconds of an op (F, B, I, W) in which the grid's collectives are waited for."""
        return _shown(self.lines.of(op))

    def cold(self, op: str) -> float:
        """Seconds more of an op that begins with this unit: its first weight is not gathered ahead."""
        return self.lines.cold_forward if op == "F" else self.lines.cold_backward if op != "W" else 0.0


@dataclass(frozen=True)
class Shared:
    """A unit's parameters and gradients under a choice: seconds, and bytes on one rank."""

    gather: float
    """Seconds of one gather of its parameters."""
    reduce: float
    """Seconds of one reduction of its gradients, within its group."""
    across: float
    """Seconds of the sum across groups that follows."""
    whole: float
    """Bytes of its parameters, gathered."""
    parameters: float
    """Bytes that are always there: the whole, or a shard."""
    gradients: float
    """Bytes of its gradient before it is reduced."""
    reduced: float
    """Bytes of its gradient after it is reduced (with it in place: the whole)."""
    local: float
    """Parameters that this rank updates."""
    transient: float
    """Bytes of parameters that are gathered while it computes, if gathered for that only."""
    slices: int
    """Links it is run as: each has its share of parameters and gradients, and gathers and reduces on its own."""


@dataclass(frozen=True)
class UnitCost(Shared):
    """All that a unit costs under a choice on a layout."""

    compute: Compute
    ends: Compute
    """The first forward and the last backward of a step, in which the grid gathers and sums what it keeps over micro-batches."""
    vectors: float
    """Seconds that sums over the grid take before a reduction; without one, to start them."""
    behind: float
    """Seconds of those that nothing waits for before the step's end."""
    activation: float
    """Bytes kept of one micro-batch."""
    kept_for_weight_grad: float
    """Bytes that are held from I to W."""
    forward_workspace: float
    """Bytes that its forward holds for a while, besides what it keeps."""
    workspace: float
    """Bytes that its backward holds for a while: gradients inside, what is recomputed, weight gradients as they are made."""
    closing: float
    """Bytes that it holds when its weight gradients are added up, less what it kept."""
    split_workspace: float
    """What I holds for a while: inputs that a whole backward would have given back by then wait for W."""
    product: float
    """What W holds for a while: one product."""
    at_once: bool = False
    """Weight gradients are added up as they are made, not at the end of the unit's backward."""
    borrowed: float = 0.0
    """Bytes of the gradient of a tied weight that is another unit's."""
    lender: float = 0.0
    """Bytes of that unit's parameters, gathered with this one's; 0 where they stay."""
    offloaded: float = 0.0
    """Bytes of activations that move to the host and back."""
    lines: tuple[bool, bool] = (False, False)
    """Whether the grid's row and its col cross the link on which it is gathered and reduced."""

    def crossing(self, c: Compute, op: str) -> tuple[float, float]:
        """Seconds of an op's collectives on the grid that cross that link: those that are waited for, and all."""
        found = [line for line, crosses in zip(c.lines.of(op), self.lines, strict=True) if crosses]
        return sum(line.shown for line in found), sum(line.every for line in found)


@lru_cache(maxsize=200_000)
def compute_times(
    setting: Setting,
    kind: str,
    tokens: int,
    row: int,
    col: int,
    tensor: Tensor,
    steps: int,
    split: int,
    recompute: str,
    apart: bool = False,
    once: bool | None = None,
) -> Compute:
    """Seconds of a micro-batch of `tokens` tokens on a rank, of which a step has `steps` where something is kept over them.

    `apart`: weight gradients have an op of their own. `once`: of the first forward and the last backward of a step, where what
    is kept is gathered and summed (True); of all others (False); of all on average (None).
    """
    where = (setting, kind, tokens, row, col, tensor, steps, split, recompute, apart)
    if once is None and steps > 1:
        usual, ends = compute_times(*where, False), compute_times(*where, True)
        f, i, w, again, moved = (u + (e - u) / steps for u, e in zip(usual[:5], ends[:5], strict=True))
        return Compute(f, i, w, again, moved)
    whole = "gradients" in tensor.keep
    forward, input_grad, weight_grad, cheap, unread = computing(setting, kind, tokens, row, col, split, whole)
    grid = usual_grid = NO_GRID
    if row * col > 1:
        on_grid = (setting, tokens, row, col, tensor, steps, apart)
        grid, usual_grid = (grid_times(*on_grid, kept)[kind] for kept in (once is not False or steps == 1, False))
    there, back, redone = (_shown(lines) for lines in (grid.forward, grid.backward, usual_grid.forward))
    again = {"none": 0.0, "selective": cheap}.get(recompute, forward + redone - unread)
    return Compute(
        forward + there, input_grad + back - grid.weight, weight_grad + grid.weight, again, there + back, grid
    )


def _shown(lines: tuple[Crossing, Crossing]) -> float:
    return lines[0].shown + lines[1].shown


@lru_cache(maxsize=50_000)
def computing(
    setting: Setting, kind: str, tokens: int, row: int, col: int, split: int = 1, whole: bool = False
) -> tuple[float, float, float, float, float]:
    """Seconds of a micro-batch, the grid's collectives left out: F, I, W; of F, what is cheap to redo, and what nobody reads.

    `whole`: gradients of all rows are kept, and added to.
    """
    unit = setting.spec.kinds[kind]
    forward = input_grad = weight_grad = cheap = unread = 0.0
    for o in unit.operators:
        f, i, w = operator_seconds(setting, o, tokens, row, col, split, whole)
        forward, input_grad, weight_grad = forward + f, input_grad + i, weight_grad + w
        if o.kind == "product":
            unread += f if o.name == unit.unread and row * col == split == 1 and not setting.precision.compile else 0.0
        elif o.name in unit.again or (o.kind == "memory" and not unit.again):
            cheap += f
    return forward, input_grad, weight_grad, cheap, unread


@lru_cache(maxsize=4096)
def _elements(setting: Setting, kind: str, parts: int) -> float:
    """Elements of a unit's parameters on a rank: a grid divides matrices, but for positions and token types: copied."""
    unit = setting.spec.kinds[kind]
    sizes = (
        math.prod(shape) / (parts if len(shape) > 1 and not name.startswith(("positions", "types")) else 1)
        for name, shape in unit.shapes.items()
    )
    return float(sum(_rounded(size, 1) for size in sizes))


def _rounded(elements: float, shards: int) -> float:
    """Elements of a flat buffer that `shards` ranks share."""
    step = ALIGN * shards
    return -(-elements // step) * step


def shared(setting: Setting, layout: Layout, kind: str, choice: Choice) -> Shared:
    """What sharding the unit takes and holds. Times are of one gather, one reduction."""
    unit, mesh, cluster = setting.spec.kinds[kind], layout.mesh, setting.cluster
    keep = _kept(layout.tensor, choice).keep
    replicas, stride = layout.replicas, layout.replica_stride
    group = choice.within or replicas
    mode = choice.mode if group > 1 else "replicate"
    shards = 1 if mode == "replicate" else group
    slices = choice.split if unit.slices > 1 else 1
    n = _rounded(_elements(setting, kind, mesh.row * mesh.col), shards * slices)
    e, r = setting.compute, setting.reduce
    gather = 0.0 if mode == "replicate" else cluster.collective("all_gather", n * e, group, stride)
    across = 0.0
    if mode == "replicate":
        reduce = cluster.collective("all_reduce", n * r, replicas, stride)
    else:
        reduce = cluster.collective("reduce_scatter", n * r, group, stride)
        across = cluster.collective("all_reduce", n * r / group, replicas // group, stride * group)
    whole_rows = 0.0  # weights and gradients of all rows that are kept for the step
    if mesh.row > 1 and unit.flops:
        width = (e if "weights" in keep else 0) + (max(4, e) if "gradients" in keep else 0)
        whole_rows = unit.matrices / mesh.col * width
    return Shared(
        gather=gather,
        reduce=reduce,
        across=across,
        whole=n * e,
        parameters=n * e / shards + whole_rows,
        gradients=n * r,
        reduced=n * r / shards,
        local=n / shards,
        transient=n * e / slices if mode == "zero3" else 0.0,
        slices=slices,
    )


def _kept(tensor: Tensor, choice: Choice) -> Tensor:
    """What the grid keeps for a unit: weights that are released between F and B are gathered again."""
    if choice.mode == "zero3" and "weights" in tensor.keep:
        return replace(tensor, keep=tuple(what for what in tensor.keep if what != "weights"))
    return tensor


def computes(setting: Setting, layout: Layout, kind: str, choice: Choice, once: bool | None = None) -> Compute:
    """Seconds of one micro-batch of the unit; `once` as of `compute_times`."""
    mesh, tokens = layout.mesh, layout.micro_batch_size * setting.spec.seq_len
    grid = mesh.row, mesh.col, _kept(layout.tensor, choice), layout.steps
    return compute_times(setting, kind, tokens, *grid, choice.split, choice.recompute, layout.splits_backward, once)


@lru_cache(maxsize=200_000)
def unit_cost(setting: Setting, layout: Layout, kind: str, choice: Choice) -> UnitCost:
    """The unit under a choice. Times are of one micro-batch, one gather, one reduction."""
    unit, mesh, cluster = setting.spec.kinds[kind], layout.mesh, setting.cluster
    tokens, e, r = layout.micro_batch_size * setting.spec.seq_len, setting.compute, setting.reduce
    if unit.cast and mesh.row * mesh.col > 1 and choice.split == 1:
        unit = _loss_on_grid(unit, e)
    sharing = shared(setting, layout, kind, choice)
    behind, calls = vector_sums(cluster, unit, mesh.row, mesh.col)
    vectors = calls * cluster.call
    if layout.replicas > 1 and behind:
        vectors, behind = behind, 0.0
    lent = _lent(setting, unit, mesh)
    scale = tokens / mesh.col
    heights = Heights(setting, layout, unit, choice.recompute, tokens, sharing.whole + lent * e, sharing.slices)
    kept = heights.kept
    offloads = layout.activations == "host" and unit.layer != setting.spec.layers - 1  # the loss is next: it stays
    held = 0.0 if offloads else kept
    if offloads and cluster.device.kind == "cpu":  # its host is where it is: what goes there is there twice
        again = choice.recompute in ("full", "per-slice")  # its input goes, however small
        held = kept + (-(-kept // PAGE) * PAGE if again or kept >= LEAST else 0.0)
    lender = 0.0
    if lent and sharing.transient:
        shards = choice.within or layout.replicas
        lender = _rounded(_elements(setting, setting.spec.units[0].kind, mesh.row * mesh.col), shards) * e
    return UnitCost(
        **vars(sharing),
        compute=computes(setting, layout, kind, choice, False),
        ends=computes(setting, layout, kind, choice, True),
        vectors=vectors,
        behind=behind,
        activation=held,
        kept_for_weight_grad=unit.for_weight_grad.bytes(e) * scale,
        forward_workspace=heights.forward() + max(0.0, kept - held),
        workspace=heights.backward() + max(0.0, kept - held),
        closing=heights.closing() - held,
        split_workspace=heights.split() + max(0.0, kept - held),
        product=heights.product(),
        at_once=at_once(setting, mesh),
        borrowed=lent * r,
        lender=lender,
        offloaded=kept if offloads else 0.0,
        lines=_crossed(layout, cluster),
    )


@lru_cache(maxsize=64)
def _loss_on_grid(unit: UnitSpec, width: int) -> UnitSpec:
    """A grid's cross entropy keeps the logits, not their softmax, and computes in one fp32 copy of them."""
    v, none = unit.cast, unit.saved["none"]
    narrow = v if width < 4 else 0.0  # the gradient, beside its fp32 copy

    def back(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        loss, product = moments
        return loss._replace(inner=Held(narrow, v)), product._replace(inner=Held())

    return replace(
        unit,
        saved={**unit.saved, "none": Held(none.narrow + v, none.wide - v)},
        forward={**unit.forward, "none": (Moment(inner=Held(0.0, v)), unit.forward["none"][1])},
        backward=back(unit.backward),
        split=back(unit.split),
        cast=0.0,
    )


def _crossed(layout: Layout, cluster: Cluster) -> tuple[bool, bool]:
    mesh = layout.mesh
    mine = cluster.link(layout.replicas, layout.replica_stride) if layout.replicas > 1 else 0
    return cluster.link(mesh.row, mesh.col) == mine, cluster.link(mesh.col, 1) == mine


def joins(cost: Shared, choice: Choice) -> bool:
    """Whether a unit's gradient may be summed together with those of others: it stays whole, and is reduced once a step."""
    return cost.reduced >= cost.gradients and cost.slices == 1 and choice.reduce == "step"


def _lent(setting: Setting, unit: UnitSpec, mesh: Mesh) -> float:
    """Elements of a tied weight that the unit uses and another holds."""
    return tied_elements(setting.spec, mesh) if unit.layer == setting.spec.layers - 1 else 0.0


def tied_elements(spec: ModelSpec, mesh: Mesh) -> float:
    """Of the token matrix that is the head's, too, on one rank of a grid; 0 where none is."""
    if not spec.tied:
        return 0.0
    return math.prod(next(iter(spec.units[0].shapes.values()))) / (mesh.row * mesh.col)
