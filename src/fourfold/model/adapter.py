"""Adapters on linear layers (LoRA): y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ, with W and b frozen.

An adapter of a linear [N, K] has A [parts · rank, K] and for every part B [rows, rank] (model/lora.py says what parts are). A
slice of the linear, or a rank of a tensor grid, holds some inputs (columns of A) and some outputs (rows of B); `runs` (start,
stop, at) map them: serial elements [start, stop) are at local positions [at, …). Positions without a run are padding; the adapter
adds nothing there.

Both factors are `nn.Linear`s, so that a split backward defers their weight gradients like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fourfold.model.lora import AdapterPart, adapters, is_adapter
from fourfold.piece import Piece

if TYPE_CHECKING:
    from fourfold.model.transformer import Transformer

__all__ = ["Adapter", "AdapterShape", "LoraLinear", "Runs", "adapt", "adapted", "freeze"]

Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class AdapterShape:
    """The serial adapter: its rank, its scale, its parts, and the number of inputs of its linear."""

    rank: int
    scale: float
    parts: tuple[AdapterPart, ...]
    inputs: int


class Adapter(nn.Module):
    """The factors A and B, or the part of them that a slice or a grid rank holds: `inputs` × `outputs` local positions."""

    def __init__(
        self,
        shape: AdapterShape,
        inputs: int,
        in_runs: Runs,
        outputs: int,
        out_runs: Runs,
        all_out_runs: Sequence[Runs] = (),
    ):
        """`all_out_runs`: those of all columns of a grid. B is padded to the rows of the fullest, so that a unit has one size."""
        super().__init__()
        self.shape, self.in_runs, self.outputs = shape, in_runs, outputs
        self.a = nn.Linear(inputs, shape.rank * len(shape.parts), bias=False, device="meta")
        self.rows: dict[str, Runs] = {}  # by part: rows of its B, and their local positions
        self.places: list[tuple[int, int, int, int]] = []  # (first output, part, first row of its B, rows)
        self.b = nn.ModuleDict()
        for k, part in enumerate(shape.parts):
            held, filled = [], 0
            for start, stop, at in out_runs:
                low, high = max(start, part.start), min(stop, part.stop)
                if low < high:
                    held.append((low - part.start, high - part.start, filled))
                    self.places.append((at + low - start, k, filled, high - low))
                    filled += high - low
            self.rows[part.name] = tuple(held)
            most = max((_rows(part, runs) for runs in all_out_runs), default=filled)
            self.b[part.name] = nn.Linear(shape.rank, most, bias=False, device="meta")
        self.places.sort()

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.low(x))

    def low(self, x: Tensor) -> Tensor:
        """scale · x Aᵀ: [.., parts · rank]."""
        u: Tensor = self.a(x)
        return u if self.shape.scale == 1 else u * self.shape.scale

    def spread(self, u: Tensor) -> Tensor:
        """u Bᵀ of each part, written to the part's outputs; zeros elsewhere: [.., outputs]."""
        each = u.split(self.shape.rank, dim=-1)
        made = [linear(part) for linear, part in zip(self.b.values(), each, strict=True)]
        # a rank that holds no outputs takes part in the backward, too: its u went through collectives of the grid
        out, end = [] if self.places else [made[0][..., :0]], 0
        for at, k, first, rows in self.places:
            if at > end:
                out.append(u.new_zeros((*u.shape[:-1], at - end)))
            whole: Tensor = made[k]
            out.append(whole if rows == whole.shape[-1] else whole[..., first : first + rows])
            end = at + rows
        if end < self.outputs:
            out.append(u.new_zeros((*u.shape[:-1], self.outputs - end)))
        return out[0] if len(out) == 1 else torch.cat(out, -1)

    def pieces(self, prefix: str, a_copies: tuple[str, ...], b_copies: tuple[str, ...]) -> dict[str, tuple[Piece, ...]]:
        """The pieces of its parameters. `prefix`: its serial name. `a_copies`, `b_copies`: mesh axes of copies."""
        rank, width = self.shape.rank, self.a.out_features
        found = {
            "a.weight": tuple(
                Piece(
                    f"{prefix}.a.weight",
                    (width, self.shape.inputs),
                    ((0, width), (start, stop)),
                    ((0, width), (at, at + stop - start)),
                    a_copies,
                )
                for start, stop, at in self.in_runs
            )
        }
        for part in self.shape.parts:
            name = f"b.{part.name}.weight"
            found[name] = tuple(
                Piece(
                    f"{prefix}.{name}",
                    (part.stop - part.start, rank),
                    ((start, stop), (0, rank)),
                    ((at, at + stop - start), (0, rank)),
                    b_copies,
                )
                for start, stop, at in self.rows[part.name]
            )
        return found


def _rows(part: AdapterPart, runs: Runs) -> int:
    """How many outputs of a part there are in runs."""
    return sum(max(0, min(stop, part.stop) - max(start, part.start)) for start, stop, _ in runs)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter."""

    adapter: Adapter

    def forward(self, x: Tensor, low: Tensor | None = None) -> Tensor:
        """`low`: the adapter's `low(x)`, if already computed."""
        added = self.adapter.spread(self.adapter.low(x) if low is None else low)
        y = torch.addmm(added.flatten(0, -2), x.flatten(0, -2), self.weight.t()).view(added.shape)
        return y if self.bias is None else y + self.bias


def adapted(linear: nn.Linear, shape: AdapterShape, in_runs: Runs, out_runs: Runs) -> nn.Linear:
    """Add an adapter to a linear layer, or to a slice of one."""
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    linear.adapter = Adapter(shape, linear.in_features, in_runs, linear.out_features, out_runs).to(linear.weight.dtype)
    return linear


def adapt(model: Transformer) -> Transformer:
    """Add adapters to the linears that the model's config names, and freeze all other parameters."""
    lora = model.config.lora
    if lora is None:
        return model
    for unit, module in model.units().items():
        for name, parts in adapters(model.config, unit).items():
            linear = module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            shape = AdapterShape(lora.rank, lora.scale, parts, linear.in_features)
            adapted(linear, shape, ((0, linear.in_features, 0),), ((0, linear.out_features, 0),))
    freeze(model)
    return model


def freeze(module: nn.Module) -> None:
    """Freeze all parameters of a module except those of adapters."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
