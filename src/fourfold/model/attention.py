"""Softmax attention over a sliding window, or with soft-capped scores: what torch's fused kernel does not compute.

    scores   s = scale · q kᵀ, then cap · tanh(s / cap) where there is a cap
    mask     causal: query i attends to keys j ≤ i; with a window w to i - w < j ≤ i, which is w keys with its own
    output   softmax(s) v

Queries are taken a block at a time, each with the keys that its block can see, so that the scores of one block exist at a time
and a window of w costs T · w and not T². Kept for the backward: q, k, v, the output and the log of each query's sum of
exponentials; scores are computed again. Softmax, tanh and the sums of key and value gradients are in fp32 (fp64 for fp64).

Both directions are operators of torch's library: selective recomputation sees one operator, whose output it keeps, and
torch.compile takes it as it is.

Letters: B sequences, T tokens, H heads, K key heads, G = H / K, E width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fourfold.kernels import operator

__all__ = ["blocked_attention"]

SCORES = 1 << 24
"""Scores of one block, at most, unless a block would have fewer than `FEWEST` queries."""
FEWEST = 64


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, cap: float = 0.0, window: int = 0, causal: bool = True
) -> Tensor:
    """q [B, H, T, E], k and v [B, K, T, E] to [B, H, T, E]; `cap` and `window`: 0 for none."""
    out: Tensor = _Attend.apply(q, k, v, scale, cap, window, causal)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: int, causal: bool
    ) -> Tensor:
        out, log_sum = attend(q, k, v, scale, cap, window, causal)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.options = scale, cap, window, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *attend_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: int, causal: bool) -> tuple[Tensor, ...]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))


@operator(
    "(Tensor q, Tensor k, Tensor v, float scale, float cap, int window, bool causal) -> (Tensor, Tensor)",
    _fake,
    "CompositeExplicitAutograd",
)
def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output and, for every query, the log of the sum of its exponentials."""
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))
    for queries, keys in _blocks(q, window, causal):
        s, _ = _scores(q, k, queries, keys, scale, cap, window, causal)
        top = s.logsumexp(-1, keepdim=True)
        p = (s - top).exp_().to(v.dtype)
        out[:, :, queries] = _by_query(p @ v[:, :, keys], q.shape[1])
        log_sum[:, :, queries] = _by_query(top, q.shape[1])[..., 0]
    return out, log_sum


def _fake_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@operator(
    "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, float scale, float cap, int window, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    "CompositeExplicitAutograd",
)
def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
    cap: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, groups = _wide(q), k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    dots = (dy.to(wide) * out).sum(-1, keepdim=True)  # Σ p · dp of every query
    for queries, keys in _blocks(q, window, causal):
        s, slope = _scores(q, k, queries, keys, scale, cap, window, causal)
        p = s.sub_(_by_group(log_sum[:, :, queries, None], groups)).exp_()
        dy_block = _by_group(dy[:, :, queries], groups)
        dv[:, :, keys] += p.to(v.dtype).mT @ dy_block
        ds = (dy_block @ v[:, :, keys].mT).to(wide).sub_(_by_group(dots[:, :, queries], groups)).mul_(p)
        ds = (ds if slope is None else ds.mul_(slope)).mul_(scale).to(q.dtype)
        dq[:, :, queries] = _by_query(ds @ k[:, :, keys], q.shape[1])
        dk[:, :, keys] += ds.mT @ _by_group(q[:, :, queries], groups)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(q: Tensor, window: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that one of them sees."""
    batch, heads, tokens, _ = q.shape
    size = max(FEWEST, SCORES // (batch * heads * min(tokens, 2 * window or tokens)))
    size = min(size, max(FEWEST, window)) if window else size
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        last = stop if causal else tokens
        yield slice(start, stop), slice(max(0, start - window + 1) if window else 0, last)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, H, c, .] to [B, K, G · c, .]: the queries of all heads that share a key head."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _by_query(x: Tensor, heads: int) -> Tensor:
    """[B, K, G · c, .] to [B, H, c, .]."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _scores(
    q: Tensor, k: Tensor, queries: slice, keys: slice, scale: float, cap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, K, G · c, keys] in fp32 or wider, -inf where masked, and the slope of the soft-cap (None: no cap)."""
    groups, slope = k.shape[1], None
    s = (_by_group(q[:, :, queries], groups) @ k[:, :, keys].mT).to(_wide(q)).mul_(scale)
    if cap:
        s = s.div_(cap).tanh_()
        slope = 1 - s.square()
        s = s.mul_(cap)
    if causal:
        i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        masked = (j > i) | (j <= i - window) if window else j > i
        s.unflatten(2, (-1, masked.shape[0])).masked_fill_(masked, float("-inf"))
    return s, slope
