"""The numerics contract for replicated training: any number of ranks gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.collectives import Pending
from fourfold.shard import sharing
from tests.helpers import MODELS, compile_without_code, make_config, run_training, series


def plan(data: int, micro_batches: int = 1, **precision: Any) -> dict[str, Any]:
    return {"mesh": {"data": data}, "batch": {"micro_batches": micro_batches}, "precision": precision}


def largest_gap(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) > 0
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_fp64_ranks_and_micro_batches_match_one_process(tmp_path: Path, model: str) -> None:
    steps = {"steps": 20}
    reference = run_training(make_config(tmp_path / "one", model, train=steps), plan(1, compute="fp64"), 1)
    for ranks, micro in ((2, 3), (3, 2), (4, 1)):
        config = make_config(tmp_path / f"{ranks}", model, train=steps)
        found = run_training(config, plan(ranks, micro, compute="fp64"), ranks)
        for key in ("loss", "grad_norm"):
            assert largest_gap(series(reference, key), series(found, key)) <= 1e-9


@pytest.mark.parametrize("model", MODELS)
def test_fp32_ranks_match_one_process(tmp_path: Path, model: str) -> None:
    steps = {"steps": 8}
    reference = run_training(make_config(tmp_path / "one", model, train=steps), plan(1), 1)
    for ranks in (2, 3, 4):
        found = run_training(make_config(tmp_path / f"{ranks}", model, train=steps), plan(ranks), ranks)
        assert largest_gap(series(reference, "loss"), series(found, "loss")) <= 1e-5
        assert largest_gap(series(reference, "grad_norm"), series(found, "grad_norm")) <= 1e-4


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_same_plan_twice_gives_the_same_bits(tmp_path: Path, compute: str) -> None:
    weights = []
    for name in ("a", "b"):
        config = make_config(tmp_path / name, MODELS["gpt"] | {"dropout": 0.1})
        metrics = run_training(config, plan(3, 2, compute=compute), 3)
        final = (tmp_path / name / "final" / "model.safetensors").read_bytes()
        weights.append((series(metrics, "loss"), series(metrics, "grad_norm"), final))
    assert weights[0] == weights[1]


def test_dropout_is_for_training_and_not_for_evaluation(tmp_path: Path) -> None:
    """With weights that do not change: evaluations are those without dropout, the steps between them are not."""
    found = []
    for rate in (0.0, 0.4):
        config = make_config(
            tmp_path / f"{rate}",
            MODELS["gpt"] | {"dropout": rate},
            optim={"lr": 1e-30},
            train={"steps": 3, "eval_every": 1},
        )
        metrics = run_training(config, plan(1, 2), 1)
        found.append((series(metrics, "loss"), series(metrics, "eval_loss")))
    (losses, evaluated), (dropped, also) = found
    assert also == pytest.approx(evaluated, rel=1e-6)
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses, dropped, strict=True))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_recomputation_changes_no_bit(tmp_path: Path, model: str, recompute: str) -> None:
    losses = []
    for kind in ("none", recompute):
        config = make_config(tmp_path / kind, MODELS[model] | {"dropout": 0.1})
        rules = {"unit": [{"match": "blocks.*", "recompute": kind}]}
        losses.append(series(run_training(config, plan(2, 2) | rules, 2), "grad_norm"))
    assert losses[0] == losses[1]


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    losses = []
    for compute in ("fp32", "bf16"):
        config = make_config(tmp_path / compute, "gpt", train={"steps": 8})
        losses.append(series(run_training(config, plan(2, compute=compute), 2), "loss"))
    assert largest_gap(*losses) <= 0.02
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_compiled_units_match(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and differentiated ahead of time by torch.compile; generating C++ would take most of a minute."""
    compile_without_code(monkeypatch)
    losses = []
    for compiled in (False, True):
        config = make_config(tmp_path / str(compiled), name, train={"steps": 2})
        losses.append(series(run_training(config, plan(1, compile=compiled), 1), "loss"))
    assert largest_gap(*losses) <= 1e-5


def test_without_the_reduction_ranks_do_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's test can fail: leave the all-reduce out and the loss goes another way."""
    reference = run_training(make_config(tmp_path / "one"), plan(1, compute="fp64"), 1)
    monkeypatch.setattr(sharing, "all_reduce", lambda x, group, what: Pending(None, what))
    found = run_training(make_config(tmp_path / "two", train={"check_replicas": -1}), plan(2, compute="fp64"), 2)
    assert largest_gap(series(reference, "loss"), series(found, "loss")) > 1e-4
