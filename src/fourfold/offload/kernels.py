# mypy: disable-error-code="no-untyped-def"
"""The functions of offload/split.py as Triton kernels: one pass over the data each. Same bits as there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["join", "round_half_up", "scale", "split", "square_sum"]

BLOCK = 2048


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
