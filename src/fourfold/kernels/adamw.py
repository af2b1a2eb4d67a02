# mypy: disable-error-code="no-untyped-def"
"""AdamW on an fp32 master of bf16 weights, and the operations of offload/split.py, bit-identical to the torch versions.

`update` is torch's fused AdamW including scaling of the gradient and rounding of the weight, so that every value is read and
written once. The arithmetic is torch's: fp32, with the same fused multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["bias_corrections", "join", "round_half_up", "scale", "split", "square_sum", "update"]

BLOCK = 1024


def join(weight: Tensor, low: Tensor, out: Tensor) -> None:
    _join[(triton.cdiv(out.numel(), BLOCK),)](weight, low, out, out.numel(), BLOCK)


def split(master: Tensor, weight: Tensor, low: Tensor) -> None:
    _split[(triton.cdiv(master.numel(), BLOCK),)](master, weight, low, master.numel(), BLOCK)


def scale(grad: Tensor, factor: Tensor, out: Tensor) -> None:
    _scale[(triton.cdiv(out.numel(), BLOCK),)](grad, factor, out, out.numel(), BLOCK)


def round_half_up(master: Tensor, weight: Tensor) -> None:
    _round_half_up[(triton.cdiv(master.numel(), BLOCK),)](master, weight, master.numel(), BLOCK)


def square_sum(x: Tensor) -> Tensor:
    parts = torch.empty(triton.cdiv(x.numel(), BLOCK), dtype=torch.float64, device=x.device)
    _square_sum[(len(parts),)](x, parts, x.numel(), BLOCK)
    return parts.sum()


def bias_corrections(step: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """1 - beta1^t and sqrt(1 - beta2^t) for step counts t from 1. (Triton's pow differs from torch's in the last bits.)"""
    return 1 - torch.pow(betas[0], step), (1 - torch.pow(betas[1], step)).sqrt()


def update(
    weight: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    corrections: tuple[Tensor, Tensor],
    factor: Tensor | None,
    skip: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """Update bf16 weights by `grad · factor`; nothing changes if `skip` is 1.

    `master` is fp32, or int16: the low bits that restore it from the weight. Moments are fp32 or bf16. `corrections` are those
    of this step, by `bias_corrections`.
    """
    n, clipped, guarded = master.numel(), factor is not None, skip is not None
    _update[(triton.cdiv(n, BLOCK),)](
        *(weight.view(torch.int16), master, first, second, grad, *corrections),
        *(factor if clipped else grad, skip if guarded else grad),
        *(float(lr), float(betas[0]), float(betas[1]), float(eps), float(weight_decay), n),
        *(master.dtype == torch.int16, weight_decay != 0, maximize, clipped, guarded, BLOCK),
    )


@triton.jit
def _update(
    weight, master, first, second, grad, correction1, correction2, factor, skip,
    lr, beta1, beta2, eps, decay, n,
    low: tl.constexpr, decays: tl.constexpr, maximize: tl.constexpr, clipped: tl.constexpr, guarded: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    if guarded:
        inside = inside & (tl.load(skip) == 0)
    if low:
        high_bits = tl.load(weight + at, mask=inside, other=0).to(tl.int32)
        low_bits = tl.load(master + at, mask=inside, other=0).to(tl.int32)
        p = ((high_bits << 16) + low_bits).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if clipped:
        g = g * tl.load(factor).to(tl.float32)
    if maximize:
        g = -g
    if decays:
        p = tl.fma(-(lr * decay) + tl.zeros_like(p), p, p)
    b1 = beta1 + tl.zeros_like(p)
    b2 = beta2 + tl.zeros_like(p)
    square = g * g
    m = tl.fma(b1, m, tl.fma(-b1, g, g))
    v = tl.fma(b2, v, tl.fma(-b2, square, square))
    size = tl.div_rn(lr, tl.load(correction1))
    below = tl.div_rn(tl.sqrt_rn(v), tl.load(correction2) + tl.zeros_like(p)) + eps
    p = p - tl.div_rn(size * m, below)
    bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
    if low:
        tl.store(master + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(master + at, p, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)


@triton.jit
def _join(weight, low, out, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    high_bits = tl.load(weight + at, mask=inside, other=0).to(tl.int32)
    low_bits = tl.load(low + at, mask=inside, other=0).to(tl.int32)
    tl.store(out + at, (high_bits << 16) + low_bits, mask=inside)


@triton.jit
def _split(master, weight, low, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(master + at, mask=inside, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FC00000, bits)
    tl.store(low + at, bits.to(tl.int16), mask=inside)
    tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)


@triton.jit
def _scale(grad, factor, out, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * tl.load(factor), mask=inside)


@triton.jit
def _round_half_up(master, weight, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    value = tl.load(master + at, mask=inside, other=0.0)
    bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
    tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)


@triton.jit
def _square_sum(x, parts, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float64)
    tl.store(parts + tl.program_id(0), tl.sum(value * value))
