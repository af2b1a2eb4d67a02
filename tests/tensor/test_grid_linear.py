"""Linears on the grid: every flow, every grid, both ways of holding either side, sizes that do not divide."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.config import ModelConfig
from fourfold.errors import RankFailure
from fourfold.model.build import build_model
from fourfold.plan import Mesh, Plan
from fourfold.plan import Tensor as TensorPlan
from fourfold.tensor.blocks import Blocks, even, fuse, grouped_heads
from fourfold.tensor.costs import LinkSpeed, LinkSpeeds, MatmulSizes, Traffic, choose_flow, traffic
from fourfold.tensor.grid import Axis, Grid, PendingTensor
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings
from fourfold.tensor.products import flows_of_plan, products_of
from fourfold.tensor.swap import parallelize
from fourfold.testing.grid import run_grid
from fourfold.testing.ledger import Ledger
from fourfold.testing.ranks import run_ranks
from fourfold.train.mesh import RankMesh
from tests.tensor.common import CONFIGS, GRIDS, config_of, fill, gap, on_grid, restless_model, total_over

SEQ, SEQUENCES = 5, 2  # of a rank
ALL_FLOWS = ("os", "ls", "ws", "summa")


def hold(x: Tensor, side: ActivationLayout, place: tuple[int, int, int], degrees: tuple[int, int, int]) -> Tensor:
    """What a rank holds of serial activations [tokens, width]."""
    (k, i, j), (d, r, c) = place, degrees
    mine = x.chunk(d * r)[k * r + i]
    n, width = mine.shape
    if side.tokens:
        m = -(-n // c)
        out = torch.zeros(m, width, dtype=x.dtype)
        part = mine[j * m : (j + 1) * m]
        out[: part.shape[0]] = part
        return out
    out = torch.zeros(n, side.blocks.size, dtype=x.dtype)
    for start, stop, at in side.blocks.runs[j]:
        out[:, at : at + stop - start] = mine[:, start:stop]
    return out.unflatten(0, (-1, SEQ))


def sides(col: int, inputs: int, outputs: int) -> list[tuple[ActivationLayout, ActivationLayout]]:
    """Out of the residual stream, held in both ways, and back to it, and from it to it; blocks with padding in the middle."""

    def three(width: int) -> tuple[ActivationLayout, ActivationLayout, ActivationLayout]:
        inside = ActivationLayout(fuse(even(width // 3, col), even(width - width // 3, col)))
        return ActivationLayout(even(width, col), tokens=True), ActivationLayout(even(width, col)), inside

    (t, f, i), (to, fo, io) = three(inputs), three(outputs)
    return [(t, io), (i, to), (f, io), (i, fo), (t, to), (t, fo), (f, to)]


def worst_linear(degrees: tuple[int, int, int], flow: str, wide: bool) -> float:
    """The largest difference from a serial linear, on any rank."""
    inputs, outputs = (14, 22) if wide else (22, 14)
    serial = nn.Linear(inputs, outputs, dtype=torch.float64)
    tokens = degrees[0] * degrees[1] * SEQUENCES * SEQ
    x = torch.randn(tokens, inputs, dtype=torch.float64, requires_grad=True)  # other data on every plane and row
    dy = torch.randn(tokens, outputs, dtype=torch.float64)
    y = serial(x)
    y.backward(dy)
    return max(run_grid(check_linear, *degrees, degrees, flow, serial, x, y.detach(), dy))


def check_linear(
    place: tuple[int, int, int],
    grid: Grid,
    depth: Axis,
    degrees: tuple[int, int, int],
    flow: str,
    serial: nn.Linear,
    x: Tensor,
    y: Tensor,
    dy: Tensor,
) -> float:
    (outputs, inputs), c, worst = serial.weight.shape, degrees[2], 0.0
    assert x.grad is not None
    setting = GridSettings(grid, SEQ, SEQUENCES * SEQ, flow, compute_bytes=8, reduce_bytes=8)
    for ins, outs in sides(c, inputs, outputs):
        linear = GridLinear(setting, ins, outs, bias=True).to(torch.float64).to_empty(device="cpu")
        pieces = linear.pieces("l")
        for name, p in linear.named_parameters():
            fill(p, pieces[name], getattr(serial, name).detach())
        mine = hold(x.detach(), ins, place, degrees).requires_grad_()
        found = linear(mine)
        expected = hold(y, outs, place, degrees)
        real = hold(torch.ones_like(y), outs, place, degrees)  # padding tokens hold the bias, and are not read
        worst = max(worst, float(((found.detach() - expected) * real).abs().max()))
        found.backward(hold(dy, outs, place, degrees))
        assert mine.grad is not None
        worst = max(worst, float((mine.grad - hold(x.grad, ins, place, degrees)).abs().max()))
        for name, p in linear.named_parameters():
            assert p.grad is not None
            total = total_over(p.grad, pieces[name], grid, depth)
            worst = max(worst, gap(total, pieces[name], getattr(serial, name).grad))
    return worst


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_linear_equals_serial(degrees: tuple[int, int, int]) -> None:
    for number, flow in enumerate(ALL_FLOWS):
        if flow != "summa" or degrees[1] == degrees[2]:
            assert worst_linear(degrees, flow, wide=(number + sum(degrees)) % 2 == 0) < 1e-10, flow


def test_summa_on_sixty_four_ranks() -> None:
    assert worst_linear((4, 4, 4), "summa", wide=True) < 1e-10


def test_linear_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sum over depth, over row, or with the bias added by every column, nothing matches."""
    whole = GridLinear.forward

    def bias_twice(self: GridLinear, x: Tensor) -> Tensor:
        assert self.bias is not None
        return whole(self, x) + self.bias

    breaks = (
        ("depth", lambda m: m.setattr("tests.tensor.test_grid_linear.total_over", lambda g, *_: g)),
        ("row", lambda m: m.setattr("fourfold.tensor.flows.Matmul.row_sum", _no_row_sum)),
        ("bias", lambda m: m.setattr(GridLinear, "forward", bias_twice)),
    )
    for _, breakage in breaks:
        with monkeypatch.context() as m:
            breakage(m)
            assert worst_linear((2, 2, 2), "os", True) > 1e-3


def _no_row_sum(self: Any, dw: Tensor) -> PendingTensor:
    row = self.grid.row
    return PendingTensor(dw.chunk(row.size)[row.index])


def test_ranks_that_disagree_are_named() -> None:
    def uneven(place: tuple[int, int, int], grid: Grid, depth: Axis) -> None:
        grid.col.gather(torch.zeros(1 + place[2]))

    with pytest.raises(RankFailure, match="failed first"):
        run_grid(uneven, 1, 1, 2)


# ---- bytes and calls, in real processes ----


def count_linears(rank: int, ranks: int, grids: list[tuple[int, int, int]]) -> list[str]:
    """Compare what the ledger saw with the formulas; returns what differs."""
    wrong = []
    for degrees in grids:
        d, r, c = degrees
        mesh = RankMesh(Mesh(depth=d, row=r, col=c), rank)
        row, col = (Axis(a, mesh.size(a), mesh.coordinates[a], mesh.group(a)) for a in ("row", "col"))
        grid = Grid(row, col, ("depth",) if d > 1 else ())
        place = mesh.coordinates["depth"], mesh.coordinates["row"], mesh.coordinates["col"]
        for flow in ALL_FLOWS:
            if flow == "summa" and r != c:
                continue
            for number, (ins, outs) in enumerate(sides(c, 14, 22)):
                keep = frozenset(("inputs",) if number % 2 else ())
                setting = GridSettings(grid, SEQ, SEQUENCES * SEQ, flow, keep=keep)
                linear = GridLinear(setting, ins, outs, bias=False).to_empty(device="cpu")
                nn.init.normal_(linear.weight)
                x = hold(torch.randn(d * r * SEQUENCES * SEQ, 14), ins, place, degrees).requires_grad_()
                with Ledger() as forward:
                    y = linear(x)
                with Ledger() as backward:
                    y.backward(torch.ones_like(y))
                t = traffic(linear.matmul.sizes, linear.matmul.flow, keep)
                expected = (
                    4 * (t.activations_forward + t.weights_forward),
                    4 * (t.activations_backward + t.weights_backward + t.weight_grads),
                    t.calls_forward,
                    t.calls_backward,
                )
                found = (forward.received, backward.received, forward.calls(), backward.calls())
                if found != expected:
                    wrong.append(f"{degrees} {linear.matmul.flow} {ins.tokens} {outs.tokens}: {found} != {expected}")
    return wrong


def test_bytes_and_calls_equal_the_formulas() -> None:
    for ranks, grids in ((8, [(2, 2, 2), (1, 2, 4), (1, 4, 2)]), (6, [(1, 3, 2)])):
        for found in run_ranks(count_linears, ranks, grids):
            assert found == []


def measure_layer(
    rank: int, ranks: int, cases: list[tuple[int, int, str, bool, bool]], h: int
) -> list[tuple[float, float, int, int]]:
    """Elements received and calls, forward and backward, of the linears of a GPT block, for each (row, col, flow, …)."""
    found = []
    for r, c, flow, tokens, keep in cases:
        mesh = RankMesh(Mesh(row=r, col=c), rank)
        row, col = (Axis(a, mesh.size(a), mesh.coordinates[a], mesh.group(a)) for a in ("row", "col"))
        setting = GridSettings(Grid(row, col), SEQ, 8 * SEQ, flow, keep=frozenset(("inputs",) if keep else ()))
        residual = ActivationLayout(even(h, c), tokens=tokens)
        with Ledger() as forward:
            outs = []
            for ins, to in ((residual, 3), (1, residual), (residual, 4), (4, residual)):
                into = ins if isinstance(ins, ActivationLayout) else ActivationLayout(even(ins * h, c))
                out = to if isinstance(to, ActivationLayout) else ActivationLayout(even(to * h, c))
                linear = GridLinear(setting, into, out, bias=False).to_empty(device="cpu")
                nn.init.normal_(linear.weight)
                shape = (8 * SEQ // c, h) if into.tokens else (8, SEQ, into.blocks.size)
                outs.append(linear(torch.zeros(shape, requires_grad=True)))
        with Ledger() as backward:
            for y in reversed(outs):
                y.backward(torch.ones_like(y))
        found.append((forward.received / 4, backward.received / 4, forward.calls(), backward.calls()))
    return found


def test_measured_bytes_are_those_of_megatron_and_optimus() -> None:
    """On one row, what Megatron's sequence parallelism moves (which gathers inputs again, or keeps them); by `summa` on one
    plane, what Optimus moves. In real processes."""
    h, n = 24, 8 * SEQ  # tokens of a row
    cases = [(1, 4, "auto", True, False), (1, 4, "auto", True, True), (2, 2, "summa", False, False)]
    for found in run_ranks(measure_layer, 4, cases, h):
        once = 3 * n * h / 4
        assert found[0] == (4 * once, 6 * once, 4, 6)
        assert found[1] == (4 * once, 4 * once, 4, 4)
        optimus = 7 * 2 * n * h / 4 + 12 * h * h / 4  # (q - 1) / q · (7 T h / q + 12 h² / q), T = 2 n, q = 2
        assert found[2] == (optimus, 2 * optimus, 4 * 4, 4 * 8)


# ---- the formulas themselves ----


FREE_CALLS = LinkSpeeds(LinkSpeed(call=0.0), LinkSpeed(call=0.0))


def layer(n: int, h: int, r: int, c: int, flow: str, tokens: bool) -> Traffic:
    """The linears of a GPT block, 12 h² weights: (inputs, outputs) in units of h, out of the residual stream or back to it."""
    total = Traffic()
    for k, b in ((1, 3), (1, 1), (1, 4), (4, 1)):
        back = (k, b) in ((1, 1), (4, 1))
        sizes = MatmulSizes(n, k * h, b * h, k * h // c, b * h // c, tokens and not back, tokens and back, r, c)
        total += traffic(sizes, choose_flow(sizes, flow, 1, 1, links=FREE_CALLS) if flow == "auto" else flow)
    return total


def forward(t: Traffic) -> int:
    return t.activations_forward + t.weights_forward


def backward(t: Traffic) -> int:
    return t.activations_backward + t.weights_backward + t.weight_grads


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_single_row_moves_what_megatron_with_sequence_parallelism_moves(c: int) -> None:
    tokens, h = 4096, 256
    t = layer(tokens, h, 1, c, "auto", True)
    assert forward(t) == 4 * (c - 1) * tokens * h // c
    assert backward(t) == 6 * (c - 1) * tokens * h // c
    assert (t.calls_forward, t.calls_backward) == (4, 6)


@pytest.mark.parametrize("q", [2, 4])
def test_summa_on_one_plane_moves_what_optimus_moves(q: int) -> None:
    tokens, h = 4096, 256  # of the plane
    t = layer(tokens // q, h, q, q, "summa", False)
    assert forward(t) == (q - 1) * (7 * tokens * h // q + 12 * h * h // q) // q
    assert backward(t) == 2 * forward(t)
    assert (t.calls_forward, t.calls_backward) == (4 * 2 * q, 4 * 4 * q)


def test_auto_moves_half_of_what_summa_moves_where_tokens_are_many() -> None:
    tokens, h, q = 131072 // 4, 8192, 4  # of a plane of [4, 4, 4]
    auto, summa = layer(tokens // q, h, q, q, "auto", True), layer(tokens // q, h, q, q, "summa", False)
    assert auto.activations_forward + auto.activations_backward == 10 * (q - 1) * tokens * h // q**2
    assert summa.activations_forward + summa.activations_backward == 21 * (q - 1) * tokens * h // q**2


def test_auto_is_never_worse_than_any_one_flow() -> None:
    """Where calls cost nothing, it has the fewest bytes."""
    for n, r, c, tokens in itertools.product((64, 1024, 65536), (1, 2, 4), (1, 2, 4), (True, False)):
        best = layer(n, 512, r, c, "auto", tokens)
        for flow in ("os", "ls", "ws-in", "ws-out"):
            assert best.bytes(1, 1) <= layer(n, 512, r, c, flow, tokens).bytes(1, 1)


def test_keeping_saves_what_would_move_again() -> None:
    """Inputs: a gather in the backward. Weights: all gathers but one a step. Gradients: all sums but one a step."""
    p = MatmulSizes(64, 16, 48, 4, 12, True, False, 2, 4)
    plain, w, x = traffic(p, "os", (), 3), 6 * 16, 3 * 16 * 16
    assert traffic(p, "os", ("inputs",), 3) == plain + Traffic(activations_backward=-3 * x, calls_backward=-3)
    kept = Traffic(weights_forward=-2 * w, weights_backward=-3 * w, calls_forward=-2, calls_backward=-3)
    assert traffic(p, "os", ("weights",), 3) == plain + kept
    assert traffic(p, "os", ("gradients",), 3) == plain + Traffic(weight_grads=-2 * w, calls_backward=-2)
    for flow in ("ws-in", "ws-out"):
        assert traffic(p, flow, ("weights", "gradients"), 3) == traffic(p, flow, (), 3)


def test_the_links_decide() -> None:
    """Weights that move over a slow row, or activations over a slow column; dear calls; what hides and what does not."""
    p = MatmulSizes(2048, 4096, 12288, 1024, 3072, True, False, 4, 4)
    fast, slow = LinkSpeed(400e9, 1e-5), LinkSpeed(5e9, 3e-5)
    assert choose_flow(p, "auto", 2, 4, links=LinkSpeeds(slow, slow)) == "os"
    assert choose_flow(p, "auto", 2, 4, links=LinkSpeeds(fast, slow)) == "os"
    few = dataclasses.replace(p, n=512)
    assert choose_flow(few, "auto", 2, 4, links=LinkSpeeds(slow, fast)) == "ws-out"
    assert (
        choose_flow(few, "auto", 2, 4, links=LinkSpeeds(slow, fast), keep=("weights", "gradients"), micro_batches=8)
        == "os"
    )
    assert choose_flow(few, "auto", 2, 4, links=LinkSpeeds(slow, fast), overlappable=1.0) == "os"  # all of it overlaps
    back = MatmulSizes(64, 256, 256, 64, 64, False, True, 4, 4)
    dear = LinkSpeed(400e9, 1e-2)
    assert choose_flow(back, "auto", 2, 4, links=LinkSpeeds(dear, dear)) == "ls"


def test_products_of_a_config_are_those_of_the_model() -> None:
    for name, residual, (r, c) in itertools.product(CONFIGS, ("sequence", "hidden"), ((1, 2), (2, 4), (4, 1))):
        m = config_of(name)
        model = build_model(m)
        grid = Grid(Axis("row", r), Axis("col", c))
        parallelize(model, GridSettings(grid, m.seq_len, 3 * m.seq_len, residual=residual))
        expected = products_of(m, r, c, 3 * m.seq_len, residual)
        linears = {n.rpartition(".")[2]: x.matmul for n, x in model.named_modules() if isinstance(x, GridLinear)}
        assert {n: x.sizes for n, x in linears.items()} == expected, (name, residual, r, c)
        plan = Plan(mesh=Mesh(row=r, col=c), tensor=TensorPlan(residual=residual))  # type: ignore[arg-type]
        assert {n: (x.sizes, x.flow) for n, x in linears.items()} == flows_of_plan(m, plan, 3 * r)


def test_few_tokens_leave_the_weights_where_they_are() -> None:
    sizes = MatmulSizes(8, 4096, 4096, 1024, 1024, True, False, 4, 4)
    assert choose_flow(sizes, "auto", 2, 4) == "ws-in"
    assert choose_flow(sizes, "auto", 2, 4, moves_output=False) == "os"


def test_blocks_cover_every_element_once() -> None:
    q, k, shared = grouped_heads(6, 3, 4, 2)
    assert q.runs == (((0, 16, 0),), ((16, 24, 0),))
    assert k.runs == (((0, 8, 0),), ((8, 12, 0),))
    assert shared == (None, None)
    q, k, shared = grouped_heads(10, 2, 2, 4)  # five queries to a key: three and two
    assert q.runs == (((0, 6, 0),), ((6, 10, 0),), ((10, 16, 0),), ((16, 20, 0),))
    assert shared == (0, 0, 1, 1)
    cases: list[Blocks] = [even(n, p, g) for n, p, g in ((12, 5, 1), (12, 5, 3), (3, 4, 1), (7, 1, 7))]
    cases += [fuse(even(7, 3), even(5, 3)), *grouped_heads(12, 3, 2, 5)[:2], *grouped_heads(8, 8, 3, 3)[:2]]
    for blocks in cases:
        seen = [e for runs in blocks.runs for start, stop, _ in runs for e in range(start, stop)]
        assert sorted(seen) == list(range(blocks.total))
        assert all(at >= 0 and at + stop - start <= blocks.size for runs in blocks.runs for start, stop, at in runs)


# ---- what is kept for the backward ----


def test_nothing_gathered_is_saved() -> None:
    def note(kept: dict[int, int], t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.numel()
        return t

    def check(place: tuple[int, int, int], grid: Grid, depth: Axis, flow: str) -> None:
        setting = GridSettings(grid, SEQ, SEQUENCES * SEQ, flow)
        for ins, outs in sides(2, 16, 12)[4:]:
            linear = GridLinear(setting, ins, outs, bias=False).to_empty(device="cpu")
            x = hold(torch.randn(SEQUENCES * SEQ * 4, 16), ins, place, (2, 2, 2)).requires_grad_()
            kept: dict[int, int] = {}
            with torch.autograd.graph.saved_tensors_hooks(functools.partial(note, kept), lambda t: t):
                linear(x)
            assert sum(kept.values()) == SEQUENCES * SEQ * 16 // 2 + 16 * 12 // 4  # x / (depth row col), W / (row col)

    for flow in ALL_FLOWS:
        run_grid(check, 2, 2, 2, flow)


# ---- the rest of a model, counted ----


def count_model(rank: int, ranks: int, residual: str) -> list[str]:
    """A GPT with one block on 2 rows and 2 columns: the linears' formulas, and those of table, norms and cross entropy."""
    mesh = RankMesh(Mesh(row=2, col=2), rank)
    row, col = (Axis(a, 2, mesh.coordinates[a], mesh.group(a)) for a in ("row", "col"))
    config = ModelConfig(family="gpt", layers=1, hidden=16, heads=4, seq_len=6, vocab=64).resolve()
    model, _ = on_grid(restless_model(config), Grid(row, col), residual=residual)
    n, m, d = 12, 6, 16
    tokens = torch.randint(0, 64, (2, 6))
    with Ledger() as forward:
        loss = model(tokens, tokens)
    with Ledger() as backward:
        loss.backward()
    linears = [module.matmul for module in model.modules() if isinstance(module, GridLinear)]
    assert len(linears) == 5
    t = sum((traffic(x.sizes, x.flow) for x in linears), Traffic())
    table, loss_sums = 64 * d // 4 + m * d, 3 * n  # all-reduces of two ranks receive what they hold
    norms = (3 * 2 * n, 3 * 2 * n) if residual == "hidden" else (0, 0)
    expected = (
        8 * (t.activations_forward + t.weights_forward + table + loss_sums + norms[0]),
        8 * (t.activations_backward + t.weights_backward + t.weight_grads + table + norms[1]),
        t.calls_forward + 2 + 2 + (3 if residual == "hidden" else 0),
        t.calls_backward + 2 + (3 if residual == "hidden" else 0),
    )
    found = (forward.received, backward.received, forward.calls(), backward.calls())
    return [] if found == expected else [f"{residual}: {found} != {expected}"]


@pytest.mark.parametrize("residual", ["sequence", "hidden"])
def test_bytes_of_a_model_equal_the_formulas(residual: str) -> None:
    for found in run_ranks(count_model, 4, residual):
        assert found == []
