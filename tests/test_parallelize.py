"""`parallelize`: any module, sharded by hooks, gives the gradients and weights of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from fourfold.errors import CheckpointError
from fourfold.testing.budget import Budget
from fourfold.testing.ledger import Ledger
from fourfold.testing.ranks import run_ranks
from tests.helpers import compile_without_code

WIDTH = 24
SLOW = pytest.mark.skipif("FOURFOLD_SLOW_TESTS" not in os.environ, reason="slow: set FOURFOLD_SLOW_TESTS=1")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, a list of layers, one of them used twice, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[1]]:
            x = layer(x, scale=0.5)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, 11, (2, 12, 5), generator=torch.Generator().manual_seed(step))
    return tokens, targets


def serial(steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = net(*batch(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {n: p.detach() for n, p in net.named_parameters()}


def _trained(rank: int, ranks: int, plan: dict[str, Any], steps: int) -> tuple[list[float], list[float], Any, int]:
    model = ff.parallelize(Net(), ff.Plan.from_dict({"mesh": {"data": ranks}} | plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gathers = [], [], 0
    for step in range(steps):
        size = 12 // ranks
        mine = [t[rank * size : (rank + 1) * size] for t in batch(step)]
        with Ledger() as ledger:
            loss = model.step(mine)
        gathers = ledger.calls("all_gather")
        norms.append(model.clip_grad_norm_(0.1).item())
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        assert model.eval_step(mine).isfinite()
        assert all(not unit._holders for unit in model.units if unit.sharing.shards > 1)
    return losses, norms, model.state_dict(), gathers


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "rules", "gathers"),
    [
        (2, 1, [{"match": "*", "mode": "zero3"}], 2 * 5),  # four units, one of them used twice
        (3, 4, [{"match": "*", "mode": "keep"}], 4),
        (
            2,
            3,
            [{"match": "layers.1", "mode": "zero2", "reduce": "micro-batch"}, {"match": "layers.2.up", "mode": "keep"}],
            4,
        ),
        (4, 1, [{"match": "*", "mode": "zero3", "within": 2}], None),
        (2, 2, [{"match": "layers.0.up", "mode": "zero3", "split": 5}], 2 * (5 + 5)),
        (3, 2, [{"match": "layers.*.up", "mode": "keep", "split": 2}, {"match": "*", "mode": "zero2"}], None),
        (2, 2, [], 0),
        (2, 2, [{"match": "*", "mode": "zero3", "recompute": "full"}], 2 * 2 * 5),  # computing again gathers nothing
        (3, 1, [{"match": "*", "mode": "keep", "recompute": "selective"}], 4),
        (
            2,
            1,
            [
                {"match": "layers.0.up", "mode": "zero3", "split": 5, "recompute": "per-slice"},
                {"match": "layers.*", "mode": "zero2", "recompute": "per-slice"},
            ],
            None,
        ),
    ],
)
def test_any_module_trains_as_in_one_process(
    ranks: int, micro_batches: int, rules: list[Any], gathers: int | None
) -> None:
    losses, norms, weights = serial(4)
    plan = {"unit": rules, "batch": {"micro_batches": micro_batches}}
    for found in run_ranks(_trained, ranks, plan, 4):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-10)
        assert found[2].keys() == weights.keys()
        for name, value in weights.items():
            assert torch.allclose(found[2][name], value, rtol=0, atol=1e-9), name
        if gathers is not None:
            assert found[3] == gathers


def _quiet(rank: int, ranks: int, mode: str) -> list[bool]:
    model = ff.parallelize(
        Net(),
        ff.Plan.from_dict(
            {"mesh": {"data": ranks}, "unit": [{"match": "*", "mode": mode}], "batch": {"micro_batches": 3}}
        ),
    )
    found: list[bool] = []
    model.module.register_forward_pre_hook(lambda *_: found.append(model.driver.quiet))
    size = 12 // ranks
    model.step([t[rank * size : (rank + 1) * size] for t in batch(0)])
    return found


@pytest.mark.parametrize(
    ("mode", "quiet"),
    [("replicate", [True, True, False]), ("keep", [False, True, False]), ("zero3", [False] * 3)],
)
def test_where_nothing_is_to_be_done_hooks_do_nothing(mode: str, quiet: list[bool]) -> None:
    assert run_ranks(_quiet, 2, mode) == [quiet] * 2


def test_alone_it_is_the_module() -> None:
    found = _trained(0, 1, {"unit": [{"match": "*", "mode": "zero3"}]}, 3)
    assert found[0] == pytest.approx(serial(3)[0], rel=1e-12)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"unit": [{"match": "layer.0"}]}, "no module matches 'layer.0'; did you mean 'layers.0'"),
        ({"mesh": {"pipe": 2}}, "mesh.pipe = 2: parallelize runs a module unchanged"),
        (
            {"unit": [{"match": "embed", "mode": "zero3"}]},
            "'embed.weight' and 'head.weight' are one parameter in two units",
        ),
        ({"unit": [{"match": "layers.0", "split": 2}]}, "split = 2: 'layers.0' is no nn.Linear"),
        ({"unit": [{"match": "layers.0.up", "split": 25}]}, "which has 24 inputs; use at most 24"),
        ({"unit": [{"match": "rest", "recompute": "full"}]}, "'rest' has none; name modules, such as 'embed'"),
        ({"memory": {"optimizer": "host"}}, "give parameters\\(\\) to ff.StreamedAdamW"),
        ({"unit": [{"match": "*", "within": 2, "mode": "zero3"}]}, "within = 2 does not divide"),
    ],
)
def test_what_cannot_be_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ff.PlanError, match=message):
        ff.parallelize(Net(), ff.Plan.from_dict(plan))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    model = ff.parallelize(Net(), ff.Plan.from_dict({"batch": {"micro_batches": 5}}))
    with pytest.raises(ff.PlanError, match=r"\[12\] does not divide into batch.micro_batches = 5"):
        model.step(batch(0))


def test_recomputation_keeps_less() -> None:
    """Of a deep net's activations, the inputs of its layers are left."""
    peaks = []
    for recompute in ("none", "full"):
        net = Net()
        net.layers.extend(Layer().double() for _ in range(9))
        model = ff.parallelize(net, ff.Plan.from_dict({"unit": [{"match": "layers.*", "recompute": recompute}]}))
        inputs = tuple(t.repeat(20, 1) for t in batch(0))
        with Budget() as budget:
            model.step(inputs)
        peaks.append(budget.peak.bytes)
    assert peaks[1] < 0.6 * peaks[0]


def test_units_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second: with a split linear inside, at which the capture is interrupted."""
    for rules, fullgraph in (([], True), ([{"match": "layers.0.up", "split": 2}], False)):
        with monkeypatch.context() as patch:
            compile_without_code(patch, fullgraph=fullgraph)
            plan = {"unit": [*rules, {"match": "layers.*", "mode": "zero3"}], "precision": {"compile": True}}
            model = ff.parallelize(Net(), ff.Plan.from_dict(plan))
            loss, norm = model.step(batch(0)).item(), model.clip_grad_norm_(0.1).item()
        losses, norms, _ = serial(1)
        assert [loss, norm] == pytest.approx([*losses, *norms], rel=1e-10)


# ---- as users have it ----

TINY: dict[str, Any] = {"vocab_size": 11, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}


def _pretrained(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=11, n_embd=24, n_head=2, n_layer=2, n_positions=8)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(**TINY, intermediate_size=48, max_position_embeddings=8, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).double()


def labelled(step: int) -> dict[str, Tensor]:
    """Chats of other lengths: what is padded has no label; every fourth has none at all."""
    tokens, _ = batch(step)
    labels = tokens.clone()
    for row in range(12):
        labels[row, 1 + row % 4 :] = -100
    return {"input_ids": tokens, "labels": labels}


def predicted(part: dict[str, Tensor]) -> Tensor:
    return (part["labels"][:, 1:] != -100).sum()


def _tuned(rank: int, ranks: int, kind: str, plan: dict[str, Any], folder: str) -> tuple[list[float], Any]:
    """Three steps, saved after two and continued from there by another plan."""
    losses, size = [], 12 // ranks
    model = ff.parallelize(_pretrained(kind), ff.Plan.from_dict(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        if step == 2:
            model.save(folder, optimizer)
            torch.manual_seed(rank)
            other = {"unit": [{"match": "*", "mode": "zero2"}], "batch": {"micro_batches": 3}}
            model = ff.parallelize(_pretrained(kind).train(False), ff.Plan.from_dict(other))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model.load(folder, optimizer)
        mine = {k: t[rank * size : (rank + 1) * size] for k, t in labelled(step).items()}
        losses.append(model.step(mine, weight=predicted).item())
        assert model.eval_step(mine, weight=predicted).item() == pytest.approx(losses[-1], rel=1e-6)
        optimizer.step()
        model.zero_grad()
    out = model(input_ids=mine["input_ids"]).logits
    assert out.isfinite().all()
    assert not out.requires_grad
    return losses, model.state_dict()


@pytest.mark.parametrize(("kind", "ranks"), [("gpt2", 4), ("llama", 2)])
def test_models_of_transformers_train_as_they_are(kind: str, ranks: int, tmp_path: Path) -> None:
    net, losses = _pretrained(kind), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(3):
        loss = net(**labelled(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plan = {"unit": [{"match": "*", "mode": "zero3"}], "batch": {"micro_batches": 1 if ranks == 4 else 2}}
    for found in run_ranks(_tuned, ranks, kind, plan, str(tmp_path / "saved")):
        assert found[0] == pytest.approx(losses, rel=1e-6)  # transformers computes its losses in fp32
        for name, value in net.named_parameters():
            assert torch.allclose(found[1][name], value.detach(), rtol=0, atol=1e-5), name
    again = _pretrained(kind)  # and in plain torch, from the last whole state
    again.load_state_dict(found[1], strict=False)
    assert again(**labelled(5)).loss.item() == pytest.approx(net(**labelled(5)).loss.item(), rel=1e-5)


def _few_parameters(rank: int, ranks: int) -> tuple[list[float], int]:
    torch.manual_seed(rank)  # all ranks take rank 0's weights
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False)).double()
    net[1].requires_grad_(False)
    frozen = net[1].weight.detach().clone()

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean()

    model = ff.parallelize(Squares(), ff.Plan.from_dict({"unit": [{"match": "*", "mode": "zero3"}]}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    losses = []
    for _ in range(3):
        losses.append(model.step(torch.ones(2, 3).double()).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
    if rank == 0:
        assert torch.equal(model.state_dict()["net.1.weight"], frozen)
    else:
        model.state_dict()
    return losses, len(list(model.parameters()))


def test_every_rank_has_a_parameter() -> None:
    """Of six elements on four ranks, three ranks hold padding alone."""
    alone = _few_parameters(0, 1)
    for losses, count in run_ranks(_few_parameters, 4):
        assert losses == pytest.approx(alone[0], rel=1e-12)
        assert count


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda loss: {"logits": loss}, "output, a dict, has no loss; the batch has 'x'"),
        (lambda loss: SimpleNamespace(loss=None), "compute one if the batch has 'labels'"),
        (lambda loss: loss.expand(3), r"must be one number, the mean over the batch; found a tensor of shape \[3\]"),
    ],
)
def test_a_loss_that_is_none_is_refused(output: Any, message: str) -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return output(super().forward(x).mean())

    with pytest.raises(ff.ConfigError, match=message):
        ff.parallelize(Odd(3, 3)).step({"x": torch.ones(2, 3)})


def test_what_a_module_must_be() -> None:
    with pytest.raises(ff.ConfigError, match=r"without values \(on the meta device\)"):
        ff.parallelize(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ff.ConfigError, match="has no parameters"):
        ff.parallelize(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ff.PlanError, match=r"float32 and of torch.float64 \('1.weight'\), and a unit has one type"):
        ff.parallelize(mixed)
    with pytest.raises(ff.PlanError, match="the mesh is data 3 = 3 ranks, but there are 1"):
        ff.parallelize(Net(), ff.Plan.from_dict({"mesh": {"data": 3}}))
    model = ff.parallelize(Net(), ff.Plan.from_dict({"batch": {"micro_batches": 2}}))
    with pytest.raises(ff.ConfigError, match="would depend on the plan; pass the numbers"):
        model.step({"tokens": batch(0)[0], "labels": torch.full((12, 5), -100)})


def test_state_dicts_are_checked() -> None:
    model, state = ff.parallelize(Net()), Net().state_dict()
    model.load_state_dict(state)  # with the head's further name of the embedding's weight
    assert model.eval_step(batch(0)).item() == pytest.approx(serial(1)[0][0], rel=1e-12)
    state.pop("layers.1.up.bias")
    with pytest.raises(CheckpointError, match=r"has no 'layers.1.up.bias'; strict=False"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
    with pytest.raises(CheckpointError, match=r"'embed.weight' is \[2\] in the state dict, not \[11, 24\]"):
        model.load_state_dict({"embed.weight": torch.ones(2)}, strict=False)


def save_elsewhere(rank: int, ranks: int, folder: str) -> str:
    model = ff.parallelize(Net())
    with pytest.raises(CheckpointError) as e:
        model.save(f"{folder}/{rank}")
    return str(e.value)


def test_ranks_that_save_to_different_folders_are_refused(tmp_path: Path) -> None:
    said = run_ranks(save_elsewhere, 2, str(tmp_path))
    assert said[0] == said[1]
    assert f"rank 0 saves to '{tmp_path}/0' and rank 1 to '{tmp_path}/1'; use one folder" in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
def test_the_example_under_torchrun_is_the_example_alone(ranks: int, tmp_path: Path) -> None:
    script, said = str(Path(__file__).parents[1] / "examples" / "own_module.py"), []
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    for options in ([], launch):
        (tmp_path / str(len(options))).mkdir()
        command, here = [sys.executable, *options, script], tmp_path / str(len(options))  # as its first lines say
        out = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=here)
        assert out.returncode == 0, out.stderr[-2000:]
        said.append([float(x) for x in re.findall(r"loss ([\d.]+)", out.stdout)])
    assert len(said[0]) == 5
    assert said[1] == pytest.approx(said[0], abs=1e-5)
