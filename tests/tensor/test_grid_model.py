"""Whole models on the grid in one process: loss and every gradient equal the serial model's, padding stays 0."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.build import build_model
from fourfold.model.layers import IGNORE
from fourfold.model.transformer import Transformer
from fourfold.tensor.blocks import even
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.layers import GridNorm
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings
from fourfold.tensor.swap import parallelize
from fourfold.testing.grid import run_grid
from tests.tensor.common import CONFIGS, GRIDS, config_of, gap, on_grid, restless_model, total_over

Degrees = tuple[int, int, int]


def check_model(
    place: Degrees, grid: Grid, depth: Axis, serial: Transformer, tokens: Tensor, targets: Tensor, options: Any
) -> dict[str, float]:
    """How far the loss and the gradients of a rank are from its parts of the serial ones."""
    model, pieces = on_grid(serial, grid, **options)
    part = place[0] * grid.row.size + place[1]
    ways = depth.size * grid.row.size
    loss = model(tokens.chunk(ways)[part], targets.chunk(ways)[part])
    loss.backward()
    gaps = {}
    theirs = dict(serial.named_parameters())
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad, expected = total_over(p.grad, pieces[name], grid, depth), theirs[name].grad
        assert expected is not None
        gaps[name] = gap(grad, pieces[name], expected)
    total = depth.sum(grid.row.sum(loss.detach()[None]))
    return gaps | {"loss": float(total)}


def worst_model(config: ModelConfig, degrees: Degrees, each: int = 2, **options: Any) -> float:
    """The largest gap of any rank; `each`: sequences of a row of the grid."""
    serial = restless_model(config)
    generator = torch.Generator().manual_seed(1)
    sequences = each * degrees[0] * degrees[1]
    tokens = torch.randint(0, config.vocab, (sequences, config.seq_len), generator=generator)
    targets = torch.randint(0, config.vocab, (sequences, config.seq_len), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE
    total = serial(tokens, targets)
    total.backward()
    loss = total.detach()
    found = run_grid(check_model, *degrees, serial, tokens, targets, options)
    return max(abs(v - float(loss)) if k == "loss" else v for gaps in found for k, v in gaps.items())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("residual", ["sequence", "hidden"])
def test_models_equal_serial(name: str, residual: str) -> None:
    """Every model on two grids; together they are all the grids that have heads for their columns."""
    config = config_of(name)
    number = list(CONFIGS).index(name)
    grids = [GRIDS[(2 * number + i + (residual == "hidden") * 6) % len(GRIDS)] for i in range(2)]
    for degrees in [*grids, (1, 2, 2)]:
        if degrees[2] <= config.heads:
            assert worst_model(config, degrees, residual=residual) < 1e-10, degrees


@pytest.mark.parametrize("name", ["gpt", "bert", "llama"])
def test_a_column_may_begin_within_a_sequence(name: str) -> None:
    for columns, each in ((2, 1), (2, 3), (3, 2), (4, 1)):
        assert worst_model(config_of(name), (1, 1, columns), each, residual="sequence") < 1e-10, (columns, each)


@pytest.mark.parametrize("flow", ["summa", "os", "ls", "ws"])
def test_flows_equal_serial(flow: str) -> None:
    for name, residual in itertools.product(("gpt", "llama"), ("sequence", "hidden")):
        assert worst_model(config_of(name), (1, 2, 2), residual=residual, flow=flow) < 1e-10, (name, residual)


@pytest.mark.parametrize("columns", [3, 4, 5])
def test_fewer_key_heads_than_columns(columns: int) -> None:
    """Two key heads of five queries each: columns share a key head, some have a query that is none, one has no head."""
    for residual in ("sequence", "hidden"):
        for qk_norm in (False, "all", "per-head"):
            config = replace(config_of("llama, 5 queries to a key"), qk_norm=qk_norm)
            assert worst_model(config, (1, 1, columns), residual=residual) < 1e-10, qk_norm


def test_sixty_four_ranks() -> None:
    config = ModelConfig(
        family="llama", layers=1, hidden=18, heads=8, kv_heads=4, head_dim=4, ffn=30, seq_len=6, vocab=37
    ).resolve()
    assert worst_model(config, (4, 4, 4)) < 1e-10


# ---- broken on purpose ----


def own_columns_only(self: GridNorm, x: Tensor) -> Tensor:
    y = F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight
    return y if self.bias is None else y + self.bias


def untrimmed(self: GridLinear, x: Tensor) -> Tensor:
    self.filled = self.inputs.blocks.size
    return whole_forward(self, x)


whole_forward = GridLinear.forward


def test_mutations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(GridNorm, "forward", own_columns_only)
        assert worst_model(config_of("gpt"), (1, 1, 2), residual="hidden") > 1e-3
    with monkeypatch.context() as m:
        m.setattr(GridLinear, "forward", untrimmed)
        assert worst_model(config_of("llama, 5 queries to a key"), (1, 1, 4)) > 1e-3
    with monkeypatch.context() as m:
        m.setattr("fourfold.tensor.blocks.Blocks.filled", lambda self, part: self.size)
        assert worst_model(config_of("gpt"), (1, 1, 2)) > 1e-3  # logits of words that are none
        assert worst_model(config_of("gpt"), (1, 1, 3), residual="hidden") > 1e-3  # features that are none


def test_statistics_are_stable_and_wide() -> None:
    """A mean far larger than the deviation, in fp32: squares minus the square of the mean would have no digit left."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 20, generator=generator, dtype=torch.float64) + 3e3
    expected = F.layer_norm(x.float().double(), (20,), eps=1e-5)

    def check(place: Degrees, grid: Grid, depth: Axis) -> None:
        norm = GridNorm(GridSettings(grid, 6, 12), even(20, 3), eps=1e-5, centred=True, bias=True).to_empty(
            device="cpu"
        )
        nn.init.ones_(norm.weight)
        assert norm.bias is not None
        nn.init.zeros_(norm.bias)
        start, stop, _ = even(20, 3).runs[place[2]][0]
        y = norm(F.pad(x[..., start:stop], (0, 7 - stop + start)).float())
        assert (y[..., : stop - start] - expected[..., start:stop]).abs().max() < 2e-3
        assert (y[..., stop - start :] == 0).all()

    run_grid(check, 1, 1, 3)


def test_weight_gradients_are_summed_in_fp32() -> None:
    def sums(place: Degrees, grid: Grid, depth: Axis) -> torch.dtype:
        linear = GridLinear(
            GridSettings(grid, 6, 12, "os"),
            ActivationLayout(even(8, 2), True),
            ActivationLayout(even(8, 2)),
            bias=False,
        )
        linear = linear.to(torch.bfloat16).to_empty(device="cpu")
        x, dy = torch.ones(6, 8, dtype=torch.bfloat16), torch.ones(12, 4, dtype=torch.bfloat16)
        found: list[Tensor] = []
        linear.weight_grad(x, dy * (1 if place[1] else 2.0**-8), found.append)
        (dw,) = found
        assert (dw == 12 * (1 + 2.0**-8)).all()  # bf16 would round the sum of the two rows
        return dw.dtype

    assert run_grid(sums, 1, 2, 2) == [torch.float32] * 4


def test_second_derivatives_are_refused() -> None:
    def check(place: Degrees, grid: Grid, depth: Axis) -> None:
        linear = GridLinear(
            GridSettings(grid, 6, 12), ActivationLayout(even(8, 2), True), ActivationLayout(even(8, 2)), bias=False
        ).to_empty(device="cpu")
        x = torch.ones(6, 8, requires_grad=True)
        (dx,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()

    run_grid(check, 1, 1, 2)


# ---- memory ----


def test_parameters_of_a_rank() -> None:
    """Matrices are divided by row · col; norms, biases on the residual stream and positions are copied."""
    config = ModelConfig(family="gpt", layers=2, hidden=32, heads=4, seq_len=8, vocab=64).resolve()
    vectors = sum(p.numel() for p in build_model(config).parameters() if p.dim() == 1)
    copied = 8 * 32  # positions
    matrices = sum(p.numel() for p in build_model(config).parameters()) - vectors - copied
    split = 2 * (3 * 32 + 4 * 32)  # biases of qkv and up

    def count(place: Degrees, grid: Grid, depth: Axis, residual: str) -> int:
        model = build_model(config)
        parallelize(model, GridSettings(grid, 8, 16, residual=residual))
        model.tie()
        return sum(p.numel() for p in model.parameters())

    assert set(run_grid(count, 1, 2, 4, "sequence")) == {matrices // 8 + copied + vectors - split + split // 4}
    assert set(run_grid(count, 1, 2, 4, "hidden")) == {matrices // 8 + (copied + vectors) // 4}


def saved_elements(module: nn.Module, x: Tensor) -> int:
    """Elements kept for the backward, each once, parameters and tables not counted."""
    held = [*module.parameters(), *module.buffers()]
    parameters = {p.untyped_storage().data_ptr() for p in held}
    kept: dict[tuple[int, int], int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr(), t.storage_offset()] = t.numel()
            alive.append(t)
        return t

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x)
    return sum(kept.values())


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_saved_activations_of_a_rank_are_its_share(family: str) -> None:
    config = ModelConfig(family=family, layers=1, hidden=32, heads=4, seq_len=8, vocab=64, ffn=64).resolve()  # type: ignore[arg-type]
    serial = restless_model(config)
    x = torch.randn(8, 8, 32, dtype=torch.float64)
    expected = {
        part: saved_elements(getattr(serial.blocks[0], part), x.clone().requires_grad_()) for part in ("attn", "mlp")
    }

    def count(place: Degrees, grid: Grid, depth: Axis, residual: str) -> None:
        model, _ = on_grid(serial, grid, residual=residual)
        mine = x[:2].flatten(0, 1)[:8] if residual == "sequence" else x[:2, :, :16]
        more = 0 if residual == "sequence" else 16  # with features split, columns share tokens: 8 more of 2 statistics
        for part, total in expected.items():
            found = saved_elements(getattr(model.blocks[0], part), mine.clone().requires_grad_())
            assert found == total // 8 + more, (part, found, total / 8)

    run_grid(count, 2, 2, 2, "sequence")
    if family == "gpt":  # torch's RMSNorm keeps more on a CPU than ours
        run_grid(count, 2, 2, 2, "hidden")


# ---- what it does not know ----


def test_unknown_modules_are_named() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    setting = GridSettings(Grid(Axis("row"), Axis("col")), 6, 12)
    blocks = nn.ModuleDict({"extra": nn.Sequential(Adapter())})
    with pytest.raises(PlanError, match=r"'extra.0' is a Adapter with parameters \(scale\).*rules="):
        parallelize(blocks, setting)
    seen: list[nn.Module] = []
    parallelize(blocks, setting, {Adapter: lambda module, _: seen.append(module)})
    assert len(seen) == 1
