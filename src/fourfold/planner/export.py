"""A plan as options of other systems, each with what is lost in translation.

torchtitan: command-line overrides (and the schedule as CSV). Megatron-LM: arguments. Neither has a choice per unit, so the
commonest one is taken and the rest is said to be lost; where that no longer fits, more is recomputed, or it is said.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fourfold import schema
from fourfold.errors import PlanError
from fourfold.plan import Plan, UnitRule
from fourfold.planner.layout import Setting
from fourfold.planner.predict import fits, predict
from fourfold.schema import format_bytes

__all__ = ["Exported", "export"]

RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""The least first."""


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
        return "\n".join(lines)

    def write(self) -> None:
        """Write the files."""
        for name, text in self.files.items():
            schema.write_text(Path(name), text)


def export(plan: Plan, setting: Setting, system: Literal["torchtitan", "megatron"], csv: str = "") -> Exported:
    """The plan for another system. `csv`: name of the schedule's file, where one is needed."""
    setting = replace(setting, precision=plan.precision, moments=plan.memory.moments)
    if system == "torchtitan":
        return _torchtitan(plan, setting, csv)
    if system == "megatron":
        return _megatron(plan, setting)
    raise PlanError(f"plans are exported to torchtitan and megatron; found '{system}'")


def _commonest(plan: Plan, setting: Setting, name: str) -> tuple[Any, bool]:
    """The commonest value of a unit rule's field over the model's units, and whether all have it."""
    counts = Counter(getattr(plan.rule_for(u.name), name) for u in setting.spec.units if u.layer > 0)
    value, count = counts.most_common(1)[0]
    return value, count == sum(counts.values())


def _units(
    plan: Plan, setting: Setting, lost: list[str], optimizer: Literal["device", "host", "auto"]
) -> dict[str, Any]:
    """What all units are to do; `optimizer`: where the other system has its state."""
    out: dict[str, Any] = {}
    for name in ("mode", "reduce", "within", "split"):
        out[name], alike = _commonest(plan, setting, name)
        if not alike:
            lost.append(f"`{name}` is chosen unit by unit; the commonest, {out[name]!r}, is taken for all")
    if out["split"] > 1:
        lost.append(f"operator splitting (split = {out['split']})")
    return out | _fitting(plan, setting, out, optimizer, lost)


def _fitting(
    plan: Plan, setting: Setting, units: dict[str, Any], optimizer: Literal["device", "host", "auto"], lost: list[str]
) -> dict[str, Any]:
    """What all units are to recompute, so that what is left of the plan fits by the planner's account; and the share of the
    optimizer's state that is on the host then."""
    commonest, alike = _commonest(plan, setting, "recompute")
    wish = commonest if commonest in RECOMPUTE else "full"
    base = UnitRule(match="*", mode=units["mode"], reduce=units["reduce"], within=units["within"])
    base = replace(base, mode="keep") if plan.mesh.pipe > 1 and base.mode == "zero3" else base
    memory = replace(plan.memory, activations="device", optimizer=optimizer, device_state="")
    for level in RECOMPUTE[RECOMPUTE.index(wish) :]:
        found = predict(replace(plan, unit=(replace(base, recompute=level),), memory=memory), setting)
        fit = fits(found.memory, setting.cluster, setting.cluster.usable)
        if fit:
            break
    if not alike or level != wish:
        why = f"the commonest, {level!r}," if level == wish else f"{level!r}, with which it fits,"
        lost.append(f"`recompute` as chosen; {why} is taken for all")
    if not fit:
        need, there = format_bytes(found.peak.peak), format_bytes(setting.cluster.usable)
        lost.append(f"what made it fit: as written here about {need} are needed on a device, which has {there}")
    return {"recompute": level, "host_state": found.host_state}


def _common_losses(plan: Plan, lost: list[str]) -> None:
    if plan.mesh.row > 1 or plan.mesh.depth > 1:
        lost.append(
            f"the grid's rows and depth ({plan.mesh.row} × {plan.mesh.depth}): they become data parallelism, "
            "so activations and weights lie differently"
        )
    if plan.pipeline.executor == "message-driven":
        lost.append("the message-driven executor")
    if plan.precision.compute == "fp64":
        lost.append("fp64: fp32 is taken")
    if plan.memory.moments != "fp32":
        lost.append(f"the optimizer's moments in {plan.memory.moments}: fp32 is taken")


def _torchtitan(plan: Plan, setting: Setting, csv: str) -> Exported:
    lost: list[str] = []
    units = _units(plan, setting, lost, "device")
    _common_losses(plan, lost)
    mesh, batch = plan.mesh, setting.global_batch
    replicas = mesh.data * mesh.depth * mesh.row
    shard = 1 if units["mode"] == "replicate" else units["within"] or replicas
    if shard == 1 and mesh.pipe * mesh.col > 1:  # its copies are DDP's, which it has in one dimension and without bf16
        shard = replicas
        if replicas > 1:
            lost.append("whole copies beside pipelines or columns: state is sharded there")
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
        "training.seq_len": setting.spec.seq_len,
        "activation_checkpoint.mode": {"none": "none", "selective": "selective"}.get(units["recompute"], "full"),
    }
    files: dict[str, str] = {}
    if mesh.pipe > 1:
        options["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch_size(batch)
        _torchtitan_pipeline(plan, setting, csv, options, files, lost)
        if units["mode"] in ("zero2", "zero3") or units["reduce"] == "micro-batch":
            lost.append("sharding under the pipeline: parameters and gradients of a stage stay whole for a step there")
    elif plan.micro_batches(batch) > 1:
        lost.append("what is kept over micro-batches: each one gathers and reduces anew")
    if plan.memory.optimizer != "device" or plan.memory.activations != "device":
        lost.append("optimizer state or activations on the host (its offload moves parameters and gradients, too)")
    options["training.mixed_precision_param"] = {"bf16": "bfloat16"}.get(plan.precision.compute, "float32")
    options["training.mixed_precision_reduce"] = "float32"
    if plan.precision.reduce == "bf16":
        lost.append("gradients reduced in bf16: float32 is all it takes")
    return Exported("torchtitan", tuple(f"--{k} {shlex.quote(str(v))}" for k, v in options.items()), tuple(lost), files)


def _torchtitan_pipeline(
    plan: Plan, setting: Setting, csv: str, options: dict[str, Any], files: dict[str, str], lost: list[str]
) -> None:
    """The schedule, by name or as CSV, its stages' places, and their layers.

    torchtitan places stages by the schedule's name, also where a CSV has the ops: one a rank (1F1B), two in a V
    (ZBVZeroBubble), or stage s on rank s mod p (PipelineScheduleMulti).
    """
    from fourfold.program.from_plan import schedule_of_plan

    ranks, micro = plan.mesh.pipe, plan.micro_batches(setting.global_batch)
    schedule = schedule_of_plan(plan, micro, layers=setting.spec.layers)
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
    deal = setting.spec.layers  # the embedding and the head count as one layer each there, too
    if each > 2:  # unless told, it makes two of a rank's layers
        size = -(-deal // schedule.stages)
        if -(-deal // size) == schedule.stages:
            options["parallelism.pipeline_parallel_layers_per_stage"] = size
        else:
            lost.append(f"{each} stages on every rank: set module_fqns_per_model_part by hand, or it makes two")
    few, more = divmod(deal, schedule.stages)
    theirs = [few + (s < more) - (s == 0) - (s == schedule.stages - 1) for s in range(schedule.stages)]
    if isinstance(plan.pipeline.layers, tuple) and list(plan.pipeline.layers) != theirs:
        lost.append(
            f"layers of every stage {list(plan.pipeline.layers)}: it takes {theirs}, unless module_fqns_per_model_part "
            "is set by hand"
        )


def _megatron(plan: Plan, setting: Setting) -> Exported:
    lost: list[str] = []
    units = _units(plan, setting, lost, plan.memory.optimizer)
    away = units["host_state"] > 0
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
        options += ["--bf16"] + (["--grad-reduce-in-bf16"] if plan.precision.reduce == "bf16" else [])
    strategy = {"zero3": "optim_grads_params", "keep": "optim_grads", "zero2": "optim_grads"}.get(units["mode"])
    if strategy and mesh.pipe == 1:
        options += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        options += ["--use-distributed-optimizer", "--ckpt-format fsdp_dtensor"]
        if strategy == "optim_grads":
            lost.append("gathered parameters are kept, their shards are not: it holds whole parameters all the time")
    elif strategy or away:  # which an optimizer on the host needs
        options.append("--use-distributed-optimizer")
    if strategy and mesh.pipe > 1:
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
    if mesh.pipe > 1:
        _megatron_pipeline(plan, setting, options, lost)
    if away:
        share = f"--optimizer-offload-fraction {units['host_state']:.2f}"
        options.append(f"--optimizer-cpu-offload {share} --use-precision-aware-optimizer")
        lost.append("the streamed update: its optimizer runs on the CPU")
    if plan.memory.activations != "device":
        lost.append("activations on the host")
    return Exported("Megatron-LM", tuple(options), tuple(lost))


def _megatron_pipeline(plan: Plan, setting: Setting, options: list[str], lost: list[str]) -> None:
    """The schedule and the layers of every rank: Megatron-LM refuses virtual stages that are not equal."""
    ranks, layers, wish = plan.mesh.pipe, setting.spec.layers - 2, plan.pipeline.stages_per_rank
    schedule, dealt = plan.pipeline.schedule, plan.pipeline.layers
    told = list(dealt) if isinstance(dealt, tuple) else []
    per_rank, rest = divmod(layers, ranks)
    equal = not rest and len(set(told)) <= 1
    uneven = plan.micro_batches(setting.global_batch) % ranks
    if schedule == "interleaved":
        counts = [] if rest or uneven else [n for n in range(2, per_rank + 1) if per_rank % n == 0]
        if counts:
            count = min(counts, key=lambda n: abs(n - wish))
            options.append(f"--num-layers-per-virtual-pipeline-stage {per_rank // count}")
            if count != wish or not equal:
                lost.append(
                    f"{wish} stages on every rank of {told or 'unequal'} layers: Megatron-LM refuses unequal ones; the nearest "
                    f"it accepts is {count} of {per_rank // count} layers"
                )
            return
        lost.append(
            "schedule 'interleaved': Megatron-LM refuses "
            + (
                f"micro-batches that are no multiple of {ranks}"
                if uneven
                else f"{layers} layers on {ranks} ranks unless equal"
            )
            + "; 1F1B runs instead"
        )
        told = []
    elif schedule != "1f1b":
        lost.append(f"schedule '{schedule}', and its layers of every stage: 1F1B runs instead, with its own")
        told = []
    if equal:
        return
    if len(told) == ranks and len(set(told[1:-1])) <= 1 and told[0] and told[-1]:  # the first and the last may differ
        first, last = told[0], told[-1]
    else:
        most = -(-layers // ranks)
        each = most if layers > most * (ranks - 1) else per_rank
        first, last = each, layers - each * (ranks - 1)
        if told:
            lost.append(
                f"layers of every stage {told}: only the first and the last can differ there; the nearest is taken"
            )
    if (first, last) == (per_rank, per_rank):
        return
    options += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
