"""A timeline: when everything happened, and what follows from it.

A value made by `simulate`, or from the trace of a run. Times and memory are in the units of the costs; when those had no
floats, results are exact.

Rows are ranks (of a simulated set of programs with replicas: programs). On each row, ops run one after another; messages,
collectives and updates run beside them.
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
"""A span in ticks."""
MessageEntry = tuple[int, int, int, Carried, int, Any, Any]
"""(row of the sender, receiving rank, stage, kind, micro-batch, start, end), in ticks."""


class TimelineSpan(NamedTuple):
    """One thing that took time. `lane` is compute, message, collective or stream."""

    row: int
    lane: str
    what: Instruction
    start: Number
    end: Number


class MemoryPeak(NamedTuple):
    """The most memory a rank held, and when it first did."""

    memory: Number
    at: Number


@dataclass(frozen=True)
class Timeline:
    """Start and end of everything, and the figures that follow."""

    ops: tuple[tuple[Op | UnitOp, ...], ...]
    """What each row computed, in order."""
    starts: tuple[tuple[Any, ...], ...] = field(repr=False)
    """When, in ticks; `spans` has the same in the caller's unit."""
    ends: tuple[tuple[Any, ...], ...] = field(repr=False)
    tick: Number
    costs: StageCosts = field(repr=False)
    """Costs by stage: times in ticks, memory in the caller's unit."""
    placement: tuple[int, ...]
    lower_bound: Number
    """No order of these ops on this placement can be faster."""
    messages: tuple[MessageEntry, ...] = field(default=(), repr=False)
    """In ticks; of a schedule only if messages take time."""
    others: tuple[Entry, ...] = field(default=(), repr=False)
    """Collectives and updates, in ticks."""
    unit_memory: tuple[tuple[tuple[Any, Number], ...], ...] = field(default=(), repr=False)
    """By row: (tick, change) for gathered and released units."""
    bindings: tuple[Entry, ...] | None = field(default=None, repr=False, compare=False)
    """The critical path where the simulator knows it already, in ticks."""

    @property
    def rows(self) -> int:
        return len(self.ops)

    @cached_property
    def makespan(self) -> Number:
        """From the start to the end of the last thing."""
        ends = (
            [row[-1] for row in self.ends if row]
            + [end for *_, end in self.messages]
            + [end for *_, end in self.others]
        )
        return max(ends, default=0) * self.tick

    @cached_property
    def work(self) -> tuple[Number, ...]:
        """How long each row computed."""
        return tuple((sum(e) - sum(s)) * self.tick for s, e in zip(self.starts, self.ends, strict=True))

    @cached_property
    def idle(self) -> tuple[Number, ...]:
        """How long each row did not compute."""
        return tuple(max(0, self.makespan - w) for w in self.work)  # of floats, it may be a little less

    @cached_property
    def bubble(self) -> Number:
        """The idle share of all ranks' time."""
        return divide(sum(self.idle), self.rows * self.makespan) if self.makespan else 0

    @property
    def gap(self) -> Number:
        """How far above the lower bound, as a share of it: 0 is proven optimal."""
        return divide(self.makespan, self.lower_bound) - 1 if self.lower_bound else 0

    @cached_property
    def peaks(self) -> tuple[MemoryPeak, ...]:
        """The most each row holds, gathered units included, and when."""
        return tuple(_peak(self.memory(row)) for row in range(self.rows))

    @cached_property
    def peak_activations(self) -> tuple[Number, ...]:
        """The most activations each row holds; by default in micro-batches of one rank's share."""
        return tuple(_peak(self._curve(self._changes(row))).memory for row in range(self.rows))

    def memory(self, row: int) -> list[tuple[Number, Number]]:
        """The memory curve of a row: (time, memory from then on)."""
        changes = self._changes(row)
        if self.unit_memory:
            changes = sorted([*changes, *self.unit_memory[row]], key=lambda x: (x[0], x[1] > 0))
        return self._curve(changes)

    def spans(self, beside: bool = True) -> Iterator[TimelineSpan]:
        """Everything that took time, row by row; `beside = False`: the ops only."""
        for row, (ops, starts, ends) in enumerate(zip(self.ops, self.starts, self.ends, strict=True)):
            for op, start, end in zip(ops, starts, ends, strict=True):
                yield TimelineSpan(row, "compute", op, start * self.tick, end * self.tick)
        if beside:
            for row, lane, what, start, end in [*map(_entry, self.messages), *self.others]:
                yield TimelineSpan(row, lane, what, start * self.tick, end * self.tick)

    @cached_property
    def critical_path(self) -> tuple[TimelineSpan, ...]:
        """A chain of spans, each starting when the one before ends, from time 0 to the end: why it takes so long.

        In a measured timeline each starts some time after: what the machine took between the two.
        """
        chain = self.bindings if self.bindings is not None else self._chain()
        return tuple(TimelineSpan(row, lane, what, s * self.tick, e * self.tick) for row, lane, what, s, e in chain)

    def to_dict(self, *, spans: bool = True, path: bool = True) -> dict[str, Any]:
        """Plain numbers, for files and programs; with or without every span, and those of the critical path."""
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

    # ---- how ----

    def _curve(self, changes: list[tuple[Any, Number]]) -> list[tuple[Number, Number]]:
        held: Number = 0
        curve: list[tuple[Number, Number]] = [(0, 0)]
        for tick, change in changes:
            held += change
            curve.append((tick * self.tick, held))
        return curve

    def _changes(self, row: int) -> list[tuple[Any, Number]]:
        """(tick, change) of activations, in order: taken when F starts, given back when I, W or B ends."""
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
        """Ops with whether they are the first and the last part of theirs."""
        ops = self.ops[row]
        for i, (op, start, end) in enumerate(zip(ops, self.starts[row], self.ends[row], strict=True)):
            first = i == 0 or not _same_op(ops[i - 1], op)
            last = i == len(ops) - 1 or not _same_op(ops[i + 1], op)
            yield op, first, last, start, end

    def _chain(self) -> list[Entry]:
        """Back from the last end, from every op to what ended last: the op before it on its row, or what it waited for."""
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
    """The op of another stage whose result `op` waits for, if there is one: W, and the ends of the model, wait for none."""
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
