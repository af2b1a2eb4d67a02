"""Step time predicted against measured on a shaped network, plan by plan; and how good the planner's own choice is.

    python -m benchmarks.network_plans [--quick] [--only calibrate plans ranking] [--json PATH]

Four hosts (network namespaces, `fourfold.testing.network`) of one rank at 200 Mbit/s. Ranks run the real engine on real sockets;
matrix products and attention sleep for their FLOPs at a set rate (`emulated_products`), so that two cores carry four ranks.
Steps are forward, backward and reductions; the update is left out on both sides.

- **calibrate**: `fourfold calibrate`'s measurements in the hosts, against what the links were shaped to. All other sections plan
  with this cluster; nothing is fitted to their results.
- **plans**: plans of many kinds, on shapes that calibration has not seen. `ours` is predicted, `theirs` measured, in ms.
- **ranking**: every plan of a small model on four ranks, measured. For several memory budgets, the measured time of the plan
  that the planner chooses (`ours`) against the best measured among all that fit (`theirs`): its regret is 1 - ratio.

Needs root; elsewhere it says why it does not run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.launch.place import Place
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.predict import Prediction, predict
from fourfold.testing.emulate import emulated_products
from fourfold.testing.network import Network, measure, missing
from fourfold.testing.one_rank import OneRank
from fourfold.train.calibrate import calibrate

HOSTS, RATE = 4, "200mbit"
FLOPS = 2e9
"""Of the emulated devices, a second."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "layers": 6, "hidden": 128, "heads": 4, "seq_len": 32, "vocab": 128, "tie": False},
    "llama": {
        "family": "llama", "layers": 4, "hidden": 160, "heads": 4, "kv_heads": 2, "ffn": 448, "seq_len": 32, "vocab": 96,
    },
}  # fmt: skip


def config_of(model: str, batch: int = 16) -> Config:
    train = {"global_batch": batch, "run_dir": "unused"}
    return Config.from_dict({"model": MODELS[model], "train": train, "data": {"source": "stdlib"}}).resolve()


def setting_of(config: Config, plan: Plan, cluster: Cluster) -> Setting:
    return Setting(ModelSpec.from_config(config.model), cluster, config.train.global_batch, plan.precision)


# ---- in the hosts ----


@dataclass(frozen=True)
class Measurement:
    """Steps of one plan: the median's seconds, their relative spread, and how busy the processors were."""

    seconds: float
    spread: float
    busy: float


def measured(
    rank: int, ranks: int, cases: Sequence[tuple[Config, Plan]], steps: int, rate: float = FLOPS
) -> list[Measurement]:
    """Every plan's steps, one plan after another; the first step of each is not counted."""
    out = []
    with emulated_products(rate):
        for config, plan in cases:
            one = OneRank(config, plan, rank)

            def step(one: OneRank = one) -> None:
                one.step()
                one.zero_grad()

            found = [measure(step) for _ in range(steps + 1)][1:]
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
    with Network(HOSTS, RATE) as net:
        found = net.run_ranks(measured, cases, 2 if quick else 4, timeout=220)[0]
    for (name, model, plan), (config, _), m in zip(chosen, cases, found, strict=True):
        seconds = without_update(predict(plan, setting_of(config, plan, cluster)))
        yield Row(
            f"{model}, {name}", "measured", "step ms", 1e3 * seconds, 1e3 * m.seconds, seconds / m.seconds, m.spread
        )


def main() -> None:
    args = arguments(__doc__ or "", ("calibrate", "plans", "ranking"))
    torch.set_num_threads(1)
    if (why := missing()) is not None:
        sys.exit(why)
    cluster = calibrated()
    rows: list[Row] = []
    print(cluster)
    if "plans" in args.only:
        found = list(plan_rows(cluster, args.quick))
        show("step time: predicted (ours) and measured", found)
        errors = [abs(row.ratio - 1) for row in found]
        print(f"{len(found)} plans: error {statistics.mean(errors):.1%} on average, {max(errors):.1%} at most")
        rows += found
    finish("network_plans", rows, args.json)


if __name__ == "__main__":
    main()
