"""A clock of computing, and lines of collectives beside it that share links.

A line runs its collectives in the order in which they were started. Those of several lines on one link share it evenly; one that
comes to a busy link first lets pass what is on the way there: of the others' collectives, `queue` seconds at most, once for each
of its hops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Link"]

NOTHING, ROUNDED = 1e-12, 11
"""Seconds that are none; digits of seconds that tell states apart."""


class Link:
    """`links`: by line, the number of its link; `queues`: the most seconds that it lets pass."""

    def __init__(self, links: Sequence[int], queues: Sequence[float]):
        self.now = 0.0
        self._links, self._queues = links, queues
        self._left: list[deque[float]] = [deque() for _ in links]
        self._late = [0.0] * len(links)  # of the collective that is running, what it lets pass first
        self._started, self._ended = [0] * len(links), [0] * len(links)
        self._busy: list[int] = []  # lines that are

    @property
    def idle(self) -> bool:
        return not self._busy

    def start(self, line: int, seconds: float) -> int:
        """Start a collective that takes so long alone; returns its number on the line."""
        self._left[line].append(seconds)
        self._started[line] += 1
        if len(self._left[line]) == 1:
            self._begin(line)
            self._busy.append(line)
        return self._started[line]

    def _begin(self, line: int) -> None:
        if self._queues[line]:
            mine = self._links[line]
            others = sum(self._left[i][0] for i in self._busy if i != line and self._links[i] == mine)
            self._late[line] = min(self._queues[line], others)

    def wait(self, line: int, number: int) -> float:
        """Until the collective of that number has ended; returns the seconds."""
        began = self.now
        while self._ended[line] < number:
            self._next(None)
        return self.now - began

    def wait_for_all_but(self, line: int, left: int) -> float:
        """Until no more than so many of a line's are left."""
        return self.wait(line, self._started[line] - left)

    def run(self, seconds: float) -> None:
        """Compute."""
        end = self.now + seconds
        while self._busy and self.now < end:
            self._next(end)
        self.now = end

    def state(self) -> tuple[float, ...]:
        """What is under way, as it matters from now on."""
        return tuple(
            round(x, ROUNDED) for left, late in zip(self._left, self._late, strict=True) for x in (-1, late, *left)
        )

    def counts(self) -> list[int]:
        """Collectives that were started, line by line."""
        return list(self._started)

    def skip(self, seconds: float, counts: Sequence[int]) -> None:
        """Go on to where all is as it is now, with so many more collectives begun and ended."""
        self.now += seconds
        self._started = [n + more for n, more in zip(self._started, counts, strict=True)]
        self._ended = [n + more for n, more in zip(self._ended, counts, strict=True)]

    def _next(self, end: float | None) -> None:
        """Until a collective ends or has let pass what it had to, but not past `end`."""
        busy, late, left = self._busy, self._late, self._left
        if len(busy) == 1:
            line = busy[0]
            late[line], first = 0.0, left[line][0]
            step = first if end is None or first < end - self.now else end - self.now
            self.now += step
            left[line][0] = first - step
            if first - step <= NOTHING:
                self._end(line)
            return
        moving = [0] * (max(self._links) + 1)
        for line in busy:
            if not late[line]:
                moving[self._links[line]] += 1
        for line in busy:
            if late[line] and not moving[self._links[line]]:  # nobody is before it any more
                late[line] = 0.0
                moving[self._links[line]] += 1
        shares = [0.0 if late[line] else 1.0 / moving[self._links[line]] for line in busy]
        step = min([late[line] or left[line][0] / share for line, share in zip(busy, shares, strict=True)])
        if end is not None:
            step = min(step, end - self.now)
        ended = []
        for line, share in zip(busy, shares, strict=True):
            if late[line]:
                late[line] = max(0.0, late[line] - step)
                if late[line] < NOTHING:
                    late[line] = 0.0
                continue
            left[line][0] -= step * share
            if left[line][0] <= NOTHING:
                ended.append(line)
        self.now += step
        for line in ended:
            self._end(line)

    def _end(self, line: int) -> None:
        """The collective that is running has ended."""
        self._left[line].popleft()
        self._ended[line] += 1
        if self._left[line]:
            self._begin(line)
        else:
            self._busy.remove(line)
