"""A plan as options of other systems, each with what is lost in translation.

torchtitan: command-line overrides (and the schedule as CSV). Megatron-LM: arguments. Neither has a choice per unit, so the
commonest one is taken and the rest is said to be lost.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.planner.layout import Setting

__all__ = ["Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """Options for another system."""

    system: str
    options: tuple[str, ...]
    lost: tuple[str, ...] = ()
    """What of the plan the other system cannot do."""
    files: dict[str, str] = field(default_factory=dict)
    """Files the options refer to, by name."""

    def __str__(self) -> str:
        lines = [f"# {self.system}", *self.options]
        lines += [f"# lost: {what}" for what in self.lost]
        for name, text in self.files.items():
            rows = text.strip().splitlines()
            lines += [f"# file {name}: {len(rows)} rows", *rows[:4], *(["…"] if len(rows) > 4 else [])]
        return "\n".join(lines)


def export(plan: Plan, setting: Setting, system: Literal["torchtitan", "megatron"]) -> Exported:
    """The plan for another system."""
    if system == "torchtitan":
        return _torchtitan(plan, setting)
    if system == "megatron":
        return _megatron(plan, setting)
    raise PlanError(f"plans are exported to torchtitan and megatron; found '{system}'")


def _commonest(plan: Plan, setting: Setting, name: str) -> tuple[Any, bool]:
    """The commonest value of a unit rule's field over the model's units, and whether all have it."""
    counts = Counter(getattr(plan.rule_for(u.name), name) for u in setting.spec.units if u.layer > 0)
    value, count = counts.most_common(1)[0]
    return value, count == sum(counts.values())


def _units(plan: Plan, setting: Setting, lost: list[str]) -> dict[str, Any]:
    out = {}
    for name in ("mode", "reduce", "within", "split", "recompute"):
        out[name], alike = _commonest(plan, setting, name)
        if not alike:
            lost.append(f"`{name}` is chosen unit by unit; the commonest, {out[name]!r}, is taken for all")
    if out["split"] > 1:
        lost.append(f"operator splitting (split = {out['split']})")
    return out


def _common_losses(plan: Plan, lost: list[str]) -> None:
    if plan.mesh.row > 1 or plan.mesh.depth > 1:
        lost.append(
            f"the grid's rows and depth ({plan.mesh.row} × {plan.mesh.depth}): they become data parallelism, "
            "so activations and weights lie differently"
        )
    if plan.pipeline.executor == "message-driven":
        lost.append("the message-driven executor")


def _torchtitan(plan: Plan, setting: Setting) -> Exported:
    lost: list[str] = []
    units = _units(plan, setting, lost)
    _common_losses(plan, lost)
    mesh, batch = plan.mesh, setting.global_batch
    replicas = mesh.data * mesh.depth * mesh.row
    shard = 1 if units["mode"] == "replicate" else units["within"] or replicas
    options = {
        "parallelism.pipeline_parallel_degree": mesh.pipe,
        "parallelism.tensor_parallel_degree": mesh.col,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": replicas // shard,
        "parallelism.fsdp_reshard_after_forward": "always" if units["mode"] == "zero3" else "never",
        "training.local_batch_size": plan.micro_batch_size(batch) * (plan.micro_batches(batch) if mesh.pipe > 1 else 1),
        "training.global_batch_size": batch,
        "training.seq_len": setting.spec.seq_len,
        "activation_checkpoint.mode": {"none": "none", "selective": "selective"}.get(units["recompute"], "full"),
    }
    files = {}
    if mesh.pipe > 1:
        options["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch_size(batch)
        names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
        if plan.pipeline.schedule in names:
            options["parallelism.pipeline_parallel_schedule"] = names[plan.pipeline.schedule]
        else:
            from fourfold.program.from_plan import schedule_of_plan

            name = f"{plan.pipeline.schedule}.csv"
            files[name] = schedule_of_plan(plan, plan.micro_batches(batch), layers=setting.spec.layers).to_csv()
            options["parallelism.pipeline_parallel_schedule"] = "PipelineScheduleMulti"
            options["parallelism.pipeline_parallel_schedule_csv"] = name
        if isinstance(plan.pipeline.layers, tuple) and len(set(plan.pipeline.layers)) > 1:
            lost.append(f"layers of every stage {list(plan.pipeline.layers)}: set module_fqns_per_model_part by hand")
        if units["mode"] in ("zero2", "zero3") or units["reduce"] == "micro-batch":
            lost.append("sharding under the pipeline: parameters and gradients of a stage stay whole for a step there")
    elif plan.micro_batches(batch) > 1:
        lost.append("what is kept over micro-batches: each one gathers and reduces anew")
    if plan.memory.optimizer != "device" or plan.memory.activations != "device":
        lost.append("optimizer state or activations on the host (its offload moves parameters and gradients, too)")
    options["training.mixed_precision_param"] = {"bf16": "bfloat16"}.get(plan.precision.compute, "float32")
    options["training.mixed_precision_reduce"] = "float32"
    return Exported("torchtitan", tuple(f"--{k} {shlex.quote(str(v))}" for k, v in options.items()), tuple(lost), files)


def _megatron(plan: Plan, setting: Setting) -> Exported:
    lost: list[str] = []
    units = _units(plan, setting, lost)
    _common_losses(plan, lost)
    mesh, batch = plan.mesh, setting.global_batch
    replicas = mesh.data * mesh.depth * mesh.row
    options = [
        f"--tensor-model-parallel-size {mesh.col}",
        f"--pipeline-model-parallel-size {mesh.pipe}",
        f"--micro-batch-size {plan.micro_batch_size(batch)}",
        f"--global-batch-size {batch}",
        f"--seq-length {setting.spec.seq_len}",
    ]
    if mesh.col > 1 and plan.tensor.residual == "sequence":
        options.append("--sequence-parallel")
    if plan.precision.compute == "bf16":
        options.append("--bf16")
    strategy = {"zero3": "optim_grads_params", "keep": "optim_grads", "zero2": "optim_grads"}.get(units["mode"])
    if strategy and mesh.pipe == 1:
        options += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        if strategy == "optim_grads":
            lost.append("gathered parameters are kept, their shards are not: it holds whole parameters all the time")
    elif strategy:
        options.append("--use-distributed-optimizer")
        lost.append(f"mode = {units['mode']!r} under the pipeline: only optimizer state is sharded there")
    if units["mode"] != "replicate" and units["within"]:
        options.append(f"--num-distributed-optimizer-instances {replicas // units['within']}")
    if units["recompute"] == "selective":
        options.append("--recompute-activations")
        lost.append(
            "selective recomputation: there it recomputes attention's core, here all but products and attention"
        )
    elif units["recompute"] in ("full", "per-slice"):
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    match plan.pipeline.schedule:
        case "interleaved":
            layers = setting.spec.layers - 2
            each = layers // (mesh.pipe * plan.pipeline.stages_per_rank)
            options.append(f"--num-layers-per-virtual-pipeline-stage {each}")
        case "1f1b":
            pass
        case other if mesh.pipe > 1:
            lost.append(f"schedule '{other}': 1F1B runs instead")
    if isinstance(plan.pipeline.layers, tuple) and len(set(plan.pipeline.layers)) > 1:
        lost.append(
            f"layers of every stage {list(plan.pipeline.layers)}: only the first and last stage can differ there"
        )
    if plan.memory.optimizer != "device":
        options.append("--optimizer-cpu-offload")
        lost.append("the streamed update: its optimizer runs on the CPU")
    if plan.memory.activations != "device":
        lost.append("activations on the host")
    return Exported("Megatron-LM", tuple(options), tuple(lost))
