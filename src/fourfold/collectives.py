"""The collectives the project uses, under one name on every supported torch.

2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; nothing else here depends on the version.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "reduce_scatter"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """out [ranks · n] = every rank's mine [n], in rank order. Receives (ranks - 1) · n elements."""
    return _all_gather(out, mine, group=group, async_op=async_op)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """out [n] = this rank's part of the sum over ranks of whole [ranks · n]. Receives (ranks - 1) · n elements."""
    return _reduce_scatter(out, whole, group=group, async_op=async_op)
