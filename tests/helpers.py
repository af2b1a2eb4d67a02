"""Runs of training inside tests: small models, ranks as forked processes, metrics as the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.offload.split import round_half_up
from fourfold.plan import Plan
from fourfold.runtime import compiled
from fourfold.testing.order import SameOrder
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
    "llama": {
        "family": "llama",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "seq_len": 16,
        "qkv_bias": True,
        "qk_norm": True,
    },
    "bert": {"family": "bert", "layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
}


def make_config(run_dir: Path, model: str | dict[str, Any] = "gpt", **sections: dict[str, Any]) -> Config:
    """A small config; `train={"steps": 3}` and the like override its sections."""
    text = run_dir.parent / "corpus.txt"
    if not text.exists():
        text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(2000)))
    data: dict[str, dict[str, Any]] = {
        "model": dict(MODELS[model] if isinstance(model, str) else model),
        "data": {"source": str(text)},
        "optim": {"lr": 1e-2, "warmup": 2},
        "train": {"steps": 4, "global_batch": 12, "run_dir": str(run_dir), "device": "cpu"},
    }
    for name, fields in sections.items():
        data[name] = data.get(name, {}) | fields
    return Config.from_dict(data)


def run_training(
    config: Config, plan: dict[str, Any], ranks: int, *, resume: bool = False, watched: bool = False
) -> list[dict[str, Any]]:
    """Train in `ranks` forked processes; returns the lines of metrics.jsonl.

    `watched`: at every step's end, all ranks of every group must have issued the same collectives in the same order.
    """
    compared = run_ranks(_train, ranks, config, plan, resume, watched)
    assert not watched or ranks == 1 or min(compared) > 0
    return list(read_metrics(RunDir(config.train.run_dir)))


def _train(rank: int, ranks: int, config: Config, plan: dict[str, Any], resume: bool, watched: bool) -> int:
    import sys

    order = SameOrder()
    with open("/dev/null", "w") as nowhere, order if watched else nullcontext():
        sys.stdout = nowhere
        fit(config, Plan.from_dict(plan), resume=resume, callbacks=[order] if watched else [])
    return order.compared


class SerialRuns(dict[str, list[dict[str, Any]]]):
    """Metrics of runs on one process in fp64, by model. Each is trained when it is first asked for."""

    def __init__(self, config: Callable[[str], Config], **plan: Any):
        self._config, self._plan = config, plan

    def __missing__(self, name: str) -> list[dict[str, Any]]:
        self[name] = run_training(self._config(name), {"precision": {"compute": "fp64"}, **self._plan}, 1)
        return self[name]


def compile_without_code(monkeypatch: pytest.MonkeyPatch, *, fullgraph: bool = True) -> None:
    """Let units be captured and differentiated ahead of time as for a GPU; generating C++ would take most of a minute."""
    from torch._dynamo.backends.registry import lookup_backend  # it takes seconds

    aot_eager = lookup_backend("aot_eager")
    monkeypatch.setattr(compiled, "_lower", lambda graph, inputs, options: aot_eager(graph, inputs))
    if fullgraph:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True))


def series(metrics: list[dict[str, Any]], key: str) -> list[float]:
    return [m[key] for m in metrics if key in m]


def rounded_half_up(master: Tensor) -> Tensor:
    """fp32 as bf16, as the optimizers round it."""
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    round_half_up(master, weight)
    return weight
