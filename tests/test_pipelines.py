"""Training through pipelines: the numerics contract, faults at an instruction, checkpoints across plans, traces."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.program import Op, Schedule
from fourfold.program.stages import lay_out_pipeline
from tests.helpers import MODELS, SerialRuns, compile_without_code, make_config, run_training, series

MODEL = {
    "gpt": MODELS["gpt"] | {"layers": 4},
    "llama": MODELS["llama"] | {"layers": 3, "tie": True},
    "untied": MODELS["llama"] | {"layers": 3},
    "bert": MODELS["bert"] | {"layers": 3},
}

PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1f1b": ("gpt", 2, {"mesh": {"pipe": 2}}),
    "gpipe, 1 micro-batch": (
        "gpt",
        3,
        {"mesh": {"pipe": 3}, "batch": {"micro_batches": 1}, "pipeline": {"schedule": "gpipe"}},
    ),
    "wave with data": (
        "llama",
        4,
        {"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "wave"}},
    ),
    "interleaved, uneven": (
        "bert",
        2,
        {
            "mesh": {"pipe": 2},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": "interleaved", "stages_per_rank": 2, "layers": [0, 2, 1, 0]},
        },
    ),
    "zb-h1 with data": (
        "untied",
        4,
        {"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "zb-h1"}},
    ),
    "zb-v": ("gpt", 3, {"mesh": {"pipe": 3}, "batch": {"micro_batches": 6}, "pipeline": {"schedule": "zb-v"}}),
    "synthesized": (
        "gpt",
        2,
        {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "synthesized"}},
    ),
    "message-driven": (
        "llama",
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "batch": {"micro_batches": 6},
            "pipeline": {"executor": "message-driven", "slack": 1},
        },
    ),
    "message-driven wave, split": (
        "gpt",
        3,
        {
            "mesh": {"pipe": 3},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": "wave", "split_backward": True, "executor": "message-driven"},
        },
    ),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    folder = tmp_path_factory.mktemp("references")
    steps = {"steps": 8, "eval_every": 8}
    return SerialRuns(lambda name: make_config(folder / name, MODEL[name], train=steps))


@pytest.mark.parametrize("name", PLANS)
def test_pipelines_obey_the_contract(tmp_path: Path, references: SerialRuns, name: str) -> None:
    model, ranks, plan = PLANS[name]
    config = make_config(tmp_path / "run", MODEL[model], train={"steps": 8, "eval_every": 8})
    found = run_training(config, plan | {"precision": {"compute": "fp64"}}, ranks)
    for key in ("loss", "grad_norm", "eval_loss"):
        for a, b in zip(series(references[model], key), series(found, key), strict=True):
            assert abs(a - b) <= 1e-9 * abs(a), key


def test_any_placement_obeys_the_contract(tmp_path: Path) -> None:
    """The first stage, which owns the tied weight, is on a later rank than the last."""
    place = (2, 0, 1, 2, 1)
    rows: list[list[Op]] = [[], [], []]
    for m in range(3):
        for stage in range(5):
            rows[place[stage]].append(Op(stage, "F", m))
        for stage in reversed(range(5)):
            rows[place[stage]].append(Op(stage, "B", m))
    Schedule.of(rows).save(tmp_path / "own.csv")
    plan = {"mesh": {"pipe": 3}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": str(tmp_path / "own.csv")}}
    model = MODEL["gpt"] | {"layers": 5}
    found = []
    for ranks, given in ((1, {}), (3, plan)):
        config = make_config(tmp_path / f"{ranks}", model, train={"steps": 3, "eval_every": 3})
        found.append(run_training(config, given | {"precision": {"compute": "fp64"}}, ranks))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(found[0], key) == pytest.approx(series(found[1], key), rel=1e-9), key


def test_same_bits_twice_with_dropout_and_any_split_of_layers(tmp_path: Path) -> None:
    """Random numbers belong to units, not to stages: where the model is cut changes nothing."""
    runs = []
    for name, layers in (("a", [2, 2]), ("b", [2, 2]), ("c", [1, 3])):
        config = make_config(tmp_path / name, MODEL["gpt"] | {"dropout": 0.1})
        plan = {"mesh": {"pipe": 2}, "pipeline": {"layers": layers}}
        metrics = run_training(config, plan, 2)
        runs.append((series(metrics, "loss"), (tmp_path / name / "final" / "model.safetensors").read_bytes()))
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[2][0]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_with_a_split_backward(tmp_path: Path, recompute: str) -> None:
    norms = []
    for kind in ("none", recompute):
        config = make_config(tmp_path / kind, MODEL["gpt"])
        plan = {
            "mesh": {"pipe": 2},
            "pipeline": {"schedule": "zb-h1"},
            "unit": [{"match": "blocks.*", "recompute": kind}],
        }
        norms.append(series(run_training(config, plan, 2), "grad_norm"))
    assert norms[0] == norms[1]


def test_split_backward_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    finals = []
    for split in (True, False):
        config = make_config(tmp_path / str(split), MODEL["gpt"])
        run_training(config, {"mesh": {"pipe": 2}, "pipeline": {"split_backward": split}}, 2)
        finals.append((tmp_path / str(split) / "final" / "model.safetensors").read_bytes())
    assert finals[0] == finals[1]


def test_checkpoints_open_under_other_plans(tmp_path: Path) -> None:
    """Saved by a pipeline with a tied weight on two ranks, resumed by replicas, and the other way round."""
    fp64 = {"precision": {"compute": "fp64"}}
    plans = [({"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}} | fp64, 2), ({"mesh": {"data": 3}} | fp64, 3)]
    steady: dict[str, Any] = {"optim": {"decay": "constant"}}
    whole = make_config(tmp_path / "whole", MODEL["gpt"], train={"steps": 8}, **steady)
    reference = run_training(whole, fp64, 1)
    for first, second in (plans, plans[::-1]):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run_training(make_config(tmp_path / "run", MODEL["gpt"], train={"steps": 4}, **steady), *first)
        config = make_config(tmp_path / "run", MODEL["gpt"], train={"steps": 8}, **steady)
        found = run_training(config, *second, resume=True)
        for a, b in zip(series(reference, "loss"), series(found, "loss"), strict=True):
            assert abs(a - b) <= 1e-9 * a


def config_file(path: Path, **sections: Any) -> str:
    path.write_text(json.dumps(make_config(path.parent / path.stem, MODEL["gpt"], **sections).to_dict()))
    return str(path)


def plan_file(path: Path, plan: dict[str, Any]) -> str:
    path.write_text(json.dumps(plan))
    return str(path)


def test_a_rank_killed_at_an_instruction_and_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(tmp_path / "plan.json", {"mesh": {"pipe": 3}, "pipeline": {"schedule": "wave"}})
    saving = {"every": 1}
    assert main(["train", config_file(tmp_path / "whole.json", checkpoint=saving), "--plan", plan]) == 0
    monkeypatch.setenv("FOURFOLD_FAULTS", "kill rank=1 step=3 op=4B2; kill rank=2 step=2 op=2F1")
    assert (
        main(["train", config_file(tmp_path / "cut.json", checkpoint=saving), "--plan", plan, "--max-restarts", "2"])
        == 0
    )
    finals = [(tmp_path / run / "final" / "model.safetensors").read_bytes() for run in ("whole", "cut")]
    assert finals[0] == finals[1]


@pytest.mark.parametrize("executor", ["ordered", "message-driven"])
def test_a_stalled_rank_is_named_with_what_each_rank_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], executor: str
) -> None:
    plan = plan_file(tmp_path / "plan.json", {"mesh": {"pipe": 3}, "pipeline": {"executor": executor}})
    monkeypatch.setenv("FOURFOLD_FAULTS", "stop rank=1 step=2 op=1F1")
    assert main(["train", config_file(tmp_path / "run.json"), "--plan", plan, "--train.timeout", "2"]) == 1
    error = capfd.readouterr().err
    assert "rank 1 is stopped (SIGSTOP)" in error
    assert re.search(r"rank 0, at step 2.*: waits for the gradient of stage 1, micro-batch \d from rank 1", error)
    assert re.search(r"rank 2, at step 2.*: waits for the activation of stage 1, micro-batch \d from rank 1", error)


def test_a_raising_rank_ends_the_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(tmp_path / "plan.json", {"mesh": {"pipe": 2}})
    monkeypatch.setenv("FOURFOLD_FAULTS", "raise rank=1 step=2 op=1B1")
    assert main(["train", config_file(tmp_path / "run.json"), "--plan", plan]) == 1
    error = capfd.readouterr().err
    assert "rank 1 failed first" in error
    assert "an injected fault, at step 2" in error
    assert "in instruction 1B1" in error


def test_traces_tell_what_ran_and_can_be_replayed(tmp_path: Path) -> None:
    plan = {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"executor": "message-driven", "slack": 1}}
    config = make_config(tmp_path / "run", MODEL["gpt"], log={"trace": 2})
    reference = run_training(config, plan, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "trace" / "rank1.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]
    rows = []
    for rank in range(2):
        text = (tmp_path / "run" / "trace" / f"rank{rank}.jsonl").read_text().splitlines()[-1]
        spans = json.loads(text)["spans"]
        assert all(start <= end and waited >= 0 for _, start, end, waited in spans)
        rows.append([Op.parse(span[0].split()[0]) for span in spans])
    Schedule.of(dict.fromkeys(row) for row in rows).save(tmp_path / "replay.json")
    replay = {
        "mesh": {"pipe": 2},
        "batch": {"micro_batches": 4},
        "pipeline": {"schedule": str(tmp_path / "replay.json")},
    }
    found = run_training(make_config(tmp_path / "again", MODEL["gpt"]), replay, 2)
    assert series(found, "loss") == series(reference, "loss")


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"layers": [1, 1, 2]}, "pipeline.layers has 3 numbers, but 1f1b has 2 stages"),
        ({"layers": [1, 2]}, "pipeline.layers sums to 3, but the model has 4 layers"),
        (
            {"schedule": "wave", "waves": 4},
            "6 layers, embedding and head among them, cannot fill 16 stages; use 6 at most",
        ),
        ({"schedule": "wave", "layers": [4, 0, 0, 0]}, "pipeline.layers leaves stage 1 empty"),
        ({"schedule": "nowhere.json"}, "nowhere.json: no such file"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(tmp_path: Path, pipeline: dict[str, Any], message: str) -> None:
    config = make_config(tmp_path / "run", MODEL["gpt"]).resolve()
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({"mesh": {"pipe": 2}, "pipeline": pipeline}).check(config)


def test_layers_are_partitioned_by_their_work() -> None:
    """A dear head: the last stage gets fewer blocks, and every unit is placed once."""
    model = (
        Config.from_dict({"model": MODEL["gpt"] | {"layers": 10, "vocab": 3000}, "train": {"run_dir": "x"}})
        .resolve()
        .model
    )
    layout = lay_out_pipeline(model, Plan.from_dict({"mesh": {"pipe": 2}}), 8)
    blocks = [sum(name.endswith("attn") for name in names) for names in layout.units]
    assert blocks[0] > blocks[1]
    assert sum(blocks) == 10
    assert layout.units[0][0] == "embed"


def test_a_split_backward_under_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of weight gradients survives torch.compile (up to the generation of C++, which takes half a minute)."""
    compile_without_code(monkeypatch)
    plan = {"mesh": {"pipe": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "zb-h1"}}
    plain = run_training(make_config(tmp_path / "plain", MODEL["gpt"]), plan, 2)
    compiled = run_training(
        make_config(tmp_path / "compiled", MODEL["gpt"]), plan | {"precision": {"compile": True}}, 2
    )
    for key in ("loss", "grad_norm"):
        assert series(compiled, key) == pytest.approx(series(plain, key), rel=1e-5)
