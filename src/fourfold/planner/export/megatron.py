"""A plan as Megatron-LM's arguments."""

from __future__ import annotations

from fourfold.plan import Plan
from fourfold.planner.export import ExportedPlan, common_losses, uniform_units
from fourfold.planner.problem import PlanProblem

__all__ = ["to_megatron"]


def to_megatron(plan: Plan, problem: PlanProblem) -> ExportedPlan:
    lost: list[str] = []
    units = uniform_units(plan, problem, lost, plan.memory.optimizer)
    on_host = units["host_state"] > 0
    common_losses(plan, lost)
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
    if mesh.pipe > 1:
        _pipeline(plan, problem, options, lost)
    if on_host:
        share = f"--optimizer-offload-fraction {units['host_state']:.2f}"
        options.append(f"--optimizer-cpu-offload {share} --use-precision-aware-optimizer")
        lost.append("the streamed update: its optimizer runs on the CPU")
    if plan.memory.activations != "device":
        lost.append("activations on the host")
    return ExportedPlan("Megatron-LM", tuple(options), tuple(lost), predicted=units["predicted"])


def _pipeline(plan: Plan, problem: PlanProblem, options: list[str], lost: list[str]) -> None:
    """The schedule and the layers of every rank: Megatron-LM refuses virtual stages of unequal size."""
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
        given = []
    elif schedule != "1f1b":
        lost.append(f"schedule '{schedule}', and its layers of every stage: 1F1B runs instead, with its own")
        given = []
    if equal:
        return
    if (
        len(given) == ranks and len(set(given[1:-1])) <= 1 and given[0] and given[-1]
    ):  # the first and the last may differ
        first, last = given[0], given[-1]
    else:
        most = -(-layers // ranks)
        each = most if layers > most * (ranks - 1) else per_rank
        first, last = each, layers - each * (ranks - 1)
        if given:
            lost.append(
                f"layers of every stage {given}: only the first and the last can differ there; the nearest is taken"
            )
    if (first, last) == (per_rank, per_rank):
        return
    options += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
