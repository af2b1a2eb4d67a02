"""Sharding unit by unit: every mode obeys the numerics contract, alone and mixed, split and not, with and without a pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import PlanError
from fourfold.plan import Plan
from tests.helpers import MODELS, SerialRuns, compile_without_code, make_config, run_training, series

MODEL: dict[str, dict[str, Any]] = {
    "gpt": MODELS["gpt"] | {"layers": 4},
    "llama": MODELS["llama"] | {"layers": 3, "tie": True},
    "untied": MODELS["llama"] | {"layers": 3},
    "bert": MODELS["bert"] | {"layers": 3, "vocab": 259},
}
STEPS = {"steps": 6, "eval_every": 6}


def everything(mode: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"match": "*", "mode": mode, **fields}]


MIX = [
    {"match": "blocks.0.*", "mode": "zero3", "reduce": "micro-batch"},
    {"match": "blocks.1.mlp", "mode": "keep", "split": 3, "recompute": "per-slice"},
    {"match": "blocks.1.attn", "mode": "zero2", "recompute": "full"},
    {"match": "head", "mode": "zero2", "split": 2, "recompute": "per-slice"},
    {"match": "embed", "mode": "keep"},
]

# model, ranks, mesh, micro-batches, pipeline, rules
PLANS: dict[str, tuple[str, int, dict[str, int], int, dict[str, Any], list[dict[str, Any]]]] = {
    "zero3": ("gpt", 2, {"data": 2}, 1, {}, everything("zero3")),
    "zero3, reduced each time": ("untied", 3, {"data": 3}, 4, {}, everything("zero3", reduce="micro-batch")),
    "zero2": ("llama", 2, {"data": 2}, 3, {}, everything("zero2")),
    "keep": ("bert", 3, {"data": 3}, 2, {}, everything("keep", recompute="selective")),
    "replicate, reduced each time": ("gpt", 2, {"data": 2}, 2, {}, everything("replicate", reduce="micro-batch")),
    "within 2 of 4": ("untied", 4, {"data": 4}, 3, {}, everything("zero3", within=2)),
    "split 2": ("gpt", 2, {"data": 2}, 2, {}, everything("zero3", split=2)),
    "split 4, per slice": ("bert", 2, {"data": 2}, 2, {}, everything("zero3", split=4, recompute="per-slice")),
    "split 8, tied": ("llama", 2, {"data": 2}, 1, {}, everything("keep", split=8, recompute="full")),
    "split alone": ("untied", 1, {}, 2, {}, everything("zero3", split=4, recompute="selective")),
    "mix": ("gpt", 3, {"data": 3}, 4, {}, MIX),
    "zero3 in a pipeline": ("untied", 4, {"pipe": 2, "data": 2}, 3, {}, everything("zero3")),
    "mix in a wave": ("gpt", 4, {"pipe": 2, "data": 2}, 3, {"schedule": "wave"}, MIX),
    "tied on two ranks, queued weight gradients": (
        "llama",
        4,
        {"pipe": 2, "data": 2},
        3,
        {"schedule": "zb-h1"},
        everything("zero2", split=2, recompute="per-slice"),
    ),
    "zero3, zb-v": ("gpt", 4, {"pipe": 2, "data": 2}, 3, {"schedule": "zb-v"}, everything("zero3", split=2)),
    "keep, message-driven": (
        "llama",
        4,
        {"pipe": 2, "data": 2},
        6,
        {"executor": "message-driven", "slack": 1, "split_backward": True},
        everything("keep", split=2),
    ),
    "alone, message-driven": ("gpt", 2, {"pipe": 2}, 4, {"executor": "message-driven"}, everything("zero3")),
}


# operator splitting on a grid, of one layer: model, ranks, plan
ON_GRIDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "split 1, tied": ("gpt", 4, {"mesh": {"row": 2, "col": 2}, "unit": everything("replicate")}),
    "split 2, tied": ("gpt", 4, {"mesh": {"row": 2, "col": 2}, "unit": everything("replicate", split=2)}),
    "split 8, padded": (
        "bert",
        3,
        {
            "mesh": {"col": 3},
            "tensor": {"residual": "hidden"},
            "unit": everything("zero3", split=8, recompute="per-slice"),
        },
    ),
    "split 4, rows": (
        "llama",
        4,
        {
            "mesh": {"depth": 2, "row": 2},
            "tensor": {"residual": "hidden", "flow": "ws"},
            "batch": {"micro_batches": 3},
            "unit": everything("zero3", split=4, recompute="selective"),
        },
    ),
    "split 4, summa, in a pipeline": (
        "untied",
        8,
        {
            "mesh": {"pipe": 2, "row": 2, "col": 2},
            "tensor": {"flow": "summa"},
            "pipeline": {"schedule": "zb-h1"},
            "batch": {"micro_batches": 2},
            "unit": everything("zero2", split=4, recompute="full"),
        },
    ),
    "split 2, tied on two ranks, message-driven": (
        "llama",
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "col": 2},
            "tensor": {"flow": "ls"},
            "pipeline": {"executor": "message-driven", "split_backward": True},
            "batch": {"micro_batches": 3},
            "unit": everything("keep", split=2, recompute="per-slice"),
        },
    ),
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    """Models with one layer."""
    folder = tmp_path_factory.mktemp("shallow")
    return SerialRuns(lambda name: make_config(folder / name, MODEL[name] | {"layers": 1}, train=SHORT))


SHORT = {"steps": 3, "eval_every": 3}


@pytest.mark.parametrize("name", ON_GRIDS)
def test_slices_on_a_grid_obey_the_contract(tmp_path: Path, shallow: SerialRuns, name: str) -> None:
    model, ranks, plan = ON_GRIDS[name]
    config = make_config(tmp_path / "run", MODEL[model] | {"layers": 1}, train=SHORT)
    found = run_training(config, plan | {"precision": {"compute": "fp64"}}, ranks, watched=True)
    for key in ("loss", "grad_norm", "eval_loss"):
        for a, b in zip(series(shallow[model], key), series(found, key), strict=True):
            assert abs(a - b) <= 1e-9 * abs(a), key


def plan_of(name: str) -> tuple[str, int, dict[str, Any]]:
    model, ranks, mesh, micro_batches, pipeline, rules = PLANS[name]
    plan = {"mesh": mesh, "batch": {"micro_batches": micro_batches}, "pipeline": pipeline, "unit": rules}
    return model, ranks, plan | {"precision": {"compute": "fp64"}}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    folder = tmp_path_factory.mktemp("references")
    return SerialRuns(lambda name: make_config(folder / name, MODEL[name], train=STEPS))


@pytest.mark.parametrize("name", PLANS)
def test_modes_obey_the_contract(tmp_path: Path, references: SerialRuns, name: str) -> None:
    model, ranks, plan = plan_of(name)
    found = run_training(make_config(tmp_path / "run", MODEL[model], train=STEPS), plan, ranks, watched=True)
    for key in ("loss", "grad_norm", "eval_loss"):
        for a, b in zip(series(references[model], key), series(found, key), strict=True):
            assert abs(a - b) <= 1e-9 * abs(a), key


def test_compiled_units_are_sharded_and_split_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit a graph of its own, captured whole; gathers stay outside of it."""
    compile_without_code(monkeypatch)
    losses = []
    for compiled in (False, True):
        config = make_config(tmp_path / str(compiled), MODELS["llama"], train={"steps": 2})
        plan = {"mesh": {"data": 2}, "batch": {"micro_batches": 2}, "unit": everything("zero3", split=2)}
        losses.append(series(run_training(config, plan | {"precision": {"compile": compiled}}, 2), "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_same_plan_twice_gives_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        config = make_config(tmp_path / name, MODEL["gpt"] | {"dropout": 0.1})
        plan = {"mesh": {"data": 3}, "batch": {"micro_batches": 4}, "unit": MIX, "precision": {"compute": "bf16"}}
        metrics = run_training(config, plan, 3)
        runs.append((series(metrics, "loss"), (tmp_path / name / "final" / "model.safetensors").read_bytes()))
    assert runs[0] == runs[1]


def test_modes_have_the_bits_of_replicated_training(tmp_path: Path) -> None:
    """Two addends have one sum: on two ranks sharding reorders nothing but the norm, so without clipping no bit changes."""
    finals = []
    rules = [[], everything("zero3"), everything("keep", recompute="full")]
    for i, rule in enumerate(rules):
        config = make_config(tmp_path / f"{i}", MODEL["gpt"] | {"dropout": 0.1}, optim={"clip": 0.0})
        plan = {"mesh": {"data": 2}, "batch": {"micro_batches": 3}, "unit": rule, "precision": {"compute": "bf16"}}
        run_training(config, plan, 2)
        finals.append((tmp_path / f"{i}" / "final" / "model.safetensors").read_bytes())
    assert finals[1:] == finals[:1] * 2


SAVED: list[tuple[int, dict[str, Any]]] = [
    (2, {"mesh": {"data": 2}, "unit": everything("zero3", split=3, recompute="per-slice")}),
    (4, {"mesh": {"pipe": 2, "data": 2}, "unit": everything("zero2"), "pipeline": {"schedule": "zb-h1"}}),
    (4, {"mesh": {"data": 4}, "unit": everything("keep", within=2)}),
    (4, {"mesh": {"row": 2, "col": 2}, "unit": everything("replicate", split=3, recompute="per-slice")}),
    (1, {}),
]


def test_checkpoints_open_in_every_other_mode(tmp_path: Path) -> None:
    """Saved in each way and resumed in the next; then every tensor of the checkpoint is what it was."""
    from safetensors.torch import load_file

    from fourfold.checkpoint.export import write_final
    from fourfold.train.rundir import RunDir

    fp64: dict[str, Any] = {"precision": {"compute": "fp64"}}
    steady: dict[str, Any] = {"optim": {"decay": "constant"}}
    whole = make_config(tmp_path / "whole", MODEL["gpt"], train={"steps": 2 * len(SAVED)}, **steady)
    reference = run_training(whole, fp64, 1)
    for turn, (ranks, plan) in enumerate(SAVED):
        config = make_config(tmp_path / "run", MODEL["gpt"], train={"steps": 2 * turn + 2}, **steady)
        found = run_training(config, plan | fp64, ranks, resume=turn > 0)
        before = load_file(tmp_path / "run" / "final" / "model.safetensors")
        after_ranks, after = SAVED[(turn + 1) % len(SAVED)]
        shutil.copytree(tmp_path / "run", tmp_path / f"copy{turn}")
        config = make_config(tmp_path / f"copy{turn}", MODEL["gpt"], train={"steps": 2 * turn + 2}, **steady)
        run_training(config, after | fp64, after_ranks, resume=True)  # loads, has nothing to do
        write_final(RunDir(tmp_path / f"copy{turn}"), config.resolve())
        again = load_file(tmp_path / f"copy{turn}" / "final" / "model.safetensors")
        assert all((before[n] == again[n]).all() for n in before)
    for key in ("loss", "grad_norm"):
        for a, b in zip(series(reference, key), series(found, key), strict=True):
            assert abs(a - b) <= 1e-9 * a


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"unit": [{"match": "block.*.mlp", "mode": "zero3"}]}, r"no unit matches 'block.*.mlp'; did you mean 'blocks"),
        ({"unit": [{"match": "*", "mode": "zero4"}]}, "zero4"),
        ({"unit": everything("zero3", within=3)}, r"within = 3 .* data 4 · depth 1 = 4; use 2"),
        ({"unit": everything("zero3", within=8)}, "within = 8 .* use 4"),
        ({"unit": [{"match": "blocks.*.mlp", "split": 129}]}, r"split = 129 .* 128 hidden features; use at most 128"),
        ({"unit": [{"match": "head", "split": 1000}]}, r"split = 1000 .* vocabulary entries; use at most 256"),
        (
            {"unit": [{"match": "*", "split": 65}], "mesh": {"row": 2, "col": 2}},
            r"split = 65 .* 64 of 128 hidden features on a rank of the grid; use at most 64",
        ),
        ({"unit": [{"match": "head", "split": 0}]}, "split = 0 must be at least 1"),
        (
            {"unit": everything("zero3"), "mesh": {"pipe": 2, "data": 2}, "pipeline": {"executor": "message-driven"}},
            r"use mode = 'keep' or executor = 'ordered'",
        ),
        (
            {"unit": everything("zero3", reduce="micro-batch"), "mesh": {"pipe": 2, "data": 2}},
            r"tied to the head's on another rank; use reduce = 'step'",
        ),
        ({"memory": {"prefetch": -1}}, "prefetch = -1 must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    config = make_config(tmp_path / "run", MODEL["gpt"], train={"global_batch": 24}).resolve()
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({"mesh": {"data": 4}} | plan).check(config)
