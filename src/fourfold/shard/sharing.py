"""How a unit is divided over its replica group: into how many shards, with how many copies of each.

    replica group of 8      shards  copies   GATHER                    REDUCE
    replicate                  1       8     nothing                   all-reduce over the copies
    zero2, zero3, keep         8       1     all-gather                reduce-scatter
    the same, within = 4       4       2     all-gather over 4 ranks   reduce-scatter over 4, all-reduce over 2

`within` is hybrid sharding (HSDP). Gathers and reductions over the same ranks use separate process groups, so that neither
queues behind the other. `Reductions` bounds the number of full gradients with a reduction in flight.
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
    """This rank holds shard `index` of `shards`, and copy `copy` of the `copies` copies of that shard.

    A group that would contain only this rank is None.
    """

    shards: int = 1
    index: int = 0
    copies: int = 1
    copy: int = 0
    gathers: dist.ProcessGroup | None = None
    """Ranks that hold the shards of one copy, in order of `index`."""
    reductions: dist.ProcessGroup | None = None
    """The same ranks as `gathers`, in a separate process group."""
    across: dist.ProcessGroup | None = None
    """Ranks that hold a copy of this rank's shard."""

    def place(self, coordinates: dict[str, int], degrees: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Mesh coordinates and degrees for pieces of this unit's shard, where `data` and `depth` count copies only."""
        first = "data" if degrees["data"] > 1 else "depth"
        return (
            coordinates | {"data": 0, "depth": 0, first: self.copy},
            degrees | {"data": 1, "depth": 1, first: self.copies},
        )


ALONE = Sharing()


class Reduction:
    """A reduction in flight. `done` is called with this rank's shard of the sum; `before` are earlier collectives on `grad`."""

    def __init__(
        self,
        grad: Tensor,
        sharing: Sharing,
        what: str,
        done: Callable[[Tensor], None],
        before: Sequence[Pending] = (),
    ):
        self._before, self._summing = before, False
        self._sharing, self._what, self._done, self._work = sharing, what, done, Pending(None, what)
        self._buffers: tuple[Tensor, Tensor] | None = (grad, grad)  # (input, output), kept alive until complete
        if sharing.reductions is not None:
            out = grad.new_empty(grad.numel() // sharing.shards)
            self._buffers = (grad, out)
            self._work = reduce_scatter(out, grad, sharing.reductions, what)
        elif sharing.across is not None:
            self._work = all_reduce(grad, sharing.across, what)

    @property
    def sums_across(self) -> bool:
        """A sum across groups follows the reduction within this rank's group."""
        return self._sharing.reductions is not None and self._sharing.across is not None

    def reduced(self) -> None:
        """Wait until the gradient is reduced within the group, then start the sum across groups; the full gradient is free."""
        if self._buffers is None or self._summing:
            return
        for pending in self._before:
            pending.wait()
        self._work.wait()
        self._summing = True
        if self._sharing.reductions is not None and self._sharing.across is not None:
            self._buffers = (self._buffers[1], self._buffers[1])
            self._work = all_reduce(self._buffers[1], self._sharing.across, f"{self._what}, across")

    def complete(self) -> None:
        """Wait for the reduction and pass its result to `done`."""
        if self._buffers is None:
            return
        self.reduced()
        self._work.wait()
        out, self._buffers = self._buffers[1], None
        self._done(out)


class Reductions:
    """A rank's reductions of sharded units: at most `in_flight` of them run while the next gradient is computed.

    With groups, as many sums across groups run at the same time, each of one shard.
    With 0, each reduction is waited for at once: least memory, no overlap. A slice waits for all of them before it allocates
    its gradient, so that one full gradient exists at a time; its reduction still overlaps the computation before that.
    """

    def __init__(self, in_flight: int = 1):
        self.in_flight = in_flight
        self._running: deque[Reduction] = deque()
        self._summed: deque[Reduction] = deque()  # reduced within their groups, in flight across them

    def start(
        self,
        grad: Tensor,
        sharing: Sharing,
        what: str,
        done: Callable[[Tensor], None],
        before: Sequence[Pending] = (),
    ) -> Reduction:
        """Start a reduction, then wait for the oldest ones until at most `in_flight` remain."""
        started = Reduction(grad, sharing, what, done, before)
        if sharing.reductions is None:  # unsharded: completing it early would free no memory
            return started
        self._running.append(started)
        self.wait(self.in_flight)
        return started

    def wait(self, remaining: int = 0) -> None:
        """Wait for the oldest reductions until at most `remaining` are in flight, and as many sums across groups."""
        while len(self._running) > remaining:
            oldest = self._running.popleft()
            oldest.reduced()
            self._summed.append(oldest)
            while self._summed and (len(self._summed) > remaining or not oldest.sums_across):
                self._summed.popleft().complete()
        while len(self._summed) > remaining:
            self._summed.popleft().complete()
