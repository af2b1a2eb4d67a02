"""Times an order of ops; used by the simulator and by every search.

Given each rank's ops in order, `run` computes when each starts. A rank runs its ops one after another; an op starts when the
rank is idle and its input has arrived:

    F of stage s     the activation of stage s - 1           W     only its I, earlier on the same rank
    I, B of stage s  the gradient of stage s + 1 (last stage: only its F)

A message is sent when its producer ends, queues if links are shared, and arrives after its transfer time. Every link has one
sender, so all orders are fixed and one pass over the ops suffices: about a microsecond per op.

Times are integer ticks or floats, as in the problem's tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from fourfold.program.costs import Costs, Number, StageCosts, Table, Ticks

__all__ = ["OpExtras", "OpTimes", "Order", "Problem", "levels", "peaks", "run"]

Order = Sequence[Sequence[tuple[int, str, int]]]
"""Every rank's ops, as (stage, kind, micro-batch); a schedule's `order` is one."""


class OpExtras(NamedTuple):
    """Extra times of one op, in ticks. Each rank has a background lane whose work runs serially, concurrent with its ops."""

    free: Any = 0
    """Extra time, counted from when the rank becomes idle; overlaps the wait for the input."""
    ready: Any = 0
    """Extra time, counted from when the input arrives."""
    after: Any = 0
    """Time the rank stays busy after the result was sent."""
    puts: Any = 0
    """Work that the op adds to the background lane."""
    done: Any = 0
    """Time from the op's start until that work is done, if the lane was empty."""
    lead: Any = None
    """Time from the op's start until it needs earlier background work to be done; None: it does not wait."""


@dataclass(frozen=True)
class Problem:
    """A scheduling problem: stages placed on ranks, with their costs in ticks."""

    placement: tuple[int, ...]
    ranks: int
    micro_batches: int
    costs: StageCosts
    """Times in ticks; memory in ticks too if `in_integers` made the problem."""
    tick: Number
    """One tick of time in the caller's unit."""
    cap: int | None = None
    """Memory limit of every rank, in integer units; None: no limit."""

    @classmethod
    def of(cls, placement: Sequence[int], ranks: int, micro_batches: int, costs: Costs) -> Problem:
        """A problem in exact ticks, or in the caller's floats. Memory is in the caller's unit."""
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
        """A problem with integer costs, for searches: ties are exact even if the given costs are floats."""
        c = costs.of_stages(placement, ranks).launched(costs.instruction)
        time = _Whole(c.forward, c.backward, c.input_grad, c.weight_grad, c.down, c.up)
        memory = _Whole(c.activation, c.kept)
        cap = None
        if memory_cap is not None:  # tolerates floating-point error just below an integer
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
        """The work of the busiest rank per micro-batch: a lower bound on the steady-state time per micro-batch."""
        c = self.costs
        work = [c.forward[s] + min(c.backward[s], c.input_grad[s] + c.weight_grad[s]) for s in range(self.stages)]
        return max(sum(work[s] for s in stages) for stages in self.stages_of)


class _Whole:
    """Scales numbers to integers: exactly if their common denominator is small enough, otherwise rounded."""

    def __init__(self, *tables: Table):
        rationals = [Fraction(x).limit_denominator(10**6) for table in tables for x in table]
        denominator = lcm(*(x.denominator for x in rationals))
        if denominator > 10**12:  # no practical common denominator: the largest number becomes 10^9 ticks
            denominator = max(1, int(10**9 / max(rationals)))
        self.scale = Fraction(denominator)

    def of(self, table: Table) -> Table:
        return tuple(round(Fraction(x).limit_denominator(10**6) * self.scale) for x in table)


@dataclass
class OpTimes:
    """Start and end of each op in ticks, by rank and index."""

    starts: list[list[Any]]
    ends: list[list[Any]]
    messages: list[tuple[int, int, int, Any, int, Any, Any]] = field(default_factory=list)
    """(sender, receiver, stage, "activation" | "gradient", micro-batch, start, end), if recorded."""
    lanes: list[Any] = field(default_factory=list)
    """By rank, when its background lane becomes empty."""
    stuck: bool = False
    """Whether the ranks deadlock; then the lists end at the ops that never start."""

    @property
    def makespan(self) -> Any:
        return max((row[-1] for row in self.ends if row), default=0)


def run(
    problem: Problem,
    order: Order,
    record_messages: bool = False,
    more: Mapping[tuple[int, str, int], OpExtras] | None = None,
) -> OpTimes:
    """Time an order that passes `validator.check_ops`; `more` gives the extra times of some ops."""
    p, c = problem.placement, problem.costs
    forward, backward, input_grad, weight_grad = c.forward, c.backward, c.input_grad, c.weight_grad
    down, up = c.down, c.up
    private, per_rank = c.link == "private", c.link == "rank"
    last, ranks = len(p) - 1, problem.ranks
    # activation[s][m], gradient[s][m]: arrival of the input of F (of I or B) of stage s; None: not yet known
    activation: list[list[Any]] = [[None] * problem.micro_batches for _ in p]
    gradient: list[list[Any]] = [[None] * problem.micro_batches for _ in p]
    free: dict[tuple[int, int], Any] = {}  # when a shared link becomes idle
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

    def different(op: OpExtras, rank: int, t: Any, ready: Any, takes: Any) -> tuple[Any, Any, Any]:
        """(start, end, time at which the rank becomes idle) of an op with extra times."""
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
    """Memory of a rank after each op has started (F) or ended (I, W, B); depends on the order only, not on times."""
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
    """Peak memory of every rank."""
    return [max(levels(problem, ops), default=0) for ops in order]
