"""Lossless split of an fp32 master weight into a bf16 weight and 16 low bits.

    weight   bf16   the master rounded half up: used in forward and backward
    low      int16  the low half of the master's bits, as a signed number

    master bits = (weight bits << 16) + low          weight bits = (master bits + 0x8000) >> 16

With round-half-to-even the master could not be restored at ties. With round-half-up it always can: a negative `low` means that
the weight was rounded up. Infinities are preserved; a NaN stays a NaN, but its payload is lost.

All functions write to buffers that the caller owns; on CUDA each is one kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold.kernels import have_kernels

__all__ = ["join", "round_half_up", "scale", "split", "square_sum"]


def join(weight: Tensor, low: Tensor, out: Tensor) -> None:
    """Restore the fp32 master from bf16 `weight` and int16 `low`, into `out`."""
    if kernels := _kernels(out):
        kernels.join(weight.view(torch.int16), low, out.view(torch.int32))
        return
    bits = out.view(torch.int32)
    bits.copy_(weight.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(low)


def split(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Split an fp32 master into bf16 `weight` and int16 `low`; overwrites `master`."""
    if kernels := _kernels(master):
        kernels.split(master, weight.view(torch.int16), low)
        return
    master.nan_to_num_(
        nan=math.nan, posinf=math.inf, neginf=-math.inf
    )  # canonical NaN: adding 0x8000 to its bits leaves a NaN
    bits = master.view(torch.int32)
    low.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def scale(grad: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """Convert `grad` to the dtype of `out`, times `factor` (a scalar tensor on the device) if given."""
    if factor is not None and out.dtype == torch.float32 and (kernels := _kernels(out)):
        kernels.scale(grad, factor, out)
        return
    out.copy_(grad)
    if factor is not None:
        out.mul_(factor)


def round_half_up(master: Tensor, weight: Tensor) -> None:
    """Set bf16 `weight` to the fp32 master rounded half up; `master` is unchanged."""
    if kernels := _kernels(master):
        kernels.round_half_up(master, weight.view(torch.int16))
        return
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    weight.masked_fill_(master.isnan(), math.nan)


def square_sum(x: Tensor) -> Tensor:
    """The sum of squares of `x`, an fp64 scalar."""
    if x.numel() and (kernels := _kernels(x)):
        return kernels.square_sum(x)
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _kernels(tensor: Tensor):  # type: ignore[no-untyped-def]
    """The fused kernels, or None to use torch's operators."""
    if not have_kernels(tensor):
        return None
    from fourfold.kernels import adamw

    return adamw
