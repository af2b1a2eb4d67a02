"""The least memory with which there is a plan; and when nothing fits, the arithmetic and the cheapest changes that would do.

A layout needs what its floor says at least (`floors`), and no more than its plan in which every unit holds as little as it can
(`build.frugal`), which is replayed like any other. Layouts are taken by their floors, the lowest first, until no other can need
less: a few replays instead of whole searches, and what is said to do has a plan to show for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NoReturn

from fourfold.errors import PlanError, ScheduleError
from fourfold.plan import Mesh, Precision
from fourfold.planner.build import Candidate, frugal
from fourfold.planner.constraints import Constraints
from fourfold.planner.floors import bytes_at_least
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import layouts
from fourfold.planner.options import Solver
from fourfold.planner.predict import fits
from fourfold.schema import format_bytes

__all__ = ["explain_misfit", "least"]

REPLAYED = 40
"""Layouts whose least plan is replayed, at most."""
MORE = (2, 4, 8, 16, 32, 64)
"""Times the nodes there are, that are tried."""


def least(setting: Setting, wanted: Constraints, solver: Solver | None = None) -> Candidate:
    """The plan that needs the fewest bytes on a device, of those for which the hosts have room; or, if they have not, of all."""
    solver = solver or Solver(setting, {k: str(v) for k, v in wanted.fixed.items()})
    bounds = sorted(((bytes_at_least(solver, c), i, c) for i, c in enumerate(_candidates(setting, wanted))))
    best: tuple[tuple[bool, float], Callable[[], Candidate]] | None = None
    for bound, _, layout in bounds[:REPLAYED]:
        if best is not None and (False, bound) >= best[0]:
            break
        try:
            memory, found = frugal(setting, solver, layout)
        except ScheduleError:
            continue
        crowded = any(m.host > setting.cluster.host_memory for m in memory)
        if best is None or (crowded, max(m.peak for m in memory)) < best[0]:
            best = (crowded, max(m.peak for m in memory)), found
    assert best is not None, "layouts() explains when there is none"
    return best[1]()


def _candidates(setting: Setting, wanted: Constraints) -> Iterator[Layout]:
    """Layouts that may need least: the smallest micro-batches, nothing gathered ahead, and all that the host can take there."""
    of_mesh: dict[Mesh, Layout] = {}
    for found in layouts(setting, wanted):
        if found.mesh.pipe == 1 or found.schedule == (wanted.schedule or "1f1b"):
            other = of_mesh.setdefault(found.mesh, found)
            if found.micro_batch_size < other.micro_batch_size:
                of_mesh[found.mesh] = found
    for found in of_mesh.values():
        bare = replace(found, prefetch=0, tensor=replace(found.tensor, keep=()))
        if setting.cluster.device.kind == "cpu":
            yield bare
            continue
        homes: tuple[Literal["device", "host"], ...] = ("device", "host")
        for home in (wanted.fixed["activations"],) if "activations" in wanted.fixed else homes:
            yield replace(bare, optimizer=wanted.get("optimizer", "host"), activations=home)


def explain_misfit(setting: Setting, wanted: Constraints, found: Candidate) -> NoReturn:
    """Raise PlanError: what is needed at least (`found`), what there is, and what would do."""
    cluster, spec, layout = setting.cluster, setting.spec, found.layout
    need, host = found.prediction.peak.peak, max(m.host for m in found.prediction.memory)
    fixed = " ".join(f"{k}={v}" for k, v in wanted.fixed.items())
    how = f"with {fixed}, the rest" if fixed else "everything"
    devices = "device" if layout.mesh.ranks == 1 else "devices"
    where = [f"{what} on the host" for what in ("optimizer", "activations") if getattr(layout, what) != "device"]
    text = (
        f"no plan fits: a device has {format_bytes(cluster.memory)}, of which {format_bytes(cluster.usable)} are for tensors "
        f"(reserve {cluster.device.reserve}, margin {cluster.device.margin:.0%}); {spec.parameters / 1e9:.3g} B parameters on "
        f"{layout.mesh.ranks} {devices} need about {format_bytes(need)} on each ({', '.join([str(layout), *where])}; {how} "
        f"sharded and recomputed as far as it goes)"
    )
    if host > cluster.host_memory:
        text += f", and {format_bytes(host)} on the host for each, which has {format_bytes(cluster.host_memory)}"
    ways = list(_ways(setting, wanted, need, host))
    told = (
        f"What would do: {'; or '.join(ways)}"
        if ways
        else "Nothing near would do: a smaller model, or many more devices"
    )
    raise PlanError(f"{text}. {told}")


def _ways(setting: Setting, wanted: Constraints, need: float, host: float) -> Iterator[str]:
    """Changes with which a plan fits."""
    cluster = setting.cluster
    if wanted.max_ranks and wanted.max_ranks < cluster.ranks:
        if _fits(setting, Constraints(wanted.fixed)):
            yield f"all {cluster.ranks} devices instead of --max-ranks {wanted.max_ranks}"
    elif cluster.name != "local":  # where ranks share one machine
        for times in MORE:
            more = replace(cluster, nodes=cluster.nodes * times)
            if _fits(replace(setting, cluster=more), wanted):
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
    bf16 = replace(setting, precision=Precision(compute="bf16"))
    if setting.precision.compute != "bf16" and _fits(bf16, wanted):
        yield "bf16 instead of " + setting.precision.compute
    for name, value in wanted.fixed.items():
        if _fits(setting, Constraints({k: v for k, v in wanted.fixed.items() if k != name}, wanted.max_ranks)):
            yield f"leaving {name} free instead of {value}"
            break


def _fits(setting: Setting, wanted: Constraints) -> bool:
    """Whether there is a plan."""
    cluster, width = setting.cluster, setting.compute
    if setting.spec.parameters * width / cluster.ranks > cluster.usable:  # not even the weights, spread over all
        return False
    try:
        memory = least(setting, wanted).prediction.memory
    except PlanError:  # the batch cannot be spread over so many
        return False
    return fits(memory, cluster, cluster.usable)
