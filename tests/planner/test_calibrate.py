"""Calibration: what it measures is a cluster that plans; training without a plan plans first."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.launch.place import Place, gpu_cluster
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.api import plan_run
from fourfold.planner.evaluate import predict
from fourfold.planner.problem import PlanProblem
from fourfold.testing.ranks import run_ranks
from fourfold.train import calibrate
from fourfold.train.calibrate import CPU, _Calibration, _Sizes, fitted
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import MODELS, make_config, series


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


def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.launch.local.launch_local", None)
    out = str(tmp_path / "x.json")
    assert main(["calibrate", "--nproc", "1000000", "-o", out]) == 2
    assert "1000000 ranks are too many for this machine" in capsys.readouterr().err
    monkeypatch.setattr("fourfold.commands.calibrate._gpus", lambda device: 0)
    assert main(["calibrate", "--device", "cuda", "-o", out]) == 2
    assert "--device cuda: torch sees no GPU here; use auto or cpu" in capsys.readouterr().err


def test_a_stopped_calibration_says_so_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    command = [sys.executable, "-m", "fourfold", "calibrate", "--nproc", "2", "--device", "cpu", "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "products" not in process.stdout.readline():  # a rank is at work
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"stopped: {out} is not written" in stderr
    assert "Traceback" not in stderr
    assert not out.exists()


def test_a_ring_from_two_gathers() -> None:
    """Three ranks, 1 GB/s and 10 µs a hop, memory of 10 GB/s."""
    sizes = [1024, 1 << 20, 1 << 23]
    times = [2 * 1e-5 + 2 / 3 * size / 1e9 for size in sizes]
    assert fitted(3, sizes, times, 1e10) == pytest.approx((1e9, 1e-5))
    assert fitted(3, sizes, times, 1e8) is None
    for long in (times[1], 0.5 * times[1], times[1] + 1e-9):
        assert fitted(3, sizes, [*times[:2], long], 1e10) is None


@pytest.mark.parametrize("quiet", [True, False])
def test_gathers_that_no_link_has_are_measured_again(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """Where the machine stays busy, the file says what was measured, and has numbers that a machine can have."""
    calibration = _Calibration(Place(0, 2, 0, 2), torch.device("cpu"))
    sizes = [4 * size for size in calibration.sizes.buffers]
    good = [1e-4 + size / 2 / 1e9 for size in sizes]
    busy = [*good[:-2], 3.9e-3, 3.9e-3]
    answers = iter([busy, good, good, *([good] if quiet else [busy, busy])])
    monkeypatch.setattr(calibration, "_collectives", lambda start, groups: next(answers))
    monkeypatch.setattr(calibration, "_messages", lambda groups: good)
    level = calibration._level("loopback", [[0, 1]], 0, 2e10)
    Cluster(devices=2, level=(level,))
    if quiet:
        assert (level.bandwidth, level.latency) == pytest.approx((1e9, 1e-4))
        assert not calibration.doubts
    else:
        assert level.bandwidth == pytest.approx(sizes[-1] / 2 / 3.9e-3)
        assert level.latency == pytest.approx(good[0])
        (doubt,) = calibration.doubts
        assert "all-gathers of 512.00 KiB and 4.00 MiB took 3.9 and 3.9 ms, measured 3 times" in doubt


def config(**model: int) -> Config:
    fields = {"family": "gpt", "layers": 2, "hidden": 64, "seq_len": 32} | model
    return Config.from_dict({"model": fields, "train": {"global_batch": 8, "run_dir": "x"}}).resolve()


def test_the_share_of_unfused_operators_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes as long as predicted for half of the bandwidth gives a share of a half: nothing is compiled in either."""
    gpu = Cluster(name="gpu", nodes=1, devices=1, device=replace(Cluster.preset("h200").device, eager=1.0))
    slow = replace(gpu, device=replace(gpu.device, eager=0.5), level=(calibrate.Level(bandwidth=1e12, latency=1e-6),))
    takes: list[float] = []

    def one_rank(config: Config, plan: Plan, *_: object) -> object:
        problem = PlanProblem(ModelSpec.from_config(config.model), slow, 8, replace(plan.precision, compile=False))
        takes.append(predict(replace(plan, precision=problem.precision), problem).compute)
        return SimpleNamespace(step=None, zero_grad=None)

    monkeypatch.setattr(calibrate, "OneRank", one_rank)
    monkeypatch.setattr(calibrate, "steady", lambda step: takes.pop())
    assert _Calibration(Place(), torch.device("cpu"))._eager_share(gpu) == pytest.approx(0.5)


def test_training_without_a_plan_plans_first() -> None:
    plan = plan_run(config(), Cluster.local(2))
    assert plan.mesh.ranks == 2
    assert plan.predicted is not None
    plan.check(config(), 2)
    # three ranks cannot share eight sequences, so the plan is a pipeline
    piped = plan_run(config(layers=4), Cluster.local(3))
    assert piped.mesh.pipe == 3
    # a device too small for a whole copy: the state is spread, or the run is refused with what would fit
    small = Cluster.local(2).what_if({"memory": "262MiB"})
    with pytest.raises(PlanError):
        plan_run(config(hidden=512, layers=8), small)


def on_a_machine_with(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    whole = Cluster.local
    monkeypatch.setattr(Cluster, "local", lambda ranks: whole(ranks).what_if({"memory": memory}))


def test_one_rank_is_planned_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine too small for the whole batch at once it takes micro-batches, with the losses of one that is not."""
    wide = make_config(tmp_path / "run", MODELS["gpt"] | {"seq_len": 64}, train={"steps": 2, "global_batch": 48})
    (tmp_path / "c.json").write_text(json.dumps(wide.to_dict()))
    command = ["train", str(tmp_path / "c.json"), "--train.run-dir"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "data 1 = 1 rank, 1 × 48 sequences each, fp32" in shown
    assert "predicted" in shown
    on_a_machine_with(monkeypatch, "270MiB")
    assert main([*command, str(tmp_path / "cut")]) == 0
    plan = Plan.load(tmp_path / "cut" / "plan.json")
    assert plan.micro_batches(48) > 1
    assert plan.predicted is not None
    losses = [series(list(read_metrics(RunDir(tmp_path / name))), "loss") for name in ("whole", "cut")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    on_a_machine_with(monkeypatch, "256.5MiB")
    assert main([*command, str(tmp_path / "none"), "--dry-run"]) == 2
    assert "no plan fits" in capfd.readouterr().err


SEEN = {
    "NVIDIA H200, 143771, 604": ("h200", 143167),
    "NVIDIA H100 80GB HBM3, 81559, 551": ("h100-sxm", 81008),
    "NVIDIA A100-SXM4-40GB, 40960, 512": ("a100-40g", 40448),
    "NVIDIA A100-SXM4-80GB, 81920, 600": ("a100-80g", 81320),
    "Tesla V100-SXM2-16GB, 16160, [N/A]": ("v100-16g", 16160),
    "NVIDIA L4, 23034, 500": ("l4-pcie", 22534),
    "NVIDIA L40S, 46068, 600": ("l40s", 45468),
    "NVIDIA H100 PCIe, 81559, 551": ("h100-pcie", 81008),
    "NVIDIA GeForce RTX 4090, 24564, 450": ("rtx-4090", 24114),
    "NVIDIA GB10, [N/A], [N/A]": ("a100-40g", 0),
}


@pytest.mark.parametrize("line", SEEN)
def test_gpus_are_planned_for_by_their_name_and_memory(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    preset, memory = SEEN[line]
    answer = SimpleNamespace(stdout=f"{line}\n" * 4)
    monkeypatch.setattr("fourfold.launch.place.subprocess.run", lambda *args, **options: answer)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for ranks, local, nodes in ((1, 1, 1), (4, 4, 1), (8, 4, 2), (3, 3, 1)):
        cluster = gpu_cluster(ranks, local)
        assert (cluster.nodes, cluster.devices) == (nodes, local)
        unknown = (
            f"rates of {preset}, since there is no preset for {'a GPU of unknown name' if '[N/A]' in line else 'it'}"
        )
        assert cluster.name == preset or cluster.name.startswith(unknown)
        assert (cluster.name == preset) == ("GB10" not in line)
        assert cluster.memory == (memory << 20 or Cluster.preset(preset).memory)
    assert plan_run(config(), gpu_cluster(1, 1)).precision.compute == ("fp32" if preset == "v100-16g" else "bf16")


def test_ranks_that_share_a_gpu_have_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the driver's tool is missing."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    alone, shared = gpu_cluster(1, 1), gpu_cluster(4, 4)
    assert (shared.nodes, shared.devices) == (1, 4)
    assert shared.memory == alone.memory // 4
    assert shared.device.matrix["bf16"] == alone.device.matrix["bf16"] / 4
    assert max(level.bandwidth for level in shared.level) <= alone.host.link / 4
