"""What `fourfold verify` runs in each rank: train a tiny model under every kind of plan, and compare it with one rank.

A case is a plan for all ranks of the job. Its losses and gradient norms in fp64 must be those of one rank to 1e-9 (the numerics
contract), whatever it splits, orders, shards or offloads. All cases run in the same processes, one after another, each in
separate process groups (torch would reuse the names of destroyed groups, and with them the addresses of closed connections, so
every case has its own prefix in the store). `cases` is a pure function of the number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.collectives import all_reduce, broadcast
from fourfold.config import Config
from fourfold.errors import FourfoldError
from fourfold.launch.place import Place
from fourfold.plan import AXES, SCHEDULES, Plan
from fourfold.train.callbacks import Callback, RunInfo
from fourfold.train.rundir import RunDir

__all__ = ["PRECISION", "Case", "cases", "measure_rates", "run_cases", "serial", "tiny_config"]

TOLERANCE = 1e-9
STEPS = 3
MODES = ("replicate", "zero2", "zero3", "keep")
PRECISION = {"compute": "fp64", "compile": False}
"""Of every case. Compiling each plan's units anew would take minutes on a GPU, and shows nothing about the plan."""


@dataclass(frozen=True)
class Case:
    """One check: a plan for all ranks, or the reason why this number of ranks cannot run it."""

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    impossible: str = ""
    """Why it cannot run here; empty if it can."""
    resume: bool = False
    """Stop half-way and resume: the same bits as without the stop."""


def cases(ranks: int, quick: bool = False) -> list[Case]:
    """Every kind of plan for this number of ranks; `quick`: one per feature."""
    found: list[Case] = []
    factor = next((p for p in range(2, ranks) if ranks % p == 0), 0)
    alone = "it needs at least two ranks"
    no_pair = f"{ranks} ranks are not a product of two axes" if ranks > 1 else alone

    def add(name: str, mesh: dict[str, int], why: str = "", **sections: Any) -> None:
        plan = {"mesh": mesh, "precision": PRECISION} | sections
        found.append(Case(name, plan, why) if not why else Case(name, impossible=why))

    for axis in AXES:
        add(f"{axis} alone", {axis: ranks}, "" if ranks > 1 else alone)
    for i, a in enumerate(AXES):
        for b in AXES[i + 1 :]:
            if not quick or (a, b) in (("pipe", "data"), ("data", "col"), ("row", "col")):
                add(f"{a} · {b}", {a: factor, b: ranks // max(1, factor)}, "" if factor else no_pair)
    if ranks % 8 == 0 and not quick:
        rest = ranks // 8
        add("pipe · data · col", {"pipe": 2, "data": 2 * rest, "col": 2})
        add("depth · row · col", {"data": rest, "depth": 2, "row": 2, "col": 2})

    pipe = {"pipe": 2, "data": ranks // 2} if ranks % 2 == 0 else {"pipe": ranks}
    for schedule in SCHEDULES:
        for executor in ("ordered", "message-driven"):
            if not quick or (schedule, executor) in (
                ("wave", "ordered"),
                ("zb-v", "ordered"),
                ("1f1b", "message-driven"),
            ):
                pipeline = {"schedule": schedule, "executor": executor, "slack": int(executor != "ordered")}
                add(f"{schedule}, {executor}", pipe, "" if ranks > 1 else alone, pipeline=pipeline)

    batch = {"micro_batches": 2}
    for mode in MODES:
        for reduce in ("step", "micro-batch"):
            if reduce == "step" or not quick:
                rule = {"match": "*", "mode": mode, "reduce": reduce}
                add(
                    f"{mode}, reduced per {reduce}",
                    {"data": ranks},
                    "" if ranks > 1 else alone,
                    unit=[rule],
                    batch=batch,
                )
    within = {"match": "*", "mode": "zero3", "within": factor}
    add("zero3 within groups", {"data": ranks}, "" if factor else no_pair, unit=[within], batch=batch)
    split = [{"match": "*.mlp", "mode": "zero3", "split": 2, "recompute": "per-slice"}, {"match": "*", "mode": "zero2"}]
    add("split and recomputed", {"data": ranks}, unit=split, batch=batch)
    for kind in ("selective", "full"):
        add(f"recompute {kind}", {"data": ranks}, unit=[{"match": "*", "recompute": kind}], batch=batch)
    if ranks > 1:
        q = max(q for q in range(1, ranks + 1) if ranks % q**2 == 0)  # of a square plane, which summa needs
        grid = {"row": factor, "col": ranks // factor} if factor else {"col": ranks}
        grid = {"depth": ranks // q**2, "row": q, "col": q} if q > 1 else grid
        for flow in ("summa", "os", "ls", "ws"):
            for residual in ("sequence", "hidden"):
                if not quick or (flow, residual) == ("summa", "hidden"):
                    add(f"flow {flow}, residual {residual}", grid, tensor={"flow": flow, "residual": residual})
    add("optimizer on the host", {"data": ranks}, memory={"optimizer": "host"}, batch=batch)
    add("activations on the host", {"data": ranks}, memory={"activations": "host"}, batch=batch)
    host = {"memory": {"optimizer": "host", "activations": "host"}, "unit": [{"match": "*", "mode": "keep"}]}
    add("everything: zb-v, keep, host", pipe, "" if ranks > 1 else alone, pipeline={"schedule": "zb-v"}, **host)
    resume = {"mesh": pipe if ranks > 1 else {}, "precision": PRECISION}
    found.append(Case("stop and resume", resume | {"unit": [{"match": "*", "mode": "zero2"}]}, resume=True))
    return found


def tiny_config(folder: Path, name: str, ranks: int, device: str, backend: str, steps: int = STEPS) -> Config:
    """A tiny model, with a layer for every stage and two sequences for every rank."""
    text = folder / "corpus.txt"
    if not text.exists():
        text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(2000)))
    layers, heads = max(4, ranks if ranks % 2 == 0 else 2 * ranks), max(4, ranks)
    model = {"family": "gpt", "layers": layers, "hidden": 8 * heads, "heads": heads, "seq_len": 8}
    train = {"steps": steps, "global_batch": 2 * ranks, "run_dir": str(folder / name), "device": device}
    data = {
        "model": model,
        "data": {"source": str(text)},
        "optim": {"lr": 1e-2, "warmup": 1},
        "train": train | {"backend": backend, "timeout": 30.0, "start_timeout": 90.0},
        "checkpoint": {"mode": "sync"},
        "log": {"trace": 0},
    }
    return Config.from_dict(data).resolve()


class _Losses(Callback):
    """Loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self.found.append((metrics["loss"], metrics["grad_norm"]))


def _train(place: Place, store: dist.Store | None, config: Config, plan: Plan, resume: bool = False) -> list[Any]:
    """Losses and norms of a run, on all ranks. The rendezvous uses a prefix of `store` that only this run uses."""
    from fourfold.train.worker import work

    layout, losses, path = plan.check(config, place.ranks), _Losses(), config.train.run_dir
    run = RunDir.create(path, config, plan) if place.rank == 0 and not resume else RunDir(path)
    rendezvous = dist.PrefixStore(f"{path} {resume}", store) if store is not None else None
    try:
        with open("/dev/null", "w") as nowhere:
            work(place, rendezvous, config, plan, layout, run, callbacks=[losses], console=nowhere)
    finally:
        run.unlock()
    return losses.found


def serial(folder: Path, ranks: int, device: str) -> list[Any]:
    """Losses and norms of one rank; before this process joins any group."""
    config = tiny_config(folder, "serial", ranks, device, "auto")
    return _train(Place(), None, config, Plan.from_dict({"precision": PRECISION}))


def run_cases(
    place: Place,
    store: dist.Store | None,
    todo: Sequence[Case],
    reference: list[Any],
    folder: Path,
    device: str,
    backend: str,
    results: Path,
) -> None:
    """Run the cases; rank 0 appends one line per case to `results`, before it (`begun`) and after it."""
    for number, case in enumerate(todo):
        name = f"case-{number}-{re.sub('[^a-z0-9]+', '-', case.name)}"
        config = tiny_config(folder, name, place.ranks, device, backend, 2 * STEPS if case.resume else STEPS)
        _note(place, results, {"name": case.name, "begun": True})
        begin = time.perf_counter()
        try:
            detail = (
                _resumed(place, store, config, case)
                if case.resume
                else _compared(place, store, config, case, reference)
            )
            line = {"result": "failed" if detail else "passed", "detail": detail}
        except FourfoldError as e:
            if e.exit_code != 2:  # 2: refused by all ranks, before anything was started
                raise
            line = {"result": "impossible", "detail": str(e)}
        _note(place, results, {"name": case.name, "seconds": time.perf_counter() - begin} | line)
        if place.rank == 0:
            shutil.rmtree(config.train.run_dir, ignore_errors=True)


def _note(place: Place, results: Path, line: dict[str, Any]) -> None:
    if place.rank == 0:
        with results.open("a") as f:
            f.write(json.dumps(line) + "\n")


def _compared(place: Place, store: dist.Store | None, config: Config, case: Case, reference: list[Any]) -> str:
    """The problem of a case; empty if it passes."""
    return _difference(_train(place, store, config, Plan.from_dict(case.plan)), reference, TOLERANCE)


def _resumed(place: Place, store: dist.Store | None, config: Config, case: Case) -> str:
    """Compare a run that stops half-way and resumes with one that does not: bit-identical; under another plan, to 1e-9."""

    def part(name: str, steps: int) -> Config:
        train = dataclasses.replace(config.train, steps=steps, run_dir=f"{config.train.run_dir}-{name}")
        return dataclasses.replace(config, train=train, optim=dataclasses.replace(config.optim, decay="constant"))

    plan = Plan.from_dict(case.plan)
    other = Plan.from_dict({"mesh": {"data": place.ranks}, "precision": PRECISION})
    whole = _train(place, store, part("whole", 2 * STEPS), plan)
    for name, then, tolerance in (("same", plan, 0.0), ("other", other, TOLERANCE)):
        _train(place, store, part(name, STEPS), plan)
        after = _train(place, store, part(name, 2 * STEPS), then, resume=True)
        problem = _difference(after, whole[STEPS:], tolerance)
        if problem:
            return f"resumed under {'the same' if then is plan else 'another'} plan: {problem}"
    return ""


def _difference(found: list[Any], expected: list[Any], tolerance: float) -> str:
    """The first difference of two series of (loss, norm), as a sentence; empty if they agree to the tolerance."""
    if len(found) != len(expected):
        return f"{len(found)} steps instead of {len(expected)}"
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), 1):
        for what, a, b in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            if not math.isfinite(a) or abs(a - b) > tolerance * abs(b):
                return (
                    f"step {step}: {what} {a:.12g} instead of {b:.12g}, relative difference {abs(a - b) / abs(b):.1e}"
                )
    return ""


def measure_rates(place: Place, device: torch.device) -> dict[str, float]:
    """This rank's matmul rate (FLOP/s), and bytes per second of an all-reduce among all and of a broadcast to all."""
    from fourfold.train.metrics import measured_flops

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {"matmul": measured_flops(device, dtype, 4096 if device.type == "cuda" else 384)}
    if place.ranks > 1:
        assert dist.group.WORLD is not None
        group, x = dist.group.WORLD, torch.zeros(2 << 20, device=device)

        def seconds(start: Any) -> float:
            best = float("inf")
            for _ in range(5):
                dist.barrier()
                begin = time.perf_counter()
                start().wait()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - begin)
            return best

        moved = 2 * (place.ranks - 1) / place.ranks * x.nbytes
        found["all_reduce"] = moved / seconds(lambda: all_reduce(x, group, "a measurement", now=True))
        found["broadcast"] = x.nbytes / seconds(lambda: broadcast(x, 0, group, "a measurement", now=True))
    return found
