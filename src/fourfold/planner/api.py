"""From a model and a cluster to a plan: the planner's entry points.

make_plan(spec, cluster, global_batch=1024)  ->  Plan, with `predicted`, `certificate` and `alternatives` filled in
predict(plan, spec, cluster, global_batch=1024) ->  Prediction of any plan: seconds, bytes, tokens/s, MFU
judge(plan, problem)                         ->  the same plan with its prediction; searches nothing
plan_run(config, cluster)                    ->  the plan of a run that starts now
uniform_plans(problem, most)                 ->  plans as one would write them by hand, predicted in milliseconds each
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.config import MOST, Config
from fourfold.errors import FourfoldError, PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Plan, Precision
from fourfold.planner.build import Candidate
from fourfold.planner.engines import TrainingEngine, own_engine
from fourfold.planner.evaluate import Prediction, evaluate
from fourfold.planner.grid_cost import chosen_flows
from fourfold.planner.layouts import ParallelLayout, layout_of_plan
from fourfold.planner.problem import Constraints, PlanProblem, SearchConfig, parse_fixes
from fourfold.planner.report import no_fit, with_report
from fourfold.planner.search import Progress, SearchResult, search

__all__ = [
    "default_batch",
    "default_precision",
    "find_plan",
    "judge",
    "make_plan",
    "named_precision",
    "plan_problem",
    "plan_run",
    "predict",
    "problem_of_run",
    "uniform_plans",
]

_DEFAULT_TOKENS = 4 * 2**20
"""Default tokens per step."""
_PRECISIONS = ("bf16", "fp8", "fp32", "fp64")
_MOMENT_TYPES = ("fp32", "bf16")
_WORTH_IT = 0.9
"""For a run that starts now: a plan replaces plain data parallelism if its step takes at most this share of the time."""


def make_plan(
    spec: ModelSpec,
    cluster: Cluster | str,
    *,
    global_batch: int = 0,
    precision: Precision | str | None = None,
    moments: Literal["fp32", "bf16"] = "fp32",
    fix: Mapping[str, Any] | Sequence[str] | str = (),
    max_ranks: int | None = None,
    top: int = 5,
    engine: str | TrainingEngine = "fourfold",
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits, with its report. If none fits, raises PlanError, which says what would fit.

    `cluster`: a cluster, the name of a preset (one node), or a file.
    `precision`: "bf16", "fp8" (bf16 with matmuls in fp8), "fp32" or "fp64"; default: bf16 on GPUs, fp32 on CPUs.
    `fix` constrains the search: {"col": 4, "schedule": "wave"}, ["tp=4", "schedule=wave"] or "col=4"; see docs/planning.md.
    `engine`: the system that will run the plan: "fourfold", "torchtitan", "megatron" or "nemo".
    """
    cluster = Cluster.find(cluster) if isinstance(cluster, str) else cluster
    if moments not in _MOMENT_TYPES:
        raise PlanError(f"moments = {moments!r}: AdamW's moments are of type {' or '.join(map(repr, _MOMENT_TYPES))}")
    for name, value in (("top", top), ("max_ranks", 1 if max_ranks is None else max_ranks)):
        schema.check_count(name, value, PlanError)
    fix = fix.split() if isinstance(fix, str) else fix
    texts = [f"{k}={v}" for k, v in fix.items()] if isinstance(fix, Mapping) else list(fix)
    constraints = parse_fixes(texts, None, max_ranks)
    problem = PlanProblem(
        spec,
        cluster,
        global_batch or default_batch(spec, cluster, max_ranks),
        named_precision(precision) if isinstance(precision, str) else precision or default_precision(cluster),
        moments,
    ).with_engine(engine)
    return plan_problem(problem, constraints, top, progress, narrow=precision is None)


def plan_problem(
    problem: PlanProblem,
    constraints: Constraints,
    top: int = 5,
    progress: Progress | None = None,
    *,
    narrow: bool = False,
    every: bool = False,
) -> Plan:
    """The fastest plan that fits; its report lists the `top` best plans, or all that were evaluated.

    `narrow`: if no plan fits, gradients may be accumulated and reduced in bf16.
    """

    if problem.precision.matmul == "fp8" and problem.spec.config is not None:
        mesh = Mesh(row=constraints.get("row", 1), col=constraints.get("col", 1))
        Plan(mesh=mesh, precision=problem.precision).check_model(problem.spec.config)

    def reported(question: PlanProblem) -> Plan:
        found = find_plan(question, constraints, top, progress)
        return with_report(found, question, len(found.ranked) if every else top)

    try:
        return reported(problem)
    except PlanError:
        precision = problem.precision
        if not narrow or precision.compute != "bf16" or precision.reduce == "bf16":
            raise
        halved = replace(problem, precision=replace(precision, reduce="bf16"))
        try:
            plan = reported(halved)
        except PlanError as e:
            raise PlanError(str(e).replace("no plan fits:", "no plan fits, even with gradients in bf16:", 1)) from None
    note = "gradients are accumulated and reduced in bf16: with fp32 no plan fits (--precision bf16 insists on fp32)"
    return replace(plan, predicted=(plan.predicted or {}) | {"note": note})


def predict(
    plan: Plan,
    spec: ModelSpec,
    cluster: Cluster | str,
    *,
    global_batch: int,
    engine: str | TrainingEngine = "fourfold",
) -> Prediction:
    """Time of a plan by part and memory by rank; the plan need not fit. Raises PlanError if the plan cannot run.

    `cluster`: a cluster, the name of a preset (one node), or a file. `engine`: the system that runs the plan ("fourfold",
    "torchtitan", "megatron", "nemo"). Searches nothing; `fourfold plan --judge` prints the same.
    """
    _check_batch(global_batch)
    cluster = Cluster.find(cluster) if isinstance(cluster, str) else cluster
    _, problem = _checked(plan, PlanProblem(spec, cluster, global_batch, plan.precision).with_engine(engine))
    return evaluate(plan, problem).prediction()


def find_plan(
    problem: PlanProblem,
    constraints: Constraints,
    top: int = 5,
    progress: Progress | None = None,
    config: SearchConfig | None = None,
) -> SearchResult:
    """The search, after checking the problem."""
    _check_batch(problem.global_batch)
    collects = gc.isenabled()
    gc.disable()  # most objects live until the search ends; scanning them would take a tenth of the time
    try:
        return search(problem, constraints, progress, top, config or SearchConfig())
    finally:
        if collects:
            gc.enable()


def _check_batch(sequences: int) -> None:
    schema.check_count("global_batch", sequences, PlanError)
    if sequences > MOST["train.global_batch"]:
        raise PlanError(f"global_batch = {sequences} must be at most {MOST['train.global_batch']} sequences")


def named_precision(name: str) -> Precision:
    """The precision with this compute type, or bf16 with matmuls in fp8; gradients are reduced in fp32, or in fp64 for fp64."""
    if name not in _PRECISIONS:
        raise PlanError(f"precision = {name!r} is an invalid value{schema.nearest(name, _PRECISIONS)}")
    if name == "fp8":
        return Precision(compute="bf16", matmul="fp8")
    return schema.build(Precision, {"compute": name, "reduce": "fp64" if name == "fp64" else "fp32"}, error=PlanError)


def default_precision(cluster: Cluster) -> Precision:
    """bf16 on GPUs that are faster with it, else fp32."""
    d = cluster.device
    return Precision(compute="bf16" if d.kind == "cuda" and d.matrix["bf16"] > d.matrix["fp32"] else "fp32")


def default_batch(spec: ModelSpec, cluster: Cluster, max_ranks: int | None = None) -> int:
    """The number of sequences with about four million tokens; a multiple of the number of ranks."""
    ranks = min(cluster.ranks, max_ranks or cluster.ranks)
    sequences = _DEFAULT_TOKENS // spec.seq_len if cluster.device.kind == "cuda" else 8 * ranks
    return max(1, round(sequences / ranks)) * ranks


def judge(plan: Plan, problem: PlanProblem) -> Plan:
    """The same plan with the planner's prediction; if it does not fit, the field `misfit` says why."""
    layout, problem = _checked(plan, problem)
    plan = replace(plan, tensor=replace(plan.tensor, flows=chosen_flows(problem, layout)))
    candidate = Candidate(layout, plan, evaluate(plan, problem).prediction())
    judged = with_report(SearchResult(candidate, (candidate,), {}), problem, 1)
    assert judged.predicted is not None
    # the value of more memory is known only after a search
    predicted = judged.predicted | {"binding": "", "price": 0.0, "misfit": no_fit(candidate, problem)}
    return replace(judged, predicted=predicted, certificate=None)


def _checked(plan: Plan, problem: PlanProblem) -> tuple[ParallelLayout, PlanProblem]:
    """The plan's layout, and the problem with the plan's precision. Raises PlanError if the plan cannot run."""
    cluster, spec = problem.cluster, problem.spec
    if plan.mesh.ranks > cluster.ranks:
        nodes = plan.mesh.ranks if cluster.name == "local" else -(-plan.mesh.ranks // cluster.devices)
        raise PlanError(
            f"the plan's mesh is {plan.mesh.product()} ranks, but {cluster.name} has {cluster.ranks} devices; "
            f"judge it with --nodes {nodes}" + (", which are ranks here" if cluster.name == "local" else "")
        )
    ways = plan.mesh.batch_ways * (plan.batch.micro_batches or 1)
    if problem.global_batch % ways:
        raise PlanError(
            f"global batch {problem.global_batch} does not divide by data · depth · row · micro_batches = {ways}; "
            f"use {max(1, problem.global_batch // ways) * ways} sequences"
        )
    plan.check_units([u.name for u in spec.units])
    if spec.config is not None:
        plan.check_model(spec.config)
    problem = problem.of_plan(plan)
    return layout_of_plan(plan, problem), problem


# ---- a run that starts now ----


def plan_run(config: Config, cluster: Cluster, precision: Precision | None = None, context: float = 0.0) -> Plan:
    """The plan of a resolved config on all ranks of a cluster, with its prediction.

    `context`: the context of its data if several documents share a sequence (`Samples.context`).

    Plain data parallelism is preferred: if it fits, another plan must be predicted to be a tenth faster. On `local`, whose
    numbers are not measured, it is always chosen.
    """
    ranks, problem = cluster.ranks, problem_of_run(config, cluster, precision, context)
    refusal: PlanError | None = None
    try:
        plain = _data_parallel(config, problem, ranks)
    except PlanError as e:
        plain, refusal = None, e
    if plain is not None and cluster.name == "local":
        return plain
    try:
        best = with_report(find_plan(problem, parse_fixes([])), problem)
        best.check(config, ranks)
    except PlanError as e:
        if plain is None:
            raise refusal or e from None
        return plain
    best = replace(best, alternatives=(best.alternatives or ())[:2])
    if plain is None or plain.predicted is None or best.predicted is None:
        return best
    return best if best.predicted["seconds"] <= _WORTH_IT * plain.predicted["seconds"] else plain


def problem_of_run(
    config: Config, cluster: Cluster, precision: Precision | None = None, context: float = 0.0
) -> PlanProblem:
    """The planning problem of a run."""
    spec = ModelSpec.from_config(config.model).with_context(context)
    precision, together = precision or default_precision(cluster), config.sequences_together
    problem = PlanProblem(
        spec, cluster, config.train.global_batch, precision, together=together, needs_norm=config.needs_norm
    )
    return problem.with_engine(own_engine(config.train.deterministic))


def _data_parallel(config: Config, problem: PlanProblem, ranks: int) -> Plan | None:
    """A replica on every rank, judged; None if it does not fit. Raises PlanError if the batch is not divisible."""
    plan = Plan(mesh=Mesh(data=ranks), precision=problem.precision)
    plan.check(config, ranks)
    judged = judge(plan, problem)
    assert judged.predicted is not None
    return judged if judged.predicted["peak_bytes"] <= problem.cluster.usable else None


# ---- plans as a user would write them: one mode and one recomputation for all units, no search ----

_Mode = Literal["replicate", "keep", "zero3"]
_Recompute = Literal["none", "selective", "full"]


class _Choice(NamedTuple):
    mode: _Mode
    recompute: _Recompute
    host: bool = False
    """Optimizer state and activations in host memory."""


_FEW = (
    _Choice("zero3", "full"),
    _Choice("zero3", "full", True),
    _Choice("zero3", "none"),
    _Choice("keep", "selective"),
)
_MODES: tuple[_Mode, ...] = ("replicate", "keep", "zero3")
_RECOMPUTE: tuple[_Recompute, ...] = ("none", "selective", "full")
_MANY = tuple(_Choice(mode, recompute) for mode in _MODES for recompute in _RECOMPUTE)


def uniform_plans(
    problem: PlanProblem, most: int, constraints: Constraints | None = None, *, few: bool = False
) -> Iterator[Plan]:
    """At most `most` judged plans (with `misfit` if they do not fit), the most common first; `few`: four choices per mesh."""
    count, constraints = 0, constraints or Constraints({})
    choices = [c for c in (_FEW if few else (*_MANY, _FEW[1])) if _allowed(c, problem, constraints)]
    for size, mesh in product((1, 2, 4), _meshes(problem, constraints)):  # size: sequences of a micro-batch
        sequences, rest = divmod(problem.global_batch, mesh.batch_ways)
        if rest or sequences % size or (mesh.pipe > 1 and sequences // size < mesh.pipe):
            continue
        if not constraints.allows(micro_batches=sequences // size, micro_batch_size=size):
            continue
        tried = set()
        for choice in choices:
            if mesh.data == 1 and constraints.get("mode") is None:  # no replicas to shard over
                choice = choice._replace(mode="replicate")
            if choice in tried:
                continue
            if count == most:
                return
            tried.add(choice)
            judged = _judged(problem, constraints, mesh, sequences // size, choice)
            if judged is not None:
                count += 1
                yield judged


def _allowed(choice: _Choice, problem: PlanProblem, constraints: Constraints) -> bool:
    place = "host" if choice.host else "device"
    return not (choice.host and problem.on_cpu) and constraints.allows(
        mode=choice.mode, recompute=choice.recompute, optimizer=place, activations=place
    )


def _meshes(problem: PlanProblem, constraints: Constraints) -> list[Mesh]:
    """Meshes of all ranks: data only, then with columns inside a node, with a pipeline, and with both."""
    cluster = problem.cluster
    ranks, layers = min(cluster.ranks, constraints.max_ranks or cluster.ranks), problem.spec.layers - 2
    columns = [1, *(n for n in (8, 4, 2) if cluster.devices % n == 0 and problem.heads % n == 0)]
    pipes = [1, *(n for n in (8, 4, 2, 16) if ranks % n == 0 and n <= layers)]
    if constraints.needs_pipeline:
        pipes.remove(1)
    meshes = [Mesh(pipe=p, data=ranks // p // c, col=c) for p, c in product(pipes, columns) if ranks % (p * c) == 0]
    return sorted((m for m in meshes if constraints.allows(**m.degrees)), key=lambda m: (m.pipe > 1) + (m.col > 1))


def _judged(
    problem: PlanProblem, constraints: Constraints, mesh: Mesh, micro_batches: int, choice: _Choice
) -> Plan | None:
    place = "host" if choice.host else "device"
    fixed = {k: constraints.fixed[k] for k in ("waves", "stages_per_rank") if k in constraints.fixed}
    keep = constraints.get("keep", "none")
    data: dict[str, Any] = {
        "mesh": mesh.degrees,
        "batch": {"micro_batches": micro_batches},
        "pipeline": fixed | {"schedule": constraints.schedule or "1f1b"} if mesh.pipe > 1 else {},
        "tensor": {"flow": constraints.get("flow", "auto")},
        "unit": [{"match": "*", "mode": choice.mode, "recompute": choice.recompute}],
        "memory": {"optimizer": place, "activations": place, "moments": problem.moments},
    }
    if keep != "none":
        data["tensor"]["keep"] = ["weights", "inputs", "gradients"] if keep == "all" else [keep]
    try:
        return judge(replace(Plan.from_dict(data), precision=problem.precision), problem)
    except FourfoldError:  # this model does not support this mesh
        return None
