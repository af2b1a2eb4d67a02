"""Linear layers that multiply in fp8: `precision.matmul = "fp8"`.

A linear y = x Wᵀ + b has three matmuls (letters: M tokens, K inputs, N outputs):

    y  [M, N] = x [M, K] · Wᵀ              fp8: rows of x and rows of W have scales
    dx [M, K] = dy [M, N] · W              fp8: rows of dy and columns of W have scales
    dW [N, K] = dyᵀ · x                    bf16, from the bf16 x and dy, at once or by the queue of runtime/weight_grad.py

fp8 is e4m3 (largest value 448) everywhere. A row q · s has one scale s, the smallest power of two with which its largest absolute
value fits; it is computed from the row itself, in each forward and backward, so there is no state to save. Sums are in fp32
(in the forward on a GPU: in the tensor core's narrower accumulator, `use_fast_accum`), results are rounded to bf16 once. x, W
and dy stay in bf16 where they are saved, gathered, reduced and updated. The recipe is torchao's `rowwise_with_gw_hp`, except that
W in dx has a scale for each column instead of one in all.

    x    read twice and written, 2 + 2 + 1 bytes an element, unless the compiler fuses it with what computes x
    W    the same in the forward, and again for dx, where the fp8 copy is also transposed: in each micro-batch

So a small layer does not pay. torchao leaves out layers on an H100 with N ≤ 2,048, or K ≤ 1,024, or both N ≤ 4,096 and K ≤ 2,048.
Here the plan decides for all layers at once: every linear of the blocks is computed in fp8; head, embedding, norms and attention
are not.

On a CPU the same values of x, W and dy are multiplied in fp32. Quantisation is written with plain torch operators, which
torch.compile can fuse with the operators around them. Scales are computed with integers, from the bits of a number: a
logarithm or a quotient could differ between compiled and uncompiled code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FP8",
    "FP8_OPTIONS",
    "Fp8Linear",
    "fp8_input_grad",
    "fp8_linear",
    "fp8_missing",
    "has_fp8",
    "quantize",
    "use_fp8",
]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of FP8: 1.75 · 2^8."""
SMALLEST_AMAX = 2.0**-100
"""Rows with a smaller absolute maximum are treated as if they had this one: its scale and the reciprocal are normal numbers."""
FP8_OPTIONS = {"emulate_precision_casts": True}
"""Compiled code rounds to bf16 where uncompiled code does: a recomputed forward then quantises the same numbers."""


class Fp8Linear(nn.Linear):
    """An nn.Linear whose output and input gradient are computed in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Fp8Linear.apply(x, self.weight, self.bias)
        return y


def use_fp8(blocks: nn.Module) -> None:
    """Let all linears of `blocks` compute in fp8. Numbers of inputs and outputs are multiples of 16 (`Plan.check_model`)."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear


def fp8_missing(device: torch.device) -> str:
    """Why a device cannot multiply in fp8; empty where it can. CPUs emulate it."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    if (
        torch.version.hip
    ):  # on AMD, e4m3 without infinities is a type of the MI350 and later; the MI300X has another one
        return "" if "gfx95" in torch.cuda.get_device_properties(device).gcnArchName else f"{name} has no e4m3 matmuls"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return ""
    return f"{name} has compute capability {major}.{minor}, and fp8 tensor cores exist from 8.9 on (Ada, Hopper, Blackwell)"


def has_fp8(module: nn.Module) -> bool:
    """Whether a linear of `module` computes in fp8."""
    return any(isinstance(child, Fp8Linear) for child in module.modules())


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None
        return fp8_linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        dx = fp8_input_grad(dy, w) if ctx.needs_input_grad[0] else None
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        db = dy.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db


def fp8_linear(x: Tensor, w_nk: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of x [.., K] in fp8, in the type of x."""
    return _product(x, w_nk, bias, fast=True)


def fp8_input_grad(dy: Tensor, w_nk: Tensor) -> Tensor:
    """dy W of dy [.., N] in fp8, in the type of dy."""
    return _product(dy, w_nk.t(), None, fast=False)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, C] as FP8 with contiguous rows, and the scales [R, 1] in fp32 by which they are to be multiplied.

    A row that contains a NaN or an infinity has a scale or elements that are not finite, so its matmuls are not finite either.
    """
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_AMAX)
    # amax is m · 2^e. The carry of this sum raises e by one if m > 1.75; then the mantissa is dropped.
    power = (amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000
    scale = power - (8 << 23)
    reciprocal = 0x7F000000 - scale  # exponents are biased by 127, so this one is 254 - that of the scale
    scaled = x * reciprocal.view(torch.float32)  # in fp32
    # Casts do not saturate before torch 2.12; and compiled code may compute amax from values that are not rounded.
    return scaled.clamp_(-LARGEST, LARGEST).to(FP8).contiguous(), scale.view(torch.float32)


def _product(x: Tensor, w_nk: Tensor, bias: Tensor | None, *, fast: bool) -> Tensor:
    """x Wᵀ + b with rows of x and rows of w_nk in fp8. `fast`: a GPU may sum in its tensor cores' own type."""
    (x_q, x_scale), (w_q, w_scale) = quantize(x.flatten(0, -2)), quantize(w_nk)
    if x.is_cuda:
        y = torch._scaled_mm(x_q, w_q.t(), x_scale, w_scale.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=fast)
    else:
        y = F.linear(x_q.float() * x_scale, w_q.float() * w_scale, None if bias is None else bias.float()).to(x.dtype)
    return y.view(*x.shape[:-1], w_nk.shape[0])
