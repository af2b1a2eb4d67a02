"""A large linear layer in any module, split along its inputs: y = Σ x[..., j] W[:, j]ᵀ + b, one slice of W at a time.

It replaces an nn.Linear. The forward gathers each slice, adds its matmul to y and releases it; the backward visits the slices
in reverse and reduces each slice's gradient when it is complete. Only x is saved. Gathered at a time: 1 / slices of W, twice
that with prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.shard.split import LinearSlice
from fourfold.shard.unit import Unit

__all__ = ["SplitLinear"]


class SplitLinear(nn.Module):
    """A linear layer whose slices are units.

    `kept()` returns whether slices stay gathered; `made(i)` is called when slice i's gradient is complete.
    """

    def __init__(
        self,
        slices: Sequence[tuple[Unit, LinearSlice]],
        *,
        prefetch: int,
        kept: Callable[[], bool],
        made: Callable[[int], None],
    ):
        super().__init__()
        self.slices, self.prefetch, self.kept, self.made = list(slices), prefetch, kept, made
        self.anchor = torch.zeros((), requires_grad=True)  # makes autograd call backward even if x needs no gradient

    def forward(self, x: Tensor) -> Tensor:
        return _SplitMatmul.apply(x, self.anchor, self)

    def use(self, index: int, direction: int) -> tuple[Unit, LinearSlice]:
        """Gather slice `index` and return it; prefetch the next ones in `direction`."""
        for ahead in range(self.prefetch + 1):
            if 0 <= index + direction * ahead < len(self.slices):
                self.slices[index + direction * ahead][0].gather()
        self.slices[index][0].need()
        return self.slices[index]


class _SplitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, owner: SplitLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.owner = owner
        y: Tensor | None = None
        for index in range(len(owner.slices)):
            unit, part = owner.use(index, 1)
            product = F.linear(x[..., slice(*part.columns)], part.part.weight, part.part.bias)
            y = product if y is None else y.add_(product)
            if not owner.kept():
                unit.release()
        assert y is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,), (x,), owner = grads, ctx.saved_tensors, ctx.owner
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for index in reversed(range(len(owner.slices))):
            unit, part = owner.use(index, -1)
            columns = slice(*part.columns)
            if dx is not None:
                dx[..., columns] = dy @ part.part.weight
            if part.part.bias is not None:
                unit.add_grad("part.bias", dy.flatten(0, -2).sum(0))
            unit.add_weight_grad("part.weight", x[..., columns], dy)
            owner.made(index)
        return dx, None, None
