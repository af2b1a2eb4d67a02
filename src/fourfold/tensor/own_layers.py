"""Layers of a user's own model on the grid: rules by class, and a linear layer between activations that all columns hold.

    def rule(block, setting):                                              # for every module of a class, at any depth
        block.up = on_grid(block.up, setting, outputs="split")             # y: this column's block of features
        block.down = on_grid(block.down, setting, inputs="split")

Between layers, every column holds all features of its row's samples, so layers without a rule, and the loss, run as they are
on each column. A weight that `on_grid` took is divided over row and col; each rank holds 1/(row·col) of it. Features [.., F] are
divided into equal blocks of ⌈F/col⌉, padded at the end; modules between two such linears must work on each feature alone.

    whole → split   takes this column's block of x; the backward gathers the gradient over col: (col - 1)/col · n · F elements
    split → whole   gathers the blocks over col, as many elements; the backward takes this column's block

n rows on this rank. The linear's own flow adds what flows.py says, with one token per row.

[Note: parameters that a layer keeps]
Parameters outside of grid modules are replicated over row and col. The columns of a row compute the same gradient of them, so
column 0's is taken for all (`silent` in shard/unit.py) and summed over the rows. In the first step the columns are compared,
since a parameter that works on split features would have another gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold.errors import ConfigError
from fourfold.tensor.blocks import Blocks, even
from fourfold.tensor.grid import Axis
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings

__all__ = ["OwnGridLinear", "OwnRule", "apply_rules", "on_grid"]

OwnRule = Callable[[Any, GridSettings], nn.Module | None]
"""Changes the children of a module in place, or returns what replaces it."""
Features = Literal["whole", "split"]


def apply_rules(module: nn.Module, setting: GridSettings, rules: Mapping[type, OwnRule]) -> nn.Module:
    """Apply the rule of each module's class, outermost first; returns the module, or what a rule put in its place."""
    if rule := rules.get(type(module)):
        return rule(module, setting) or module
    for name, child in list(module.named_children()):
        setattr(module, name, apply_rules(child, setting, rules))
    return module


def on_grid(
    linear: nn.Module, setting: GridSettings, *, inputs: Features = "whole", outputs: Features = "whole"
) -> OwnGridLinear:
    """What replaces an nn.Linear on the grid: its input and output have all features, or this column's block of them."""
    if type(linear) is not nn.Linear:
        raise ConfigError(f"on_grid takes an nn.Linear; found a {type(linear).__name__}")
    for name, value in (("inputs", inputs), ("outputs", outputs)):
        if value not in ("whole", "split"):
            raise ConfigError(f"on_grid: {name} = {value!r} is invalid; use 'whole' or 'split'")
    return OwnGridLinear(setting, linear, inputs, outputs)


class OwnGridLinear(GridLinear):
    """y = x Wᵀ + b for x [.., F] with all features or this column's block of them, and y alike."""

    def __init__(self, setting: GridSettings, linear: nn.Linear, inputs: Features, outputs: Features):
        col = setting.grid.col
        ins, outs = even(linear.in_features, col.size), even(linear.out_features, col.size)
        super().__init__(
            setting,
            ActivationLayout(ins),
            ActivationLayout(outs),
            bias=linear.bias is not None,
            trim=inputs == "split",  # what an activation makes of padding is no input
        )
        self.whole_in, self.whole_out = inputs == "whole", outputs == "whole"

    def forward(self, x: Tensor) -> Tensor:
        col, ins, outs = self.setting.grid.col, self.inputs.blocks, self.outputs.blocks
        wanted = ins.total if self.whole_in else ins.size
        if x.shape[-1] != wanted:
            kind = "all features" if self.whole_in else "a column's block of features"
            raise ConfigError(f"a linear on the grid takes {kind}, {wanted}; found {x.shape[-1]} (on_grid: inputs=…)")
        lead = x.shape[:-1]
        x = x.reshape(-1, 1, x.shape[-1])
        if self.whole_in and col.size > 1:
            x = _OwnBlock.apply(x, col, ins)
        y = super().forward(x)
        if self.whole_out and col.size > 1:
            y = _AllBlocks.apply(y, col, outs)
        return y.reshape(*lead, y.shape[-1])


def _block(x: Tensor, col: Axis, blocks: Blocks) -> Tensor:
    """This column's block of all features, padded."""
    mine = x[..., col.index * blocks.size : (col.index + 1) * blocks.size]
    return F.pad(mine, (0, blocks.size - mine.shape[-1]))


def _gathered(x: Tensor, col: Axis, blocks: Blocks) -> Tensor:
    """All features, from every column's block."""
    rows = x.flatten(0, -2).t()
    return col.gather(rows)[: blocks.total].t().reshape(*x.shape[:-1], blocks.total)


class _OwnBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, blocks: Blocks) -> Tensor:
        ctx.col, ctx.blocks = col, blocks
        return _block(x, col, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _gathered(dy, ctx.col, ctx.blocks), None, None


class _AllBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, col: Axis, blocks: Blocks) -> Tensor:
        ctx.col, ctx.blocks = col, blocks
        return _gathered(x, col, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _block(dy, ctx.col, ctx.blocks), None, None
