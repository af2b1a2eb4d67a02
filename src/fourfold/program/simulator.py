"""Simulation: time and memory of a schedule or a set of programs.

A schedule is timed by `engine.run`, with implied messages. Programs are timed as written, with every SEND, RECV, GATHER,
REDUCE and STREAM (see `graph`). If collectives and issuing instructions cost nothing, a lowered schedule takes the same time as
the schedule, unless its receives are posted late.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fourfold.errors import ScheduleError
from fourfold.program.bounds import forward_bound, lower_bound
from fourfold.program.costs import Costs, Number, Ticks
from fourfold.program.engine import Problem, run
from fourfold.program.graph import Node, build_graph
from fourfold.program.instructions import Gather, Programs, Reduce, Release, Send, Stream, UnitOp
from fourfold.program.ops import Op, Schedule
from fourfold.program.program_checks import validate_programs
from fourfold.program.timeline import Entry, MessageEntry, Timeline
from fourfold.program.validator import check_ops, explain_stuck

__all__ = ["simulate"]


def simulate(what: Schedule | Programs, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule or a set of programs under costs (default: F = I = W = 1, everything else 0)."""
    costs = costs or Costs()
    return _simulate_schedule(what, costs) if isinstance(what, Schedule) else _simulate_programs(what, costs)


def _simulate_schedule(schedule: Schedule, costs: Costs) -> Timeline:
    check_ops(schedule)
    problem = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
    timed = any(problem.costs.down) or any(problem.costs.up)  # messages that take no time are not listed
    times = run(problem, schedule.order, record_messages=timed)
    if times.stuck:
        raise ScheduleError(explain_stuck(schedule.placement, schedule.order, times))
    return Timeline(
        ops=schedule.order,
        starts=tuple(map(tuple, times.starts)),
        ends=tuple(map(tuple, times.ends)),
        tick=problem.tick,
        costs=problem.costs,
        placement=schedule.placement,
        lower_bound=_bound(problem, schedule) * problem.tick,
        messages=tuple(times.messages),
    )


def _bound(problem: Problem, schedule: Schedule) -> Any:
    if schedule.forward_only:
        return forward_bound(problem)
    kinds = {op.kind for ops in schedule.order for op in ops}
    return lower_bound(problem, split=None if {"B", "I"} <= kinds else "I" in kinds)


# ---- programs ----


def _simulate_programs(programs: Programs, costs: Costs) -> Timeline:
    schedule = validate_programs(programs)
    raw = costs.of_stages(programs.placement, programs.ranks)
    price = _Prices(programs, costs)
    ticks = Ticks.measuring(
        raw.forward, raw.backward, raw.input_grad, raw.weight_grad, raw.down, raw.up, price.all_times(raw.times)
    )
    table = raw.scaled(time=ticks.counts, memory=lambda values: values)
    graph = build_graph(programs, costs.link)
    starts, ends, bindings, cycle = graph.times(lambda node: ticks.count(price.of(node, raw.times)))
    assert not cycle, "validated"

    rows = range(len(programs.programs))
    ops: list[list[Op | UnitOp]] = [[] for _ in rows]
    begun: list[list[Any]] = [[] for _ in rows]
    ended: list[list[Any]] = [[] for _ in rows]
    messages: list[MessageEntry] = []
    others: list[Entry] = []
    memory: list[list[tuple[Any, Number]]] = [[] for _ in rows]
    for n, node in enumerate(graph.nodes):
        if isinstance(node.what, Op | UnitOp):
            ops[node.row].append(node.what)
            begun[node.row].append(starts[n])
            ended[node.row].append(ends[n])
        elif node.lane == "message":
            send = node.what
            assert isinstance(send, Send)
            messages.append((node.row, send.peer, send.stage, send.kind, send.micro_batch, starts[n], ends[n]))
        elif node.lane != "issue":
            others.append((node.row, node.lane, node.what, starts[n], ends[n]))
        elif isinstance(node.what, Gather | Release):
            sign = 1 if isinstance(node.what, Gather) else -1
            memory[node.row].append((ends[n], sign * price.named(costs.gathered, node.what.unit, "gathered")))
    problem = Problem.of(programs.placement, programs.ranks, programs.micro_batches, costs)
    return Timeline(
        ops=tuple(map(tuple, ops)),
        starts=tuple(map(tuple, begun)),
        ends=tuple(map(tuple, ended)),
        tick=ticks.unit,
        costs=table,
        placement=programs.placement,
        lower_bound=_bound(problem, schedule) * problem.tick,
        messages=tuple(messages),
        others=tuple(others),
        unit_memory=tuple(map(tuple, memory)) if any(memory) else (),
        bindings=_chain(graph.nodes, starts, ends, bindings),
    )


def _chain(nodes: list[Node], starts: list[Any], ends: list[Any], bindings: list[int]) -> tuple[Entry, ...]:
    """The critical path, without nodes of zero duration."""
    n = max(range(len(nodes)), key=lambda i: ends[i])
    chain: list[Entry] = []
    while n >= 0:
        if ends[n] > starts[n]:
            chain.append((nodes[n].row, nodes[n].lane, nodes[n].what, starts[n], ends[n]))
        n = bindings[n]
    return tuple(chain[::-1])


class _Prices:
    """Cost of each node of the graph, in the caller's unit."""

    def __init__(self, programs: Programs, costs: Costs):
        self.programs, self.costs = programs, costs
        self.share: dict[tuple[int, str], Number] = {}  # of a stage's time, by unit
        for stage, units in enumerate(programs.units):
            weights = [Fraction(unit.weight) for unit in units]
            for unit, weight in zip(units, weights, strict=True):
                self.share[stage, unit.name] = weight / sum(weights) if any(weights) else Fraction(1, len(units))

    def of(self, node: Node, times: Mapping[str, Any]) -> Number:
        what = node.what
        match node.lane:
            case "compute":
                assert isinstance(what, Op | UnitOp)
                time = times[what.kind][what.stage]
                return (
                    time * self.share[what.stage, what.unit] if isinstance(what, UnitOp) else time
                ) + self.costs.instruction
            case "message":
                assert isinstance(what, Send)
                return self.costs.hop(self.programs.programs[node.row].rank, what.peer, self.programs.ranks)
            case "collective":
                assert isinstance(what, Gather | Reduce)
                field = "gather" if isinstance(what, Gather) else "reduce"
                return self.named(getattr(self.costs, field), what.unit, field)
            case "stream":
                assert isinstance(what, Stream)
                return self.named(self.costs.stream, what.bucket, "stream")
            case _:
                return self.costs.instruction

    def named(self, price: Number | Mapping[str, Number], name: str, field: str) -> Number:
        if not isinstance(price, Mapping):
            return price
        if name not in price:
            raise ScheduleError(f"costs.{field} has no entry for '{name}'; it has {', '.join(sorted(price)) or 'none'}")
        return price[name]

    def all_times(self, times: Mapping[str, Any]) -> list[Number]:
        """All numbers that `of` can return, to find a common unit."""
        out: list[Number] = [self.costs.instruction]
        for (stage, _), share in self.share.items():
            out += [table[stage] * share for table in times.values()]
        for price in (self.costs.gather, self.costs.reduce, self.costs.stream):
            out += list(price.values()) if isinstance(price, Mapping) else [price]
        return out
