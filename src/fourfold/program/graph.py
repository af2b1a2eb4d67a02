"""The dependency graph of a set of programs: its longest path is the makespan, its cycles are deadlocks.

Nodes are issued instructions (compute: executed ops), transfers, collectives and updates. A node starts when all the nodes that
it depends on have ended:

    an instruction     the previous instruction; compute also its message and the gathers of its units
    a transfer         its SEND and its RECV, and the previous message on a shared link
    a collective       its issue on all ranks of the group, and the previous collective on each of them
    an update          its STREAM, the reductions of its units, the previous update on the rank

With `rendezvous`, SEND also blocks until its RECV is posted, as the strictest transport would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fourfold.program.instructions import (
    Gather,
    Instruction,
    Programs,
    Recv,
    Reduce,
    Send,
    Stream,
    UnitOp,
)
from fourfold.program.ops import Op

__all__ = ["Graph", "Node", "build_graph"]


@dataclass(frozen=True, slots=True)
class Node:
    """One timed event: its row (index of the program), its lane, its instruction."""

    row: int
    lane: str
    what: Instruction
    index: int
    """Index of the instruction in its program."""


@dataclass
class Graph:
    """Nodes, and for each the nodes that it waits for."""

    nodes: list[Node] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)

    def add(self, node: Node, waits: list[int]) -> int:
        self.nodes.append(node)
        self.waits.append(waits)
        return len(self.nodes) - 1

    def times(self, cost: Callable[[Node], Any]) -> tuple[list[Any], list[Any], list[int], list[int]]:
        """(starts, ends, bindings, cycle): n starts when `bindings[n]` ends; `cycle` is a deadlock as a list of nodes, or []."""
        count = len(self.nodes)
        after: list[list[int]] = [[] for _ in range(count)]
        left = [0] * count
        for n, waits in enumerate(self.waits):
            left[n] = len(waits)
            for w in waits:
                after[w].append(n)
        starts: list[Any] = [0] * count
        ends: list[Any] = [0] * count
        bindings = [-1] * count
        ready = [n for n in range(count) if not left[n]]
        done = 0
        while ready:
            n = ready.pop()
            done += 1
            ends[n] = starts[n] + cost(self.nodes[n])
            for a in after[n]:
                if bindings[a] < 0 or ends[n] > starts[a]:
                    starts[a], bindings[a] = ends[n], n
                left[a] -= 1
                if not left[a]:
                    ready.append(a)
        return starts, ends, bindings, self._cycle(left) if done < count else []

    def _cycle(self, left: list[int]) -> list[int]:
        n = next(i for i, count in enumerate(left) if count)
        path: list[int] = []
        while n not in path:
            path.append(n)
            n = next(w for w in self.waits[n] if left[w])
        return path[path.index(n) :]


def build_graph(programs: Programs, link: str = "private", rendezvous: bool = False) -> Graph:
    """Build the graph. The programs' messages and collectives must match (see `program_checks`)."""
    graph = Graph()
    rows = programs.programs
    issued: list[list[int]] = []
    sends: dict[tuple[int, Any], int] = {}  # by replica and message
    recvs: dict[tuple[int, Any], int] = {}
    for row, program in enumerate(rows):
        ids: list[int] = []
        for index, instruction in enumerate(program.instructions):
            lane = "compute" if isinstance(instruction, Op | UnitOp) else "issue"
            node = graph.add(Node(row, lane, instruction, index), [ids[-1]] if ids else [])
            ids.append(node)
            if isinstance(instruction, Send | Recv):
                key = (program.replica, (instruction.stage, instruction.kind, instruction.micro_batch))
                (sends if isinstance(instruction, Send) else recvs)[key] = node
        issued.append(ids)
    transfers = _add_transfers(graph, programs, sends, recvs, link)
    collectives = _add_collectives(graph, programs, issued)
    for row, program in enumerate(rows):
        _add_needs(graph, programs, row, issued[row], transfers, collectives)
        if rendezvous:
            for index, instruction in enumerate(program.instructions):
                if isinstance(instruction, Send):
                    key = (program.replica, (instruction.stage, instruction.kind, instruction.micro_batch))
                    graph.waits[issued[row][index]].append(recvs[key])
    return graph


def _add_transfers(
    graph: Graph,
    programs: Programs,
    sends: dict[tuple[int, Any], int],
    recvs: dict[tuple[int, Any], int],
    link: str,
) -> dict[tuple[int, Any], int]:
    """Add the transfers; returns their nodes by (replica, message)."""
    transfers: dict[tuple[int, Any], int] = {}
    busy: dict[tuple[int, int, int], int] = {}
    for row, program in enumerate(programs.programs):
        for index, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Send):
                continue
            key = (program.replica, (instruction.stage, instruction.kind, instruction.micro_batch))
            waits = [sends[key], recvs[key]]
            wire = (program.replica, program.rank, instruction.peer if link == "edge" else -1)
            if link != "private" and wire in busy:
                waits.append(busy[wire])
            transfers[key] = busy[wire] = graph.add(Node(row, "message", instruction, index), waits)
    return transfers


def _add_collectives(graph: Graph, programs: Programs, issued: list[list[int]]) -> dict[tuple[int, int], int]:
    """Add the collectives; returns their nodes by (row, index of the instruction)."""
    out: dict[tuple[int, int], int] = {}
    groups: dict[Any, list[tuple[int, int]]] = {}
    for row, program in enumerate(programs.programs):
        count: dict[Instruction, int] = {}
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Gather | Reduce):
                nth = count[instruction] = count.get(instruction, 0) + 1
                rank = program.rank if isinstance(instruction, Gather) else -1
                groups.setdefault((instruction, rank, nth), []).append((row, index))
    for members in groups.values():
        row, index = members[0]
        instruction = programs.programs[row].instructions[index]
        node = graph.add(Node(row, "collective", instruction, index), [issued[r][i] for r, i in members])
        out.update(dict.fromkeys(members, node))
    for row, program in enumerate(programs.programs):
        before = None
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Gather | Reduce):
                node = out[row, index]
                if before is not None:
                    graph.waits[node].append(before)
                before = node
    return out


def _add_needs(
    graph: Graph,
    programs: Programs,
    row: int,
    issued: list[int],
    transfers: dict[tuple[int, Any], int],
    collectives: dict[tuple[int, int], int],
) -> None:
    """Add the dependencies of one row's compute and updates."""
    program = programs.programs[row]
    gathered: dict[str, int] = {}
    reduced: dict[str, int] = {}
    update: int | None = None
    for index, instruction in enumerate(program.instructions):
        waits = graph.waits[issued[index]]
        if isinstance(instruction, Gather):
            gathered[instruction.unit] = collectives[row, index]
        elif isinstance(instruction, Reduce):
            reduced[instruction.unit] = collectives[row, index]
        elif isinstance(instruction, Stream):
            mine = next(b.units for b in programs.buckets if b.name == instruction.bucket)
            needs = [issued[index], *(reduced[u] for u in mine if u in reduced)]
            update = graph.add(Node(row, "stream", instruction, index), needs if update is None else [*needs, update])
        elif isinstance(instruction, Op | UnitOp):
            s, kind, m = instruction.stage, instruction.kind, instruction.micro_batch
            if kind != "W":
                message = (s - 1, "activation", m) if kind == "F" else (s + 1, "gradient", m)
                if (program.replica, message) in transfers:
                    waits.append(transfers[program.replica, message])
                names = [instruction.unit] if isinstance(instruction, UnitOp) else [u.name for u in programs.units[s]]
                waits.extend(gathered[name] for name in names if name in gathered)
