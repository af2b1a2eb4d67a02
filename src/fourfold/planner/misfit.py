"""When nothing fits: the arithmetic, and the cheapest changes that would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from fourfold.errors import PlanError
from fourfold.plan import Precision
from fourfold.planner.floors import bytes_at_least
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import Constraints, layouts
from fourfold.planner.options import Solver
from fourfold.schema import format_bytes

__all__ = ["explain_misfit", "smallest"]

TIMES, CLOSE = (1.02, 1.1, 1.2, 1.5, 2.0, 3.0), 1.03
"""How many times what is needed at least devices are tried with; and how near to too little the answer is."""


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
        need = bytes_at_least(solver, layout)
        if best is None or need < best[0]:
            best = (need, layout)
    assert best is not None, "layouts() explains when there is none"
    return best


def explain_misfit(
    setting: Setting, wanted: Constraints, solver: Solver, fits: Callable[[Setting, Constraints], bool]
) -> NoReturn:
    """Raise PlanError: what is needed, what there is, what would do: ways for which `fits` has found a plan."""
    need, layout = smallest(setting, wanted, solver)
    cluster, spec = setting.cluster, setting.spec

    def tried(changed: Setting, rest: Constraints = wanted) -> bool:
        try:
            return smallest(changed, rest)[0] <= changed.cluster.usable and fits(changed, rest)
        except PlanError:  # the batch cannot be spread over so many
            return False

    ways = []
    if wanted.max_ranks and wanted.max_ranks < cluster.ranks:
        rest = Constraints(wanted.fixed)
        if tried(setting, rest):
            ways.append(f"all {cluster.ranks} devices instead of --max-ranks {wanted.max_ranks}")
    else:
        for times in (2, 4, 8, 16, 32, 64):
            more = replace(cluster, nodes=cluster.nodes * times)
            if tried(replace(setting, cluster=more)):
                ways.append(f"{more.nodes} nodes instead of {cluster.nodes}")
                break
    enough = _memory(setting, wanted, need, fits)
    if enough is not None:
        ways.append(f"devices with {format_bytes(enough.cluster.memory)}")
        need = max(need, enough.cluster.usable)
    bf16 = replace(setting, precision=Precision(compute="bf16"))
    if setting.precision.compute != "bf16" and tried(bf16):
        ways.append("bf16 instead of " + setting.precision.compute)
    for name, value in wanted.fixed.items():
        if tried(setting, Constraints({k: v for k, v in wanted.fixed.items() if k != name}, wanted.max_ranks)):
            ways.append(f"leaving {name} free instead of {value}")
            break
    fixed = " ".join(f"{k}={v}" for k, v in wanted.fixed.items())
    how = f"with {fixed}, the rest" if fixed else "everything"
    devices = "device" if layout.mesh.ranks == 1 else "devices"
    raise PlanError(
        f"no plan fits: a device has {format_bytes(cluster.memory)}, of which {format_bytes(cluster.usable)} are for tensors "
        f"(reserve {cluster.device.reserve}, margin {cluster.device.margin:.0%}); {spec.parameters / 1e9:.3g} B parameters on "
        f"{layout.mesh.ranks} {devices} need about {format_bytes(need)} on each ({layout}, optimizer state on "
        f"{layout.optimizer}, {how} sharded and recomputed as far as it goes). "
        + (
            f"What would do: {'; or '.join(ways)}"
            if ways
            else "Nothing near would do: a smaller model, or many more devices"
        )
    )


def _memory(
    setting: Setting, wanted: Constraints, need: float, fits: Callable[[Setting, Constraints], bool]
) -> Setting | None:
    """With devices that have enough memory, and not much more."""
    cluster = setting.cluster

    def larger(memory: float) -> Setting:
        device = replace(cluster.device, memory=str(int(memory)))
        return replace(setting, cluster=replace(cluster, device=device))

    base = max(cluster.memory + (need - cluster.usable) / (1 - cluster.device.margin), cluster.memory)
    high = next((base * times for times in TIMES if fits(larger(base * times), wanted)), None)
    if high is None:
        return None
    low = max([base * times for times in TIMES if base * times < high], default=base)
    while high > CLOSE * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(larger(middle), wanted) else (middle, high)
    return larger(high)
