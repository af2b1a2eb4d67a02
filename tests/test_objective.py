"""`fit` with a model, data and a loss of the user's, and DPO: every plan has the losses of one process, and of plain torch."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import fourfold as ff
from fourfold.checkpoint.save_load import Checkpointer, newest
from fourfold.config import CheckpointConfig
from fourfold.errors import CheckpointError, DataError
from fourfold.model.build import serial_model
from fourfold.testing.ranks import run_ranks
from fourfold.train.objective import DPO, open_run

WIDTH, WORDS, LENGTH, STEPS = 12, 11, 6, 4
FP64 = {"precision": {"compute": "fp64"}}


def losses_in(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


# ---- a model of the user's own ----


class Mixer(nn.Module):
    """A layer with two inputs and two outputs, and a parameter that it uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.also = nn.Linear(WIDTH, WIDTH)
        self.also.weight = self.up.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.scale * self.also(torch.tanh(self.up(self.norm(x)))), skip + 0.1 * x


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(tokens)
        return x, x * 2


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.proj = nn.Dropout(0.2), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.proj(self.drop(x + skip))


def layers() -> list[nn.Module]:
    return [First(), *(Mixer() for _ in range(5)), Last()]


class Rows:
    """Forty samples with weights."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = torch.randint(0, WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(i))
        return {"inputs": tokens[:-1], "targets": tokens[1:].numpy(), "importance": 1 + i % 3}


class Weighted:
    """Cross entropies by importance, divided by the sum of the importances."""

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output.transpose(1, 2), batch["targets"], reduction="none").mean(1)
        return (each * batch["importance"]).sum()

    def weight(self, batch: Any) -> Tensor:
        return batch["importance"].sum()


def config_for(run: Path, steps: int = STEPS, **train: Any) -> ff.Config:
    return ff.Config.from_dict(
        {
            "train": {
                "steps": steps,
                "global_batch": 8,
                "run_dir": str(run),
                "eval_every": 2,
                "eval_batches": 1,
                **train,
            },
            "optim": {"lr": 1e-2},
            "data": {"eval_fraction": 0.2},
            "log": {"trace": 0},
        }
    )


def _own(
    rank: int,
    ranks: int,
    run: Path,
    plan: dict[str, Any],
    steps: int = STEPS,
    resume: bool = False,
    dropout: float = 0.2,
) -> None:
    def model() -> list[nn.Module]:
        found = layers()
        found[-1].drop.p = dropout  # type: ignore[union-attr]
        return found

    torch.manual_seed(rank)  # the model is made alike on every rank all the same
    ff.fit(
        config_for(run, steps),
        ff.Plan.from_dict(FP64 | plan),
        model=model,
        data=Rows(),
        loss=Weighted(),
        resume=resume,
        console=io.StringIO(),
    )


_no_dropout = functools.partial(_own, dropout=0.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("own") / "run"
    _own(0, 1, run, {"batch": {"micro_batches": 4}})
    return run


OWN_PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}}),
    (3, {"mesh": {"pipe": 3}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "zb-h1"}}),
    (
        2,
        {
            "mesh": {"pipe": 2},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": "wave"},
            "memory": {"optimizer": "host"},
        },
    ),
    (
        2,
        {
            "mesh": {"pipe": 2},
            "batch": {"micro_batches": 4},
            "pipeline": {"executor": "message-driven", "layers": [5, 2]},
        },
    ),
    (
        2,
        {
            "mesh": {"pipe": 2},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": "interleaved"},
            "memory": {"activations": "host"},
            "unit": [{"match": "*", "recompute": "full"}],
        },
    ),
]


@pytest.mark.parametrize(("ranks", "plan"), OWN_PLANS)
def test_an_own_model_under_pipelines(ranks: int, plan: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    """Dropout included: its random numbers depend on the micro-batch and the layer, not on the schedule."""
    run_ranks(_own, ranks, tmp_path / "run", plan)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(alone), rel=1e-11)
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (alone, tmp_path / "run"))
    assert ours.keys() == {n for n, _ in nn.Sequential(*layers()).named_parameters(remove_duplicate=False)}
    for name, value in ours.items():
        assert torch.allclose(theirs[name], value, rtol=0, atol=1e-9), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    _no_dropout(0, 1, run, {})
    return run


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"mesh": {"data": 2}, "unit": [{"match": "[0-3]", "mode": "zero3"}, {"match": "*", "mode": "zero2"}]}),
        (2, {"mesh": {"depth": 2}, "unit": [{"match": "*", "mode": "keep", "recompute": "selective"}]}),
        (
            4,
            {
                "mesh": {"pipe": 2, "data": 2},
                "unit": [{"match": "[1-4]", "mode": "zero3"}],
                "pipeline": {"schedule": "zb-v"},
                "memory": {"optimizer": "host"},
            },
        ),
    ],
)
def test_an_own_model_sharded(ranks: int, plan: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    run_ranks(_no_dropout, ranks, tmp_path / "run", plan)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(plain), rel=1e-10)


def test_an_own_model_resumes_under_another_plan(plain: Path, tmp_path: Path) -> None:
    run_ranks(_no_dropout, 2, tmp_path / "run", {"mesh": {"pipe": 2}}, 2)
    run_ranks(
        _no_dropout, 2, tmp_path / "run", {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]}, STEPS, True
    )
    # the learning rate of the first steps is that of a shorter run: the last steps are compared with it alone
    _no_dropout(0, 1, tmp_path / "alone", {}, 2)
    _no_dropout(0, 1, tmp_path / "alone", {}, STEPS, True)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(tmp_path / "alone"), rel=1e-10)
    assert len(losses_in(tmp_path / "run")) == STEPS


def test_fit_says_how_to_continue_and_from_where(tmp_path: Path) -> None:
    class Stop(ff.Callback):
        def on_step(self, run: Any, metrics: dict[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    said, given = io.StringIO(), {"model": layers, "data": Rows(), "loss": Weighted()}
    outcome = ff.fit(config_for(tmp_path / "run"), callbacks=[Stop()], console=said, **given)
    assert 0 < outcome.steps < STEPS
    assert f"stopped after step {outcome.steps} of {STEPS}; fit(…, resume=True) continues" in said.getvalue()
    assert ff.fit(config_for(tmp_path / "run"), resume=True, console=said, **given).steps == STEPS
    assert f"resumes from the checkpoint of step {outcome.steps}" in said.getvalue()


def test_a_save_in_flight_is_finished_before_an_error_leaves_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would write into a run directory that is no longer locked, while another process resumes the run."""

    class Stop(ff.Callback):
        def on_step(self, run: Any, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 2:
                raise KeyboardInterrupt

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", slow)
    config = dataclasses.replace(config_for(tmp_path / "run"), checkpoint=CheckpointConfig(every=1))
    with pytest.raises(KeyboardInterrupt):
        ff.fit(config, callbacks=[Stop()], console=io.StringIO(), model=layers, data=Rows(), loss=Weighted())
    assert (newest(tmp_path / "run" / "checkpoints") or Path()).name == "step-000001"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save-")]


def test_an_own_model_is_plain_torch(plain: Path) -> None:
    """The first step's loss, from the same weights and samples."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).double().eval()
    samples, _, loss = open_run(config_for(plain), Rows(), Weighted(), own_model=True)
    batch = samples.rows(range(8))[0]  # type: ignore[attr-defined]
    value: Any = batch["inputs"]
    for layer in model:
        value = layer(*value) if isinstance(value, tuple) else layer(value)
    assert isinstance(loss, Weighted)
    assert losses_in(plain)[0] == pytest.approx((loss(value, batch) / loss.weight(batch)).item(), rel=1e-12)


def _refused(run: Path, **changed: Any) -> None:
    given = {"model": layers, "data": Rows(), "loss": Weighted()} | changed
    plan = ff.Plan.from_dict(given.pop("plan", {}))
    ff.fit(config_for(run, 1), plan, console=io.StringIO(), **given)


class Unordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.loose = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(2))


class Outside(Unordered):
    def layers(self) -> dict[str, nn.Module]:
        return {"a": self.a, "b": self.b}


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2).requires_grad_(False))


def twice() -> list[nn.Module]:
    same = nn.Linear(2, 2)
    return [same, nn.ReLU(), same]


def shared() -> list[nn.Module]:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight, other.bias = one.weight, one.bias
    return [one, other]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": Unordered()}, "a Unordered: the order of its layers is unknown"),
        ({"model": Outside()}, "'loose' belongs to no layer: parameters used outside of the layers"),
        ({"model": twice}, "'0' and '2' are one layer, used twice"),
        ({"model": shared}, "'0.weight' and '1.weight' are one parameter, and so are '0.bias' and '1.bias'; only one"),
        ({"model": Frozen()}, "all parameters are frozen; there is nothing to train"),
        ({"grid_rules": {nn.Bilinear: print}}, "a rule for Bilinear, and no module of the model is one; there are"),
        ({"grid_rules": {}}, "grid_rules is empty"),
        ({"model": None, "grid_rules": {nn.Linear: print}}, "is for a model of your own"),
        ({"model": [nn.Linear(2, 2, device="meta")]}, "'0.weight' has no values"),
        ({"model": [nn.Linear(2, 2), nn.BatchNorm1d(2)]}, "'1' is a BatchNorm1d, whose running statistics"),
        ({"model": [nn.ReLU()]}, "has no parameters"),
        ({"model": 3}, "model = a int: expected a module"),
        ({"loss": None}, r"fit\(model=…\) needs your loss, too"),
        ({"plan": {"mesh": {"col": 2}}}, "the mesh is col 2"),
        ({"plan": {"unit": [{"match": "3", "split": 2}]}}, "layers of your own model are not split"),
        ({"plan": {"unit": [{"match": "blocks.3"}]}}, "no unit matches 'blocks.3'"),
        ({"data": 7}, "data = a int: needs __len__"),
        ({"data": [{"x": 1}] * 8}, "sample 0: has no 'inputs' for the first layer; it has 'x'"),
        (
            {"loss": lambda out, batch: out},
            r"one number, the sum over the samples; found a tensor of shape \[8, 6, 11\]",
        ),
        (
            {"loss": lambda out, batch: batch["reward"]},
            r"needs batch\['reward'\], but the samples have 'inputs', 'targets'",
        ),
        ({"loss": lambda out, batch: out.square().mean()}, "return .sum.. and not .mean"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ff.ConfigError, ff.PlanError, DataError), match=message):
        _refused(tmp_path / "run", **changed)


def test_a_grid_is_refused_with_its_reason() -> None:
    plan = ff.Plan.from_dict({"mesh": {"row": 2}})
    from fourfold.train.own_model import OwnModel

    with pytest.raises(
        ff.PlanError, match="mesh.row = 2: layers of your own model run unchanged.*give fit.…, grid_rules=…."
    ):
        plan.check(config_for(Path("x")), 2, OwnModel.of(layers, 0).outline)
    with pytest.raises(ff.PlanError, match="your model has 7 layers, which cannot fill 8 stages; use 7 at most"):
        ff.Plan.from_dict({"mesh": {"pipe": 8}}).check(config_for(Path("x")), 8, OwnModel.of(layers, 0).outline)


# ---- DPO ----

MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 1,
    "seq_len": 24,
    "vocab": 256,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of other lengths; one has an answer that does not fit."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["red", "green", "two", "cat", "house"]
    rows = [
        {"prompt": f"{words[i % 5]}? ", "chosen": "yes " * (1 + i % 3), "rejected": f"no {words[(i + 2) % 5]}"}
        for i in range(18)
    ]
    rows.append({"prompt": "long? ", "chosen": "yes", "rejected": "no " * 20})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dpo_config(run: Path, source: Path, **changed: Any) -> ff.Config:
    return ff.Config.from_dict(
        {
            "model": MODEL,
            "data": {"source": str(source), "eval_fraction": 0.2},
            "optim": {"lr": 1e-2, "decay": "constant", "weight_decay": 0.0, "clip": 0.0},
            "train": {"steps": 3, "global_batch": 8, "run_dir": str(run), "eval_every": 3, "eval_batches": 1},
            "dpo": {"beta": 0.3},
            "log": {"trace": 0},
            **changed,
        }
    )


def _dpo(
    rank: int, ranks: int, run: Path, source: Path, plan: dict[str, Any], resume: bool = False, **changed: Any
) -> None:
    plan = {"precision": {"compute": "fp64"}} | plan
    ff.fit(dpo_config(run, source, **changed), ff.Plan.from_dict(plan), resume=resume, console=io.StringIO())


@pytest.fixture(scope="module")
def dpo_alone(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    run = tmp_path_factory.mktemp("dpo") / "run"
    _dpo(0, 1, run, pairs, {})
    return run


def test_dpo_is_plain_torch(dpo_alone: Path, pairs: Path) -> None:
    """A loop as in any textbook: log-probabilities from logits, a frozen copy as the reference, AdamW."""
    config = dpo_config(dpo_alone, pairs).resolve()
    samples, held, loss = open_run(config)
    assert isinstance(loss, DPO)
    assert held is not None
    assert samples.describe(8, 3) == "15 pairs (30 samples); 3 steps are 0.8 epochs; 1 left out: an answer does not fit"
    model = serial_model(config.model, 0, dtype=torch.float64)
    reference = serial_model(config.model, 0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def log_probs(net: Callable[..., Tensor], batch: Any) -> Tensor:
        logp = net(batch["tokens"]).log_softmax(-1)
        targets = batch["targets"]
        return (logp.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)).sum(-1)

    def value(batch: Any) -> Tensor:
        policy, before = log_probs(model, batch), log_probs(reference, batch).detach()
        ratios, before_ratios = policy[0::2] - policy[1::2], before[0::2] - before[1::2]
        return -F.logsigmoid(0.3 * (ratios - before_ratios)).mean()

    found, read = [], []
    for step in range(3):
        batch = samples.rows(range(8 * step, 8 * step + 8))[0]  # type: ignore[attr-defined]
        read.append(sum(int(row.nonzero().max()) + 1 for row in batch["targets"] >= 0))  # the last token is an answer's
        here = value(batch)
        here.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(here.item())
    assert found[0] == pytest.approx(0.6931471805599453, rel=1e-12)  # nothing has moved: log 2
    assert found[2] < 0.6
    assert losses_in(dpo_alone) == pytest.approx(found, rel=1e-9)
    lines = [json.loads(line) for line in (dpo_alone / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines if "tokens" in line] == read  # without padding
    evaluated = next(line["eval_loss"] for line in lines if "eval_loss" in line)
    batch = held.rows(range(8))[0]  # type: ignore[attr-defined]
    assert evaluated == pytest.approx(value(batch).item(), rel=1e-9)
    gained = (log_probs(model, batch) - log_probs(reference, batch)).unflatten(0, (-1, 2))
    moved, line = gained[:, 0] - gained[:, 1], next(line for line in lines if "eval_loss" in line)
    assert line["eval_accuracy"] == (moved > 0).double().mean().item()
    assert line["eval_margin"] == pytest.approx(0.3 * moved.mean().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "zb-h1"}}),
        (2, {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}], "batch": {"micro_batches": 2}}),
        (2, {"mesh": {"col": 2}, "unit": [{"match": "*", "recompute": "full"}], "memory": {"logits": "6KiB"}}),
        (4, {"mesh": {"row": 2, "col": 2}, "unit": [{"match": "head", "split": 3}], "tensor": {"residual": "hidden"}}),
        (
            4,
            {
                "mesh": {"pipe": 2, "data": 2},
                "unit": [{"match": "head", "split": 2}, {"match": "*", "mode": "keep", "recompute": "selective"}],
                "pipeline": {"schedule": "wave", "executor": "message-driven"},
                "memory": {"optimizer": "host"},
                "batch": {"micro_batches": 2},
            },
        ),
    ],
)
def test_dpo_under_every_kind_of_plan(
    ranks: int, plan: dict[str, Any], dpo_alone: Path, pairs: Path, tmp_path: Path
) -> None:
    run_ranks(_dpo, ranks, tmp_path / "run", pairs, plan)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(dpo_alone), rel=1e-9)
    ours, theirs = (
        next(line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "eval_loss" in line)
        for run in (tmp_path / "run", dpo_alone)
    )
    for name in ("eval_loss", "eval_accuracy", "eval_margin"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9)


def test_dpo_resumes_with_its_reference(dpo_alone: Path, pairs: Path, tmp_path: Path) -> None:
    stop = {"steps": 3, "global_batch": 8, "run_dir": str(tmp_path / "run"), "eval_every": 3, "eval_batches": 1}

    class Stop(ff.Callback):
        def on_step(self, run: Any, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 2:
                raise KeyboardInterrupt

    config = dpo_config(tmp_path / "run", pairs, train=stop, checkpoint={"every": 1})
    plan = ff.Plan.from_dict({"precision": {"compute": "fp64"}})
    with pytest.raises(KeyboardInterrupt):
        ff.fit(config, plan, callbacks=[Stop()], console=io.StringIO())
    run_ranks(_dpo, 2, tmp_path / "run", pairs, {"mesh": {"pipe": 2}}, True)
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(dpo_alone), rel=1e-9)
    (tmp_path / "run" / "reference.npz").write_bytes(b"nothing")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    with pytest.raises(CheckpointError, match="a resumed run needs its reference values"):
        ff.fit(longer, plan, resume=True, console=io.StringIO())


def test_dpo_refuses_what_is_no_pair(pairs: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    with pytest.raises(ff.ConfigError, match=r"dpo.beta = 0.3, but .* has no preference pairs"):
        _dpo(0, 1, tmp_path / "run", text, {})
    with pytest.raises(ff.ConfigError, match=r"which are for DPO; give --dpo.beta 0.1"):
        _dpo(0, 1, tmp_path / "run2", pairs, {}, dpo={"beta": 0.0})
    with pytest.raises(
        ff.PlanError, match=r"micro_batches 8\) = 1 sequences, but the loss compares 2 that must be in one"
    ):
        _dpo(0, 1, tmp_path / "run3", pairs, {"batch": {"micro_batches": 8}})
    with pytest.raises(ff.ConfigError, match="no pair fits; the shortest needs"):
        _dpo(0, 1, tmp_path / "run4", pairs, {}, model=MODEL | {"seq_len": 4})
    for line, message in (
        ('{"prompt": "a", "chosen": "b"}', "pairs.jsonl:2: has 'chosen' without 'rejected'"),
        ('{"prompt": "a", "chosen": "b", "rejected": ""}', "pairs.jsonl:2: 'rejected' is empty"),
        ('{"chosen": "b", "rejected": "c"}', "'chosen' is text, but 'prompt' is nothing"),
        ('{"prompt": "a", "completion": "b"}', "preference pairs and other examples in one source"),
    ):
        bad = tmp_path / "pairs.jsonl"
        bad.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n")
        with pytest.raises(DataError, match=message):
            _dpo(0, 1, tmp_path / "run5", bad, {})


def test_the_turns_of_a_pair_that_differ_are_trained() -> None:
    from fourfold.data.chats import Chat, parse_examples

    asked, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    first, second = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    again = {"role": "user", "content": "and?"}
    both = parse_examples({"chosen": [asked, answer, again, first], "rejected": [asked, answer, again, second]}, "x")
    assert [e.trained for e in both if isinstance(e, Chat)] == [(3,), (3,)]
    assert [e.side for e in both] == ["chosen", "rejected"]
    both = parse_examples({"prompt": "hi", "chosen": [first], "rejected": [second]}, "x")
    assert [e.messages[1]["content"] for e in both if isinstance(e, Chat)] == ["good", "bad"]


# ---- a loss of the user's own, on a model of ours ----


class Rated:
    """Token examples with a reward each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = [(7 * i + 3 * j) % 200 for j in range(6 + i % 5)]
        return {"tokens": tokens, "loss_mask": [int(j > 2) for j in range(len(tokens))], "reward": (i % 4) / 3}


def rewarded(logp_bt: Tensor, batch: Any) -> Tensor:
    return -(logp_bt.sum(1) * batch["reward"]).sum()


def _rated(rank: int, ranks: int, run: Path, plan: dict[str, Any], data: Any = None) -> None:
    config = dpo_config(run, Path("stdlib"), dpo={"beta": 0.0})
    ff.fit(config, ff.Plan.from_dict(FP64 | plan), data=data or Rated(), loss=rewarded, console=io.StringIO())


def test_a_loss_over_log_probabilities(tmp_path: Path) -> None:
    _rated(0, 1, tmp_path / "alone", {})
    run_ranks(_rated, 2, tmp_path / "run", {"mesh": {"col": 2}, "batch": {"micro_batches": 4}})
    assert losses_in(tmp_path / "run") == pytest.approx(losses_in(tmp_path / "alone"), rel=1e-9)
    config = dpo_config(tmp_path / "alone", Path("stdlib"), dpo={"beta": 0.0}).resolve()
    samples, *_ = open_run(config, Rated(), rewarded)
    batch = samples.rows(range(8))[0]  # type: ignore[attr-defined]
    logits = serial_model(config.model, 0, dtype=torch.float64)(batch["tokens"])
    logp = -F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    assert losses_in(tmp_path / "alone")[0] == pytest.approx(rewarded(logp, batch).item() / 8, rel=1e-10)


def test_examples_of_ones_own_need_no_loss(tmp_path: Path) -> None:
    config = dpo_config(tmp_path / "run", Path("stdlib"), dpo={"beta": 0.0})
    outcome = ff.fit(config, data=Rated(), console=io.StringIO())
    assert outcome.steps == 3
