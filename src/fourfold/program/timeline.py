"""Timelines: start and end of every op, message, collective and update, and the figures derived from them.

Made by `simulate`, or from the trace of a run. Times and memory are in the units of the costs; if those have no floats,
results are exact.

Rows are ranks (or programs, if there are replicas). On each row, ops run one after another; messages, collectives and
updates run concurrently with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from fourfold.program.costs import Number, StageCosts, divide
from fourfold.program.instructions import Carried, Instruction, Send, UnitOp
from fourfold.program.ops import Op

__all__ = ["MemoryPeak", "Timeline", "TimelineSpan"]

Entry = tuple[int, str, Instruction, Any, Any]
"""A TimelineSpan as a tuple, in ticks."""
MessageEntry = tuple[int, int, int, Carried, int, Any, Any]
"""(row of the sender, receiving rank, stage, kind, micro-batch, start, end), in ticks."""


class TimelineSpan(NamedTuple):
    """One timed event; `lane` is compute, message, collective or stream."""

    row: int
    lane: str
    what: Instruction
    start: Number
    end: Number


class MemoryPeak(NamedTuple):
    """A rank's peak memory, and the first time at which it is reached."""

    memory: Number
    at: Number


@dataclass(frozen=True)
class Timeline:
    """Start and end of every event, and the figures derived from them."""

    ops: tuple[tuple[Op | UnitOp, ...], ...]
    """The ops of each row, in order."""
    starts: tuple[tuple[Any, ...], ...] = field(repr=False)
    """Start times in ticks; `spans` has them in the caller's unit."""
    ends: tuple[tuple[Any, ...], ...] = field(repr=False)
    tick: Number
    costs: StageCosts = field(repr=False)
    """Costs by stage: times in ticks, memory in the caller's unit."""
    placement: tuple[int, ...]
    lower_bound: Number
    """Lower bound on the makespan of any order of these ops on this placement."""
    messages: tuple[MessageEntry, ...] = field(default=(), repr=False)
    """In ticks; for a schedule only if messages take time."""
    others: tuple[Entry, ...] = field(default=(), repr=False)
    """Collectives and updates, in ticks."""
    unit_memory: tuple[tuple[tuple[Any, Number], ...], ...] = field(default=(), repr=False)
    """By row: (tick, change) for gathered and released units."""
    bindings: tuple[Entry, ...] | None = field(default=None, repr=False, compare=False)
    """The critical path in ticks, if the simulator has computed it."""

    @property
    def rows(self) -> int:
        return len(self.ops)

    @cached_property
    def makespan(self) -> Number:
        """Time from 0 to the end of the last event."""
        ends = (
            [row[-1] for row in self.ends if row]
            + [end for *_, end in self.messages]
            + [end for *_, end in self.others]
        )
        return max(ends, default=0) * self.tick

    @cached_property
    def work(self) -> tuple[Number, ...]:
        """Compute time of each row."""
        return tuple((sum(e) - sum(s)) * self.tick for s, e in zip(self.starts, self.ends, strict=True))

    @cached_property
    def idle(self) -> tuple[Number, ...]:
        """Idle time of each row."""
        return tuple(max(0, self.makespan - w) for w in self.work)  # max: floating-point error may make it negative

    @cached_property
    def bubble(self) -> Number:
        """Bubble ratio: idle time divided by total time, over all rows."""
        return divide(sum(self.idle), self.rows * self.makespan) if self.makespan else 0

    @property
    def gap(self) -> Number:
        """(makespan - lower bound) / lower bound; 0: proven optimal."""
        return divide(self.makespan, self.lower_bound) - 1 if self.lower_bound else 0

    @cached_property
    def peaks(self) -> tuple[MemoryPeak, ...]:
        """Peak memory of each row, gathered units included."""
        return tuple(_peak(self.memory(row)) for row in range(self.rows))

    @cached_property
    def peak_activations(self) -> tuple[Number, ...]:
        """Peak activation memory of each row; by default in micro-batches of one rank."""
        return tuple(_peak(self._curve(self._changes(row))).memory for row in range(self.rows))

    def memory(self, row: int) -> list[tuple[Number, Number]]:
        """Memory of a row over time: points (time, memory from then on)."""
        changes = self._changes(row)
        if self.unit_memory:
            changes = sorted([*changes, *self.unit_memory[row]], key=lambda x: (x[0], x[1] > 0))
        return self._curve(changes)

    def spans(self) -> Iterator[TimelineSpan]:
        """All timed events, row by row."""
        for row, (ops, starts, ends) in enumerate(zip(self.ops, self.starts, self.ends, strict=True)):
            for op, start, end in zip(ops, starts, ends, strict=True):
                yield TimelineSpan(row, "compute", op, start * self.tick, end * self.tick)
        for row, lane, what, start, end in [*map(_entry, self.messages), *self.others]:
            yield TimelineSpan(row, lane, what, start * self.tick, end * self.tick)

    @cached_property
    def critical_path(self) -> tuple[TimelineSpan, ...]:
        """A chain of spans from time 0 to the end, each starting when the previous one ends.

        In a measured timeline there may be gaps between them: time not explained by ops and messages.
        """
        chain = self.bindings if self.bindings is not None else self._chain()
        return tuple(TimelineSpan(row, lane, what, s * self.tick, e * self.tick) for row, lane, what, s, e in chain)

    def to_dict(self, *, spans: bool = True, path: bool = True) -> dict[str, Any]:
        """The figures as plain numbers; with every span, and with the critical path, if wanted."""
        figures: dict[str, Any] = {
            "makespan": float(self.makespan),
            "lower_bound": float(self.lower_bound),
            "bubble": float(self.bubble),
            "idle": [float(x) for x in self.idle],
            "peak_activations": [float(x) for x in self.peak_activations],
            "peaks": [{"memory": float(p.memory), "at": float(p.at)} for p in self.peaks],
        }
        if spans:
            figures["spans"] = [_plain(s) for s in self.spans()]
        if path:
            figures["critical_path"] = [_plain(s) for s in self.critical_path]
        return figures

    # ---- implementation ----

    def _curve(self, changes: list[tuple[Any, Number]]) -> list[tuple[Number, Number]]:
        held: Number = 0
        curve: list[tuple[Number, Number]] = [(0, 0)]
        for tick, change in changes:
            held += change
            curve.append((tick * self.tick, held))
        return curve

    def _changes(self, row: int) -> list[tuple[Any, Number]]:
        """(tick, change) of activation memory, in order: allocated when F starts, freed when I, W or B ends."""
        c, out = self.costs, []
        with_backward = any(op.kind != "F" for op in self.ops[row])
        for op, first, last, start, end in self._bounds(row):
            if op.kind == "F":
                if first:
                    out.append((start, c.activation[op.stage]))
                if last and not with_backward:
                    out.append((end, -c.activation[op.stage]))
            elif last:
                freed = {
                    "I": c.activation[op.stage] - c.kept[op.stage],
                    "W": c.kept[op.stage],
                    "B": c.activation[op.stage],
                }[op.kind]
                out.append((end, -freed))
        return out

    def _bounds(self, row: int) -> Iterator[tuple[Op | UnitOp, bool, bool, Any, Any]]:
        """(op, is first, is last, start, end): whether an entry is the first and the last unit op of its op."""
        ops = self.ops[row]
        for i, (op, start, end) in enumerate(zip(ops, self.starts[row], self.ends[row], strict=True)):
            first = i == 0 or not _same_op(ops[i - 1], op)
            last = i == len(ops) - 1 or not _same_op(ops[i + 1], op)
            yield op, first, last, start, end

    def _chain(self) -> list[Entry]:
        """Walk back from the last end: from every op to its predecessor on the row or to the input that it waited for."""
        ops = {op: (row, i) for row, ops in enumerate(self.ops) for i, op in enumerate(ops)}
        messages = {message[2:5]: message for message in self.messages}
        ending = {(message[0], message[-1]): message for message in self.messages}
        row = max(range(self.rows), key=lambda r: self.ends[r][-1] if self.ends[r] else -1)
        i = len(self.ends[row]) - 1
        chain: list[Entry] = []
        while i >= 0:
            op, start = self.ops[row][i], self.starts[row][i]
            chain.append((row, "compute", op, start, self.ends[row][i]))
            if start == 0:
                break
            source = _source(op, ops)
            if source is None:
                i -= 1
                continue
            far, j = ops[source]
            message = messages.get((source.stage, "activation" if op.kind == "F" else "gradient", source.micro_batch))
            if i and self.ends[row][i - 1] >= (self.ends[far][j] if message is None else message[-1]):
                i -= 1
                continue
            row, i = far, j
            while message is not None:
                chain.append(_entry(message))
                left = message[5]
                message = None if left == self.ends[row][i] else ending[row, left]  # it queued behind another
                if message is not None:
                    row, i = ops[_producer(message, ops)]
        return chain[::-1]


def _source(op: Op | UnitOp, ops: dict[Any, Any]) -> Op | None:
    """The op of another stage whose result `op` needs; None for W, and at both ends of the model."""
    if op.kind == "W":
        return None
    source = _backward(op.stage + 1, op.micro_batch, ops) if op.kind != "F" else Op(op.stage - 1, "F", op.micro_batch)
    return source if source in ops else None


def _producer(message: MessageEntry, ops: dict[Any, Any]) -> Op:
    """The op whose result a message carries."""
    _, _, stage, kind, micro_batch, _, _ = message
    return Op(stage, "F", micro_batch) if kind == "activation" else _backward(stage, micro_batch, ops)


def _entry(message: MessageEntry) -> Entry:
    row, receiver, stage, kind, micro_batch, start, end = message
    return row, "message", Send(stage, kind, micro_batch, receiver), start, end


def _backward(stage: int, micro_batch: int, ops: dict[Any, Any]) -> Op:
    whole = Op(stage, "B", micro_batch)
    return whole if whole in ops else whole._replace(kind="I")


def _same_op(a: Op | UnitOp, b: Op | UnitOp) -> bool:
    return (a.stage, a.kind, a.micro_batch) == (b.stage, b.kind, b.micro_batch)


def _peak(curve: list[tuple[Number, Number]]) -> MemoryPeak:
    at, memory = max(curve, key=lambda point: point[1])
    return MemoryPeak(memory, at)


def _plain(span: TimelineSpan) -> list[Any]:
    return [span.row, span.lane, str(span.what), float(span.start), float(span.end)]
