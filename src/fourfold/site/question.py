"""A question of the planner's page, and its answers. No torch; the same code runs in Pyodide and behind `fourfold plan --serve`.

A question is plain data: a model by its name in models.json or the text of a config.json, a cluster by the name of a preset and
numbers that replace the preset's, a batch. No field names a file, and only files of this package are read.

    choices()                     ->  models and clusters to choose from
    ask("glance", question)       ->  will it fit? a few plans predicted, in a second or so
    ask("plan", question, tell)   ->  the report of the fastest plan; `tell` is called with the search's progress

`ask` takes and returns JSON text. An answer `{"error": sentence}` is the planner's own sentence.

`python -m fourfold.site.question` answers one question from standard input, for the server: lines of JSON, the answer last.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from fourfold import files, schema
from fourfold.cluster import Cluster
from fourfold.errors import FourfoldError, PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import SCHEDULES, Plan
from fourfold.planner.api import (
    default_batch,
    default_precision,
    find_plan,
    judge,
    named_precision,
    uniform_plans,
)
from fourfold.planner.problem import PlanProblem, parse_fixes
from fourfold.planner.report import with_report
from fourfold.schema import format_bytes, format_seconds
from fourfold.view.explain import describe_units
from fourfold.view.plan_report import report_data

__all__ = ["FIRST", "LONGEST", "Described", "Question", "ask", "choices", "cluster_fields", "problem_of"]

LONGEST = 256 * 1024
"""Bytes of a question, at most: a config.json has a few thousand."""
_GLANCED = 20
"""Plans that are predicted for "will it fit?", at most."""
_COMPARED = 60
"""Plans of one mode for all units in a report: fewer than in a file, Python in a browser is slower."""
_TOP = 5
_EVERY = 0.1
"""Seconds between two reports of progress, at least."""


FIRST = {"cluster": {"preset": "h100-sxm", "nodes": 1}, "model": "llama-3.1-8b", "batch": 64, "seq_len": 8192}
"""The question of a page that is opened without one (the defaults of planner.js)."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A cluster: a preset, and numbers in place of the preset's where they are given."""

    preset: str = "h100-sxm"
    nodes: int = 1
    devices: int | None = None
    """Devices per node."""
    memory: str | None = None
    """Of a device."""
    tflops: float | None = None
    """Peak TFLOP/s of a device in bf16."""
    inside: float | None = None
    """GB/s of a device inside a node."""
    between: float | None = None
    """GB/s of a device between nodes."""
    host: str | None = None
    """Host memory of a node."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the page asks."""

    model: str | None = None
    """A model of models.json; or `config`."""
    config: str | None = None
    """The text of a Hugging Face config.json."""
    name: str = "model"
    """Display name of a pasted model."""
    cluster: Described = field(default_factory=Described)
    batch: int | None = None
    seq_len: int | None = None
    precision: Literal["bf16", "fp32", "fp64"] | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    fix: str = ""
    """As after `--fix`: `col=4 mode=zero3`."""
    what_if: dict[str, str] = field(default_factory=dict)
    """As after `--what-if`: {"memory": "40GiB"}."""
    plan: dict[str, Any] | None = None
    """glance: predict this plan, too."""


# ---- from a question to a problem ----


@cache
def _models() -> Mapping[str, dict[str, Any]]:
    return json.loads(resources.files("fourfold.site").joinpath("models.json").read_text("utf-8"))


def _read(text: str) -> Question:
    if len(text) > LONGEST:
        raise PlanError(f"the question has {len(text)} characters; at most {LONGEST} are read")
    data = files.parse_json(text, "the question", PlanError)
    if not isinstance(data, dict):
        raise PlanError("a question is a table of fields")
    config = data.pop("config", None)  # a text of many lines, unlike names
    if config is not None and not isinstance(config, str):
        raise PlanError("config must be the text of a config.json")
    return replace(schema.build(Question, data, error=PlanError), config=config)


def problem_of(q: Question) -> PlanProblem:
    """The planning problem, checked."""
    spec, cluster = _spec(q), Cluster.from_dict(cluster_fields(q.cluster))
    if q.what_if:
        cluster = cluster.what_if(q.what_if)
    if q.batch is not None:
        schema.check_count("the batch", q.batch, PlanError)
    precision = named_precision(q.precision) if q.precision else default_precision(cluster)
    return PlanProblem(spec, cluster, q.batch or default_batch(spec, cluster), precision, q.moments)


def _spec(q: Question) -> ModelSpec:
    if q.seq_len is not None:
        schema.check_count("the sequence length", q.seq_len, PlanError)
    if q.model is not None:
        if q.model not in _models():
            raise PlanError(f"unknown model '{q.model[:80]}'{schema.nearest(q.model[:80], _models())}")
        return ModelSpec.from_hf_config(_models()[q.model], q.model, seq_len=q.seq_len or 0)
    if q.config is None:
        raise PlanError("no model: choose one, or paste its config.json")
    config = files.parse_json(q.config, "config.json", PlanError)
    if not isinstance(config, dict):
        raise PlanError("config.json: the top level must be a table, as in a file of Hugging Face")
    return ModelSpec.from_hf_config(config, q.name[:80] or "model", seq_len=q.seq_len or 0)


def cluster_fields(d: Described) -> dict[str, Any]:
    """Fields of a cluster file that describes the same."""
    if d.preset == "local":
        raise PlanError("the preset 'local' is the machine that plans; on this page, describe yours instead")
    out: dict[str, Any] = {"preset": d.preset, "nodes": d.nodes}
    if d.devices is not None:
        out["devices"] = d.devices
    base = Cluster.from_dict(out)
    out["name"] = d.preset
    device: dict[str, Any] = {"memory": d.memory} if d.memory is not None else {}
    if d.tflops is not None:
        device["matrix"] = {"bf16": 1e12 * d.tflops}
        if base.device.stated:
            device["stated"] = {"bf16": 1e12 * d.tflops}
    rates = [d.inside] * (len(base.level) - 1) + [d.between]
    if d.inside is not None or d.between is not None:
        pairs = zip(base.level, rates, strict=True)
        out["level"] = [schema.dump(x if r is None else replace(x, bandwidth=1e9 * r)) for x, r in pairs]
    if device:
        out["device"] = {"name": f"{base.device.name} as described"} | device
    if d.host is not None:
        out["host"] = {"memory": d.host}
    if out.keys() - {"preset", "nodes", "name"}:
        out["name"] = "cluster"  # as the file is called
        out["source"] = f"described, other numbers from {d.preset}: {base.source}"
    return out


# ---- answers ----


def choices() -> dict[str, Any]:
    """Models and clusters to choose from, with the numbers that one may replace; and whether the first question fits, so that a
    page shows an answer before its Python has loaded."""
    from fourfold.presets import PRESETS

    specs = {name: ModelSpec.from_hf_config(config, name) for name, config in _models().items()}
    return {
        "first": {"question": FIRST, "answer": json.loads(ask("glance", json.dumps(FIRST)))},
        "models": [{"name": n, "parameters": s.parameters, "seq_len": s.seq_len} for n, s in specs.items()],
        "clusters": [
            {
                "name": name,
                "device": c.device.name,
                "devices": c.devices,
                "memory": c.memory,
                "tflops": c.device.peak("bf16") / 1e12,
                "inside": c.level[0].bandwidth / 1e9 if len(c.level) > 1 else None,
                "between": c.level[-1].bandwidth / 1e9,
                "links": [x.name for x in c.level],
                "host": schema.parse_bytes(c.host.memory, "host.memory"),
            }
            for name, c in PRESETS.items()
        ],
    }


def glance(q: Question) -> dict[str, Any]:
    """Will it fit? A few plans of one mode for all units, predicted; and the question's plan on its cluster."""
    problem = problem_of(q)
    out = _summary(problem) | {"given": _given(q, problem)}
    judged = list(uniform_plans(problem, _GLANCED, parse_fixes(q.fix.split()), few=True))
    rows = [(p.predicted or {}, (p.alternatives or ({},))[0]) for p in judged]
    fitting = [(p["seconds"], p, row) for p, row in rows if not p["misfit"]]
    there = format_bytes(problem.cluster.usable)
    if fitting:
        seconds, p, row = min(fitting, key=lambda x: x[0])
        how = f"{row['plan']}, {describe_units(row)}"
        text = f"{how}: {format_bytes(p['peak_bytes'])} of {there}, {format_seconds(seconds)} a step"
        return out | {"fits": True, "text": text, "seconds": seconds, "bytes": p["peak_bytes"]}
    if rows:
        p, row = min(rows, key=lambda x: x[0]["peak_bytes"])
        text = f"the smallest of {len(rows)} simple plans ({row['plan']}, {describe_units(row)}) needs "
        text += f"{format_bytes(p['peak_bytes'])}, a device has {there}; the search tries more"
        return out | {"fits": False, "text": text, "bytes": p["peak_bytes"]}
    text = f"no simple plan divides {problem.global_batch} sequences over {problem.cluster.ranks} ranks; the search tries more"
    return out | {"fits": None, "text": text}


def _summary(problem: PlanProblem) -> dict[str, Any]:
    spec, cluster = problem.spec, problem.cluster
    return {
        "model": spec.name,
        "parameters": spec.parameters,
        "seq_len": spec.seq_len,
        "batch": problem.global_batch,
        "ranks": cluster.ranks,
        "usable": cluster.usable,
    }


def _given(q: Question, problem: PlanProblem) -> dict[str, Any] | None:
    """The prediction of the question's plan; with another number of ranks, `data` is changed where that suits."""
    if q.plan is None:
        return None
    try:
        plan = Plan.from_dict(q.plan)
        if plan.pipeline.schedule not in SCHEDULES:  # elsewhere it may be the name of a file
            raise PlanError(f"pipeline.schedule{schema.nearest(plan.pipeline.schedule[:40], SCHEDULES)}")
        mesh, ranks = plan.mesh, problem.cluster.ranks
        if mesh.ranks != ranks and ranks % (mesh.ranks // mesh.data) == 0:
            data = ranks // (mesh.ranks // mesh.data)
            sequences, micro = plan.micro_batch_size(problem.global_batch), plan.batch
            if problem.global_batch % (sequences * data * mesh.depth * mesh.row) == 0:
                micro = replace(micro, micro_batches=problem.global_batch // (sequences * data * mesh.depth * mesh.row))
            plan = replace(plan, mesh=replace(mesh, data=data), batch=micro)
        p = judge(replace(plan, memory=replace(plan.memory, device_state="")), problem).predicted or {}
    except FourfoldError as e:
        return {"error": str(e)}
    return {key: p[key] for key in ("seconds", "peak_bytes", "usable_bytes", "misfit")}


def plan(q: Question, tell: Callable[[str], None]) -> dict[str, Any]:
    """The report of the fastest plan."""
    problem, last = problem_of(q), [0.0]

    def progress(done: int, total: int, best: float | None) -> None:
        now = time.monotonic()
        if done == total or now - last[0] >= _EVERY:
            last[0] = now
            tell(json.dumps({"done": done, "total": total, "best": best}))

    wanted = parse_fixes(q.fix.split())
    found = find_plan(problem, wanted, _TOP, progress)
    whole = with_report(found, problem, len(found.ranked))
    best = replace(whole, alternatives=(whole.alternatives or ())[:_TOP])
    data = report_data(
        best,
        problem,
        tried=whole.alternatives or (),
        uniform=uniform_plans(problem, _COMPARED, wanted),
        command=_command(q),
    )
    data["plan"] = best.to_dict()
    data["texts"] += _inputs(q)
    return data


def _command(q: Question) -> list[str]:
    """The command that asks the same."""
    words = ["fourfold", "plan", f"{_file_name(q)}.json", "--cluster", _cluster_name(q)]
    words += ["--nodes", str(q.cluster.nodes)]
    words += ["--global-batch", str(q.batch)] if q.batch else []
    words += ["--seq-len", str(q.seq_len)] if q.seq_len else []
    words += ["--precision", q.precision] if q.precision else []
    words += ["--moments", q.moments] if q.moments != "fp32" else []
    words += ["--fix", *q.fix.split()] if q.fix.split() else []
    words += ["--what-if", *(f"{k}={v}" for k, v in q.what_if.items())] if q.what_if else []
    return [*words, "-o", "plan.json"]


def _file_name(q: Question) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", q.model or q.name).strip("-.") or "model"


def _cluster_name(q: Question) -> str:
    return "cluster.toml" if cluster_fields(q.cluster)["name"] == "cluster" else q.cluster.preset


def _inputs(q: Question) -> list[dict[str, str]]:
    """The files that the command names."""
    config = json.dumps(_models()[q.model], indent=2) + "\n" if q.model else q.config or ""
    name = f"{_file_name(q)}.json"
    out = [{"name": name, "file": name, "text": config}]
    if _cluster_name(q) == "cluster.toml":
        text = schema.dump_toml({k: v for k, v in cluster_fields(q.cluster).items() if k != "name"})
        out.append({"name": "cluster.toml", "file": "cluster.toml", "text": text})
    return out


def ask(kind: str, text: str, tell: Callable[[str], None] = lambda _: None) -> str:
    """Answer a question; errors are answers, too."""
    try:
        match kind:
            case "glance":
                answer = glance(_read(text))
            case "plan":
                answer = plan(_read(text), tell)
            case _:
                raise PlanError(f"unknown question '{kind[:40]}'; choose glance or plan")
    except FourfoldError as e:
        answer = {"error": str(e)}
    except (RecursionError, MemoryError, OverflowError, ArithmeticError) as e:
        traceback.print_exc(file=sys.stderr)
        answer = {"error": f"the planner failed on this question: {type(e).__name__}"}
    return json.dumps(answer)


def main() -> None:
    """One question from standard input: a line with its kind, and one with its text as a JSON string."""
    kind, text = sys.stdin.readline().strip(), sys.stdin.readline()
    if not kind:
        return  # the server has ended

    def say(what: str, body: str) -> None:
        sys.stdout.buffer.write(f'{{"{what}":{body}}}\n'.encode())
        sys.stdout.buffer.flush()

    try:
        say("answer", ask(kind, json.loads(text), lambda body: say("progress", body)))
    except BrokenPipeError:  # the server has ended
        os._exit(1)


if __name__ == "__main__":
    main()
