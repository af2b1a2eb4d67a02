"""Every benchmark runs: the quickest part of each here, all of `--quick` with FOURFOLD_SLOW_TESTS=1.

Benchmarks use the project's own classes and stand-ins for them, which a change of an interface breaks without a word.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
NAMES = sorted(
    path.stem for path in FOLDER.glob("[a-z]*.py") if path.stem != "common" and not path.stem.startswith("test_")
)
PARTS = ("exhaustive", "published_layouts", "tensor_layers")
"""Used by other benchmarks and by tests; no commands."""

QUICK: dict[str, list[str]] = {
    "pipeline": ["--quick", "--only", "overhead"],
    "fine_tuning": ["--quick", "--only", "lora"],
    "fp8": ["--quick", "--steps", "4"],
    "hugging_face": ["--quick", "--only", "open", "final"],
    "startup": ["--quick", "--only", "counts", "disk"],
}
"""A few seconds each; parts of other benchmarks are run by a test of their own."""
ARGUMENTS = {"monotone": ["--seconds", "5"], "soak": ["--steps", "100"], "fuzz": ["--count", "200"]}
"""Where there is no `--quick`."""
GPU = ("device_plans", "sharding_device", "single_gpu", "tensor_device")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    """Names that it imports from the project exist."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert name in PARTS or callable(module.main)


@pytest.mark.parametrize("name", QUICK)
def test_the_quickest_part_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, path = importlib.import_module(f"benchmarks.{name}"), tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name], "--json", str(path)])
    module.main()
    found = json.loads(path.read_text())
    assert found["benchmark"] == name
    assert found["rows"]
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in found["rows"])


@pytest.mark.skipif(not os.environ.get("FOURFOLD_SLOW_TESTS"), reason="FOURFOLD_SLOW_TESTS=1 runs all benchmarks")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PARTS])
def test_a_benchmark_runs(name: str) -> None:
    if name in GPU and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    command = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS.get(name, ["--quick"])]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
