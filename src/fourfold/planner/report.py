"""The planner's report of a plan, as fields of the plan file (`view/explain.py` writes it as text); and if no plan fits, the
arithmetic and the cheapest changes with which a plan fits. Every change that is named is backed by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision
from fourfold.planner.build import Candidate, least_memory_plan
from fourfold.planner.engines import FOURFOLD, own_engine
from fourfold.planner.evaluate import predict
from fourfold.planner.grid_cost import flow_report
from fourfold.planner.prediction import StepTime, fits
from fourfold.planner.problem import Constraints, PlanProblem
from fourfold.planner.unit_cost import UnitChoice, unit_cost
from fourfold.schema import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fourfold.planner.search import SearchResult

__all__ = ["binding", "explain_no_fit", "no_fit", "with_report"]

_NODE_FACTORS = (2, 4, 8, 16, 32, 64)
"""Multiples of the number of nodes to try as a remedy."""


def with_report(found: SearchResult, problem: PlanProblem, top: int = 5, *, brief: bool = False) -> Plan:
    """The best plan with its prediction, its certificate and the alternatives; `brief`: without the time of other kernels."""
    best = found.best
    predicted = best.prediction.to_dict() | {
        "model": problem.spec.name,
        "parameters": problem.spec.parameters,
        "seq_len": problem.spec.seq_len,
        **({"context": problem.spec.context} if problem.spec.context else {}),
        "global_batch": problem.global_batch,
        "cluster": problem.cluster.name,
        "ranks": best.layout.mesh.ranks,
        "usable_bytes": problem.cluster.usable,
        "host_bytes": round(problem.cluster.host_memory),
        "price": best.price,
        "binding": binding(best),
        **({"with_more": dict(zip(("bytes", "saves", "plan"), best.with_more, strict=True))} if best.with_more else {}),
        "break_even_tokens": round(_break_even_tokens(best, problem)),
        "tokens_per_micro_batch": best.layout.micro_batch_size * problem.spec.seq_len,
        "flows": flow_report(problem, best.layout),
        **({} if brief else _without_determinism(best, problem)),
    }
    others = tuple(_alternative(c, problem.spec) for c in found.ranked[:top])
    return replace(best.plan, predicted=predicted, certificate=found.certificate, alternatives=others)


def _without_determinism(best: Candidate, problem: PlanProblem) -> dict[str, float]:
    """The predicted seconds with `train.deterministic = false`, if attention then has a faster kernel, which is for bf16 only."""
    if problem.engine != FOURFOLD or problem.precision.compute != "bf16":
        return {}
    seconds = predict(best.plan, problem.with_engine(own_engine(deterministic=False))).seconds
    return {"not_deterministic": round(seconds, 6)} if seconds < 0.98 * best.prediction.seconds else {}


def _alternative(c: Candidate, spec: ModelSpec) -> dict[str, Any]:
    p = c.prediction
    return {
        "plan": str(c.layout),
        "optimizer": c.layout.optimizer,
        "host_state": round(p.host_state, 4),
        "activations": c.layout.activations,
        "units": _modes(c.plan, spec),
        "seconds": round(p.seconds, 6),
        "mfu": round(p.mfu, 4),
        "peak_bytes": round(p.peak.peak),
        **{name: round(getattr(p, name), 6) for name in StepTime._fields},
    }


def _modes(plan: Plan, spec: ModelSpec) -> str:
    """The units' modes and recomputation, the most common first; with the share of units that recompute, if not all do."""
    rules = [plan.rule_for(u.name) for u in spec.units]
    modes, again = (Counter(getattr(r, name) for r in rules) for name in ("mode", "recompute"))
    redone = {name: n for name, n in again.most_common() if name != "none"}
    share = sum(redone.values()) / len(rules)
    text = " + ".join(mode for mode, _ in modes.most_common())
    if not redone:
        return text
    return f"{text}; recompute {' + '.join(redone)}" + (f" in {share:.0%}" if share < 0.995 else "")


def binding(best: Candidate) -> str:
    """The bottleneck of the plan."""
    p = best.prediction
    if best.price > 0:
        return "memory"
    parts = {
        "computing": p.compute + p.recompute,
        "communication": p.exposed + p.grid,
        "the pipeline's bubble": p.bubble,
        "the optimizer's update" + (", whose state crosses the host's link" if p.host_state else ""): p.update,
    }
    return max(parts, key=lambda name: parts[name])


def _break_even_tokens(best: Candidate, problem: PlanProblem) -> float:
    """Minimum tokens per micro-batch for which gathering a unit's parameters overlaps fully with computing it; 0: no replicas."""
    if best.layout.replicas == 1:
        return 0.0
    kinds, seq_len = problem.spec.kinds, problem.spec.seq_len
    kind = max(kinds, key=lambda k: kinds[k].flops if kinds[k].layer not in (0, problem.spec.layers - 1) else -1.0)
    few, more = (
        unit_cost(problem, replace(best.layout, micro_batch_size=n), kind, UnitChoice("zero3")) for n in (1, 4)
    )
    per_token = (more.times.forward - few.times.forward) / (3 * seq_len)
    return max(1.0, seq_len + (few.gather - few.times.forward) / per_token) if per_token > 0 else 0.0


def no_fit(judged: Candidate, problem: PlanProblem) -> str:
    """By how much a plan does not fit, and where; empty if it fits."""
    device = max(judged.prediction.memory, key=lambda m: m.peak)
    host = max(judged.prediction.memory, key=lambda m: m.host)
    parts = []
    for what, rank, need, limit in (
        ("a device", device.rank, device.peak, problem.cluster.usable),
        ("the host, for each device,", host.rank, host.host, problem.cluster.host_memory),
    ):
        if need > limit:
            where = f" on pipeline rank {rank}" if judged.layout.mesh.pipe > 1 else ""
            parts.append(
                f"{format_bytes(need)} are needed{where}, but {what} has {format_bytes(limit)} for tensors: "
                f"{format_bytes(need - limit)} too much"
            )
    return "; ".join(parts)


# ---- why no plan fits, and what would ----


def explain_no_fit(problem: PlanProblem, constraints: Constraints, smallest: Candidate) -> NoReturn:
    """Raise PlanError: the memory needed at least, the memory available, and the changes with which a plan fits."""
    cluster, spec, layout = problem.cluster, problem.spec, smallest.layout
    need, host = smallest.prediction.peak.peak, max(m.host for m in smallest.prediction.memory)
    fixed = " ".join(f"{k}={v}" for k, v in constraints.fixed.items())
    how = f"with {fixed}, the rest" if fixed else "everything"
    devices = "device" if layout.mesh.ranks == 1 else "devices"
    reserve = format_bytes(parse_bytes(cluster.device.reserve, "device.reserve"))
    where = [f"{what} on the host" for what in ("optimizer", "activations") if getattr(layout, what) != "device"]
    text = (
        f"no plan fits: a device has {format_bytes(cluster.memory)}, of which {format_bytes(cluster.usable)} are for tensors "
        f"(reserve {reserve}, margin {cluster.device.margin:.0%}); {spec.parameters / 1e9:.3g} B parameters on "
        f"{layout.mesh.ranks} {devices} need about {format_bytes(need)} on each ({', '.join([str(layout), *where])}; {how} "
        f"sharded and recomputed as far as possible)"
    )
    if host > cluster.host_memory:
        text += f", and {format_bytes(host)} on the host for each, which has {format_bytes(cluster.host_memory)}"
    remedies = "; or ".join(_remedies(problem, constraints, need, host))
    if remedies:
        raise PlanError(f"{text}. What would fit: {remedies}")
    raise PlanError(f"{text}. No small change would fit: use a smaller model, or many more devices")


def _remedies(problem: PlanProblem, constraints: Constraints, need: float, host: float) -> Iterator[str]:
    """Changes with which a plan fits."""
    cluster = problem.cluster
    if constraints.max_ranks and constraints.max_ranks < cluster.devices:
        alone = replace(cluster, nodes=1).with_devices(constraints.max_ranks)  # has the host's whole memory
        if _has_plan(replace(problem, cluster=alone), constraints):
            yield f"--devices {alone.devices} instead of --max-ranks {alone.devices}, if the node has no more"
    if constraints.max_ranks and constraints.max_ranks < cluster.ranks:
        if _has_plan(problem, Constraints(constraints.fixed)):
            yield f"all {cluster.ranks} devices instead of --max-ranks {constraints.max_ranks}"
    elif cluster.name != "local" and cluster.level:  # the ranks of `local` share one machine
        for times in _NODE_FACTORS:
            more = replace(cluster, nodes=cluster.nodes * times)
            if _has_plan(replace(problem, cluster=more), constraints):
                yield f"{more.nodes} nodes instead of {cluster.nodes}"
                break
    parts = []
    if need > cluster.usable:
        memory = cluster.memory + (need - cluster.usable) / (1 - cluster.device.margin)
        parts.append(f"devices with {format_bytes(1.001 * memory)}")
    if host > cluster.host_memory:
        parts.append(f"hosts with {format_bytes(1.001 * host * cluster.devices)}")
    if parts:
        yield " and ".join(parts)
    bf16 = replace(problem, precision=Precision(compute="bf16"))
    if problem.precision.compute != "bf16" and _has_plan(bf16, constraints):
        yield "bf16 instead of " + problem.precision.compute
    for name, value in constraints.fixed.items():
        others = {k: v for k, v in constraints.fixed.items() if k != name}
        if _has_plan(problem, Constraints(others, constraints.max_ranks)):
            yield f"leaving {name} free instead of {value}"
            break


def _has_plan(problem: PlanProblem, constraints: Constraints) -> bool:
    cluster = problem.cluster
    if problem.spec.parameters * problem.compute_bytes / cluster.ranks > cluster.usable:  # not even sharded weights fit
        return False
    try:
        memory = least_memory_plan(problem, constraints).prediction.memory
    except PlanError:  # the batch cannot be divided over that many ranks
        return False
    return fits(memory, cluster, cluster.usable)
