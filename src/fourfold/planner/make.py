"""From a model and a cluster to a plan: the planner's front door.

make_plan(spec, cluster, global_batch=1024)  ->  Plan, with `predicted`, `certificate` and `alternatives` filled in
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision
from fourfold.planner.constraints import Constraints, parse_fixes
from fourfold.planner.layout import Setting
from fourfold.planner.predict import layout_of_plan, predict
from fourfold.planner.products import chosen_flows, flow_report
from fourfold.planner.search import Candidate, Found, Progress, search
from fourfold.planner.units import Choice, unit_cost
from fourfold.schema import format_bytes

__all__ = ["default_batch", "default_precision", "find_plan", "judge", "make_plan", "named_precision", "with_report"]

TOKENS = 4 * 2**20
"""Tokens of a step where no batch is given."""
COMPUTE = ("bf16", "fp32", "fp64")
MOMENTS = ("fp32", "bf16")


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
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits, with its report. Raises PlanError, saying what would fit, where there is none.

    `cluster`: one, or the name of a preset (one node), or of a file.
    `precision`: "bf16", "fp32" or "fp64"; without, bf16 on GPUs and fp32 on CPUs. `fix` decides some things beforehand:
    {"col": 4, "schedule": "wave"}, ["col=4", "schedule=wave"] or "col=4"; see docs/planning.md.
    """
    cluster = Cluster.find(cluster) if isinstance(cluster, str) else cluster
    if moments not in MOMENTS:
        raise PlanError(f"moments = {moments!r}: AdamW's moments are of type {' or '.join(map(repr, MOMENTS))}")
    for name, value in (("top", top), ("max_ranks", 1 if max_ranks is None else max_ranks)):
        schema.check_count(name, value, PlanError)
    fix = fix.split() if isinstance(fix, str) else fix
    texts = [f"{k}={v}" for k, v in fix.items()] if isinstance(fix, Mapping) else list(fix)
    wanted = parse_fixes(texts, None, max_ranks)
    setting = Setting(
        spec,
        cluster,
        global_batch or default_batch(spec, cluster, max_ranks),
        named_precision(precision) if isinstance(precision, str) else precision or default_precision(cluster),
        moments,
    )
    return with_report(find_plan(setting, wanted, top, progress), setting, top)


def find_plan(setting: Setting, wanted: Constraints, top: int = 5, progress: Progress | None = None) -> Found:
    """The search, with the question checked."""
    schema.check_count("global_batch", setting.global_batch, PlanError)
    collects = gc.isenabled()
    gc.disable()  # its many objects live to the end: looking them through takes a tenth of it
    try:
        return search(setting, wanted, progress, top)
    finally:
        if collects:
            gc.enable()


def named_precision(name: str) -> Precision:
    """Computing in this type; gradients are summed in fp32, or in fp64 for fp64."""
    if name not in COMPUTE:
        raise PlanError(f"precision = {name!r} is not one of its values{schema.nearest(name, COMPUTE)}")
    return schema.build(Precision, {"compute": name, "reduce": "fp64" if name == "fp64" else "fp32"}, error=PlanError)


def default_precision(cluster: Cluster) -> Precision:
    """bf16 on GPUs that are faster with it, else fp32."""
    d = cluster.device
    return Precision(compute="bf16" if d.kind == "cuda" and d.matrix["bf16"] > d.matrix["fp32"] else "fp32")


def default_batch(spec: ModelSpec, cluster: Cluster, max_ranks: int | None = None) -> int:
    """Sequences that make about four million tokens, a multiple of the ranks."""
    ranks = min(cluster.ranks, max_ranks or cluster.ranks)
    wish = TOKENS // spec.seq_len if cluster.device.kind == "cuda" else 8 * ranks
    return max(1, round(wish / ranks)) * ranks


def with_report(found: Found, setting: Setting, top: int = 5) -> Plan:
    """The best plan with what the search knows about it."""
    best = found.best
    predicted = best.prediction.to_dict() | {
        "model": setting.spec.name,
        "parameters": setting.spec.parameters,
        "seq_len": setting.spec.seq_len,
        "global_batch": setting.global_batch,
        "cluster": setting.cluster.name,
        "ranks": best.layout.mesh.ranks,
        "usable_bytes": setting.cluster.usable,
        "host_bytes": round(setting.cluster.host_memory),
        "price": best.price,
        "binding": binding(best),
        "break_even_tokens": round(break_even(best, setting)),
        "tokens_per_micro_batch": best.layout.micro_batch_size * setting.spec.seq_len,
        "flows": flow_report(setting, best.layout),
    }
    others = tuple(_short(c, setting.spec) for c in found.ranked[:top])
    return replace(best.plan, predicted=predicted, certificate=found.certificate, alternatives=others)


def judge(plan: Plan, setting: Setting) -> Plan:
    """A plan as it is, its own or one written by hand, with the planner's prediction; `misfit` in it says why it does not fit."""
    cluster, spec = setting.cluster, setting.spec
    if plan.mesh.ranks > cluster.ranks:
        nodes = plan.mesh.ranks if cluster.name == "local" else -(-plan.mesh.ranks // cluster.devices)
        raise PlanError(
            f"the plan's mesh is {plan.mesh.product()} ranks, but {cluster.name} has {cluster.ranks} devices; "
            f"judge it with --nodes {nodes}" + (", which are ranks here" if cluster.name == "local" else "")
        )
    ways = plan.mesh.batch_ways * (plan.batch.micro_batches or 1)
    if setting.global_batch % ways:
        raise PlanError(
            f"global batch {setting.global_batch} does not divide by data · depth · row · micro_batches = {ways}; "
            f"use {max(1, setting.global_batch // ways) * ways} sequences"
        )
    plan.check_units([u.name for u in spec.units])
    if spec.config is not None:
        plan.check_model(spec.config)
    setting = replace(setting, precision=plan.precision, moments=plan.memory.moments)
    layout = layout_of_plan(plan, setting)
    tensor = replace(plan.tensor, flows=chosen_flows(setting, layout))
    plan = replace(plan, tensor=tensor)
    candidate = Candidate(layout, plan, predict(plan, setting))
    told = with_report(Found(candidate, (candidate,), {}), setting, 1)
    assert told.predicted is not None
    # what more memory would buy, only the search knows
    predicted = told.predicted | {"binding": "", "price": 0.0, "misfit": _misfit(candidate, setting.cluster)}
    return replace(told, predicted=predicted, certificate=None)


def _misfit(judged: Candidate, cluster: Cluster) -> str:
    """By how much a plan does not fit, and where; nothing where it does."""
    device = max(judged.prediction.memory, key=lambda m: m.peak)
    host = max(judged.prediction.memory, key=lambda m: m.host)
    parts = []
    for what, rank, need, there in (
        ("a device", device.rank, device.peak, cluster.usable),
        ("the host, for each device,", host.rank, host.host, cluster.host_memory),
    ):
        if need > there:
            where = f" on pipeline rank {rank}" if judged.layout.mesh.pipe > 1 else ""
            parts.append(
                f"{format_bytes(need)} are needed{where}, {what} has {format_bytes(there)} for tensors: "
                f"{format_bytes(need - there)} too much"
            )
    return "; ".join(parts)


def _short(c: Candidate, spec: ModelSpec) -> dict[str, Any]:
    p = c.prediction
    return {
        "plan": str(c.layout),
        "optimizer": c.layout.optimizer,
        "host_state": round(p.host_state, 4),
        "activations": c.layout.activations,
        "units": _told(c.plan, spec),
        "seconds": round(p.seconds, 6),
        "mfu": round(p.mfu, 4),
        "peak_bytes": round(p.peak.peak),
        **{n: round(getattr(p, n), 6) for n in ("compute", "recompute", "grid", "exposed", "bubble", "update")},
    }


def _told(plan: Plan, spec: ModelSpec) -> str:
    """The modes of the units, and what they recompute, that of most first; where only some recompute, how many."""
    rules = [plan.rule_for(u.name) for u in spec.units]
    modes, again = (Counter(getattr(r, name) for r in rules) for name in ("mode", "recompute"))
    redone = {name: n for name, n in again.most_common() if name != "none"}
    share = sum(redone.values()) / len(rules)
    told = " + ".join(mode for mode, _ in modes.most_common())
    if not redone:
        return told
    return f"{told}; recompute {' + '.join(redone)}" + (f" in {share:.0%}" if share < 0.995 else "")


def binding(best: Candidate) -> str:
    """What keeps the plan from being faster."""
    p = best.prediction
    if best.price > 0:
        return "memory"
    parts = {"computing": p.compute, "communication": p.exposed + p.grid, "the pipeline's bubble": p.bubble}
    return max(parts, key=lambda name: parts[name])


def break_even(best: Candidate, setting: Setting) -> float:
    """Tokens of a micro-batch from which gathering a unit's parameters hides behind computing with it."""
    kinds = setting.spec.kinds
    kind = max(kinds, key=lambda k: kinds[k].flops if kinds[k].layer not in (0, setting.spec.layers - 1) else -1.0)
    few, more = (unit_cost(setting, replace(best.layout, micro_batch_size=n), kind, Choice("zero3")) for n in (1, 4))
    each = (more.compute.forward - few.compute.forward) / (
        3 * setting.spec.seq_len
    )  # a token's, whatever the plan has of them
    return max(1.0, setting.spec.seq_len + (few.gather - few.compute.forward) / each) if each > 0 else 0.0
