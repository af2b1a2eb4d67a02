"""The head's projection and its cross entropy, a chunk of tokens at a time, so that all logits never exist at once.

    logits z = cap(h Wᵀ + b)  [c, V]       loss_i = log Σ_v exp(z_iv) - z_i,target       dz = softmax(z) - onehot(target)

For c of the n tokens at a time. Two ways to the gradient:

    at once   the forward also computes dh = dz W and dW = Σ dzᵀ h, with gradient 1 of the loss; the backward multiplies both
              by the loss's gradient. Three matmuls. dW is held from the forward to the backward, so this is for a backward
              that follows its forward.
    later     the forward keeps each token's log Σ exp; the backward computes the logits again. Four matmuls. For losses of single
              tokens (`per_token`), whose gradients the forward cannot know, and where several micro-batches are in flight.

Logits and dz have the compute type, exponentials and sums at least fp32; dW is summed over chunks in at least fp32. Held at a
time, of a chunk: z, an fp32 copy of it unless it is that wide, and (soft-capping) another; dz takes z's memory.

On a grid, a column holds V / col rows of W (`VocabPart`): a maximum and two sums per token over the columns complete the softmax.
`dh` is then this column's share of the sum over all columns.

Letters: n tokens, c of them a chunk, D hidden, V vocabulary (of this column).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["IGNORE", "ChunkedLoss", "Gradients", "VocabPart", "chunked_loss", "gradients_later", "losses_in_chunks"]

IGNORE = -100
"""Target of a token that is not predicted."""


class Columns(Protocol):
    """The ranks that share the vocabulary (tensor/grid.py)."""

    def sum(self, x: Tensor, /) -> Tensor: ...
    def max(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class VocabPart:
    """Rows [0, filled) of W are the words [first, first + filled) of the vocabulary; `columns` hold the others."""

    filled: int
    first: int = 0
    columns: Columns | None = None


@dataclass(frozen=True)
class ChunkedLoss:
    """How a head computes its loss: tokens of a chunk, the soft-cap of logits (0: none), and how: see the top of this file."""

    rows: int
    cap: float = 0.0
    at_once: bool = True


class Gradients(NamedTuple):
    """Of the sum of the losses; a gradient that nothing needs is None."""

    h: Tensor | None
    w: Tensor | None
    b: Tensor | None


Wanted = tuple[bool, bool, bool]
"""Which of the gradients of h, W and b are needed."""


def chunked_loss(
    h_nd: Tensor, w_vd: Tensor, b_v: Tensor | None, targets_n: Tensor, how: ChunkedLoss, *, per_token: bool
) -> Tensor:
    """Sum of the tokens' cross entropies, or with `per_token` each of them [n]; at least fp32."""
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (h_nd, w_vd, b_v))
    if not needs:
        losses_n = losses_in_chunks(h_nd, w_vd, b_v, targets_n, how, VocabPart(len(w_vd)))[0]
        return losses_n if per_token else losses_n.sum()
    out: Tensor = (_Later if per_token or not how.at_once else _AtOnce).apply(
        h_nd, w_vd, b_v, targets_n, how, per_token
    )
    return out


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, how: ChunkedLoss, per_token: bool
    ) -> Tensor:
        assert not per_token
        losses, _, grads = losses_in_chunks(h, w, b, targets, how, VocabPart(len(w)), ctx.needs_input_grad[:3])
        ctx.save_for_backward(grads.h, None if grads.w is None else grads.w.to(w.dtype), grads.b)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *(None if g is None else g.mul_(grad) for g in ctx.saved_tensors), None, None, None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, how: ChunkedLoss, per_token: bool
    ) -> Tensor:
        losses, log_sums, _ = losses_in_chunks(h, w, b, targets, how, VocabPart(len(w)))
        ctx.save_for_backward(h, w, b, targets, log_sums)
        ctx.how = how
        return losses if per_token else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        h, w, b, targets, log_sums = ctx.saved_tensors
        found = gradients_later(h, w, b, targets, log_sums, grad, ctx.how, VocabPart(len(w)), ctx.needs_input_grad[:3])
        return *found, None, None, None


@torch.no_grad()
def losses_in_chunks(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    targets: Tensor,
    how: ChunkedLoss,
    part: VocabPart,
    wanted: Wanted = (False, False, False),
) -> tuple[Tensor, Tensor, Gradients]:
    """The tokens' losses [n], the logs of their sums of exponentials [n], and the gradients of the losses' sum."""
    wide = torch.promote_types(h.dtype, torch.float32)
    losses, log_sums = h.new_empty(len(h), dtype=wide), h.new_empty(len(h), dtype=wide)
    sums = _Sums(h, w, b, wanted)
    for rows in _chunks(len(h), how.rows):
        losses[rows], log_sums[rows] = _one_chunk(h, w, b, targets[rows], rows, how, part, wide, sums)
    return losses, log_sums, sums.result()


@torch.no_grad()
def gradients_later(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    how: ChunkedLoss,
    part: VocabPart,
    wanted: Wanted,
) -> Gradients:
    """The gradients for gradient `grad` of the losses' sum, or [n] of each loss; logits are computed again."""
    wide, sums = log_sums.dtype, _Sums(h, w, b, wanted)
    for rows in _chunks(len(h), how.rows):
        z, slope = _logits(h[rows], w, b, part.filled, how.cap)
        dz = z.to(wide).sub_(log_sums[rows, None]).exp_()
        _subtract_targets(dz, *_places(targets[rows], part))
        factor = (targets[rows] != IGNORE) * (grad[rows] if grad.dim() else grad)
        sums.add(rows, _narrow(dz.mul_(factor[:, None]), slope, z))
        del z, dz, slope  # before the next chunk's exist
    return sums.result()


def _one_chunk(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    targets: Tensor,
    rows: slice,
    how: ChunkedLoss,
    part: VocabPart,
    wide: torch.dtype,
    sums: _Sums,
) -> tuple[Tensor, Tensor]:
    """Losses and logs of sums of exponentials of the tokens `rows`; their gradients are added to `sums`."""
    z, slope = _logits(h[rows], w, b, part.filled, how.cap)
    e = z.to(wide)  # shares z's memory where z is that wide; z itself is not read again
    top = e.amax(1) if part.filled else e.new_full((len(e),), torch.finfo(wide).min)
    top = top if part.columns is None else part.columns.max(top)
    e.sub_(top[:, None])
    (at, mine), valid = _places(targets, part), targets != IGNORE
    own = e.gather(1, at[:, None])[:, 0] * mine if part.filled else torch.zeros_like(top)
    total = e.exp_().sum(1)
    if part.columns is not None:
        total, own = part.columns.sum(torch.stack((total, own)))
    if sums.wanted:
        dz = e.mul_((valid / total)[:, None])
        _subtract_targets(dz, at, mine & valid)
        sums.add(rows, _narrow(dz, slope, z))
    log_total = total.log()
    return (log_total - own) * valid, log_total + top


def _subtract_targets(dz: Tensor, at: Tensor, mine: Tensor) -> None:
    """Subtract 1 at the targets that are among this part's words."""
    if dz.shape[1]:
        rows = torch.arange(
            len(dz), device=dz.device
        )  # not scatter_add_: where it is deterministic, it may wait for the GPU
        dz.index_put_((rows, at), -mine.to(dz.dtype), accumulate=True)


def _chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _logits(h: Tensor, w: Tensor, b: Tensor | None, filled: int, cap: float) -> tuple[Tensor, Tensor | None]:
    """Logits [c, filled], and dz' / dz of the soft-cap (None: no cap)."""
    z = F.linear(h, w[:filled], None if b is None else b[:filled])
    if not cap:
        return z, None
    z.div_(cap).tanh_()
    slope = z.square().neg_().add_(1)
    return z.mul_(cap), slope


def _places(targets: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Where the targets are among this part's words, and which of them are there."""
    at = targets - part.first
    mine = (at >= 0) & (at < part.filled)
    return torch.where(mine, at, 0), mine


def _narrow(dz: Tensor, slope: Tensor | None, z: Tensor) -> Tensor:
    """dz in the compute type, in the memory of z, times the slope of the soft-cap."""
    dz = dz if slope is None else dz.mul_(slope)
    return dz if dz.dtype == z.dtype else z.copy_(dz)


class _Sums:
    """dh by chunk, and the sums over chunks of dW and db, in at least fp32."""

    def __init__(self, h: Tensor, w: Tensor, b: Tensor | None, wanted: Wanted):
        wide = torch.promote_types(w.dtype, torch.float32)
        self.from_h, self.from_w, self.wanted = h, w, any(wanted)
        self.h = torch.empty_like(h) if wanted[0] else None
        self.w = torch.zeros_like(w, dtype=wide) if wanted[1] else None
        self.b = torch.zeros_like(b, dtype=wide) if wanted[2] and b is not None else None

    def add(self, rows: slice, dz: Tensor) -> None:
        filled = dz.shape[1]
        if self.h is not None:
            torch.mm(dz, self.from_w[:filled], out=self.h[rows])
        if self.w is not None:
            into, h = self.w[:filled], self.from_h[rows]
            if into.dtype == dz.dtype:
                into.addmm_(dz.t(), h)
            else:
                into.add_(dz.t() @ h)
        if self.b is not None:
            self.b[:filled].add_(dz.sum(0))

    def result(self) -> Gradients:
        return Gradients(self.h, self.w, None if self.b is None else self.b.to(self.from_w.dtype))
