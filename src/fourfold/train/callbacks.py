"""Callbacks: your code, called by the training loop. Subclass `Callback` and override what you need.

    class Best(ff.Callback):
        def on_eval(self, run, metrics):
            print("evaluated", metrics["eval_loss"])

    ff.fit(config, plan, callbacks=[Best()])

Every rank calls its callbacks; check `run.rank` to act on one rank only. A callback that raises stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.plan import Plan

__all__ = ["Callback", "RunInfo", "extra_callbacks"]

Metrics = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """Information about the run, passed to callbacks."""

    config: Config
    plan: Plan
    run_dir: Path
    rank: int
    ranks: int
    parameters: int


class Callback:
    """Base class of callbacks; every method does nothing by default."""

    def on_start(self, run: RunInfo, step: int) -> None:
        """Before the first step; `step` is the number of steps already done (0 for a new run)."""

    def on_step(self, run: RunInfo, metrics: Metrics) -> None:
        """After every step, with the line written to metrics.jsonl."""

    def on_eval(self, run: RunInfo, metrics: Metrics) -> None:
        """After an evaluation: `step`, `eval_loss`, `eval_tokens`, `eval_seconds`."""

    def on_saving(self, run: RunInfo, metrics: Metrics) -> None:
        """When training continues after a save was started: `step`, and `save_seconds`, the time that training waited."""

    def on_save(self, run: RunInfo, step: int, path: Path) -> None:
        """After a checkpoint is complete."""

    def on_end(self, run: RunInfo, step: int) -> None:
        """After the last step."""


class TensorBoard(Callback):
    """Scalars of every step, under run_dir/tensorboard."""

    def on_start(self, run: RunInfo, step: int) -> None:
        if run.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=step + 1)

    def on_step(self, run: RunInfo, metrics: Metrics) -> None:
        if run.rank == 0:
            for name, value in metrics.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(name, value, metrics["step"])

    on_eval = on_saving = on_step

    def on_end(self, run: RunInfo, step: int) -> None:
        if run.rank == 0:
            self.writer.close()


class WeightsAndBiases(Callback):
    """The same, to Weights & Biases."""

    def on_start(self, run: RunInfo, step: int) -> None:
        if run.rank == 0:
            import wandb

            config = {"config": run.config.to_dict(), "plan": run.plan.to_dict()}
            self.run = wandb.init(project=run.config.log.wandb, dir=run.run_dir, config=config, resume="allow")

    def on_step(self, run: RunInfo, metrics: Metrics) -> None:
        if run.rank == 0:
            self.run.log({k: v for k, v in metrics.items() if k != "step"}, step=metrics["step"])

    on_eval = on_saving = on_step

    def on_end(self, run: RunInfo, step: int) -> None:
        if run.rank == 0:
            self.run.finish()


def extra_callbacks(config: Config) -> list[Callback]:
    """The callbacks enabled in `[log]`; raises ConfigError if their package is not installed."""
    from importlib.util import find_spec

    chosen: list[Callback] = []
    for wanted, package, make in (
        (config.log.tensorboard, "tensorboard", TensorBoard),
        (bool(config.log.wandb), "wandb", WeightsAndBiases),
    ):
        if wanted:
            if find_spec(package) is None:
                raise ConfigError(f"log.{package} needs the extra: pip install 'fourfold[{package}]'")
            chosen.append(make())
    return chosen
