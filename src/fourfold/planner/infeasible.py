"""The plan that needs the least memory; and if nothing fits, the arithmetic and the cheapest changes with which a plan fits.

A layout needs at least `lower_bounds.least_bytes`, and at most the bytes of its plan with the smallest options of every unit
(`build.smallest_plan`), which is replayed like any other plan. Layouts are tried in the order of their bounds until no other
can need less. This takes a few replays instead of whole searches, and every remedy in the error message is backed by a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NoReturn

from fourfold.errors import PlanError, ScheduleError
from fourfold.plan import Mesh, Precision
from fourfold.planner.build import Candidate, smallest_plan
from fourfold.planner.layouts import ParallelLayout, enumerate_layouts, may_consume
from fourfold.planner.lower_bounds import least_bytes
from fourfold.planner.prediction import fits
from fourfold.planner.problem import Constraints, PlanProblem
from fourfold.planner.unit_options import OptionTable
from fourfold.schema import format_bytes

__all__ = ["explain_no_fit", "least_memory_plan"]

_MOST_REPLAYED = 40
_NODE_FACTORS = (2, 4, 8, 16, 32, 64)
"""Multiples of the number of nodes to try as a remedy."""


def least_memory_plan(problem: PlanProblem, constraints: Constraints, table: OptionTable | None = None) -> Candidate:
    """The plan that needs the fewest bytes on a device; if possible, one that fits on the hosts."""
    table = table or OptionTable(problem, {k: str(v) for k, v in constraints.fixed.items()})
    bounds = sorted((least_bytes(table, c), i, c) for i, c in enumerate(_small_layouts(problem, constraints)))
    best: tuple[tuple[bool, float], Callable[[], Candidate]] | None = None
    for bound, _, layout in bounds[:_MOST_REPLAYED]:
        if best is not None and (False, bound) >= best[0]:
            break
        try:
            memory, candidate = smallest_plan(problem, table, layout)
        except ScheduleError:
            continue
        needs = any(m.host > problem.cluster.host_memory for m in memory), max(m.peak for m in memory)
        if best is None or needs < best[0]:
            best = needs, candidate
    assert best is not None, "enumerate_layouts explains when there is none"
    return best[1]()


def _small_layouts(problem: PlanProblem, constraints: Constraints) -> Iterator[ParallelLayout]:
    """Candidates for the least memory: the smallest micro-batches, no prefetch, and as much as possible on the host."""
    of_mesh: dict[Mesh, ParallelLayout] = {}
    consuming = False
    for found in enumerate_layouts(problem, constraints):
        if found.mesh.pipe == 1 or found.schedule == (constraints.schedule or "1f1b"):
            other = of_mesh.setdefault(found.mesh, found)
            if found.micro_batch_size < other.micro_batch_size:
                of_mesh[found.mesh] = found
            hosted = replace(found, prefetch=0, optimizer=constraints.get("optimizer", "host"))
            if may_consume(problem, constraints.fixed, hosted):
                consuming = True
                yield replace(hosted, consume=True, tensor=replace(found.tensor, keep=()))
    if constraints.get("gradients") == "consume":
        if not consuming:
            raise PlanError(
                "--fix gradients=consume needs one micro-batch per step on every rank, and the engine fourfold; leave it out, or "
                "use a smaller --global-batch"
            )
        return
    for found in of_mesh.values():
        bare = replace(found, prefetch=0, tensor=replace(found.tensor, keep=()))
        if problem.on_cpu:
            yield bare
            continue
        homes: tuple[Literal["device", "host"], ...] = ("device", "host")
        for home in (constraints.fixed["activations"],) if "activations" in constraints.fixed else homes:
            yield replace(bare, optimizer=constraints.get("optimizer", "host"), activations=home)


def explain_no_fit(problem: PlanProblem, constraints: Constraints, smallest: Candidate) -> NoReturn:
    """Raise PlanError: the memory needed at least, the memory available, and the changes with which a plan fits."""
    cluster, spec, layout = problem.cluster, problem.spec, smallest.layout
    need, host = smallest.prediction.peak.peak, max(m.host for m in smallest.prediction.memory)
    fixed = " ".join(f"{k}={v}" for k, v in constraints.fixed.items())
    how = f"with {fixed}, the rest" if fixed else "everything"
    devices = "device" if layout.mesh.ranks == 1 else "devices"
    where = [f"{what} on the host" for what in ("optimizer", "activations") if getattr(layout, what) != "device"]
    text = (
        f"no plan fits: a device has {format_bytes(cluster.memory)}, of which {format_bytes(cluster.usable)} are for tensors "
        f"(reserve {cluster.device.reserve}, margin {cluster.device.margin:.0%}); {spec.parameters / 1e9:.3g} B parameters on "
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
    if constraints.max_ranks and constraints.max_ranks < cluster.ranks:
        if _has_plan(problem, Constraints(constraints.fixed)):
            yield f"all {cluster.ranks} devices instead of --max-ranks {constraints.max_ranks}"
    elif cluster.name != "local":  # the ranks of `local` share one machine
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
