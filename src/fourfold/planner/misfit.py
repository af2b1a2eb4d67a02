"""When nothing fits: the arithmetic, and the cheapest changes that would do."""

from __future__ import annotations

from dataclasses import replace

from fourfold.errors import PlanError
from fourfold.plan import Precision
from fourfold.planner.inner import least_bytes
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import Constraints, layouts, loads
from fourfold.planner.options import Solver
from fourfold.schema import format_bytes

__all__ = ["explain_misfit", "smallest"]


def smallest(setting: Setting, wanted: Constraints, solver: Solver | None = None) -> tuple[float, Layout]:
    """The least bytes that any layout needs on a device, and the layout."""
    solver = solver or Solver(setting, {k: str(v) for k, v in wanted.fixed.items()})
    best: tuple[float, Layout] | None = None
    seen = set()
    for found in layouts(setting, wanted):
        if found.mesh.pipe > 1 and found.schedule != wanted.get("schedule", "1f1b"):
            continue
        key = (found.mesh, found.micro_batch_size)
        if key in seen:
            continue
        seen.add(key)
        layout = found
        if setting.cluster.device.kind == "cuda":  # what the host can take, it may
            layout = replace(
                found,
                optimizer=wanted.get("optimizer", "host"),
                activations=wanted.get("activations", "host"),
            )
        ranks, _ = loads(setting, layout)
        need = max(least_bytes(solver, layout, load) for load in ranks)
        if best is None or need < best[0]:
            best = (need, layout)
    assert best is not None, "layouts() explains when there is none"
    return best


def explain_misfit(setting: Setting, wanted: Constraints, solver: Solver) -> None:
    """Raise PlanError: what is needed, what there is, what would do."""
    need, layout = smallest(setting, wanted, solver)
    cluster, spec = setting.cluster, setting.spec
    ways = []
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(cluster, nodes=cluster.nodes * times)
        try:
            if _fits(replace(setting, cluster=more), wanted):
                ways.append(f"{more.nodes} nodes instead of {cluster.nodes}")
                break
        except PlanError:  # the batch cannot be spread over so many
            break
    factor = cluster.memory / cluster.usable
    ways.append(f"devices with {format_bytes(need * 1.02 * factor)}")
    if setting.precision.compute != "bf16" and _fits(replace(setting, precision=Precision(compute="bf16")), wanted):
        ways.append("bf16 instead of " + setting.precision.compute)
    for name, value in wanted.fixed.items():
        rest = Constraints({k: v for k, v in wanted.fixed.items() if k != name}, wanted.max_ranks)
        if _fits(setting, rest):
            ways.append(f"leaving {name} free instead of {value}")
            break
    ranks = f"{layout.mesh.ranks} device{'s' if layout.mesh.ranks > 1 else ''}"
    layout_told = f"{layout}, optimizer state on {layout.optimizer}"
    raise PlanError(
        f"no plan fits: a device has {format_bytes(cluster.memory)}, of which {format_bytes(cluster.usable)} are for tensors "
        f"(reserve {cluster.device.reserve}, margin {cluster.device.margin:.0%}); {spec.parameters / 1e9:.3g} B parameters on "
        f"{ranks} need at least {format_bytes(need)} on each ({layout_told}, everything sharded and "
        f"recomputed as far as it goes). What would do: {'; or '.join(ways)}"
    )


def _fits(setting: Setting, wanted: Constraints) -> bool:
    return smallest(setting, wanted)[0] <= setting.cluster.usable
