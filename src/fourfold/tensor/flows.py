"""The flows: how a matrix product moves over a plane of the grid, forward and backward, on plain local tensors.

Shapes, costs and the two ways of holding activations (tokens, features) are in costs.py. A flow is three functions:

    forward(x, w) -> y              input_grad(dy, w) -> dx, kept              weight_grad(x, kept, dtype) -> dw

`x` is what the rank holds, nothing gathered is kept for the backward. `kept` is the gradient of y as the weight gradient needs
it, gathered where it had to be for dx. So a weight gradient can be computed at once, or put off until W; its sum over row is
done in `dtype` (fp32 or wider), and is part of it. The sum over depth and data is the unit's reduction.

Letters: n tokens of this row, m = n / col (rounded up, padded with zeros), r = row, c = col.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.tensor.blocks import round_up
from fourfold.tensor.costs import Product
from fourfold.tensor.grid import Axis, Grid

__all__ = ["Matmul", "join", "multiply", "scatter_sum", "to_features", "to_tokens", "tokens_in"]


def tokens_in(rows: int, col: Axis, seq_len: int) -> int:
    """Tokens of whole sequences in col · rows places; the rest is padding, less than a sequence."""
    return rows * col.size // seq_len * seq_len


# ---- tokens and features: [m, width] and [n, block] ----


def join(x: Tensor, col: Axis, tokens: bool, seq_len: int) -> Tensor:
    """Everything the columns hold, on each of them: [n, width]."""
    whole = col.gather(x)
    if tokens:
        return whole[: tokens_in(x.shape[0], col, seq_len)]
    return _side_by_side(whole, col.size)


def scatter_sum(x: Tensor, col: Axis, tokens: bool) -> Tensor:
    """The sum over columns of x [n, width], each keeping its tokens [m, width] or features [n, width / c]."""
    if tokens:
        return col.scatter(_pad(x, round_up(x.shape[0], col.size)))
    return col.scatter(_stacked(x, col.size))


def _swap_to_features(x: Tensor, col: Axis, block: int, seq_len: int) -> Tensor:
    n = tokens_in(x.shape[0], col, seq_len)
    return col.exchange(_stacked(F.pad(x, (0, col.size * block - x.shape[1])), col.size))[:n]


def _swap_to_tokens(x: Tensor, col: Axis, width: int) -> Tensor:
    whole = col.exchange(_pad(x, round_up(x.shape[0], col.size)))
    return _side_by_side(whole, col.size)[:, :width]


def _side_by_side(x: Tensor, parts: int) -> Tensor:
    """[parts · a, b] to [a, parts · b]."""
    return x if parts == 1 else x.unflatten(0, (parts, -1)).transpose(0, 1).flatten(1)


def _stacked(x: Tensor, parts: int) -> Tensor:
    """[a, parts · b] to [parts · a, b]."""
    return x if parts == 1 else x.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 1)


def _pad(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


class _ToFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, block: int, seq_len: int) -> Tensor:
        ctx.col, ctx.width = col, x.shape[1]
        return _swap_to_features(x, col, block, seq_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _swap_to_tokens(dy, ctx.col, ctx.width), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, width: int, seq_len: int) -> Tensor:
        ctx.col, ctx.block, ctx.seq_len = col, x.shape[1], seq_len
        return _swap_to_tokens(x, col, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _swap_to_features(dy, ctx.col, ctx.block, ctx.seq_len), None, None, None


def to_features(x: Tensor, col: Axis, block: int, seq_len: int) -> Tensor:
    """[m, width] to [n, block]; an all-to-all."""
    return x if col.size == 1 else _ToFeatures.apply(x, col, block, seq_len)


def to_tokens(x: Tensor, col: Axis, width: int, seq_len: int) -> Tensor:
    """[n, block] to [m, width]; an all-to-all."""
    return x if col.size == 1 else _ToTokens.apply(x, col, width, seq_len)


# ---- the flows ----


@dataclass(frozen=True)
class Matmul:
    """A product on the grid by one flow."""

    flow: str
    grid: Grid
    sizes: Product
    seq_len: int

    @property
    def takes_tokens(self) -> bool:
        return {"os": self.sizes.in_tokens, "ws-in": True}.get(self.flow, False)

    @property
    def gives_tokens(self) -> bool:
        return {"ls": self.sizes.out_tokens, "ws-out": True}.get(self.flow, False)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        row, col = self.grid.row, self.grid.col
        match self.flow:
            case "os":
                return self._join_in(x) @ self._whole(w).t()
            case "ls":
                return scatter_sum(x @ self._whole(w).t(), col, self.gives_tokens)
            case "ws-in":
                return row.scatter((self._spread(x) @ w.t()).flatten(0, 1))
            case "ws-out":
                return self._collect(row.gather(x).unflatten(0, (row.size, -1)) @ w.t(), self._width_out)
            case _:
                y = col.broadcast(x, 0) @ row.broadcast(w, 0).t()
                for t in range(1, col.size):
                    y = y + col.broadcast(x, t) @ row.broadcast(w, t).t()
                return y

    def input_grad(self, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        row, col = self.grid.row, self.grid.col
        match self.flow:
            case "os":
                return scatter_sum(dy @ self._whole(w), col, self.takes_tokens), dy
            case "ls":
                whole = join(dy, col, self.gives_tokens, self.seq_len)
                return whole @ self._whole(w), whole
            case "ws-in":
                whole = row.gather(dy)
                return self._collect(whole.unflatten(0, (row.size, -1)) @ w, self._width_in), whole
            case "ws-out":
                spread = self._spread(dy)
                return row.scatter((spread @ w).flatten(0, 1)), spread.flatten(0, 1)
            case _:
                dx = dy
                for t in range(col.size):
                    part = col.reduce(dy @ row.broadcast(w, t), t)
                    dx = part if t == col.index else dx
                return dx, dy

    def weight_grad(self, x: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
        row, col = self.grid.row, self.grid.col
        match self.flow:
            case "os":
                return self._row_sum(kept.t() @ self._join_in(x), dtype)
            case "ls":
                return self._row_sum(kept.t() @ x, dtype)
            case "ws-in":
                return (kept.t() @ self._spread(x).flatten(0, 1)).to(dtype)
            case "ws-out":
                return (kept.t() @ row.gather(x)).to(dtype)
            case _:
                dw = kept
                for t in range(col.size):
                    part = row.reduce((kept.t() @ col.broadcast(x, t)).to(dtype), t)
                    dw = part if t == row.index else dw
                return dw

    # ---- parts of them ----

    @property
    def _width_in(self) -> int:
        return self.sizes.inputs if self.sizes.in_tokens else self.sizes.col * self.sizes.k

    @property
    def _width_out(self) -> int:
        return self.sizes.outputs if self.sizes.out_tokens else self.sizes.col * self.sizes.b

    def _join_in(self, x: Tensor) -> Tensor:
        return join(x, self.grid.col, self.takes_tokens, self.seq_len)

    def _whole(self, w: Tensor) -> Tensor:
        """W of all rows, without the padding that made them equal."""
        return self.grid.row.gather(w)[: self.sizes.b if self.flow == "os" else self._width_out]

    def _row_sum(self, dw: Tensor, dtype: torch.dtype) -> Tensor:
        row = self.grid.row
        return row.scatter(_pad(dw.to(dtype), round_up(dw.shape[0], row.size)))

    def _spread(self, x: Tensor) -> Tensor:
        """[m, width] to the tokens of all rows and columns, of the features one block: [r, n, width / r]."""
        row, col = self.grid.row, self.grid.col
        n, wide = tokens_in(x.shape[0], col, self.seq_len), round_up(x.shape[1], row.size)
        mine = row.exchange(_stacked(F.pad(x, (0, wide - x.shape[1])), row.size))  # [r · m, width / r]
        whole = col.gather(mine).unflatten(0, (col.size, row.size, -1))
        return whole.transpose(0, 1).flatten(1, 2)[:, :n]

    def _collect(self, x: Tensor, width: int) -> Tensor:
        """The way back of `_spread`, summed over col: [r, n, width / r] to [m, width]."""
        row, col = self.grid.row, self.grid.col
        x = F.pad(x, (0, 0, 0, round_up(x.shape[1], col.size) - x.shape[1]))
        stacked = x.unflatten(1, (col.size, -1)).transpose(0, 1).flatten(0, 2)
        return _side_by_side(row.exchange(col.scatter(stacked)), row.size)[:, :width]


PutOff = Callable[[Tensor, Tensor, Tensor, int, int], None]


class _Multiply(torch.autograd.Function):
    """y = x wᵀ by a flow. With `put_off`, (x, kept) goes to a queue and autograd gets no gradient of w."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        token: Tensor | None,
        matmul: Matmul,
        put_off: PutOff | None,
        queue: int,
        place: int,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.matmul, ctx.token, ctx.put_off, ctx.queue, ctx.place = matmul, token, put_off, queue, place
        return matmul.forward(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx, kept = ctx.matmul.input_grad(dy, w)
        dw = None
        if ctx.put_off is not None:
            ctx.put_off(x, kept, ctx.token, ctx.queue, ctx.place)
        else:
            dw = ctx.matmul.weight_grad(x, kept, torch.promote_types(w.dtype, torch.float32)).to(w.dtype)
        return dx, dw, None, None, None, None, None


def multiply(
    x: Tensor,
    w: Tensor,
    matmul: Matmul,
    token: Tensor | None = None,
    put_off: PutOff | None = None,
    queue: int = 0,
    place: int = 0,
) -> Tensor:
    """x wᵀ, differentiable; the input as the flow takes it, the output as it gives it."""
    return _Multiply.apply(x, w, token, matmul, put_off, queue, place)
