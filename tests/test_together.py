"""Everything at once: pipelines, the grid, sharding modes and both executors in one plan; the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import MODELS, SerialRuns, make_config, run_training, series

STEPS = {"steps": 6, "global_batch": 24, "eval_every": 6}
MODEL: dict[str, dict[str, Any]] = {
    "gpt": MODELS["gpt"] | {"layers": 2},
    "llama": MODELS["llama"] | {"layers": 2, "heads": 6, "kv_heads": 3},
}

PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero3 on a grid in a pipeline": (
        "llama",
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "col": 2},
            "batch": {"micro_batches": 3},
            "unit": [{"match": "*", "mode": "zero3"}],
        },
    ),
    "modes by unit over depth": (
        "gpt",
        8,
        {
            "mesh": {"depth": 2, "row": 2, "col": 2},
            "batch": {"micro_batches": 2},
            "unit": [
                {"match": "*.mlp", "mode": "zero3", "recompute": "full"},
                {"match": "head", "mode": "keep"},
                {"match": "*", "mode": "zero2", "reduce": "micro-batch"},
            ],
        },
    ),
    "split backwards, keep": (
        "llama",
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "row": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"schedule": "zb-v"},
            "unit": [{"match": "*", "mode": "keep"}],
        },
    ),
    "message-driven, keep": (
        "gpt",
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "col": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"executor": "message-driven", "schedule": "wave", "slack": 1},
            "unit": [{"match": "blocks.*", "mode": "keep"}],
        },
    ),
    "slices in a pipeline": (
        "gpt",
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"schedule": "zb-h1"},
            "unit": [
                {"match": "*.mlp", "mode": "zero3", "split": 2},
                {"match": "head", "mode": "zero3", "split": 3},
                {"match": "*", "mode": "zero2"},
            ],
        },
    ),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    folder = tmp_path_factory.mktemp("references")
    return SerialRuns(lambda name: make_config(folder / name, MODEL[name], train=STEPS))


@pytest.mark.parametrize("name", PLANS)
def test_the_numbers_of_one_process(tmp_path: Path, references: SerialRuns, name: str) -> None:
    model, ranks, plan = PLANS[name]
    found = run_training(
        make_config(tmp_path / "run", MODEL[model], train=STEPS), plan | {"precision": {"compute": "fp64"}}, ranks
    )
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(found, key) == pytest.approx(series(references[model], key), rel=1e-9), key
