"""Never a plan that runs out of memory: random models, ranks and budgets, planned and run with the budget enforced.

    python -m benchmarks.fits [--quick] [--json PATH]             # 50 cases, four to five minutes; quick: 8

Every case is planned for CPU ranks with a budget of bytes each, some with a constraint (a pipeline, waves, a grid, a mode,
recomputation, the optimizer or activations on the host); the plan trains two steps in forked ranks, each under
`fourfold.testing.budget`, which refuses the first tensor over it, until the last step is done (checkpoints are written from
host memory). A case ends as `ran`, or is `refused` by the planner; one that runs out of memory is a failure. `ours` is the
counted peak, `theirs` the budget.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError, RankFailure
from fourfold.plan import Plan
from fourfold.planner.api import find_plan, problem_of_run
from fourfold.planner.build import least_memory_plan
from fourfold.planner.problem import Constraints, parse_fixes
from fourfold.planner.report import with_report

CONSTRAINTS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("pipe=2",),
    ("pipe=2", "schedule=wave"),
    ("pipe=2", "schedule=zb-h1"),
    ("col=2",),
    ("row=2",),
    ("data=2", "mode=zero3"),
    ("data=2", "mode=keep", "recompute=full"),
    ("recompute=selective",),
    ("recompute=per-slice",),
    ("optimizer=host",),
    ("activations=host",),
)


@dataclass(frozen=True)
class Case:
    """A question, with a budget somewhere between too little and plenty."""

    config: Config
    cluster: Cluster
    constraint: tuple[str, ...]

    @property
    def name(self) -> str:
        m, ranks = self.config.model, self.cluster.ranks
        constraint = f", {' '.join(self.constraint)}" if self.constraint else ""
        return f"{m.family} {m.layers}×{m.hidden}, {ranks} ranks of {self.cluster.memory / 2**20:.1f} MiB{constraint}"


def make_case(random: Random, folder: str) -> Case:
    large = random.random() < 0.15
    model: dict[str, Any] = {
        "family": random.choice(["gpt", "llama", "bert"]),
        "layers": random.randint(4, 8) if large else random.randint(2, 6),
        "hidden": 256 if large else random.choice([64, 96, 128]),
        "heads": 4,
        "seq_len": 128 if large else random.choice([32, 64]),
        "vocab": random.choice([256, 256, 1024]),
    }
    if model["family"] == "llama":
        model["kv_heads"] = random.choice([2, 4])
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
    constraint = random.choice(CONSTRAINTS)
    ranks = random.choice([2, 2, 4] if any("=2" in w for w in constraint) else [1, 2, 2, 4])
    cluster = replace(Cluster.local(ranks), name="budget")
    cluster = replace(cluster, device=replace(cluster.device, reserve="0MiB"))
    try:
        need = least_memory_plan(problem_of_run(config, cluster), parse_fixes(list(constraint))).prediction.peak.peak
    except PlanError:  # the constraint is impossible on this number of ranks: any budget will do
        need = 2.0**23
    memory = int(need * random.uniform(0.85, 3.0))
    return Case(config, replace(cluster, device=replace(cluster.device, memory=str(memory))), constraint)


def plan_of(case: Case) -> Plan:
    """The planner's plan for a case; raises PlanError where nothing fits."""
    problem = problem_of_run(case.config, case.cluster)
    wanted: Constraints = parse_fixes(list(case.constraint))
    plan = with_report(find_plan(problem, wanted), problem)
    plan.check(case.config, case.cluster.ranks)
    return plan


def _train(rank: int, ranks: int, config: Config, plan: Plan, limit: int) -> int:
    from fourfold.testing.budget import Budget
    from fourfold.train.callbacks import Callback
    from fourfold.train.worker import fit

    budget, peaks = Budget(limit), [0]

    class Watch(Callback):
        def on_step(self, run: Any, metrics: dict[str, Any]) -> None:
            peaks.append(budget.peak.bytes)
            if metrics["step"] == config.train.steps:
                budget.limit = None

    with open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere
        with budget:
            fit(config, plan, callbacks=[Watch()])
    return max(peaks)


def run_case(case: Case) -> tuple[str, int]:
    """How a case ended (`ran`, `refused`, or what went wrong), and the most bytes that a rank had."""
    from fourfold.testing.ranks import run_ranks

    try:
        plan = plan_of(case)
    except PlanError:
        return "refused", 0
    try:
        peaks = run_ranks(_train, case.cluster.ranks, case.config, plan, case.cluster.memory, timeout=120)
    except RankFailure as e:
        return f"FAILED ({plan.mesh.product()}): {str(e)[-1500:]}", 0
    return "ran", max(peaks)


def main(seed: int = 1) -> None:
    args = arguments(__doc__ or "")
    random = Random(seed)
    rows: list[Row] = []
    refused = failed = 0
    for number in range(8 if args.quick else 50):
        with tempfile.TemporaryDirectory() as folder:
            case = make_case(random, folder)
            ended, peak = run_case(case)
        if ended == "ran":
            memory = case.cluster.memory
            rows.append(Row(f"{number}: {case.name}", "budget", "peak_bytes", peak, memory, memory / peak))
            ended = f"ran, {peak / memory:.0%} of the budget"
        refused, failed = refused + (ended == "refused"), failed + ended.startswith("FAILED")
        print(f"{number}: {case.name}: {ended}", flush=True)
    show("plans within a budget", rows)
    print(f"{len(rows)} ran, {refused} refused, {failed} out of memory")
    finish("fits", rows, args.json)


if __name__ == "__main__":
    main()
