"""The grid: the depth × row × col part of the mesh, as one rank sees it.

    depth   planes: copies of every matrix, other tokens. Their gradients meet in the units' reductions, never in a layer
    row     splits tokens (whole sequences) and every matrix
    col     splits features and heads inside a layer, and every matrix

An `Axis` is the line of ranks through this one along an axis, with the collectives that layers use; on a line of one rank they
are the identity and call nothing. Gathers and scatters can be started, and their result taken later (`Coming`): where an axis
does not overlap, they are waited for where they start, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold import collectives
from fourfold.collectives import Pending

__all__ = ["Axis", "Coming", "Grid"]


class Coming:
    """A tensor that a collective under way makes, from `source`, which is held until then."""

    def __init__(self, value: Tensor, pending: Pending | None = None, source: Tensor | None = None):
        self._value, self._pending, self._source = value, pending, source
        self._then: Callable[[Tensor], Tensor] | None = None

    @property
    def here(self) -> bool:
        """Whether nothing has to be waited for."""
        return self._pending is None

    def then(self, make: Callable[[Tensor], Tensor]) -> Coming:
        """This, with the tensor turned into another when it is here."""
        before = self._then
        self._then = make if before is None else lambda value: make(before(value))
        return self

    def get(self) -> Tensor:
        """The tensor, waited for."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = self._source = None
        if self._then is not None:
            self._value, self._then = self._then(self._value), None
        return self._value


class Axis:
    """`size` ranks, of which this is number `index`. Tensors are cut and joined along their first dim, in rank order."""

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

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, one after another."""
        return x if self.group is None else collectives.gathered(x, self.group, f"a gather over {self.name}")

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of all x."""
        return x if self.group is None else collectives.scattered(x, self.group, f"a scatter over {self.name}")

    def start_gather(self, x: Tensor) -> Coming:
        """`gather`, started. Compiled graphs order collectives themselves."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return Coming(self.gather(x))
        x = x.contiguous()
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return Coming(out, collectives.all_gather(out, x, self.group, f"a gather over {self.name}"), x)

    def start_scatter(self, x: Tensor) -> Coming:
        """`scatter`, started."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return Coming(self.scatter(x))
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return Coming(out, collectives.reduce_scatter(out, x, self.group, f"a scatter over {self.name}"), x)

    def start_broadcast(self, x: Tensor, source: int) -> Coming:
        """`broadcast`, started."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return Coming(self.broadcast(x, source))
        out = x.contiguous() if self.index == source else torch.empty_like(x, memory_format=torch.contiguous_format)
        return Coming(out, collectives.broadcast(out, source, self.group, f"a broadcast over {self.name}"))

    def start_reduce(self, x: Tensor, target: int) -> Coming:
        """`reduce`, started; x is no longer the caller's."""
        if self.group is None or not self.overlap or torch.compiler.is_compiling():
            return Coming(self.reduce(x, target))
        x = x.contiguous()
        return Coming(x, collectives.reduce(x, target, self.group, f"a reduction over {self.name}"))

    def sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else collectives.summed(x, self.group, f"a sum over {self.name}")

    def max(self, x: Tensor) -> Tensor:
        return x if self.group is None else collectives.summed(x, self.group, f"a maximum over {self.name}", "max")

    def exchange(self, x: Tensor) -> Tensor:
        """Part r of x goes to rank r."""
        return x if self.group is None else collectives.exchanged(x, self.group, f"an exchange over {self.name}")

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source`."""
        return (
            x if self.group is None else collectives.broadcasted(x, source, self.group, f"a broadcast over {self.name}")
        )

    def reduce(self, x: Tensor, target: int) -> Tensor:
        """The sum of all x, of use on rank `target` alone."""
        return x if self.group is None else collectives.reduced(x, target, self.group, f"a reduction over {self.name}")


@dataclass(frozen=True)
class Grid:
    """This rank's lines, and the axes of degree > 1 beside them along which everything here is copied (`data`, `depth`)."""

    row: Axis
    col: Axis
    replicas: tuple[str, ...] = ()

    def copies(self, *axes: str) -> tuple[str, ...]:
        """Axes along which a parameter that is not split over `axes` (of row, col) is copied."""
        return (*self.replicas, *(a.name for a in (self.row, self.col) if a.name in axes and a.size > 1))
