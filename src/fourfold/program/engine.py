"""Timing an order: the one engine behind the simulator and every search.

Given each rank's ops in order, when does each start? A rank runs its ops one after another; an op starts when the rank
is free and its input is there:

    F of stage s     the activation of stage s - 1           W     nothing more than its I, earlier on the same rank
    I, B of stage s  the gradient of stage s + 1 (the last stage: nothing more than its F)

A message leaves when its producer ends, waits for its link where links are shared, and arrives after its time. Every link
has one sender, so all orders are fixed and one pass over the ops suffices: about a microsecond an op.

Times are the numbers of the problem's tables: whole ticks, or floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from fourfold.program.costs import Costs, Number, StageCosts, Table, Ticks

__all__ = ["More", "OpTimes", "Order", "Problem", "levels", "peaks", "run"]

Order = Sequence[Sequence[tuple[int, str, int]]]
"""Every rank's ops, as (stage, kind, micro-batch); a schedule's `order` is one."""


class More(NamedTuple):
    """What an op does besides, in ticks. Beside its ops a rank has a lane, where what they put runs one after another."""

    free: Any = 0
    """Longer, from when the rank is free: it gets ready meanwhile."""
    ready: Any = 0
    """Longer, from when its input is there."""
    after: Any = 0
    """What the rank waits for when its result has left."""
    puts: Any = 0
    """What it puts into the lane."""
    done: Any = 0
    """From its start until that is done, in a lane that was empty."""
    lead: Any = None
    """From its start until it waits for what was in the lane before; None: it does not."""


@dataclass(frozen=True)
class Problem:
    """Stages on ranks, with their costs in ticks: what there is to schedule."""

    placement: tuple[int, ...]
    ranks: int
    micro_batches: int
    costs: StageCosts
    """In ticks, memory too."""
    tick: Number
    """The value of a tick of time in the caller's unit."""
    cap: int | None = None
    """Memory every rank may hold, in the whole units of a search; None: no limit."""

    @classmethod
    def of(cls, placement: Sequence[int], ranks: int, micro_batches: int, costs: Costs) -> Problem:
        """The problem in exact ticks, or in the caller's floats. Memory stays in the caller's unit."""
        c = costs.of_stages(placement, ranks).launched(costs.instruction)
        ticks = Ticks.measuring(c.forward, c.backward, c.input_grad, c.weight_grad, c.down, c.up)
        in_ticks = c.scaled(time=ticks.counts, memory=lambda table: table)
        return cls(tuple(placement), ranks, micro_batches, in_ticks, ticks.unit)

    @classmethod
    def in_integers(
        cls,
        placement: Sequence[int],
        ranks: int,
        micro_batches: int,
        costs: Costs,
        memory_cap: Number | None = None,
    ) -> Problem:
        """The problem with all numbers whole, for searches: ties are then ties, whatever the floats were."""
        c = costs.of_stages(placement, ranks).launched(costs.instruction)
        time = _Whole(c.forward, c.backward, c.input_grad, c.weight_grad, c.down, c.up)
        memory = _Whole(c.activation, c.kept)
        cap = None
        if memory_cap is not None:  # a float that misses a whole number by its last digit is that number
            cap = int(Fraction(memory_cap) * memory.scale + Fraction(1, 1000))
        whole = c.scaled(time=time.of, memory=memory.of)
        return cls(tuple(placement), ranks, micro_batches, whole, 1 / time.scale, cap)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank."""
        return tuple(tuple(s for s, r in enumerate(self.placement) if r == rank) for rank in range(self.ranks))

    @cached_property
    def period(self) -> Any:
        """The work of the busiest rank for one micro-batch: no schedule can go on faster."""
        c = self.costs
        work = [c.forward[s] + min(c.backward[s], c.input_grad[s] + c.weight_grad[s]) for s in range(self.stages)]
        return max(sum(work[s] for s in stages) for stages in self.stages_of)


class _Whole:
    """Brings numbers to whole ones: exactly when they have a common denominator of decent size, else nearly."""

    def __init__(self, *tables: Table):
        rationals = [Fraction(x).limit_denominator(10**6) for table in tables for x in table]
        denominator = lcm(*(x.denominator for x in rationals))
        if denominator > 10**12:  # no useful common measure: a billion ticks for the largest
            denominator = max(1, int(10**9 / max(rationals)))
        self.scale = Fraction(denominator)

    def of(self, table: Table) -> Table:
        return tuple(round(Fraction(x).limit_denominator(10**6) * self.scale) for x in table)


@dataclass
class OpTimes:
    """When each op started and ended, in ticks, by rank and place in its order."""

    starts: list[list[Any]]
    ends: list[list[Any]]
    messages: list[tuple[int, int, int, Any, int, Any, Any]] = field(default_factory=list)
    """(sender, receiver, stage, "activation" | "gradient", micro-batch, start, end), when asked for."""
    lanes: list[Any] = field(default_factory=list)
    """By rank, when its lane is empty."""
    stuck: bool = False
    """Whether ranks wait for each other in a circle; then the lists end where they do."""

    @property
    def makespan(self) -> Any:
        return max((row[-1] for row in self.ends if row), default=0)


def run(
    problem: Problem,
    order: Order,
    record_messages: bool = False,
    more: Mapping[tuple[int, str, int], More] | None = None,
) -> OpTimes:
    """Time an order whose ops are complete, on their ranks and locally in order (see `validator.check_ops`)."""
    p, c = problem.placement, problem.costs
    forward, backward, input_grad, weight_grad = c.forward, c.backward, c.input_grad, c.weight_grad
    down, up = c.down, c.up
    private, per_rank = c.link == "private", c.link == "rank"
    last, ranks = len(p) - 1, problem.ranks
    # activation[s][m], gradient[s][m]: when the input of F (of I or B) of stage s is there; None: not yet
    activation: list[list[Any]] = [[None] * problem.micro_batches for _ in p]
    gradient: list[list[Any]] = [[None] * problem.micro_batches for _ in p]
    free: dict[tuple[int, int], Any] = {}  # when a shared link is free again
    times = OpTimes([[] for _ in range(ranks)], [[] for _ in range(ranks)])
    at, clock, waiting = [0] * ranks, [0] * ranks, [False] * ranks
    lanes: list[Any] = [0] * ranks
    times.lanes = lanes
    todo = list(range(ranks))

    def leave(sender: int, receiver: int, stage: int, kind: str, micro_batch: int, ready: Any, takes: Any) -> Any:
        start = ready
        if not private:
            link = (sender, -1 if per_rank else receiver)
            start = max(ready, free.get(link, 0))
            free[link] = start + takes
        if record_messages:
            times.messages.append((sender, receiver, stage, kind, micro_batch, start, start + takes))
        return start + takes

    def different(op: More, rank: int, t: Any, ready: Any, takes: Any) -> tuple[Any, Any, Any]:
        """Start, end and when the rank is free of an op that does more."""
        if op.lead is not None:
            t = max(t, lanes[rank] - op.lead)
        start = max(t, ready)
        end = max(t + op.free, ready + op.ready) + takes
        if op.puts:
            lanes[rank] = max(start + op.done, lanes[rank] + op.puts)
        return start, end, end + op.after

    simple = private and not record_messages
    while todo:
        rank = todo.pop()
        ops, i, t = order[rank], at[rank], clock[rank]
        add_start, add_end, count = times.starts[rank].append, times.ends[rank].append, len(order[rank])
        while i < count:
            stage, kind, m = ops[i]
            this = more.get(ops[i]) if more else None
            if kind == "F":
                ready = 0
                if stage:
                    ready = activation[stage][m]
                    if ready is None:
                        break
                if this is None:
                    if ready > t:
                        t = ready
                    add_start(t)
                    t += forward[stage]
                else:
                    start, t, after = different(this, rank, t, ready, forward[stage])
                    add_start(start)
                add_end(t)
                if stage < last:
                    to = p[stage + 1]
                    if to == rank:
                        activation[stage + 1][m] = t
                    else:
                        activation[stage + 1][m] = (
                            t + down[stage] if simple else leave(rank, to, stage, "activation", m, t, down[stage])
                        )
                        if waiting[to]:
                            waiting[to] = False
                            todo.append(to)
            elif kind == "W":
                if this is None:
                    add_start(t)
                    t += weight_grad[stage]
                else:
                    start, t, after = different(this, rank, t, 0, weight_grad[stage])
                    add_start(start)
                add_end(t)
            else:
                ready = 0
                if stage < last:
                    ready = gradient[stage][m]
                    if ready is None:
                        break
                takes = input_grad[stage] if kind == "I" else backward[stage]
                if this is None:
                    if ready > t:
                        t = ready
                    add_start(t)
                    t += takes
                else:
                    start, t, after = different(this, rank, t, ready, takes)
                    add_start(start)
                add_end(t)
                if stage:
                    to = p[stage - 1]
                    if to == rank:
                        gradient[stage - 1][m] = t
                    else:
                        gradient[stage - 1][m] = (
                            t + up[stage - 1] if simple else leave(rank, to, stage, "gradient", m, t, up[stage - 1])
                        )
                        if waiting[to]:
                            waiting[to] = False
                            todo.append(to)
            if this is not None:
                t = after
            i += 1
        at[rank], clock[rank], waiting[rank] = i, t, i < count
    times.stuck = any(waiting)
    return times


def levels(problem: Problem, ops: Sequence[tuple[int, str, int]]) -> Iterator[Any]:
    """What a rank holds after each op has started (F) or ended (the others). Only the order matters."""
    activation, kept = problem.costs.activation, problem.costs.kept
    held: Any = 0
    for stage, kind, _ in ops:
        if kind == "F":
            held += activation[stage]
        elif kind == "W":
            held -= kept[stage]
        elif kind == "I":
            held -= activation[stage] - kept[stage]
        else:
            held -= activation[stage]
        yield held


def peaks(problem: Problem, order: Order) -> list[Any]:
    """The most memory every rank holds at once."""
    return [max(levels(problem, ops), default=0) for ops in order]
