"""The mesh of ranks: coordinates by axis, and the process groups along axes.

Rank numbers run fastest along `col`, slowest along `pipe`, so that the axes with the most traffic join neighbours.
Groups are created collectively by their members, so every rank must request the same groups in the same order, before the first
step; `connect` then creates their communicators. A second request with the same members and use returns the same group.
`fourfold.program.groups` lists the groups of a plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.plan import Mesh as Degrees
from fourfold.program.groups import GroupSpec, coordinates_of, members_of, shard_groups
from fourfold.train.connect import connect

__all__ = ["MadeGroup", "RankMesh"]


@dataclass(frozen=True)
class MadeGroup:
    """A process group that this rank has made, and what it is for."""

    spec: GroupSpec
    group: dist.ProcessGroup


class RankMesh:
    """This rank's coordinates in the mesh, and its process groups."""

    def __init__(self, degrees: Degrees, rank: int, timeout: timedelta | None = None):
        self.degrees, self.rank, self._timeout = degrees.degrees, rank, timeout
        self.coordinates = coordinates_of(self.degrees, rank)
        self.made: list[MadeGroup] = []
        """In the order in which they were made."""

    def size(self, *axes: str) -> int:
        return math.prod(self.degrees[axis] for axis in axes)

    def members(self, *axes: str) -> list[int]:
        """Ranks that differ from this one along `axes` only, in order."""
        return members_of(self.degrees, self.rank, *axes)

    def index(self, *axes: str) -> int:
        """Index of this rank in `members(*axes)`."""
        return self.members(*axes).index(self.rank)

    def group(self, *axes: str, use: str = "grid", gloo: bool = False) -> dist.ProcessGroup | None:
        """The process group along `axes` for one use; None if it would contain only this rank."""
        return self.group_of(self.members(*axes), use=use, gloo=gloo)

    def group_of(self, members: list[int], *, use: str, gloo: bool = False) -> dist.ProcessGroup | None:
        """The process group of these ranks, which include this one; None if there is no other.

        `gloo`: for CPU tensors only.
        """
        spec = GroupSpec(use, tuple(members), gloo)
        known = next((made.group for made in self.made if made.spec == spec), None)
        return known if known is not None or len(members) == 1 else self.new_group(spec)

    def new_group(self, spec: GroupSpec, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Make a group; its members make it together. Also a placeholder ([Note: rounds] in program/groups.py)."""
        group = dist.new_group(
            list(spec.members),
            timeout=timeout or self._timeout,
            backend="gloo" if spec.gloo and dist.get_backend() != "fake" else None,
            use_local_synchronization=True,
            group_desc=spec.use,
        )
        assert group is not None
        self.made.append(MadeGroup(spec, group))
        return group

    def divided(self, size: int, *axes: str) -> tuple[list[int], list[int]]:
        """`members(*axes)` in runs of `size`: the ranks of this rank's run, and the ranks with its index in every run."""
        return shard_groups(self.members(*axes), self.rank, size)

    def pair(self, axis: str, first: int, second: int, *, use: str) -> dist.ProcessGroup | None:
        """A new group of the two ranks at these coordinates of an axis; None on other ranks, which must call it too."""
        line, mine = self.members(axis), self.coordinates[axis] in (first, second)
        members = (line[first], line[second]) if mine else (self.rank,)
        made = self.new_group(GroupSpec(use, members, gloo=not mine))
        return made if mine else None

    def connect(self, device: torch.device) -> None:
        """Make the communicators of all groups, in the order of the groups; call it once, before the first step."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            world = GroupSpec("world", tuple(range(dist.get_world_size())))
            connect([(world, dist.group.WORLD), *((made.spec, made.group) for made in self.made)], self.rank, device)
