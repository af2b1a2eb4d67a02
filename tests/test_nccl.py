"""NCCL among several ranks on one GPU: every kind of plan equals one rank, and no communicator is made after the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.plan import Plan
from fourfold.testing.communicators import NoLateGroups
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit
from tests.helpers import MODELS, make_config, series
from tests.test_groups import PLANS, TIED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")

MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "zb-v, keep, host optimizer": (
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "pipeline": {"schedule": "zb-v"},
            "unit": [{"match": "*", "mode": "keep"}],
            "memory": {"optimizer": "host"},
        },
    ),
    "grid": (4, {"mesh": {"row": 2, "col": 2}, "tensor": {"flow": "summa", "residual": "hidden"}}),
}


def _config(folder: Path, name: str) -> Any:
    train = {"steps": 4, "eval_every": 2, "device": "cuda"}
    return make_config(folder / name, MODELS["gpt"] | TIED, train=train)


def _train(rank: int, ranks: int, config: Any, plan: dict[str, Any]) -> None:
    with open("/dev/null", "w") as console:
        fit(
            config,
            Plan.from_dict(plan | {"precision": {"compute": "fp64", "compile": False}}),
            callbacks=[NoLateGroups()],
            console=console,
        )


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = _config(tmp_path_factory.mktemp("serial"), "serial")
    run_ranks(_train, 1, config, {}, timeout=100, backend="nccl")
    return list(read_metrics(RunDir(config.train.run_dir)))


@pytest.mark.parametrize("name", PLANS | MORE)
def test_a_plan_over_nccl_equals_one_rank(name: str, serial: list[dict[str, Any]], tmp_path: Path) -> None:
    ranks, plan = (PLANS | MORE)[name]
    config = _config(tmp_path, "run")
    run_ranks(_train, ranks, config, plan, timeout=110, group_timeout=60, backend="nccl")
    found = list(read_metrics(RunDir(config.train.run_dir)))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(found, key) == pytest.approx(series(serial, key), rel=1e-9)
