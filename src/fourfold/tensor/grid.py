"""The grid: the depth × row × col part of the mesh, as one rank sees it.

    depth   planes with copies of every matrix and different tokens; their gradients are reduced by the units, not in layers
    row     splits tokens (whole sequences) and every matrix
    col     splits features and heads inside a layer, and every matrix

An `Axis` is the line of ranks through this one along a mesh axis, with the collectives that layers use; for a single rank they
are the identity. Gathers and scatters can be started and their results taken later (`PendingTensor`); without overlap they
complete where they start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold import collectives
from fourfold.collectives import Pending

__all__ = ["Axis", "Grid", "PendingTensor"]


class PendingTensor:
    """The result of a collective in flight; `source` is kept alive until it completes."""

    __slots__ = ("_pending", "_source", "_then", "_value")

    def __init__(self, value: Tensor, pending: Pending | None = None, source: Tensor | None = None):
        self._value, self._pending, self._source = value, pending, source
        self._then: Callable[[Tensor], Tensor] | None = None

    @property
    def here(self) -> bool:
        """Whether the result is complete."""
        return self._pending is None

    def then(self, make: Callable[[Tensor], Tensor]) -> PendingTensor:
        """Apply a function to the result when it is taken."""
        before = self._then
        self._then = make if before is None else lambda value: make(before(value))
        return self

    def first(self, rows: int, of: int) -> PendingTensor:
        """Keep the first `rows` of its `of` rows, when it is taken."""
        return self if rows == of else self.then(lambda value: value[:rows])

    def get(self) -> Tensor:
        """Wait for the result and return it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = self._source = None
        if self._then is not None:
            self._value, self._then = self._then(self._value), None
        return self._value


class Axis:
    """A line of `size` ranks; this rank has number `index`. Tensors are split and concatenated along dim 0, in rank order."""

    def __init__(
        self,
        name: str,
        size: int = 1,
        index: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        overlap: bool = False,
    ):
        self.name, self.size, self.index, self.group, self.overlap = name, size, index, group, overlap
        self._gather, self._scatter = f"a gather over {name}", f"a scatter over {name}"
        self._broadcast, self._reduction = f"a broadcast over {name}", f"a reduction over {name}"

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: every rank's x, concatenated."""
        return x if self.group is None else collectives.gathered(x, self.group, self._gather)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: this rank's part of the sum of all x."""
        return x if self.group is None else collectives.scattered(x, self.group, self._scatter)

    def start_gather(self, x: Tensor) -> PendingTensor:
        """Start a `gather`; in a compiled graph it completes at once."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return PendingTensor(self.gather(x))
        x = x.contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return PendingTensor(out, collectives.all_gather(out, x, self.group, self._gather), x)

    def start_scatter(self, x: Tensor) -> PendingTensor:
        """Start a `scatter`."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return PendingTensor(self.scatter(x))
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return PendingTensor(out, collectives.reduce_scatter(out, x, self.group, self._scatter), x)

    def start_broadcast(self, x: Tensor, source: int) -> PendingTensor:
        """Start a `broadcast`."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return PendingTensor(self.broadcast(x, source))
        out = x.contiguous() if self.index == source else torch.empty_like(x, memory_format=torch.contiguous_format)
        return PendingTensor(out, collectives.broadcast(out, source, self.group, self._broadcast))

    def start_reduce(self, x: Tensor, target: int) -> PendingTensor:
        """Start a `reduce`, which may overwrite x."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return PendingTensor(self.reduce(x, target))
        x = x.contiguous()
        return PendingTensor(x, collectives.reduce(x, target, self.group, self._reduction))

    def sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else collectives.summed(x, self.group, f"a sum over {self.name}")

    def max(self, x: Tensor) -> Tensor:
        return x if self.group is None else collectives.summed(x, self.group, f"a maximum over {self.name}", "max")

    def exchange(self, x: Tensor) -> Tensor:
        """All-to-all: part r of x goes to rank r."""
        return x if self.group is None else collectives.exchanged(x, self.group, f"an exchange over {self.name}")

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source`."""
        return x if self.group is None else collectives.broadcasted(x, source, self.group, self._broadcast)

    def reduce(self, x: Tensor, target: int) -> Tensor:
        """The sum of all x; valid only on rank `target`."""
        return x if self.group is None else collectives.reduced(x, target, self.group, self._reduction)


@dataclass(frozen=True)
class Grid:
    """This rank's row and col axes, and the mesh axes of degree > 1 along which its matrices are replicated (`data`, `depth`)."""

    row: Axis
    col: Axis
    replicas: tuple[str, ...] = ()

    def copies(self, *axes: str) -> tuple[str, ...]:
        """Mesh axes along which a parameter that is not split over `axes` (of row, col) is replicated."""
        return (*self.replicas, *(a.name for a in (self.row, self.col) if a.name in axes and a.size > 1))
