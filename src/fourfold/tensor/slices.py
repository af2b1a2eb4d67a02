"""Operator splitting on the grid: each column slices its own block of an MLP's hidden size, or of the vocabulary.

    MLP    slice j has positions j of every column's block: rows of `up` (and gate), columns of `down`
    head   slice j has rows j of each rank's part of the projection, which are those of a tied embedding

The matmuls of a slice use the grid like those of a whole layer, each with the flow that suits its size: activations are
communicated once per slice, weights once in total. The logsumexp of a head's slices stays on its column until the last slice;
then two sums and a maximum per token over col follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold.model.layers import MLP, Head
from fourfold.piece import Piece
from fourfold.tensor.blocks import Blocks, Runs, fuse, slice_of
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import ActivationLayout, GridLinear
from fourfold.tensor.swap import pieces_of

__all__ = ["GridCutter"]

Cut = tuple[nn.Module, dict[str, tuple[Piece, ...]]]


class GridCutter:
    """Makes the linear layers of slice `index` of `count` for layers on the grid (a `Cutter` of shard/split.py)."""

    def __init__(self, grid: Grid):
        self.grid = grid

    def up(self, mlp: MLP, name: str, index: int, count: int) -> Cut:
        up, down = _on_grid(mlp.up), _on_grid(mlp.down)
        ways = up.outputs.blocks.total // down.inputs.blocks.total
        outputs = ActivationLayout(fuse(*[slice_of(down.inputs.blocks, count, index)] * ways))
        return _with_pieces(GridLinear(up.setting, up.inputs, outputs, bias=up.bias is not None), up, name)

    def down(self, mlp: MLP, name: str, index: int, count: int) -> Cut:
        down = _on_grid(mlp.down)
        inputs, bias = (
            ActivationLayout(slice_of(down.inputs.blocks, count, index)),
            index == 0 and down.bias is not None,
        )
        return _with_pieces(GridLinear(down.setting, inputs, down.outputs, bias=bias), down, name)

    def words(self, head: Head, name: str, index: int, count: int) -> tuple[nn.Module, dict[str, Any], Runs]:
        """The projection to a range of the vocabulary, its pieces, and the positions of this column's tokens in its output."""
        proj = _on_grid(head.proj)
        words = self._words(proj.outputs.blocks, count, index)
        flow, bias = proj.matmul.flow, proj.bias is not None
        made, pieces = _with_pieces(
            GridLinear(proj.setting, proj.inputs, ActivationLayout(words), bias=bias, flow=flow), proj, name
        )
        return made, pieces, words.runs[self.grid.col.index]

    def _words(self, words: Blocks, count: int, index: int) -> Blocks:
        return slice_of(words, count, index, self.grid.row.size)

    def tied_rows(self, head: Head, index: int, count: int) -> tuple[int, int]:
        """The rows that a slice uses of this rank's part of the tied weight."""
        sizes = [self._words(_on_grid(head.proj).outputs.blocks, count, i).size for i in range(index + 1)]
        return sum(sizes[:-1]) // self.grid.row.size, sum(sizes) // self.grid.row.size

    def whole(self, module: nn.Module, name: str) -> dict[str, tuple[Piece, ...]]:
        """The pieces of a module that is not split."""
        return pieces_of(module, name, self.grid)

    def total(self, per_token: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A function from a column's logsumexp, target logits and validity, each [n], to the loss, summed or per token."""
        return lambda lse, picked, valid: _Total.apply(lse, picked, valid, self.grid.col, per_token)


def _on_grid(module: nn.Module) -> GridLinear:
    assert isinstance(module, GridLinear), f"a {type(module).__name__} is not on the grid"
    return module


def _with_pieces(made: GridLinear, like: GridLinear, name: str) -> Cut:
    made = made.to(like.weight.dtype)
    if like.adapter is not None:
        made.adapt(like.adapter.shape)
    return made, made.pieces(name)


class _Total(torch.autograd.Function):
    """Σ over valid tokens of (logsumexp - target's logit), from each column's part of both; equal on all columns.

    `per_token`: not summed.
    """

    @staticmethod
    def forward(ctx: Any, lse: Tensor, picked: Tensor, valid: Tensor, col: Axis, per_token: bool) -> Tensor:
        top = col.max(lse)
        sums = col.sum(torch.stack(((lse - top).exp(), picked)))
        whole = top + sums[0].log()
        ctx.save_for_backward((lse - whole).exp() * valid, valid)
        losses_n = (whole - sums[1]) * valid
        return losses_n if per_token else losses_n.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        share, valid = ctx.saved_tensors
        return share * dy, -dy * valid, None, None, None
