"""Lowering: from a schedule, units and buckets to one program per rank.

**Messages.** An op's result is sent to the rank of the next stage right after the op. Stages on one rank exchange no
messages. For receives, see the note below.

**Units.** GATHER, RELEASE and REDUCE are placed by each unit's mode (the table in `instructions`), gathers `prefetch` unit
ops early; a unit op is the computation of one unit in one op. An op with such an instruction inside is written as its unit
ops; other ops stay whole. A unit is not released if its next use comes before it could be prefetched again. A REDUCE that
several ranks share comes last on each of them, in the same order.

**Buckets.** STREAM follows the last REDUCE of its units; with `stream = "last"` (gradient clipping: the norm needs all
gradients) all updates come at the end, in the order in which they could have started.

[Note: where receives are posted]
Order all ops by their end times in a simulation. The receive of a message is posted before the first op of the receiver
that ends after the producer, or `ahead` ops before its consumer, whichever is earlier; and no later than the receives of
messages that are sent later on the same edge. So:

- Both ends of an edge use the sender's order. (In the consumers' order, an edge that carries activations of one leg and
  gradients of another can deadlock.)
- With the simulated times no message waits for its receive; `ahead` is the margin for other timings.
- There is no deadlock even if SEND blocks until its receive is posted: by induction over that order, when an op has
  run, its receiver has run all earlier ops in the order and finished their SENDs, so it reaches the posted receive.
- A receive buffer is allocated shortly before its message can arrive, not at the start of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fourfold import schema
from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs
from fourfold.program.engine import Problem, run
from fourfold.program.instructions import (
    Carried,
    Gather,
    Instruction,
    Program,
    ProgramBucket,
    Programs,
    ProgramUnit,
    Recv,
    Reduce,
    Release,
    Send,
    Stream,
    UnitOp,
)
from fourfold.program.modes import reduces, releases
from fourfold.program.ops import Op, Schedule
from fourfold.program.schedules import at_least
from fourfold.program.validator import validate_schedule

__all__ = ["lower", "receives_of"]


def lower(
    schedule: Schedule,
    units: Sequence[Sequence[ProgramUnit]] = (),
    buckets: Sequence[ProgramBucket] = (),
    *,
    replicas: int = 1,
    prefetch: int = 1,
    ahead: int = 2,
    stream: Literal["early", "last"] = "last",
    costs: Costs | None = None,
) -> Programs:
    """Lower a schedule to programs; `units[stage]` are a stage's units in forward order.

    `costs` determine where receives are posted; only the resulting order of ops matters.
    """
    validate_schedule(schedule)
    at_least(replicas=(replicas, 1), prefetch=(prefetch, 0), ahead=(ahead, 0))
    of_stage = tuple(map(tuple, units)) if units else ((),) * schedule.stages
    homes = _check_units(schedule, of_stage, buckets)
    if stream not in ("early", "last"):
        raise ScheduleError(f"stream = '{stream}' is invalid; choose 'early' or 'last'")
    shared = [name for name, ranks in homes.items() if len(ranks) > 1]
    receives = receives_of(schedule, costs or Costs(), ahead)
    programs = []
    for rank in range(schedule.ranks):
        instructions = tuple(
            _RankLowering(schedule, rank, of_stage, shared, prefetch).lowered(receives[rank], buckets, stream)
        )
        programs.append([Program(rank, instructions, replica) for replica in range(replicas)])
    by_replica = tuple(of_rank[replica] for replica in range(replicas) for of_rank in programs)
    return Programs(by_replica, schedule.placement, schedule.micro_batches, of_stage, tuple(buckets))


def _check_units(
    schedule: Schedule, of_stage: Sequence[Sequence[ProgramUnit]], buckets: Iterable[ProgramBucket]
) -> dict[str, set[int]]:
    """Check units and buckets; returns the ranks that hold each unit."""
    if len(of_stage) != schedule.stages:
        raise ScheduleError(f"units for {len(of_stage)} stages; the schedule has {schedule.stages}")
    seen: dict[str, ProgramUnit] = {}
    homes: dict[str, set[int]] = {}
    for stage, units in enumerate(of_stage):
        if len({unit.name for unit in units}) < len(units):
            raise ScheduleError(f"stage {stage} names a unit twice: {[unit.name for unit in units]}")
        for unit in units:
            if seen.setdefault(unit.name, unit) != unit:
                raise ScheduleError(f"unit '{unit.name}' has two different definitions: {seen[unit.name]} and {unit}")
            homes.setdefault(unit.name, set()).add(schedule.placement[stage])
    for name, ranks in homes.items():
        if len(ranks) > 1 and seen[name].reduce == "micro-batch":
            raise ScheduleError(
                f"unit '{name}' is shared by ranks {sorted(ranks)}: such units are reduced once; use reduce = 'step'"
            )
    for bucket in buckets:
        for name in bucket.units:
            if name not in seen:
                raise ScheduleError(f"bucket '{bucket.name}': there is no unit '{name}'{schema.nearest(name, seen)}")
    return homes


# ---- messages ----


def _outgoing(schedule: Schedule, op: Op) -> tuple[int, Carried] | None:
    """(receiving rank, kind) of an op's result; None if no other rank needs it."""
    place = schedule.placement
    if op.kind == "F" and op.stage + 1 < schedule.stages and place[op.stage + 1] != place[op.stage]:
        return place[op.stage + 1], "activation"
    if op.kind in "BI" and op.stage and place[op.stage - 1] != place[op.stage]:
        return place[op.stage - 1], "gradient"
    return None


def receives_of(schedule: Schedule, costs: Costs, ahead: int) -> list[dict[int, list[Recv]]]:
    """By rank and op index: the receives posted before the op."""
    keys = _ends(schedule, costs)
    consumer = {
        (op.stage, "F" if op.kind == "F" else "B", op.micro_batch): i
        for ops in schedule.order
        for i, op in enumerate(ops)
        if op.kind != "W"
    }
    edges: dict[tuple[int, int], list[tuple[_Key, int, Recv]]] = {}
    for rank, ops in enumerate(schedule.order):
        for key, op in zip(keys[rank], ops, strict=True):
            outgoing = _outgoing(schedule, op)
            if outgoing is None:
                continue
            to, kind = outgoing
            reader = (
                (op.stage + 1, "F", op.micro_batch) if kind == "activation" else (op.stage - 1, "B", op.micro_batch)
            )
            at = min(bisect_right(keys[to], key), max(0, consumer[reader] - ahead))
            edges.setdefault((rank, to), []).append((key, at, Recv(op.stage, kind, op.micro_batch, rank)))
    posted: list[list[tuple[int, _Key, Recv]]] = [[] for _ in schedule.order]
    for (_, to), messages in edges.items():
        earliest = len(schedule.order[to])
        for key, at, recv in reversed(messages):  # no later than the receives of later messages
            earliest = min(earliest, at)
            posted[to].append((earliest, key, recv))
    out: list[dict[int, list[Recv]]] = [{} for _ in schedule.order]
    for rank, recvs in enumerate(posted):
        for at, _, recv in sorted(recvs, key=lambda posted: posted[:2]):
            out[rank].setdefault(at, []).append(recv)
    return out


_Key = tuple[Any, Any, int]


def _ends(schedule: Schedule, costs: Costs) -> list[list[_Key]]:
    """By rank and op: sort keys that order all ops by their end times, consistent with dependencies.

    Ops of zero cost end together with their inputs; the end times at unit costs break the ties.
    """
    size = (schedule.placement, schedule.ranks, schedule.micro_batches)
    real, unit = (run(Problem.of(*size, c), schedule.order).ends for c in (costs, Costs()))
    return [[(a, b, rank) for a, b in zip(real[rank], unit[rank], strict=True)] for rank in range(schedule.ranks)]


# ---- one rank ----


class _RankLowering:
    """Lowers one rank: lists its unit ops, marks where GATHER, RELEASE, REDUCE and STREAM go, then writes instructions."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        of_stage: Sequence[Sequence[ProgramUnit]],
        shared: Sequence[str],
        prefetch: int,
    ):
        self.schedule, self.ops, self.prefetch = schedule, schedule.order[rank], prefetch
        self.units = {unit.name: unit for stage in schedule.stages_of[rank] for unit in of_stage[stage]}
        self.shared = [name for name in shared if name in self.units]  # units that other ranks also hold
        self.unit_ops: list[tuple[int, Op, str]] = []  # (index of the op, op, unit); unit "" in a stage without units
        for index, op in enumerate(self.ops):
            names = [unit.name for unit in of_stage[op.stage]] or [""]
            self.unit_ops += [(index, op, name) for name in (names if op.kind == "F" else reversed(names))]
        self.before: dict[int, list[Instruction]] = {}  # instructions before a unit op, by its index
        self.after: dict[int, list[Instruction]] = {}
        self.reduced: dict[str, int] = {}  # by unit: index of the unit op before its last REDUCE

    def lowered(
        self, receives: dict[int, list[Recv]], buckets: Sequence[ProgramBucket], stream: str
    ) -> list[Instruction]:
        uses: dict[str, list[int]] = {name: [] for name in self.units}
        for i, (_, _, name) in enumerate(self.unit_ops):
            if name:
                uses[name].append(i)
        for name, unit in self.units.items():
            self._mark_reduces(unit, uses[name])
        for name, unit in self.units.items():
            self._mark_gathers(unit, uses[name])
        tail: list[Instruction] = [] if self.schedule.forward_only else [Reduce(name) for name in sorted(self.shared)]
        tail += self._mark_streams(buckets, stream)
        return [*self._written(receives), *tail]

    def _mark_reduces(self, unit: ProgramUnit, uses: list[int]) -> None:
        """REDUCE after the last contribution, or after each; a unit shared with other ranks is reduced at the end."""
        contributions = [i for i in uses if self.unit_ops[i][1].kind in "BW"]
        if not contributions or unit.name in self.shared:
            return
        for i in contributions if reduces(unit.reduce, last=False) else contributions[-1:]:
            self.after.setdefault(i, []).append(Reduce(unit.name))
        self.reduced[unit.name] = contributions[-1]

    def _mark_gathers(self, unit: ProgramUnit, uses: list[int]) -> None:
        """GATHER before the first unit op of each run of uses between which the unit stays gathered; RELEASE after the last."""
        if unit.mode == "replicate":
            return
        needed = [i for i in uses if self.unit_ops[i][1].kind != "W"]
        first, waiting = True, 0
        for i, following in zip(needed, [*needed[1:], None], strict=True):
            if first:
                self.before.setdefault(max(0, i - self.prefetch), []).append(Gather(unit.name))
            waiting += 1 if self.unit_ops[i][1].kind == "F" else -1
            first = following is None or self._released(unit, waiting, following - i)
            if first:
                self.after.setdefault(i, []).append(Release(unit.name))

    def _released(self, unit: ProgramUnit, waiting: int, distance: int) -> bool:
        """Whether a unit is released after a use, if its next use is `distance` unit ops later."""
        none_in_flight = waiting <= 0 or self.schedule.forward_only
        return distance > self.prefetch and releases(unit.mode, last=False, none_in_flight=none_in_flight)

    def _mark_streams(self, buckets: Sequence[ProgramBucket], stream: str) -> list[Instruction]:
        """STREAM for the buckets with units on this rank; returns those that come at the end."""
        if self.schedule.forward_only:
            return []
        ready = []
        for bucket in buckets:
            mine = [name for name in bucket.units if name in self.units]
            if mine:
                late = any(name in self.shared for name in mine)
                ready.append((len(self.unit_ops) if late else max(self.reduced[name] for name in mine), bucket.name))
        ready.sort(key=lambda item: item[0])
        tail: list[Instruction] = []
        for at, name in ready:
            if stream == "last" or at == len(self.unit_ops):
                tail.append(Stream(name))
            else:
                self.after[at].append(Stream(name))
        return tail

    def _written(self, receives: dict[int, list[Recv]]) -> Iterable[Instruction]:
        """The instructions: for every op its receives, then its unit ops, or the whole op if nothing comes in between."""
        at = 0
        for index, op in enumerate(self.ops):
            end = at
            while end < len(self.unit_ops) and self.unit_ops[end][0] == index:
                end += 1
            inside = any(i in self.before for i in range(at + 1, end)) or any(
                i in self.after for i in range(at, end - 1)
            )
            outgoing = _outgoing(self.schedule, op)
            send = [Send(op.stage, outgoing[1], op.micro_batch, outgoing[0])] if outgoing else []
            yield from receives.get(index, ())
            for i in range(at, end):
                yield from self.before.get(i, ())
                if inside:
                    yield UnitOp(*op, self.unit_ops[i][2])
                elif i == at:
                    yield op
                if i == end - 1:
                    yield from send
                yield from self.after.get(i, ())
            at = end
