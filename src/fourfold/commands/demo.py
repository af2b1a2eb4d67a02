"""`fourfold demo`: plan a small model under a pretended memory limit, train it by that plan, sample from it, draw a timeline."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fourfold.cluster import Cluster, Device, Host, Level
from fourfold.commands.look import SampleArgs, ViewArgs, sample, view_run
from fourfold.commands.train import TrainArgs, train
from fourfold.config import Config
from fourfold.errors import ConfigError, PlanError
from fourfold.plan import Mesh, Plan, UnitRule

__all__ = ["DemoArgs", "demo", "demo_config", "demo_plan"]

LIMIT = 3.1 * 2**20
"""Bytes of tensors that each of eight ranks may hold: too little for any single axis, without recomputing activations."""
BATCH = 8
CORES = 2
"""The plan is made for a machine with this many cores, so that it is the same everywhere."""


@dataclass(frozen=True)
class DemoArgs:
    """Plan a small GPT for ranks with little memory, train it on Python's own source by that plan, then generate text from it."""

    steps: int = 160
    """Optimizer steps."""
    nproc: int = 8
    """Ranks."""
    run_dir: str | None = None
    """Run directory; default: runs/demo, or the next free runs/demo-2, …"""
    debug: bool = False
    """Show tracebacks of errors."""


def demo(args: DemoArgs) -> int:
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least one step is needed")
    if args.nproc < 1 or BATCH % args.nproc:
        raise ConfigError(f"--nproc {args.nproc}: the demo trains on {BATCH} sequences a step; use 1, 2, 4 or 8 ranks")
    from fourfold.view.console import facts

    console = Console(highlight=False)
    run_dir = args.run_dir or _free_run_dir("runs/demo")
    config = demo_config(args.steps, run_dir)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan, lines = demo_plan(config.resolve(), args.nproc)
        plan.save(path)
        facts(lines, console)
        console.print()
        sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        if failed := train(TrainArgs(plan=str(path), **sections)):
            return failed
    prompt = "def read"
    seen = args.steps * BATCH * config.model.seq_len
    console.print(
        f"\ngenerated from the prompt [bold]{prompt}[/], after {seen:,} bytes of text: code by its look, not by its sense\n"
    )
    sample(SampleArgs(run_dir=run_dir, prompt=prompt, tokens=160))
    console.print()
    from fourfold.train.rundir import RunDir
    from fourfold.view.steps import median_step, read_steps

    run = RunDir.find(run_dir)
    step = median_step(read_steps(run))  # one step of a busy machine may be several times as long as the others
    page = view_run(ViewArgs(run_dir=run_dir, html=True, step=step), run)[0]
    facts(
        [
            ("metrics", f"{run_dir}/metrics.jsonl"),
            ("checkpoints", f"{run_dir}/checkpoints/"),
            ("weights", f"{run_dir}/final/model.safetensors"),
            ("more text", f'fourfold sample {run_dir} --prompt "class "'),
            ("why so slow", f"fourfold why {run_dir}"),
            ("your model", "fourfold train configs/gpt-tiny.toml --nproc 4"),
            ("timeline", f"{page}: what was planned and what was done in step {step}, the median; opens in a browser"),
        ],
        console,
    )
    return 0


def demo_config(steps: int, run_dir: str) -> Config:
    """The config of the demo."""
    return Config.from_dict(
        {
            "model": {"family": "gpt", "layers": 2, "hidden": 128, "heads": 4, "seq_len": 64},
            "optim": {"lr": 4e-3, "warmup": min(20, steps), "weight_decay": 0.01},
            "train": {"steps": steps, "global_batch": BATCH, "run_dir": run_dir},
            "checkpoint": {"every": max(1, steps // 2)},
            "log": {"every": 20},
        }
    )


def demo_plan(config: Config, ranks: int) -> tuple[Plan, list[tuple[str, str]]]:
    """The planner's plan for ranks with little memory, explained in four lines."""
    from fourfold.planner.api import find_plan, judge, problem_of_run
    from fourfold.planner.problem import parse_fixes
    from fourfold.planner.report import with_report
    from fourfold.schema import format_bytes, format_seconds
    from fourfold.view.explain import describe_units

    limit = int(LIMIT * max(1.0, 8 / ranks))
    while True:
        problem = problem_of_run(config, _pretended(ranks, limit))
        try:
            plan = with_report(find_plan(problem, parse_fixes([])), problem)
            plan.check(config, ranks)
            break
        except PlanError:  # fewer ranks need more
            if limit > 2**30:
                raise
            limit += limit // 4

    def needs(single: Plan) -> str:
        p = judge(single, problem).predicted or {}
        slower = p["seconds"] / (plan.predicted or {})["seconds"] - 1
        fits = "" if p["misfit"] else f" (fits, and takes {slower:+.0%} time)"
        return f"{format_bytes(p['peak_bytes'])}{fits}"

    assert plan.predicted is not None
    best, *others = plan.alternatives or ()
    held, seconds = format_bytes(plan.predicted["peak_bytes"]), format_seconds(plan.predicted["seconds"])
    lines = [
        (
            "memory",
            f"each rank may hold {format_bytes(limit)} of tensors (pretended); one rank alone needs {needs(Plan())}",
        ),
        (
            "one axis",
            ", ".join(f"{name} {needs(p)}" for name, p in _singles(ranks))
            + f" without recomputing; the limit is {format_bytes(limit)}",
        ),
        ("planned", f"{best['plan']}; {describe_units(best)}: {held}, about {seconds} a step"),
    ]
    if others:
        next_best = f"{others[0]['plan']}; {describe_units(others[0])}"
        lines.append(("next best", f"{next_best}: {others[0]['seconds'] / best['seconds'] - 1:+.0%} time"))
    return plan, [line for line in lines if ranks > 1 or line[0] != "one axis"]


def _pretended(ranks: int, limit: int) -> Cluster:
    """Ranks that share two cores, each with `limit` bytes for tensors, and a host that has no room for any."""
    share = min(CORES, ranks) / ranks
    return Cluster(
        name="local",
        devices=ranks,
        device=Device(
            name="CPU core",
            kind="cpu",
            memory=str(limit),
            reserve="0MiB",
            margin=0.0,
            matrix={"bf16": 10e9 * share, "fp32": 40e9 * share, "fp64": 20e9 * share},
            attention=0.5,
            memory_rate=4e9 * share,
            operator=2e-5,
        ),
        host=Host(memory="1MiB", link=4e9),
        level=(Level(name="loopback", bandwidth=1e9 * share, latency=2e-4),),
        overlap=0.0,
        source="a pretended machine",
    )


def _singles(ranks: int) -> Iterator[tuple[str, Plan]]:
    """Plans that use one axis, as far as it goes for this model: 4 stages, 4 heads; the other ranks are replicas."""
    if ranks == 1:
        return
    four = 4 if ranks % 4 == 0 else 2 if ranks % 2 == 0 else 1
    yield f"replicas on {ranks} ranks", Plan(mesh=Mesh(data=ranks))
    yield f"sharding over {ranks} ranks (zero3)", Plan(mesh=Mesh(data=ranks), unit=(UnitRule(match="*", mode="zero3"),))
    if four > 1:
        yield f"{four} stages", Plan(mesh=Mesh(pipe=four, data=ranks // four))
        yield f"{four} columns", Plan(mesh=Mesh(col=four, data=ranks // four))


def _free_run_dir(base: str) -> str:
    number = 1
    while os.path.exists(path := base if number == 1 else f"{base}-{number}"):
        number += 1
    return path
