"""Operator splitting: a layer too large to be gathered whole, as a chain of slices, each a unit of its own.

    MLP          along the hidden size: slice j holds rows j of `up` (and gate), columns j of `down`
    head, loss   along the vocabulary: slice j holds rows j of the projection, and never more than its logits exist
    linear       along its inputs (OSDP's way)

A slice is gathered, computed with, computed again and freed on its own, so parameters, gradients and activations of one slice
exist at a time. Where an MLP's slices are not computed again, nothing joins their two matrices, and each is a unit. Slices
are pieces of the serial parameters: one bias, the serial initial values, the serial checkpoint.

Values between units (B sequences, T tokens, D hidden):

    MLP      x → (h, acc) → … → (h, acc) → y        h [B, T, D] feeds every slice; acc starts as the residual and collects
             x → (h, acc, a) → (h, acc) → (h, acc, a) → … → y       with a unit for each matrix; a: the slice's activation
    linear   x → (x, acc) → … → y
    head     x → (h, lse, picked) → … → loss        lse [B·T]: log of the sum of exponentials so far; picked: the target's logit

What is only added to acc, or laid beside it, does not touch acc: no unit keeps it, and its gradient passes unchanged
(`Link.adds`). Dropout draws the same mask in every slice of a unit (they share its random numbers), so it is dropout of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.layers import IGNORE, MLP, Head
from fourfold.piece import Piece

__all__ = ["Slice", "slices_of", "splittable"]

Adds = Literal["no", "beside", "more", "last"]
Rows = tuple[int, int]


@dataclass
class Slice:
    """One slice: its module (on the meta device), what its parameters are, and how it is chained to the next."""

    module: nn.Module
    pieces: dict[str, tuple[Piece, ...]]
    adds: Adds = "no"
    """no: its output is the next one's input; beside: it is laid beside h and acc; more, last: it is added to acc."""
    takes_extra: bool = False
    """Whether it is given the targets."""
    tied_rows: Mapping[str, Rows] = field(default_factory=dict)
    """Parameters that are rows of a tied weight, where the weight is."""


def splittable(module: nn.Module) -> bool:
    return isinstance(module, MLP | Head) or type(module) is nn.Linear


def slices_of(
    name: str, module: nn.Module, count: int, *, apart: bool = False, copies_over: tuple[str, ...] = ()
) -> list[Slice]:
    """Cut the unit `name` into `count` slices, as even as they can be; `apart`: the matrices of an MLP's slices, too."""
    match module:
        case MLP():
            halves = (("up",), ("down",)) if apart else (("up", "down"),)
            cuts = enumerate(_cuts(_plain(module.down).in_features, count))
            made = [_mlp(module, rows, j == 0, j == count - 1, half) for j, rows in cuts for half in halves]
        case Head():
            made = [
                _head(module, rows, j, count) for j, rows in enumerate(_cuts(_plain(module.proj).out_features, count))
            ]
        case _:
            assert type(module) is nn.Linear, f"{name} cannot be split"
            made = [
                _linear(module, rows, j == 0, j == count - 1) for j, rows in enumerate(_cuts(module.in_features, count))
            ]
    for each in made:
        each.pieces = {
            n: tuple(_renamed(p, f"{name}.{p.name}", copies_over) for p in ps) for n, ps in each.pieces.items()
        }
    return made


def _cuts(width: int, count: int) -> list[Rows]:
    return [(j * width // count, (j + 1) * width // count) for j in range(count)]


def _renamed(piece: Piece, name: str, copies_over: tuple[str, ...]) -> Piece:
    return Piece(name, piece.global_shape, piece.global_slice, piece.local_slice, copies_over)


def _whole(prefix: str, module: nn.Module | None) -> dict[str, tuple[Piece, ...]]:
    """The pieces of a module that is held whole."""
    found = {} if module is None else {f"{prefix}.{n}": tuple(p.shape) for n, p in module.named_parameters()}
    return {n: (_cut(n, shape, 0, (0, shape[0])),) for n, shape in found.items()}


def _cut(name: str, shape: tuple[int, ...], dim: int, rows: Rows, at: int = 0) -> Piece:
    """Elements `rows` along `dim` of a serial parameter, lying from `at` on in the local one."""
    box = tuple((0, n) for n in shape)
    part, local = list(box), list(box)
    part[dim], local[dim] = rows, (at, at + rows[1] - rows[0])
    return Piece(name, shape, tuple(part), tuple(local))


def _plain(module: nn.Module) -> nn.Linear:
    assert type(module) is nn.Linear, f"a {type(module).__name__} cannot be cut into slices"
    return module


def _linear_like(serial: nn.Linear, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=serial.weight.dtype)


# ---- the MLP ----


class MlpSlice(nn.Module):
    """Rows of `up` (twice, with a gate), columns of `down`, or both; the first has the bias of `down`, first or last the norm."""

    def __init__(self, mlp: MLP, rows: Rows, first: bool, last: bool, parts: tuple[str, ...]):
        super().__init__()
        up, down = _plain(mlp.up), _plain(mlp.down)
        width, hidden = rows[1] - rows[0], down.out_features
        self.family, self.dropout, self.first = mlp.family, mlp.dropout, first
        pre, self.post = first and not mlp.post_norm and "up" in parts, last and mlp.post_norm and "down" in parts
        self.norm = mlp.norm if pre or self.post else None
        self.up = self.down = None
        if "up" in parts:
            ways = up.out_features // down.in_features
            self.up = _linear_like(up, hidden, ways * width, up.bias is not None)
        if "down" in parts:
            self.down = _linear_like(down, width, hidden, first and down.bias is not None)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        x_btd, h_btd, a_btf = values[0], values[0], values[-1]
        if self.up is not None:
            if self.norm is not None and not self.post:
                h_btd = self.norm(x_btd)
            a_btf = self._activation(self.up(h_btd))
        if self.down is None:
            return (h_btd, x_btd, a_btf) if self.first else a_btf
        y_btd = F.dropout(self.down(a_btf), self.dropout, self.training)
        if self.first and self.up is not None:
            return h_btd, x_btd + y_btd
        if self.post:
            assert self.norm is not None
            return self.norm(values[1] + y_btd)
        return y_btd

    def _activation(self, a: Tensor) -> Tensor:
        if self.family == "llama":
            gate, up = a.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(a, approximate="tanh" if self.family == "gpt" else "none")


def _mlp(mlp: MLP, rows: Rows, first: bool, last: bool, parts: tuple[str, ...]) -> Slice:
    made = MlpSlice(mlp, rows, first, last, parts)
    up, down = _plain(mlp.up), _plain(mlp.down)
    hidden, width, size = down.out_features, down.in_features, rows[1] - rows[0]
    ways = up.out_features // width
    pieces = _whole("norm", made.norm)
    starts = [(i * size, (i * width + rows[0], i * width + rows[1])) for i in range(ways)]
    if made.up is not None:
        pieces["up.weight"] = tuple(_cut("up.weight", (ways * width, hidden), 0, part, at) for at, part in starts)
        if made.up.bias is not None:
            pieces["up.bias"] = tuple(_cut("up.bias", (ways * width,), 0, part, at) for at, part in starts)
    if made.down is not None:
        pieces["down.weight"] = (_cut("down.weight", (hidden, width), 1, rows),)
        if made.down.bias is not None:
            pieces["down.bias"] = (_cut("down.bias", (hidden,), 0, (0, hidden)),)
    adds: Adds = "last" if last else "more"
    if made.post or (first and made.up is not None):
        adds = "no"
    elif made.down is None:
        adds = "beside"
    return Slice(made, pieces, adds)


# ---- the head and its loss ----


class HeadSlice(nn.Module):
    """Some words of the vocabulary; the first has what comes before the projection."""

    def __init__(self, head: Head, rows: Rows, index: int, count: int):
        super().__init__()
        self.rows, self.first, self.last = rows, index == 0, index == count - 1
        self.dense = head.dense if self.first else None
        self.norm = head.norm if self.first else None
        proj, words = _plain(head.proj), rows[1] - rows[0]
        self.proj = _linear_like(proj, proj.in_features, words, proj.bias is not None)

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        *values, targets_bt = args
        h_btd = values[0]
        if self.dense is not None:
            h_btd = F.gelu(self.dense(h_btd))
        if self.norm is not None:
            h_btd = self.norm(h_btd)
        logits_nv = self.proj(h_btd).flatten(0, 1)
        logits_nv = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
        targets_n = targets_bt.flatten()
        here = (targets_n >= self.rows[0]) & (targets_n < self.rows[1])
        place = (targets_n - self.rows[0]).clamp(0, logits_nv.shape[1] - 1)
        picked_n = logits_nv.gather(1, place[:, None])[:, 0].where(here, 0.0)
        lse_n = logits_nv.logsumexp(1)
        if not self.first:
            lse_n, picked_n = torch.logaddexp(values[1], lse_n), values[2] + picked_n
        if self.last:
            return (lse_n - picked_n).where(targets_n != IGNORE, 0.0).sum()
        return h_btd, lse_n, picked_n


def _head(head: Head, rows: Rows, index: int, count: int) -> Slice:
    made = HeadSlice(head, rows, index, count)
    pieces = _whole("dense", made.dense) | _whole("norm", made.norm)
    words, hidden = _plain(head.proj).out_features, _plain(head.proj).in_features
    pieces["proj.weight"] = (_cut("proj.weight", (words, hidden), 0, rows),)
    if made.proj.bias is not None:
        pieces["proj.bias"] = (_cut("proj.bias", (words,), 0, rows),)
    return Slice(made, pieces, takes_extra=True, tied_rows={"proj.weight": rows})


# ---- any linear ----


class LinearSlice(nn.Module):
    """Some input features of a linear; the first has the bias."""

    def __init__(self, linear: nn.Linear, columns: Rows, first: bool):
        super().__init__()
        self.columns, self.first = columns, first
        bias = first and linear.bias is not None
        self.part = _linear_like(linear, columns[1] - columns[0], linear.out_features, bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.part(x[..., slice(*self.columns)])
        return (x, y) if self.first else y


def _linear(linear: nn.Linear, columns: Rows, first: bool, last: bool) -> Slice:
    made = LinearSlice(linear, columns, first)
    shape = (linear.out_features, linear.in_features)
    pieces: dict[str, tuple[Piece, ...]] = {"part.weight": (_cut("weight", shape, 1, columns),)}
    if made.part.bias is not None:
        pieces["part.bias"] = (_cut("bias", shape[:1], 0, (0, shape[0])),)
    return Slice(made, pieces, "no" if first else "last" if last else "more")
