"""`fourfold demo`: train a small model on this machine and sample from it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from rich.console import Console

from fourfold.commands.look import SampleArgs, ViewArgs, sample, view_run
from fourfold.commands.train import TrainArgs, train
from fourfold.config import Config
from fourfold.errors import ConfigError

__all__ = ["DemoArgs", "demo"]


@dataclass(frozen=True)
class DemoArgs:
    """Train a small GPT on Python's own source in four processes, then generate text from it."""

    steps: int = 220
    """Optimizer steps."""
    nproc: int = 4
    """Ranks."""
    run_dir: str | None = None
    """Run directory; default: runs/demo, or the next free runs/demo-2, …"""
    debug: bool = False
    """Show tracebacks of errors."""


def demo(args: DemoArgs) -> int:
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least one step is needed")
    console = Console(highlight=False)
    run_dir = args.run_dir or _free_run_dir("runs/demo")
    config = Config.from_dict(
        {
            "model": {"family": "gpt", "layers": 2, "hidden": 128, "heads": 4, "seq_len": 64},
            "optim": {"lr": 4e-3, "warmup": min(20, args.steps), "weight_decay": 0.01},
            "train": {"steps": args.steps, "global_batch": 32, "run_dir": run_dir},
            "checkpoint": {"every": max(1, args.steps // 2)},
            "log": {"every": 20},
        }
    )
    trained = train(
        TrainArgs(
            nproc=args.nproc,
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(config)},
        )
    )
    if trained:
        return trained
    prompt = "def read"
    console.print(f"\ngenerated from the prompt [bold]{prompt}[/]:\n")
    sample(SampleArgs(run_dir=run_dir, prompt=prompt, tokens=160))
    console.print()
    from fourfold.train.rundir import RunDir
    from fourfold.view.console import facts

    page = view_run(ViewArgs(run_dir=run_dir, html=True), RunDir.find(run_dir))[0]
    facts(
        [
            ("timeline", f"{page} (opens in a browser)"),
            ("metrics", f"{run_dir}/metrics.jsonl"),
            ("checkpoints", f"{run_dir}/checkpoints/"),
            ("weights", f"{run_dir}/final/model.safetensors"),
            ("logs", f"{run_dir}/logs/"),
            ("more text", f'fourfold sample {run_dir} --prompt "class "'),
            ("your model", "fourfold train configs/gpt-tiny.toml --nproc 4"),
        ],
        console,
    )
    return 0


def _free_run_dir(base: str) -> str:
    number = 1
    while os.path.exists(path := base if number == 1 else f"{base}-{number}"):
        number += 1
    return path
