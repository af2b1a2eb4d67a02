"""Step time predicted against measured on a shaped network, plan by plan; and how good the planner's own choice is.

    python -m benchmarks.network_plans [--quick] [--only calibrate plans ranking] [--json PATH]

Four hosts (network namespaces, `fourfold.testing.network`) of one rank at 100 Mbit/s. Ranks run the real engine on real sockets;
matrix products and attention sleep for their FLOPs at a set rate (`emulated_products`), so that two cores carry four ranks.
Steps are forward, backward and reductions; the update is left out on both sides.

- **calibrate**: `fourfold calibrate`'s measurements in the hosts, against what the links were shaped to. All other sections plan
  with this cluster; nothing is fitted to their results.
- **plans**: plans of many kinds, on shapes that calibration has not seen. `ours` is predicted, `theirs` measured, in ms.
- **ranking**: every plan of a small model on four ranks, measured. For several memory budgets, the measured time of the plan
  that the planner chooses (`ours`) against the best measured among all that fit (`theirs`), the four best of one step each
  measured again in turns with it; the ratio is the median of turns, and what it lacks of 1 the regret.

Needs root; elsewhere it says why it does not run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import Row, arguments, finish, show, take_turns
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.launch.place import Place
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, UnitRule
from fourfold.planner.api import find_plan
from fourfold.planner.evaluate import PlanEvaluation, predict
from fourfold.planner.layouts import enumerate_layouts, layout_of_plan
from fourfold.planner.prediction import Prediction
from fourfold.planner.problem import Constraints, PlanProblem
from fourfold.testing.emulate import emulated_products
from fourfold.testing.network import Network, measure, missing, parse_rate
from fourfold.train.calibrate import calibrate
from fourfold.train.one_rank import OneRank

HOSTS, RATE = 4, "100mbit"
FLOPS = 1e9
"""Of the emulated devices, a second."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "layers": 6, "hidden": 128, "heads": 4, "seq_len": 32, "vocab": 128, "tie": False},
    "llama": {
        "family": "llama", "layers": 4, "hidden": 160, "heads": 4, "kv_heads": 2, "ffn": 448, "seq_len": 32, "vocab": 96,
    },
    "small": {"family": "gpt", "layers": 4, "hidden": 128, "heads": 4, "seq_len": 32, "vocab": 128, "tie": False},
}  # fmt: skip


def config_of(model: str, batch: int = 16) -> Config:
    train = {"global_batch": batch, "run_dir": "unused"}
    return Config.from_dict({"model": MODELS[model], "train": train, "data": {"source": "stdlib"}}).resolve()


def problem_of(config: Config, plan: Plan, cluster: Cluster) -> PlanProblem:
    return PlanProblem(ModelSpec.from_config(config.model), cluster, config.train.global_batch, plan.precision)


# ---- in the hosts ----


@dataclass(frozen=True)
class Measurement:
    """Steps of one plan: the median's seconds, their relative spread, and how busy the processors were."""

    seconds: float
    spread: float
    busy: float


def measured(
    rank: int, ranks: int, cases: Sequence[tuple[Config, Plan]], steps: int, hopeless: float = 0.0
) -> list[Measurement]:
    """Every plan's steps, one plan after another; the first step of each is not counted.

    With `hopeless`, a plan whose first step takes this many times the best so far is not run again.
    """
    out: list[Measurement] = []
    with emulated_products(FLOPS):
        for config, plan in cases:
            one = OneRank(config, plan, rank)

            def step(one: OneRank = one) -> None:
                one.step()
                one.zero_grad()

            found = [measure(step)]
            best = min((m.seconds for m in out), default=0.0)
            if not hopeless or not best or found[0].seconds < hopeless * best:
                found = [measure(step) for _ in range(steps)]
            one.close()
            seconds = [m.seconds for m in found]
            middle = statistics.median(seconds)
            spread = (max(seconds) - min(seconds)) / middle
            out.append(Measurement(middle, spread, max(m.busy for m in found)))
    return out


def _calibrated(rank: int, ranks: int, rate: float) -> Cluster:
    with emulated_products(rate):
        return calibrate(Place(rank, ranks, 0, 1), torch.device("cpu"), "shaped")


def calibrated(hosts: int = HOSTS, rate: str = RATE, flops: float = FLOPS) -> Cluster:
    """The cluster that calibration finds in the hosts, with memory enough for anything."""
    with Network(hosts, rate) as net:
        found: Cluster = net.run_ranks(_calibrated, flops, timeout=200)[0]
    return replace(found, device=replace(found.device, memory="1GiB", reserve="0MiB", margin=0.0))


# ---- plans ----


def plans() -> list[tuple[str, str, Plan]]:
    """(name, model, plan): modes and mixes of them, micro-batches, schedules, grids, groups within."""
    out: list[tuple[str, str, Plan]] = []

    def add(name: str, model: str, rules: Sequence[dict[str, Any]] = (), micro: int = 1, **sections: Any) -> None:
        made = {"batch": {"micro_batches": micro}, "unit": list(rules)} | sections
        out.append((name, model, Plan.from_dict(made)))

    every = lambda mode, **more: [{"match": "*", "mode": mode} | more]  # noqa: E731
    data = {"mesh": {"data": 4}}
    for mode in ("replicate", "zero2", "zero3"):
        add(f"data 4, {mode}", "gpt", every(mode), **data)
    for mode in ("replicate", "zero2", "zero3", "keep"):
        add(f"data 4, {mode}, 4 micro-batches", "gpt", every(mode), 4, **data)
    add("data 4, zero3, reduced each of 2", "llama", every("zero3", reduce="micro-batch"), 2, **data)
    add("data 4, keep, reduced each of 4", "gpt", every("keep", reduce="micro-batch"), 4, **data)
    half = [{"match": "blocks.[012].*", "mode": "zero3"}, {"match": "*", "mode": "keep"}]
    add("data 4, half zero3, half keep, 2", "gpt", half, 2, **data)
    mixed = [{"match": "*.mlp", "mode": "zero3"}, {"match": "*.attn", "mode": "zero2"}]
    add("data 4, mlp zero3, attn zero2", "llama", mixed, **data)
    add("data 4, zero3, recompute", "gpt", every("zero3", recompute="full"), 2, **data)
    add("data 4, zero3 within 2, 2", "gpt", every("zero3", within=2), 2, **data)
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        add(f"pipe 4, {schedule}, 8", "gpt", (), 8, mesh={"pipe": 4}, pipeline={"schedule": schedule})
    add("pipe 2 · data 2, 1f1b, 4", "gpt", (), 4, mesh={"pipe": 2, "data": 2})
    add("pipe 2 · data 2, zero3, 4", "llama", every("zero3"), 4, mesh={"pipe": 2, "data": 2})
    add(
        "pipe 2 · data 2, keep, zb-h1, 4",
        "gpt",
        every("keep"),
        4,
        mesh={"pipe": 2, "data": 2},
        pipeline={"schedule": "zb-h1"},
    )
    add(
        "pipe 2 · data 2, wave, 4", "gpt", every("zero2"), 4, mesh={"pipe": 2, "data": 2}, pipeline={"schedule": "wave"}
    )
    add(
        "pipe 2 · data 2, interleaved, 4",
        "gpt",
        (),
        4,
        mesh={"pipe": 2, "data": 2},
        pipeline={"schedule": "interleaved"},
    )
    add("pipe 4, wave, 8", "gpt", (), 8, mesh={"pipe": 4}, pipeline={"schedule": "wave"})
    add("pipe 2 · col 2, 1f1b, 4", "gpt", (), 4, mesh={"pipe": 2, "col": 2})
    add("col 4", "gpt", mesh={"col": 4})
    add("row 2 · col 2", "gpt", mesh={"row": 2, "col": 2})
    add("row 4", "llama", mesh={"row": 4})
    add("data 2 · col 2, zero3, 2", "gpt", every("zero3"), 2, mesh={"data": 2, "col": 2})
    add("data 2 · row 2, 2", "llama", (), 2, mesh={"data": 2, "row": 2})
    return out


def without_update(p: Prediction) -> float:
    return p.seconds - p.update


def plan_rows(cluster: Cluster, quick: bool) -> Iterator[Row]:
    chosen = plans()[:: 9 if quick else 1]
    cases = [(config_of(model), plan) for _, model, plan in chosen]
    with Network(HOSTS, RATE) as net:  # each in processes of its own, as users run it
        found = [net.run_ranks(measured, [case], 2 if quick else 3)[0][0] for case in cases]
    for (name, model, plan), (config, _), m in zip(chosen, cases, found, strict=True):
        seconds = without_update(predict(plan, problem_of(config, plan, cluster)))
        yield Row(
            f"{model}, {name}", "measured", "step ms", 1e3 * seconds, 1e3 * m.seconds, seconds / m.seconds, m.spread
        )


# ---- ranking ----

SMALL = config_of("small", 8)
BUDGETS = {"plenty of memory": 1024.0, "7 MiB": 7.0, "5.5 MiB": 5.5, "4.6 MiB": 4.6}
"""Of every rank, in MiB."""


def every_plan(cluster: Cluster) -> dict[str, Plan]:
    """All layouts of the planner's search, each with all units in one mode."""
    problem, out = problem_of(SMALL, Plan(), cluster), {}
    for layout in enumerate_layouts(problem, Constraints({})):
        again = "keep" if layout.micro_batches > 1 else "zero2"
        for mode in ("replicate", again, "zero3") if layout.replicas > 1 else ("replicate",):
            out[f"{layout}, {mode}"] = layout.plan(problem, (UnitRule(match="*", mode=mode),), None)  # type: ignore[arg-type]
    return out


def taking_turns(rank: int, ranks: int, plans: Sequence[Plan], rounds: int) -> list[list[float]]:
    """Seconds of the plans' steps, one step of each after the other."""
    with emulated_products(FLOPS):
        return take_turns([OneRank(SMALL, plan, rank) for plan in plans], rounds)


def same(a: Plan, b: Plan, cluster: Cluster) -> bool:
    """Whether two plans run the same, however they are written."""
    problem = problem_of(SMALL, a, cluster)
    one, other = (PlanEvaluation(plan, problem) for plan in (a, b))
    return replace(one.layout, tensor=other.layout.tensor) == other.layout and one.stages == other.stages


def ranking_rows(cluster: Cluster, quick: bool) -> Iterator[Row]:
    everything = every_plan(cluster)
    plans = dict(list(everything.items())[:: 20 if quick else 1])
    peak = {n: predict(p, problem_of(SMALL, p, cluster)).peak.peak for n, p in plans.items()}
    with Network(HOSTS, RATE) as net:
        found = net.run_ranks(measured, [(SMALL, p) for p in plans.values()], 1, 1.8, timeout=280)[0]
        seconds = {name: m.seconds for name, m in zip(plans, found, strict=True)}
        print(f"{len(plans)} plans measured, {min(seconds.values()) * 1e3:.0f} to {max(seconds.values()) * 1e3:.0f} ms")
        for budget, size in BUDGETS.items():
            limited = replace(cluster, device=replace(cluster.device, memory=str(int(size * 2**20))))
            chosen = find_plan(problem_of(SMALL, Plan(), limited), Constraints({})).best.plan
            fit = [n for n in plans if peak[n] <= size * 2**20]
            if not fit:  # of the few plans of a quick run
                print(f"{budget}: none of {len(plans)} plans fits")
                continue
            near = sorted(fit, key=lambda n: seconds[n])[: 2 if quick else 4]
            known = next((n for n in near if same(plans[n], chosen, cluster)), None)
            again = [plans[n] for n in near] + ([] if known else [chosen])
            turns = net.run_ranks(taking_turns, again, 1 if quick else 9, timeout=200)[0]
            best = min(range(len(near)), key=lambda i: statistics.median(turns[i]))
            ours, theirs = turns[near.index(known) if known else -1], turns[best]
            layout = layout_of_plan(chosen, problem_of(SMALL, Plan(), cluster))
            print(f"{budget}: {len(fit)} fit; best measured: {near[best]}; chosen: {known or layout}")
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            took = [1e3 * statistics.median(found) for found in (ours, theirs)]
            yield Row(f"{budget}, {len(fit)} plans", "best measured", "step ms", *took, ratio)


def link_rows(cluster: Cluster) -> Iterator[Row]:
    """What calibration found of the links, and what they were shaped to."""
    level, shaped = cluster.level[0], parse_rate(RATE)
    yield Row("bandwidth", "shaped", "MB/s", level.bandwidth / 1e6, shaped / 1e6, level.bandwidth / shaped)
    for kind, points in level.measured.items():
        name, _, members = kind.partition(" ")
        for size, _ in points[-2:]:
            n = int(members)
            passes = {"all_reduce": 2.0 * (n - 1) / n, "message": 1.0}.get(name, (n - 1) / n)
            took = cluster.message(size, 1) if name == "message" else cluster.collective(name, size, n)  # type: ignore[arg-type]
            ideal = passes * size / shaped
            yield Row(f"{kind}, {size / 2**20:.2g} MiB", "bytes / rate", "ms", 1e3 * took, 1e3 * ideal, ideal / took)


def main() -> None:
    args = arguments(__doc__ or "", ("calibrate", "plans", "ranking"))
    torch.set_num_threads(1)
    if (why := missing()) is not None:
        sys.exit(why)
    cluster = calibrated()
    rows: list[Row] = []
    if "calibrate" in args.only:
        rows += list(link_rows(cluster))
        show("links: as calibrated (ours) and as shaped", rows)
        d = cluster.device
        print(f"products {d.matrix['fp32'] * d.efficiency / 1e9:.3f} of {FLOPS / 1e9:.3f} GFLOP/s; ", end="")
        print(f"an operator {d.operator * 1e6:.0f} µs; latency {cluster.level[0].latency * 1e6:.0f} µs a hop")
    if "plans" in args.only:
        found = list(plan_rows(cluster, args.quick))
        show("step time: predicted (ours) and measured", found)
        errors = [abs(row.ratio - 1) for row in found]
        errors_said = f"error {statistics.mean(errors):.1%} on average, {max(errors):.1%} at most"
        print(f"{len(found)} plans: {errors_said}; {sum(e <= 0.1 for e in errors)} within 10 %")
        rows += found
    if "ranking" in args.only:
        found = list(ranking_rows(cluster, args.quick))
        show("the planner's choice (ours) and the best of all plans that fit", found)
        worst = max(1 / row.ratio - 1 for row in found)
        print(f"regret {worst:.1%} at most: the goal of 3 % is {'met' if worst < 0.03 else 'missed'}")
        rows += found
    finish("network_plans", rows, args.json)


if __name__ == "__main__":
    main()
