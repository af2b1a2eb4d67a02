"""The command line: what a person types, what they see, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fourfold.cli import COMMANDS, main
from fourfold.commands.look import DoctorArgs
from fourfold.plan import Plan
from fourfold.schema import format_bytes
from fourfold.train.rundir import RunDir
from fourfold.view.run import compare_step
from tests.helpers import make_config


def write_config(path: Path, **sections: dict[str, object]) -> str:
    config = make_config(path.parent / "run", **sections)  # type: ignore[arg-type]
    path.write_text(json.dumps(config.to_dict()))
    return str(path)


def failing(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must be refused: exit code 2, one message, no traceback."""
    try:
        code: object = main(args)
    except SystemExit as e:  # how tyro ends for a flag it does not know
        code = e.code
    text = "".join(capfd.readouterr())
    assert code == 2, text
    assert "Traceback" not in text
    return " ".join(text.split())


def test_help_needs_no_torch() -> None:
    script = "import sys, fourfold, fourfold.cli; fourfold.cli.main(['--help']); assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "fourfold COMMAND" in out.stdout


def test_a_terminal_without_our_signs_shows_what_it_can() -> None:
    args = [sys.executable, "-m", "fourfold", "plan", "configs/gpt-tiny.toml", "--cluster", "h200", "--max-ranks", "2"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run(args, capture_output=True, env=os.environ | plain)
    assert out.returncode == 0, out.stderr
    assert out.stdout.isascii()
    assert b"s a step" in out.stdout


@pytest.mark.parametrize("command", ["train", "demo", "sample", "compare", "tokenize", "doctor"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main([command, "--help"])
    assert e.value.code == 0
    assert f"fourfold {command}" in capsys.readouterr().out


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = write_config(tmp_path / "good.json")
    (tmp_path / "wrong.toml").write_text("[model\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "plan.toml").write_text("[mesh]\ndata = 3\n")
    cases = {
        ("trian",): "unknown command 'trian'; did you mean 'train'?",
        ("train",): "name one config file, or --resume a run directory",
        ("train", "nowhere.toml"): "nowhere.toml: no such file",
        ("train", str(tmp_path)): "is a folder, and no Hugging Face model",
        ("train", str(tmp_path / "wrong.toml")): "not valid TOML",
        ("train", good, "--model.family", "gtp"): "gtp",
        ("train", good, "--model.layer", "3"): "--model.layers",
        ("train", good, "--model.layers", "three"): "three",
        ("train", good, "--model.seq-len", "64", "--model.positions", "32"): "longer than model.positions = 32",
        (
            "train",
            good,
            "--nproc",
            "5",
        ): "train.global_batch = 12 does not divide by data 5 = 5; use 10 or 15 sequences",
        ("train", good, "--nproc", "0"): "at least one rank",
        (
            "train",
            good,
            "--plan",
            str(tmp_path / "plan.toml"),
            "--nproc",
            "4",
        ): "the mesh is data 3 = 3 ranks, but there are 4",
        ("train", good, "--plan", good): "good.json: this is a config, not a plan",
        ("train", str(tmp_path / "plan.toml")): "plan.toml: this is a plan, not a config",
        ("simulate", good): "good.json: this is a config, not a plan",
        ("train", good, "--data.source", "missing.txt"): "data.source = 'missing.txt': no such file",
        ("train", good, "--data.source", str(tmp_path / "empty.txt")): "there is no text in it",
        ("train", good, "--data.eval-fraction", "0", "--train.eval-every", "1"): "leaves none to evaluate on",
        ("train", good, "--train.run-dir", "/proc/x"): "/proc/x: cannot be written",
        ("train", good, "--train.device", "cuda"): "torch sees no GPU",
        ("train", good, "--optim.lr", "nan"): "optim.lr = nan must be a finite number",
        ("train", good, "--train.timeout", "1e30"): "train.timeout = 1e+30 must be at most 2592000 seconds",
        ("train", good, "--train.steps", "0"): "train.steps = 0 must be at least 1",
        ("train", good, "--train.steps", "1", "--optim.warmup", "2"): "optim.warmup = 2 is longer than train.steps = 1",
        ("train", good, "--optim.warmup", "5"): "optim.warmup = 5 is longer than train.steps = 4; use 4 or less",
        ("demo", "--steps", "0"): "--steps 0: at least one step is needed",
        ("demo", "--steps", "-1"): "--steps -1: at least one step is needed",
        ("train", "--resume", str(tmp_path)): "not a run directory: there is no config.json in it",
        ("sample", str(tmp_path / "nowhere")): "no such directory",
        ("compare", str(tmp_path), str(tmp_path)): "there is no config.json in it",
        ("tokenize", str(tmp_path / "empty.txt"), str(tmp_path / "out.bin")): "there is no text in it",
        ("tokenize", good, str(tmp_path / "empty.txt")): "exists",
    }
    if find_spec("wandb") is None:
        cases["train", good, "--log.wandb", "project"] = "pip install 'fourfold[wandb]'"
    for args, message in cases.items():
        assert message in failing(capfd, *args), args
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out.bin").exists()


def test_ctrl_c_is_answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "doctor", (COMMANDS["doctor"][0], interrupted))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.toml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.json")
    assert main(["train", config, "--nproc", "3", "--dry-run", "--model.layers", "3"]) == 0
    out = capsys.readouterr().out
    assert "3 layers" in out
    assert "data 3 = 3 ranks" in out
    assert not (tmp_path / "run").exists()


def test_resuming_on_other_ranks_plans_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "run").resolve()
    RunDir.create(tmp_path / "run", config, Plan.from_dict({"mesh": {"pipe": 2}})).unlock()
    assert main(["train", "--resume", str(tmp_path / "run"), "--nproc", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "data 3 = 3 ranks" in out
    assert "planned anew: the run had pipe 2 = 2 ranks" in out
    assert main(["train", "--resume", str(tmp_path / "run"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "pipe 2 = 2 ranks" in out
    assert "anew" not in out


def test_a_short_run_of_a_long_config_warms_up_in_its_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.json")  # 4 steps, 2 of them warm-up
    assert main(["train", config, "--train.steps", "3", "--dry-run"]) == 0
    assert "warm-up" not in capfd.readouterr().out
    assert main(["train", config, "--train.steps=1"]) == 0
    assert "steps 1, warm-up shortened from 2 to 1" in " ".join(capfd.readouterr().out.split())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optim"]["warmup"] == 1


def test_train_sample_compare_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The life of a run, from the command line."""
    config = write_config(tmp_path / "c.json", train={"eval_every": 2}, checkpoint={"every": 2})
    runs = [str(tmp_path / name) for name in ("a", "b", "c")]
    for run, flags in zip(runs, (["--nproc", "2"], ["--nproc", "3"], ["--optim.lr", "0.02"]), strict=True):
        assert main(["train", config, "--train.run-dir", run, *flags]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in lines if "loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    wanted = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second", "mfu", "peak_bytes"}
    assert wanted <= steps[0].keys()
    assert [m["step"] for m in lines if "eval_loss" in m] == [2, 4]
    found = {p.name for p in (tmp_path / "a").iterdir()}
    assert {"config.json", "plan.json", "env.json", "metrics.jsonl", "logs", "checkpoints", "final"} <= found
    shown = capfd.readouterr().out
    assert "step 4/4" in shown
    assert "done" in shown
    assert "of tensors on the fullest rank (local)" in " ".join(shown.split())  # what is predicted and what is measured
    assert f"process {format_bytes(steps[0]['peak_bytes'])}" in shown

    assert main(["compare", runs[0], runs[0]]) == 0
    assert "identical" in capfd.readouterr().out
    assert main(["compare", runs[0], runs[1], "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "rounding"
    assert main(["compare", runs[0], runs[2]]) == 1
    assert "diverges at step 2" in capfd.readouterr().out

    assert main(["sample", runs[0], "--prompt", "7 times", "--tokens", "5", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["step"] == 4
    assert answer["text"].startswith("7 times")

    assert main(["train", config, "--train.run-dir", runs[0]]) == 2
    assert "already holds a run (at step 4)" in capfd.readouterr().err
    assert main(["train", "--resume", runs[0], "--train.steps", "6"]) == 0
    assert "step 6/6" in capfd.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "loss" in m] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("plan", [{"data": 2}, {"pipe": 2}, {"pipe": 2, "schedule": "zb-h1"}], ids=str)
def test_view_shows_a_run_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str], plan: dict[str, object]) -> None:
    """In a run no op starts in the very moment in which another ends."""
    config, mesh = write_config(tmp_path / "c.json", train={"steps": 2}, log={"trace": 1}), dict(plan)
    schedule = mesh.pop("schedule", "1f1b")
    (tmp_path / "plan.json").write_text(json.dumps({"mesh": mesh, "pipeline": {"schedule": schedule}}))
    assert main(["train", config, "--plan", str(tmp_path / "plan.json")]) == 0
    capfd.readouterr()
    assert main(["view", str(tmp_path / "run"), "--json"]) == 0
    seen = json.loads(capfd.readouterr().out)
    assert seen["step"] == 2
    assert len(seen["measured"]["spans"]) == len(seen["simulated"]["spans"]) > 0
    assert seen["measured"]["makespan"] >= seen["simulated"]["lower_bound"] > 0
    measured = compare_step(RunDir(tmp_path / "run")).measured
    assert min(start for row in measured.starts for start in row) == 0
    assert measured.critical_path[-1].end == measured.makespan
    assert main(["view", str(tmp_path / "run")]) == 0
    assert "measured" in capfd.readouterr().out


def test_bert_fills_blanks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "run", "bert")
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
    assert main(["train", str(tmp_path / "c.json")]) == 0
    capfd.readouterr()
    assert main(["sample", str(tmp_path / "run"), "--prompt", "2 ti[MASK]es"]) == 0
    assert len(capfd.readouterr().out) > 5
    assert "fills blanks" in failing(capfd, "sample", str(tmp_path / "run"), "--prompt", "no blank")


def test_tokenize_and_train_on_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.json")
    assert main(["tokenize", str(tmp_path / "corpus.txt"), str(tmp_path / "t.bin"), "--json"]) == 0
    written = json.loads(capfd.readouterr().out)
    assert written["tokens"] == (tmp_path / "corpus.txt").stat().st_size + 1
    flags = ["--data.source", str(tmp_path / "t.bin"), "--train.steps", "2", "--train.run-dir"]
    assert main(["train", config, *flags, str(tmp_path / "a")]) == 0
    assert main(["train", config, "--train.steps", "2", "--train.run-dir", str(tmp_path / "b")]) == 0
    capfd.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "identical" in capfd.readouterr().out  # encoded before or while training: the same samples
    (tmp_path / "t.bin").write_bytes((tmp_path / "t.bin").read_bytes()[:-7])
    assert "truncated" in failing(capfd, "train", config, *flags, str(tmp_path / "d"))


def test_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    found = {f["what"]: f["found"] for f in report["findings"]}
    assert found["gloo"] == "two ranks agree over loopback"
    assert main(["doctor"]) == 0
    assert "torch" in capfd.readouterr().out


def test_an_error_of_the_file_system_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that may not be looked at ended five commands with a traceback. (Root may look everywhere.)"""

    def refused(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", "run/checkpoints/\x1b[2J")

    monkeypatch.setattr(Path, "exists", refused)
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path}: cannot be read: permission denied" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setitem(COMMANDS, "doctor", (DoctorArgs, refused))
    assert main(["doctor", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: run/checkpoints/\\x1b[2J: permission denied\n"
