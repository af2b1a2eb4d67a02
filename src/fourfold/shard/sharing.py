"""How one unit is shared by the ranks of its replica group: into how many shards, and how many copies there are of each.

    replica group of 8      shards  copies   GATHER                    REDUCE
    replicate                  1       8     nothing                   all-reduce over the copies
    zero2, zero3, keep         8       1     all-gather                reduce-scatter
    the same, within = 4       4       2     all-gather over 4 ranks   reduce-scatter over 4, all-reduce over 2

Gathers and reductions of the same ranks have a process group each, so that neither waits for the other. `Reductions` bounds how
many whole gradients wait for their reduction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fourfold.collectives import Pending, all_reduce, reduce_scatter

__all__ = ["ALONE", "Reduction", "Reductions", "Sharing"]


@dataclass(frozen=True)
class Sharing:
    """Of `shards` shards this rank holds number `index`; of its `copies` copies this rank's is number `copy`.

    Groups are None where they would hold this rank alone.
    """

    shards: int = 1
    index: int = 0
    copies: int = 1
    copy: int = 0
    gathers: dist.ProcessGroup | None = None
    """Ranks that hold the shards of one copy, in order of `index`."""
    reductions: dist.ProcessGroup | None = None
    """The same ranks."""
    across: dist.ProcessGroup | None = None
    """Ranks that hold a copy of this rank's shard."""

    def place(self, coordinates: dict[str, int], degrees: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Mesh coordinates and degrees as pieces of this unit's shard see them: along `data` and `depth`, copies only."""
        first = "data" if degrees["data"] > 1 else "depth"
        return (
            coordinates | {"data": 0, "depth": 0, first: self.copy},
            degrees | {"data": 1, "depth": 1, first: self.copies},
        )


ALONE = Sharing()


class Reduction:
    """One reduction under way: `done` is given this rank's part of the sum. `before`: collectives on `grad` itself."""

    def __init__(
        self,
        grad: Tensor,
        sharing: Sharing,
        what: str,
        done: Callable[[Tensor], None],
        before: Sequence[Pending] = (),
    ):
        self._before = before
        self._sharing, self._what, self._done, self._work = sharing, what, done, Pending(None, what)
        self._held: tuple[Tensor, Tensor] | None = (grad, grad)  # until the collective has read it; and the sum
        if sharing.reductions is not None:
            out = grad.new_empty(grad.numel() // sharing.shards)
            self._held = (grad, out)
            self._work = reduce_scatter(out, grad, sharing.reductions, what)
        elif sharing.across is not None:
            self._work = all_reduce(grad, sharing.across, what)

    def complete(self) -> None:
        """Wait for it and hand over the sum."""
        if self._held is None:
            return
        for pending in self._before:
            pending.wait()
        self._work.wait()
        out, self._held = self._held[1], None
        if self._sharing.reductions is not None and self._sharing.across is not None:
            all_reduce(out, self._sharing.across, f"{self._what}, across").wait()
        self._done(out)


class Reductions:
    """The reductions of a rank: at most `in_flight` whole gradients of sharded units wait for theirs while the next is made.

    With 0, a reduction is waited for at once: least memory, no overlap. A slice's gradient waits for all of them before it is
    made (`settle`), so that one whole gradient exists at a time; a reduction then overlaps what comes before that.
    """

    def __init__(self, in_flight: int = 1):
        self.in_flight = in_flight
        self._under_way: deque[Reduction] = deque()

    def start(
        self,
        grad: Tensor,
        sharing: Sharing,
        what: str,
        done: Callable[[Tensor], None],
        before: Sequence[Pending] = (),
    ) -> Reduction:
        """Start a reduction; where too many are under way, the oldest ones are waited for first."""
        started = Reduction(grad, sharing, what, done, before)
        if sharing.reductions is None:  # the gradient stays whole: nothing would be freed
            return started
        self._under_way.append(started)
        self.settle(self.in_flight)
        return started

    def settle(self, left: int = 0) -> None:
        """Wait for the oldest reductions until at most `left` are under way."""
        while len(self._under_way) > left:
            self._under_way.popleft().complete()
