"""The process groups of a plan, as data: their members, their use, and the order in which they are created. No torch.

On NCCL a process group is a communicator: buffers and threads on every member, and a rendezvous when it is created. All of them
are created before the first step, in the same order on all ranks, so their number must be known and small. A rank is a member of

    world                    1   the end of a step, evaluation
    save                     1   (gloo only) checkpoints, which a thread may write during training
    gradients                    the data-parallel reductions: one group, or two for each size of shard group (shards, copies)
    parameters                   gathers of sharded units: one for each size of shard group
    row, col, plane        ≤ 3   the tensor grid
    tied                   ≤ 1   a weight that two pipeline ranks use
    one per directed edge        of the pipeline: at most 4 for a chain of stages, and for a ring

Groups with the same members and the same use are one group. None of these counts depends on the number of ranks.

[Note: rounds]
torch names a group by its members and by how many groups its process has made before, so all members must have made the same
number of groups. Edges of a pipeline are therefore created in rounds: in a round no rank is in two edges, and a rank that is in
none creates a placeholder, a group of itself. A chain takes four rounds, whatever its length. Each round is a set of disjoint
pairs, so that no pair waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fourfold.config import ModelConfig
from fourfold.model.spec import tied_parameters
from fourfold.plan import AXES, Plan
from fourfold.program.stages import PipelineLayout

__all__ = [
    "GroupSpec",
    "coordinates_of",
    "edge_rounds",
    "groups_of",
    "members_of",
    "shard_groups",
]

Edge = tuple[int, int]


@dataclass(frozen=True)
class GroupSpec:
    """A process group of one rank."""

    use: str
    members: tuple[int, ...]
    gloo: bool = False
    """CPU tensors only: no NCCL communicator."""

    @property
    def placeholder(self) -> bool:
        """A group of one rank, made to keep the count of groups equal."""
        return len(self.members) == 1


def coordinates_of(degrees: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinates of a rank by axis; numbers run fastest along the last axis."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, degrees[axis])
    return {axis: found[axis] for axis in AXES}


def members_of(degrees: Mapping[str, int], rank: int, *axes: str) -> list[int]:
    """The ranks that differ from `rank` along `axes` only, in ascending order."""
    here = coordinates_of(degrees, rank)
    strides = {axis: math.prod(degrees[a] for a in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    found = [sum(here[axis] * strides[axis] for axis in AXES if axis not in axes)]
    for axis in AXES:
        if axis in axes:
            found = [first + c * strides[axis] for first in found for c in range(degrees[axis])]
    return found


def shard_groups(replicas: Sequence[int], rank: int, shards: int) -> tuple[list[int], list[int]]:
    """A replica group cut into runs of `shards` ranks: the ranks of this rank's run, and those at its place in every run."""
    at = replicas.index(rank)
    first = at // shards * shards
    return list(replicas[first : first + shards]), list(replicas[at % shards :: shards])


def edge_rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Directed edges cut into rounds in which no rank occurs twice: [Note: rounds]. The same on every rank."""
    rounds: list[list[Edge]] = []
    busy: list[set[int]] = []
    for edge in sorted(set(edges)):
        free = next((i for i, ranks in enumerate(busy) if not ranks.intersection(edge)), None)
        if free is None:
            rounds.append([])
            busy.append(set())
            free = len(rounds) - 1
        rounds[free].append(edge)
        busy[free].update(edge)
    return rounds


def groups_of(model: ModelConfig, plan: Plan, layout: PipelineLayout, rank: int) -> tuple[GroupSpec, ...]:
    """The groups of one rank, placeholders included, in the order in which a run makes them; the world is the first."""
    degrees = plan.mesh.degrees
    found: list[GroupSpec] = []

    def add(use: str, members: Sequence[int], *, gloo: bool = False, placeholder: bool = False) -> None:
        group = GroupSpec(use, tuple(members), gloo)
        if placeholder or (len(members) > 1 and group not in found):
            found.append(group)

    add("world", range(plan.mesh.ranks))
    add("gradients", members_of(degrees, rank, "data", "depth", "row"))
    add("save", range(plan.mesh.ranks), gloo=True)
    for axes in (("row",), ("col",)):
        add("grid", members_of(degrees, rank, *axes))
    replicas = members_of(degrees, rank, "data", "depth")
    for shards in sorted({choice.shards for choice in layout.choices.values()}):
        run, copies = shard_groups(replicas, rank, shards)
        add("parameters", run)
        add("gradients", run)
        add("gradients", copies)
    add("grid", members_of(degrees, rank, "row", "col"))
    line, here = members_of(degrees, rank, "pipe"), coordinates_of(degrees, rank)["pipe"]
    ends = [layout.rank_of[layout.choices[unit].names[0]] for unit in ("embed", "head")]
    if tied_parameters(model) and ends[0] != ends[1] and model.lora is None:  # a frozen weight is not exchanged
        mine = here in ends
        add("tied", [line[end] for end in ends] if mine else [rank], gloo=not mine, placeholder=not mine)
    if plan.mesh.pipe > 1:
        for edges in edge_rounds(layout.edges()):
            edge = next((edge for edge in edges if here in edge), None)
            if edge is None:
                add("edge", [rank], gloo=True, placeholder=True)
            else:
                add(f"edge {edge[0]} to {edge[1]}", [line[i] for i in edge])
    return tuple(found)
