"""The torch names that this package wraps: private ones, to run operations outside a selective checkpoint, and one that is slow.

A selective checkpoint records a region's operations by a dispatch mode: one for the forward and another for the recomputation,
which share `storage`. A matmul on the grid stores its result there and bypasses the modes for its own operations (collectives,
local matmuls). So the recomputation does not communicate, and only the result is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["Region", "once_differentiable", "selective_region"]


class Region:
    """A selective checkpoint that is running."""

    def __init__(self, mode: Any):
        self.again = isinstance(mode, _CachedTorchDispatchMode)
        self._results: dict[Hashable, Any] = mode.storage

    def keep(self, key: Hashable, result: Tensor) -> None:
        self._results.setdefault(("fourfold", key), []).append(result.detach())

    def take(self, key: Hashable) -> Tensor:
        """The result that was kept in the forward."""
        kept: list[Tensor] = self._results["fourfold", key]
        return kept.pop(0)

    def hidden(self) -> AbstractContextManager[Any]:
        """A context that bypasses the checkpoint's mode; other modes stay active."""
        return _pop_mode_temporarily()


def selective_region() -> Region | None:
    """The caller's region, if its mode is the innermost one."""
    mode = _get_current_dispatch_mode()
    return Region(mode) if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) else None


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's, which says that a backward has no gradient of its own, without its cost where nothing asks for that gradient."""
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run
