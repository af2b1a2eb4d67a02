# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys, values copied next to them: one pass, forward and (with the sine negated) backward.

An operator of torch's library, so that torch.compile treats it as one call. Computed in the tables' type, rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from fourfold.kernels import operator

__all__ = ["rotated"]


def _rotated_shape(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    return q.new_empty(batch, tokens, (heads + 2 * k.shape[1]) * dim)


@operator("(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor", _rotated_shape)
def rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [B, H, T, E], k and v [B, K, T, E] of any strides to [B, T, (H + 2 K) E]; both halves of the tables are equal.

    Tables are [T, E] for all sequences, or [B, T, E].
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, tokens, dim = q.shape
    out = q.new_empty(batch, tokens, (heads + 2 * k.shape[1]) * dim)
    most = triton.next_power_of_2(max(heads, k.shape[1]))
    _rotated[(tokens, batch)](
        *(q, k, v, cos, sin, out),
        *(n for t in (q, k, v) for n in t.stride()[:3]),
        *(cos.stride(0) if cos.dim() == 3 else 0, sin.stride(0) if sin.dim() == 3 else 0),
        *(cos.stride(-2), sin.stride(-2), out.stride(0), out.stride(1), heads, k.shape[1], dim // 2),
        most,
        triton.next_power_of_2(dim // 2),
    )
    return out


@triton.jit
def _rotated(
    q, k, v, cos, sin, out,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    cb, sb, ct, st, ob, ot, heads, groups, half,
    most: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    token, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    e = tl.arange(0, pairs)
    c = tl.load(cos + sequence * cb + token * ct + e, mask=e < half, other=0.0)[None, :]
    s = tl.load(sin + sequence * sb + token * st + e, mask=e < half, other=0.0)[None, :]
    h = tl.arange(0, most)[:, None]
    to = out + sequence * ob + token * ot + h * 2 * half + e[None, :]
    inside = (h < heads) & (e[None, :] < half)
    at = q + sequence * qb + token * qt + h * qh + e[None, :]
    low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    tl.store(to, low * c - high * s, mask=inside)
    tl.store(to + half, high * c + low * s, mask=inside)
    to += heads * 2 * half
    inside = (h < groups) & (e[None, :] < half)
    at = k + sequence * kb + token * kt + h * kh + e[None, :]
    low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    tl.store(to, low * c - high * s, mask=inside)
    tl.store(to + half, high * c + low * s, mask=inside)
    to += groups * 2 * half
    at = v + sequence * vb + token * vt + h * vh + e[None, :]
    tl.store(to, tl.load(at, mask=inside, other=0.0), mask=inside)
    tl.store(to + half, tl.load(at + half, mask=inside, other=0.0), mask=inside)
