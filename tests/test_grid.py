"""Training on the tensor grid, in any mix with data and pipelines: the numerics contract, checkpoints, precision, refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.cli import main
from fourfold.collectives import Pending
from fourfold.collectives import all_reduce as real_all_reduce
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.plan import Mesh, Plan
from fourfold.shard import sharing, unit
from fourfold.shard.replicas import unequal_replicas
from fourfold.train.loop import Loop
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import _reseeder
from tests.helpers import MODELS, SerialRuns, compile_without_code, make_config, run_training, series

STEPS = {"steps": 10, "global_batch": 24, "eval_every": 10}
MODEL: dict[str, dict[str, Any]] = {
    "gpt": MODELS["gpt"] | {"layers": 1},
    "untied": MODELS["gpt"] | {"layers": 1, "tie": False, "hidden": 36, "ffn": 50},
    "llama": MODELS["llama"] | {"layers": 1, "heads": 6, "kv_heads": 3, "vocab": 259},
    "tied": MODELS["llama"] | {"layers": 1, "tie": True, "kv_heads": 1},
    "bert": MODELS["bert"] | {"layers": 1, "token_types": 2},
}

PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tesseract": (
        "gpt",
        8,
        {"mesh": {"depth": 2, "row": 2, "col": 2}, "tensor": {"flow": "summa", "residual": "hidden"}},
    ),
    "2 x 2 x 2": ("tied", 8, {"mesh": {"depth": 2, "row": 2, "col": 2}, "batch": {"micro_batches": 2}}),
    "three key heads over two columns": ("llama", 4, {"mesh": {"row": 2, "col": 2}}),
    "one row": ("untied", 4, {"mesh": {"data": 2, "col": 2}}),
    "one column": ("untied", 3, {"mesh": {"row": 3}, "tensor": {"residual": "hidden"}}),
    "three columns": ("bert", 3, {"mesh": {"col": 3}}),
    "in a pipeline, split": (
        "gpt",
        8,
        {"mesh": {"pipe": 2, "row": 2, "col": 2}, "pipeline": {"schedule": "zb-h1"}, "batch": {"micro_batches": 3}},
    ),
    "in a pipeline, with data": (
        "llama",
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "col": 2},
            "pipeline": {"schedule": "1f1b", "layers": [1, 0]},
            "tensor": {"residual": "hidden"},
        },
    ),
    "message-driven": (
        "tied",
        4,
        {"mesh": {"pipe": 2, "col": 2}, "batch": {"micro_batches": 4}, "pipeline": {"executor": "message-driven"}},
    ),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    folder = tmp_path_factory.mktemp("references")
    return SerialRuns(lambda name: make_config(folder / name, MODEL[name], train=STEPS))


def largest_gap(a: list[dict[str, Any]], b: list[dict[str, Any]], *keys: str) -> float:
    pairs = [(x, y) for key in keys for x, y in zip(series(a, key), series(b, key), strict=True)]
    assert pairs
    return max(abs(x - y) / abs(x) for x, y in pairs)


@pytest.mark.parametrize("name", PLANS)
def test_grids_obey_the_contract(
    tmp_path: Path, references: SerialRuns, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of AdamW with clipping, and at their end every copy of every piece has the same bits."""
    model, ranks, plan = PLANS[name]
    step = Loop.step

    def step_and_compare(self: Loop, index: int) -> Any:
        result = step(self, index)
        if index == STEPS["steps"] - 1:
            assert unequal_replicas(self.units, self.world) == []
        return result

    monkeypatch.setattr(Loop, "step", step_and_compare)
    config = make_config(tmp_path / "run", MODEL[model], train=STEPS)
    found = run_training(config, plan | {"precision": {"compute": "fp64"}}, ranks, watched=True)
    assert largest_gap(references[model], found, "loss", "grad_norm", "eval_loss") <= 1e-9


def test_without_one_of_the_sums_nothing_matches(
    tmp_path: Path, references: SerialRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planes that do not sum their gradients (as the published code), copies of norms and biases that do not."""

    def only(what: str, x: Any, group: Any, said: str) -> Pending:
        return Pending(None, said) if what in said else real_all_reduce(x, group, said)

    for number, (mesh, left_out) in enumerate(
        (({"depth": 2}, (sharing, "s gradients")), ({"row": 2, "col": 2}, (unit, "over their copies")))
    ):
        with monkeypatch.context() as m:
            m.setattr(left_out[0], "all_reduce", functools.partial(only, left_out[1]))
            # the copies then differ, which a run would refuse to save
            config = make_config(tmp_path / f"{number}", MODEL["gpt"], train=STEPS | {"check_replicas": -1})
            ranks = 2 if number == 0 else 4
            found = run_training(config, {"mesh": mesh, "precision": {"compute": "fp64"}}, ranks)
            assert largest_gap(references["gpt"], found, "loss", "grad_norm") > 1e-4


def test_checkpoints_open_on_any_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved on a grid, opened on another with a pipeline, then by one process: the losses of a run that never moved."""
    base = {"precision": {"compute": "fp64"}}
    plans: list[tuple[int, dict[str, Any]]] = [
        (4, {"mesh": {"row": 2, "col": 2}}),
        (4, {"mesh": {"pipe": 2, "col": 2}, "tensor": {"residual": "hidden", "flow": "os"}}),
        (1, {}),
        (3, {"mesh": {"col": 3}}),
    ]

    def config(name: str, steps: int) -> Config:
        train = {"steps": steps, "global_batch": 24}
        return make_config(tmp_path / name, MODEL["tied"], train=train, optim={"lr": 1e-2, "decay": "constant"})

    reference = run_training(config("one", 8), base, 1)
    for number, (ranks, plan) in enumerate(plans):
        found = run_training(config("moved", 2 * number + 2), base | plan, ranks, resume=number > 0)
    assert largest_gap(reference, found, "loss", "grad_norm") <= 1e-9
    main(["sample", str(tmp_path / "moved"), "--prompt", "3 times", "--tokens", "5"])
    assert "3 times" in capsys.readouterr().out
    assert (tmp_path / "moved" / "final" / "model.safetensors").is_file()


def test_initial_weights_are_the_same_on_any_grid(tmp_path: Path) -> None:
    finals = []
    for name, ranks, mesh in (("one", 1, {}), ("grid", 6, {"row": 2, "col": 3})):
        config = make_config(
            tmp_path / name, MODEL["llama"], train={"steps": 1, "global_batch": 24}, optim={"lr": 0.0, "warmup": 0}
        )
        run_training(config, {"mesh": mesh}, ranks)
        finals.append((tmp_path / name / "final" / "model.safetensors").read_bytes())
    assert finals[0] == finals[1]


def test_dropout_has_a_stream_for_every_rank(tmp_path: Path) -> None:
    """Ranks that hold other tokens, or other features of the same ones, drop other elements; a step later, others again."""
    config = make_config(tmp_path / "run", MODEL["gpt"])
    mesh = Mesh(data=2, depth=2, row=2, col=2)
    drawn = set()
    for rank in range(16):
        for step in range(2):
            _reseeder(config, RankMesh(mesh, rank), [0], own=False)(step, 0, 0)
            drawn.add(torch.rand(()).item())
    assert len(drawn) == 32


def test_bf16_with_recomputation_and_dropout_repeats_its_bits(tmp_path: Path) -> None:
    runs = []
    for name, recompute in (("a", "none"), ("b", "none"), ("full", "full"), ("selective", "selective")):
        config = make_config(tmp_path / name, MODEL["gpt"] | {"dropout": 0.1}, train={"steps": 2, "global_batch": 24})
        plan = {
            "mesh": {"col": 2},
            "batch": {"micro_batches": 2},
            "unit": [{"match": "blocks.*", "recompute": recompute}],
            "precision": {"compute": "bf16"},
        }
        runs.append(series(run_training(config, plan, 2), "grad_norm"))
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_bf16_and_fp32_stay_near_one_process(tmp_path: Path) -> None:
    for compute, loss_gap, norm_gap in (("fp32", 1e-5, 1e-4), ("bf16", 0.02, 0.1)):
        found = []
        for name, ranks, mesh in (("one", 1, {}), ("grid", 4, {"row": 2, "col": 2})):
            config = make_config(tmp_path / f"{compute}-{name}", MODEL["llama"], train={"steps": 6, "global_batch": 24})
            found.append(run_training(config, {"mesh": mesh, "precision": {"compute": compute}}, ranks))
        assert largest_gap(*found, "loss") <= loss_gap
        assert largest_gap(*found, "grad_norm") <= norm_gap


@pytest.mark.parametrize("residual", ["sequence", "hidden"])
def test_compiled_units_match(residual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured whole, collectives and queued weight gradients included; generating C++ would take most of a minute."""
    compile_without_code(monkeypatch)
    found = []
    for compiled in (False, True):
        config = make_config(tmp_path / str(compiled), MODEL["gpt"], train={"steps": 2, "global_batch": 24})
        plan = {
            "mesh": {"col": 2},
            "tensor": {"residual": residual},
            "pipeline": {"schedule": "zb-h1"},
            "precision": {"compute": "fp64", "compile": compiled},
        }
        found.append(run_training(config, plan, 2))
    assert largest_gap(*found, "loss", "grad_norm") <= 1e-9


@pytest.mark.parametrize(
    ("model", "plan", "batch", "said"),
    [
        ("gpt", {"mesh": {"col": 5}}, 12, r"mesh.col = 5.*the model has 4; use col = 4 at most"),
        ("gpt", {"mesh": {"depth": 2, "row": 4}}, 4, r"global_batch = 4 does not divide by depth 2 · row 4 = 8; use 8"),
        ("gpt", {"tensor": {"flow": "sumna"}}, 12, r"flow.*sumna.*summa"),
        (
            "gpt",
            {"mesh": {"row": 4, "col": 1}, "tensor": {"flow": "summa"}},
            12,
            r"row = 4 and mesh.col = 1; use row = col = 2",
        ),
        ("gpt", {"mesh": {"row": 3, "col": 2}, "tensor": {"flow": "summa"}}, 12, r"use flow = 'auto'"),
        (MODELS["gpt"] | {"seq_len": 3}, {"mesh": {"col": 4}}, 12, r"model.seq_len = 3; use col = 3"),
        (
            "gpt",
            {"mesh": {"row": 2, "col": 2}, "tensor": {"flow": "summa"}, "precision": {"compile": True}},
            12,
            r"compile",
        ),
    ],
)
def test_bad_input_is_refused_before_start(tmp_path: Path, model: Any, plan: Any, batch: int, said: str) -> None:
    config = make_config(tmp_path / "run", model, train={"global_batch": batch}).resolve()
    with pytest.raises(PlanError, match=said):
        Plan.from_dict(plan).check(config)
