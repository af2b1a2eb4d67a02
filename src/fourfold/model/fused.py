"""Operations in one piece, each with its own gradient: the gated SiLU of an MLP, and turning queries and keys.

Both keep nothing that their gradient does not need, where chains of torch's operators would keep what lies between, and on CUDA
each direction is one kernel (kernels/), one pass over the data.

    gated_silu   h [.., 2 F] = [gate | up]                    →  silu(gate) · up  [.., F]          keeps h
    turn         qkv [B, T, H·E | K·E | K·E], tables [T, E]   →  q, k, v  [B, H or K, T, E]        keeps the tables

`turn` gives q, k and v memory of their own, so that what it was fed can go.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.kernels import have_kernels

__all__ = ["gated_silu", "rotate", "turn"]


def gated_silu(h: Tensor) -> Tensor:
    """silu(gate) · up of [gate | up], the halves of the last dim."""
    out: Tensor = _GatedSilu.apply(h)
    return out


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (e, e + E/2) of the last dim turned by the tables' angles, [T, E] both, in the tables' type; x is [.., T, E]."""
    low, high, c, s = _halves(x, cos, sin)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    low, high, c, s = _halves(x, cos, sin)
    to_low, to_high = out.chunk(2, dim=-1)
    torch.sub(low * c, high * s, out=to_low)
    torch.add(high * c, low * s, out=to_high)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:], cos[:, :half], sin[:, :half]


def turn(qkv: Tensor, widths: tuple[int, int, int], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the three parts of qkv's last dim, as heads; q and k are turned by the tables."""
    if torch.compiler.is_compiling() and not _has_kernel(qkv):
        q, k, v = _heads(qkv, widths, cos.shape[-1])
        return rotate(q, cos, sin), rotate(k, cos, sin), v
    made: tuple[Tensor, Tensor, Tensor] = _Turn.apply(qkv, widths, cos, sin)
    return made


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, widths: tuple[int, int, int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.widths = widths
        return _heads(_turned(_heads(qkv, widths, cos.shape[-1]), cos, sin), widths, cos.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads, cos, -sin), None, None, None


def _turned(parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> Tensor:
    """q and k turned and v as it is, side by side: [B, T, H·E + 2 K·E]."""
    q, k, v = parts
    if _has_kernel(q):
        from fourfold.kernels import rotary

        return rotary.turned(q, k, v, cos, sin)
    batch, _, tokens, dim = q.shape
    widths = (q.shape[1] * dim, k.shape[1] * dim, v.shape[1] * dim)
    out = q.new_empty(batch, tokens, sum(widths))
    to_q, to_k, to_v = _heads(out, widths, dim)
    _rotate(q, cos, sin, to_q)
    _rotate(k, cos, sin, to_k)
    to_v.copy_(v)
    return out


def _heads(qkv: Tensor, widths: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in qkv.split(widths, dim=-1))


def _has_kernel(x: Tensor) -> bool:
    return x.dtype != torch.float64 and have_kernels(x)
