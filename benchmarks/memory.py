"""Memory predicted against bytes counted: real training on the CPU, every rank's peak, plan by plan.

    python -m benchmarks.memory [--quick] [--json PATH]

Each plan trains three steps in forked ranks under `fourfold.testing.budget`, which counts every storage from its making to its
last use. `ours` is the planner's prediction for the fullest rank, `theirs` the counted peak of the last two steps; ratio 1 is
right. Plans that this version does not run are left out, by name.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.evaluate import predict
from fourfold.planner.problem import PlanProblem

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "layers": 4, "hidden": 192, "heads": 4, "seq_len": 96, "vocab": 256},
    "llama": {
        "family": "llama", "layers": 4, "hidden": 192, "heads": 4, "kv_heads": 2, "ffn": 512, "seq_len": 96, "vocab": 256,
    },
}  # fmt: skip
MODELS["gpt, dropout"] = {**MODELS["gpt"], "dropout": 0.1}


def plans() -> list[tuple[str, str, dict[str, Any]]]:
    """(name, model, plan): recomputation, pipelines, modes, splits, grids, placements."""
    out: list[tuple[str, str, dict[str, Any]]] = []

    def add(name: str, model: str, **sections: Any) -> None:
        out.append((name, model, sections))

    for model in ("gpt", "llama"):
        add("data 2", model, mesh={"data": 2})
        for recompute in ("selective", "full"):
            add(f"data 2, {recompute}", model, mesh={"data": 2}, unit=[{"match": "*", "recompute": recompute}])
        add("data 2, 4 micro-batches", model, mesh={"data": 2}, batch={"micro_batches": 4})
        add("data 2, bf16", model, mesh={"data": 2}, precision={"compute": "bf16"}, batch={"micro_batches": 2})
        for compute in ("fp32", "bf16"):
            chunks = {"memory": {"logits": "32KiB"}, "precision": {"compute": compute}}
            add(f"data 2, {compute}, the loss in chunks", model, mesh={"data": 2}, **chunks)
        for schedule in ("1f1b", "gpipe", "zb-h1", "wave", "interleaved", "zb-v"):
            add(
                f"pipe 2, {schedule}",
                model,
                mesh={"pipe": 2},
                batch={"micro_batches": 4},
                pipeline={"schedule": schedule},
            )
        add("pipe 2 · data 2, 1f1b", model, mesh={"pipe": 2, "data": 2}, batch={"micro_batches": 4})
        for mode in ("zero2", "zero3", "keep"):
            rule = {"match": "*", "mode": mode}
            add(f"data 4, {mode}", model, mesh={"data": 4}, unit=[rule])
            add(f"data 4, {mode}, 2 micro-batches", model, mesh={"data": 4}, unit=[rule], batch={"micro_batches": 2})
        rule = {"match": "*", "mode": "zero3", "reduce": "micro-batch", "recompute": "full"}
        add("data 4, zero3, reduced each", model, mesh={"data": 4}, unit=[rule], batch={"micro_batches": 2})
        rule = {"match": "*.mlp", "mode": "zero3", "split": 4, "recompute": "per-slice"}
        add("data 2, split 4", model, mesh={"data": 2}, unit=[rule, {"match": "*", "mode": "zero3"}])
        add("pipe 2 · data 2, keep", model, mesh={"pipe": 2, "data": 2}, unit=[{"match": "*", "mode": "keep"}])
        add("pipe 2 · col 2, wave", model, mesh={"pipe": 2, "col": 2}, pipeline={"schedule": "wave"})
        add("col 2", model, mesh={"col": 2})
        add("col 2, selective", model, mesh={"col": 2}, unit=[{"match": "*", "recompute": "selective"}])
        add("data 2 · col 2, zero3", model, mesh={"data": 2, "col": 2}, unit=[{"match": "*", "mode": "zero3"}])
        add("row 2 · col 2", model, mesh={"row": 2, "col": 2})
        add("row 2 · col 2, bf16", model, mesh={"row": 2, "col": 2}, precision={"compute": "bf16"})
        add("row 2 · col 2, no overlap", model, mesh={"row": 2, "col": 2}, tensor={"overlap": False})
        for keep in (["weights"], ["inputs"], ["weights", "inputs", "gradients"]):
            name, tensor = f"row 2 · col 2, keep {' + '.join(keep)}", {"keep": keep}
            add(name, model, mesh={"row": 2, "col": 2}, tensor=tensor, batch={"micro_batches": 2})
        add("data 2, optimizer on the host", model, mesh={"data": 2}, memory={"optimizer": "host"})
        consumed = {"optimizer": "host", "gradients": "consume"}
        full = [{"match": "*", "recompute": "full"}]
        add("data 1, consumed gradients", model, memory=consumed, unit=full)
        add("data 2, consumed gradients", model, mesh={"data": 2}, memory=consumed, unit=full)
        rule = {"match": "*", "mode": "zero3", "recompute": "full"}
        add("data 4, zero3, consumed gradients", model, mesh={"data": 4}, memory=consumed, unit=[rule])
        add("col 2, consumed gradients", model, mesh={"col": 2}, memory=consumed, unit=full)
        rule = {"match": "*", "mode": "zero3", "within": 2}
        add("data 4, zero3 within 2", model, mesh={"data": 4}, unit=[rule])
    for recompute in ("none", "selective", "full"):
        add(f"data 2, {recompute}", "gpt, dropout", mesh={"data": 2}, unit=[{"match": "*", "recompute": recompute}])
    add("pipe 2, wave", "gpt, dropout", mesh={"pipe": 2}, batch={"micro_batches": 4}, pipeline={"schedule": "wave"})
    return out


def config(model: str, folder: str, plan: Plan) -> Config:
    text = Path(folder) / "corpus.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(4000)))
    norm = plan.memory.gradients != "consume"
    data = {
        "model": MODELS[model],
        "data": {"source": str(text)},
        "train": {"steps": 3, "global_batch": 16, "run_dir": f"{folder}/run", "device": "cpu", "guard": norm},
        "optim": {"warmup": 1, "clip": float(norm)},
        "log": {"trace": 0},
    }
    return Config.from_dict(data).resolve()


def counted(config: Config, plan: Plan) -> list[int]:
    """The peak of every rank, in bytes, over the last two steps."""
    from fourfold.testing.ranks import run_ranks

    return run_ranks(_train, plan.mesh.ranks, config, plan, timeout=120)


def _train(rank: int, ranks: int, config: Config, plan: Plan) -> int:
    from fourfold.testing.budget import Budget
    from fourfold.train.callbacks import Callback
    from fourfold.train.worker import fit

    budget = Budget(None)
    peaks: list[int] = []

    class Watch(Callback):
        def on_step(self, run: Any, metrics: dict[str, Any]) -> None:
            peaks.append(budget.peak.bytes)
            budget.reset_peak()

    with open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere
        with budget:
            fit(config, plan, callbacks=[Watch()])
    return max(peaks[1:])


def alone(fields: dict[str, Any], sections: dict[str, Any], rank: int = 0, batch: int = 16) -> float:
    """Predicted over counted bytes of one rank of many, in this process: no pipelines, whose messages take memory too.

    `fields`: of the model; `lora` among them is the section of the config.
    """
    from fourfold.testing.budget import Budget
    from fourfold.train.one_rank import OneRank, one_of_many

    plan, train = Plan.from_dict(sections), {"global_batch": batch, "run_dir": "unused", "device": "cpu"}
    model = {name: value for name, value in fields.items() if name != "lora"}
    norm = plan.memory.gradients != "consume"
    optim = {"clip": float(norm)}
    made = {"model": model, "train": {**train, "guard": norm}, "optim": optim, "lora": fields.get("lora", {})}
    resolved = Config.from_dict(made).resolve()
    plan.check(resolved, plan.mesh.ranks)
    cluster = Cluster.local(plan.mesh.ranks)
    problem = PlanProblem(ModelSpec.from_config(resolved.model), cluster, batch, plan.precision).of_plan(plan)
    budget = Budget()
    with one_of_many(max(2, plan.mesh.ranks), rank), budget:
        one = OneRank(resolved, plan, rank, optimizer=True)
        for attempt in range(2):
            one.step()
            one.update()
            if not attempt:
                budget.reset_peak()
    return predict(plan, problem).memory[0].peak / budget.peak.bytes


def measure(name: str, model: str, sections: dict[str, Any]) -> Row | str:
    """A row, or why there is none."""
    plan = Plan.from_dict(sections)
    with tempfile.TemporaryDirectory() as folder:
        resolved = config(model, folder, plan)
        try:
            plan.check(resolved, plan.mesh.ranks)
        except PlanError as e:
            return f"{model}, {name}: {e}"
        spec = ModelSpec.from_config(resolved.model)
        cluster, batch = Cluster.local(plan.mesh.ranks), resolved.train.global_batch
        problem = PlanProblem(spec, cluster, batch, plan.precision).of_plan(plan)
        predicted = predict(plan, problem)
        real = counted(resolved, plan)
    by_rank = plan.mesh.ranks // plan.mesh.pipe
    stages = [max(real[r * by_rank : (r + 1) * by_rank]) for r in range(plan.mesh.pipe)]
    worst = max(range(plan.mesh.pipe), key=lambda r: stages[r])
    ours = predicted.memory[worst].peak
    return Row(f"{model}, {name}", "counted", "peak_bytes", ours, stages[worst], ours / stages[worst])


def main() -> None:
    args = arguments(__doc__ or "")
    rows: list[Row] = []
    for name, model, sections in plans()[:: 5 if args.quick else 1]:
        found = measure(name, model, sections)
        if isinstance(found, str):
            print(found)
        else:
            rows.append(found)
            print(f"{found.case}: predicted / counted = {found.ratio:.4f}", flush=True)
    show("memory: ours predicted, theirs counted, ratio 1 is right", rows)
    errors = [abs(r.ratio - 1) for r in rows]
    print(f"{len(rows)} plans: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")
    finish("memory", rows, args.json)


if __name__ == "__main__":
    main()
