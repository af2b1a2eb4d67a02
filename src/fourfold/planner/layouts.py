"""The outer choices of a plan: mesh, micro-batches, schedule and placements (`ParallelLayout`), and all layouts of a problem.

The mesh's degrees multiply to the number of ranks. Depth has the same cost as data (the same ranks hold copies, the same tokens
are split), so it is 1 unless requested. Layouts are enumerated with the optimizer and activations on the device and with
everything kept that the grid can keep; the search varies these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fourfold.errors import PlanError
from fourfold.plan import AXES, Batch, Flows, Kept, Memory, Mesh, Pipeline, Plan, Tensor, UnitRule
from fourfold.planner.problem import Constraints, PlanProblem

__all__ = ["GridShape", "ParallelLayout", "enumerate_layouts", "keep_options", "layout_of_plan", "may_consume"]

_SEARCHED_SCHEDULES = ("1f1b", "zb-h1", "interleaved", "wave", "zb-v")
"""gpipe is never faster, and synthesizing a schedule takes long: both are used only if requested."""
_MOST_INTERLEAVED = 16
"""Maximum stages per rank of an interleaved schedule in the search."""
_ALL_RANK_COUNTS, _RANK_COUNTS = 64, 5
"""With --max-ranks up to 64, every count above half of it is tried; above 64, the 5 that share most factors with the batch."""


class GridShape(NamedTuple):
    """What the time of an operator on the tensor grid depends on."""

    tokens: int
    """Tokens of a micro-batch on one row."""
    row: int
    col: int
    tensor: Tensor
    """Flows, overlap, and the tensors that the grid keeps."""
    amortized_over: int = 1
    """Number of micro-batches that share one gather or sum of the kept tensors."""


@dataclass(frozen=True)
class ParallelLayout:
    """Mesh, micro-batches, schedule and placements: a plan without the options of its units."""

    mesh: Mesh
    micro_batches: int
    micro_batch_size: int
    """Sequences of a micro-batch on one rank."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    optimizer: Literal["device", "host", "auto"] = "device"
    activations: Literal["device", "host"] = "device"
    tensor: Tensor = field(default_factory=Tensor)
    prefetch: int = 1
    """Units gathered ahead: 0 or 1."""
    consume: bool = False
    """Whether gradients are freed after their updates in the backward."""

    @property
    def replicas(self) -> int:
        """Ranks that hold copies of the same matrices, over which units are sharded."""
        return self.mesh.data * self.mesh.depth

    @property
    def replica_stride(self) -> int:
        return self.mesh.row * self.mesh.col

    @property
    def on_grid(self) -> bool:
        return self.mesh.row * self.mesh.col > 1

    def grid(self, problem: PlanProblem) -> GridShape:
        tokens = self.micro_batch_size * problem.spec.seq_len
        return GridShape(tokens, self.mesh.row, self.mesh.col, self.tensor, self.amortized_over)

    @property
    def amortized_over(self) -> int:
        """See `GridShape`; 1 if the grid keeps nothing across micro-batches."""
        keep = self.tensor.keep
        return self.micro_batches if "weights" in keep or "gradients" in keep else 1

    @property
    def zigzag(self) -> bool:
        """Whether stages go down the ranks and up again."""
        return self.schedule in ("wave", "zb-v")

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are a separate op (W) in the schedule."""
        return self.mesh.pipe > 1 and self.schedule in ("zb-h1", "zb-v", "synthesized")

    @property
    def grid_splits_backward(self) -> bool:
        return self.on_grid and self.splits_backward

    @property
    def stages(self) -> int:
        return self.mesh.pipe * self.stages_per_rank

    @property
    def waves(self) -> int:
        return max(1, self.stages_per_rank // 2)

    def host_activation_bytes(self, problem: PlanProblem) -> float:
        """Host bytes available for the activations of one device."""
        return Memory(optimizer=self.optimizer).host_share * problem.cluster.host_memory

    def message_bytes(self, problem: PlanProblem) -> float:
        """Bytes of one message between stages."""
        if self.mesh.pipe == 1:
            return 0.0
        elements = self.micro_batch_size * problem.spec.seq_len * problem.spec.hidden
        return elements * problem.compute_bytes / self.mesh.col

    def message_seconds(self, problem: PlanProblem) -> float:
        """Seconds of one message to the next stage."""
        stride = self.mesh.ranks // self.mesh.pipe
        return problem.cluster.message(self.message_bytes(problem), stride) if self.mesh.pipe > 1 else 0.0

    def plan(
        self,
        problem: PlanProblem,
        rules: tuple[UnitRule, ...],
        layers: tuple[int, ...] | None,
        flows: Flows | None = None,
    ) -> Plan:
        """The plan of this layout with a choice for every unit and, on a grid, a flow for every matmul."""
        piped = self.mesh.pipe > 1
        return Plan(
            mesh=self.mesh,
            batch=Batch(micro_batches=self.micro_batches),
            pipeline=Pipeline(
                schedule=self.schedule if piped else "1f1b",
                layers=layers if piped and layers is not None else "auto",
                waves=self.waves if piped and self.schedule == "wave" else 1,
                stages_per_rank=self.stages_per_rank if piped and self.schedule == "interleaved" else 2,
            ),
            tensor=replace(self.tensor, flows=flows or self.tensor.flows),
            unit=rules,
            memory=Memory(
                optimizer=self.optimizer,
                moments=problem.moments,
                activations=self.activations,
                prefetch=self.prefetch,
                gradients="consume" if self.consume else "auto",
            ),
            precision=problem.precision,
        )

    def __str__(self) -> str:
        text = self.mesh.product().rpartition(" = ")[0]
        text += f", {self.micro_batches} × {self.micro_batch_size}"
        if self.mesh.pipe > 1:
            more = {"wave": f" {self.waves}", "interleaved": f" {self.stages_per_rank}"}.get(self.schedule, "")
            text += f", {self.schedule}{more}"
        if self.tensor.keep:
            text += f", keep {' + '.join(self.tensor.keep)}"
        return text if self.prefetch else f"{text}, no prefetch"


def layout_of_plan(plan: Plan, problem: PlanProblem) -> ParallelLayout:
    """The outer choices of a plan."""
    p, batch = plan.pipeline, problem.global_batch
    per_rank = {"wave": 2 * p.waves, "interleaved": p.stages_per_rank, "zb-v": 2}.get(p.schedule, 1)
    return ParallelLayout(
        plan.mesh,
        plan.micro_batches(batch),
        plan.micro_batch_size(batch),
        p.schedule,
        per_rank if plan.mesh.pipe > 1 else 1,
        plan.memory.optimizer,
        plan.memory.activations,
        plan.tensor,
        plan.memory.prefetch,
        plan.memory.gradients == "consume",
    )


def may_consume(problem: PlanProblem, fixed: Mapping[str, Any], layout: ParallelLayout) -> bool:
    """Whether gradients may be freed in the backward: state is on the host, and nothing reads them afterwards."""
    if problem.engine.name != "fourfold" or layout.optimizer == "device" or layout.micro_batches > 1:
        return False
    default = "keep" if problem.needs_norm or problem.on_cpu else "consume"
    return fixed.get("gradients", default) == "consume"


# ---- enumeration ----


def enumerate_layouts(problem: PlanProblem, constraints: Constraints) -> Iterator[ParallelLayout]:
    """Every layout that the constraints allow. If there is none, raises PlanError with the reason."""
    ranks = min(problem.cluster.ranks, constraints.max_ranks or problem.cluster.ranks)
    found, refused = False, dict[str, str]()
    for count in _rank_counts(ranks, problem.global_batch, constraints):
        for layout in _layouts_of_ranks(problem, constraints, count):
            violated = _violated(layout, constraints, problem.heads)
            if violated:
                refused.setdefault(*violated)
                continue
            found = True
            yield layout
    if not found:
        for rule, remedy in refused.items():
            raise PlanError(f"{rule}, which conflicts with the other --fix options; {remedy}")
        _explain_no_layout(problem, constraints, ranks)


def keep_options(mesh: Mesh, micro_batches: int, tensor: Tensor, keep: str | None = None) -> list[Tensor]:
    """Sets of tensors that the grid may keep instead of communicating again, most memory first; `keep`: the user's constraint."""
    useful = {"weights": mesh.row > 1, "inputs": mesh.col > 1, "gradients": mesh.row > 1 and micro_batches > 1}
    every: tuple[Kept, ...] = ("weights", "inputs", "gradients")
    tried = [every, every[:2], every[:1], ()]
    if keep is not None:
        tried = [tuple(what for what in every if keep in (what, "all"))]
    kept = [tuple(what for what in each if useful[what]) for each in tried]
    return [replace(tensor, keep=each) for each in dict.fromkeys(kept)]


def _rank_counts(ranks: int, batch: int, constraints: Constraints) -> list[int]:
    """Numbers of ranks to try: all; with `max_ranks` also fewer, down to half of them, which may divide the batch better."""
    if not constraints.max_ranks:
        return [ranks]
    counts = range(ranks, ranks // 2, -1)
    if ranks <= _ALL_RANK_COUNTS:
        return list(counts)
    common = sorted(counts, key=lambda n: (-math.gcd(n, batch), -n))[:_RANK_COUNTS]
    return sorted({ranks, ranks // 8 * 8, 1 << ranks.bit_length() - 1, *common}, reverse=True)


def _layouts_of_ranks(problem: PlanProblem, constraints: Constraints, ranks: int) -> Iterator[ParallelLayout]:
    batch, fixed = problem.global_batch, constraints.fixed
    for pipe in _degrees(ranks, fixed.get("pipe")):
        if pipe == 1 and constraints.needs_pipeline:
            continue
        # a pipeline with fewer sequences than an eighth of its ranks is mostly idle
        if pipe > problem.spec.layers or (batch < pipe // 8 and "pipe" not in fixed):
            continue
        for col in _degrees(ranks // pipe, fixed.get("col")):
            if (problem.heads % col or problem.precision.matmul == "fp8") and col > 1 and "col" not in fixed:
                continue
            # without columns, rows are like sharded replicas, with more host overhead
            for row in _degrees(ranks // pipe // col, fixed.get("row", 1 if col == 1 else None)):
                rest, depth = ranks // pipe // col // row, fixed.get("depth", 1)
                if rest % depth or fixed.get("data", rest // depth) != rest // depth:
                    continue
                mesh = Mesh(pipe=pipe, data=rest // depth, depth=depth, row=row, col=col)
                if batch % mesh.batch_ways == 0:
                    yield from _layouts_of_mesh(problem, mesh, constraints)


def _layouts_of_mesh(problem: PlanProblem, mesh: Mesh, constraints: Constraints) -> Iterator[ParallelLayout]:
    each, tensor = problem.global_batch // mesh.batch_ways, Tensor(flow=constraints.get("flow", "auto"))
    homes = constraints.get("optimizer", "device"), constraints.get("activations", "device")
    for size in _degrees(each, constraints.get("micro_batch_size")):
        m = each // size
        if size % problem.together:
            continue
        if constraints.get("micro_batches", m) == m:
            most = keep_options(mesh, m, tensor, constraints.get("keep"))[0]
            for schedule, stages in _schedules(problem, mesh.pipe, m, constraints):
                yield ParallelLayout(mesh, m, size, schedule, stages, *homes, most)


def _schedules(
    problem: PlanProblem, pipe: int, micro_batches: int, constraints: Constraints
) -> Iterator[tuple[str, int]]:
    """Schedules, with the number of stages per rank."""
    if pipe == 1:
        yield "1f1b", 1
        return
    waves, per_rank = constraints.get("waves"), constraints.get("stages_per_rank")
    for name in (constraints.schedule,) if constraints.schedule else _SEARCHED_SCHEDULES:
        counts = [1]
        if name == "interleaved":
            searched = _interleavings(problem.spec.layers - 2, pipe) if micro_batches >= pipe else []
            counts = [per_rank] if per_rank else searched
        elif name == "wave":
            counts = [2 * waves] if waves else [2, 4, 8]
        elif name == "zb-v":
            counts = [2]
        for count in counts:
            if pipe * count <= problem.spec.layers:
                yield str(name), count


def _interleavings(blocks: int, pipe: int) -> list[int]:
    """Stages per rank to try: 2, and the largest that divides a rank's layers equally; if few do, others as well."""
    equal = [n for n in _divisors(blocks // pipe) if 1 < n <= _MOST_INTERLEAVED] if blocks % pipe == 0 else []
    return sorted({2, *equal[-3:]} if len(equal) > 2 else {2, 3, 4, 8, *equal})


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _degrees(n: int, fixed: int | None) -> tuple[int, ...]:
    return _divisors(n) if fixed is None else (fixed,) if n % fixed == 0 else ()


# ---- why there is no layout ----


def _violated(layout: ParallelLayout, constraints: Constraints, heads: int) -> tuple[str, str] | None:
    """The constraint that a layout violates, and the remedy."""
    mesh, mode, flow = layout.mesh, constraints.get("mode", "replicate"), constraints.get("flow")
    if mesh.col > heads:
        rule = f"--fix col={mesh.col} needs an attention head for every column"
        return rule, f"use col={heads}" + (" or less" if heads > 1 else "")
    if mode != "replicate" and layout.replicas == 1:
        return f"--fix mode={mode} needs replicas to shard over (data or depth of 2 or more)", "leave mode free"
    if constraints.get("recompute") == "per-slice" and layout.on_grid:
        return "--fix recompute=per-slice needs unsplit operators (row=1 col=1)", "use recompute=full on a grid"
    if flow == "summa" and (mesh.row != mesh.col or mesh.col == 1):
        rule = "--fix flow=summa needs a square grid (row=col of 2 or more)"
        return rule, "use flow=auto, which takes any rectangle"
    if flow not in (None, "auto") and not layout.on_grid:
        return f"--fix flow={flow} needs a grid (row or col of 2 or more)", "leave flow free"
    keep = constraints.get("keep", "none")
    if keep != "none" and not layout.tensor.keep:
        needs = {"weights": "row of 2 or more", "inputs": "col of 2 or more", "all": "row or col of 2 or more"}
        rule = f"--fix keep={keep} needs a grid: {needs.get(keep, 'row of 2 or more, and several micro-batches')}"
        return rule, "leave keep free"
    return None


def _explain_no_layout(problem: PlanProblem, constraints: Constraints, ranks: int) -> None:
    """Raise PlanError: which constraint leaves no layout, and what to change."""
    batch, fixed, most = problem.global_batch, constraints.fixed, problem.spec.layers
    product = math.prod(fixed.get(axis, 1) for axis in AXES)
    factors = " · ".join(f"{a} {fixed[a]}" for a in AXES if a in fixed)
    if " · " in factors:
        factors += f" = {product}"
    if product > 1 and ranks % product:
        raise PlanError(f"--fix requests {factors}, which does not divide {ranks} ranks; use a divisor of {ranks}")
    if set(AXES) <= {*fixed, "depth"} and product != ranks:
        raise PlanError(f"--fix requests {factors} ranks, but there are {ranks}; leave one axis free")
    if constraints.needs_pipeline and product == ranks and "pipe" not in fixed:
        raise PlanError(
            f"the schedule {constraints.schedule} needs a pipeline of 2 ranks or more, and "
            + (f"--fix {factors} uses all {ranks}; leave one axis free" if factors else "there is one rank")
        )
    pipe = fixed.get("pipe", 1)
    if pipe > most:
        raise PlanError(
            f"--fix pipe={pipe}: the model has {_layers(most - 2)}, which with its embedding and its head make at most {most} "
            f"stages; use pipe={max(d for d in _divisors(ranks) if d <= most)} or less"
        )
    _check_stages(problem, constraints, max(2, pipe), ranks)
    interleaved = constraints.schedule == "interleaved" and "stages_per_rank" not in fixed
    if interleaved and fixed.get("micro_batches", pipe) < pipe:
        raise PlanError(
            f"the schedule interleaved is searched with at least as many micro-batches as pipeline ranks; "
            f"--fix requests {fixed['micro_batches']} on {pipe}: fix stages_per_rank too, or use micro_batches={pipe}"
        )
    if "micro_batches" in fixed or "micro_batch_size" in fixed:
        raise PlanError(
            f"no mesh of {ranks} ranks divides {batch} sequences into the micro-batches that --fix requests; "
            "leave micro_batches and micro_batch_size free"
        )
    usable = _most_ranks(problem, ranks)
    remedy = f"use a global batch that is a multiple of {ranks}, or --max-ranks {usable}"
    raise PlanError(
        f"{batch} sequences cannot be divided over {ranks} ranks: data · row must divide the batch, and "
        f"pipe ≤ {most} stages and col (a divisor of the heads) take the rest; "
        + (remedy if usable < ranks else "remove some of the --fix options")
    )


def _check_stages(problem: PlanProblem, constraints: Constraints, pipe: int, ranks: int) -> None:
    """Raise PlanError if the schedule has more stages than the model has layers."""
    schedule, most = constraints.schedule or "", problem.spec.layers
    name, each = {"wave": ("waves", 2), "interleaved": ("stages_per_rank", 1)}.get(schedule, ("", 1))
    fewest = constraints.get(name, 1 if each == 2 else 2) if name else 2 if schedule == "zb-v" else 1
    stages = pipe * each * fewest
    if stages <= most:
        return
    if name in constraints.fixed:
        cause, less = f"--fix {name}={constraints.fixed[name]}", most // (pipe * each)
        remedy = f"use {name}={less} at most" if less else f"leave {name} out"
    else:
        cause = f"the schedule {schedule}"
        less = max((d for d in _divisors(ranks) if d * each * fewest <= most), default=1)
        remedy = f"use pipe={less} or less, or another schedule" if less > 1 else "use another schedule"
    raise PlanError(
        f"{cause} makes {stages} stages on {pipe} ranks of a pipeline, and the model "
        f"has {_layers(most - 2)}, which with its embedding and its head fill {most}; {remedy}"
    )


def _most_ranks(problem: PlanProblem, ranks: int) -> int:
    """The largest number of ranks that the batch can be divided over, without constraints."""
    batch = problem.global_batch
    pipes = range(1, min(problem.spec.layers, 8 * batch + 7) + 1)
    found = (w * c * p for w in _divisors(batch) for c in _divisors(problem.heads) for p in pipes)
    return max(n for n in found if n <= ranks)


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
