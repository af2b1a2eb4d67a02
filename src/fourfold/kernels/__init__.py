"""Triton kernels for what torch's operators do in several passes over the data: one pass each.

    adamw    an update of bf16 weights with an fp32 master, its parts, and the squares of a gradient     torch's bits
    gated    the gated SiLU of an MLP, forward and backward                                              rounded once
    rotary   queries and keys turned by position, values beside them, forward and backward               rounded once

They are used on CUDA where Triton is installed; every caller has torch's operators for elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["have_kernels", "operator"]

_library = torch.library.Library("fourfold", "FRAGMENT")


def operator(signature: str, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function that starts a kernel an operator of torch's library, which torch.compile takes as it is.

    As `torch.library.custom_op` does, without its look at every result for memory of the arguments: that took a GPU's host 30 of
    65 us, longer than many a kernel. `fake`: the result's shape.
    """

    def register(start: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = f"fourfold::{start.__name__}"
        _library.define(start.__name__ + signature, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(start.__name__, start, "CUDA")
        torch.library.register_fake(name, fake, lib=_library)
        made: Callable[..., Tensor] = getattr(torch.ops.fourfold, start.__name__).default
        return made

    return register


def have_kernels(tensor: Tensor) -> bool:
    """Whether kernels can work on a tensor."""
    if tensor.device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
