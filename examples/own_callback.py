"""Your own code in the training loop: stop worrying about the best evaluation, write it down.

python examples/own_callback.py                                    one rank
torchrun --standalone --nproc-per-node 2 examples/own_callback.py  two
"""

from __future__ import annotations

import json
from typing import Any

import fourfold as ff
from fourfold.train.callbacks import RunInfo


class KeepBest(ff.Callback):
    """Writes best.json into the run directory whenever an evaluation is better than all before it."""

    def __init__(self) -> None:
        self.best = float("inf")

    def on_eval(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        if run.rank == 0 and metrics["eval_loss"] < self.best:
            self.best = metrics["eval_loss"]
            (run.run_dir / "best.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    config = ff.Config.from_dict(
        {
            "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "seq_len": 32},
            "train": {"steps": 20, "global_batch": 8, "eval_every": 5, "run_dir": "runs/own-callback"},
        }
    )
    outcome = ff.fit(config, callbacks=[KeepBest()])
    print(f"trained {outcome.steps} steps in {outcome.run_dir}")
