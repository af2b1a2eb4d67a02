"""Exposed communication: a compute clock, and concurrent collectives that share links.

`SharedLink` is the clock: channels run their collectives in order, and channels on the same link share its bandwidth evenly.
`UnitTimeline` runs a chain of units on it, as the lowered program does (program/lowering.py, shard/sharing.py):

- Units compute one after another. When one starts, the gather of the next one starts: at most one is prefetched.
- A unit's reduction starts when its gradients are complete. For sharded units, at most one reduction overlaps with computing the
  next gradient: when a second one starts, computing waits for the first, and its sum across groups starts. At most one such
  sum overlaps with computing: the next one waits for it.
- Gathers, reductions and the grid's collectives share the link. The grid's collectives are spread over the unit in `_GRID_PARTS`
  parts; each part computes and then waits for its share of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SharedLink", "UnitStep", "UnitTimeline"]

_EPSILON = 1e-12
"""Epsilon in seconds: shorter times count as zero."""


class SharedLink:
    """A compute clock (`now`, seconds) and channels of collectives.

    `links[c]` is the index of channel c's link. A collective that starts on a busy link first queues behind in-flight traffic
    of the other channels, for at most `queues[c]` seconds.
    """

    def __init__(self, links: Sequence[int], queues: Sequence[float]):
        self.now = 0.0
        self._links, self._queues = links, queues
        self._remaining: list[deque[float]] = [deque() for _ in links]
        self._queued = [0.0] * len(links)  # remaining queueing time of each channel's running collective, seconds
        self._started, self._ended = [0] * len(links), [0] * len(links)
        self._busy: list[int] = []  # channels with a running collective

    @property
    def idle(self) -> bool:
        return not self._busy

    def start(self, channel: int, seconds: float) -> int:
        """Start a collective that takes `seconds` alone on its link; returns its number on the channel."""
        self._remaining[channel].append(seconds)
        self._started[channel] += 1
        if len(self._remaining[channel]) == 1:
            self._begin(channel)
            self._busy.append(channel)
        return self._started[channel]

    def _begin(self, channel: int) -> None:
        if self._queues[channel]:
            mine = self._links[channel]
            others = sum(self._remaining[c][0] for c in self._busy if c != channel and self._links[c] == mine)
            self._queued[channel] = min(self._queues[channel], others)

    def wait(self, channel: int, number: int) -> float:
        """Wait until that collective ends; returns the seconds waited."""
        began = self.now
        while self._ended[channel] < number:
            self._advance(None)
        return self.now - began

    def wait_for_all_but(self, channel: int, left: int) -> float:
        """Wait until at most `left` collectives of a channel are unfinished."""
        return self.wait(channel, self._started[channel] - left)

    def compute(self, seconds: float) -> None:
        """Compute for `seconds`, while collectives proceed."""
        end = self.now + seconds
        while self._busy and self.now < end:
            self._advance(end)
        self.now = end

    def _advance(self, end: float | None) -> None:
        """Advance until a collective ends or stops queueing, but not past `end`."""
        busy, queued, remaining = self._busy, self._queued, self._remaining
        if len(busy) == 1:
            channel = busy[0]
            queued[channel], first = 0.0, remaining[channel][0]
            step = first if end is None or first < end - self.now else end - self.now
            self.now += step
            remaining[channel][0] = first - step
            if first - step <= _EPSILON:
                self._finish(channel)
            return
        moving = [0] * (max(self._links) + 1)
        for channel in busy:
            if not queued[channel]:
                moving[self._links[channel]] += 1
        for channel in busy:
            if queued[channel] and not moving[self._links[channel]]:  # the traffic ahead of it has ended
                queued[channel] = 0.0
                moving[self._links[channel]] += 1
        shares = [0.0 if queued[channel] else 1.0 / moving[self._links[channel]] for channel in busy]
        step = min([queued[c] or remaining[c][0] / share for c, share in zip(busy, shares, strict=True)])
        if end is not None:
            step = min(step, end - self.now)
        ended = []
        for channel, share in zip(busy, shares, strict=True):
            if queued[channel]:
                queued[channel] = max(0.0, queued[channel] - step)
                if queued[channel] < _EPSILON:
                    queued[channel] = 0.0
                continue
            remaining[channel][0] -= step * share
            if remaining[channel][0] <= _EPSILON:
                ended.append(channel)
        self.now += step
        for channel in ended:
            self._finish(channel)

    def _finish(self, channel: int) -> None:
        self._remaining[channel].popleft()
        self._ended[channel] += 1
        if self._remaining[channel]:
            self._begin(channel)
        else:
            self._busy.remove(channel)


# ---- a chain of units ----

_GATHERS, _REDUCTIONS, _GRID, _SUMS = 0, 1, 2, 3
_GRID_PARTS = 4


class UnitStep(NamedTuple):
    """One unit's part of an op, in seconds."""

    compute: float
    """Compute time, without its collectives on the grid."""
    gather: float = 0.0
    """All-gather of its parameters; 0 if they are already gathered."""
    reduce: float = 0.0
    """Reduction of its gradients, after computing."""
    across: float = 0.0
    """Sum across sharding groups that follows the reduction."""
    sharded: bool = True
    """Whether its reduction must end before the second reduction after it starts."""
    grid_exposed: float = 0.0
    """Exposed grid collectives on the link of gathers and reductions."""
    grid_overlapped: float = 0.0
    """Grid collectives on that link that overlap with computing; the time they take alone on the link."""
    other_links: float = 0.0
    """Exposed grid collectives on other links."""


class UnitTimeline:
    """Units that compute one after another, with their concurrent gathers and reductions."""

    def __init__(self, queue: float = 0.0, sums_link: int = 0) -> None:
        """`sums_link`: 0 if sums across groups use the link of gathers and reductions, 1 if they have their own."""
        self.exposed = self.communicated = 0.0
        """Exposed seconds of collectives so far; total seconds of collectives, each alone on its link."""
        self._computed = 0.0
        self._link = SharedLink((0, 0, 0, sums_link), (queue,) * 4)
        self._in_flight: deque[tuple[int, float]] = deque()  # reductions: (number, the sum across groups after it)

    @property
    def now(self) -> float:
        return self._link.now

    @property
    def since_compute(self) -> float:
        """Seconds since a unit last computed, spent waiting for earlier reductions."""
        return self.now - self._computed

    def run(self, chain: Sequence[UnitStep], *, started: bool = False, following: float = 0.0) -> None:
        """Run units; `started`: the first unit's gather is in flight; `following`: gather time of the unit after them."""
        if not started:
            self.gather(chain[0].gather)
        for i, step in enumerate(chain):
            self._unit(step, chain[i + 1].gather if i + 1 < len(chain) else following)

    def _unit(self, step: UnitStep, prefetched: float) -> None:
        self.gather(prefetched)
        if step.gather:
            self.exposed += self._link.wait_for_all_but(_GATHERS, 1 if prefetched else 0)
        self._compute(step)
        self._computed = self.now
        if step.reduce:
            self.reduce(step)

    def _compute(self, step: UnitStep) -> None:
        """Compute, and wait for the grid."""
        link, computing = self._link, step.compute + step.other_links
        self.communicated += step.grid_exposed + step.other_links
        self.exposed += step.grid_exposed + step.other_links
        if link.idle:
            link.now += computing + step.grid_exposed
        elif not (step.grid_exposed or step.grid_overlapped):
            link.compute(computing)
        else:
            for _ in range(_GRID_PARTS):
                if step.grid_overlapped:
                    link.start(_GRID, step.grid_overlapped / _GRID_PARTS)
                link.compute(computing / _GRID_PARTS)
                link.wait_for_all_but(_GRID, 0)
                link.wait(_GRID, link.start(_GRID, step.grid_exposed / _GRID_PARTS))

    def gather(self, seconds: float) -> None:
        """Start a gather."""
        if seconds:
            self._link.start(_GATHERS, seconds)
            self.communicated += seconds

    def reduce(self, step: UnitStep) -> None:
        """Start a reduction; for sharded units, wait until it is the only one in flight."""
        number = self._link.start(_REDUCTIONS, step.reduce)
        self.communicated += step.reduce + step.across
        if step.sharded:
            self._in_flight.append((number, step.across))
            while len(self._in_flight) > 1:
                self._complete()

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._complete()
        self.exposed += self._link.wait_for_all_but(_REDUCTIONS, 0)
        self.exposed += self._link.wait_for_all_but(_SUMS, 0)

    def _complete(self) -> None:
        number, across = self._in_flight.popleft()
        self.exposed += self._link.wait(_REDUCTIONS, number)
        if across:
            self.exposed += self._link.wait_for_all_but(_SUMS, 0)
            self._link.start(_SUMS, across)
