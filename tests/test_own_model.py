"""docs/own-model.md and the examples it names run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fourfold.testing.ranks import run_ranks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own-model.md"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_examples_of_the_page_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_own_dataset_and_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("own_dataset_and_loss.py", tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "own-model" / "final" / "model.safetensors").exists()


# ---- StreamedAdamW in other trainers ----


def _in_a_process(example: str, code: str, *packages: str) -> Any:
    """What `code` prints of an example, from a process of its own: these libraries start threads, and tests fork."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    script = f"import json, runpy, torch\nimport fourfold as ff\nm = runpy.run_path({str(ROOT / 'examples' / example)!r})\n{code}"
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False, env=os.environ | quiet
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.strip().splitlines()[-1])


TORCH = 'torch.optim.AdamW, {"lr": 1e-2, "fused": True}'
OURS = 'ff.StreamedAdamW, {"lr": 1e-2}'


def test_in_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The losses of torch's AdamW, also after a checkpoint of the Trainer."""
    code = f"""
import shutil
theirs = m["train"]({TORCH}, {str(tmp_path / "a")!r})
ours = m["train"]({OURS}, {str(tmp_path / "b")!r})
shutil.rmtree({str(tmp_path / "b" / "checkpoint-4")!r})
print(json.dumps([theirs, ours, m["train"]({OURS}, {str(tmp_path / "b")!r}, resume=True)]))
"""
    theirs, ours, resumed = _in_a_process("streamed_adamw_in_trainer.py", code, "transformers", "accelerate")
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert resumed == pytest.approx(theirs, rel=1e-6)


def test_in_the_trainer_of_trl(tmp_path: Path) -> None:
    code = f'print(json.dumps([m["train"](*made, {str(tmp_path)!r}) for made in (({TORCH}), ({OURS}))]))'
    theirs, ours = _in_a_process("streamed_adamw_sft.py", code, "transformers", "accelerate", "trl", "datasets")
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-6)


def _sharded(rank: int, ranks: int) -> tuple[list[float], list[float]]:
    train = runpy.run_path(str(ROOT / "examples" / "streamed_adamw_fsdp2.py"))["train"]
    return train(streamed=False), train(streamed=True)


def test_in_a_loop_of_fsdp2() -> None:
    (theirs, ours), other = run_ranks(_sharded, 2)
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert other == (theirs, ours)
