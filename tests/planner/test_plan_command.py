"""`fourfold plan`: table and report, JSON, files, what-ifs, exports, judging; and errors with their exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.plan import Plan

CONFIG = "configs/llama-1b.toml"


def test_report_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    args = ["plan", CONFIG, "--cluster", "a100-40g", "--nodes", "2", "--global-batch", "64", "-o", str(out)]
    assert main([*args, "--what-if", "memory=x2", "bandwidth=x2"]) == 0
    text = capsys.readouterr().out
    for part in ("MFU", "s a step", "certificate", "what if memory=x2 bandwidth=x2"):
        assert part in text
    plan = Plan.load(out)
    assert plan.mesh.ranks == 16
    assert plan.predicted is not None
    assert (
        main(["plan", CONFIG, "--cluster", "a100-40g", "--nodes", "2", "--global-batch", "64", "--judge", str(out)])
        == 0
    )
    assert f"{plan.predicted['seconds']:.4g} s a step" in capsys.readouterr().out


def test_json_and_exports(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", CONFIG, "--cluster", "h100-sxm", "--global-batch", "32", "--json", "--fix", "pipe=2"]
    assert main([*base, "schedule=zb-h1", "--export", "torchtitan"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"mesh", "predicted", "certificate", "alternatives", "export"} <= data.keys()
    assert "--parallelism.pipeline_parallel_degree 2" in data["export"]["options"]
    assert "zb-h1.csv" in data["export"]["files"]
    assert main([*base, "schedule=wave", "--export", "megatron"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "--pipeline-model-parallel-size 2" in data["export"]["options"]
    assert any("schedule 'wave'" in x for x in data["export"]["lost"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([CONFIG, "--cluster", "h1000"], "there is no cluster 'h1000'"),
        (["configs/lama.toml", "--cluster", "h200"], "no such file"),
        ([CONFIG, "--cluster", "h200", "--fix", "cl=2"], "did you mean 'col'"),
        ([CONFIG, "--cluster", "h200", "--global-batch", "0"], "must be at least 1"),
        ([CONFIG, "--cluster", "h200", "--what-if", "memory"], "memory=40GiB"),
        ([CONFIG, "--cluster", "h200", "--top", "0"], "--top 0"),
        ([CONFIG, "--cluster", "h200", "-o", "/nonexistent/plan.json"], "there is no folder /nonexistent"),
        ([CONFIG, "--cluster", "h200", "-o", "/proc/plan.json"], "no file can be made in /proc"),
        ([CONFIG, "--cluster", "h200", "--fix", "col"], "--fix col has no value; write for example --fix col=4"),
        ([CONFIG, "--cluster", "h200", "--fix", "mode"], "write for example --fix mode=keep"),
        ([CONFIG, "--cluster", "h200", "--fix", "col=4", "col=2"], "--fix col=4 and col=2 contradict each other"),
        (
            ["configs/gpt-124m.toml", "--cluster", "h200", "--nodes", "2", "--fix", "pipe=16"],
            "the model has 12 layers, which with its embedding and its head make at most 14 stages; use pipe=8 or less",
        ),
        (
            [CONFIG, "--cluster", "h200", "--what-if", "memory=40GiB", "memory=20GiB"],
            "--what-if memory=40GiB and memory=20GiB contradict each other",
        ),
        (
            ["configs/llama-8b.toml", "--cluster", "l4-pcie", "--max-ranks", "1", "--global-batch", "1"],
            "on 1 device need at least",
        ),
        ([CONFIG, "--cluster", "h200", "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([CONFIG, "--cluster", "local", "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([CONFIG, "--cluster", "h200", "-o", "plan.yaml"], "saved as .json or .toml; found '.yaml'"),
    ],
)
def test_errors(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "-o" in args or "--what-if" in args:  # refused before the search
        monkeypatch.setattr("fourfold.commands.plan.find_plan", None)
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_models_are_told_by_what_is_in_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 128}
    (tmp_path / "mine.json").write_text(json.dumps(gpt))
    assert main(["plan", str(tmp_path / "mine.json"), "--cluster", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["model"] == "mine"
    ours = {"model": {"layers": 2, "hidden": 64, "seq_len": 32}, "train": {"global_batch": 8}}
    (tmp_path / "config.json").write_text(json.dumps(ours))  # as in the folder of a run
    assert main(["plan", str(tmp_path), "--cluster", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["global_batch"] == 8
    assert main(["train", str(tmp_path / "mine.json")]) == 2
    assert "this is a Hugging Face file" in capsys.readouterr().err
