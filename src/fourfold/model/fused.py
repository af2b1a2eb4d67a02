"""Autograd functions with hand-written gradients: gated activations, soft-capping, rotary embedding of queries and keys.

Each saves only what its gradient needs, where a chain of torch operators would also save intermediate results. On CUDA the gated
SiLU and the full rotary embedding are one kernel in each direction (kernels/), one pass over the data.

    gated      h [.., 2 F] = [gate | up]                    →  activation(gate) · up  [.., F]     keeps h
    soft_cap   x                                            →  cap · tanh(x / cap)                keeps the result
    embed_qk   qkv [B, T, H·E | K·E | K·E], tables [T, R]   →  q, k, v  [B, H or K, T, E]         keeps the tables

`embed_qk` returns q, k and v in new memory, so that its input can be freed; `positions` [B, T] selects rows of the
tables. R ≤ E: the number of rotated dimensions of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.kernels import have_kernels

__all__ = ["embed_qk", "gated", "rotate", "soft_cap"]


def gated(h: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) · up of [gate | up], the halves of the last dim."""
    out: Tensor = _GatedSilu.apply(h) if activation == "silu" else _GatedGelu.apply(h, _APPROXIMATE[activation])
    return out


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        if _has_kernel(h):
            from fourfold.kernels import gated

            return gated.gated_silu(h)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up if torch.compiler.is_compiling() else F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        if _has_kernel(h):
            from fourfold.kernels import gated

            return gated.gated_silu_backward(h, grad)
        gate, up = h.chunk(2, dim=-1)
        if torch.compiler.is_compiling():
            return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)
        out = torch.empty_like(h)
        for_gate, for_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=for_gate)
        torch.ops.aten.silu_backward(for_gate, gate, grad_input=for_gate)
        torch.ops.aten.silu(gate, out=for_up).mul_(grad)
        return out


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(h)
        ctx.approximate = approximate
        gate, up = h.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        gate, up = h.chunk(2, dim=-1)
        for_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=ctx.approximate)
        return torch.cat((for_gate, F.gelu(gate, approximate=ctx.approximate) * grad), dim=-1), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    out: Tensor = _SoftCap.apply(x, cap)
    return out


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = (x / cap).tanh_()
        # torch 2.11's compiler gives no gradient, silently, where a function returns a tensor that was changed in place
        out = out * cap if torch.compiler.is_compiling() else out.mul_(cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        slope = (out / ctx.cap).square_().neg_().add_(1)  # 1 - tanh²
        return slope.mul_(grad), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, E] by tables [T, R], or [B, T, R] (one per sequence), computed in the tables' dtype.

    Pairs (e, e + R/2) of the first R dimensions are rotated; the others are unchanged.
    """
    low, high, c, s = _halves(x, cos, sin)
    parts = (low * c - high * s, high * c + low * s)
    rest = x[..., cos.shape[-1] :]
    return torch.cat((*parts, rest) if rest.shape[-1] else parts, dim=-1).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    low, high, c, s = _halves(x, cos, sin)
    half, dim = cos.shape[-1] // 2, cos.shape[-1]
    torch.sub(low * c, high * s, out=out[..., :half])
    torch.add(high * c, low * s, out=out[..., half:dim])
    if dim < x.shape[-1]:
        out[..., dim:].copy_(x[..., dim:])


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    half = cos.shape[-1] // 2
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return x[..., :half], x[..., half : 2 * half], cos[..., :half], sin[..., :half]


def embed_qk(
    qkv: Tensor,
    widths: tuple[int, int, int],
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv's last dim into heads of q, k and v, and apply the rotary embedding to q and k.

    `positions` [B, T]: rows of the tables; default 0 to T - 1.
    """
    if torch.compiler.is_compiling() and not (_has_kernel(qkv) and cos.shape[-1] == head_dim):
        q, k, v = _heads(qkv, widths, head_dim)
        cos, sin = _at(cos, sin, positions)
        return rotate(q, cos, sin), rotate(k, cos, sin), v
    made: tuple[Tensor, Tensor, Tensor] = _EmbedQK.apply(qkv, widths, head_dim, cos, sin, positions)
    return made


def _at(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    return (cos, sin) if positions is None else (cos[positions], sin[positions])


class _EmbedQK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        widths: tuple[int, int, int],
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, positions)  # all layers share them
        return _heads(_rotated(_heads(qkv, widths, head_dim), *_at(cos, sin, positions)), widths, head_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = _at(*ctx.saved_tensors)
        return _rotated(grads, cos, -sin), None, None, None, None, None


def _rotated(parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> Tensor:
    """Concatenate rotated q, rotated k and v: [B, T, H·E + 2 K·E]."""
    q, k, v = parts
    batch, _, tokens, dim = q.shape
    if _has_kernel(q) and cos.shape[-1] == dim:
        from fourfold.kernels import rotary

        return rotary.rotated(q, k, v, cos, sin)
    widths = (q.shape[1] * dim, k.shape[1] * dim, v.shape[1] * dim)
    out = q.new_empty(batch, tokens, sum(widths))
    to_q, to_k, to_v = _heads(out, widths, dim)
    _rotate(q, cos, sin, to_q)
    _rotate(k, cos, sin, to_k)
    to_v.copy_(v)
    return out


def _heads(qkv: Tensor, widths: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    parts = zip(qkv.split_with_sizes(widths, -1), widths, strict=True)
    return tuple(part.view(*part.shape[:2], width // dim, dim).transpose(1, 2) for part, width in parts)


def _has_kernel(x: Tensor) -> bool:
    return x.dtype != torch.float64 and have_kernels(x)
