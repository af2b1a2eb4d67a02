"""The executor: runs a rank's program instruction by instruction. It knows instructions, not schedules.

    op or part of one   the stage computes on a received or local value; its output waits to be sent or used
    SEND, RECV          start a transfer; neither blocks
    GATHER … REDUCE     calls the method of the unit
    STREAM              updates the bucket's parameters

Between neighbouring stages on one rank the value is passed directly. The buffer of a received value is returned after the last op
that needs it: B, or W where the backward is split. A single rank runs a program as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fourfold.errors import CommunicationError
from fourfold.program import Gather, Instruction, Op, Program, Recv, Reduce, Release, Send, Stream, UnitOp
from fourfold.record import RECORD, Ticket
from fourfold.runtime.stage import Stage
from fourfold.runtime.transport import Name, Transport
from fourfold.runtime.wire import flatten

__all__ = ["Executor", "Feed", "Span", "StreamVerbs", "Verbs"]


class Verbs(Protocol):
    """The operations of a unit that a program calls."""

    def gather(self) -> None: ...
    def release(self) -> None: ...
    def reduce(self) -> None: ...


class StreamVerbs(Protocol):
    """The operation of a bucket that a program calls."""

    def stream(self) -> None: ...


class Feed(Protocol):
    """The inputs of the pipeline on this rank."""

    def first(self, micro_batch: int) -> Any:
        """Input of the first stage."""

    def extra(self, micro_batch: int) -> tuple[Any, ...]:
        """Further arguments of the last stage, for instance the targets."""

    def documents(self, micro_batch: int) -> Any:
        """The documents of a micro-batch, for every stage; None: each sequence is one document."""

    def grad(self, micro_batch: int) -> Any:
        """Gradient of the last stage's output."""


class Span(NamedTuple):
    """One executed computation, with three times of the executor's clock; it waited for inputs from `asked` to `start`."""

    what: str
    asked: Any
    start: Any
    end: Any


@dataclass
class Values:
    """Values that are passed between the computations of a step."""

    made: dict[Name, Any] = field(default_factory=dict)  # to be sent, or used on this rank
    inputs: dict[tuple[int, int], list[Any]] = field(default_factory=dict)  # by (stage, micro-batch): received values
    partial: dict[tuple[int, int, str], Any] = field(default_factory=dict)  # between the parts of an op
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, by micro-batch


class Executor:
    """Runs programs on one rank: its stages by number, its units and buckets by name, its messages."""

    def __init__(
        self,
        placement: tuple[int, ...],
        rank: int,
        stages: Mapping[int, Stage],
        units: Mapping[str, Verbs],
        transport: Transport | None = None,
        *,
        buckets: Mapping[str, StreamVerbs] | None = None,
        watch: Callable[[str], None] | None = None,
        mark: Callable[[], Any] = time.perf_counter,
    ):
        self.placement, self.rank, self.last = placement, rank, len(placement) - 1
        self.stages, self.units, self.buckets = dict(stages), dict(units), dict(buckets or {})
        self.transport, self.watch, self.mark = transport, watch, mark
        self.spans: list[Span] = []
        self.values = Values()
        self._evaluating = False
        self._feed: Feed | None = None
        self._whole: set[Op] = set()  # backwards of the running program that are not split into parts
        self._full: set[int] = set()  # stages that run whole forwards once their accumulators exist

    def run(self, program: Program, feed: Feed, *, evaluate: bool = False) -> dict[int, Any]:
        """Run a program; returns the output of the last stage by micro-batch, if that stage is on this rank."""
        self.begin(feed, evaluate=evaluate)
        begun = set()
        for i in program.instructions:
            if isinstance(i, Op) and i.kind == "B":
                self._whole.add(i)
                begun.add(i.stage)
            elif isinstance(i, (Op, UnitOp)) and i.kind == "F" and i.stage in begun:
                self._full.add(i.stage)
        for instruction in program.instructions:
            self.do(instruction)
        return self.end()

    def begin(self, feed: Feed, *, evaluate: bool = False, ordered: bool = True) -> None:
        """Start a step; `ordered`: messages come in the order of the program."""
        if self.transport is not None:
            self.transport.begin(ordered=ordered, program="evaluation" if evaluate else "step")
        self.values, self.spans = Values(), []
        self._feed, self._evaluating, self._whole, self._full = feed, evaluate, set(), set()

    def end(self) -> dict[int, Any]:
        """End a step: wait until everything has been sent, and check that every value was used."""
        values = self.values
        if self.transport is not None:
            ticket = RECORD.wait(Ticket("the messages it sent to be received", kind="sent"))
            self.transport.finish()
            RECORD.done(ticket)
        assert not values.made, f"never used: {[str(n) for n in values.made]}"
        assert not values.partial, f"half done: {list(values.partial)}"
        self.values = Values()
        return values.outputs

    def do(self, instruction: Instruction) -> None:
        """Execute one instruction; errors name it."""
        try:
            self._do(instruction)
        except CommunicationError as e:
            raise CommunicationError(f"{instruction}: {e}") from e
        except Exception as e:
            e.add_note(f"in instruction {instruction}")
            raise

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Op(stage, kind, micro_batch):
                self.compute(stage, kind, micro_batch)
            case UnitOp(stage, kind, micro_batch, unit):
                self._compute_part(stage, kind, micro_batch, unit)
            case Send(stage, what, micro_batch, peer):
                name, trace = Name(stage, what, micro_batch), RECORD.trace
                value = self.values.made.pop(name)
                begun = trace.mark() if trace is not None else None
                self.messages.send(peer, name, value)
                if trace is not None:
                    trace.add("send", str(name), begun, size=_bytes(value), peer=self.messages.address(peer))
            case Recv(stage, what, micro_batch, peer):
                self.messages.post(peer, Name(stage, what, micro_batch))
            case Gather(unit):
                self.units[unit].gather()
            case Release(unit):
                self.units[unit].release()
            case Reduce(unit):
                self.units[unit].reduce()
            case Stream(bucket):
                self.buckets[bucket].stream()

    @property
    def messages(self) -> Transport:
        assert self.transport is not None, "a program with messages on a rank without a transport"
        return self.transport

    # ---- computing ----

    def compute(self, stage: int, kind: str, micro_batch: int) -> None:
        """Execute a whole op."""
        RECORD.begin_op(f"{stage}{kind}{micro_batch}")
        if self.watch is not None:
            self.watch(f"{stage}{kind}{micro_batch}")
        asked = self.mark()
        here = self.stages[stage]
        match kind:
            case "F":
                value, documents = self._input(stage, micro_batch), self._documents(micro_batch)
                start = self.mark()
                if self._evaluating:
                    out = here.evaluate(value, self._extra(stage, micro_batch), documents)
                    self._release(stage, micro_batch)
                else:
                    whole = Op(stage, "B", micro_batch) in self._whole and (stage in self._full or here.accumulates)
                    extra = self._extra(stage, micro_batch)
                    out = here.forward(micro_batch, value, extra, documents=documents, whole=whole)
                self._made(stage, "F", micro_batch, out)
            case "B" | "I":
                grad = self._grad(stage, micro_batch)
                start = self.mark()
                self._made(stage, kind, micro_batch, here.backward(micro_batch, grad, split=kind == "I"))
                if kind == "B":
                    self._release(stage, micro_batch)
            case _:
                start = self.mark()
                here.weight_grad(micro_batch)
                self._release(stage, micro_batch)
        self._did(f"{stage}{kind}{micro_batch}", asked, start)

    def _compute_part(self, stage: int, kind: str, micro_batch: int, unit: str) -> None:
        """Execute the part of an op that uses one unit; the first part takes the op's input, the last produces its output."""
        here, partial = self.stages[stage], self.values.partial
        index, key = here.index[unit], (stage, micro_batch, kind)
        first, last = (0, len(here.links) - 1) if kind == "F" else (len(here.links) - 1, 0)
        asked = self.mark()
        RECORD.begin_op(f"{stage}{kind}{micro_batch} {unit}")
        if index == first and self.watch is not None:
            self.watch(f"{stage}{kind}{micro_batch}")
        if kind != "W":
            take = self._input if kind == "F" else self._grad
            value = take(stage, micro_batch) if index == first else partial.pop(key)
        start = self.mark()
        if kind == "W":
            here.weight_grad_part(index, micro_batch)
        elif kind == "F":
            extra, documents = self._extra(stage, micro_batch), self._documents(micro_batch)
            if self._evaluating:
                value = here.evaluate_part(index, value, extra, documents)
            else:
                value = here.forward_part(index, micro_batch, value, extra, documents)
        else:
            value = here.backward_part(index, micro_batch, value, split=kind == "I")
        if kind != "W" and index != last:
            partial[key] = value
        elif index == last:
            if kind != "W":
                self._made(stage, kind, micro_batch, value)
            if kind in "BW" or self._evaluating:
                self._release(stage, micro_batch)
        self._did(f"{stage}{kind}{micro_batch} {unit}", asked, start)

    def _did(self, what: str, asked: Any, start: Any) -> None:
        end = self.mark()
        self.spans.append(Span(what, asked, start, end))
        if RECORD.trace is not None:
            RECORD.trace.weigh(end)
        RECORD.computed(what, end)

    # ---- values between computations ----

    def _input(self, stage: int, micro_batch: int) -> Any:
        assert self._feed is not None
        return self._feed.first(micro_batch) if stage == 0 else self._take(stage, stage - 1, "activation", micro_batch)

    def _grad(self, stage: int, micro_batch: int) -> Any:
        assert self._feed is not None
        if stage == self.last:
            return self._feed.grad(micro_batch)
        return self._take(stage, stage + 1, "gradient", micro_batch)

    def _extra(self, stage: int, micro_batch: int) -> tuple[Any, ...]:
        assert self._feed is not None
        return self._feed.extra(micro_batch) if stage == self.last else ()

    def _documents(self, micro_batch: int) -> Any:
        assert self._feed is not None
        return self._feed.documents(micro_batch)

    def _take(self, stage: int, maker: int, kind: Any, micro_batch: int) -> Any:
        """The value that another stage produced: local, or received in a message."""
        name = Name(maker, kind, micro_batch)
        if self.placement[maker] == self.rank:
            return self.values.made.pop(name)
        source = self.placement[maker]
        ticket = RECORD.wait(Ticket(str(name), peer=self.messages.address(source)))
        value = self.messages.receive(name, source)
        ticket.size = _bytes(value) if RECORD.trace is not None else 0
        RECORD.done(ticket, on_device=flatten(value)[1][0].is_cuda)
        self.values.inputs.setdefault((stage, micro_batch), []).append(value)
        return value

    def _made(self, stage: int, kind: str, micro_batch: int, value: Any) -> None:
        received = self.values.inputs.get((stage, micro_batch))
        if received is not None and value is not None:
            value = _unaliased(value, received)
        if kind == "F":
            if stage == self.last:
                self.values.outputs[micro_batch] = value
            else:
                self.values.made[Name(stage, "activation", micro_batch)] = value
        elif stage > 0:
            self.values.made[Name(stage, "gradient", micro_batch)] = value

    def _release(self, stage: int, micro_batch: int) -> None:
        """Return the buffers of the messages that this stage and micro-batch used."""
        for value in self.values.inputs.pop((stage, micro_batch), ()):
            self.messages.release(value)


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in flatten(value)[1])


def _unaliased(value: Any, received: list[Any]) -> Any:
    """The value, copied where it aliases a received message (a layer may return its input): message buffers are reused."""
    held = {t.untyped_storage().data_ptr() for each in received for t in flatten(each)[1]}
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().data_ptr() in held else value
    return tuple(_unaliased(v, received) if isinstance(v, Tensor) else v for v in value)
