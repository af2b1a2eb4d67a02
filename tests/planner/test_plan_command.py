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
from fourfold.schema import format_seconds

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
    assert f"{format_seconds(plan.predicted['seconds'])} a step" in capsys.readouterr().out


def test_json_and_exports(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", CONFIG, "--cluster", "h100-sxm", "--global-batch", "32", "--json", "--fix", "pipe=2"]
    assert main([*base, "schedule=zb-h1", "--export", "torchtitan"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"mesh", "predicted", "certificate", "alternatives"} <= data["plan"].keys()
    Plan.from_dict(data["plan"])
    assert "--parallelism.pipeline_parallel_degree 2" in data["export"]["options"]
    assert "zb-h1.csv" in data["export"]["files"]
    assert main([*base, "schedule=wave", "--export", "megatron"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "--pipeline-model-parallel-size 2" in data["export"]["options"]
    assert any("schedule 'wave'" in x for x in data["export"]["lost"])
    assert "a step" in data["export"]["predicted"]


def test_options_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", CONFIG, "--cluster", "h100-sxm", "--global-batch", "32", "--json"]
    assert (
        main([*base, "--fix", "pipe=2", "--fix", "schedule=wave", "--what-if", "memory=x2", "--what-if", "flops=x2"])
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["mesh"]["pipe"] == data["what_if"]["mesh"]["pipe"] == 2
    assert data["plan"]["pipeline"]["schedule"] == "wave"
    assert data["what_if"]["predicted"]["seconds"] < 0.7 * data["plan"]["predicted"]["seconds"]


def test_misfits_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "plan",
        "configs/llama-8b.toml",
        "--cluster",
        "l4-pcie",
        "--max-ranks",
        "1",
        "--global-batch",
        "1",
        "--json",
    ]
    assert main(args) == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith("no plan fits")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([CONFIG, "--cluster", "h1000"], "unknown cluster 'h1000'"),
        (["configs/lama.toml", "--cluster", "h200"], "no such file"),
        ([CONFIG, "--cluster", "4090"], "did you mean rtx-4090?"),
        ([CONFIG, "--cluster", "local", "--devices", "3"], "'local' has one device in a node; use nodes = 3"),
        ([CONFIG, "--cluster", "h200", "--devices", "0"], "--devices 0 must be at least 1"),
        ([CONFIG, "--cluster", "h200", "--global-batch", str(10**20)], "must be at most 16777216 sequences"),
        ([CONFIG, "--cluster", "h200", "--fix", "cl=2"], "did you mean 'col'"),
        ([CONFIG, "--cluster", "h200", "--fix", "cp=2"], "context parallelism is not supported"),
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
            "on 1 device need about",
        ),
        (
            [CONFIG, "--cluster", "h200", "--fix", "col=8", "mode=zero3"],
            "--fix mode=zero3 needs replicas to shard over (data or depth of 2 or more)",
        ),
        (
            [CONFIG, "--cluster", "h200", "--fix", "col=8", "recompute=per-slice"],
            "--fix recompute=per-slice needs unsplit operators (row=1 col=1)",
        ),
        ([CONFIG, "--cluster", "h200", "--fix", "row=1", "flow=summa"], "--fix flow=summa needs a square grid"),
        (
            [CONFIG, "--cluster", "h200", "--fix", "col=1", "keep=inputs"],
            "--fix keep=inputs needs a grid: col of 2 or more",
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
        monkeypatch.setattr("fourfold.commands.plan.plan_problem", None)
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
    assert "this is a Hugging Face config" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight ranks of an H100, full of llama-1b."""
    out = tmp_path_factory.mktemp("plans") / "p.json"
    assert main(["plan", CONFIG, "--cluster", "h100-sxm", "--global-batch", "512", "-o", str(out)]) == 0
    return str(out)


def judged(plan: str, cluster: str, *more: str) -> list[str]:
    return ["plan", CONFIG, "--cluster", cluster, "--global-batch", "512", "--judge", plan, *more]


def test_a_judged_plan_that_does_not_fit(plan_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    capsys.readouterr()
    assert main(judged(plan_file, "v100-16g", "-o", str(tmp_path / "x.json"))) == 2
    text = capsys.readouterr().out
    first = next(line for line in text.split("\n") if "GiB are needed" in line)
    assert first.startswith("does NOT fit: ")
    assert first.endswith(" too much")
    assert text.startswith(first)
    assert "what binds" not in text
    assert not (tmp_path / "x.json").exists()
    assert main(judged(plan_file, "v100-16g", "--json")) == 2
    assert "too much" in json.loads(capsys.readouterr().out)["predicted"]["misfit"]
    assert main(judged(plan_file, "h100-sxm")) == 0
    text = capsys.readouterr().out
    assert "% full" in text
    assert "what binds" not in text


def test_what_if_judges_the_same_plan(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(judged(plan_file, "h100-sxm", "--what-if", "memory=16GiB")) == 0
    text = capsys.readouterr().out
    assert "what if memory=16GiB: does NOT fit: " in text
    assert "+0.0%" in text  # less memory makes the same plan neither faster nor slower
    assert main(judged(plan_file, "v100-16g", "--what-if", "memory=x8")) == 0
    text = capsys.readouterr().out
    assert text.index("does NOT fit") < text.index("what if memory=x8: ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fix", "col=2"], "--fix: not with --judge"),
        (["--schedule", "wave", "--top", "3"], "--schedule, --top: not with --judge"),
        (["--max-ranks", "4"], "--max-ranks: not with --judge"),
    ],
)
def test_judge_takes_no_options_of_the_search(
    more: list[str], message: str, plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(judged(plan_file, "h100-sxm", *more)) == 2
    assert message in capsys.readouterr().err


def test_judge_takes_plans_that_suit_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('[mesh]\ndata = 2\n[[unit]]\nmatch = "blocks.77.mlp"\nmode = "zero3"\n')
    assert main(judged(str(file), "h100-sxm")) == 2
    assert "blocks.77.mlp" in capsys.readouterr().err


def test_one_device_without_a_network_that_is_too_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "calibrated.toml"  # as calibration of one rank writes it
    file.write_text("devices = 1\nlevel = []\n[device]\nkind = 'cpu'\nmemory = '2GiB'\nreserve = '256MiB'\n")
    assert main(["plan", CONFIG, "--cluster", str(file), "--global-batch", "8"]) == 2
    said = capsys.readouterr().err
    assert "What would fit: devices with" in said
    assert "nodes instead of 1" not in said


def test_a_plan_by_hand_is_told_what_it_leaves_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[mesh]\ndata = 8\n[pipeline]\nmicro_batches = 2\n")
    assert main(judged(str(file), "h100-sxm")) == 2
    assert "unknown field 'pipeline.micro_batches'; it is a field of [batch]" in capsys.readouterr().err
    file.write_text("[mesh]\ndata = 8\n")
    main(judged(str(file), "h100-sxm"))
    said = capsys.readouterr()
    assert "without [precision] a plan computes in fp32" in said.err
    assert "in fp32" in said.out
    assert "faster kernel" not in said.out  # cuDNN's and FlashAttention's are for 16 bits
    file.write_text('[mesh]\ndata = 8\n[precision]\ncompute = "bf16"\n')
    main(judged(str(file), "h100-sxm"))
    assert capsys.readouterr().err == ""


def test_judge_needs_enough_devices(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(judged(plan_file, "l4-pcie", "--nodes", "1")) == 2
    assert "l4-pcie has 4 devices; judge it with --nodes 2" in capsys.readouterr().err.replace("\n", " ")


def test_what_if_where_the_base_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["plan", "configs/llama-8b.toml", "--cluster", "v100-16g", "--global-batch", "8", "--fix", "data=8"]
    args += ["optimizer=device", "activations=device"]
    assert main([*args, "--what-if", "memory=80GiB", "-o", str(tmp_path / "x.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("no plan fits")
    assert "what if memory=80GiB: " in text
    assert "not written or exported" in text
    assert not (tmp_path / "x.json").exists()
    assert main([*args, "--what-if", "flops=x2"]) == 2
    assert capsys.readouterr().out.count("no plan fits") == 2
    assert main([*args, "--what-if", "memory=80GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["error"].startswith("no plan fits")
    assert data["what_if"]["predicted"]["seconds"] > 0


def test_training_knows_a_plan_of_another_model_or_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = "configs/gpt-tiny.toml", str(tmp_path / "p.json")
    assert main(["plan", config, "--cluster", "local", "--nodes", "2", "-o", file]) == 0
    run = ["train", config, "--plan", file, "--dry-run"]
    capsys.readouterr()
    for more, other in (
        ([], ""),
        (["--train.global-batch", "16"], "another batch (32 sequences, here 16)"),
        (["--model.seq-len", "32"], "another model (gpt-tiny, 64 tokens)"),
        (
            ["--model.heads", "2"],
            "another model (gpt-tiny, 64 tokens)",
        ),  # as many parameters: the fingerprint tells
    ):
        assert main([*run, *more]) == 0
        text = capsys.readouterr().out
        assert ("\npredicted " in text) == (not other)
        assert ("warning: the plan was made for" in text) == bool(other)
        assert other in text


def test_the_table_says_why_it_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", CONFIG, "--cluster", "a100-40g", "--global-batch", "64", "--top"]
    assert main([*args, "400"]) == 0
    text = capsys.readouterr().out
    assert "layouts: the others were not evaluated" in text
    assert main([*args, "1"]) == 0
    assert "not evaluated" not in capsys.readouterr().out


def test_a_rank_of_the_pipeline_is_named_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", CONFIG, "--cluster", "a100-40g", "--global-batch", "64", "--top", "1", "--fix"]
    for pipe, named in ((1, False), (2, True)):
        assert main([*args, f"pipe={pipe}"]) == 0
        assert ("on pipeline rank" in capsys.readouterr().out) == named


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


def test_nothing_but_plans_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(Path("tests/hub.py").read_text())
    args = ["plan", CONFIG, "--cluster", "h100-sxm", "--global-batch", "32", "--top", "1"]
    assert main([*args, "-o", str(model)]) == 2
    assert "this file exists and is no plan" in capsys.readouterr().err
    assert model.read_text() == Path("tests/hub.py").read_text()
    for _ in range(2):
        assert main([*args, "-o", str(tmp_path / "plan.json")]) == 0


def test_two_cards_have_their_host_for_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """8 B train on two RTX 4090; with --max-ranks the other two of the preset keep half of the host, and the error says so."""
    args = ["plan", "configs/llama-8b.toml", "--cluster", "rtx-4090", "--seq-len", "4096", "--global-batch", "64"]
    assert main([*args, "--devices", "2"]) == 0
    report = capsys.readouterr().out
    assert "on 2 × rtx-4090" in report
    assert main([*args, "--max-ranks", "2"]) == 2
    refused = capsys.readouterr().err
    assert "no plan fits, even with gradients in bf16" in refused
    assert "--devices 2 instead of --max-ranks 2, if the node has no more" in refused


def test_nothing_is_gathered_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", CONFIG, "--cluster", "h200", "--global-batch", "8"]
    assert main([*args, "--devices", "1"]) == 0
    assert "break-even" not in capsys.readouterr().out
    assert main([*args, "--fix", "micro_batch_size=1", "dp=8", "mbs=1"]) == 0
    assert "break-even" in capsys.readouterr().out


def test_one_break_even(capsys: pytest.CaptureFixture[str]) -> None:
    found = set()
    for size in (1, 2, 4):
        fixes = ["data=8", "mode=zero3", f"micro_batch_size={size}"]
        assert main(["plan", CONFIG, "--cluster", "a100-40g", "--global-batch", "64", "--json", "--fix", *fixes]) == 0
        found.add(json.loads(capsys.readouterr().out)["predicted"]["break_even_tokens"])
    assert len(found) == 1


def test_what_a_mistral_file_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
    whole = {"model_type": "mistral", **sizes, "vocab_size": 1000, "max_position_embeddings": 32768}
    parameters = []
    for more in ({}, {"num_key_value_heads": 8}, {"num_key_value_heads": 16}):
        (tmp_path / "config.json").write_text(json.dumps(whole | more))
        args = ["plan", str(tmp_path), "--cluster", "h100-sxm", "--global-batch", "8", "--json"]
        assert main([*args, "--seq-len", "4096"]) == 0
        parameters.append(json.loads(capsys.readouterr().out)["predicted"]["parameters"])
    assert parameters[0] == parameters[1] < parameters[2]
