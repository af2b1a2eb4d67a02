"""A plan as a report: one HTML file that opens offline (`fourfold plan --html`), and its data for the planner's page. No torch.

`report_data` collects everything as JSON; `report.js` next to this file draws it, in the file and on the page. Names are escaped
JSON, and are displayed as plain text.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import fourfold
from fourfold import files, schema
from fourfold.cluster import Cluster
from fourfold.errors import FourfoldError, PlanError
from fourfold.plan import AXES, Plan
from fourfold.planner.memory_model import CATEGORIES
from fourfold.planner.prediction import StepTime
from fourfold.planner.problem import PlanProblem
from fourfold.planner.stage_partition import schedule_of, stage_layers, units_of_stages
from fourfold.program.ops import Schedule
from fourfold.view.explain import describe_units, explain
from fourfold.view.page import inline_json
from fourfold.view.plan_export import export

__all__ = ["COMPARED", "command_line", "report_data", "tried_point", "write_report"]

COMPARED = 120
"""Plans of one mode for all units that a report compares with, at most."""
COMPARING = 3.0
"""Seconds after which no further plans are compared with."""
_TRAFFIC = {
    "pipe": "messages between stages: activations and their gradients",
    "data": "gathers of parameters and reductions of gradients",
    "depth": "gathers of parameters and reductions of gradients",
    "row": "collectives of matmuls on the grid",
    "col": "collectives of matmuls on the grid",
}
"""What the ranks along an axis exchange."""


def report_data(
    plan: Plan,
    problem: PlanProblem,
    *,
    tried: Sequence[dict[str, Any]] = (),
    uniform: Iterable[Plan] = (),
    command: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that the report shows, as JSON. `plan` is one that the planner made or judged.

    `tried`: the alternatives of all layouts that were built; `uniform`: judged plans to compare with; `command`: words of the
    command that asks the same; `notes`: sentences to show below the headline.
    """
    if plan.predicted is None:
        raise PlanError("a report needs a prediction; `fourfold plan --judge` makes one for any plan")
    p, cluster = plan.predicted, problem.cluster
    schedule = schedule_of(problem, plan)
    return {
        "version": fourfold.__version__,
        "title": f"{p['model']} on {p['ranks']} × {cluster.device.name}",
        "misfit": p.get("misfit", ""),
        "notes": list(notes),
        "predicted": {k: p[k] for k in ("seconds", "tokens_per_second", "mfu", "peak_bytes", "usable_bytes")},
        "lower_bound": (plan.certificate or {}).get("lower_bound"),
        "question": {
            "model": p["model"],
            "parameters": p["parameters"],
            "seq_len": p["seq_len"],
            "global_batch": p["global_batch"],
            "cluster": cluster.name,
            "nodes": cluster.nodes,
            "devices": cluster.devices,
            "device": cluster.device.name,
            "memory": cluster.memory,
            "precision": plan.precision.compute,
            "source": cluster.source,
        },
        "words": explain(plan).splitlines(),
        "parts": {name: p[name] for name in StepTime._fields},
        "points": [
            *(tried_point(a, "found") for a in tried),
            *(tried_point(a, "uniform") for u in _in_time(uniform) for a in u.alternatives or ()),
        ],
        "mesh": _mesh(plan, cluster, schedule),
        "memory": {"parts": list(CATEGORIES), "ranks": p["memory"], "host": p["host_bytes"]},
        "units": _units(plan, problem, schedule),
        "alternatives": [
            tried_point(a, "found") | {k: a[k] for k in ("mfu", *StepTime._fields)} for a in plan.alternatives or ()
        ],
        "texts": _texts(plan, problem, command),
    }


def _in_time(plans: Iterable[Plan]) -> Iterator[Plan]:
    """The first plans: those that are predicted within `COMPARING` seconds."""
    end = time.monotonic() + COMPARING
    for plan in plans:
        yield plan
        if time.monotonic() > end:
            return


def tried_point(alternative: dict[str, Any], kind: str) -> dict[str, Any]:
    """An alternative in the picture of time against memory."""
    return {
        "kind": kind,
        "name": alternative["plan"],
        "units": describe_units(alternative),
        "seconds": alternative["seconds"],
        "bytes": alternative["peak_bytes"],
    }


def _mesh(plan: Plan, cluster: Cluster, schedule: Schedule) -> dict[str, Any]:
    """The axes with more than one rank, the fastest-varying first, and the levels of network that each one's traffic takes."""
    axes, stride = [], 1
    for axis in reversed(AXES):
        degree = getattr(plan.mesh, axis)
        if degree > 1:
            links = _message_links(cluster, stride, schedule) if axis == "pipe" else [cluster.link(degree, stride)]
            axes.append({"name": axis, "degree": degree, "stride": stride, "links": links, "traffic": _TRAFFIC[axis]})
        stride *= degree
    levels = [{"name": x.name, "ranks": x.ranks or cluster.ranks, "bandwidth": x.bandwidth} for x in cluster.level]
    return {
        "axes": axes,
        "levels": levels,
        "nodes": cluster.nodes,
        "devices": cluster.devices,
        "ranks": plan.mesh.ranks,
        "words": plan.mesh.product(),
    }


def _message_links(cluster: Cluster, stride: int, schedule: Schedule) -> list[int]:
    """The levels between ranks of the pipeline that hold neighbouring stages, the innermost first."""
    pairs = {(a * stride + i, b * stride + i) for a, b in pairwise(schedule.placement) for i in (0, stride - 1)}
    return sorted({_level(cluster, a, b) for a, b in pairs if a != b})


def _level(cluster: Cluster, a: int, b: int) -> int:
    """The innermost level that connects two ranks."""
    sizes = [level.ranks or cluster.ranks for level in cluster.level]
    return next((i for i, n in enumerate(sizes) if a // n == b // n), len(sizes) - 1)


def _units(plan: Plan, problem: PlanProblem, schedule: Schedule) -> list[dict[str, Any]]:
    """Every unit in the order of the forward: its stage, the rank of the pipeline that has it, and its options."""
    stages = units_of_stages(problem.spec, stage_layers(problem, schedule, plan.pipeline.layers))
    out = []
    for stage, (units, rank) in enumerate(zip(stages, schedule.placement, strict=True)):
        for unit in units:
            rule = plan.rule_for(unit.name)
            options = {k: getattr(rule, k) for k in ("mode", "reduce", "within", "split", "recompute")}
            out.append({"name": unit.name, "stage": stage, "rank": rank, "parameters": unit.parameters, **options})
    return out


def command_line(words: Sequence[str]) -> str:
    """Words quoted for a shell."""
    return " ".join(map(shlex.quote, words))


def _texts(plan: Plan, problem: PlanProblem, command: Sequence[str]) -> list[dict[str, str]]:
    """What can be copied: the command, the plan file, and the exports."""
    out = [{"name": "command", "file": "", "text": command_line(command)}] if command else []
    data = plan.to_dict()
    out.append({"name": "plan.json", "file": "plan.json", "text": json.dumps(data, indent=2) + "\n"})
    out.append({"name": "plan.toml", "file": "plan.toml", "text": schema.dump_toml(data)})
    if not (plan.predicted or {}).get("misfit"):
        for system in ("torchtitan", "megatron"):
            try:
                exported = export(plan, problem, system, "plan.csv")
            except FourfoldError as e:
                out.append({"name": system, "file": "", "text": f"# not possible: {e}"})
                continue
            out.append({"name": system, "file": f"{system}.txt", "text": str(exported)})
            out += [{"name": name, "file": name, "text": text} for name, text in exported.files.items()]
    return out


def write_report(path: Path, data: dict[str, Any]) -> None:
    """Write the report as one HTML file."""
    files.write_text(path, report_page(data), PlanError)


def report_page(data: dict[str, Any]) -> str:
    """The report as HTML."""
    folder = resources.files("fourfold.view")
    page = folder.joinpath("report.html").read_text("utf-8")
    for name in ("report.css", "report.js"):
        page = page.replace("{{" + name + "}}", folder.joinpath(name).read_text("utf-8"))
    return page.replace("{{data}}", inline_json(data))
