"""What this rank is doing: its phase and op, the collectives it has started and finished, and what it waits for.

Collectives, the executor and the loop write it; the watchdog (supervision/watch.py) reads it from its own thread, to
distinguish a rank that waits from one that is waited for. There is one record per process: like a log, it is written from
everywhere.

Collectives of a group are numbered in the order in which they are started, which is the same on all ranks of the group. On CPUs
one is finished when the wait for it returns. On CUDA a wait only orders streams: an event is recorded behind it, and the
collective (or the computation before it) is finished when the device has reached that event; `poll` checks without waiting.

The last `EVENTS` events are kept for the flight record (supervision/flight.py). A launcher on the same machine shares a few
bytes of memory with the rank (`mirror`), from which it knows what the rank was doing even if it was killed.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from fourfold.device_events import make_event

__all__ = ["EVENTS", "EXIT", "MIRROR", "RECORD", "Event", "GroupRecord", "Record", "StepTrace", "Ticket", "read_mirror"]

EVENTS = 256
EXIT = "the exit"
"""The phase of a rank whose collective work is done."""
MIRROR = 256
"""Bytes of shared memory per rank."""


class Event(NamedTuple):
    """Something that a rank did or waited for in a traced step. Times are marks of the rank's clock (train/clock.py)."""

    kind: str
    """A collective (all_gather, reduce_scatter, …), `message` (received), `send`, `bucket` (streamed optimizer), or a part of the
    step: `data`, `unit`, …"""
    what: str
    issued: Any
    """When it was started."""
    begun: Any
    """When the rank began to wait for it, or to do it."""
    end: Any
    size: int = 0
    """Bytes of the whole buffer."""
    group: GroupRecord | None = None
    number: int = 0
    """Of the collectives of the group."""
    peer: int = -1
    """The other rank of a message."""


class StepTrace:
    """Events of a traced step other than ops. `mark` records a time; on CUDA that is an event in the current stream.

    `memory` returns the bytes in use, `parts` their breakdown, which is requested at each new peak of the step.
    """

    def __init__(
        self,
        mark: Callable[[], Any],
        memory: Callable[[], int] | None = None,
        parts: Callable[[], dict[str, int]] | None = None,
    ):
        self.mark, self._memory, self._parts = mark, memory, parts
        self.done: Any = None  # where the last part of the step ended
        self.events: list[Event] = []
        self.memory: list[tuple[Any, int]] = []
        self.peak: tuple[Any, int, dict[str, int]] | None = None

    def add(self, kind: str, what: str, begun: Any, *, size: int = 0, peer: int = -1) -> None:
        """Add an event that began at a mark and ends now."""
        self.events.append(Event(kind, what, begun, begun, self.mark(), size, peer=peer))

    def weigh(self, at: Any) -> None:
        """Record the memory in use, at a mark that was just recorded."""
        if self._memory is None:
            return
        used = self._memory()
        self.memory.append((at, used))
        if self._parts is not None and (self.peak is None or used > 1.01 * self.peak[1]):
            self.peak = at, used, self._parts()


class GroupRecord:
    """The collectives of one process group on this rank."""

    __slots__ = ("finished", "name", "ranks", "started", "what")

    def __init__(self, name: str, ranks: list[int]):
        self.name, self.ranks = name, ranks
        self.started = self.finished = 0
        self.what = ""  # the last one started


class Ticket:
    """Something started: a collective (`number` of `group`), a message from rank `peer`, or an op on the device."""

    __slots__ = ("begun", "event", "group", "issued", "kind", "number", "peer", "size", "what")

    def __init__(
        self,
        what: str,
        group: GroupRecord | None = None,
        number: int = 0,
        peer: int = -1,
        kind: str = "message",
        size: int = 0,
    ):
        self.what, self.group, self.number, self.peer = what, group, number, peer
        self.kind, self.size = kind, size
        self.event: Any = None
        self.issued: Any = None  # marks of a traced step
        self.begun: Any = None


class Record:
    """Written by the rank's threads, read by its watchdog; every field is replaced as a whole, so no lock is needed."""

    def __init__(self) -> None:
        self.mirror: memoryview | None = None  # MIRROR bytes that a launcher reads
        self.clear()

    def clear(self) -> None:
        self.phase, self.op, self.device_op = "start", "", ""
        self.limit = float("inf")  # seconds that the phase may make no progress
        self.setting = ""  # the config's name of that limit
        self.progress = 0
        self.moved = time.monotonic()  # of the last progress
        self.waiting: Ticket | None = None  # what the main thread is blocked on
        self.watched = False  # whether a watchdog polls
        self.trace: StepTrace | None = None  # of the current step, if it is traced
        self.uncompiled: dict[str, str] = {}  # units that torch.compile failed on, and why
        self.groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()
        self._recorded: deque[Ticket] = deque()  # issued to the device, in order
        self._unreached: list[Ticket] = []  # those that the poller has taken over
        self._events: deque[Any] = deque()  # for reuse
        # (time, what happened, to what), oldest first
        self.events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS)

    def enter(self, phase: str, limit: float, setting: str = "") -> None:
        """Begin a phase: a step, an evaluation, a save; `setting` is the config's name of its limit."""
        self.phase, self.limit, self.setting, self.op = phase, limit, setting, ""
        self._note("phase", phase)
        self._reflect()

    def begin_op(self, op: str) -> None:
        self.op = op
        self._note("op", op)
        self._reflect()

    def _note(self, kind: str, what: str) -> None:
        self.events.append((time.time(), kind, what))
        self.moved = time.monotonic()
        self.progress += 1

    def _reflect(self) -> None:
        if self.mirror is not None:
            data = f"{self.phase}\n{self.op}".encode()[: MIRROR - 1]
            self.mirror[: len(data) + 1] = data + b"\0"

    # ---- collectives and messages ----

    def start(self, group: dist.ProcessGroup, what: str, kind: str = "collective", size: int = 0) -> Ticket:
        """A collective of a group is started, over buffers of `size` bytes."""
        try:
            found = self.groups[group]
        except KeyError:
            found = self.groups[group] = GroupRecord(group.group_name, dist.get_process_group_ranks(group))
        found.started += 1
        found.what = what
        self._note("start", what)
        ticket = Ticket(what, found, found.started, -1, kind, size)
        if self.trace is not None:
            ticket.issued = self.trace.mark()
        return ticket

    def wait(self, ticket: Ticket) -> Ticket:
        """The main thread begins to wait for it."""
        self.waiting = ticket
        if ticket.peer >= 0:
            self.events.append((time.time(), "receive", ticket.what))
        if self.trace is not None and ticket.begun is None:
            ticket.begun = self.trace.mark()
        return ticket

    def done(self, ticket: Ticket, *, on_device: bool = False) -> None:
        """The wait has returned; `on_device`: the current CUDA stream will wait, the host did not."""
        self.waiting = None
        self._note("done", ticket.what)
        if self.trace is not None and ticket.begun is not None:
            t, begun = ticket, ticket.begun
            issued = begun if t.issued is None else t.issued
            end = self.trace.mark()
            self.trace.events.append(Event(t.kind, t.what, issued, begun, end, t.size, t.group, t.number, t.peer))
            ticket.begun = None
        if not on_device:
            _finish(ticket)
        elif self.watched:
            event = self._events.popleft() if self._events else make_event()
            event.record()
            self._issued(ticket, event)

    def computed(self, what: str, end: Any) -> None:
        """An op ends at this mark of the executor's clock; on a device it is yet to be reached."""
        if self.watched and not isinstance(end, float):
            self._issued(Ticket(what), end)

    def _issued(self, ticket: Ticket, event: Any) -> None:
        ticket.event = event
        self._recorded.append(ticket)

    # ---- the parts of a traced step ----

    @contextmanager
    def part(self, kind: str, what: str) -> Iterator[None]:
        """A context for a part of the step; in a traced step it is recorded, from the end of the previous part."""
        yield
        if (trace := self.trace) is not None:
            trace.add(kind, what, trace.done)
            trace.done = trace.events[-1].end

    # ---- read by the watchdog ----

    def poll(self) -> None:
        """See what the device has reached since the last poll; called by one thread."""
        while self._recorded:
            self._unreached.append(self._recorded.popleft())
        for ticket in list(self._unreached):
            if not ticket.event.query():  # may block, see device_events.py: other threads read `_unreached` meanwhile
                continue
            self._unreached.remove(ticket)
            self.moved = time.monotonic()
            self.progress += 1
            if ticket.group is None and ticket.peer < 0:
                self.device_op = ticket.what
            else:
                _finish(ticket)
                self._events.append(ticket.event)

    def blocked_on(self) -> Ticket | None:
        """The collective or message that this rank waits for: its host, or the oldest thing its device has not reached."""
        if self.waiting is not None:
            return self.waiting
        oldest = next(iter(list(self._unreached)), None)
        return oldest if oldest is not None and (oldest.group is not None or oldest.peer >= 0) else None


def _finish(ticket: Ticket) -> None:
    if ticket.group is not None:
        ticket.group.finished = max(ticket.group.finished, ticket.number)


def read_mirror(mirror: memoryview) -> tuple[str, str]:
    """Phase and op of a rank, from the memory it shares; empty when it has not begun one."""
    phase, _, op = bytes(mirror).partition(b"\0")[0].decode(errors="replace").partition("\n")
    return phase, op


RECORD = Record()
"""The record of this process."""
