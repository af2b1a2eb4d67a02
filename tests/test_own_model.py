"""docs/own-model.md and the examples it names run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from fourfold.cli import main
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


# ---- the other examples ----


@pytest.mark.parametrize("example", ["plan_only.py", "streamed_adamw.py"])
def test_an_example_runs(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, tmp_path, monkeypatch)
    assert {"plan_only.py": "with 24 GiB:", "streamed_adamw.py": "streamed"}[example] in capsys.readouterr().out


def test_fine_tuning_a_folder(tmp_path: Path) -> None:
    code = f"""
import contextlib, io, os
from pathlib import Path
os.chdir({str(tmp_path)!r})
with contextlib.redirect_stdout(io.StringIO()):
    m["tiny_folder"](Path("tiny"))
    talk = [{{"role": "user", "content": "1?"}}, {{"role": "assistant", "content": "2"}}]
    Path("chats.jsonl").write_text((json.dumps({{"messages": talk}}) + chr(10)) * 4)
    merged = m["fine_tune"](Path("tiny"), Path("chats.jsonl"), Path("run"), 2)
    model = m["AutoModelForCausalLM"].from_pretrained(merged)
print(json.dumps([sorted(p.name for p in merged.iterdir()), model.config.num_hidden_layers]))
"""
    names, layers = _in_a_process("fine_tune_folder.py", code, "transformers", "tokenizers", "jinja2")
    assert layers == 2
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)


def test_every_example_is_listed_and_run() -> None:
    listed = set(re.findall(r"\(([\w.-]+)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {p.name for p in (ROOT / "examples").iterdir() if p.suffix != ".md" and p.is_file()}
    tests = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py")) + (ROOT / "README.md").read_text()
    for name in listed:
        assert name in tests, f"no test names {name}"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "slurm.sbatch", "torchrun-two-nodes.sh"])
def test_files_for_several_machines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Well-formed, and their `fourfold train` accepts its arguments."""
    text = (ROOT / "examples" / name).read_text()
    if name.endswith(".yaml"):
        service, job = yaml.safe_load_all(text)
        pod = job["spec"]["template"]["spec"]
        words = pod["containers"][0]["args"]
        assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
        assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29400" in words
        assert f"--nnodes={job['spec']['completions']}" in words
        assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    else:
        subprocess.run(["bash", "-n", str(ROOT / "examples" / name)], check=True)
        words = shlex.split(text.replace("\\\n", " ").splitlines()[-1], comments=True)
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    Path("plan.toml").write_text("[mesh]\ndata = 16\n")
    Path("text.txt").write_text("some text\n" * 9000)
    here = ["--data.source", "text.txt", "--train.device", "cpu", "--nproc", "16", "--dry-run"]
    assert main([*words[words.index("train") :], *here]) == 0, capsys.readouterr()
