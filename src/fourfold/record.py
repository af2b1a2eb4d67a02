"""What this rank is doing: its phase and op, the collectives it has started and finished, and what it waits for.

Collectives, the executor and the loop write it; the watchdog (train/watch.py) reads it from its own thread, to tell a rank that
waits from one that is waited for. One record per process: like a log, it is written from everywhere.

Collectives of a group are numbered in the order in which they are started, which is the same on all ranks of the group. On CPUs
one is finished when the wait for it returns. On CUDA a wait only orders streams: an event is recorded behind it, and the
collective (or the computation before it) is finished when the device has reached that event; `poll` looks, and never waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RECORD", "GroupRecord", "Record", "Ticket"]


class GroupRecord:
    """The collectives of one process group on this rank."""

    __slots__ = ("finished", "name", "ranks", "started", "what")

    def __init__(self, name: str, ranks: list[int]):
        self.name, self.ranks = name, ranks
        self.started = self.finished = 0
        self.what = ""  # the last one started


class Ticket:
    """Something started: a collective (`number` of `group`), a message from rank `peer`, or an op on the device."""

    __slots__ = ("event", "group", "number", "peer", "what")

    def __init__(self, what: str, group: GroupRecord | None = None, number: int = 0, peer: int = -1):
        self.what, self.group, self.number, self.peer = what, group, number, peer
        self.event: Any = None


class Record:
    """Written by the rank's threads, read by its watchdog; every field is replaced as a whole, so no lock is needed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.phase, self.op, self.device_op = "start", "", ""
        self.limit = float("inf")  # seconds that the phase may make no progress
        self.progress = 0
        self.waiting: Ticket | None = None  # what the main thread is blocked on
        self.watched = False  # somebody polls
        self.groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRecord] = weakref.WeakKeyDictionary()
        self._recorded: deque[Ticket] = deque()  # issued to the device, in order
        self._unreached: list[Ticket] = []  # of these, what the poller has taken over
        self._events: deque[Any] = deque()  # to be used again

    def enter(self, phase: str, limit: float) -> None:
        """Begin a phase: a step, an evaluation, a save."""
        self.phase, self.limit, self.op = phase, limit, ""
        self.progress += 1

    def begin_op(self, op: str) -> None:
        self.op = op
        self.progress += 1

    # ---- collectives and messages ----

    def start(self, group: dist.ProcessGroup, what: str) -> Ticket:
        """A collective of a group is started."""
        try:
            found = self.groups[group]
        except KeyError:
            found = self.groups[group] = GroupRecord(group.group_name, dist.get_process_group_ranks(group))
        found.started += 1
        found.what = what
        self.progress += 1
        return Ticket(what, found, found.started)

    def wait(self, ticket: Ticket) -> Ticket:
        """The main thread begins to wait for it."""
        self.waiting = ticket
        return ticket

    def done(self, ticket: Ticket, *, on_device: bool = False) -> None:
        """The wait has returned; `on_device`: the current CUDA stream will wait, the host did not."""
        self.waiting = None
        self.progress += 1
        if not on_device:
            _finish(ticket)
        elif self.watched:
            event = self._events.popleft() if self._events else torch.cuda.Event()
            event.record()
            self._issued(ticket, event)

    def computed(self, what: str, end: Any) -> None:
        """An op ends at this mark of the executor's clock; on a device it is yet to be reached."""
        if self.watched and not isinstance(end, float):
            self._issued(Ticket(what), end)

    def _issued(self, ticket: Ticket, event: Any) -> None:
        ticket.event = event
        self._recorded.append(ticket)

    # ---- read by the watchdog ----

    def poll(self) -> None:
        """See what the device has reached since the last poll."""
        while self._recorded:
            self._unreached.append(self._recorded.popleft())
        unreached = []
        for ticket in self._unreached:
            if not ticket.event.query():
                unreached.append(ticket)
                continue
            self.progress += 1
            if ticket.group is None and ticket.peer < 0:
                self.device_op = ticket.what
            else:
                _finish(ticket)
                self._events.append(ticket.event)
        self._unreached = unreached

    def blocked_on(self) -> Ticket | None:
        """The collective or message that this rank waits for: its host, or the oldest thing its device has not reached."""
        if self.waiting is not None:
            return self.waiting
        oldest = self._unreached[0] if self._unreached else None
        return oldest if oldest is not None and (oldest.group is not None or oldest.peer >= 0) else None


def _finish(ticket: Ticket) -> None:
    if ticket.group is not None:
        ticket.group.finished = max(ticket.group.finished, ticket.number)


RECORD = Record()
"""The record of this process."""
