"""What linears on the grid start early and finish late: weights gathered ahead of their use, gradients summed behind it.

`Ahead` gathers W of all rows one linear ahead. It learns the order in which an op (F, B, …) of a stage uses weights when the op
first runs, recomputation included, and follows it from then on: whoever takes a weight starts the gather of the next one. A
wrong guess costs a gather, never a result; nothing is in flight between two ops, so nothing outlives an update. A weight that
is not here yet (its unit is being gathered) is not fetched ahead.

`Sums` lets the sum over row of one weight gradient run while the next product is computed. Sums are added to the gradients in
the order in which they were started, that of the micro-batches. A unit's reduction that comes inside an op waits for them
with the rest of the op under way, and is started then.

Both start collectives in the order of the ops alone, never by what has arrived: it is the same on all ranks of a row. Memory:
one gathered W, and one weight gradient of all rows, more than without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fourfold.tensor.grid import Coming

__all__ = ["Ahead", "Sums"]


class Weight(Protocol):
    """A weight that can be gathered over row."""

    def ready(self) -> bool:
        """Whether it is here; the same on all ranks of a row."""

    def start_whole(self) -> Coming: ...


class Ahead:
    """Weights of one stage, whose ops also open and close `sums`. Without overlap, each is gathered where it is taken."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._tapes: dict[str, list[Weight]] = {}  # by op: the weights it takes, in order
        self._op, self._said, self._taken = "", list[Weight](), list[Weight]()
        self._next: tuple[Weight, Coming] | None = None

    def begin(self, op: str) -> None:
        """An op begins; ops of the same name take weights in the same order."""
        self._drop()
        self._sums.open()
        self._op, self._said, self._taken = op, self._tapes.get(op, []), []

    def end(self) -> None:
        self._drop()
        self._sums.close()
        self._tapes[self._op] = self._taken

    def take(self, weight: Weight) -> Coming:
        """W of all rows."""
        coming = None
        if self._next is not None and self._next[0] is weight:
            coming, self._next = self._next[1], None
        self._drop()
        coming = coming or weight.start_whole()
        at = len(self._taken)
        self._taken.append(weight)
        following = self._said[at + 1] if at + 1 < len(self._said) and self._said[at] is weight else None
        if self._sums.in_flight and following is not None and following.ready():
            self._next = following, following.start_whole()
        return coming

    def _drop(self) -> None:
        if self._next is not None:
            self._next[1].get()
            self._next = None


class Sums:
    """Sums over row of weight gradients, of which `in_flight` are under way at most; 0: no overlap."""

    def __init__(self, in_flight: int = 1):
        self.in_flight = in_flight
        self._under_way: deque[tuple[Coming, Callable[[Tensor], None]]] = deque()
        self._after: list[Callable[[], None]] = []  # waits for those that are under way
        self._open = False

    def open(self) -> None:
        """An op begins: products follow, beside which sums can run."""
        self._open = True

    def close(self) -> None:
        """An op ends, and what waited in it for sums is done."""
        self._open = False
        if self._after:
            self.settle()

    def start(self, coming: Coming, add: Callable[[Tensor], None]) -> None:
        """`add` is given the sum when it is here."""
        if coming.here:  # nothing moves: a single row, a flow that leaves weights where they are
            add(coming.get())
            return
        if self._after:
            self.settle()
        self._under_way.append((coming, add))
        while len(self._under_way) > self.in_flight:
            self._complete()

    def then(self, act: Callable[[], None]) -> None:
        """Do this when all that was started is added: now, or in the op under way."""
        self._after.append(act)
        if not (self._open and self._under_way):
            self.settle()

    def settle(self) -> None:
        """Wait for everything."""
        while self._under_way:
            self._complete()
        after, self._after = self._after, []
        for act in after:
            act()

    def _complete(self) -> None:
        coming, add = self._under_way.popleft()
        add(coming.get())
