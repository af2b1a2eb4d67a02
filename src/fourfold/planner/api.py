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
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.config import MOST, Config
from fourfold.errors import ClusterError, FourfoldError, PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Plan, Precision, UnitRule
from fourfold.planner.build import Candidate
from fourfold.planner.engines import TrainingEngine, own_engine
from fourfold.planner.evaluate import PlanEvaluation
from fourfold.planner.grid_cost import chosen_flows
from fourfold.planner.layouts import ParallelLayout, enumerate_layouts, layout_of_plan
from fourfold.planner.prediction import Prediction
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
    cluster = _found(cluster)
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
    cluster = _found(cluster)
    _, problem = _checked(plan, PlanProblem(spec, cluster, global_batch, plan.precision).with_engine(engine))
    return PlanEvaluation(plan, problem).prediction()


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


def _found(cluster: Cluster | str) -> Cluster:
    if isinstance(cluster, str):
        return Cluster.find(cluster)
    if not isinstance(cluster, Cluster):
        raise ClusterError(f"cluster = {cluster!r}: give a Cluster, the name of a preset, or a file's name")
    return cluster


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


def judge(plan: Plan, problem: PlanProblem, *, brief: bool = False) -> Plan:
    """The same plan with the planner's prediction; if it does not fit, the field `misfit` says why.

    `brief`: without the step time under `train.deterministic = false`, which takes as long as the rest.
    """
    layout, problem = _checked(plan, problem)
    plan = replace(plan, tensor=replace(plan.tensor, flows=chosen_flows(problem, layout)))
    candidate = Candidate(layout, plan, PlanEvaluation(plan, problem).prediction())
    judged = with_report(SearchResult(candidate, (candidate,), {}), problem, 1, brief=brief)
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
    precision, together = precision or default_precision(cluster), config.sequences_together
    expands = cluster.device.kind == "cuda" and precision.compute == "bf16" and _torch_version() < (2, 12)
    spec = ModelSpec.from_config(config.model).with_context(context, expands=expands)
    problem = PlanProblem(
        spec, cluster, config.train.global_batch, precision, together=together, needs_norm=config.needs_norm
    )
    return problem.with_engine(own_engine(config.train.deterministic))


def _torch_version() -> tuple[int, ...]:
    """Of the torch that is installed here; the newest if there is none."""
    try:
        return tuple(map(int, version("torch").split(".")[:2]))
    except (PackageNotFoundError, ValueError):
        return (1 << 30,)


def _data_parallel(config: Config, problem: PlanProblem, ranks: int) -> Plan | None:
    """A replica on every rank, judged; None if it does not fit. Raises PlanError if the batch is not divisible."""
    plan = Plan(mesh=Mesh(data=ranks), precision=problem.precision)
    plan.check(config, ranks)
    judged = judge(plan, problem)
    assert judged.predicted is not None
    return judged if judged.predicted["peak_bytes"] <= problem.cluster.usable else None


# ---- plans as a user would write them: one mode and one recomputation for all units, no search ----


class _Choice(NamedTuple):
    mode: Literal["replicate", "keep", "zero3"]
    recompute: Literal["none", "selective", "full"]
    place: Literal["device", "host"] = "device"
    """Of optimizer state and activations."""


_FEW = (
    _Choice("zero3", "full"),
    _Choice("zero3", "full", "host"),
    _Choice("zero3", "none"),
    _Choice("keep", "selective"),
)
_MANY = (
    *(_Choice(mode, again) for mode in ("replicate", "keep", "zero3") for again in ("none", "selective", "full")),
    _FEW[1],
)
_SIZES, _PIPES, _COLUMNS = (1, 2, 4), (1, 8, 4, 2, 16), (1, 8, 4, 2)
"""Sequences of a micro-batch, and degrees, the most common first."""


def uniform_plans(
    problem: PlanProblem, most: int, constraints: Constraints | None = None, *, few: bool = False
) -> Iterator[Plan]:
    """At most `most` judged plans (with `misfit` if they do not fit), the most common first; `few`: four choices per mesh."""
    count, constraints = 0, constraints or Constraints({})
    for layout in _common_layouts(problem, constraints):
        replicas_only = layout.replicas == 1 and constraints.get("mode") is None  # nothing to shard over
        choices = [c._replace(mode="replicate") if replicas_only else c for c in (_FEW if few else _MANY)]
        for choice in dict.fromkeys(c for c in choices if _allowed(c, problem, constraints, replicas_only)):
            if count == most:
                return
            placed = replace(layout, optimizer=choice.place, activations=choice.place)
            rules = (UnitRule(match="*", mode=choice.mode, recompute=choice.recompute),)
            with suppress(FourfoldError):  # this model may not support this mesh
                judged = judge(placed.plan(problem, rules, None), problem, brief=True)
                count += 1
                yield judged


def _allowed(choice: _Choice, problem: PlanProblem, constraints: Constraints, replicas_only: bool) -> bool:
    mode = {} if replicas_only else {"mode": choice.mode}
    places = {"optimizer": choice.place, "activations": choice.place}
    on_host = choice.place == "host" and problem.on_cpu
    return not on_host and constraints.allows(recompute=choice.recompute, **places, **mode)


def _common_layouts(problem: PlanProblem, constraints: Constraints) -> list[ParallelLayout]:
    """Layouts of all ranks: data only, then with columns inside a node, with a pipeline, and with both."""
    cluster = problem.cluster
    ranks = min(cluster.ranks, constraints.max_ranks or cluster.ranks)
    usual = {"keep": "none", "schedule": constraints.schedule or "1f1b"}
    found: list[tuple[tuple[int, ...], ParallelLayout]] = []
    with suppress(PlanError):  # no layout
        for layout in enumerate_layouts(problem, Constraints(usual | constraints.fixed, constraints.max_ranks)):
            mesh, size = layout.mesh, layout.micro_batch_size
            common = size in _SIZES and mesh.pipe in _PIPES and mesh.col in _COLUMNS and mesh.row == 1
            if common and mesh.ranks == ranks and cluster.devices % mesh.col == 0 and layout.micro_batches >= mesh.pipe:
                order = size, (mesh.pipe > 1) + (mesh.col > 1), _PIPES.index(mesh.pipe), _COLUMNS.index(mesh.col)
                found.append((order, layout))
    return [layout for _, layout in sorted(found, key=lambda each: each[0])]
