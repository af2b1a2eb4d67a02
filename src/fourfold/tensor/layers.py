"""Other layers on the grid: embedding tables, norms, key heads shared by columns, cross entropy.

    table          W[V / (col · row), D]; a rank gathers its column's rows of W over row and looks up its tokens; the columns'
                   results are summed into the residual stream. Received: (row - 1) |W| + (col - 1) m D, forward and
                   backward. The output projection (flow `os`) has the same partition, so a tied weight is stored once.
    positions      replicated: [P, D], or a block of features; the same for token types
    norm           with features split, statistics over col: LayerNorm merges (mean, square sum) of all columns, which is stable,
                   RMSNorm sums squares; fp32 or fp64. With tokens split, the serial norm is used unchanged, as are norms of
                   queries and keys over each head; a norm over all heads (OLMo 2) reduces its statistics over col
    cross entropy  logits [n, V / col] are not communicated: a maximum and two sums per token over col

n tokens on this row, m = n / col. Padding: rows of W without a token; logits that count as -inf; features excluded from
statistics, with gradient 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.attention import Documents
from fourfold.model.head_loss import ChunkedLoss, VocabPart, gradients_later, losses_in_chunks
from fourfold.model.layers import IGNORE, PerHeadNorm
from fourfold.piece import Piece
from fourfold.tensor._torch import once_differentiable
from fourfold.tensor.blocks import Blocks, cut, even, make_pieces, round_up, single
from fourfold.tensor.flows import gather_columns, scatter_sum
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings

__all__ = ["GridCrossEntropy", "GridHeadNorm", "GridNorm", "GridPositions", "GridTable", "GridTypes", "SharedKeys"]


class GridTable(nn.Module):
    """Embedding lookup by token id, into the residual stream."""

    def __init__(self, setting: GridSettings, rows: int, residual: ActivationLayout):
        super().__init__()
        grid = setting.grid
        self.setting, self.residual, self.rows = setting, residual, even(rows, grid.col.size)
        held = round_up(self.rows.size, grid.row.size) // grid.row.size
        blocks = residual.blocks
        width = blocks.total if residual.tokens else blocks.parts * blocks.size
        self.weight = nn.Parameter(torch.empty(held, width, device="meta"))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        s = self.setting
        ids = tokens_bt.flatten() - s.grid.col.index * self.rows.size
        x = _Lookup.apply(ids, self.weight, s.grid, self.rows.size, self.residual, s.seq_len)
        return x if self.residual.tokens else x.unflatten(0, (-1, s.seq_len))

    def pieces(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        row, col = self.setting.grid.row, self.setting.grid.col
        rows, _ = cut(self.rows.runs[col.index], self.rows.size, row.size, row.index)
        width = self.residual.blocks.total
        shape = self.rows.total, width
        return {"weight": make_pieces(f"{prefix}.weight", shape, (rows, single(width)), self.setting.grid.copies())}


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, w: Tensor, grid: Grid, block: int, residual: ActivationLayout, seq_len: int
    ) -> Tensor:
        mine = (ids >= 0) & (ids < block)
        ctx.save_for_backward(torch.where(mine, ids, block))
        ctx.grid, ctx.block, ctx.residual, ctx.seq_len, ctx.dtype = grid, block, residual, seq_len, w.dtype
        found = F.embedding(torch.where(mine, ids, 0), grid.row.gather(w)[:block]) * mine[:, None]
        return scatter_sum(found, grid.col, residual.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        grid, block = ctx.grid, ctx.block
        d = gather_columns(dy, grid.col, ctx.residual.tokens, ctx.seq_len)
        rows = round_up(block, grid.row.size)  # ids of other columns are mapped to `block`, which is ignored
        dw = torch.ops.aten.embedding_dense_backward(_wide(d), ids, max(rows, block + 1), block, False)
        return None, grid.row.scatter(dw[:rows]).to(ctx.dtype), None, None, None, None


class GridPositions(nn.Module):
    """Learned position embedding of this rank's tokens, for the residual stream."""

    def __init__(self, setting: GridSettings, rows: int, residual: ActivationLayout):
        super().__init__()
        self.setting, self.residual, self.rows = setting, residual, rows
        width = residual.blocks.total if residual.tokens else residual.blocks.size
        self.weight = nn.Parameter(torch.empty(rows, width, device="meta"))

    def forward(self, tokens_bt: Tensor, documents: Documents | None = None) -> Tensor:
        if not self.residual.tokens:
            if documents is not None:
                return F.embedding(documents.positions, self.weight)
            return self.weight[: self.setting.seq_len]
        col = self.setting.grid.col
        m = round_up(tokens_bt.numel(), col.size) // col.size
        if documents is not None:  # positions of the rank's part of all tokens, which may end in padding
            places = F.pad(documents.positions.flatten(), (0, m * col.size - tokens_bt.numel()))
            return F.embedding(places[col.index * m : (col.index + 1) * m], self.weight)
        at = torch.arange(col.index * m, (col.index + 1) * m, device=tokens_bt.device) % self.setting.seq_len
        return F.embedding(at, self.weight)

    def pieces(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        grid, blocks = self.setting.grid, self.residual.blocks
        tokens = self.residual.tokens
        columns = single(blocks.total) if tokens else blocks.runs[grid.col.index]
        copies = grid.copies("row", "col") if tokens else grid.copies("row")
        return {
            "weight": make_pieces(f"{prefix}.weight", (self.rows, blocks.total), (single(self.rows), columns), copies)
        }


class GridTypes(GridPositions):
    """Token type embedding: the first type, for all tokens."""

    def forward(self, tokens_bt: Tensor, documents: Documents | None = None) -> Tensor:
        return self.weight[0]


class GridNorm(nn.Module):
    """LayerNorm (`centred`) or RMSNorm over features that are split over col. `plus_one`: the factor is 1 + weight."""

    def __init__(
        self, setting: GridSettings, blocks: Blocks, *, eps: float, centred: bool, bias: bool, plus_one: bool = False
    ):
        super().__init__()
        self.setting, self.blocks, self.eps, self.centred, self.plus_one = setting, blocks, eps, centred, plus_one
        self.weight = nn.Parameter(torch.empty(blocks.size, device="meta"))
        self.bias = nn.Parameter(torch.empty(blocks.size, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        col = self.setting.grid.col
        filled = tuple(self.blocks.filled(p) for p in range(col.size))
        return _Normalize.apply(x, self.weight, self.bias, col, filled, self.eps, self.centred, self.plus_one)

    def pieces(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        grid = self.setting.grid
        runs = (self.blocks.runs[grid.col.index],)
        shape, copies = (self.blocks.total,), grid.copies("row")
        names = ["weight"] if self.bias is None else ["weight", "bias"]
        return {n: make_pieces(f"{prefix}.{n}", shape, runs, copies) for n in names}


class GridHeadNorm(PerHeadNorm):
    """A norm over each head, with a separate weight per head, of this column's heads: no communication."""

    def __init__(self, setting: GridSettings, blocks: Blocks, serial: PerHeadNorm):
        super().__init__(blocks.size, serial.head_dim, serial.eps, centred=serial.centred)
        self.setting, self.blocks = setting, blocks
        self.weight = nn.Parameter(torch.empty(blocks.size, device="meta"))

    def pieces(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        grid = self.setting.grid
        runs = (self.blocks.runs[grid.col.index],)
        return {"weight": make_pieces(f"{prefix}.weight", (self.blocks.total,), runs, grid.copies("row"))}


class _Normalize(torch.autograd.Function):
    """(x - mean) / deviation · w + b over the features of all columns. Column p has `filled[p]` features; padding stays 0.

    Not `centred`: RMSNorm, without the mean. `plus_one`: 1 + w instead of w. Saved for the backward: x, and the statistics of
    every token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        col: Axis,
        filled: tuple[int, ...],
        eps: float,
        centred: bool,
        plus_one: bool,
    ) -> Tensor:
        mine, total = filled[col.index], sum(filled)
        used, mean = _wide(x)[..., :mine], None
        if centred:
            mean = used.sum(-1, keepdim=True) / max(mine, 1)
            squares = (used - mean).square().sum(-1, keepdim=True)
            parts = col.gather(torch.stack((mean, squares))).unflatten(0, (col.size, 2))
            counts = torch.tensor(filled, dtype=used.dtype, device=x.device).view(-1, *(1,) * x.dim())
            mean = (parts[:, 0] * counts).sum(0) / total
            variance = (parts[:, 1] + counts * (parts[:, 0] - mean).square()).sum(0) / total
        else:
            variance = col.sum(used.square().sum(-1, keepdim=True)) / total
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, w, mean, scale)
        ctx.col, ctx.mine, ctx.total, ctx.plus_one, ctx.has_bias = col, mine, total, plus_one, b is not None
        y = _normal(x, mean, scale, mine) * _factor(w, mine, plus_one)
        if b is not None:
            y = y + b[:mine]
        return F.pad(y, (0, x.shape[-1] - mine)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w, mean, scale = ctx.saved_tensors
        mine, padding = ctx.mine, (0, x.shape[-1] - ctx.mine)
        normal, dy_wide = _normal(x, mean, scale, mine), _wide(dy)[..., :mine]
        g = dy_wide * _factor(w, mine, ctx.plus_one)
        sums = [(g * normal).sum(-1, keepdim=True)]
        if mean is not None:
            sums.append(g.sum(-1, keepdim=True))
        means = ctx.col.sum(torch.stack(sums)) / ctx.total
        dx = (g - normal * means[0] - (means[1] if mean is not None else 0)) * scale
        dw = F.pad((dy_wide * normal).flatten(0, -2).sum(0), padding).to(w.dtype)
        db = F.pad(dy_wide.flatten(0, -2).sum(0), padding).to(w.dtype) if ctx.has_bias else None
        return F.pad(dx, padding).to(x.dtype), dw, db, None, None, None, None, None


def _factor(w: Tensor, mine: int, plus_one: bool) -> Tensor:
    return 1 + _wide(w)[:mine] if plus_one else w[:mine]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normal(x: Tensor, mean: Tensor | None, scale: Tensor, mine: int) -> Tensor:
    used = _wide(x)[..., :mine]
    return (used if mean is None else used - mean) * scale


class SharedKeys(GridLinear):
    """The q, k and v projection with fewer key heads than columns: features of k and v are divided evenly, and gathered.

    A rank uses one key head, that of its query heads. Received, forward and backward: (col - 1) n · 2 |k| elements, where
    |k| is a column's share of the key features.
    """

    def __init__(
        self,
        setting: GridSettings,
        inputs: ActivationLayout,
        blocks: tuple[Blocks, Blocks, Blocks],
        outputs: ActivationLayout,
        head: int | None,
        head_dim: int,
        *,
        bias: bool,
    ):
        super().__init__(setting, inputs, outputs, bias=bias, name="qkv")
        self.widths, self.head, self.head_dim = [b.size for b in blocks], head, head_dim
        self.key_features = blocks[1].total
        self.key_norm: tuple[
            nn.Module, ...
        ] = ()  # over all key heads; a tuple: its parameters belong to the attention part

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = super().forward(x).split(self.widths, dim=-1)
        col, at = self.setting.grid.col, (self.head or 0) * self.head_dim
        whole = _Gather.apply(torch.cat((k, v), -1).flatten(0, 1), col).unflatten(0, q.shape[:2])
        both = whole.unflatten(-1, (col.size, 2, -1)).transpose(-3, -2).flatten(-2)  # [B, T, 2, col · |k|]
        keys, values = both[..., 0, :], both[..., 1, :]
        for norm in self.key_norm:
            keys = norm(keys[..., : self.key_features])
        head = slice(at, at + self.head_dim)
        return torch.cat((q, keys[..., head], values[..., head]), -1)


class _Gather(torch.autograd.Function):
    """Features of all columns [n, col · k] on each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis) -> Tensor:
        ctx.col = col
        return gather_columns(x, col, False, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return scatter_sum(dy, ctx.col, False), None


class GridCrossEntropy(nn.Module):
    """Sum of the tokens' cross entropies, from logits split over col; equal on every column. Computed in at least fp32.

    `per_token`: return the cross entropies [B, T] instead.
    """

    per_token = False

    def __init__(self, setting: GridSettings, vocab: Blocks):
        super().__init__()
        self.col, self.vocab = setting.grid.col, vocab

    def forward(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        filled = self.vocab.filled(self.col.index)
        first = self.col.index * self.vocab.size
        targets_n, each = targets_bt.flatten(), self.per_token
        loss = _CrossEntropy.apply(logits_btv.flatten(0, 1), targets_n, self.col, first, filled, each)
        return loss.view_as(targets_bt) if each else loss

    def in_chunks(self, x: Tensor, proj: GridLinear, targets_bt: Tensor, how: ChunkedLoss) -> Tensor:
        """The same from what the projection (flow `os`) reads, without all of this column's logits at once."""
        part = VocabPart(self.vocab.filled(self.col.index), self.col.index * self.vocab.size, self.col)
        x = x if proj.inputs.tokens else x.flatten(0, -2)
        needs = torch.is_grad_enabled()
        each, at_once = self.per_token, how.at_once and not self.per_token
        loss = _InChunks.apply(x, proj.weight, proj.bias, targets_bt.flatten(), proj, how, part, each, at_once, needs)
        return loss.view_as(targets_bt) if each else loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, col: Axis, first: int, filled: int, per_token: bool
    ) -> Tensor:
        wide = _wide(logits)[:, :filled]
        lowest = torch.finfo(wide.dtype).min
        top = col.max(wide.amax(-1) if filled else wide.new_full(wide.shape[:1], lowest))
        shifted = _less(wide, top, logits)
        at = targets - first
        mine = (at >= 0) & (at < filled)
        at = torch.where(mine, at, 0)
        own = shifted.gather(1, at[:, None])[:, 0] * mine if filled else torch.zeros_like(top)
        sums = col.sum(torch.stack((shifted.exp_().sum(-1), own)))
        log_sum = sums[0].log()
        valid = targets != IGNORE
        ctx.save_for_backward(logits, top + log_sum, at, mine, valid)
        ctx.filled = filled
        losses_n = (log_sum - sums[1]) * valid
        return losses_n if per_token else losses_n.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        logits, log_total, at, mine, valid = ctx.saved_tensors
        d = _less(_wide(logits)[:, : ctx.filled], log_total, logits).exp_()
        if ctx.filled:
            d.scatter_add_(1, at[:, None], -mine.to(d.dtype)[:, None])
        d.mul_((dy * valid)[:, None])
        d, padded = d.to(logits.dtype), logits.shape[1] - ctx.filled
        return F.pad(d, (0, padded)) if padded else d, None, None, None, None, None


class _InChunks(torch.autograd.Function):
    """The projection and its loss; x is gathered over col and W over row once, not by chunk. See model/head_loss.py."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        targets: Tensor,
        proj: GridLinear,
        how: ChunkedLoss,
        part: VocabPart,
        per_token: bool,
        at_once: bool,
        needs: bool,
    ) -> Tensor:
        matmul, wanted = proj.matmul, ctx.needs_input_grad[:3]
        inputs, kept = matmul.gathered(x)
        wanted = wanted if needs and at_once else (False, False, False)
        losses, log_sums, grads = losses_in_chunks(inputs, proj.whole(), b, targets, how, part, wanted)
        ctx.proj, ctx.how, ctx.part, ctx.at_once = proj, how, part, at_once
        if at_once:
            dx = None if grads.h is None else matmul.scattered(grads.h).get()
            ctx.save_for_backward(dx, grads.w, grads.b)
        elif needs:
            ctx.save_for_backward(kept, b, targets, log_sums)
        return losses if per_token else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        proj, matmul = ctx.proj, ctx.proj.matmul
        if ctx.at_once:
            dx, dw, db = (None if g is None else g.mul_(grad) for g in ctx.saved_tensors)
        else:
            kept, b, targets, log_sums = ctx.saved_tensors
            inputs = matmul.inputs(kept).get()
            dx, dw, db = gradients_later(
                inputs, proj.whole(), b, targets, log_sums, grad, ctx.how, ctx.part, ctx.needs_input_grad[:3]
            )
            dx = None if dx is None else matmul.scattered(dx).get()
        if dw is not None:
            dw = proj.take_weight_product(dw)
        return dx, dw, db, None, None, None, None, None, None, None


def _less(wide: Tensor, amount: Tensor, source: Tensor) -> Tensor:
    """Subtract a number per token from `wide`: in place, unless it shares memory with `source`."""
    return wide.sub_(amount[:, None]) if wide.dtype != source.dtype else wide - amount[:, None]
