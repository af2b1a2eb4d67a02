"""What a chain of units takes with its collectives beside it: computing, a lane of gathers, a lane of reductions, one link.

As the program and the units do it (program/lowering.py, shard/sharing.py):

- Units compute one after another. The gather of the next one starts when one begins, so at most one is ahead.
- A unit's reduction starts when its gradients are there. Of sharded units one at most is under way while the next is made: when
  a second starts, computing waits until the first has ended. What is summed across groups is waited for besides.
- Gathers run in their order, and so do reductions. A gather, a reduction and what the grid moves share the link (`link`). What
  the grid moves is spread over the unit: in PARTS parts, each computes, and then waits for its share.

Layers that are alike soon take alike: where all is under way as it was a layer before, the rest of them is not gone through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.planner.link import Link

__all__ = ["Lanes", "Step"]

GATHERS, REDUCTIONS, GRID = 0, 1, 2
PARTS = 4
LONGEST = 40
"""Steps of a layer, at most, that are known to repeat."""


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


class _Mark(NamedTuple):
    """A place in a chain, what is under way there, and what has been until then."""

    place: int
    state: tuple[float, ...] = ()
    now: float = 0.0
    exposed: float = 0.0
    communicated: float = 0.0
    counts: Sequence[int] = ()


_NO_MARK = _Mark(-LONGEST - 1)


class Lanes:
    """A clock of computing, and what is under way beside it."""

    def __init__(self, queue: float = 0.0) -> None:
        self._worked = 0.0
        self.exposed = self.communicated = 0.0
        """Seconds waited for collectives so far, and seconds of all of them, alone on the link."""
        self._link = Link((0, 0, 0), (queue,) * 3)
        self._held: deque[tuple[int, float]] = deque()  # of reductions under way, (number, what follows it)

    @property
    def now(self) -> float:
        return self._link.now

    @property
    def since_work(self) -> float:
        """Seconds that have passed since a unit computed: its reduction waited for others."""
        return self.now - self._worked

    def run(self, chain: Sequence[Step], *, ready: bool = False, following: float = 0.0) -> None:
        """Units one after another; `ready`: the first one's gather has been started; `following`: that of the unit after them."""
        if not ready:
            self.gather(chain[0].gather)
        alike = _repeats([id(step) for step in chain])
        i, mark = 0, _NO_MARK
        while i < len(chain):
            period, left = alike[i]
            if left > period and i != mark.place + period:
                mark = self._mark(i) if i > mark.place + period else mark
            elif left > period:
                before, mark = mark, self._mark(i)
                if mark.state == before.state:  # as it went from there it goes on
                    self._skip(before, mark, left // period)
                    i, mark = i + left // period * period, _NO_MARK
                    continue
            self._unit(chain[i], chain[i + 1].gather if i + 1 < len(chain) else following)
            i += 1

    def _mark(self, place: int) -> _Mark:
        link, counts = self._link, self._link.counts()
        held = (x for number, across in self._held for x in (counts[REDUCTIONS] - number, across))
        return _Mark(place, (*link.state(), *held), link.now, self.exposed, self.communicated, counts)

    def _skip(self, a: _Mark, b: _Mark, times: int) -> None:
        """What went on between two states that are alike, so often again."""
        counts = [times * (y - x) for x, y in zip(a.counts, b.counts, strict=True)]
        self._link.skip(times * (b.now - a.now), counts)
        self._worked += times * (b.now - a.now)
        self.exposed += times * (b.exposed - a.exposed)
        self.communicated += times * (b.communicated - a.communicated)
        self._held = deque((number + counts[REDUCTIONS], across) for number, across in self._held)

    def _unit(self, step: Step, ahead: float) -> None:
        """Start the next one's gather, and wait for its own."""
        self.gather(ahead)
        if step.gather:
            self.exposed += self._link.wait_for_all_but(GATHERS, 1 if ahead else 0)
        self._work(step)
        self._worked = self.now
        if step.reduce:
            self.reduce(step)

    def _work(self, step: Step) -> None:
        """Compute, and wait for the grid."""
        link, computing = self._link, step.compute + step.apart
        self.communicated += step.moves + step.apart
        self.exposed += step.moves + step.apart
        if link.idle:
            link.now += computing + step.moves
        elif not (step.moves or step.beside):
            link.run(computing)
        else:
            for _ in range(PARTS):
                if step.beside:
                    link.start(GRID, step.beside / PARTS)
                link.run(computing / PARTS)
                link.wait_for_all_but(GRID, 0)
                link.wait(GRID, link.start(GRID, step.moves / PARTS))

    def gather(self, seconds: float) -> None:
        """Start a gather."""
        if seconds:
            self._link.start(GATHERS, seconds)
            self.communicated += seconds

    def reduce(self, step: Step) -> None:
        """Start a reduction, and wait until as few are under way as there may be."""
        number = self._link.start(REDUCTIONS, step.reduce)
        self.communicated += step.reduce + step.across
        if step.holds:
            self._held.append((number, step.across))
            while len(self._held) > 1:
                self._complete()

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._held:
            self._complete()
        self.exposed += self._link.wait_for_all_but(REDUCTIONS, 0)

    def _complete(self) -> None:
        number, across = self._held.popleft()
        self.exposed += self._link.wait(REDUCTIONS, number)
        if across:
            self.exposed += self._link.wait(GRID, self._link.start(GRID, across))


def _repeats(chain: Sequence[int]) -> list[tuple[int, int]]:
    """For every place, after how many the same comes again, and for how many in a row that is so; layers are mostly alike."""
    out, last = [(0, 0)] * len(chain), dict[int, int]()
    for i in range(len(chain) - 1, -1, -1):
        period = last.get(chain[i], len(chain) + LONGEST) - i
        last[chain[i]] = i
        if period <= LONGEST:
            out[i] = (period, out[i + 1][1] + 1 if i + 1 < len(chain) and out[i + 1][0] == period else 1)
    return out
