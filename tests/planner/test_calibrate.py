"""Calibration: what it measures is a cluster that plans; training without a plan plans first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.launch.place import Place
from fourfold.planner.runnable import plan_run
from fourfold.testing.ranks import run_ranks
from fourfold.train.calibrate import CPU, _Calibration, _Sizes


def _calibrate(rank: int, ranks: int) -> Cluster:
    calibration = _Calibration(Place(rank, ranks, rank, ranks), torch.device("cpu"))
    calibration.sizes = _Sizes((32, 64), 1 << 12, (1 << 10, 1 << 14), 2)
    return calibration.cluster("here")


def test_all_ranks_measure_one_cluster(tmp_path: Path) -> None:
    clusters = run_ranks(_calibrate, 2)
    kinds = {"all_gather 2", "reduce_scatter 2", "all_reduce 2", "message 2"}
    assert clusters[0].level[0].measured.keys() == kinds
    for c in clusters:
        assert c.ranks == 2
        assert c.device.kind == "cpu"
        assert c.level[0].bandwidth > 0
        assert 0 <= c.overlap <= 1
    clusters[0].save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == clusters[0]
    assert CPU.tries >= 3


def test_the_command_writes_a_file_that_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "here.toml"
    assert main(["calibrate", "--nproc", "1", "--device", "cpu", "-o", str(out)]) == 0
    assert "written to" in capsys.readouterr().out
    assert main(["plan", "configs/gpt-tiny.toml", "--cluster", str(out)]) == 0
    assert main(["calibrate", "-o", str(tmp_path / "x.yaml")]) == 2
    monkeypatch.setattr("fourfold.launch.local.launch_local", None)  # refused before anything is measured
    assert main(["calibrate", "-o", "/nonexistent/x.toml"]) == 2
    assert "there is no folder /nonexistent" in capsys.readouterr().err


def config(**model: int) -> Config:
    fields = {"family": "gpt", "layers": 2, "hidden": 64, "seq_len": 32} | model
    return Config.from_dict({"model": fields, "train": {"global_batch": 8, "run_dir": "x"}}).resolve()


def test_training_without_a_plan_plans_first() -> None:
    plan = plan_run(config(), Cluster.local(2))
    assert plan.mesh.ranks == 2
    assert plan.predicted is not None
    plan.check(config(), 2)
    # three ranks cannot share eight sequences, so the plan is a pipeline
    piped = plan_run(config(layers=4), Cluster.local(3))
    assert piped.mesh.pipe == 3
    # a device too small for a whole copy: the state is spread, or the run is refused with what would do
    small = Cluster.local(2).what_if({"memory": "262MiB"})
    with pytest.raises(PlanError):
        plan_run(config(hidden=512, layers=8), small)
