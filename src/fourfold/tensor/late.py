"""Overlap of the grid's collectives over row: weights are prefetched, and weight gradients are reduced later.

`WeightPrefetch` gathers W over row one linear layer ahead. When an op (F, B, …) of a stage first runs, it records the order in
which the op uses weights, recomputation included; from then on, taking a weight starts the gather of the next one. A wrong
prediction costs a gather but never changes a result. Nothing is in flight between two ops, so no gathered weight outlives an
update. A weight whose unit is still being gathered is not prefetched.

`GradientSums` runs the reduction over row of one weight gradient while the next matmul is computed. Sums are added to the
gradients in the order in which they were started, which is micro-batch order. A unit's reduction inside an op is deferred
until they are done.

Both issue collectives in the order of the ops, never by arrival, so it is the same on all ranks of a row. Extra memory: one
gathered W, and one unreduced weight gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fourfold.tensor.grid import PendingTensor

__all__ = ["GradientSums", "WeightPrefetch"]


class Weight(Protocol):
    """A weight that can be gathered over row."""

    def ready(self) -> bool:
        """Whether the weight is available; the same on all ranks of a row."""

    def start_whole(self) -> PendingTensor: ...


class WeightPrefetch:
    """Prefetches the weights of one stage; its ops also open and close `sums`. Without overlap, weights are gathered when
    taken."""

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums
        self._tapes: dict[str, list[Weight]] = {}  # by op: the weights that it uses, in order
        self._op, self._said, self._taken = "", list[Weight](), list[Weight]()
        self._next: tuple[Weight, PendingTensor] | None = None

    def begin(self, op: str) -> None:
        """Begin an op; ops of the same name use weights in the same order."""
        self._drop()
        self._sums.open()
        self._op, self._said, self._taken = op, self._tapes.get(op, []), []

    def end(self) -> None:
        self._drop()
        self._sums.close()
        self._tapes[self._op] = self._taken

    def take(self, weight: Weight) -> PendingTensor:
        """The gathered W."""
        said, at, coming = self._said, len(self._taken), None
        self._taken.append(weight)
        if self._next is not None:
            if self._next[0] is weight:
                coming, self._next = self._next[1], None
            else:
                self._drop()
        if coming is None:
            coming = weight.start_whole()
        if self._sums.in_flight and at + 1 < len(said) and said[at] is weight and (following := said[at + 1]).ready():
            self._next = following, following.start_whole()
        return coming

    def _drop(self) -> None:
        if self._next is not None:
            self._next[1].get()
            self._next = None


class GradientSums:
    """Reductions over row of weight gradients, at most `in_flight` at a time; 0: no overlap."""

    def __init__(self, in_flight: int = 1):
        self.in_flight = in_flight
        self._under_way: deque[tuple[PendingTensor, Callable[[Tensor], None]]] = deque()
        self._after: list[Callable[[], None]] = []  # to be called when the reductions in flight are done
        self._open = False

    def open(self) -> None:
        """Begin an op, whose matmuls reductions can overlap with."""
        self._open = True

    def close(self) -> None:
        """End an op: wait for the reductions, then run the calls that were deferred."""
        self._open = False
        if self._after:
            self.settle()

    def start(self, coming: PendingTensor, add: Callable[[Tensor], None]) -> None:
        """Pass a sum to `add` when it is complete."""
        if coming.here:  # no communication: a single row, or a flow that keeps weights in place
            add(coming.get())
            return
        if self._after:
            self.settle()
        self._under_way.append((coming, add))
        while len(self._under_way) > self.in_flight:
            self._complete()

    def then(self, act: Callable[[], None]) -> None:
        """Call a function after all started sums are added: now, or at the end of the current op."""
        self._after.append(act)
        if not (self._open and self._under_way):
            self.settle()

    def settle(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._complete()
        after, self._after = self._after, []
        for act in after:
            act()

    def _complete(self) -> None:
        coming, add = self._under_way.popleft()
        add(coming.get())
