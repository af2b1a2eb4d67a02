"""A plan as torchtitan's command-line overrides, and its schedule as CSV where torchtitan has none of that name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from fourfold.plan import Plan
from fourfold.planner.export import ExportedPlan, common_losses, uniform_units
from fourfold.planner.problem import PlanProblem
from fourfold.program.from_plan import schedule_of_plan

__all__ = ["to_torchtitan"]


def to_torchtitan(plan: Plan, problem: PlanProblem, csv: str) -> ExportedPlan:
    lost: list[str] = []
    units = uniform_units(plan, problem, lost, "device")
    common_losses(plan, lost)
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
        _pipeline(plan, problem, csv, options, files, lost)
        if units["mode"] in ("zero2", "zero3") or units["reduce"] == "micro-batch":
            lost.append("sharding under the pipeline: parameters and gradients of a stage stay whole for a step there")
    elif plan.micro_batches(batch) > 1:
        lost.append("what is kept across micro-batches: each one gathers and reduces again")
    if plan.memory.optimizer != "device" or plan.memory.activations != "device":
        lost.append("optimizer state or activations on the host (its offload also moves parameters and gradients)")
    options["training.mixed_precision_param"] = {"bf16": "bfloat16"}.get(plan.precision.compute, "float32")
    options["training.mixed_precision_reduce"] = "float32"
    if plan.precision.reduce == "bf16":
        lost.append("gradients reduced in bf16: it supports float32 only")
    flags = tuple(f"--{k} {shlex.quote(str(v))}" for k, v in options.items())
    return ExportedPlan("torchtitan", flags, tuple(lost), files, units["predicted"])


def _pipeline(
    plan: Plan, problem: PlanProblem, csv: str, options: dict[str, Any], files: dict[str, str], lost: list[str]
) -> None:
    """The schedule, by name or as CSV, the placement of its stages, and their layers.

    torchtitan places stages by the schedule's name, also where a CSV has the ops: one a rank (1F1B), two in a V
    (ZBVZeroBubble), or stage s on rank s mod p (PipelineScheduleMulti).
    """
    ranks, micro = plan.mesh.pipe, plan.micro_batches(problem.global_batch)
    schedule = schedule_of_plan(plan, micro, layers=problem.spec.layers)
    each, rest = divmod(schedule.stages, ranks)
    loop = tuple(s % ranks for s in range(schedule.stages))
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
    name = names.get(plan.pipeline.schedule, "")
    if name == "Interleaved1F1B" and micro % max(1, micro // ranks):  # rounds must be equal there
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
                "s mod p, or two a rank in a V, and cannot run this schedule"
            )
    options["parallelism.pipeline_parallel_schedule"] = name
    layers = problem.spec.layers  # the embedding and the head count as one layer each there, too
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
