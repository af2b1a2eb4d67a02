"""LoRA: gradients of PEFT, any plan like one process, adapters and merged models that others open, frozen weights that stay."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.checkpoint.export import export, find_checkpoint, load_model
from fourfold.checkpoint.index import read_index
from fourfold.config import Config, LoraConfig, ModelConfig
from fourfold.errors import ConfigError, FourfoldError
from fourfold.model import adapter as adapter_module
from fourfold.model.build import serial_model
from fourfold.model.families import FAMILIES, Link
from fourfold.model.lora import adapter_links, is_adapter, target_names
from fourfold.model.spec import parameter_count, parameter_shapes, trained_count
from fourfold.plan import Plan
from fourfold.testing.ledger import Ledger
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit
from tests.families import CASES, EVERY, TOKENS, VOCAB, config_of, ours, tensors_of, theirs, wide
from tests.helpers import make_config, series

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


# ---- PEFT ----


def with_peft(model: Any, m: ModelConfig, dtype: torch.dtype) -> Any:
    """The model of transformers with PEFT's adapters, of which no factor is 0."""
    assert m.lora is not None
    config = peft.LoraConfig(
        r=m.lora.rank,
        lora_alpha=m.lora.alpha,
        target_modules=target_names(m),
        fan_in_fan_out=m.model_type == "gpt2",
    )
    made = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_" in name:
                p.data = torch.randn(p.shape, generator=draw, dtype=torch.float64).mul(0.1).to(dtype)
    return made


def peft_tensors(model: Any) -> dict[str, Tensor]:
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}


def rows(into: Tensor, stored: Tensor, link: Link) -> None:
    for run in link.runs:
        into[run.ours : run.ours + run.length] = stored[run.theirs : run.theirs + run.length * run.step : run.step]


@pytest.mark.parametrize(
    ("name", "dtype", "close", "targets"),
    [
        *((name, torch.float64, 1e-10, ()) for name in CASES),
        *((name, torch.float32, 1e-5, ()) for name in ("llama", "gpt2", "gpt_neox")),
        ("llama", torch.float64, 1e-10, ("q_proj", "v_proj")),
        ("bert", torch.float64, 1e-10, ("dense",)),
    ],
)
def test_gradients_are_those_of_peft(
    name: str, dtype: torch.dtype, close: float, targets: tuple[str, ...], tmp_path: Path
) -> None:
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with wide(dtype):
        other = theirs(name, dtype)
        m = config_of(other, tmp_path, lora=LoraConfig(rank=3, alpha=7.0, targets=targets))
        model = ours(name, m, tensors_of(other), dtype)
        other = with_peft(other, m, dtype)
        expected = other(input_ids=tokens).logits
        F.cross_entropy(expected.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(m)
    assert trained_count(m) == sum(p.numel() for p in other.parameters() if p.requires_grad)
    found, mine = peft_tensors(other), dict(model.named_parameters())
    every = adapter_links(FAMILIES[name], m)
    assert {link.theirs for link in every} == set(found), "adapters missing or unknown"
    with torch.no_grad():
        for link in every:
            assert tuple(found[link.theirs].shape) == link.shape
            rows(mine[link.ours], found[link.theirs], link)
        assert (model(tokens) - expected).abs().max() < min(close, 1e-5) * expected.abs().max()
    model(tokens, tokens.roll(-1, 1)).backward()
    assert all((p.grad is not None) == is_adapter(n) for n, p in model.named_parameters())
    for n, p in model.named_parameters():
        if p.grad is not None:
            wanted = torch.zeros_like(p)
            for link in every:
                if link.ours == n:
                    rows(wanted, found[link.theirs].grad, link)
            assert (p.grad - wanted).abs().max() < close * wanted.abs().max(), n


def test_initial_factors_are_as_in_peft() -> None:
    m = ModelConfig(
        family="llama", layers=1, hidden=256, heads=4, vocab=64, seq_len=8, lora=LoraConfig(rank=8)
    ).resolve()
    one, two = ({n: p for n, p in serial_model(m, seed).named_parameters() if is_adapter(n)} for seed in (0, 1))
    for name, p in one.items():
        if ".adapter.b." in name:
            assert not p.any()
        else:  # uniform in ±1/sqrt(inputs): kaiming_uniform of torch with a = sqrt(5)
            bound = p.shape[1] ** -0.5
            assert p.abs().max() <= bound
            assert p.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
            assert not torch.equal(p, two[name])
    spec = dataclasses.replace(m, lora=None)
    with_adapters = serial_model(m, 0)
    for name, p in serial_model(spec, 0).named_parameters():  # the weights are those of the model without adapters
        assert torch.equal(p, with_adapters.get_parameter(name))
    assert parameter_count(m) - trained_count(m) == parameter_count(spec)


# ---- any plan trains like one process ----


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers in files, of two layers, with as many ids as there are bytes."""
    small = {"vocab_size": 256, "num_hidden_layers": 2}
    made = {}
    for name in ("llama", "gpt2", "qwen3", "cohere", "gpt_neox", "bert"):
        path = made[name] = tmp_path_factory.mktemp(name)
        fields = {k: v for k, v in EVERY[name].items() if k != "n_layer"} | small
        config = transformers.AutoConfig.for_model(name, **fields)
        auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        model = auto.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.15)
        model.save_pretrained(path)
    return made


def lora_config(folder: Path, run_dir: Path, **sections: Any) -> Config:
    lora = {"rank": 3, "alpha": 8.0} | sections.pop("lora", {})
    train = {"steps": 3, "global_batch": 8} | sections.pop("train", {})
    optim = {"lr": 0.05, "warmup": 0, "clip": 0.5} | sections.pop("optim", {})
    data = {"tokenizer": "bytes"}
    model = {"hf": str(folder), "seq_len": 12}
    return make_config(run_dir, model, lora=lora, train=train, optim=optim, data=data, log={"trace": 0}, **sections)


def random_plan(draw: random.Random) -> dict[str, Any]:
    """A plan for four ranks over all axes, modes, schedules, flows, splits and places of the optimizer's state."""
    mesh = draw.choice(
        [
            {"data": 4},
            {"pipe": 2, "data": 2},
            {"pipe": 4},
            {"pipe": 2, "col": 2},
            {"pipe": 2, "row": 2},
            {"row": 2, "col": 2},
            {"depth": 2, "col": 2},
            {"data": 2, "row": 2},
            {"col": 4},
            {"data": 2, "col": 2},
        ]
    )
    split = draw.choice([1, 2])
    rule = {
        "mode": draw.choice(["replicate", "zero2", "zero3", "keep"]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "reduce": draw.choice(["step", "step", "micro-batch"]),
    }
    schedules = ["1f1b", "gpipe", "interleaved", "wave", "zb-h1", "zb-v"]
    pipeline = {"schedule": draw.choice(schedules), "executor": draw.choice(["ordered", "message-driven"])}
    tensor = {"flow": draw.choice(["auto", "os", "ls", "ws"]), "residual": draw.choice(["sequence", "hidden"])}
    if mesh.get("row") == mesh.get("col") == 2 and draw.random() < 0.5:
        tensor["flow"] = "summa"
    return {
        "mesh": mesh,
        "batch": {"micro_batches": draw.choice([1, 2])},
        "unit": [{"match": "*.mlp", "split": split, **rule}, {"match": "*", **rule}],
        "memory": {
            "optimizer": draw.choice(["device", "device", "host"]),
            "logits": "6KiB" if split == 1 else "all",
        },
        **({"pipeline": pipeline} if "pipe" in mesh else {}),
        **({"tensor": tensor} if mesh.keys() & {"row", "col"} else {}),
    }


def train_all(rank: int, ranks: int, jobs: list[tuple[Config, dict[str, Any]]]) -> list[list[list[float]]]:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    found = []
    for config, plan in jobs:
        fit(config, Plan.from_dict(plan | {"precision": {"compute": "fp64"}}))
        metrics = list(read_metrics(RunDir(config.train.run_dir)))
        found.append([series(metrics, key) for key in ("loss", "grad_norm")])
    return found


def valid_plans(config: Config, count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw, found = random.Random(seed), []
    while len(found) < count:
        plan = random_plan(draw)
        try:
            Plan.from_dict(plan).check(config.resolve(), 4)
        except FourfoldError:
            continue
        found.append(plan)
    return found


def test_any_plan_trains_like_one_process(folders: dict[str, Path], tmp_path: Path) -> None:
    names = [*folders, "llama, q and v"]
    per_model = 8 if os.environ.get("FOURFOLD_SLOW_TESTS") else 2
    serial, jobs, models = [], [], []
    for i, name in enumerate(names):
        only = {"lora": {"targets": ["q_proj", "v_proj"]}} if "," in name else {}
        folder = folders[name.partition(",")[0]]
        serial.append((lora_config(folder, tmp_path / f"{i}", **only), {}))
        for k, plan in enumerate(valid_plans(serial[-1][0], per_model, seed=i)):
            jobs.append((lora_config(folder, tmp_path / f"{i}-{k}", **only), plan))
            models.append(i)
    (expected,) = run_ranks(train_all, 1, serial, timeout=120.0)
    found, *_ = run_ranks(train_all, 4, jobs, timeout=400.0)
    for of_plan, i, (_, plan) in zip(found, models, jobs, strict=True):
        for mine, alone in zip(of_plan, expected[i], strict=True):
            assert mine == pytest.approx(alone, rel=1e-9), (names[i], plan)
    assert all(losses[0] > losses[-1] for losses, _ in expected)
    padded: list[dict[str, Any]] = [  # the third column has no heads, and no rows of B
        {"mesh": {"pipe": 2, "col": 3}, "batch": {"micro_batches": 2}, "pipeline": {"schedule": "zb-h1"}},
        {"mesh": {"data": 2, "col": 3}, "memory": {"optimizer": "host"}, "unit": [{"match": "*", "mode": "zero2"}]},
    ]
    jobs = [(lora_config(folders["gpt2"], tmp_path / f"padded{k}"), plan) for k, plan in enumerate(padded)]
    for (losses, _), plan in zip(run_ranks(train_all, 6, jobs, timeout=120.0)[0], padded, strict=True):
        assert losses == pytest.approx(expected[names.index("gpt2")][0], rel=1e-9), plan


GRID = {"mesh": {"row": 2, "col": 2}}
MUTATIONS: dict[str, dict[str, Any]] = {
    "token side not summed over columns": GRID,
    "no sum between features": {"mesh": {"col": 4}, "tensor": {"residual": "hidden"}},
    "what B reads is not recomputed": {"mesh": {"data": 4}, "unit": [{"match": "*", "recompute": "full"}]},
    "slices with factors of their own": {
        "mesh": {"data": 4},
        "unit": [{"match": "*.mlp", "split": 2, "recompute": "full"}],
    },
}


def mutate(name: str) -> None:
    """Break one thing; in ranks, which end with the test."""
    import fourfold.tensor.linear as linear

    if name == "token side not summed over columns":
        pieces = adapter_module.Adapter.pieces

        def own_rows(self: Any, prefix: str, a: tuple[str, ...], b: tuple[str, ...]) -> Any:
            without = (tuple(axis for axis in copies if axis != "col") for copies in (a, b))
            return pieces(self, prefix, *without)

        adapter_module.Adapter.pieces = own_rows  # type: ignore[method-assign]
    elif name == "no sum between features":
        linear.own_tokens = lambda x, col, seq_len: x[: x.shape[0] // col.size]  # type: ignore[assignment]
    elif name == "what B reads is not recomputed":
        import fourfold.model.layers as layers

        close = layers._Part._close

        def all_unread(self: Any, x: Any, h: Any, inner: Any, total: Any, low: Any = None) -> Any:
            return close(self, x, h, inner, total, None if low is None else torch.zeros_like(low).add(low * 0))

        layers._Part._close = all_unread  # type: ignore[method-assign]
    else:
        import fourfold.shard.split as split

        shared = split.Serial._adapted

        def renamed(self: Any, made: Any, like: Any, name: str, inputs: Any = None, outputs: Any = None) -> Any:
            found = shared(self, made, like, name, inputs, outputs)
            if name.endswith("up") and outputs is not None and outputs[0][0]:  # not the first slice: another parameter
                a = "adapter.a.weight"
                found[a] = tuple(dataclasses.replace(p, name=f"{p.name}?") for p in found[a])
            return found

        split.Serial._adapted = renamed  # type: ignore[method-assign]


def train_wrong(rank: int, ranks: int, config: Config, plan: dict[str, Any], name: str) -> Any:
    mutate(name)
    return train_all(rank, ranks, [(config, plan)])[0]


def test_a_mutation_changes_the_numbers(folders: dict[str, Path], tmp_path: Path) -> None:
    ((expected,),) = run_ranks(train_all, 1, [(lora_config(folders["llama"], tmp_path / "one"), {})])
    for i, (name, plan) in enumerate(MUTATIONS.items()):
        config = lora_config(folders["llama"], tmp_path / f"{i}")
        wrong, *_ = run_ranks(train_wrong, 4, config, plan, name, timeout=60.0)
        assert wrong != [pytest.approx(series, rel=1e-6) for series in expected], name


# ---- what is frozen ----


def watch_frozen(rank: int, ranks: int, config: Config, plan: dict[str, Any]) -> tuple[int, int, int]:
    from fourfold.train import worker

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    ledger, seen = Ledger(), []
    run = worker.Loop.run

    def watched(self: Any, done: int) -> int:
        before = [base.shard.clone() for base in self.bases]
        with ledger:
            steps = run(self, done)
        assert all(map(torch.equal, before, (base.shard for base in self.bases)))
        assert all(base.grad is None and base.shard_grad is None for base in self.bases)
        seen.append((sum(u.shard.numel() for u in self.units), sum(b.shard.numel() for b in self.bases)))
        assert self.memory_parts()["parameters"] >= 4 * sum(seen[-1])
        return steps

    worker.Loop.run = watched  # type: ignore[method-assign]
    fit(config, Plan.from_dict(plan))
    reduced = ledger.bytes("reduce_scatter") + ledger.bytes("all_reduce")
    return (reduced, *seen[0])


@pytest.mark.parametrize("mode", ["replicate", "zero3"])
def test_frozen_weights_have_no_gradients_and_no_state(mode: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = lora_config(folders["llama"], tmp_path / "run", train={"steps": 2})
    plan = {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": mode}]}
    m = config.resolve().model
    for reduced, trained, frozen in run_ranks(watch_frozen, 2, config, plan):
        shards = 1 if mode == "replicate" else 2
        whole = sum(_aligned(n, 64) for n in _sizes(m))
        assert frozen * shards >= parameter_count(m) - trained_count(m) > 5 * trained_count(m)
        assert whole <= trained * shards < 1.3 * whole
        assert reduced <= 2 * (4 * trained * shards) + 1000  # two steps, fp32; and a few numbers
    names = read_index(find_checkpoint(tmp_path / "run")[1])
    assert {n for n in names if not n.startswith("optim.")} == {n for n in parameter_shapes(m) if is_adapter(n)}


def _sizes(m: ModelConfig) -> list[int]:
    return [torch.Size(s).numel() for n, s in parameter_shapes(m).items() if is_adapter(n)]


def _aligned(n: int, step: int) -> int:
    return -(-n // step) * step


# ---- files ----


def quiet_fit(rank: int, ranks: int, config: Config, plan: dict[str, Any], resume: bool = False) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    fit(config, Plan.from_dict(plan), resume=resume)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_adapters_open_in_peft_and_merge(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    config = lora_config(folders[name], tmp_path / "run").resolve()
    run_ranks(quiet_fit, 2, config, {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]})
    run, directory = find_checkpoint(tmp_path / "run")
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    tokens = torch.arange(12)[None] * 7 + 3
    model, step = load_model(run)
    assert step == 3
    export(run, config, directory, tmp_path / "merged", merge=True)
    with torch.no_grad():
        plain = auto.from_pretrained(folders[name]).eval()(tokens).logits
        base = auto.from_pretrained(folders[name])
        adapted = peft.PeftModel.from_pretrained(base, run.final).eval()
        merged, info = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        expected, size = model(tokens), plain.abs().max()
        assert (expected - plain).abs().max() > 1e-2 * size  # it was trained
        assert (adapted(tokens).logits - expected).abs().max() < 1e-5 * size
        assert (merged.eval()(tokens).logits - expected).abs().max() < 1e-5 * size
    written = json.loads((run.final / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (3, 8)
    assert (adapted.peft_config["default"].target_modules) == set(written["target_modules"])
    from fourfold.checkpoint.adapters import fill_from_adapter, open_adapter
    from fourfold.checkpoint.save_load import holding_of
    from fourfold.checkpoint.weights import check_weights, fill
    from fourfold.train.sample import _empty

    m, _ = open_adapter(run.final)
    m = dataclasses.replace(m, seq_len=12)
    again, source = _empty(m, torch.device("cpu"), torch.float32), check_weights(m)
    fill(source, m, [holding_of(n, p) for n, p in again.named_parameters() if not is_adapter(n)])
    fill_from_adapter(again, run.final, m, source.family)
    with torch.no_grad():
        assert torch.equal(again(tokens), expected)


def test_resume_under_another_plan_and_with_other_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    weights = Path(shutil.copytree(folders["gpt2"], tmp_path / "weights"))
    whole, parts = (
        lora_config(weights, tmp_path / name, train={"steps": 4}, optim={"decay": "constant"})
        for name in ("whole", "parts")
    )
    half = dataclasses.replace(parts, train=dataclasses.replace(parts.train, steps=2))
    run_ranks(quiet_fit, 1, whole, {"precision": {"compute": "fp64"}})
    expected = series(list(read_metrics(RunDir(tmp_path / "whole"))), "loss")
    grid = {"mesh": {"pipe": 2, "col": 2}, "precision": {"compute": "fp64"}}
    run_ranks(quiet_fit, 4, half, grid)
    run_ranks(quiet_fit, 2, parts, {"mesh": {"data": 2}, "precision": {"compute": "fp64"}}, resume=True)
    assert series(list(read_metrics(RunDir(tmp_path / "parts"))), "loss") == pytest.approx(expected, rel=1e-9)

    longer = dataclasses.replace(parts, train=dataclasses.replace(parts.train, steps=5))
    other = dataclasses.replace(longer, lora=dataclasses.replace(longer.lora, alpha=9.0))
    with pytest.raises(Exception, match=r"this run was started with .*'scale': 2\.66"):
        run_ranks(quiet_fit, 1, other, {"precision": {"compute": "fp64"}}, resume=True)
    file = weights / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    with pytest.raises(Exception, match="is not the file that this run adapts"):
        run_ranks(quiet_fit, 1, longer, {"precision": {"compute": "fp64"}}, resume=True)
    with pytest.raises(ConfigError, match="is not the file that this run adapts"):
        load_model(RunDir(tmp_path / "parts"))


# ---- bad input ----


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (
            {"rank": 4, "targets": ["q_pro"]},
            "no linear layer of this model is named 'q_pro'; its layers are q_proj, k_proj",
        ),
        ({"rank": 4, "targets": ["lm_head"]}, "the output layer stays as it is"),
        ({"rank": 4, "targets": ["embed_tokens"]}, "embeddings stay as they are"),
        ({"rank": 33}, "lora.rank = 33 is larger than k_proj, which has 48 inputs and 32 outputs; use at most 32"),
        ({"rank": -1}, "lora.rank = -1 must be at least 0"),
        ({"alpha": 16.0}, "lora.rank is missing"),
        ({"rank": 4, "dropout": 0.1}, "lora.dropout = 0.1 is not supported"),
        ({"rank": 4, "targets": ["q_proj", "q_proj"]}, "names 'q_proj' twice"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    lora: dict[str, Any], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    data = lora_config(folders["llama"], tmp_path / "run").to_dict()
    with pytest.raises(ConfigError, match=says):
        Config.from_dict(data | {"lora": lora}).resolve()


def test_random_weights_are_not_adapted(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", "llama", lora={"rank": 4})
    with pytest.raises(ConfigError, match=r"\[lora\] adapts trained weights, but model.init = 'random' has none"):
        fit(config)
    data = config.to_dict()
    assert "lora" not in data["model"]
    with pytest.raises(ConfigError, match=r"unknown field 'model.lora'; LoRA has a separate section"):
        Config.from_dict(data | {"model": data["model"] | {"lora": {"rank": 4}}})
    assert Config.from_dict(data) == config


def test_adapter_folders_that_cannot_be_opened(folders: dict[str, Path], tmp_path: Path) -> None:
    from fourfold.checkpoint.adapters import open_adapter

    good = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    good |= {"base_model_name_or_path": str(folders["llama"])}
    for change, says in (
        ({"peft_type": "IA3"}, "peft_type is not LORA"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"base_model_name_or_path": "nowhere/model"}, "is no folder here"),
        ({"target_modules": "all-linear"}, "a list of target_modules"),
        ({"target_modules": ["nothing"]}, "no linear layer of this model is named 'nothing'"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=says):
            open_adapter(tmp_path)


def test_merge_needs_adapters(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fourfold.cli import main

    config = make_config(tmp_path / "run", train={"steps": 2})
    run_ranks(quiet_fit, 1, config, {})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no adapters, all of its weights are trained" in capsys.readouterr().err
