"""`fourfold plan`: table and report, JSON, files, what-ifs, exports, judging; and errors with their exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
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
    ],
)
def test_errors(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_terminal_gets_a_bar() -> None:
    """Standard error as a terminal: rich draws, which it does not for files."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "fourfold", "plan", CONFIG, "--cluster", "a100-40g", "--global-batch", "16"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False)
    os.close(theirs)
    drawn = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(mine, 1 << 16):
            drawn += part
    os.close(mine)
    assert done.returncode == 0, drawn.decode()
    assert "s a step" in done.stdout
    assert "searching" in drawn.decode()
