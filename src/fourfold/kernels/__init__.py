"""Triton kernels for what torch's operators do in several passes over the data: one pass each.

    adamw    an update of bf16 weights with an fp32 master, its parts, and the squares of a gradient     torch's bits
    gated    the gated SiLU of an MLP, forward and backward                                              rounded once
    rotary   queries and keys turned by position, values beside them, forward and backward               rounded once

They are used on CUDA where Triton is installed; every caller has torch's operators for elsewhere.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["have_kernels"]


def have_kernels(tensor: Tensor) -> bool:
    """Whether kernels can work on a tensor."""
    if tensor.device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
