"""A seeded sample of benchmarks.fuzz: mutated files of every kind give our own errors, quickly; and the bombs by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz import READERS, fuzz
from fourfold.config import Config
from fourfold.errors import ConfigError, PlanError, ScheduleError
from fourfold.launch.place import place_from_environment
from fourfold.plan import Plan
from fourfold.program import Schedule, validate
from fourfold.view.text import markup, printable


def config(**sections: Any) -> Config:
    data: dict[str, Any] = {
        "model": {"family": "gpt", "layers": 2, "hidden": 64, "seq_len": 32},
        "train": {"global_batch": 8, "run_dir": "x"},
    }
    for name, fields in sections.items():
        data[name] = data.get(name, {}) | fields if isinstance(fields, dict) else fields
    return Config.from_dict(data).resolve()


@pytest.mark.parametrize("reader", READERS)
def test_mutated_input_gives_our_own_errors(reader: str) -> None:
    if reader == "tokenizer.json":
        pytest.importorskip("tokenizers")
    if reader.endswith("yaml"):
        pytest.importorskip("yaml")
    outcome = fuzz(reader, 60, seed=1)
    assert not outcome.bad
    assert outcome.accepted + outcome.refused == 60


def test_the_fuzzer_finds_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a green table says nothing."""
    monkeypatch.setattr("fourfold.files._check", lambda value, finite: None)
    monkeypatch.setattr("fourfold.train.rundir._is_metrics", lambda line: True)
    assert fuzz("metrics", 300, seed=0).bad


@pytest.mark.parametrize("cell", ["3000000000F0", "0F3000000000", "9" * 4000 + "F0", "٣F٠"])
def test_numbers_in_a_schedule_are_bounded(tmp_path: Path, cell: str) -> None:
    began = time.process_time()
    (tmp_path / "s.csv").write_text(f"0F0,{cell},0B0\n")
    with pytest.raises(ScheduleError, match="numbered up to 1000000|is not an op"):
        Schedule.load(tmp_path / "s.csv")
    with pytest.raises(ScheduleError, match="forwards; the ranks have 2 ops in all"):
        validate(Schedule.from_dict({"order": ["0F0 0B0"], "placement": [0] * 1000, "micro_batches": 10**6}))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden": 10**12}}, "model.hidden = 1000000000000 must be at most 1048576"),
        ({"model": {"seq_len": 10**12}}, "model.seq_len = 1000000000000 must be at most"),
        ({"model": {"vocab": 10**12}}, "model.vocab = 1000000000000 must be at most"),
        ({"train": {"global_batch": 10**12}}, "train.global_batch = 1000000000000 must be at most"),
        ({"train": {"steps": 10**15}}, "train.steps = 1000000000000000 must be at most"),
        ({"train": {"steps": 10**42}}, "must be at most"),
        ({"optim": {"lr": 1e42}}, "optim.lr = 1e+42 must be at most 1e+30"),
        ({"data": {"source": "a\0b"}}, "control character"),
        ({"data": {"source": "\x1b[2J"}}, "control character"),
    ],
)
def test_numbers_and_names_in_a_config_are_bounded(sections: Any, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as e:
        config(**sections)
    assert message in str(e.value)
    assert time.process_time() - began < 1


def test_numbers_in_a_plan_are_bounded() -> None:
    began = time.process_time()
    for plan in (
        {"batch": {"micro_batches": 9_999_999_999}},
        {"mesh": {"pipe": 2}, "batch": {"micro_batches": 10**6}},
        {"mesh": {"pipe": 10**9}},
        {"mesh": {"data": 10**15}},
        {"pipeline": {"slack": 10**12}},
        {"unit": [{"match": "*", "split": 10**12}]},
        {"memory": {"staging": "9" * 400 + "TiB"}},
        {"memory": {"prefetch": 10**42}},
    ):
        with pytest.raises(PlanError):
            Plan.from_dict(plan).check(config())
    assert time.process_time() - began < 2


def test_variables_of_launchers_are_checked() -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place_from_environment(good) is not None
    for name, value in (
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_RANK", "2"),
    ):
        with pytest.raises(ConfigError, match=name):
            place_from_environment(good | {name: value})
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        place_from_environment(slurm | {"SLURM_TASKS_PER_NODE": "2(x9999999)"})


# ---- what is shown ----


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fourfold.cli import main

    assert printable("a\tb\nä漢 🙂") == "a\tb\nä漢 🙂"
    assert printable("\x1b[2J\x07\x9b\x7f\u202e\u2028\ud800") == r"\x1b[2J\x07\x9b\x7f\u202e\u2028\ud800"
    assert markup("[red]x[/]") == r"\[red]x\[/]"
    path = tmp_path / "\x1b]0;owned\x07[bold]x[⁄].toml"
    path.write_text("[train]\nstesp = 3\n")
    assert main(["train", str(path)]) == 2
    shown = capsys.readouterr()
    assert r"\x1b]0;owned\x07[bold]x[⁄].toml" in shown.err.replace("\n", "")
    assert "\x07" not in shown.err + shown.out
    assert "\x1b]" not in shown.err + shown.out


def test_paths_are_escaped_where_no_terminal_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a run directory was printed raw by `train --resume` and `view --html` if stdout was not a terminal."""
    from rich.console import Console

    from fourfold.cli import main
    from fourfold.view.console import facts

    facts([("run", "\x1b[2Jrun")], Console(highlight=False))
    plan = tmp_path / "\x1b[2Jplan.json"
    Plan().save(plan)
    assert main(["view", str(plan), "--html"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(r"\x1b[2J") == 2
    assert "\x1b[2J" not in shown
