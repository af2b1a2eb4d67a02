"""Checks that a set of programs can run: messages, collectives, parameters and gradients are consistent.

Each program is walked once, tracking what it has computed, received, gathered and reduced; then programs are compared:

- every needed message is sent once, after it was produced, and received once, before it is used; both ends of an edge use
  the same order;
- there is no cycle of waits, even if every SEND blocks until its receive is posted;
- ranks of a group issue their shared collectives in the same order;
- units are gathered when used, released at the end, and reduced when all their gradients exist; buckets follow their units.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from fourfold import schema
from fourfold.errors import ScheduleError
from fourfold.program.graph import build_graph
from fourfold.program.instructions import (
    Gather,
    Instruction,
    Program,
    Programs,
    Recv,
    Reduce,
    Release,
    Send,
    Stream,
    UnitOp,
)
from fourfold.program.ops import Op, Schedule

__all__ = ["validate_programs"]


def validate_programs(programs: Programs) -> Schedule:
    """Raise ScheduleError unless the programs can run together; returns the schedule of their ops."""
    replicas = _check_set(programs)
    forward_only = not any(
        isinstance(i, Op | UnitOp) and i.kind != "F" for program in programs.programs for i in program.instructions
    )
    rows = {(p.replica, p.rank): _ProgramWalk(programs, p, forward_only).ops() for p in programs.programs}
    for replica in range(replicas):
        _check_edges(programs, replica)
        _check_replica(programs, replica)
    _check_shared(programs)
    _check_cycles(programs)
    order = tuple(tuple(rows[0, rank]) for rank in range(programs.ranks))
    return Schedule(order, programs.placement, programs.micro_batches)


def _name(program: Program, index: int, what: object) -> str:
    replica = f" of replica {program.replica}" if program.replica else ""
    return f"rank {program.rank}{replica}, instruction {index} ({what})"


def _check_set(programs: Programs) -> int:
    """Check that every rank of every replica has one program; returns the number of replicas."""
    found = sorted((p.replica, p.rank) for p in programs.programs)
    ranks = max(programs.placement, default=-1) + 1
    replicas = max((p.replica for p in programs.programs), default=-1) + 1
    if ranks * replicas > 2 * len(found) + 1000:  # too many are missing to name the first
        raise ScheduleError(f"{replicas} replicas of {ranks} ranks, but {len(found)} programs; every rank has one")
    wanted = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
    if not found or found != wanted:
        odd = sorted(set(wanted) ^ set(found)) or [x for x in found if found.count(x) > 1] or [(0, 0)]
        raise ScheduleError(
            f"replica {odd[0][0]}, rank {odd[0][1]}: every rank of every replica has one program; "
            f"the stages lie on {ranks} ranks, there are {len(found)} programs"
        )
    if len(programs.units) != len(programs.placement):
        raise ScheduleError(f"units of {len(programs.units)} stages; the placement has {len(programs.placement)}")
    return replicas


def _check_cycles(programs: Programs) -> None:
    """Check that there is no deadlock, even if SEND blocks until its receive is posted."""
    graph = build_graph(programs, rendezvous=True)
    *_, cycle = graph.times(lambda node: 1)
    if cycle:
        nodes = [graph.nodes[i] for i in cycle]
        # Among consecutive instructions of one rank, only the one that waits for another rank is reported.
        reported = [a for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if a.row != b.row] or nodes
        waits = [_name(programs.programs[n.row], n.index, n.what) for n in reported]
        raise ScheduleError(f"deadlock: {', which waits for '.join(waits)}, which waits for the first")


class _ProgramWalk:
    """Checks one program from start to end."""

    def __init__(self, programs: Programs, program: Program, forward_only: bool):
        self.set, self.program, self.forward_only = programs, program, forward_only
        self.rank, self.place = program.rank, programs.placement
        self.at, self.what = 0, ""
        self.done: dict[Op, int] = {}  # op -> number of its unit ops that ran; a whole op counts as all of them
        self.order: list[Op] = []
        self.sent: set[tuple[int, str, int]] = set()
        self.received: set[tuple[int, str, int]] = set()
        self.gathered: set[str] = set()
        self.gradients: dict[str, int] = {}  # contributions so far
        self.reduced: dict[str, int] = {}  # contributions at the last REDUCE
        self.streamed: set[str] = set()
        self.here = {u.name for s, units in enumerate(programs.units) for u in units if self.place[s] == self.rank}

    def ops(self) -> list[Op]:
        """Check the program; returns its ops in order."""
        for at, instruction in enumerate(self.program.instructions):
            self.at, self.what = at, str(instruction)
            self._check(instruction)
        self.at, self.what = len(self.program.instructions), "the end"
        self._finish()
        return self.order

    def _fail(self, reason: str) -> ScheduleError:
        return ScheduleError(f"{_name(self.program, self.at, self.what)}: {reason}")

    def _check(self, instruction: Instruction) -> None:
        match instruction:
            case Op():
                self._compute(instruction, None)
            case UnitOp():
                op = Op(instruction.stage, instruction.kind, instruction.micro_batch)
                self._compute(op, instruction.unit)
            case Send() | Recv():
                self._message(instruction)
            case Gather():
                self._known(instruction.unit)
                if instruction.unit in self.gathered:
                    raise self._fail("the unit is gathered already")
                if self.set.unit[instruction.unit].mode == "replicate":
                    raise self._fail("a unit in mode replicate is never gathered: it is not sharded")
                self.gathered.add(instruction.unit)
            case Release():
                self._known(instruction.unit)
                if instruction.unit not in self.gathered:
                    raise self._fail("the unit is not gathered")
                self.gathered.remove(instruction.unit)
            case Reduce():
                self._reduce(instruction.unit)
            case Stream():
                self._stream(instruction.bucket)

    def _compute(self, op: Op, unit: str | None) -> None:
        stage, kind, m = op
        if stage >= len(self.place) or m >= self.set.micro_batches:
            raise self._fail(f"stages are 0 to {len(self.place) - 1}, micro-batches 0 to {self.set.micro_batches - 1}")
        if self.place[stage] != self.rank:
            raise self._fail(f"stage {stage} is on rank {self.place[stage]}")
        names = [u.name for u in self.set.units[stage]]
        names = names if kind == "F" else names[::-1]
        parts = max(1, len(names))
        ran = self.done.get(op, 0)
        if ran == parts:
            raise self._fail("it runs twice; every op runs once")
        if unit is None and ran:
            raise self._fail(f"parts of it ran already; {names[ran]} comes next")
        if unit is not None and (ran >= len(names) or names[ran] != unit):
            raise self._fail(
                f"the units of {op} run in the order {' '.join(names)}; {names[ran] if names else 'none'} is next"
            )
        if not ran:
            self._input(op)
        used = names if unit is None else [unit]
        if kind != "W":
            for name in used:
                if self.set.unit[name].mode != "replicate" and name not in self.gathered:
                    raise self._fail(f"it uses {name}, which is not gathered; GATHER {name} comes before")
        if kind in "BW":
            for name in used:
                have = self.gradients.get(name, 0)
                if self.set.unit[name].reduce == "micro-batch" and have > self.reduced.get(name, 0):
                    raise self._fail(f"REDUCE {name} comes before: it is reduced after every micro-batch")
                self.gradients[name] = have + 1
        self.done[op] = parts if unit is None else ran + 1
        if self.done[op] == parts:
            self.order.append(op)

    def _input(self, op: Op) -> None:
        """Check an op's inputs: earlier ops of its own stage, and the result of the neighbouring stage."""
        stage, kind, m = op
        if kind == "W":
            if not self._complete(Op(stage, "I", m)):
                raise self._fail(f"it comes before {Op(stage, 'I', m)}, which it needs")
            return
        if kind != "F" and not self._complete(Op(stage, "F", m)):
            raise self._fail(f"it comes before {Op(stage, 'F', m)}, which it needs")
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < len(self.place):
            return
        carried = "activation" if kind == "F" else "gradient"
        if self.place[other] != self.rank:
            if (other, carried, m) not in self.received:
                raise self._fail(f"it needs RECV {other} {carried} {m} from {self.place[other]} before it")
        elif not self._made(other, carried, m):
            raise self._fail(
                f"it comes before stage {other} on this rank has produced the {carried} of micro-batch {m}"
            )

    def _made(self, stage: int, carried: str, m: int) -> bool:
        kinds = "F" if carried == "activation" else "BI"
        return any(self._complete(Op(stage, kind, m)) for kind in kinds)  # type: ignore[arg-type]

    def _complete(self, op: Op) -> bool:
        return self.done.get(op, 0) == max(1, len(self.set.units[op.stage]))

    def _message(self, message: Send | Recv) -> None:
        stage, carried, m = message.stage, message.kind, message.micro_batch
        reader = stage + 1 if carried == "activation" else stage - 1
        if not (stage < len(self.place) and 0 <= reader < len(self.place) and m < self.set.micro_batches):
            raise self._fail(f"there is no {carried} of stage {stage}, micro-batch {m}, that another stage reads")
        ends = (self.place[stage], self.place[reader])
        mine, peer = ends if isinstance(message, Send) else ends[::-1]
        if (self.rank, message.peer) != (mine, peer) or mine == peer:
            raise self._fail(f"the {carried} of stage {stage} goes from rank {ends[0]} to rank {ends[1]}")
        seen = self.sent if isinstance(message, Send) else self.received
        if (stage, carried, m) in seen:
            raise self._fail("it appears twice; every message is sent and received once")
        if isinstance(message, Send) and not self._made(stage, carried, m):
            raise self._fail(f"it comes before stage {stage} on this rank has produced the {carried}")
        seen.add((stage, carried, m))

    def _known(self, unit: str) -> None:
        if unit not in self.here:
            raise self._fail(f"this rank has no unit '{unit}'{schema.nearest(unit, sorted(self.here))}")

    def _contributions(self, unit: str) -> int:
        """How many times this rank computes gradients of a unit in a step."""
        stages = [s for s in self.set.stages_with[unit] if self.place[s] == self.rank]
        return 0 if self.forward_only else len(stages) * self.set.micro_batches

    def _reduce(self, unit: str) -> None:
        self._known(unit)
        have = self.gradients.get(unit, 0)
        if have == self.reduced.get(unit, 0):
            raise self._fail("all its gradients are reduced already")
        if self.set.unit[unit].reduce == "step" and have < self._contributions(unit):
            raise self._fail(
                f"{have} of {self._contributions(unit)} gradients are computed; reduce = 'step' needs all of them"
            )
        self.reduced[unit] = have

    def _stream(self, name: str) -> None:
        bucket = next((b for b in self.set.buckets if b.name == name), None)
        if bucket is None:
            raise self._fail(f"there is no bucket '{name}'{schema.nearest(name, [b.name for b in self.set.buckets])}")
        if name in self.streamed:
            raise self._fail("it appears twice; every bucket is updated once")
        for unit in bucket.units:
            if unit in self.here and self.reduced.get(unit, 0) < self._contributions(unit):
                raise self._fail(f"it comes before the gradients of {unit} are reduced")
        self.streamed.add(name)

    def _finish(self) -> None:
        for op, ran in self.done.items():
            if ran < max(1, len(self.set.units[op.stage])):
                raise self._fail(f"{op} is incomplete: {ran} of {len(self.set.units[op.stage])} parts ran")
        held = sum(rank == self.rank for rank in self.place)
        if held * self.set.micro_batches > len(self.done) + 1_000_000:
            raise self._fail(f"{held} stages · {self.set.micro_batches} micro-batches, but {len(self.done)} ops")
        for stage, rank in enumerate(self.place):
            if rank == self.rank:
                for m in range(self.set.micro_batches):
                    self._finish_op(stage, m)
        for unit in sorted(self.here):
            if self.reduced.get(unit, 0) < self._contributions(unit):
                raise self._fail(f"REDUCE {unit} is missing")
            if unit in self.gathered:
                raise self._fail(f"RELEASE {unit} is missing")
        if not self.forward_only:
            for bucket in self.set.buckets:
                if self.here.intersection(bucket.units) and bucket.name not in self.streamed:
                    raise self._fail(f"STREAM {bucket.name} is missing")

    def _finish_op(self, stage: int, m: int) -> None:
        """Check that no op and no message of one stage and micro-batch is missing."""
        kinds = [kind for kind in "FBIW" if Op(stage, kind, m) in self.done]  # type: ignore[arg-type]
        if kinds not in ([["F"]] if self.forward_only else [["F", "B"], ["F", "I", "W"]]):
            raise self._fail(f"stage {stage}, micro-batch {m} ran {' '.join(kinds) or 'nothing'}; it runs F B or F I W")
        for carried, reader in (("activation", stage + 1), ("gradient", stage - 1)):
            made = carried == "activation" or not self.forward_only
            leaves = 0 <= reader < len(self.place) and self.place[reader] != self.rank
            if made and leaves and (stage, carried, m) not in self.sent:
                raise self._fail(f"SEND {stage} {carried} {m} to {self.place[reader]} is missing")


def _check_edges(programs: Programs, replica: int) -> None:
    """Check that both ends of every edge have the same messages in the same order."""
    sent: dict[tuple[int, int], list[tuple[Program, int, Send | Recv]]] = {}
    received: dict[tuple[int, int], list[tuple[Program, int, Send | Recv]]] = {}
    for program in programs.programs:
        if program.replica == replica:
            for index, i in enumerate(program.instructions):
                if isinstance(i, Send):
                    sent.setdefault((program.rank, i.peer), []).append((program, index, i))
                elif isinstance(i, Recv):
                    received.setdefault((i.peer, program.rank), []).append((program, index, i))
    for edge in sorted(sent.keys() | received.keys()):
        for s, r in zip_longest(sent.get(edge, []), received.get(edge, [])):
            if s is None or r is None or _message(s[2]) != _message(r[2]):
                program, index, what = s or r
                other = (
                    f"but rank {edge[1]} receives {r[2] if r else 'nothing more'}" if s else "but nothing more is sent"
                )
                raise ScheduleError(
                    f"{_name(program, index, what)}: is the next message from rank {edge[0]} to rank {edge[1]}, {other}; "
                    "both ends of an edge need the same order"
                )


def _message(i: Send | Recv) -> tuple[int, str, int]:
    return i.stage, i.kind, i.micro_batch


def _check_replica(programs: Programs, replica: int) -> None:
    """Check that the replicas of a rank issue their collectives in the same order."""
    for rank in range(programs.ranks):
        first, this = programs.of(rank), programs.of(rank, replica)
        _check_same(programs, first, this, [_collectives(first), _collectives(this)])


def _check_shared(programs: Programs) -> None:
    """Check that ranks that share units issue their reductions in the same order."""
    homes = {name: programs.ranks_with(name) for name in programs.unit}
    pairs = {(a, b) for ranks in homes.values() for a in ranks for b in ranks if a < b}
    for a, b in sorted(pairs):
        common = {name for name, ranks in homes.items() if a in ranks and b in ranks}
        rows = [
            [(k, i) for k, i in _collectives(programs.of(rank)) if isinstance(i, Reduce) and i.unit in common]
            for rank in (a, b)
        ]
        _check_same(programs, programs.of(a), programs.of(b), rows)


def _collectives(program: Program) -> list[tuple[int, Gather | Reduce]]:
    return [(k, i) for k, i in enumerate(program.instructions) if isinstance(i, Gather | Reduce)]


def _check_same(
    programs: Programs, a: Program, b: Program, rows: Sequence[Sequence[tuple[int, Gather | Reduce]]]
) -> None:
    for mine, theirs in zip_longest(*rows):
        if mine is None or theirs is None or mine[1] != theirs[1]:
            program, (index, what) = (b, theirs) if theirs else (a, mine)
            other = mine[1] if theirs and mine else "nothing more"
            raise ScheduleError(
                f"{_name(program, index, what)}: rank {a.rank} of replica {a.replica} has {other} there; "
                "ranks that share collectives must issue them in the same order"
            )
