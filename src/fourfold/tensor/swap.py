"""Puts a serial model on the grid: replaces its modules in place, by type.

    model = build_model(config)                               # no storage yet
    parallelize(model, GridSettings(grid, seq_len=…, tokens=…))    # its linears, tables, norms and loss are now this rank's
    pieces_of(model.embed, "embed", grid)                     # which parts of which serial parameters

The rules for attention, MLP, embedding and head are below. A rule is a function of the module and the setting that replaces the
module's children. A module of another type with parameters needs its own rule, otherwise it is refused by name. Modules without
parameters, and containers, are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fourfold.errors import PlanError
from fourfold.model.adapter import LoraLinear
from fourfold.model.layers import MLP, Attention, Embedding, Head, PerHeadNorm, PlusOneNorm, Positions, TokenTypes
from fourfold.piece import Piece, whole
from fourfold.tensor.blocks import Blocks, even, fuse, grouped_heads
from fourfold.tensor.grid import Grid
from fourfold.tensor.layers import (
    GridCrossEntropy,
    GridHeadNorm,
    GridNorm,
    GridPositions,
    GridTable,
    GridTypes,
    SharedKeys,
)
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings

__all__ = ["GRID_MODULES", "Rule", "parallelize", "pieces_of", "residual_side", "swap_norm"]

Rule = Callable[[nn.Module, GridSettings], None]
GRID_MODULES = (GridLinear, GridTable, GridPositions, GridNorm, GridHeadNorm)
"""Modules that know the pieces of their parameters."""


def parallelize(model: nn.Module, setting: GridSettings, rules: Mapping[type, Rule] | None = None) -> None:
    """Put `model` on the grid. `rules` add to ours, or replace them, by the type of the module."""
    known = {Attention: _attention, MLP: _mlp, Embedding: _embedding, Head: _head, **(rules or {})}
    _walk("", model, setting, known)


def _walk(name: str, module: nn.Module, setting: GridSettings, rules: Mapping[type, Rule]) -> None:
    rule = rules.get(type(module))
    if rule is not None:
        rule(module, setting)
        return
    if own := [n for n, _ in module.named_parameters(recurse=False)]:
        kind = type(module).__name__
        raise PlanError(
            f"'{name}' is a {kind} with parameters ({', '.join(own)}), and there is no rule to put it on a grid: pass "
            f"parallelize(…, rules={{{kind}: rule}}), where rule(module, setting) replaces its children, or use a plan "
            f"without depth, row and col"
        )
    for child_name, child in module.named_children():
        _walk(f"{name}.{child_name}".lstrip("."), child, setting, rules)


def pieces_of(module: nn.Module, prefix: str, grid: Grid) -> dict[str, tuple[Piece, ...]]:
    """The pieces of every parameter of `module` (serial name `prefix`); parameters outside grid modules are replicated."""
    found: dict[str, tuple[Piece, ...]] = {}
    for name, child in module.named_modules():
        inner = f"{name}." if name else ""
        if isinstance(child, GRID_MODULES):
            found |= {inner + n: p for n, p in child.pieces(f"{prefix}.{name}" if name else prefix).items()}
        else:
            for n, parameter in child.named_parameters(recurse=False):
                if inner + n in found:  # an adapter's: its linear has returned them
                    continue
                copies = grid.copies("row", "col")
                found[inner + n] = (whole(f"{prefix}.{inner}{n}", tuple(parameter.shape), copies),)
    return found


def residual_side(setting: GridSettings, width: int) -> ActivationLayout:
    """The layout of the residual stream."""
    return ActivationLayout(even(width, setting.grid.col.size), tokens=setting.residual == "sequence")


def swap_norm(norm: nn.Module, setting: GridSettings) -> nn.Module:
    """A norm over the residual stream: itself, unless its features are split."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    side = residual_side(setting, norm.normalized_shape[0])
    if side.tokens:
        return norm
    return grid_norm(norm, setting, side.blocks)


def grid_norm(norm: nn.Module, setting: GridSettings, blocks: Blocks) -> GridNorm:
    """A norm over features that are split over the columns, in `blocks`."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    return GridNorm(
        setting,
        blocks,
        eps=norm.eps,
        centred=isinstance(norm, nn.LayerNorm),
        bias=getattr(norm, "bias", None) is not None,
        plus_one=isinstance(norm, PlusOneNorm),
    )


def _linear(module: nn.Module) -> tuple[int, int, bool]:
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features, module.bias is not None


def _adopt(linear: GridLinear, serial: nn.Module) -> GridLinear:
    """A linear on the grid, with an adapter if the serial one has one."""
    if isinstance(serial, LoraLinear):
        linear.adapt(serial.adapter.shape)
    return linear


def _attention(a: nn.Module, s: GridSettings) -> None:
    assert isinstance(a, Attention)
    width, _, qkv_bias = _linear(a.qkv)
    residual, col = residual_side(s, width), s.grid.col
    heads, kv_heads = a.widths[0] // a.head_dim, a.widths[1] // a.head_dim
    q, k, shared = grouped_heads(heads, kv_heads, a.head_dim, col.size)
    inside, sharing = ActivationLayout(fuse(q, k, k)), kv_heads < col.size
    if sharing:
        qkv: GridLinear = SharedKeys(s, residual, (q, k, k), inside, shared[col.index], a.head_dim, bias=qkv_bias)
    else:
        qkv = GridLinear(s, residual, inside, bias=qkv_bias, name="qkv")
    a.qkv = _adopt(qkv, a.qkv)
    keys = a.head_dim if sharing else k.size
    a.widths, a.grouped = (q.size, keys, keys), q.size != keys
    out = GridLinear(s, ActivationLayout(q), residual, bias=_linear(a.out)[2], name="out", trim=sharing)
    a.out = _adopt(out, a.out)
    _swap_norms(a, s)
    if a.q_norm is not None and not a.norms_heads:
        a.q_norm = _features_norm(a.q_norm, s, q)
        if not isinstance(a.qkv, SharedKeys):
            assert a.k_norm is not None
            a.k_norm = _features_norm(a.k_norm, s, k)
        elif a.k_norm is not None:  # SharedKeys gathers all keys and normalises them before each column selects its own
            a.qkv.key_norm, a.norms_keys = (a.k_norm,), False


def _features_norm(norm: nn.Module, s: GridSettings, blocks: Blocks) -> nn.Module:
    """A norm of queries or keys whose heads are split over the columns."""
    return GridHeadNorm(s, blocks, norm) if isinstance(norm, PerHeadNorm) else grid_norm(norm, s, blocks)


def _swap_norms(part: Attention | MLP, s: GridSettings) -> None:
    if part.norm is not None:
        part.norm = swap_norm(part.norm, s)
    if part.out_norm is not None:
        part.out_norm = swap_norm(part.out_norm, s)


def _mlp(m: nn.Module, s: GridSettings) -> None:
    assert isinstance(m, MLP)
    width, wide, bias = _linear(m.up)
    inner = _linear(m.down)[0]
    residual, block = residual_side(s, width), even(inner, s.grid.col.size)
    up = GridLinear(s, residual, ActivationLayout(fuse(*[block] * (wide // inner))), bias=bias, name="up")
    m.up = _adopt(up, m.up)
    m.down = _adopt(GridLinear(s, ActivationLayout(block), residual, bias=bias, name="down"), m.down)
    _swap_norms(m, s)


def _embedding(e: nn.Module, s: GridSettings) -> None:
    assert isinstance(e, Embedding)
    assert isinstance(e.tokens, nn.Embedding)
    residual = residual_side(s, e.tokens.embedding_dim)
    if e.positions is not None:
        assert isinstance(e.positions, Positions)
        e.positions = GridPositions(s, e.positions.num_embeddings, residual)
    if e.types is not None:
        assert isinstance(e.types, TokenTypes)
        e.types = GridTypes(s, e.types.num_embeddings, residual)
    e.tokens = GridTable(s, e.tokens.num_embeddings, residual)
    if e.norm is not None:
        e.norm = swap_norm(e.norm, s)


def _head(h: nn.Module, s: GridSettings) -> None:
    assert isinstance(h, Head)
    width, vocab, bias = _linear(h.proj)
    residual, words = residual_side(s, width), even(vocab, s.grid.col.size)
    if h.dense is not None:
        h.dense = _adopt(GridLinear(s, residual, residual, bias=True, name="dense"), h.dense)
    h.norm = swap_norm(h.norm, s)
    flow = "os" if h.tied else None
    h.proj = GridLinear(s, residual, ActivationLayout(words), bias=bias, name="proj", flow=flow, moves_output=False)
    h.loss = GridCrossEntropy(s, words)
