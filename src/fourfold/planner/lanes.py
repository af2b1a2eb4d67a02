"""What a chain of units takes with its collectives beside it: computing, a lane of gathers, a lane of reductions, one link.

As the program and the units do it (program/lowering.py, shard/sharing.py):

- Units compute one after another. The gather of the next one starts when one begins, so at most one is ahead.
- A unit's reduction starts when its gradients are there. Of sharded units one at most is under way while the next is made: when
  a second starts, computing waits until the first has ended. What is summed across groups is waited for besides.
- Gathers run in their order, and so do reductions. A gather, a reduction and what the grid moves share the link evenly. What the
  grid moves is spread over the unit: in PARTS parts, each computes, and then waits for its share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Lanes", "Step"]

PARTS = 4


class Step(NamedTuple):
    """One unit's part of an op, in seconds."""

    compute: float
    """Its collectives on the grid left out."""
    gather: float = 0.0
    """Of its parameters, where they are not there yet."""
    reduce: float = 0.0
    """Of its gradients, when it has computed."""
    across: float = 0.0
    """Of the sum across groups, after that."""
    holds: bool = True
    """Whether its reduction must have ended before the one after the next is made: it is sharded."""
    moves: float = 0.0
    """Of collectives inside it that are waited for, on the link of gathers and reductions."""
    beside: float = 0.0
    """Of those on that link that are not waited for, were it theirs alone."""
    apart: float = 0.0
    """Of those that are waited for on other links."""


class Lanes:
    """A clock of computing, and what is under way beside it."""

    def __init__(self) -> None:
        self.now = self.exposed = 0.0
        self.communicated = 0.0
        """Seconds of all collectives so far, alone on the link."""
        self._gathers: deque[float] = deque()
        self._reductions: deque[float] = deque()
        self._waited: deque[float] = deque()
        self._held: deque[tuple[int, float]] = deque()  # of reductions under way, (number, what follows it)
        self._started = 0

    def run(self, chain: Sequence[Step], *, ready: bool = False, following: float = 0.0) -> None:
        """Units one after another; `ready`: the first one's gather has been started; `following`: that of the unit after them."""
        if not ready:
            self.gather(chain[0].gather)
        for i, step in enumerate(chain):
            ahead = chain[i + 1].gather if i + 1 < len(chain) else following
            self.gather(ahead)
            if step.gather:
                self._wait(self._gathers, 1 if ahead else 0)
            self._work(step)
            if step.reduce:
                self.reduce(step)

    def _work(self, step: Step) -> None:
        """Compute, and wait for the grid."""
        self.communicated += step.moves + step.apart
        self.exposed += step.moves + step.apart
        shown, computing = self.exposed, step.compute + step.apart
        if not (self._gathers or self._reductions):  # the link is free
            self.now += computing + step.moves
            return
        if not (step.moves or step.beside):
            self._pass(computing)
            return
        for _ in range(PARTS):
            if step.beside:
                self._waited.append(step.beside / PARTS)
            self._pass(computing / PARTS)
            self._wait(self._waited, 0)
            self._move(step.moves / PARTS)
        self.exposed = shown

    def gather(self, seconds: float) -> None:
        """Start a gather."""
        if seconds:
            self._gathers.append(seconds)
            self.communicated += seconds

    def reduce(self, step: Step) -> None:
        """Start a reduction, and wait until as few are under way as there may be."""
        self._reductions.append(step.reduce)
        self.communicated += step.reduce + step.across
        self._started += 1
        if step.holds:
            self._held.append((self._started, step.across))
            while len(self._held) > 1:
                self._complete()

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._held:
            self._complete()
        self._wait(self._reductions, 0)

    def _complete(self) -> None:
        number, across = self._held.popleft()
        self._wait(self._reductions, self._started - number)
        self._move(across)

    def _move(self, seconds: float) -> None:
        """A collective that is waited for."""
        if not seconds:
            return
        if not (self._gathers or self._reductions):  # the link is free
            self.now += seconds
            self.exposed += seconds
            return
        self._waited.append(seconds)
        self._wait(self._waited, 0)

    def _wait(self, lane: deque[float], left: int) -> None:
        """Until no more than so many are left."""
        before = self.now
        while len(lane) > left:
            busy = self._busy()
            self._pass(min(queue[0] for queue in busy) * len(busy))
        self.exposed += self.now - before

    def _busy(self) -> list[deque[float]]:
        if not (self._gathers or self._reductions or self._waited):
            return []
        return [queue for queue in (self._gathers, self._reductions, self._waited) if queue]

    def _pass(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and (busy := self._busy()):
            step = min(end - self.now, min(queue[0] for queue in busy) * len(busy))
            for queue in busy:
                queue[0] -= step / len(busy)
                if queue[0] <= 1e-12:
                    queue.popleft()
            self.now += step
        self.now = end
