"""Operator splitting (OSDP): a layer too large to gather at once is split into a chain of slices, each a separate unit.

    MLP          along the hidden size: slice j holds rows j of `up` (and gate), columns j of `down`
    head, loss   along the vocabulary: slice j holds rows j of the projection; only one slice's logits exist at a time
    linear       along its inputs, as in the OSDP paper

Slices are gathered, computed, recomputed and released one after another, so the parameters, gradients and activations of one
slice exist at a time. Without recomputation, the two matrices of an MLP slice are separate units. Slices are pieces of the
serial parameters: initial values and checkpoints are those of the unsplit layer, and the bias exists once.

Values between units (B sequences, T tokens, D hidden):

    MLP      x → (h, acc) → … → (h, acc) → y        h [B, T, D] feeds every slice; acc starts as the residual and accumulates
             (x, acc) → (h, acc) → … → y            in a parallel block: acc has the residual and attention's branch
             x → (h, acc, a) → (h, acc) → (h, acc, a) → … → y       with one unit per matrix; a: the slice's activation
    linear   x → (x, acc) → … → y
    head     x → (h, lse, picked) → … → loss        lse [B·T]: running logsumexp; picked: the target's logit

On a tensor grid every column splits its own block of the hidden size or of the vocabulary: a `Cutter` (tensor/slices.py) makes
the linear layers.

A slice whose output is only added to acc, or passed alongside it, does not use acc itself: no unit saves it, and its gradient
passes through unchanged (`ChainLink.adds`). All slices of a unit share its random number stream and draw the same dropout mask,
which is dropout of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.adapter import LoraLinear, Runs, adapted
from fourfold.model.fused import soft_cap
from fourfold.model.layers import IGNORE, MLP, Head, activate
from fourfold.piece import Piece

__all__ = ["Cutter", "Serial", "Slice", "adds_to_sum", "slices_of"]

Adds = Literal["no", "alongside", "more", "last"]
Rows = tuple[int, int]
Pieces = dict[str, tuple[Piece, ...]]
Total = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Slice:
    """One slice: its module (on the meta device), the pieces of its parameters, and how it connects to the next slice."""

    module: nn.Module
    pieces: Pieces
    adds: Adds = "no"
    """What happens to its output. no: it is the next slice's input; alongside: it is passed on with h and acc; more, last: it is
    added to acc (last: of the final slice)."""
    takes_extra: bool = False
    """Whether it takes the targets as an extra input."""
    tied_rows: Mapping[str, Rows] = field(default_factory=dict)
    """Parameters that are rows of a tied weight: their row range."""


class Cutter(Protocol):
    """Makes the linear layers of slice `index` of `count`, with the pieces of their parameters; `name`: the serial layer's."""

    def up(self, mlp: MLP, name: str, index: int, count: int, /) -> tuple[nn.Module, Pieces]: ...
    def down(self, mlp: MLP, name: str, index: int, count: int, /) -> tuple[nn.Module, Pieces]: ...
    def words(self, head: Head, name: str, index: int, count: int, /) -> tuple[nn.Module, Pieces, Any]: ...
    def tied_rows(self, head: Head, index: int, count: int, /) -> Rows: ...
    def whole(self, module: nn.Module, name: str, /) -> Pieces: ...
    def total(self, per_token: bool, /) -> Total: ...


def adds_to_sum(module: nn.Module) -> bool:
    """Whether a unit is fed (h, acc) and its output is added to acc: the MLP of a parallel block."""
    return isinstance(module, MLP) and module.parallel


def slices_of(
    name: str, module: nn.Module, count: int, *, per_matrix: bool = False, cutter: Cutter | None = None
) -> list[Slice]:
    """Split the unit `name` into `count` nearly equal slices; `per_matrix`: one slice for each matrix of an MLP slice."""
    cutter = cutter or Serial()
    match module:
        case MLP():
            halves = (("up",), ("down",)) if per_matrix else (("up", "down"),)
            return [_mlp(name, module, cutter, j, count, half) for j in range(count) for half in halves]
        case Head():
            return [_head(name, module, cutter, j, count) for j in range(count)]
        case _:
            return [_linear(name, _plain(module), j, count) for j in range(count)]


# ---- linear layers of the serial model ----


class Serial:
    """Splits nn.Linear layers. `copies_over`: the mesh axes along which ranks hold identical copies."""

    def __init__(self, copies_over: tuple[str, ...] = ()):
        self.copies_over = copies_over

    def up(self, mlp: MLP, name: str, index: int, count: int) -> tuple[nn.Module, Pieces]:
        up, width = _plain(mlp.up), _plain(mlp.down).in_features
        ways, (start, stop) = up.out_features // width, _cut(width, index, count)
        parts = [(i * (stop - start), (i * width + start, i * width + stop)) for i in range(ways)]
        made = _linear_like(up, up.in_features, ways * (stop - start), up.bias is not None)
        pieces: Pieces = self._adapted(made, up, name, outputs=tuple((*rows, at) for at, rows in parts))
        pieces |= {"weight": tuple(self._piece(f"{name}.weight", up.weight, 0, rows, at) for at, rows in parts)}
        if up.bias is not None:
            pieces["bias"] = tuple(self._piece(f"{name}.bias", up.bias, 0, rows, at) for at, rows in parts)
        return made, pieces

    def down(self, mlp: MLP, name: str, index: int, count: int) -> tuple[nn.Module, Pieces]:
        return self.inputs(_plain(mlp.down), name, index, count)

    def inputs(self, linear: nn.Linear, name: str, index: int, count: int) -> tuple[nn.Linear, Pieces]:
        """A range of input features of a linear layer; the first slice has the bias."""
        columns, bias = _cut(linear.in_features, index, count), index == 0 and linear.bias is not None
        made = _linear_like(linear, columns[1] - columns[0], linear.out_features, bias)
        pieces: Pieces = self._adapted(made, linear, name, inputs=((*columns, 0),))
        pieces |= {"weight": (self._piece(f"{name}.weight", linear.weight, 1, columns),)}
        if bias:
            pieces["bias"] = (self._piece(f"{name}.bias", linear.bias, 0, (0, linear.out_features)),)
        return made, pieces

    def words(self, head: Head, name: str, index: int, count: int) -> tuple[nn.Module, Pieces, Any]:
        proj = _plain(head.proj)
        rows = self.tied_rows(head, index, count)
        made = _linear_like(proj, proj.in_features, rows[1] - rows[0], proj.bias is not None)
        pieces: Pieces = {"weight": (self._piece(f"{name}.weight", proj.weight, 0, rows),)}
        if proj.bias is not None:
            pieces["bias"] = (self._piece(f"{name}.bias", proj.bias, 0, rows),)
        return made, pieces, ((*rows, 0),)

    def tied_rows(self, head: Head, index: int, count: int) -> Rows:
        return _cut(_plain(head.proj).out_features, index, count)

    def whole(self, module: nn.Module, name: str) -> Pieces:
        found = dict(module.named_parameters())
        return {n: (self._piece(f"{name}.{n}", p, 0, (0, p.shape[0])),) for n, p in found.items()}

    def _adapted(
        self, made: nn.Linear, like: nn.Linear, name: str, inputs: Runs | None = None, outputs: Runs | None = None
    ) -> Pieces:
        """Add the adapter's part for a slice's inputs and outputs (default: all) to the slice; returns its pieces."""
        if not isinstance(like, LoraLinear):
            return {}
        shape, all_inputs, all_outputs = like.adapter.shape, ((0, like.in_features, 0),), ((0, like.out_features, 0),)
        adapted(made, shape, inputs or all_inputs, outputs or all_outputs)
        assert isinstance(made, LoraLinear)
        found = made.adapter.pieces(f"{name}.adapter", self.copies_over, self.copies_over)
        return {f"adapter.{n}": pieces for n, pieces in found.items()}

    def total(self, per_token: bool) -> Total:
        if per_token:
            return lambda lse, picked, valid: (lse - picked).where(valid, 0.0)
        return lambda lse, picked, valid: (lse - picked).where(valid, 0.0).sum()

    def _piece(self, name: str, serial: Tensor, dim: int, rows: Rows, at: int = 0) -> Piece:
        """The piece with elements `rows` along `dim` of a serial parameter, at offset `at` of the local one."""
        shape = tuple(serial.shape)
        box = tuple((0, n) for n in shape)
        part, local = list(box), list(box)
        part[dim], local[dim] = rows, (at, at + rows[1] - rows[0])
        return Piece(name, shape, tuple(part), tuple(local), self.copies_over)


def _cut(width: int, index: int, count: int) -> Rows:
    return index * width // count, (index + 1) * width // count


def _plain(module: nn.Module) -> nn.Linear:
    assert type(module) in (nn.Linear, LoraLinear), f"a {type(module).__name__} cannot be split into slices"
    assert isinstance(module, nn.Linear)
    return module


def _linear_like(serial: nn.Linear, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=serial.weight.dtype)


def _put(pieces: Pieces, where: str, found: Pieces) -> None:
    pieces.update({f"{where}.{n}": held for n, held in found.items()})


# ---- the MLP ----


class MlpSlice(nn.Module):
    """Rows of `up` (and of the gate), columns of `down`, or both.

    The first slice has the bias of `down`. The norm is in the first slice, or in the last if the model normalises after it.
    """

    def __init__(self, mlp: MLP, up: nn.Module | None, down: nn.Module | None, first: bool, last: bool):
        super().__init__()
        assert mlp.out_norm is None, "an MLP with a norm of its output cannot be cut into slices"
        self.activation, self.gated, self.dropout, self.first = mlp.activation, mlp.gated, mlp.dropout, first
        self.residual_scale, self.parallel = mlp.residual_scale, mlp.parallel
        pre, self.post = first and not mlp.post_norm and up is not None, last and mlp.post_norm and down is not None
        self.norm = mlp.norm if pre or self.post else None
        self.up, self.down = up, down

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        x_btd, h_btd, a_btf = values[0], values[0], values[-1]
        acc_btd = values[1] if self.parallel and len(values) > 1 else x_btd
        if self.up is not None:
            if self.norm is not None and not self.post:
                h_btd = self.norm(x_btd)
            a_btf = activate(self.activation, self.gated, self.up(h_btd))
        if self.down is None:
            return (h_btd, acc_btd, a_btf) if self.first else a_btf
        y_btd = F.dropout(self.down(a_btf), self.dropout, self.training)
        if self.residual_scale != 1:
            y_btd = y_btd * self.residual_scale
        if self.first and self.up is not None:
            return h_btd, acc_btd + y_btd
        if self.post:
            assert self.norm is not None
            return self.norm(values[1] + y_btd)
        return y_btd


def _mlp(name: str, mlp: MLP, cutter: Cutter, index: int, count: int, parts: tuple[str, ...]) -> Slice:
    up = cutter.up(mlp, f"{name}.up", index, count) if "up" in parts else (None, {})
    down = cutter.down(mlp, f"{name}.down", index, count) if "down" in parts else (None, {})
    first, last = index == 0, index == count - 1
    made = MlpSlice(mlp, up[0], down[0], first, last)
    pieces: Pieces = {}
    if made.norm is not None:
        _put(pieces, "norm", cutter.whole(made.norm, f"{name}.norm"))
    _put(pieces, "up", up[1])
    _put(pieces, "down", down[1])
    adds: Adds = "last" if last else "more"
    if made.post or (first and made.up is not None):
        adds = "no"
    elif made.down is None:
        adds = "alongside"
    return Slice(made, pieces, adds)


# ---- the head and its loss ----


class HeadSlice(nn.Module):
    """A range of the vocabulary; the first slice also has the layers before the projection.

    `runs` (start, stop, at): the logits of tokens [start, stop) are at positions [at, …) of the projection's output.
    """

    def __init__(self, head: Head, proj: nn.Module, runs: tuple[tuple[int, int, int], ...], first: bool, total: Any):
        super().__init__()
        self.runs, self.first, self.total = runs, first, total
        self.scale, self.softcap, self.per_token = head.scale, head.softcap, bool(head.loss.per_token)
        self.dense = head.dense if first else None
        self.norm = head.norm if first else None
        self.proj = proj

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        *values, targets_bt = args
        h_btd = values[0]
        if self.dense is not None:
            h_btd = F.gelu(self.dense(h_btd))
        if self.norm is not None:
            h_btd = self.norm(h_btd)
            h_btd = h_btd if self.scale == 1 else h_btd * self.scale
        logits_nv, targets_n = self._logits(h_btd), targets_bt.flatten()
        here, place, at = torch.zeros_like(targets_n, dtype=torch.bool), torch.zeros_like(targets_n), 0
        for start, stop, _ in self.runs:
            inside = (targets_n >= start) & (targets_n < stop)
            here, place = here | inside, torch.where(inside, targets_n - start + at, place)
            at += stop - start
        if logits_nv.shape[1]:
            picked_n = logits_nv.gather(1, place[:, None])[:, 0].where(here, 0.0)
            lse_n = logits_nv.logsumexp(1)
        else:  # this slice is padding only
            picked_n = logits_nv.sum(1)
            lse_n = picked_n + torch.finfo(picked_n.dtype).min
        if not self.first:
            lse_n, picked_n = torch.logaddexp(values[1], lse_n), values[2] + picked_n
        if self.total is not None:
            loss = self.total(lse_n, picked_n, targets_n != IGNORE)
            return loss.view_as(targets_bt) if self.per_token else loss
        return h_btd, lse_n, picked_n

    def _logits(self, h_btd: Tensor) -> Tensor:
        """Logits without padding, in fp32 or fp64."""
        logits_nv = self.proj(h_btd).flatten(0, 1)
        used = [logits_nv[:, at : at + stop - start] for start, stop, at in self.runs]
        logits_nv = used[0] if len(used) == 1 else torch.cat(used, 1) if used else logits_nv[:, :0]
        if self.softcap:
            logits_nv = soft_cap(logits_nv, self.softcap)
        return logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()


def _head(name: str, head: Head, cutter: Cutter, index: int, count: int) -> Slice:
    proj, found, runs = cutter.words(head, f"{name}.proj", index, count)
    made = HeadSlice(
        head, proj, runs, index == 0, cutter.total(bool(head.loss.per_token)) if index == count - 1 else None
    )
    pieces: Pieces = {}
    if made.dense is not None:
        _put(pieces, "dense", cutter.whole(made.dense, f"{name}.dense"))
    if made.norm is not None:
        _put(pieces, "norm", cutter.whole(made.norm, f"{name}.norm"))
    _put(pieces, "proj", found)
    return Slice(made, pieces, takes_extra=True, tied_rows={"proj.weight": cutter.tied_rows(head, index, count)})


# ---- any linear layer ----


class LinearSlice(nn.Module):
    """A range of input features of a linear layer; the first slice has the bias."""

    def __init__(self, part: nn.Linear, columns: Rows, first: bool):
        super().__init__()
        self.part, self.columns, self.first = part, columns, first

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.part(x[..., slice(*self.columns)])
        return (x, y) if self.first else y


def _linear(name: str, linear: nn.Linear, index: int, count: int) -> Slice:
    part, found = Serial().inputs(linear, name, index, count)
    made = LinearSlice(part, _cut(linear.in_features, index, count), index == 0)
    pieces: Pieces = {}
    _put(pieces, "part", found)
    return Slice(made, pieces, "no" if index == 0 else "last" if index == count - 1 else "more")
