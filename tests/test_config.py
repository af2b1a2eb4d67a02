"""Config and plan files: every field, every refusal with the nearest right name or value."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.config import Config, ModelConfig, OptimConfig, nearest_divisor
from fourfold.errors import ConfigError, PlanError, ScheduleError
from fourfold.plan import Plan
from fourfold.program import Schedule, build, lower

ROOT = Path(__file__).parent.parent

GOOD: dict[str, dict[str, Any]] = {
    "model": {"family": "gpt", "layers": 2, "hidden": 64, "seq_len": 32},
    "train": {"global_batch": 8, "run_dir": "x"},
}


def config(**sections: Any) -> Config:
    data: dict[str, Any] = {name: dict(fields) for name, fields in GOOD.items()}
    for name, fields in sections.items():
        data[name] = data.get(name, {}) | fields if isinstance(fields, dict) else fields
    return Config.from_dict(data).resolve()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modle": {}}, "unknown field 'modle'; did you mean 'model'?"),
        ({"lr": 1e-3}, "unknown field 'lr'; it is a field of [optim]"),
        ({"model": {"layer": 2}}, "unknown field 'model.layer'; did you mean 'layers'?"),
        ({"model": {"family": "gptt"}}, "model.family = 'gptt' is invalid; did you mean 'gpt'?"),
        ({"model": {"layers": "two"}}, "model.layers must be a whole number; found a string 'two'"),
        ({"model": {"layers": True}}, "model.layers must be a whole number; found a boolean True"),
        ({"model": {"layers": 0}}, "model.layers is missing"),
        ({"model": {"layers": -1}}, "model.layers = -1 must be at least 1"),
        (
            {"model": {"heads": 5}},
            "model.heads = 5 does not divide model.hidden = 64 (64 / 5 = 12.80); the nearest that does is 4",
        ),
        ({"model": {"seq_len": 64, "positions": 32}}, "model.seq_len = 64 is longer than model.positions = 32"),
        ({"model": {"kv_heads": 2, "heads": 4}}, "model.kv_heads is a field of family 'llama'; found family 'gpt'"),
        (
            {"model": {"family": "llama", "heads": 4, "kv_heads": 3}},
            "model.kv_heads = 3 does not divide model.heads = 4",
        ),
        ({"model": {"family": "llama", "head_dim": 15}}, "model.head_dim = 15 is odd"),
        ({"model": {"dropout": 1.0}}, "model.dropout = 1.0"),
        (
            {"model": {"family": "llama", "rope_scaling": {"kind": "llama3", "factor": 8.0}}},
            "original_positions is needed",
        ),
        ({"optim": {"warmup": 1000}}, "optim.warmup = 1000 is longer than train.steps = 100; use 100 or less"),
        ({"optim": {"lr": -1}}, "optim.lr = -1.0 must not be negative"),
        ({"optim": {"beta2": 1.0}}, "optim.beta2 = 1.0"),
        ({"optim": {"decay": "cos"}}, "optim.decay = 'cos' is invalid; did you mean 'cosine'?"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep = 1 must be at least 2"),
        ({"train": {"run_dir": ""}}, "train.run_dir is missing"),
        ({"data": {"eval_fraction": 1.5}}, "data.eval_fraction = 1.5"),
        ({"log": {"every": 0}}, "log.every"),
        ({"train": 3}, "train must be a table; found a number"),
        ({"train": {"steps": 0}}, "train.steps = 0 must be at least 1"),
        ({"train": {"global_batch": 0}}, "train.global_batch = 0 must be at least 1"),
        ({"train": {"timeout": 1e30}}, "train.timeout = 1e+30 must be at most 2592000 seconds, 30 days"),
        ({"train": {"timeout": math.inf}}, "train.timeout = inf must be at most 2592000 seconds, 30 days"),
        ({"train": {"timeout": math.nan}}, "train.timeout = nan must be a finite number; the default is 0.0"),
        ({"optim": {"lr": 10**400}}, "optim.lr must be a number; found one of 401 digits"),
        ({"model": {"heads": -4}}, "model.heads = -4 must be at least 0"),
        ({"model": {"ffn": -1}}, "model.ffn = -1 must be at least 0"),
        ({"model": {"norm_eps": -1.0}}, "model.norm_eps = -1.0 must be at least 0"),
    ],
)
def test_wrong_configs_say_what_is_wrong(sections: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        config(**sections)
    assert message in str(e.value)


def floats() -> list[tuple[str, str]]:
    """Every field of a config that holds a float."""
    sections = {f.name: getattr(Config(), f.name) for f in dataclasses.fields(Config)}
    return [
        (name, f.name)
        for name, section in sections.items()
        for f in dataclasses.fields(section)
        if isinstance(f.default, float)
    ]


@pytest.mark.parametrize(("section", "name"), floats())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(section: str, name: str, value: float) -> None:
    """In a file, on the command line and in Python: all make the section."""
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = {value} must be "):
        dataclasses.replace(getattr(Config(), section), **{name: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = {value} must be "):
        config(**{section: {name: value}})


def test_numbers_of_stretched_positions_are_finite() -> None:
    scaling = {"kind": "linear", "factor": math.nan}
    with pytest.raises(ConfigError, match=r"model\.rope_scaling\.factor = nan must be a finite number$"):
        config(model={"family": "llama", "rope_scaling": scaling})


def test_files_in_three_formats(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "a.toml").write_text(schema.dump_toml(GOOD))
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    (tmp_path / "a.yaml").write_text(json.dumps(GOOD))
    loaded = [Config.load(tmp_path / f"a.{kind}") for kind in ("toml", "json", "yaml")]
    assert loaded[0] == loaded[1] == loaded[2]
    assert Config.from_dict(loaded[0].resolve().to_dict()) == loaded[0].resolve()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model\n", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[]", "the top level must be a table; found a list"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.ini", "", "files end in .toml, .json or .yaml; found '.ini'"),
        ("a.toml", None, "no such file"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        Config.load(tmp_path / name)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "gpt-tiny.toml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean '.*gpt-tiny.toml'\?"):
        Config.load(tmp_path / "gpt-tny.toml")


def test_learning_rate() -> None:
    o = OptimConfig(lr=1.0, warmup=4, final_lr=0.1)
    assert [o.lr_at(s, 14) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert o.lr_at(4, 14) == 1.0
    assert o.lr_at(9, 14) == pytest.approx(0.55)
    assert o.lr_at(14, 14) == pytest.approx(0.1)
    linear = dataclasses.replace(o, decay="linear")
    assert linear.lr_at(9, 14) == pytest.approx(0.55)
    assert dataclasses.replace(o, decay="constant").lr_at(13, 14) == 1.0


def test_defaults_of_the_families() -> None:
    common: dict[str, Any] = {"layers": 1, "hidden": 512, "seq_len": 8}
    gpt, llama = ModelConfig(**common).resolve(), ModelConfig(family="llama", **common).resolve()
    assert (gpt.heads, gpt.ffn, gpt.tie, gpt.qkv_bias) == (8, 2048, True, True)
    assert (llama.heads, llama.ffn, llama.tie, llama.qkv_bias) == (8, 1408, False, False)


def test_sizes() -> None:
    assert schema.parse_bytes("16GiB", "x") == 16 << 30
    assert schema.parse_bytes("1.5 kb", "x") == 1500
    assert schema.parse_bytes(7, "x") == 7
    with pytest.raises(ConfigError, match="is not a size"):
        schema.parse_bytes("16 potatoes", "x")
    assert schema.format_bytes(1536) == "1.50 KiB"
    assert schema.format_bytes(2**20 - 4) == "1.00 MiB"
    assert [nearest_divisor(12, n) for n in (5, 7, 100)] == [4, 6, 12]


# ---- plans ----


FULL_PLAN = """
[mesh]
pipe = 2
data = 2
col = 2
[batch]
micro_batches = 8
[pipeline]
schedule = "wave"
waves = 1
split_backward = "auto"
executor = "ordered"
slack = 0
layers = "auto"
[tensor]
flow = "auto"
residual = "sequence"
[[unit]]
match = "blocks.*.mlp"
mode = "zero3"
reduce = "step"
within = 0
split = 4
recompute = "per-slice"
[[unit]]
match = "*"
mode = "zero2"
[memory]
optimizer = "device"
moments = "fp32"
staging = "0GiB"
activations = "device"
[precision]
compute = "fp32"
reduce = "fp32"
compile = false
"""


def test_every_field_of_a_plan_is_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(FULL_PLAN)
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.mesh.ranks == 8
    assert plan.rule_for("blocks.11.mlp").split == 4
    assert plan.rule_for("head").mode == "zero2"
    for name in ("again.toml", "again.json"):
        plan.save(tmp_path / name)
        assert Plan.load(tmp_path / name) == plan


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ({"mesh": {"data": 3}}, 4, "the mesh is data 3 = 3 ranks, but there are 4; data = 4 would make it 4"),
        ({"mesh": {"pipe": 3}}, 4, "the mesh is pipe 3 = 3 ranks, but there are 4; or start 3 ranks"),
        ({"mesh": {"data": 0}}, None, "mesh.data = 0 must be at least 1"),
        ({"mesh": {"dat": 2}}, None, "unknown field 'mesh.dat'; did you mean 'data'?"),
        ({"recompute": "full"}, None, "unknown field 'recompute'; it is a field of [[unit]]"),
        ({"mesh": {"data": 3}}, 3, "train.global_batch = 8 does not divide by data 3 = 3; use 6 or 9 sequences"),
        (
            {"mesh": {"data": 2}, "batch": {"micro_batches": 3}},
            2,
            "train.global_batch = 8 does not divide by data 2 · micro_batches 3 = 6; use 6 or 12 sequences",
        ),
        ({"mesh": {"data": 16}}, 16, "does not divide by data 16 = 16; use 16 sequences"),
        ({"unit": [{"match": "block.*"}]}, None, "no unit matches 'block.*'; did you mean 'blocks.*"),
        ({"unit": [{"mode": "zero3"}]}, None, "missing field 'unit[0].match'"),
        ({"unit": [{"match": "*", "mode": "zero4"}]}, None, "did you mean 'zero3'?"),
        ({"pipeline": {"schedule": "waves"}}, None, "did you mean 'wave'?"),
        ({"pipeline": {"layers": [1, -1]}}, None, "negative number of layers"),
        ({"memory": {"staging": "much"}}, None, "memory.staging = 'much' is not a size"),
    ],
)
def test_wrong_plans_say_what_is_wrong(plan: dict[str, Any], ranks: int | None, message: str) -> None:
    with pytest.raises(PlanError) as e:
        Plan.from_dict(plan).check(config(), ranks)
    assert message in str(e.value)


def test_errors_about_a_file_name_it(tmp_path: Path) -> None:
    """And say what it is, where it is a file of another kind."""
    shipped = str(ROOT / "configs" / "gpt-tiny.toml")
    with pytest.raises(PlanError, match=rf"^{shipped}: this is a config, not a plan$"):
        Plan.load(shipped)
    Plan.from_dict({"mesh": {"data": 2}}).save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"plan\.json: this is a plan, not a config$"):
        Config.load(tmp_path / "plan.json")
    Cluster.local(1).save(tmp_path / "cluster.toml")
    with pytest.raises(PlanError, match=r"cluster\.toml: this is a cluster, not a plan$"):
        Plan.load(tmp_path / "cluster.toml")
    build("1f1b", 2, 2).save(tmp_path / "schedule.json")
    with pytest.raises(PlanError, match=r"schedule\.json: this is a schedule, not a plan$"):
        Plan.load(tmp_path / "schedule.json")
    (tmp_path / "typo.toml").write_text("[mesh]\ndata = 0\n[memroy]\n")
    with pytest.raises(PlanError, match=r"typo\.toml: unknown field 'memroy'; did you mean 'memory'\?$"):
        Plan.load(tmp_path / "typo.toml")
    (tmp_path / "typo.toml").write_text("[optim]\nlr = nan\n")
    with pytest.raises(ConfigError, match=r"typo\.toml: optim\.lr = nan must be a finite number"):
        Config.load(tmp_path / "typo.toml")
    (tmp_path / "typo.csv").write_text("0F0,0X0\n")
    with pytest.raises(ScheduleError, match=r"typo\.csv: row 0, cell 1: '0X0' is not an op"):
        Schedule.load(tmp_path / "typo.csv")


@pytest.mark.parametrize(
    ("value", "name", "error"),
    [
        (Plan(), "plan.json", PlanError),
        (Plan(), "plan.toml", PlanError),
        (build("1f1b", 2, 2), "schedule.csv", ScheduleError),
        (lower(build("1f1b", 2, 2)), "programs.txt", ScheduleError),
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, value: Any, name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{tmp_path}/none/{name}: cannot be written: there is no folder {tmp_path}/none"):
        value.save(tmp_path / "none" / name)
    with pytest.raises(error, match="is saved as .json or "):
        value.save(tmp_path / "x.yaml")


def test_default_micro_batches() -> None:
    assert Plan().micro_batches(12) == 1
    assert Plan.from_dict({"mesh": {"pipe": 3}}).micro_batches(12) == 6
    assert Plan.from_dict({"mesh": {"pipe": 4}}).micro_batches(12) == 6  # 8 does not divide 12
    assert Plan.from_dict({"mesh": {"data": 2}, "batch": {"micro_batches": 3}}).micro_batch_size(12) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configs_resolve(path: Path) -> None:
    resolved = Config.load(path).resolve()
    Plan().check(resolved)
    assert resolved.train.run_dir
