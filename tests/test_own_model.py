"""docs/own-model.md and the examples it names run as they stand; own models with grid rules, frozen and tied parameters."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import fourfold as ff
from fourfold.cli import main
from fourfold.tensor.own_layers import on_grid
from fourfold.testing.ranks import run_ranks
from fourfold.train.objective import open_run
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import series

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
    assert main(["view", "runs/own-model", "--html"]) == 0
    assert main(["why", "runs/own-model"]) == 0


class Slow(nn.Linear):
    """A layer whose forward takes `seconds`."""

    seconds = 0.001

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


@pytest.mark.parametrize("late", [False, True])
def test_why_compares_layers_of_one_class(late: bool, tmp_path: Path) -> None:
    """The layers of a list are named 0, 1, 2: what they have in common is their class and number of parameters."""

    def layers() -> list[nn.Module]:
        made = [nn.Embedding(12, 10), Slow(10, 10), Slow(10, 10), Slow(10, 10), Slow(10, 12)]
        made[2].seconds, made[4].seconds = 0.1 if late else 0.001, 0.02  # type: ignore[assignment]
        return made

    config = {"train": {"steps": 4, "global_batch": 12, "run_dir": str(tmp_path / "run")}, "log": {"trace": 1}}
    ff.fit(
        ff.Config.from_dict(config),
        ff.Plan(),
        model=layers,
        data=Sentences(),
        loss=cross_entropy,
        console=io.StringIO(),
    )
    found = [f for f in ff.explain_run(tmp_path / "run").findings if f.label == "slow-unit"]
    units = [f.details["unit"] for f in found]
    assert "4" not in units  # it has no layer to be compared with
    if late:
        assert units[0] == "2"
    assert all("others of its kind (Slow)" in f.text and "uncompiled" not in f.text for f in found)


# ---- layers on the grid, frozen parameters, a parameter in two layers ----


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 10))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """Widths that two and three columns do not divide; sigmoid makes 0.5 of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 13), nn.Linear(13, 10)
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.sigmoid(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def make_layers() -> list[nn.Module]:
    table, frozen, partly = Table(), nn.Linear(10, 10), Block()
    partly.up.weight.requires_grad_(False)
    return [table, Block(), frozen.requires_grad_(False), partly, Block(), Tied(table.weight)]


class Sentences:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.arange(6) * (i + 1) % 12
        return {"inputs": ids[:-1], "targets": ids[1:]}


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def block_on_grid(block: Block, setting: Any) -> None:
    block.up = on_grid(block.up, setting, outputs="split")  # type: ignore[assignment]
    block.down = on_grid(block.down, setting, inputs="split")  # type: ignore[assignment]


def linear_on_grid(linear: nn.Linear, setting: Any) -> nn.Module:
    return on_grid(linear, setting)


RULES: dict[type, Any] = {Block: block_on_grid, nn.Linear: linear_on_grid}


def train_own(rank: int, ranks: int, run: Path, plan: dict[str, Any], rules: Any = RULES, steps: int = 3) -> None:
    config = {"train": {"steps": steps, "global_batch": 12, "run_dir": str(run)}, "optim": {"lr": 0.01, "clip": 0.5}}
    plan = plan | {"precision": {"compute": "fp64"}}
    ff.fit(ff.Config.from_dict(config), ff.Plan.from_dict(plan), model=make_layers, data=Sentences(),
           loss=cross_entropy, grid_rules=rules, resume=run.exists(), console=io.StringIO())  # fmt: skip


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("serial") / "run"
    train_own(0, 1, run, {})
    return run


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "three columns": (3, {"mesh": {"col": 3}}),
    "rows, recomputed, kept": (
        4,
        {
            "mesh": {"row": 2, "col": 2},
            "tensor": {"keep": ["weights", "gradients"]},
            "unit": [{"match": "*", "recompute": "full"}],
            "memory": {"optimizer": "host"},
        },
    ),
    "tied over a split backward": (
        4,
        {"mesh": {"pipe": 2, "col": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "zb-h1"}},
    ),
    "tied on one rank of a wave": (
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"schedule": "wave"},
            "unit": [{"match": "*", "mode": "zero3"}],
        },
    ),
    "message-driven rows": (
        4,
        {
            "mesh": {"pipe": 2, "row": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"executor": "message-driven", "layers": [3, 3]},
        },
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_grid_frozen_and_tied_layers_are_those_of_one_process(name: str, serial: Path, tmp_path: Path) -> None:
    ranks, plan = PLANS[name]
    run_ranks(train_own, ranks, tmp_path / "run", plan)
    found, expected = (read_metrics(RunDir(run)) for run in (tmp_path / "run", serial))
    for key in ("loss", "grad_norm"):
        assert series(list(found), key) == pytest.approx(series(list(expected), key), rel=1e-10)
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", serial))
    model = nn.Sequential(*make_layers()).double()
    assert ours.keys() == theirs.keys() == model.state_dict().keys()
    assert all(torch.allclose(ours[n], theirs[n], rtol=0, atol=1e-10) for n in ours)
    model.load_state_dict(ours)


def test_an_own_grid_is_plain_torch(serial: Path) -> None:
    """The first step's loss and gradient norm, and what is frozen stays."""
    torch.manual_seed(0)
    model = nn.Sequential(*make_layers()).double()
    samples, _, _ = open_run(RunDir(serial).read()[0], Sentences(), cross_entropy, own_model=True)
    batch = samples.rows(range(12))[0]  # type: ignore[attr-defined]
    (cross_entropy(model(batch["inputs"]), batch) / 12).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    step = next(read_metrics(RunDir(serial)))
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
    final = load_file(serial / "final" / "model.safetensors")
    assert torch.equal(final["2.weight"], model[2].weight)
    assert torch.equal(final["3.up.weight"], model[3].up.weight)
    assert not torch.equal(final["3.down.weight"], model[3].down.weight)


def scaled_inside(block: Block, setting: Any) -> None:
    """Wrong: `gain` is used on the features of one column."""
    block.up = on_grid(block.up, setting, outputs="split")  # type: ignore[assignment]
    block.down = on_grid(block.down, setting, inputs="split")  # type: ignore[assignment]
    block.forward = lambda x: x + block.down(block.gain * torch.sigmoid(block.up(block.norm(x))))  # type: ignore[method-assign]


def refuse_own(rank: int, ranks: int, run: Path, rules: Any, message: str) -> None:
    with pytest.raises((ff.ConfigError, RuntimeError), match=message):
        train_own(rank, ranks, run, {"mesh": {"col": 2}}, rules)


def tied_on_grid(module: Any, setting: Any) -> None:
    module.weight = nn.Parameter(module.weight[:6])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({Block: scaled_inside}, "the gradient of 'gain' differs between columns"),
        ({Table: tied_on_grid}, "made the parameter 'weight', which the layer has not; keep names and shapes"),
    ],
)
def test_rules_that_cannot_be_right_are_refused(rules: Any, message: str, tmp_path: Path) -> None:
    run_ranks(refuse_own, 2, tmp_path / "run", rules, message)


def test_other_frozen_weights_are_refused(serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(serial, tmp_path / "run")
    train_own(0, 1, tmp_path / "run", {}, steps=4)
    monkeypatch.setattr(sys.modules[__name__], "make_layers", lambda: make_other(make_layers_as_they_are))
    with pytest.raises(ff.ConfigError, match="the frozen parameters of your model are not those"):
        train_own(0, 1, tmp_path / "run", {}, steps=5)


make_layers_as_they_are = make_layers


def make_other(make: Any) -> list[nn.Module]:
    found: list[nn.Module] = make()
    with torch.no_grad():
        found[2].weight.mul_(1.5)  # type: ignore[union-attr,operator]
    return found


def test_the_example_of_a_grid_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run_example(0, 1, "own_grid_layer.py", tmp_path / "alone")
    found = run_ranks(run_example, 4, "own_grid_layer.py", tmp_path / "grid")
    assert found[0] == pytest.approx(alone, rel=1e-5)


def run_example(rank: int, ranks: int, name: str, folder: Path) -> list[float]:
    os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv, sys.stdout = [name, str(folder)], io.StringIO()
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        sys.stdout = sys.__stdout__
        del os.environ["WORLD_SIZE"]
    return series(list(read_metrics(RunDir(folder))), "loss")


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
    Path("text.txt").write_text("some text\n" * 60_000)
    here = ["--data.source", "text.txt", "--train.device", "cpu", "--nproc", "16", "--dry-run"]
    assert main([*words[words.index("train") :], *here]) == 0, capsys.readouterr()
