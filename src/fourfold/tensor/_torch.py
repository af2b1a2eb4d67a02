"""The private names of torch that this package uses: how to stand outside a selective checkpoint.

A selective checkpoint watches a region's operations by a dispatch mode, one when it first runs and another when it runs again,
both with one `storage`. A product on the grid keeps its result there and hides its own operations (collectives, local products)
from it: so nothing moves when the region runs again, and nothing but the result is kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["Region", "selective_region"]


class Region:
    """A selective checkpoint that is running."""

    def __init__(self, mode: Any):
        self.again = isinstance(mode, _CachedTorchDispatchMode)
        self._results: dict[Hashable, Any] = mode.storage

    def keep(self, key: Hashable, result: Tensor) -> None:
        self._results.setdefault(("fourfold", key), []).append(result.detach())

    def take(self, key: Hashable) -> Tensor:
        """What was kept when the region first ran."""
        kept: list[Tensor] = self._results["fourfold", key]
        return kept.pop(0)

    def hidden(self) -> AbstractContextManager[Any]:
        """What runs in it is not seen by the checkpoint; other modes see it."""
        return _pop_mode_temporarily()


def selective_region() -> Region | None:
    """The region that the caller is in, if it is the innermost mode."""
    mode = _get_current_dispatch_mode()
    return Region(mode) if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) else None
