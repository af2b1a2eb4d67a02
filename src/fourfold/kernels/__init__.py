"""Triton kernels: each does in one pass over memory what torch's operators do in several.

    adamw    AdamW update of bf16 weights with an fp32 master, its parts, and the sum of squares         bit-identical to torch
    gated    gated SiLU of an MLP, forward and backward                                                  rounded once
    rotary   rotary embedding of queries and keys, values copied next to them, forward and backward      rounded once

They are used on CUDA if Triton is installed; every caller falls back to torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["have_kernels", "operator"]

_library = torch.library.Library("fourfold", "FRAGMENT")


Function = TypeVar("Function", bound=Callable[..., Any])


def operator(signature: str, fake: Callable[..., Any], key: str = "CUDA") -> Callable[[Function], Function]:
    """Register a function as an operator of torch's library, so that torch.compile treats it as one call.

    Like `torch.library.custom_op`, without its check whether results share memory with arguments, which took 30 of 65 µs of host
    time, longer than many kernels run. `fake` returns results of the right shape without computing; `key` is the dispatch
    key: by default the function runs only on CUDA.
    """

    def register(start: Function) -> Function:
        name = f"fourfold::{start.__name__}"
        _library.define(start.__name__ + signature, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(start.__name__, start, key)
        torch.library.register_fake(name, fake, lib=_library)
        made: Function = getattr(torch.ops.fourfold, start.__name__).default
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
