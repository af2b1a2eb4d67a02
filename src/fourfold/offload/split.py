"""An fp32 master weight as a bf16 weight and 16 more bits, without loss.

    weight   bf16   the master rounded half up: what the model computes with
    low      int16  the low half of the master's bits, as a signed number

    master bits = (weight bits << 16) + low          weight bits = (master bits + 0x8000) >> 16

Rounded half to even the master could not be restored at ties; rounded half up it always can, since low >= 0x8000 (negative)
tells that the weight was rounded up. Infinities stay; a NaN stays a NaN, its payload does not.

Everything is done in place in buffers that the caller owns, on CUDA by one kernel each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold.kernels import have_kernels

__all__ = ["join", "round_half_up", "scale", "split", "square_sum"]


def join(weight: Tensor, low: Tensor, out: Tensor) -> None:
    """The fp32 master of bf16 `weight` and int16 `low`, into `out`."""
    if kernels := _kernels(out):
        kernels.join(weight.view(torch.int16), low, out.view(torch.int32))
        return
    bits = out.view(torch.int32)
    bits.copy_(weight.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(low)


def split(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Store an fp32 master as bf16 `weight` and int16 `low`; `master` is scratch afterwards."""
    if kernels := _kernels(master):
        kernels.split(master, weight.view(torch.int16), low)
        return
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)  # one NaN for all: its bits can be rounded up
    bits = master.view(torch.int32)
    low.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def scale(grad: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """`grad` in the type of `out`, times `factor` (a number on the device) where there is one."""
    if factor is not None and out.dtype == torch.float32 and (kernels := _kernels(out)):
        kernels.scale(grad, factor, out)
        return
    out.copy_(grad)
    if factor is not None:
        out.mul_(factor)


def round_half_up(master: Tensor, weight: Tensor) -> None:
    """`weight` (bf16) becomes the fp32 master rounded half up; the master stays."""
    if kernels := _kernels(master):
        kernels.round_half_up(master, weight.view(torch.int16))
        return
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    weight.masked_fill_(master.isnan(), math.nan)


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of `x`, a number in fp64."""
    if x.numel() and (kernels := _kernels(x)):
        return kernels.square_sum(x)
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _kernels(tensor: Tensor):  # type: ignore[no-untyped-def]
    """Kernels that do each of these in one pass; None: use torch's operators."""
    if not have_kernels(tensor):
        return None
    from fourfold.kernels import adamw

    return adamw
