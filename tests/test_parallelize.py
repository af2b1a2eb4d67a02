"""`parallelize`: any module, sharded by hooks, gives the gradients and weights of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from fourfold.testing.budget import Budget
from fourfold.testing.ledger import Ledger
from fourfold.testing.ranks import run_ranks

WIDTH = 24


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
        ({"mesh": {"pipe": 2}}, "mesh.pipe = 2: parallelize runs a module as it is"),
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
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    plan = ff.Plan.from_dict({"unit": [{"match": "layers.*", "mode": "zero3"}], "precision": {"compile": True}})
    model = ff.parallelize(Net(), plan)
    assert model.step(batch(0)).item() == pytest.approx(serial(1)[0][0], rel=1e-12)
