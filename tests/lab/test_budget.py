"""The budget: live bytes counted by hand, refusals that name the tensor."""

from __future__ import annotations

import gc
import io
import linecache
import threading
from typing import Any

import pytest
import rich.console
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.errors import ConfigError, OverBudget
from fourfold.testing.budget import Budget
from fourfold.testing.ranks import run_ranks

KIB = 1024


def floats(kib: int) -> Tensor:
    return torch.zeros(kib * KIB // 4)


def test_aliases_count_once_and_the_dead_not_at_all() -> None:
    with Budget() as budget:
        a = floats(4)
        views = [a.view(32, 32), a[10:], a.detach(), a.reshape(-1), nn.Parameter(a), a.view(32, 32).t()]
        assert budget.live == 4 * KIB
        b = a + 1
        assert budget.live == 8 * KIB
        del a
        assert budget.live == 8 * KIB  # its views live
        views.clear()
        assert budget.live == 4 * KIB
        b.mul_(2)
        assert budget.live == 4 * KIB
        del b
    assert budget.live == 0
    assert budget.held == []
    assert budget.peak.bytes == 8 * KIB


def test_saved_tensors_count_until_the_backward_has_used_them() -> None:
    w = torch.ones(8 * KIB // 4, requires_grad=True)
    budget = Budget()
    budget.adopt(w)
    with budget:
        y = (w * floats(8)).exp()  # saved: the zeros, and y itself
        assert budget.live == (8 + 8 + 8) * KIB
        loss = y.sum()
        del y
        assert budget.live == (8 + 8 + 8) * KIB + 4
        loss.backward()
        assert budget.live == (8 + 8) * KIB + 4  # w, its gradient and the loss


def test_resized_storage_has_the_size_it_has() -> None:
    with Budget("100KiB") as budget:
        full = floats(40)
        part = nn.Parameter(full[:100])
        other = floats(40)
        full.untyped_storage().resize_(0)
        assert budget.live == 40 * KIB
        third = floats(40)  # there is room again
        with pytest.raises(OverBudget, match="resize_ wants a tensor .10240. float32 of 40.00 KiB, 20.00 KiB over"):
            full.untyped_storage().resize_(40 * KIB)
        assert full.untyped_storage().nbytes() == 0  # refused before anything was allocated
        del third
        full.untyped_storage().resize_(40 * KIB)
        assert budget.live == 80 * KIB
        del full
        assert budget.live == 80 * KIB
        del part
        assert budget.live == 40 * KIB
        other.resize_(1, KIB)
        assert budget.live == 40 * KIB  # torch keeps the memory of a tensor that shrinks
        other.resize_(1, 15 * KIB)
        assert budget.live == 60 * KIB
    floats(1).untyped_storage().resize_(0)
    assert "resize_" not in vars(torch.UntypedStorage)  # torch is as it was


def test_the_first_tensor_over_is_refused_and_named() -> None:
    with Budget("64KiB") as budget:
        with budget.label("weights"):
            held = [floats(20), floats(20)]
        exact = floats(24)
        assert budget.live == 64 * KIB
        with pytest.raises(OverBudget) as error:
            torch.ones(3, 5, dtype=torch.float64)  # refused here
        text = str(error.value)
        del exact
        assert torch.ones(3, 5, dtype=torch.float64).sum() == 15  # a refused tensor was not counted
    assert text.splitlines()[0] == (
        "aten.ones.default wants a tensor [3, 5] float64 of 120 B, 120 B over the budget of 64.00 KiB: 64.00 KiB are live"
    )
    assert "test_budget.py" in text
    assert "in test_the_first_tensor_over_is_refused_and_named:  torch.ones(3, 5, dtype=torch.float64)" in text
    assert "live by label: weights 40.00 KiB, other 24.00 KiB" in text
    assert "40.00 KiB in 2 tensors of" in text
    assert "in floats (weights)" in text
    assert isinstance(error.value, MemoryError)
    assert budget.peak.bytes == 64 * KIB
    assert len(held) == 2


def test_a_refusal_in_the_backward_names_the_node() -> None:
    w = torch.ones(64, 64, requires_grad=True)  # 16 KiB
    with Budget("80KiB") as budget:
        budget.adopt(w, label="parameters")
        y = (w @ w).sum()
        with pytest.raises(OverBudget) as error:
            with budget.label("held"):
                held = floats(60)
            y.backward()
    assert "aten.mm.default wants a tensor [64, 64] float32 of 16.00 KiB" in str(error.value)
    assert "in the backward MmBackward0:  y.backward()" in str(error.value)
    assert held.numel()


def test_peak_curve_and_labels_of_a_step() -> None:
    """A step of two matrices and Adam, every byte accounted for."""
    n = 64
    size = n * n * 4
    model = nn.Sequential(nn.Linear(n, n, bias=False), nn.ReLU(), nn.Linear(n, n, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    budget = Budget("1MiB")
    budget.adopt(model, optimizer, label="parameters")
    assert budget.by_label == {"parameters": 2 * size}
    x = torch.ones(n, n)
    with budget:
        with budget.label("activations"):
            loss = model(x).sum()
        # the input and relu's output are saved, the products are not; then the loss
        assert budget.by_label == {"activations": 2 * size + 4, "parameters": 2 * size}
        with budget.label("gradients"):
            loss.backward()
        del loss
        assert budget.by_label == {"activations": size, "gradients": 2 * size, "parameters": 2 * size}
        with budget.label("optimizer"):
            optimizer.step()
        assert budget.by_label["optimizer"] == 4 * size + 2 * 4  # two moments a matrix, and its number of steps
        optimizer.zero_grad()
    assert "gradients" not in budget.by_label
    events, live = zip(*budget.curve, strict=True)
    assert list(events) == sorted(set(events))
    assert max(live) == budget.peak.bytes
    assert dict(budget.curve)[budget.peak.event] == budget.peak.bytes
    assert sum(budget.peak.by_label.values()) == budget.peak.bytes
    assert budget.peak.line is not None
    assert linecache.getline(*budget.peak.line[:2]).strip() == "optimizer.step()"
    console = rich.console.Console(width=100, file=io.StringIO())
    console.print(budget)
    assert "optimizer" in console.file.getvalue()  # type: ignore[attr-defined]
    before = budget.peak.bytes
    budget.reset_peak()
    assert budget.peak.bytes == budget.live < before


def test_older_tensors_count_when_used_and_when_adopted() -> None:
    old, adopted = floats(4), floats(8)
    tied = nn.Linear(8, 8, bias=False)
    twin = nn.Linear(8, 8, bias=False)
    twin.weight = tied.weight
    budget = Budget()
    budget.adopt(adopted, {"tied": [tied, twin]}, label="before")
    assert budget.live == 8 * KIB + 8 * 8 * 4
    with budget:
        old.view(-1)
    assert budget.by_label == {"before": 8 * KIB + 256, "other": 4 * KIB}
    del adopted, tied, twin
    gc.collect()
    assert budget.live == 4 * KIB
    assert torch.zeros(3, device="meta").is_meta
    with budget:
        meta = torch.zeros(1000, device="meta")
        assert (meta + 1).is_meta
        assert budget.live == 4 * KIB
    (held,) = budget.held
    assert str(held).startswith("tensor [1024] float32 of 4.00 KiB by aten.view.default at ")


def test_threads_of_one_rank_share_the_budget() -> None:
    budget, kept = Budget("16KiB"), []

    def make(kib: int) -> None:
        try:
            with budget, budget.label("messages"):
                kept.append(floats(kib))
        except OverBudget as e:
            kept.append(e)

    with budget:
        mine = floats(8)
        for kib in (8, 1):
            thread = threading.Thread(target=make, args=(kib,))
            thread.start()
            thread.join()
    assert budget.by_label == {"other": 8 * KIB, "messages": 8 * KIB}
    assert isinstance(kept[1], OverBudget)
    assert mine.numel()


def test_wrong_limits() -> None:
    with pytest.raises(ConfigError, match="the budget = 'lots' is not a size"):
        Budget("lots")
    assert Budget(12).limit == 12
    assert Budget("1.5 KiB").limit == 1536


ACTIONS = st.lists(st.tuples(st.sampled_from(["new", "view", "drop", "free", "back"]), st.integers(0, 9)), max_size=40)


@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_any_sequence_counts_what_is_alive(actions: list[tuple[str, int]]) -> None:
    tensors: list[tuple[int, Tensor]] = []  # (which storage, a tensor on it)
    sizes: dict[int, int] = {}
    with Budget() as budget:
        for number, (action, which) in enumerate(actions):
            if action == "new":
                tensors.append((number, floats(which + 1)))
                sizes[number] = (which + 1) * KIB
            elif tensors:
                key, tensor = tensors[which % len(tensors)]
                if action == "view":
                    tensors.append((key, tensor.detach()))
                elif action == "drop":
                    del tensors[which % len(tensors)]
                else:
                    sizes[key] = 0 if action == "free" else (which + 1) * KIB
                    tensor.untyped_storage().resize_(sizes[key])
                del tensor
            assert budget.live == sum(sizes[key] for key in {key for key, _ in tensors})


def test_counting_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget to subtract the dead, and the counts above no longer hold."""
    monkeypatch.setattr(Budget, "_bury", lambda self: None)
    with pytest.raises(AssertionError):
        test_aliases_count_once_and_the_dead_not_at_all()


def sharded(rank: int, ranks: int) -> Any:
    """FSDP2, the peer that frees parameters by resizing storage: what stays is a shard, what comes and goes is a layer."""
    from torch.distributed.fsdp import fully_shard

    n, layers = 128, 8
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, n)
    with Budget() as budget:
        budget.adopt(model, x)
        resident = budget.live
        model(x).sum().backward()
        model.zero_grad()
        gc.collect()
        after = budget.live
        model(x).sum().backward()
    return resident, after, budget.peak.bytes


def test_a_sharding_engine_is_followed() -> None:
    matrix = 128 * 128 * 4
    for resident, after, peak in run_ranks(sharded, 2):
        assert resident == 8 * matrix // 2 + 2 * 128 * 4
        assert after < resident + 2 * matrix  # of eight gathered layers; one may be kept for the next step
        assert peak < resident + 8 * matrix  # and never were all of them here, with their gradients
