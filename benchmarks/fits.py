"""Never a plan that runs out of memory: random models, ranks and budgets, planned and run with the budget enforced.

    python -m benchmarks.fits [--quick] [--json PATH]

Every case is planned for CPU ranks with so many bytes each; the plan trains two steps in forked ranks, each under
`fourfold.testing.budget`, which refuses the first tensor over it. A case ends as `ran`, or is `refused` by the planner; one
that runs out of memory is a failure. `ours` is the counted peak, `theirs` the budget.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError, RankFailure
from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.layouts import parse_fixes
from fourfold.planner.misfit import smallest
from fourfold.planner.runnable import first_runnable, run_setting


def case(random: Random, folder: str) -> tuple[Config, Cluster]:
    """A model and ranks, with a budget somewhere between too little and plenty."""
    family = random.choice(["gpt", "llama", "bert"])
    hidden = random.choice([64, 96, 128])
    model: dict[str, Any] = {
        "family": family,
        "layers": random.randint(2, 6),
        "hidden": hidden,
        "heads": 4,
        "seq_len": random.choice([32, 64]),
        "vocab": 256,
    }
    text = Path(folder) / "corpus.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(3000)))
    config = Config.from_dict(
        {
            "model": model,
            "data": {"source": str(text)},
            "train": {"steps": 2, "global_batch": 16, "run_dir": f"{folder}/run", "device": "cpu"},
            "optim": {"warmup": 1},
            "log": {"trace": 0},
        }
    ).resolve()
    ranks = random.choice([1, 2, 2, 4])
    cluster = replace(Cluster.local(ranks), name="budget")
    cluster = replace(cluster, device=replace(cluster.device, reserve="0MiB"))
    setting: Setting = run_setting(config, cluster)
    least, _ = smallest(setting, parse_fixes([]))
    memory = int(least * random.uniform(0.85, 3.0))
    return config, replace(cluster, device=replace(cluster.device, memory=str(memory)))


def _train(rank: int, ranks: int, config: Config, plan: Plan, limit: int) -> int:
    from fourfold.testing.budget import Budget
    from fourfold.train.worker import fit

    budget = Budget(limit)
    with open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere
        with budget:
            fit(config, plan)
    return budget.peak.bytes


def main() -> None:
    args = arguments(__doc__ or "")
    from fourfold.testing.ranks import run_ranks

    random = Random(1)
    rows: list[Row] = []
    refused = failed = 0
    for number in range(8 if args.quick else 50):
        with tempfile.TemporaryDirectory() as folder:
            config, cluster = case(random, folder)
            m = config.model
            name = (
                f"{number}: {m.family} {m.layers}×{m.hidden}, {cluster.ranks} ranks of {cluster.memory / 2**20:.1f} MiB"
            )
            try:
                plan = first_runnable(config, run_setting(config, cluster), cluster.ranks)
            except PlanError as e:
                refused += 1
                print(f"{name}: refused: {str(e)[:90]}")
                continue
            try:
                peaks = run_ranks(_train, cluster.ranks, config, plan, cluster.memory, timeout=120)
            except RankFailure as e:
                failed += 1
                print(f"{name}: FAILED {plan.mesh.product()}: {str(e)[-300:]}")
                continue
            rows.append(Row(name, "budget", "peak_bytes", max(peaks), cluster.memory, cluster.memory / max(peaks)))
            print(f"{name}: ran, {max(peaks) / cluster.memory:.0%} of the budget ({plan.mesh.product()})", flush=True)
    show("plans within a budget", rows)
    print(f"{len(rows)} ran, {refused} refused, {failed} out of memory")
    finish("fits", rows, args.json)


if __name__ == "__main__":
    main()
