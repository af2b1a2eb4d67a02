"""The flows: distributed matmul algorithms on a plane of the grid, forward and backward, on local tensors.

Shapes, costs and the two layouts of activations (tokens, features) are in costs.py. A flow is four functions:

    forward(x, w) -> y, inputs      input_grad(dy, w) -> dx, kept      inputs(x)      weight_grad(inputs, kept, dtype) -> dw

`x` is the rank's local input; `inputs` is what the weight gradient needs of it: gathered again in the backward, or kept from the
forward if the plan says so. `kept` is the gradient of y as the weight gradient needs it, gathered if dx needed that. So a weight
gradient can be computed at once, or deferred until W; its reduction over row is part of it, in `dtype` (at least fp32). The
reduction over depth and data is the unit's.

The gather for the weight gradient overlaps with computing dx, and the scatter of dx with computing the weight gradient; weights
are prefetched and weight gradients are reduced later (late.py).

Letters: n tokens of this row, m = n / col (rounded up, padded with zeros), r = row, c = col.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.tensor._torch import once_differentiable, selective_region
from fourfold.tensor.blocks import round_up
from fourfold.tensor.costs import MatmulSizes
from fourfold.tensor.grid import Axis, Grid, PendingTensor

__all__ = [
    "Matmul",
    "all_tokens",
    "gather_columns",
    "multiply",
    "own_tokens",
    "scatter_sum",
    "to_features",
    "to_tokens",
    "tokens_in",
]


def tokens_in(rows: int, col: Axis, seq_len: int) -> int:
    """Number of tokens in col · rows positions: whole sequences; the rest, less than a sequence, is padding."""
    return rows * col.size // seq_len * seq_len


# ---- tokens and features: [m, width] and [n, block] ----


def gather_columns(x: Tensor, col: Axis, tokens: bool, seq_len: int) -> Tensor:
    """Gather over columns: [n, width] on each of them."""
    return _start_gather_columns(x, col, tokens, seq_len).get()


def _start_gather_columns(x: Tensor, col: Axis, tokens: bool, seq_len: int) -> PendingTensor:
    whole = col.start_gather(x)
    if not tokens:
        return whole if col.size == 1 else whole.then(lambda parts: _side_by_side(parts, col.size))
    return whole.first(tokens_in(x.shape[0], col, seq_len), x.shape[0] * col.size)


def scatter_sum(x: Tensor, col: Axis, tokens: bool) -> Tensor:
    """Reduce-scatter over columns of x [n, width]: to tokens [m, width] or features [n, width / c]."""
    return _start_scatter_sum(x, col, tokens).get()


def _start_scatter_sum(x: Tensor, col: Axis, tokens: bool) -> PendingTensor:
    return col.start_scatter(_pad(x, round_up(x.shape[0], col.size)) if tokens else _stacked(x, col.size))


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


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, seq_len: int) -> Tensor:
        ctx.col = col
        return gather_columns(x, col, True, seq_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return scatter_sum(dy, ctx.col, True), None, None


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, seq_len: int) -> Tensor:
        ctx.col, ctx.seq_len = col, seq_len
        return scatter_sum(x, col, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return gather_columns(dy, ctx.col, True, ctx.seq_len), None, None


def all_tokens(x: Tensor, col: Axis, seq_len: int) -> Tensor:
    """[m, width] of every column to [n, width] on each of them."""
    return x if col.size == 1 else _AllTokens.apply(x, col, seq_len)


def own_tokens(x: Tensor, col: Axis, seq_len: int) -> Tensor:
    """[n, width] of every column, summed, to [m, width]."""
    return x if col.size == 1 else _OwnTokens.apply(x, col, seq_len)


# ---- the flows ----


Whole = Callable[[], Tensor]
"""Returns W gathered over row."""


@dataclass(frozen=True)
class Matmul:
    """A matmul on the grid with one flow. With `keeps_inputs`, the gathered x is kept for the backward."""

    flow: str
    grid: Grid
    sizes: MatmulSizes
    seq_len: int
    keeps_inputs: bool = False
    takes_tokens: bool = field(init=False)
    gives_tokens: bool = field(init=False)
    moves_weight: bool = field(init=False)
    """Whether W is gathered over row, and its gradient reduce-scattered."""

    def __post_init__(self) -> None:
        flow, sizes = self.flow, self.sizes
        object.__setattr__(self, "takes_tokens", sizes.in_tokens if flow == "os" else flow == "ws-in")
        object.__setattr__(self, "gives_tokens", sizes.out_tokens if flow == "ls" else flow == "ws-out")
        object.__setattr__(self, "moves_weight", flow in ("os", "ls"))

    def forward(self, x: Tensor, w: Tensor, whole: Whole) -> tuple[Tensor, Tensor]:
        """(y, what is saved of x for the backward)."""
        row, col = self.grid.row, self.grid.col
        match self.flow:
            case "os":
                coming, all_rows = self._inputs(x), whole()
                inputs = coming.get()
                return inputs @ all_rows.t(), inputs if self.keeps_inputs else x
            case "ls":
                return scatter_sum(x @ whole().t(), col, self.gives_tokens), x
            case "ws-in":
                inputs = self._inputs(x).get()
                return row.scatter(inputs @ w.t()), inputs if self.keeps_inputs else x
            case "ws-out":
                inputs = self._inputs(x).get()
                y = (inputs @ w.t()).unflatten(0, (row.size, -1))
                return self._start_collect(y, self._width_out).get(), inputs if self.keeps_inputs else x
            case _:
                parts = zip(_broadcasts(col, x), _broadcasts(row, w), strict=True)
                return functools.reduce(torch.add, (x_t @ w_t.t() for x_t, w_t in parts)), x

    def gathered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is multiplied by W (`os`: x of all columns), and what is saved of x for the backward."""
        inputs = self._inputs(x).get()
        return inputs, inputs if self.keeps_inputs else x

    def scattered(self, dx: Tensor) -> PendingTensor:
        """Start the sum over col of the gradient of all columns' inputs (`os`)."""
        return _start_scatter_sum(dx, self.grid.col, self.takes_tokens)

    def inputs(self, kept: Tensor) -> PendingTensor:
        """What the weight gradient needs of x, from what the forward saved."""
        return PendingTensor(kept) if self.keeps_inputs else self._inputs(kept)

    def _inputs(self, x: Tensor) -> PendingTensor:
        match self.flow:
            case "os":
                return _start_gather_columns(x, self.grid.col, self.takes_tokens, self.seq_len)
            case "ws-in":
                return PendingTensor(self._spread(x).flatten(0, 1))
            case "ws-out":
                return self.grid.row.start_gather(x)
            case _:
                return PendingTensor(x)

    def input_grad(self, dy: Tensor, w: Tensor, whole: Whole) -> tuple[PendingTensor, Tensor]:
        """(dx in flight, what the weight gradient needs of dy)."""
        row, col = self.grid.row, self.grid.col
        match self.flow:
            case "os":
                return _start_scatter_sum(dy @ whole(), col, self.takes_tokens), dy
            case "ls":
                coming, all_rows = _start_gather_columns(dy, col, self.gives_tokens, self.seq_len), whole()
                joined = coming.get()
                return PendingTensor(joined @ all_rows), joined
            case "ws-in":
                joined = row.gather(dy)
                return self._start_collect((joined @ w).unflatten(0, (row.size, -1)), self._width_in), joined
            case "ws-out":
                spread = self._spread(dy).flatten(0, 1)
                return row.start_scatter(spread @ w), spread
            case _:
                return PendingTensor(_reduced(col, (dy @ w_t for w_t in _broadcasts(row, w)))), dy

    def weight_grad(self, inputs: Tensor, kept: Tensor, dtype: torch.dtype) -> PendingTensor:
        """dw, reduced over row."""
        if self.moves_weight:
            return self.row_sum(self.weight_product(inputs, kept, dtype))
        row, col = self.grid.row, self.grid.col
        if self.flow != "summa":
            return PendingTensor((kept.t() @ inputs).to(dtype))
        return PendingTensor(_reduced(row, ((kept.t() @ x_t).to(dtype) for x_t in _broadcasts(col, inputs))))

    def weight_product(self, inputs: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """dw before the reduction over row: from this row's tokens only."""
        return self.padded((kept.t() @ inputs).to(dtype))

    def padded(self, dw: Tensor) -> Tensor:
        """dw with rows that every rank of the row has a part of."""
        return _pad(dw, round_up(dw.shape[0], self.grid.row.size))

    def row_sum(self, dw: Tensor) -> PendingTensor:
        """Start the reduce-scatter over row of `weight_product`."""
        return self.grid.row.start_scatter(dw)

    def start_whole(self, w: Tensor) -> PendingTensor:
        """Start gathering W over row; the result has no padding."""
        filled = self.sizes.b if self.flow == "os" else self._width_out
        return self.grid.row.start_gather(w).first(filled, w.shape[0] * self.grid.row.size)

    def by_sequence(self, x: Tensor) -> Tensor:
        """[n, block] as [B, T, block]."""
        return x.view(x.shape[0] // self.seq_len, self.seq_len, x.shape[1])

    # ---- helpers ----

    @property
    def _width_in(self) -> int:
        return self.sizes.inputs if self.sizes.in_tokens else self.sizes.col * self.sizes.k

    @property
    def _width_out(self) -> int:
        return self.sizes.outputs if self.sizes.out_tokens else self.sizes.col * self.sizes.b

    def _spread(self, x: Tensor) -> Tensor:
        """[m, width] to the tokens of all rows and columns, with one block of the features: [r, n, width / r]."""
        row, col = self.grid.row, self.grid.col
        n, wide = tokens_in(x.shape[0], col, self.seq_len), round_up(x.shape[1], row.size)
        mine = row.exchange(_stacked(F.pad(x, (0, wide - x.shape[1])), row.size))  # [r · m, width / r]
        whole = col.gather(mine).unflatten(0, (col.size, row.size, -1))
        return whole.transpose(0, 1).flatten(1, 2)[:, :n]

    def _start_collect(self, x: Tensor, width: int) -> PendingTensor:
        """The inverse of `_spread`, summed over col: [r, n, width / r] to [m, width]."""
        row, col = self.grid.row, self.grid.col
        x = F.pad(x, (0, 0, 0, round_up(x.shape[1], col.size) - x.shape[1]))
        stacked = x.unflatten(1, (col.size, -1)).transpose(0, 1).flatten(0, 2)
        summed = col.start_scatter(stacked)
        return summed.then(lambda mine: _side_by_side(row.exchange(mine), row.size)[:, :width])


def _broadcasts(axis: Axis, x: Tensor) -> Iterator[Tensor]:
    """Broadcasts of x from every rank in turn; the next is in flight while one is used."""
    coming = axis.start_broadcast(x, 0)
    for t in range(1, axis.size + 1):
        after = axis.start_broadcast(x, t) if t < axis.size else None
        yield coming.get()
        coming = after or coming


def _reduced(axis: Axis, parts: Iterable[Tensor]) -> Tensor:
    """Reductions of part t to rank t; each overlaps with computing the next part."""
    before: PendingTensor | None = None
    for t, part in enumerate(parts):
        coming = axis.start_reduce(part, t)
        if before is not None:
            before.get()
        before = coming
        if t == axis.index:
            mine = coming
    assert before is not None
    before.get()
    return mine.get()


PutOff = Callable[[Tensor, Tensor, Tensor, int, int], None]


class WeightHolder(Protocol):
    """The owner of a matmul's weight, outside compiled graphs."""

    def whole(self) -> Tensor:
        """W gathered over row."""

    def take_weight_grad(self, inputs: Tensor, kept: Tensor, /) -> bool:
        """Compute and accumulate the weight gradient; False: return it to autograd instead."""


class _Multiply(torch.autograd.Function):
    """y = x wᵀ with a flow. With `put_off`, (x, kept) goes to a queue and autograd gets no gradient of w.

    Features have three dims [B, T, block] outside, and two inside: views here are no nodes of the autograd graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        matmul: Matmul,
        holder: WeightHolder | None,
        token: Tensor | None = None,
        put_off: PutOff | None = None,
        queue: int = 0,
        place: int = 0,
    ) -> Tensor:
        ctx.matmul, ctx.holder, ctx.put_off = matmul, holder, put_off
        if put_off is not None:
            ctx.token, ctx.queue, ctx.place = token, queue, place
        if not matmul.takes_tokens:
            x = x.flatten(0, 1)
        region = selective_region() if holder is not None else None
        if region is None:
            y, kept = matmul.forward(x, w, _whole(matmul, w, holder))
        else:
            with region.hidden():
                if region.again:
                    y, kept = region.take(id(holder)), x
                else:
                    y, kept = matmul.forward(x, w, _whole(matmul, w, holder))
                    region.keep(id(holder), y)
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, w)
        return y if matmul.gives_tokens else matmul.by_sequence(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        matmul, holder = ctx.matmul, ctx.holder
        whole = _whole(matmul, w, holder)
        if not matmul.gives_tokens:
            dy = dy.flatten(0, 1)
        if x is None:  # w is frozen
            dx = matmul.input_grad(dy, w, whole)[0].get()
            return dx if matmul.takes_tokens else matmul.by_sequence(dx), *_NONE
        # the gather for the weight gradient overlaps with dx; without overlap it starts later, to save memory
        early = matmul.inputs(x) if ctx.put_off is None and matmul.grid.col.overlap else None
        coming, kept = matmul.input_grad(dy, w, whole)
        dw = None
        if ctx.put_off is not None:
            ctx.put_off(x, kept, ctx.token, ctx.queue, ctx.place)
        else:
            inputs = (matmul.inputs(x) if early is None else early).get()
            if holder is None or not holder.take_weight_grad(inputs, kept):
                wide = torch.promote_types(w.dtype, torch.float32)
                dw = matmul.weight_grad(inputs, kept, wide).get().to(w.dtype)
        dx = coming.get()
        return dx if matmul.takes_tokens else matmul.by_sequence(dx), dw, *_NONE[1:]


_NONE = (None,) * 7
"""Gradients of what is no tensor, and of w; autograd ignores those of arguments that were not given."""


def _whole(matmul: Matmul, w: Tensor, holder: WeightHolder | None) -> Whole:
    return (lambda: matmul.start_whole(w).get()) if holder is None else holder.whole


def multiply(
    x: Tensor,
    w: Tensor,
    matmul: Matmul,
    holder: WeightHolder | None = None,
    token: Tensor | None = None,
    put_off: PutOff | None = None,
    queue: int = 0,
    place: int = 0,
) -> Tensor:
    """x wᵀ, differentiable; input and output have the flow's layouts: tokens [m, width], or features [B, T, block]."""
    if put_off is None:
        return _Multiply.apply(x, w, matmul, holder)
    return _Multiply.apply(x, w, matmul, holder, token, put_off, queue, place)
