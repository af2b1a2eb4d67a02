"""A plan as options of other systems, with a list of what the other system cannot express.

torchtitan: command-line overrides (and the schedule as CSV). Megatron-LM: arguments. Neither has options per unit, so one choice
is used for all units: the fastest that is predicted to fit there. What is lost is reported, also if nothing fits. Predicted is
the translated plan: rows as data parallelism, Megatron-LM's schedule and stages, units gathered and reduced when it does.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fourfold import schema
from fourfold.errors import PlanError
from fourfold.plan import Pipeline, Plan, Tensor, UnitRule
from fourfold.planner.evaluate import predict
from fourfold.planner.prediction import Prediction, fits
from fourfold.planner.problem import PlanProblem, rounded
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.modes import once_a_step
from fourfold.schema import format_bytes, format_seconds

__all__ = ["ExportedPlan", "export"]

RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""From the least recomputation to the most."""


@dataclass(frozen=True)
class ExportedPlan:
    """Options for another system."""

    system: str
    options: tuple[str, ...]
    lost: tuple[str, ...] = ()
    """Parts of the plan that the other system cannot express."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that the options refer to, by name."""
    predicted: str = ""
    """Predicted time and memory in the other system."""

    def __str__(self) -> str:
        lines = [f"# {self.system}", *self.options]
        lines += [f"# predicted there: {self.predicted}"] if self.predicted else []
        lines += [f"# lost: {what}" for what in self.lost]
        return "\n".join(lines)

    def write(self) -> None:
        """Write the files."""
        for name, text in self.files.items():
            schema.write_text(Path(name), text)


def export(plan: Plan, problem: PlanProblem, system: Literal["torchtitan", "megatron"], csv: str = "") -> ExportedPlan:
    """The plan for another system. `csv`: name of the schedule's file, if one is needed."""
    if system not in ("torchtitan", "megatron"):
        raise PlanError(f"plans are exported to torchtitan and megatron; found '{system}'")
    problem = problem.of_plan(plan).with_engine(system)
    return _to_torchtitan(plan, problem, csv) if system == "torchtitan" else _to_megatron(plan, problem)


def _most_common(plan: Plan, problem: PlanProblem, name: str) -> tuple[Any, bool]:
    """The most common value of a unit rule's field over the model's units, and whether all have it."""
    counts = Counter(getattr(plan.rule_for(u.name), name) for u in problem.spec.units if u.layer > 0)
    value, count = counts.most_common(1)[0]
    return value, count == sum(counts.values())


_SEARCHED = ("mode", "recompute")
"""Fields of a unit rule of which another value is tried if the plan's does not fit."""


def _uniform_units(plan: Plan, there: Plan, problem: PlanProblem, lost: list[str]) -> dict[str, Any]:
    """One choice for all units, with which `there`, the plan on the other system, is predicted to fit.

    A mode or recomputation that all units share is kept if it fits; otherwise the fastest that fits is taken.
    """
    out: dict[str, Any] = {}
    uniform: dict[str, bool] = {}
    for name in ("mode", "reduce", "within", "split", "recompute"):
        out[name], uniform[name] = _most_common(plan, problem, name)
    for name in ("reduce", "within"):
        if not uniform[name]:
            lost.append(f"`{name}` is chosen per unit; the most common, {out[name]!r}, is used for all")
    if out["split"] > 1:
        lost.append(f"operator splitting (split = {out['split']})")
    common: tuple[str, str] = (out["mode"], out["recompute"] if out["recompute"] in RECOMPUTE else "full")
    # with a pipeline, sharded units are gathered once a step
    alternatives = () if plan.mesh.pipe > 1 else ("zero2", "zero3")
    every = [(m, r) for m in dict.fromkeys((common[0], *alternatives)) for r in dict.fromkeys((common[1], *RECOMPUTE))]
    predicted: dict[tuple[Any, Any], tuple[Prediction, bool]] = {}
    for fixed in (_SEARCHED, ("mode",), ()):  # a field that all units share changes last
        for x in every:
            if x not in predicted and all(
                x[_SEARCHED.index(n)] == common[_SEARCHED.index(n)] for n in fixed if uniform[n]
            ):
                predicted[x] = _predicted(there, problem, out, *x)
        if any(fit for _, fit in predicted.values()):
            break
    fitting = {x: p.seconds for x, (p, fit) in predicted.items() if fit}
    if fitting:
        chosen = min(fitting, key=lambda x: (rounded(fitting[x]), x != common))
    else:
        chosen = min(predicted, key=lambda x: predicted[x][0].peak.peak)
    found, fit = predicted[chosen]
    why = "with which the plan fits" if fit else "with which the plan needs the least memory"
    for name, value, wanted in zip(_SEARCHED, chosen, common, strict=True):
        if value != wanted:
            lost.append(f"`{name}` as chosen; {value!r}, {why}, is used for all")
        elif not uniform[name] or value != out[name]:
            lost.append(f"`{name}` as chosen; the most common, {value!r}, is used for all")
    need, limit = format_bytes(found.peak.peak), format_bytes(problem.cluster.usable)
    if not fit:
        lost.append(f"the memory limit: with these options a device needs about {need} and has {limit}")
    says = f"{format_seconds(found.seconds)} a step, {need} of {limit} on a device" + (
        "" if fit else ", which does not fit"
    )
    return out | {"mode": chosen[0], "recompute": chosen[1], "host_state": found.host_state, "predicted": says}


def _predicted(
    there: Plan, problem: PlanProblem, units: dict[str, Any], mode: Any, recompute: Any
) -> tuple[Prediction, bool]:
    """The prediction with this mode and recomputation for all units, and whether it fits."""
    reduce, mesh, titan = units["reduce"], there.mesh, problem.engine.name == "torchtitan"
    if titan and mesh.pipe * mesh.col > 1 and mode == "replicate":  # state is sharded there
        mode = "zero2"
    if mesh.pipe > 1:  # parameters and gradients of a stage are whole during a step
        mode, reduce = mode if mode == "replicate" else "keep", "step"
    elif titan:  # every micro-batch gathers and reduces
        mode, reduce = "zero2" if mode == "keep" else mode, "micro-batch"
    rule = UnitRule(match="*", mode=mode, reduce=reduce, within=units["within"], recompute=recompute)
    found = predict(replace(there, unit=(rule,)), problem)
    return found, fits(found.memory, problem.cluster, problem.cluster.usable)


def _without_rows(plan: Plan, optimizer: Literal["device", "host", "auto"]) -> Plan:
    """The plan without what neither system has: rows and depth, which become data parallelism, kept tensors, activations on the
    host."""
    mesh = plan.mesh
    return replace(
        plan,
        mesh=replace(mesh, data=mesh.data * mesh.depth * mesh.row, depth=1, row=1),
        tensor=Tensor(residual=plan.tensor.residual, overlap=plan.tensor.overlap),
        memory=replace(plan.memory, activations="device", optimizer=optimizer, device_state=""),
    )


def _common_losses(plan: Plan, lost: list[str]) -> None:
    if plan.mesh.row > 1 or plan.mesh.depth > 1:
        lost.append(
            f"the grid's rows and depth ({plan.mesh.row} × {plan.mesh.depth}): they become data parallelism, "
            "so activations and weights are distributed differently"
        )
    if plan.pipeline.executor == "message-driven":
        lost.append("the message-driven executor")
    if plan.precision.compute == "fp64":
        lost.append("fp64: fp32 is used")
    if plan.precision.matmul == "fp8":
        lost.append("matmuls in fp8: bf16 is used; both systems have recipes of their own")
    if plan.memory.moments != "fp32":
        lost.append(f"the optimizer's moments in {plan.memory.moments}: fp32 is used")


# ---- torchtitan: command-line overrides, and the schedule as CSV where torchtitan has none of that name ----


def _to_torchtitan(plan: Plan, problem: PlanProblem, csv: str) -> ExportedPlan:
    lost: list[str] = []
    units = _uniform_units(plan, _without_rows(plan, "device"), problem, lost)
    _common_losses(plan, lost)
    mesh, batch = plan.mesh, problem.global_batch
    replicas = mesh.data * mesh.depth * mesh.row
    shard = 1 if units["mode"] == "replicate" else units["within"] or replicas
    if shard == 1 and mesh.pipe * mesh.col > 1:  # replicas are DDP there, which excludes other dimensions and bf16
        shard = replicas
        if replicas > 1:
            lost.append("replicas together with pipelines or columns: state is sharded there")
        elif plan.precision.compute == "bf16":
            lost.append("bf16 compute without replicas: mixed precision needs FSDP there; set training.dtype")
    options = {
        "parallelism.pipeline_parallel_degree": mesh.pipe,
        "parallelism.tensor_parallel_degree": mesh.col,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": replicas // shard,
        "parallelism.fsdp_reshard_after_forward": "always" if units["mode"] == "zero3" else "never",
        "training.local_batch_size": plan.micro_batch_size(batch) * (plan.micro_batches(batch) if mesh.pipe > 1 else 1),
        "training.global_batch_size": batch,
        "training.seq_len": problem.spec.seq_len,
        "activation_checkpoint.mode": {"none": "none", "selective": "selective"}.get(units["recompute"], "full"),
    }
    files: dict[str, str] = {}
    if mesh.pipe > 1:
        options["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch_size(batch)
        _torchtitan_pipeline(plan, problem, csv, options, files, lost)
        if units["mode"] in ("zero2", "zero3") or units["reduce"] == "micro-batch":
            lost.append("sharding under the pipeline: parameters and gradients of a stage stay whole for a step there")
    elif plan.micro_batches(batch) > 1 and _kept_across_micro_batches(plan, problem):
        lost.append("tensors kept across micro-batches: each micro-batch gathers and reduces again")
    if plan.memory.optimizer != "device" or plan.memory.activations != "device":
        lost.append("optimizer state or activations on the host (its offload also moves parameters and gradients)")
    options["training.mixed_precision_param"] = {"bf16": "bfloat16"}.get(plan.precision.compute, "float32")
    options["training.mixed_precision_reduce"] = "float32"
    if plan.precision.reduce == "bf16":
        lost.append("gradients reduced in bf16: it supports float32 only")
    flags = tuple(f"--{k} {shlex.quote(str(v))}" for k, v in options.items())
    return ExportedPlan("torchtitan", flags, tuple(lost), files, units["predicted"])


def _kept_across_micro_batches(plan: Plan, problem: PlanProblem) -> bool:
    """Whether a unit's parameters or whole gradients are kept from one micro-batch to the next."""
    return any(
        once_a_step(r.mode, "step") or r.reduce == "step" for r in (plan.rule_for(u.name) for u in problem.spec.units)
    )


def _torchtitan_pipeline(
    plan: Plan, problem: PlanProblem, csv: str, options: dict[str, Any], files: dict[str, str], lost: list[str]
) -> None:
    """The schedule, by name or as CSV, the placement of its stages, and their layers.

    torchtitan places stages by the schedule's name, even if a CSV lists the ops: one per rank (1F1B), two in a V
    (ZBVZeroBubble), or stage s on rank s mod p (PipelineScheduleMulti).
    """
    ranks, micro = plan.mesh.pipe, plan.micro_batches(problem.global_batch)
    schedule = schedule_of_plan(plan, micro, layers=problem.spec.layers)
    each, rest = divmod(schedule.stages, ranks)
    loop = tuple(s % ranks for s in range(schedule.stages))
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
    name = names.get(plan.pipeline.schedule, "")
    if name == "Interleaved1F1B" and micro % max(1, micro // ranks):  # torchtitan requires equal rounds
        name = ""
    if not name:
        file = csv or f"{Path(plan.pipeline.schedule).stem}.csv"
        files[file] = schedule.to_csv()
        options["parallelism.pipeline_parallel_schedule_csv"] = file
        name = "PipelineScheduleMulti"
        if schedule.placement == tuple(range(ranks)):
            name = "1F1B"
        elif schedule.placement == (*range(ranks), *reversed(range(ranks))):
            name = "ZBVZeroBubble"
        elif rest or schedule.placement != loop:
            lost.append(
                f"{each} stages on every rank, placed {list(schedule.placement)}: torchtitan places stage s on rank "
                "s mod p, or two per rank in a V, and cannot run this schedule"
            )
    options["parallelism.pipeline_parallel_schedule"] = name
    layers = problem.spec.layers  # torchtitan also counts the embedding and the head as one layer each
    if each > 2:  # by default it makes two stages per rank
        size = -(-layers // schedule.stages)
        if -(-layers // size) == schedule.stages:
            options["parallelism.pipeline_parallel_layers_per_stage"] = size
        else:
            lost.append(f"{each} stages on every rank: set module_fqns_per_model_part by hand, or it makes two")
    few, more = divmod(layers, schedule.stages)
    theirs = [few + (s < more) - (s == 0) - (s == schedule.stages - 1) for s in range(schedule.stages)]
    if isinstance(plan.pipeline.layers, tuple) and list(plan.pipeline.layers) != theirs:
        lost.append(
            f"layers of every stage {list(plan.pipeline.layers)}: it takes {theirs}, unless module_fqns_per_model_part "
            "is set by hand"
        )


# ---- Megatron-LM: arguments ----


def _to_megatron(plan: Plan, problem: PlanProblem) -> ExportedPlan:
    lost: list[str] = []
    there, stages, pipeline_lost = _without_rows(plan, plan.memory.optimizer), [], []  # type: ignore[var-annotated]
    if plan.mesh.pipe > 1:
        there = replace(there, pipeline=_megatron_pipeline(plan, problem, stages, pipeline_lost))
    units = _uniform_units(plan, there, problem, lost)
    on_host = units["host_state"] > 0
    _common_losses(plan, lost)
    mesh, batch = plan.mesh, problem.global_batch
    replicas = mesh.data * mesh.depth * mesh.row
    options = [
        f"--tensor-model-parallel-size {mesh.col}",
        f"--pipeline-model-parallel-size {mesh.pipe}",
        f"--micro-batch-size {plan.micro_batch_size(batch)}",
        f"--global-batch-size {batch}",
        f"--seq-length {problem.spec.seq_len}",
    ]
    if mesh.col > 1 and plan.tensor.residual == "sequence":
        options.append("--sequence-parallel")
    if plan.precision.compute == "bf16":
        options += ["--bf16"] + (["--grad-reduce-in-bf16"] if plan.precision.reduce == "bf16" else [])
    strategy = {"zero3": "optim_grads_params", "keep": "optim_grads", "zero2": "optim_grads"}.get(units["mode"])
    if strategy and mesh.pipe == 1:
        options += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        options += ["--use-distributed-optimizer", "--ckpt-format fsdp_dtensor"]
        if strategy == "optim_grads":
            lost.append("parameters gathered once a step: it holds whole parameters all the time")
    elif strategy or on_host:  # an optimizer on the host needs it
        options.append("--use-distributed-optimizer")
    if strategy and mesh.pipe > 1:
        lost.append(f"mode = {units['mode']!r} under the pipeline: only optimizer state is sharded there")
    if units["mode"] != "replicate" and units["within"]:
        options.append(f"--num-distributed-optimizer-instances {replicas // units['within']}")
    if units["recompute"] == "selective":
        options.append("--recompute-activations")
        lost.append("selective recomputation: there it recomputes attention's core, here all but matmuls and attention")
    elif units["recompute"] in ("full", "per-slice"):
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    options, lost = options + stages, lost + pipeline_lost
    if on_host:
        share = f"--optimizer-offload-fraction {units['host_state']:.2f}"
        options.append(f"--optimizer-cpu-offload {share} --use-precision-aware-optimizer")
        lost.append("the streamed update: its optimizer runs on the CPU")
    if plan.memory.activations != "device":
        lost.append("activations on the host")
    return ExportedPlan("Megatron-LM", tuple(options), tuple(lost), predicted=units["predicted"])


def _megatron_pipeline(plan: Plan, problem: PlanProblem, options: list[str], lost: list[str]) -> Pipeline:
    """The schedule and the layers of every rank there: Megatron-LM refuses virtual stages of unequal size."""
    ranks, layers, wanted = plan.mesh.pipe, problem.spec.layers - 2, plan.pipeline.stages_per_rank
    schedule, layers_of_stages = plan.pipeline.schedule, plan.pipeline.layers
    given = list(layers_of_stages) if isinstance(layers_of_stages, tuple) else []
    per_rank, rest = divmod(layers, ranks)
    equal = not rest and len(set(given)) <= 1
    uneven = plan.micro_batches(problem.global_batch) % ranks
    if schedule == "interleaved":
        counts = [] if rest or uneven else [n for n in range(2, per_rank + 1) if per_rank % n == 0]
        if counts:
            count = min(counts, key=lambda n: abs(n - wanted))
            options.append(f"--num-layers-per-virtual-pipeline-stage {per_rank // count}")
            if count != wanted or not equal:
                lost.append(
                    f"{wanted} stages on every rank of {given or 'unequal'} layers: Megatron-LM refuses these; the nearest "
                    f"it accepts is {count} of {per_rank // count} layers"
                )
            return Pipeline(
                schedule="interleaved", stages_per_rank=count, layers=(per_rank // count,) * (ranks * count)
            )
        lost.append(
            "schedule 'interleaved': Megatron-LM refuses "
            + (
                f"micro-batches that are no multiple of {ranks}"
                if uneven
                else f"{layers} layers on {ranks} ranks unless equal"
            )
            + "; 1F1B runs instead"
        )
        given = []
    elif schedule != "1f1b":
        lost.append(f"schedule '{schedule}', and its layers of every stage: 1F1B runs instead, with its own")
        given = []
    first = last = each = per_rank
    if not equal:
        if len(given) == ranks and len(set(given[1:-1])) <= 1 and given[0] and given[-1]:
            first, last = given[0], given[-1]  # only the first and the last may differ
            each = given[1] if ranks > 2 else each
        else:
            most = -(-layers // ranks)
            each = most if layers > most * (ranks - 1) else per_rank
            first, last = each, layers - each * (ranks - 1)
            if given:
                lost.append(
                    f"layers of every stage {given}: only the first and the last can differ there; the nearest is taken"
                )
        if (first, last) != (per_rank, per_rank):
            options += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
    there = (first, *[each] * (ranks - 2), last)
    return Pipeline(schedule="1f1b", layers=there if all(there) else "auto")  # more ranks than layers
