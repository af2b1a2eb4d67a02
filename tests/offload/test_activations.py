"""Activations on the host: no bit changes, the device is freed, the budget holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.errors import HostMemoryError
from fourfold.offload.activations import ActivationOffload, Parcel
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.testing.budget import Budget
from fourfold.train import streamed
from tests.helpers import MODELS, make_config, run_training, series
from tests.offload.threads import slow_queues

torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("FOURFOLD_TEST_DEVICE", "cpu"))


def make_offload(**options: Any) -> ActivationOffload:
    return ActivationOffload(DEVICE, **{"budget": 1 << 24, "least": 256, "stash": 0, "ahead": 1 << 12} | options)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(4))).to(DEVICE)


def grads(offload: ActivationOffload | None, seed: int = 0) -> list[Tensor]:
    net, x = make_net(), torch.randn(9, 24, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    if offload is None:
        net(x).square().sum().backward()
    else:
        with offload.saving(net.parameters()):
            loss = net(x).square().sum()
        loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options", [{}, {"stash": 4000}, {"stash": 6000, "late": True}, {"ahead": 0}, {"budget": 5000}, {"least": 1700}]
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    offload = make_offload(**options)
    for seed in range(3):
        assert all(map(torch.equal, grads(None, seed), grads(offload, seed)))
    assert 0 < offload.taken <= offload.budget or offload.budget < 1 << 16


@pytest.mark.parametrize("seed", range(3))
def test_time_changes_nothing(seed: int) -> None:
    offload = make_offload(queues=slow_queues(seed, DEVICE), stash=3000 * seed, late=True)
    for step in range(3):
        assert all(map(torch.equal, grads(None, step), grads(offload, step)))


@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_changed_in_place_is_another(late: bool) -> None:
    """One that is changed before its copy is done is refused, as autograd refuses it without offload."""
    offload, t = make_offload(stash=1 << 12, late=late), torch.ones(256, device=DEVICE)
    first = offload.put(t)
    second = offload.put(t.add_(1))
    assert first is not second
    assert offload.put(t) is second
    others = [offload.put(torch.zeros(1024, device=DEVICE)) for _ in range(3)]  # fill the stash: both leave
    t.zero_()
    assert float(offload.get(second).mean()) == 2.0
    with pytest.raises(
        RuntimeError, match=r"tensor \[256\] of torch.float32 .* was changed in place after it was saved"
    ):
        offload.get(first)
    kept = offload.put(t)  # still on the device
    t.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        offload.get(kept)
    assert len(others) == 3


def test_a_layer_that_changes_what_it_saved_is_refused() -> None:
    x = torch.ones(256, requires_grad=True, device=DEVICE)
    with make_offload(stash=1 << 16).saving():
        y = x * 2
        z = (y * y).sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_a_queue_that_does_not_wait_is_detected() -> None:
    offload = make_offload(queues=slow_queues(1, DEVICE, 5e-3, careless="compute"))
    assert not all(all(map(torch.equal, grads(None, s), grads(offload, s))) for s in range(3))


def test_what_is_saved_leaves_the_device_and_parameters_stay() -> None:
    offload, weight = make_offload(), torch.randn(64, 64, requires_grad=True, device=DEVICE)
    held: list[Any] = []
    pack = offload.put

    def watch(t: Tensor, key: Any = None) -> Any:
        held.append(pack(t, key))
        return held[-1]

    offload.put = watch  # type: ignore[method-assign]
    with offload.saving([weight]):
        y = (torch.randn(64, 64, device=DEVICE) @ weight).sigmoid().sum()
    assert [type(h) for h in held] == [Parcel, Parcel]  # the left factor, the sigmoid's result
    assert all(h.value is None for h in held)
    y.backward()
    assert weight.grad is not None


def test_the_same_tensor_goes_once_and_gaps_do_not_go() -> None:
    offload = make_offload(stash=1 << 20)
    x = torch.randn(32, 64, device=DEVICE)
    assert offload.put(x) is offload.put(x)
    half = offload.put(x[:, :32])
    assert isinstance(half, Parcel)
    assert half.bytes == 32 * 32 * 4
    assert torch.equal(offload.get(half), x[:, :32])
    assert offload.get(half).stride() == (32, 1)


def test_what_came_last_does_not_leave() -> None:
    """The backward wants it first: there is no copy for it to wait for."""
    saved = make_offload(late=False)
    grads(saved)
    offload, before = make_offload(stash=6000, late=True), 0
    for step in range(5):
        assert all(map(torch.equal, grads(None, step), grads(offload, step)))
        assert (offload._waiting_bytes, offload._leaving_bytes) == (0, 0)
        moved, before = offload.moved - before, offload.moved
        stayed = 6000 if step else 3000  # in the first, its end is not known
        assert stayed - 2000 < saved.moved - moved <= stayed  # a parcel has at most 1728 bytes
    assert len(offload._waiting) + len(offload._leaving) < 20  # nothing is kept of steps before
    plenty = make_offload(stash=1 << 20, late=True)
    for step in range(3):
        grads(plenty, step)
    assert plenty.moved == 0


def test_host_buffers_are_used_again() -> None:
    offload = make_offload()
    grads(offload)
    taken, moved = offload.taken, offload.moved
    grads(offload)
    assert offload.taken == taken
    assert offload.moved == 2 * moved
    with pytest.raises(HostMemoryError, match="the budget for activations"):
        ActivationOffload(DEVICE, budget=1 << 60)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("plan", [{}, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}}], ids=["alone", "zb-h1"])
def test_training_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], recompute: str
) -> None:
    monkeypatch.setattr(streamed, "LEAST", 1024)
    found = []
    for where in ("device", "host"):
        config = make_config(tmp_path / where, MODELS["llama"] | {"dropout": 0.1})
        rules = {
            "unit": [
                {"match": "*.mlp", "split": 2, "recompute": recompute},
                {"match": "blocks.*", "recompute": recompute},
            ],
            "memory": {"activations": where},
        }
        metrics = run_training(config, {**plan, **rules, "precision": {"compute": "bf16"}}, 2 if plan else 1)
        found.append((series(metrics, "loss"), series(metrics, "grad_norm")))
    assert found[0] == found[1]


class PlainUnit:
    """A unit that does nothing but hand out a module's parameters."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.grads: list[Any] = []

    def need(self) -> None: ...
    def lends_grads(self) -> bool:
        return False

    def parameters(self) -> list[Tensor]:
        return list(self.module.parameters())

    trained = parameters

    def accumulate(self, grads: Any) -> None:
        self.grads += grads

    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None: ...


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_holds_nothing_on_the_device(recompute: Any) -> None:
    """Between forward and backward neither the inputs of links nor what they save is on the device."""
    found = []
    for offload in (None, make_offload()):
        links = [ChainLink(f"{i}", PlainUnit(m), m, recompute) for i, m in enumerate(make_net())]
        stage = Stage(links, keeper=offload)
        x = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        with Budget() as budget:
            y = stage.forward(0, x)
        del x
        weights = sum(p.nbytes for link in links for p in link.module.parameters())
        small = sum(h.bytes for h in budget.held if h.bytes < 1 << 16) - weights  # host buffers are larger
        assert (small <= y.nbytes) == (offload is not None), small
        grad = stage.backward(0, torch.ones_like(y))
        found.append([grad, *(g for link in links for g in link.unit.grads)])
        assert offload is None or offload.moved > 0
    assert all(map(torch.equal, *found))
