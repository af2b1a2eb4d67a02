"""Units: parameters as views of one buffer, accumulation in order, a tied weight with two accumulators."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config import ModelConfig, OptimConfig
from fourfold.model.build import build_model, fill_initial
from fourfold.model.transformer import Transformer
from fourfold.piece import whole
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.shard.layout import ALIGN, lay_out
from fourfold.shard.replicas import unequal_replicas
from fourfold.shard.sharing import ALONE, Sharing
from fourfold.shard.split import slices_of
from fourfold.shard.unit import Borrowed, Unit
from fourfold.testing.ranks import run_ranks
from fourfold.train.optim import AdamW
from tests.helpers import rounded_half_up

CONFIG = ModelConfig(family="gpt", layers=2, hidden=32, heads=4, seq_len=8, vocab=50).resolve()


def make(
    compute: torch.dtype = torch.float64, reduce: torch.dtype = torch.float64, sharing: Sharing = ALONE
) -> tuple[Transformer, dict[str, Unit]]:
    model = build_model(CONFIG).to(compute)
    units: dict[str, Unit] = {}
    for name, module in model.units().items():
        found = {n: tuple(p.shape) for n, p in module.named_parameters()}
        units[name] = Unit.of(
            name,
            module,
            pieces={n: (whole(f"{name}.{n}", s),) for n, s in found.items()},
            device=torch.device("cpu"),
            compute=compute,
            reduce=reduce,
            borrow={"proj.weight": Borrowed(units["embed"], "tokens.weight")} if name == "head" else None,
            sharing=sharing,
        )
        for n, p in units[name].params.items():
            fill_initial(p, units[name].pieces[n][0], CONFIG, 0)
    for unit in units.values():
        unit.scatter()
    return model, units


def reduced(unit: Unit) -> dict[str, torch.Tensor]:
    """The reduced gradients of a unit that is not sharded."""
    unit.finish()
    return {n: unit.reduced_grad(n) for n in unit.params}


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(1, 9), max_size=3).map(tuple)), st.integers(1, 5))
def test_layout_aligns_and_does_not_overlap(shapes: dict[str, tuple[int, ...]], shards: int) -> None:
    layout = lay_out(shapes, shards)
    assert layout.total % (ALIGN * shards) == 0
    ends = 0
    for slot in layout.slots:
        assert slot.start % ALIGN == 0
        assert slot.start >= ends
        ends = slot.stop
    assert layout.total >= ends
    assert sum(b - a for a, b in layout.gaps()) + sum(s.stop - s.start for s in layout.slots) == layout.total
    ranges = [layout.shard_range(i) for i in range(shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.total
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_parameters_are_views_of_the_buffer() -> None:
    model, units = make()
    for unit in units.values():
        low, high = unit.full.data_ptr(), unit.full.data_ptr() + unit.full.nbytes
        for p in unit.params.values():
            assert low <= p.data_ptr() < high
            assert p.data_ptr() % 64 == unit.full.data_ptr() % 64
    assert model.head.proj.weight is model.embed.tokens.weight
    assert sum(len(u.params) for u in units.values()) == len(dict(model.named_parameters()))


def serial_gradients(tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    model, _ = make()
    model(tokens, targets).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_release_waits_for_a_gather_that_nothing_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A gather that writes when it is waited for."""

        def __init__(self, out: torch.Tensor, *args: object):
            self.out = out
            gathers.append(self)
            self.done = False

        def wait(self) -> None:
            self.out.fill_(1.0)  # raises if the memory is gone
            self.done = True

    gathers: list[Slow] = []
    monkeypatch.setattr("fourfold.shard.unit.all_gather", Slow)
    group: Any = object()
    _, units = make(sharing=Sharing(2, gathers=group, reductions=group))
    unit = units["blocks.0.mlp"]
    unit.gather()
    unit.release()
    assert [each.done for each in gathers] == [True]
    assert unit.full.untyped_storage().nbytes() == 0
    unit.gather()
    unit.need()
    assert [each.done for each in gathers] == [True, True]


def test_stage_gradients_equal_autograd() -> None:
    tokens, targets = torch.randint(0, 50, (2, 4, 8))
    expected = serial_gradients(tokens, targets)
    for recompute, together in (("none", False), ("none", True), ("selective", False), ("full", True)):
        model, units = make()
        stage = Stage([ChainLink(n, units[n], module, recompute) for n, module in model.units().items()])  # type: ignore[arg-type]
        for m in range(2):  # two micro-batches, both in flight before the first backward
            stage.forward(m, tokens[2 * m : 2 * m + 2], extra=(targets[2 * m : 2 * m + 2],), whole=together)
        assert stage.in_flight == 2
        for m in range(2):
            stage.backward(m, torch.tensor(1.0, dtype=torch.float64))
        assert not any(p.grad is not None for p in model.parameters())
        for unit in units.values():
            unit.reduce()
        for name, unit in units.items():
            for n in unit.params:
                assert torch.allclose(reduced(unit)[n], expected[f"{name}.{n}"], rtol=0, atol=1e-13), (name, n)


def test_random_numbers_belong_to_a_step_a_micro_batch_and_a_unit() -> None:
    tokens, targets = torch.randint(0, 50, (2, 4, 8))
    for recompute in ("none", "full"):
        model, units = make()
        seen: list[tuple[int, int, int]] = []
        links = [ChainLink(n, units[n], module, recompute) for n, module in model.units().items()]  # type: ignore[arg-type]
        stage = Stage(links, reseed=lambda *at, seen=seen: seen.append(at))  # type: ignore[misc]
        stage.step = 7
        for m in range(2):
            stage.forward(m, tokens[2 * m : 2 * m + 2], extra=(targets[2 * m : 2 * m + 2],))
        assert seen == [(7, m, i) for m in range(2) for i in range(len(links))]
        for m in (1, 0):
            seen.clear()
            stage.backward(m, torch.tensor(1.0, dtype=torch.float64))
            assert bool(seen) == (recompute == "full")
            assert {(step, micro_batch) for step, micro_batch, _ in seen} <= {(7, m)}


def test_whole_ops_have_the_bits_of_parts() -> None:
    """One graph for a run of links, or one for each: the same additions, in the same order, tied weights too."""
    tokens, targets = torch.randint(0, 50, (2, 6, 8))
    found = []
    for together in (False, True):
        model, units = make()
        stage = Stage([ChainLink(n, units[n], module) for n, module in model.units().items()])
        for m in range(3):
            part = slice(2 * m, 2 * m + 2)
            stage.forward(m, tokens[part], extra=(targets[part],), whole=together)
            assert len(stage._whole) == together
            stage.backward(m, torch.tensor(1.0, dtype=torch.float64))
        assert [len(run) for run in stage._uncut] == [len(units) - 1, 1]  # the head borrows the embedding's matrix
        for unit in units.values():
            unit.reduce()
        found.append({(n, k): g for n, unit in units.items() for k, g in reduced(unit).items()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_gradients_that_some_micro_batches_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter without a gradient counts as zero, first in one micro-batch, then in all; fresh memory holds anything."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    _, units = make()
    unit = units["blocks.0.mlp"]
    grads = [torch.randn(p.shape, dtype=torch.float64) for p in unit.params.values()]
    unit.accumulate([None, *grads[1:]])
    unit.accumulate(grads)
    unit.reduce()
    for i, (grad, found) in enumerate(zip(grads, reduced(unit).values(), strict=True)):
        assert torch.equal(found, (2 if i else 1) * grad)
    unit.zero_grad()
    unit.accumulate([None, *grads[1:]])
    unit.reduce()
    assert [bool(found.any()) for found in reduced(unit).values()] == [False] + [True] * (len(grads) - 1)
    assert not any(found.isnan().any() for found in reduced(unit).values())


def test_tied_weight_is_summed_once_in_a_fixed_order() -> None:
    _, units = make()
    a, b = torch.randn(2, 50, 32, dtype=torch.float64)
    embed, head = units["embed"], units["head"]
    names = [*head.params, "proj.weight"]
    head.accumulate([a if n == "proj.weight" else None for n in names])
    embed.accumulate([b if n == "tokens.weight" else None for n in embed.params])
    head.reduce()
    embed.reduce()
    assert torch.equal(reduced(embed)["tokens.weight"], b + a)


def test_bf16_gradients_accumulate_in_fp32() -> None:
    _, units = make(torch.bfloat16, torch.float32)
    unit = units["blocks.0.mlp"]
    small = [torch.full_like(p, 2.0**-10) for p in unit.params.values()]
    unit.accumulate([torch.ones_like(p) for p in unit.params.values()])
    for _ in range(4):
        unit.accumulate(small)
    assert unit.grad is not None
    assert unit.grad.dtype == torch.float32
    assert (unit.main_grad("up.weight") == 1 + 4 * 2.0**-10).all()  # bf16 would have lost every one of them


def test_adamw_equals_torch_bit_for_bit() -> None:
    for compute, reduce in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        _, units = make(compute, reduce)
        config = OptimConfig(clip=1.0, weight_decay=0.1)
        ours = AdamW(list(units.values()), config)
        masters = {
            (u, s.name): ours.master[u][s.start : s.stop].clone().view(s.shape)
            for u in units
            for s in units[u].layout.slots
        }
        groups = [
            {"params": [p for p in masters.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in masters.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        for step in range(5):
            size = (1.0, 1e-6)[step % 2]  # clipped, and not
            grads = {key: size * torch.randn_like(p) for key, p in masters.items()}
            norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
            for (u, n), g in grads.items():
                units[u].main_grad(n).copy_(g)
                masters[u, n].grad = g * (1.0 / (norm + 1e-6)).clamp(max=1).float()
            for unit in units.values():
                unit.reduce()
                unit.finish()
            ours.step(1e-3, norm, torch.zeros(()))
            theirs.step()
            for unit in units.values():
                unit.zero_grad()
        for (u, n), p in masters.items():
            expected = p.detach() if compute == torch.float32 else rounded_half_up(p.detach())
            assert torch.equal(units[u].params[n].detach(), expected)


def test_skipped_step_changes_nothing() -> None:
    _, units = make(torch.float32, torch.float32)
    optimizer = AdamW(list(units.values()), OptimConfig())
    before = {u: units[u].full.clone() for u in units}
    for unit in units.values():
        unit.main_grad(next(iter(unit.params))).fill_(float("nan"))
        unit.reduce()
        unit.finish()
    optimizer.step(1e-3, torch.tensor(float("nan"), dtype=torch.float64), torch.ones(()))
    assert all(torch.equal(before[u], units[u].full) for u in units)
    assert all((optimizer.exp_avg[u] == 0).all() for u in units)
    assert optimizer.updates == 0


def test_rounding_half_up_keeps_the_master_restorable() -> None:
    x = torch.randn(4096)
    ties = (x.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)
    for values in (x, ties, torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])):
        rounded = rounded_half_up(values)
        low = values.view(torch.int32) - (rounded.view(torch.int16).to(torch.int32) << 16)
        assert ((low >= -0x8000) & (low < 0x8000)).all()  # 16 bits are enough to come back
    assert rounded_half_up(torch.tensor([float("nan")])).isnan().all()


def _reduced(rank: int, ranks: int) -> tuple[bool, list[str], list[str]]:
    _, units = make(sharing=Sharing(1, 0, ranks, rank, across=dist.group.WORLD))
    for unit in units.values():
        for n in unit.params:
            unit.main_grad(n).fill_(rank + 1)
        unit.reduce()
    right = all(bool((grad == 6).all()) for unit in units.values() for grad in reduced(unit).values())
    equal = unequal_replicas(units.values(), dist.group.WORLD)
    if rank == 1:
        units["blocks.1.mlp"].params["up.weight"].data[3, 3] += 1e-12
    return right, equal, unequal_replicas(units.values(), dist.group.WORLD)


def test_reduction_sums_over_ranks_and_unequal_replicas_are_named() -> None:
    for right, equal, broken in run_ranks(_reduced, 3):
        assert right
        assert equal == []
        assert len(broken) == 1
        assert broken[0].startswith("blocks.1.mlp.up.weight")
        assert "ranks [1] differ from rank 0" in broken[0]


# ---- a grid's parameters: vectors are copies over more ranks than matrices ----


class Cut(torch.nn.Module):
    """A block of a matrix, with a norm and a bias that all rows of the grid hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.linear = torch.nn.Linear(6, 10)


def _on_a_grid(rank: int, ranks: int, sharded: bool) -> tuple[dict[str, float], list[int], float]:
    """data 2 × row 2: rank = 2 · data + row."""
    data, row = divmod(rank, 2)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
    replicas, rows = groups[(row, row + 2)], groups[(2 * data, 2 * data + 1)]
    module = Cut().double()
    found = {n: tuple(p.shape) for n, p in module.named_parameters()}
    vectors = [n for n, shape in found.items() if len(shape) == 1]
    sharing = Sharing(2, data, 1, 0, replicas, replicas) if sharded else Sharing(1, 0, 2, data, across=replicas)
    axes = {n: ("data", "row") if n in vectors else ("data",) for n in found}
    unit = Unit.of(
        "part",
        module,
        pieces={n: (whole(n, shape, axes[n]),) for n, shape in found.items()},
        device=torch.device("cpu"),
        compute=torch.float64,
        reduce=torch.float64,
        sharing=sharing,
        sum_over=dict.fromkeys(vectors, rows),
    )
    unit.scatter()
    unit.accumulate([torch.full_like(p, 10.0**rank) for p in unit.params.values()])
    unit.reduce()
    unit.finish()
    assert unit.shard_grad is not None
    values = {s.name: float(unit.shard_grad[start]) for s, start, _ in unit.slots()}
    here, _ = unit.sharing.place({"data": data, "row": row, "depth": 0}, {"data": 2, "row": 2, "depth": 1})
    owned = sum(
        float(unit.shard_grad[start:stop].square().sum())
        for s, start, stop in unit.slots()
        if unit.pieces[s.name][0].owned_at(here)
    )
    return values, [s.start for s in unit.layout.slots if s.name in vectors], owned


@pytest.mark.parametrize("sharded", [True, False])
def test_vectors_that_a_grid_copies_are_summed_over_its_rows_too(sharded: bool) -> None:
    squares = 0.0
    for rank, (values, starts, owned) in enumerate(run_ranks(_on_a_grid, 4, sharded)):
        column = 10.0 ** (rank % 2) + 10.0 ** (rank % 2 + 2)
        for name, value in values.items():
            assert value == (column if name == "linear.weight" else 1111.0), name
        assert min(starts) >= 64  # after the matrix
        squares += owned
    assert squares == 60 * (101.0**2 + 1010.0**2) + 22 * 1111.0**2


# ---- slices on their own ----


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_linear_split_by_its_inputs_is_the_linear(count: int) -> None:
    linear = torch.nn.Linear(7, 5).double()
    slices = slices_of("big", torch.nn.Linear(7, 5, device="meta").double(), count)
    links, units = [], {}
    for i, part in enumerate(slices):
        unit = Unit.of(
            f"big/{i}",
            part.module,
            pieces=part.pieces,
            device=torch.device("cpu"),
            compute=torch.float64,
            reduce=torch.float64,
        )
        for n, pieces in unit.pieces.items():
            for piece in pieces:
                source = dict(linear.named_parameters())[piece.name.removeprefix("big.")]
                unit.params[n].data.copy_(source.detach()[tuple(slice(*s) for s in piece.global_slice)])
        units[i] = unit
        links.append(ChainLink(unit.name, unit, part.module, "full", adds=part.adds))
    stage, x = Stage(links), torch.randn(2, 4, 7, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    expected = linear(leaf)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    assert torch.allclose(stage.forward(0, x), expected, rtol=0, atol=1e-14)
    assert leaf.grad is not None
    assert torch.allclose(stage.backward(0, grad), leaf.grad, rtol=0, atol=1e-14)
    weights = torch.cat([units[i].main_grad("part.weight") for i in units], 1)
    assert linear.weight.grad is not None
    assert torch.allclose(weights, linear.weight.grad, rtol=0, atol=1e-14)
    assert torch.allclose(units[0].main_grad("part.bias"), linear.bias.grad, rtol=0, atol=1e-14)  # type: ignore[arg-type]
