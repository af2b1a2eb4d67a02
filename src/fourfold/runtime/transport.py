"""Messages between the stages of a pipeline: one channel per directed edge, named messages, bounded memory.

A message is named by who made it: (stage, kind, micro-batch), kind activation or gradient. Each directed edge (source rank,
target rank) has a process group of its own, so nothing on it waits for anything on another.

    sender      a thread per outgoing edge sends in the order of the calls; a tensor is let go as soon as it is sent
    receiver    a thread per incoming edge receives in the sender's order, ahead of use, into an inbox

How far ahead: `post(source)` lets one more message in, as a program's RECV says; `post(source, n, bounded=True)` lets in all n
of a step, while at most `depth` per (stage, kind) wait to be used. A bounded receiver goes on regardless while the consumer is
blocked: what it wants may be behind what it does not want yet, and holding back would wait for ever.

Sends never block the caller. No device-wide synchronisation; every wait of the caller has a timeout, and its error says what
did not come.

| device | how (`wire.py`) |
|---|---|
| CPU | gloo, receives posted ahead into pooled buffers |
| CUDA, ranks share a GPU | the same through pinned host memory, on side streams |
| CUDA, a GPU for each rank | header over gloo, tensors over NCCL; waits order streams. Untested on several GPUs |
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError
from fourfold.runtime.wire import HEADER_BYTES, Header, HostPort, Kind, Name, Port, flatten, join_bytes

__all__ = ["Name", "Transport"]


@dataclass
class _Message:
    """A message that has arrived; `ready` makes its tensors usable by the current stream."""

    name: Name
    value: Any
    ready: Callable[[], None]


@dataclass
class _Inbox:
    """What has arrived and is not used yet; shared by the receivers and the consumer under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[Name, _Message] = field(default_factory=dict)
    held: Counter[tuple[int, Kind]] = field(default_factory=Counter)  # of them, per (stage, kind)
    starved: bool = False  # the consumer is blocked on something that is not here
    error: CommunicationError | None = None


class Transport:
    """The messages of one rank over the directed `edges` (source, target) of the job; all ranks of an edge build it together.

    `new_group(ranks)` makes a process group; it must not time out by itself: a receive may be posted long before its message.
    `address(rank)` is a rank's number in the job, where that is another.
    """

    def __init__(
        self,
        rank: int,
        edges: Iterable[tuple[int, int]],
        new_group: Callable[[list[int]], dist.ProcessGroup],
        *,
        address: Callable[[int], int] = lambda rank: rank,
        port: Port | None = None,
        timeout: float = 60.0,
        depth: int = 2,
    ):
        self.rank, self.timeout, self.depth, self.address = rank, timeout, depth, address
        self.port = port or HostPort(torch.device("cpu"))
        self.inbox = _Inbox()
        self._out: dict[int, _Sender] = {}
        self._in: dict[int, _Receiver] = {}
        for source, target in sorted(set(edges)):
            # One order on all ranks: making a group is a meeting. torch names a group by its members and by how many groups
            # its process has made, so a rank that is not in it makes one of its own, to count alike.
            group = new_group([source, target] if rank in (source, target) else [rank])
            if rank == source:
                self._out[target] = _Sender(self, target, group)
            elif rank == target:
                self._in[source] = _Receiver(self, source, group)
        for thread in (*self._out.values(), *self._in.values()):
            thread.start()

    def post(self, source: int, count: int = 1, *, bounded: bool = False) -> None:
        """Receive `count` more messages from a rank; `bounded`: no more than `depth` per (stage, kind) before they are used."""
        self._in[source].jobs.put((count, bounded))

    def send(self, target: int, name: Name, value: Any) -> None:
        """Send a tree of tensors; returns at once. The tensors must not be changed afterwards."""
        if self.inbox.error is not None:
            raise CommunicationError(f"cannot send {name} to rank {target}: {self.inbox.error}")
        structure, tensors = flatten(value)
        self.port.pool.borrow(tensors)
        self._out[target].put(name, structure, tensors)

    def receive(self, name: Name) -> Any:
        """The tensors of a message, waited for if they have not arrived."""
        self.wait_any([name])
        box = self.inbox
        with box.changed:
            message = box.messages.pop(name)
            box.held[name.stage, name.kind] -= 1
            box.changed.notify_all()
        message.ready()
        return message.value

    def arrived(self, name: Name) -> bool:
        return name in self.inbox.messages

    def wait_any(self, names: Sequence[Name]) -> None:
        """Block until one of `names` has arrived."""
        box, deadline = self.inbox, time.monotonic() + self.timeout
        with box.changed:
            while not any(name in box.messages for name in names):
                if box.error is not None:
                    raise CommunicationError(f"waited in vain for {_list(names)}: {box.error}") from box.error
                if time.monotonic() >= deadline:
                    raise CommunicationError(f"waited {self.timeout:.0f} s in vain for {_list(names)}")
                box.starved = True
                box.changed.notify_all()
                box.changed.wait(deadline - time.monotonic())
            box.starved = False

    def release(self, value: Any) -> None:
        """A received value is no longer needed: its buffer may be used again, once what is being sent from it has left."""
        self.port.pool.give_back(flatten(value)[1])

    def finish(self) -> None:
        """The step is over: wait until everything has been sent."""
        for target, sender in self._out.items():
            if not sender.wait_idle(self.timeout):
                raise CommunicationError(f"waited {self.timeout:.0f} s in vain for rank {target} to take its messages")
        if self.inbox.error is not None:
            raise self.inbox.error
        assert not self.inbox.messages, f"never used: {_list(list(self.inbox.messages))}"

    def close(self) -> None:
        """Let the threads end; call it between steps."""
        for sender in self._out.values():
            sender.jobs.put(None)
        for receiver in self._in.values():
            receiver.jobs.put(None)

    # ---- what the threads call ----

    def fail(self, error: CommunicationError) -> None:
        """A thread met an error: wake the consumer, which raises it."""
        with self.inbox.changed:
            self.inbox.error = self.inbox.error or error
            self.inbox.changed.notify_all()

    def deliver(self, message: _Message, bounded: bool) -> None:
        """Put a message into the inbox; returns when the receiver may take the next one."""
        key, box = (message.name.stage, message.name.kind), self.inbox
        with box.changed:
            box.messages[message.name] = message
            box.held[key] += 1
            box.changed.notify_all()
            while bounded and box.held[key] >= self.depth and not box.starved and box.error is None:
                box.changed.wait()


def _list(names: Sequence[Name]) -> str:
    return " or ".join(map(str, names[:4])) + (" …" if len(names) > 4 else "")


class _Sender(threading.Thread):
    """Sends what it is handed, in order."""

    def __init__(self, transport: Transport, target: int, group: dist.ProcessGroup):
        super().__init__(name=f"send to {target}", daemon=True)
        self.transport, self.target, self.group = transport, target, group
        self.address = transport.address(target)
        self.jobs: queue.SimpleQueue[tuple[Name, Any, list[Tensor], Any] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unsent = 0
        self._generation = self._capacity = 0

    def put(self, name: Name, structure: Any, tensors: list[Tensor]) -> None:
        with self._idle:
            self._unsent += 1
        self.jobs.put((name, structure, tensors, self.transport.port.computed()))

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is left to send (or nothing can be sent any more)."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unsent or self.transport.inbox.error is not None, timeout)

    def run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                self._send(*job)
                self.transport.port.pool.give_back(job[2])
                del job  # or the tensors would live until the next message
                with self._idle:
                    self._unsent -= 1
                    self._idle.notify_all()
        except Exception as e:
            self.transport.fail(CommunicationError(f"rank {self.target} no longer takes messages ({_plain(e)})"))
            with self._idle:
                self._idle.notify_all()

    def _send(self, name: Name, structure: Any, tensors: list[Tensor], computed: Any) -> None:
        data = join_bytes(tensors) if tensors else None
        if data is not None and data.numel() > self._capacity:
            self._generation, self._capacity = self._generation + 1, data.numel()
        header = Header(name, self._generation, structure, [(t.dtype, t.shape) for t in tensors])
        work = dist.isend(header.encode(), self.address, group=self.group)
        if data is not None:
            self.transport.port.send(data, self.address, self.group, self._generation, computed)
        assert work is not None
        work.wait()


class _Receiver(threading.Thread):
    """Receives as many messages as are expected, one after the other, ahead of their use."""

    def __init__(self, transport: Transport, source: int, group: dist.ProcessGroup):
        super().__init__(name=f"receive from {source}", daemon=True)
        self.transport, self.source, self.group = transport, source, group
        self.address = transport.address(source)
        self.jobs: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._generation = self._capacity = 0
        self._posted: tuple[Tensor, Any] | None = None

    def run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                for _ in range(job[0]):
                    self.transport.deliver(self._receive(), bounded=job[1])
        except Exception as e:
            self.transport.fail(CommunicationError(f"rank {self.source} no longer sends ({_plain(e)})"))

    def _receive(self) -> _Message:
        port = self.transport.port
        if self._posted is None and self._capacity and port.posts_ahead:
            self._posted = self._post()
        data = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.recv(data, self.address, group=self.group)
        header, ready = Header.decode(data), _at_once
        if header.tensors:
            if header.generation != self._generation:
                self._posted, self._generation = None, header.generation
                self._capacity = header.size
            posted, self._posted = self._posted or self._post(header.size), None
            data, ready = port.receive(posted, header.size)
        return _Message(header.name, header.tree(data), ready)

    def _post(self, size: int = 0) -> tuple[Tensor, Any]:
        port = self.transport.port
        length = self._capacity if port.posts_ahead else size
        return port.post(length, self.address, self.group, self._generation)


def _at_once() -> None:
    """A message on the host can be used as it is."""


def _plain(error: Exception) -> str:
    return str(error).split(". This is typically")[0].splitlines()[0] if str(error) else type(error).__name__
