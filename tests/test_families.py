"""Every Hugging Face family: logits and gradients of transformers, in fp64 and fp32; any plan trains like one process."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fourfold.config import Config, ModelConfig
from fourfold.model.build import serial_model
from fourfold.model.families import FAMILIES
from fourfold.model.hf import read_config
from fourfold.model.operators import ModelSpec
from fourfold.model.spec import parameter_count, parameter_shapes, unit_names
from fourfold.plan import Plan
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit
from tests.families import CASES, EVERY, TOKENS, VOCAB, config_of, gradients_gap, ours, tensors_of, theirs, wide
from tests.helpers import make_config, series
from tests.tensor.common import restless_model


def test_every_family_is_tested() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, dtype: torch.dtype, close: float, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1)
    with wide(dtype):
        other = theirs(name, dtype)
        expected = other(input_ids=tokens).logits
        F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    m = config_of(other, tmp_path)
    model = ours(name, m, tensors_of(other), dtype)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(m)
    assert list(model.units()) == unit_names(m)
    assert parameter_count(m) == sum(p.numel() for p in other.parameters())
    with torch.no_grad():
        assert (model(tokens) - expected).abs().max() < min(close, 1e-5) * expected.abs().max()
    model(tokens, targets).backward()
    assert gradients_gap(model, name, other) < close


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt_neox"])
def test_models_of_transformers_are_traced_as_they_are(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **CASES[name]))
    traced = ModelSpec.from_module(model, torch.zeros(2, TOKENS, dtype=torch.long))
    m = config_of(model, tmp_path)
    spec = ModelSpec.from_config(m)
    assert (traced.parameters, traced.layers, traced.tied) == (spec.parameters, spec.layers, spec.tied)
    more = 1.1 if any(m.windows) else 1.0  # theirs multiplies with keys outside of a window, too
    assert spec.flops_per_token * (1 - 1e-9) < traced.flops_per_token < spec.flops_per_token * more * (1 + 1e-9)
    ours = ModelSpec.from_module(serial_model(m, 0), torch.zeros(2, TOKENS, dtype=torch.long))
    assert ours.flops_per_token == pytest.approx(spec.flops_per_token)


# ---- any plan trains like one process ----

PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": {"pipe": 2, "col": 2}, "batch": {"micro_batches": 2}},
    {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "zb-h1"}, "unit": [{"match": "*", "mode": "zero3"}]},
    {"mesh": {"data": 2, "col": 2}, "unit": [{"match": "*", "mode": "zero3", "recompute": "selective"}]},
    {"mesh": {"col": 4}, "tensor": {"residual": "hidden"}},
    {"mesh": {"row": 2, "col": 2}, "unit": [{"match": "*", "recompute": "full"}], "tensor": {"flow": "ws"}},
    {"mesh": {"pipe": 2, "col": 2}, "unit": [{"match": "*", "recompute": "full"}], "tensor": {"residual": "hidden"}},
    {"mesh": {"data": 4}, "unit": [{"match": "head", "mode": "zero3", "split": 3}, {"match": "*", "mode": "zero3"}]},
    {
        "mesh": {"data": 4},
        "unit": [{"match": "*", "mode": "zero3", "recompute": "full"}],
        "memory": {"optimizer": "host"},
    },
)
SPLIT: dict[str, Any] = {
    "mesh": {"data": 2, "col": 2},
    "unit": [{"match": "*.mlp", "mode": "zero3", "split": 2, "recompute": "full"}, {"match": "*", "mode": "zero3"}],
}
"""MLPs in slices, where the family allows it."""


def plans_of(name: str) -> list[dict[str, Any]]:
    """Three plans for a family: one of the pipelines, one with columns, one with zero3 or (where it can) slices.

    Only one of them, another one for the next family, unless FOURFOLD_SLOW_TESTS is set.
    """
    draw = random.Random(name)
    groups = (PLANS[:2], PLANS[3:6], (PLANS[2], *PLANS[6:]))
    chosen = [draw.choice(group) for group in groups]
    if name in SPLITTABLE:
        chosen[2] = SPLIT
    at = FAMILY_NAMES.index(name) // PARTS % len(chosen)
    return chosen if os.environ.get("FOURFOLD_SLOW_TESTS") else [chosen[at]]


SPLITTABLE = ("gpt_neox", "cohere", "granite", "stablelm parallel")
FAMILY_NAMES = [*CASES, "stablelm parallel"]
PARTS = 3


def training_config(folder: Path, name: str) -> Config:
    """A run of two steps, with weights so large that every feature changes the loss."""
    kind, number = name.split()[0], list(EVERY).index(name)
    path = folder / f"{number}" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(EVERY[name] | {"model_type": kind}))
    model = ModelConfig(**read_config(path, 12) | {"seq_len": 12, "init_std": 0.3, "vocab": 256})
    run = make_config(
        folder / f"run-{number}",
        train={"steps": 2, "global_batch": 4},
        optim={"lr": 0.1, "warmup": 0},
        log={"trace": 0},
    )
    return dataclasses.replace(run, model=model)


def train_all(rank: int, ranks: int, jobs: list[tuple[str, Config, dict[str, Any]]]) -> list[tuple[str, Any]]:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    found = []
    for name, config, plan in jobs:
        fit(config, Plan.from_dict(plan | {"precision": {"compute": "fp64"}}))
        metrics = list(read_metrics(RunDir(config.train.run_dir)))
        found.append((name, [series(metrics, key) for key in ("loss", "grad_norm")]))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_any_plan_trains_like_one_process(tmp_path: Path, part: int) -> None:
    serial, jobs, alone_at = [], [], []
    for number, name in enumerate(FAMILY_NAMES[part::PARTS]):
        config = training_config(tmp_path, name)
        serial.append((name, config, {}))
        for i, plan in enumerate(plans_of(name)):
            train = dataclasses.replace(config.train, run_dir=f"{config.train.run_dir}-{i}")
            jobs.append((f"{name}: {plan}", dataclasses.replace(config, train=train), plan))
            alone_at.append(number)
    (expected,) = run_ranks(train_all, 1, serial, timeout=120.0)
    found, *_ = run_ranks(train_all, 4, jobs, timeout=240.0)
    for number, (title, series_of_plan) in zip(alone_at, found, strict=True):
        for mine, alone in zip(series_of_plan, expected[number][1], strict=True):
            assert mine == pytest.approx(alone, rel=1e-9), title


# ---- every feature shows ----

MUTATIONS = (
    ("gemma2", {"attn_softcap": 0.0}),
    ("gemma2", {"logit_softcap": 0.0}),
    ("gemma2", {"attn_scale": 0.0}),
    ("gemma2", {"embed_scale": 1.0}),
    ("gemma2", {"windows": (6, 0)}),
    ("gemma2", {"norm_plus_one": False}),
    ("gemma3_text", {"rope_local_theta": 0.0}),
    ("gemma3_text", {"rope_scaling": None}),
    ("phi3", {"rope_scaling": None}),
    ("phi3", {"rope_dim": 12, "rope_scaling": None}),
    ("gpt_neox", {"activation": "gelu_tanh"}),
    ("gpt_neox", {"block": "pre"}),
    ("olmo2", {"norm_eps": 1e-2}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}),
    ("smollm3", {"rope_layers": ()}),
)


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_a_wrong_feature_changes_the_logits(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    m = dataclasses.replace(training_config(tmp_path, name).model, seq_len=TOKENS, vocab=VOCAB).resolve()
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    model, wrong = restless_model(m), restless_model(dataclasses.replace(m, **change))
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(tokens) - wrong(tokens)).abs().max() > 1e-3
