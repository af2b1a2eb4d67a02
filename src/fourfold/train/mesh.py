"""The mesh of ranks: coordinates by axis, and the process groups along axes.

Rank numbers run fastest along `col`, slowest along `pipe`, so that the axes with the most traffic join neighbours.
Groups are made by all their members together: every rank must ask for the same groups in the same order. torch names a group
by its members and by how many groups its process has made before, so all ranks must have made as many: one that is not in a
group makes one of its own instead.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch.distributed as dist

from fourfold.plan import AXES
from fourfold.plan import Mesh as Degrees

__all__ = ["RankMesh"]


class RankMesh:
    """Where this rank stands in the mesh."""

    def __init__(self, degrees: Degrees, rank: int, timeout: timedelta | None = None):
        self.degrees, self.rank, self._timeout = degrees.degrees, rank, timeout
        self.coordinates = self._coordinates(rank)

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degrees[axis])
        return {axis: found[axis] for axis in AXES}

    def size(self, *axes: str) -> int:
        return math.prod(self.degrees[axis] for axis in axes)

    def members(self, *axes: str) -> list[int]:
        """Ranks that differ from this one along `axes` only, in order."""
        mine = self.coordinates
        return [
            rank
            for rank in range(math.prod(self.degrees.values()))
            if all(c == mine[axis] for axis, c in self._coordinates(rank).items() if axis not in axes)
        ]

    def index(self, *axes: str) -> int:
        """Place of this rank among `members(*axes)`."""
        return self.members(*axes).index(self.rank)

    def group(self, *axes: str, backend: str | None = None) -> dist.ProcessGroup | None:
        """A new process group along `axes`; None when it would hold this rank alone."""
        members = self.members(*axes)
        if len(members) == 1:
            return None
        return dist.new_group(members, timeout=self._timeout, backend=backend, use_local_synchronization=True)

    def divided(self, size: int, *axes: str) -> tuple[list[int], list[int]]:
        """`members(*axes)` in runs of `size`: those in this rank's run, and those at its place in every run."""
        line, at = self.members(*axes), self.index(*axes)
        first = at // size * size
        return line[first : first + size], line[at % size :: size]

    def group_of(self, members: list[int]) -> dist.ProcessGroup | None:
        """A new process group of these ranks, this one among them; None when that is this rank alone."""
        if len(members) == 1:
            return None
        return dist.new_group(members, timeout=self._timeout, use_local_synchronization=True)

    def pair(self, axis: str, first: int, second: int) -> dist.ProcessGroup | None:
        """A new group of the two ranks at these coordinates of an axis; None on other ranks, which must ask for it too."""
        line, mine = self.members(axis), self.coordinates[axis] in (first, second)
        members = [line[first], line[second]] if mine else [self.rank]
        made = dist.new_group(members, timeout=self._timeout, use_local_synchronization=True)
        return made if mine else None
