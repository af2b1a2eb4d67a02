# mypy: disable-error-code="no-untyped-def"
"""Gated SiLU, `silu(gate) · up` with [gate | up] in the last dim, and its gradient; computed in fp32, rounded once.

Registered as torch operators, so that torch.compile does not trace into them (its own code for the gradient, two halves written
under masks, reaches half of the memory bandwidth).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fourfold.kernels import operator

__all__ = ["gated_silu", "gated_silu_backward"]


@operator("(Tensor h) -> Tensor", lambda h: h.new_empty(*h.shape[:-1], h.shape[-1] // 2))
def gated_silu(h: Tensor) -> Tensor:
    h = h.contiguous()
    width = h.shape[-1] // 2
    out = h.new_empty(*h.shape[:-1], width)
    block = _block(width)
    _forward[(out.numel() // width, triton.cdiv(width, block))](h, out, width, block, num_warps=8)
    return out


@operator("(Tensor h, Tensor grad) -> Tensor", lambda h, grad: h.new_empty(h.shape))
def gated_silu_backward(h: Tensor, grad: Tensor) -> Tensor:
    h, grad = h.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(h)
    block = _block(width)
    _backward[(grad.numel() // width, triton.cdiv(width, block))](h, grad, out, width, block, num_warps=8)
    return out


def _block(width: int) -> int:
    return min(4096, triton.next_power_of_2(width))


@triton.jit
def _forward(h, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(h + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(h, grad, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(h + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    silu = gate * sigma
    tl.store(out + row * 2 * width + at, g * up * (sigma + silu * (1 - sigma)), mask=inside)
    tl.store(out + row * 2 * width + width + at, g * silu, mask=inside)
