"""Messages between the stages of a pipeline: one channel per directed edge, named messages, bounded memory.

A message is named by what produced it: (stage, kind, micro-batch), where kind is activation or gradient. Each directed edge
(source rank, target rank) has its own process group, so traffic on one edge never waits for another. Messages of an edge are
received in the order in which they are sent; a message that arrives before it is needed waits in an inbox.

Sending starts at once and never blocks the caller. Receiving works in one of two ways:

- *ordered*: `post(source, name)` posts one receive, as a program's RECV says, and `receive(name, source)` waits for it in the
  calling thread. If the form of messages is known, there are no headers (`direct.py`).
- *message-driven*: `listen(source, n)` starts a thread per incoming edge that receives the n messages of a step, at most `depth`
  per (stage, kind) ahead of their use (gloo cannot be polled for arrival, only waited for). While the caller is blocked the
  thread keeps receiving: the message it needs may be queued behind others, and stopping at `depth` would deadlock.

There is no device-wide synchronisation. Every wait of the caller has a timeout, and its error names the missing message.

| device | ordered | message-driven (`wire.py`) |
|---|---|---|
| CPU | gloo, no header | gloo; the header and up to 128 KiB of data in one transfer |
| CUDA, ranks share a GPU | gloo through pinned host memory, with a header | the same |
| CUDA, one GPU per rank | NCCL, no header; waits order streams | header over gloo, data over NCCL |
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.background import start_thread
from fourfold.errors import CommunicationError
from fourfold.program.groups import edge_rounds
from fourfold.ring import plain
from fourfold.runtime.direct import DirectReceiver, DirectSender
from fourfold.runtime.sizes import INLINE, light_sends, room_for
from fourfold.runtime.wire import (
    Form,
    Headers,
    HostPort,
    Kind,
    Name,
    Pool,
    Port,
    flatten,
    join_bytes,
    joined_size,
    write_light,
)

__all__ = ["Name", "Transport"]


@dataclass
class _Message:
    """A received message; call `ready` before its tensors are used on the current stream."""

    name: Name
    value: Any
    ready: Callable[[], None]


@dataclass
class _Inbox:
    """Received messages that have not been used yet; listeners and caller share it under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[Name, _Message] = field(default_factory=dict)
    held: Counter[tuple[int, Kind]] = field(default_factory=Counter)  # messages per (stage, kind)
    wanted: Sequence[Name] = ()  # the caller is blocked until one of these arrives
    error: CommunicationError | None = None


class Transport:
    """Sends and receives messages over the directed `edges` (source, target); all ranks of an edge construct it together.

    `new_group(ranks)` makes a process group, which must have a long timeout: a receive may be posted long before its message.
    `address(rank)` translates a pipeline rank to a rank of the job. `usual`: length of most messages in bytes, the same on all
    ranks; if it is small enough, that many bytes of data travel with the header. `form`: structure, dtypes and shapes of every
    message, if they are all the same: ordered steps then have no headers, message-driven steps short ones.
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
        usual: int = INLINE,
        form: Form | None = None,
    ):
        self.rank, self.timeout, self.depth, self.address = rank, timeout, depth, address
        self.port, self.headers = port or HostPort(torch.device("cpu")), Headers(form)
        self.inline = usual if usual <= self.port.inline else 0
        self.inbox = _Inbox()
        self._out: dict[int, _Sender] = {}
        self._in: dict[int, _Receiver] = {}
        self._direct_out: dict[int, DirectSender] = {}
        self._direct_in: dict[int, DirectReceiver] = {}
        self.direct = False  # whether the messages of this step have no headers
        self._later = False  # whether this step posts receives only when their messages are needed
        self._known: set[str] = set()  # programs that have run
        if form is not None:
            self._values = Pool(_maker(form, self.port.device))
        for together in edge_rounds(edges):
            edge = next((edge for edge in together if rank in edge), None)
            # a rank that is in no edge makes a placeholder: [Note: rounds] in program/groups.py
            group = new_group(list(edge or (rank,)))
            if edge is None:
                continue
            source, target = edge
            peer = dist.get_group_rank(group, address(target if rank == source else source))
            if rank == source:
                self._out[target] = _Sender(self, target, group, peer)
                if form is not None and self.port.direct:
                    self._direct_out[target] = DirectSender(
                        form, target, group, peer, self._values, self.fail, blocking=self.port.blocking
                    )
            else:
                self._in[source] = _Receiver(self, source, group, peer)
                if form is not None and self.port.direct:
                    self._direct_in[source] = DirectReceiver(
                        form, source, group, peer, self._values, blocking=self.port.blocking
                    )

    def begin(self, *, ordered: bool, program: str = "") -> None:
        """Start a step. `ordered`: messages come in the order of a program, on all ranks; else as they are sent. `program`
        names it: see [Note: the first step of a pipeline] in direct.py."""
        self.direct = ordered and bool(self._direct_out or self._direct_in)
        self._later = not self.port.blocking and program not in self._known
        self._known.add(program)

    def send(self, target: int, name: Name, value: Any) -> None:
        """Send a tree of tensors; returns at once. The tensors must not be changed afterwards."""
        if self.inbox.error is not None:
            raise CommunicationError(f"cannot send {name} to rank {target}: {self.inbox.error}")
        if self.direct:
            self._direct_out[target].put(name, value)
            return
        structure, tensors = flatten(value)
        assert tensors, f"{name} has no tensors"
        self._out[target].put(name, structure, tensors)

    def post(self, source: int, name: Name | None = None) -> None:
        """Post the receive of the next message from a rank; an ordered program knows its name."""
        if self.direct:
            assert name is not None
            self._direct_in[source].post(name, later=self._later)
        else:
            self._in[source].post()

    def listen(self, source: int, count: int) -> None:
        """Receive the next `count` messages from a rank in a thread, as they arrive."""
        self._in[source].listen(count)

    def receive(self, name: Name, source: int) -> Any:
        """Return the tensors of a message; wait if it has not arrived."""
        if self.direct:
            return self._direct_in[source].take(name, self.timeout)
        receiver, box = self._in[source], self.inbox
        while True:
            listening = receiver.listening  # read first: once it is 0, all messages are in the inbox
            if name in box.messages:
                break
            if listening:
                self.wait_any([name])
                break
            message = receiver.take(self.timeout, name)
            box.messages[message.name] = message
            box.held[message.name.stage, message.name.kind] += 1
        with box.changed:
            message = box.messages.pop(name)
            box.held[name.stage, name.kind] -= 1
            box.changed.notify_all()
        message.ready()
        return message.value

    def arrived(self, name: Name) -> bool:
        """Whether a message has arrived (message-driven)."""
        return name in self.inbox.messages

    def wait_any(self, names: Sequence[Name]) -> None:
        """Block until one of these messages has arrived (message-driven)."""
        box, deadline = self.inbox, time.monotonic() + self.timeout
        with box.changed:
            while not any(name in box.messages for name in names):
                if box.error is not None:
                    raise CommunicationError(f"failed waiting for {_list(names)}: {box.error}") from box.error
                if time.monotonic() >= deadline:
                    raise CommunicationError(f"timed out after {self.timeout:.0f} s waiting for {_list(names)}")
                box.wanted = names
                box.changed.notify_all()
                box.changed.wait(deadline - time.monotonic())

    def release(self, value: Any) -> None:
        """Return the buffer of a received value; it is reused once no send reads from it."""
        if self.direct:
            self._values.give_back([value])
        else:
            self.port.pool.give_back(flatten(value)[1])

    def finish(self) -> None:
        """End a step: wait until everything has been sent."""
        senders: dict[int, DirectSender] | dict[int, _Sender] = self._direct_out if self.direct else self._out
        for target, sender in senders.items():
            if not sender.wait_idle(self.timeout):
                raise CommunicationError(
                    f"timed out after {self.timeout:.0f} s waiting for rank {target} to receive messages"
                )
        if self.inbox.error is not None:
            raise self.inbox.error
        unused = [*self.inbox.messages, *(name for each in self._direct_in.values() for name in each.left)]
        assert not unused, f"never used: {_list(unused)}"

    def close(self) -> None:
        """End the threads; call it between steps."""
        for sender in self._out.values():
            sender.jobs.put(None)
        for direct in self._direct_out.values():
            direct.close()
        for receiver in self._in.values():
            receiver.jobs.put(0)

    # ---- what the threads call ----

    def fail(self, error: CommunicationError) -> None:
        """Record an error of a thread and wake the caller, which raises it."""
        with self.inbox.changed:
            self.inbox.error = self.inbox.error or error
            self.inbox.changed.notify_all()

    def deliver(self, message: _Message, receiver: _Receiver) -> None:
        """Put a message into the inbox; return when the next one may be received."""
        key, box = (message.name.stage, message.name.kind), self.inbox
        with box.changed:
            box.messages[message.name] = message
            receiver.listening -= 1
            box.held[key] += 1
            if (
                message.name in box.wanted
            ):  # cleared here: before the caller runs again, all other messages could arrive
                box.wanted = ()
            box.changed.notify_all()
            while box.held[key] >= self.depth and not box.wanted and box.error is None:
                box.changed.wait()


def _list(names: Sequence[Name]) -> str:
    return " or ".join(map(str, names[:4])) + (" …" if len(names) > 4 else "")


INLINED = -1  # instead of a generation: the data are in the same transfer as the header


class _Sender:
    """Sends to one rank, in order.

    A short message is copied and sent by the caller, which also waits for the last few of them. A thread waits until the
    others have been sent (and sends them itself if sending may block), then drops their tensors.
    """

    def __init__(self, transport: Transport, target: int, group: dist.ProcessGroup, peer: int):
        self.transport, self.target, self.group, self.peer = transport, target, group, peer
        self.jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unsent = 0
        self._generation = self._capacity = 0
        self._light: deque[tuple[Tensor, Any]] = deque()  # buffers and their transfers
        self._thread: threading.Thread | None = None

    def put(self, name: Name, structure: Any, tensors: list[Tensor]) -> None:
        port = self.transport.port
        try:
            if joined_size(tensors) <= self.transport.inline:
                self._put_light(name, structure, tensors)
                return
            port.pool.borrow(tensors)
            data = join_bytes(tensors)  # here, so that on a device what is computed includes the copies
            if port.sends_at_once:
                self._hand_over((tensors, self._start(name, structure, tensors, data, None)))
            else:
                self._hand_over((tensors, name, structure, data, port.computed()))
        except RuntimeError as e:
            raise CommunicationError(f"rank {self.target} no longer takes messages ({plain(e)})") from e

    def _put_light(self, name: Name, structure: Any, tensors: list[Tensor]) -> None:
        size = self.transport.headers.size + joined_size(tensors)
        buffer = self.transport.port.pool.take(size)
        write_light(self.transport.headers.encode(name, INLINED, structure, tensors), tensors, buffer)
        self._light.append((buffer, self.group.send([buffer[:size]], self.peer, 0)))
        if len(self._light) > light_sends(size):
            oldest, work = self._light.popleft()
            self._hand_over(([oldest], [work]))

    def _hand_over(self, job: tuple[Any, ...]) -> None:
        """Give a message to the thread."""
        if self._thread is None:
            self._thread = start_thread(self._run, f"send to {self.target}", lambda: self.jobs.put(None))
        with self._idle:
            self._unsent += 1
        self.jobs.put(job)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything has been sent, or sending has failed; False: timed out."""
        deadline = time.monotonic() + timeout
        while self._light:
            buffer, work = self._light.popleft()
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as e:
                if time.monotonic() >= deadline:
                    return False
                raise CommunicationError(f"rank {self.target} no longer takes messages ({plain(e)})") from e
            self.transport.port.pool.give_back([buffer])
        with self._idle:
            return self._idle.wait_for(lambda: not self._unsent or self.transport.inbox.error is not None, timeout)

    def _run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                tensors, *rest = job
                works = rest[0] if len(rest) == 1 else self._start(rest[0], rest[1], tensors, rest[2], rest[3])
                for work in works:
                    if work is not None:
                        work.wait()
                self.transport.port.pool.give_back(tensors)
                del job, tensors, rest, works  # or they would live until the next message
                with self._idle:
                    self._unsent -= 1
                    self._idle.notify_all()
        except Exception as e:
            self.transport.fail(CommunicationError(f"rank {self.target} no longer takes messages ({plain(e)})"))
            with self._idle:
                self._idle.notify_all()

    def _start(self, name: Name, structure: Any, tensors: list[Tensor], data: Tensor, computed: Any) -> list[Any]:
        if data.numel() > self._capacity:
            self._generation, self._capacity = self._generation + 1, room_for(data.numel())
        header = torch.empty(self.transport.headers.size, dtype=torch.uint8)
        write_light(self.transport.headers.encode(name, self._generation, structure, tensors), (), header)
        work = self.group.send([header], self.peer, 0)
        return [work, self.transport.port.send(data, self.peer, self.group, self._generation, computed)]


class _Receiver:
    """Receives from one rank, in the order of sending: in the caller, or in a listening thread."""

    def __init__(self, transport: Transport, source: int, group: dist.ProcessGroup, peer: int):
        self.transport, self.source, self.group, self.peer = transport, source, group, peer
        self.thread: threading.Thread | None = None
        self.jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._headers: deque[tuple[Tensor, Any]] = deque()  # posted: buffers and their transfers
        self._data: deque[tuple[Tensor, Any]] = deque()  # one per header, of this generation, if data are posted ahead
        self._generation = self._capacity = 0
        self.listening = 0  # messages that the thread has yet to receive

    def post(self) -> None:
        """Post the receives of one more message."""
        buffer = self.transport.port.pool.take(self.transport.headers.size + self.transport.inline)
        try:
            self._headers.append((buffer, self.group.recv([buffer], self.peer, 0)))
            self._post_data()
        except RuntimeError as e:  # the connection is already closed
            raise self._gone(e) from e

    def _post_data(self) -> None:
        """Post one receive of data per posted header; a message whose data came inline leaves its receive to the next one."""
        if self._capacity and self.transport.port.posts_ahead:
            while len(self._data) < len(self._headers):
                self._data.append(self._posted(self._capacity))

    def _posted(self, size: int) -> tuple[Tensor, Any]:
        return self.transport.port.post(size, self.peer, self.group, self._generation)

    def take(self, timeout: float, wanted: Name | None = None) -> _Message:
        """Wait for the oldest posted message and return it."""
        assert self._headers, f"no receive is posted for {wanted}"
        start = time.monotonic()
        port = self.transport.port
        try:
            header, work = self._headers[0]
            work.wait(timedelta(seconds=timeout))
            name, generation, form = self.transport.headers.decode(header)
            if generation == INLINED:
                self._headers.popleft()
                return _Message(name, form.tree(header[self.transport.headers.size :]), _nothing)
            if generation != self._generation:  # messages are longer from now on: [Note: generations] in wire.py
                self._generation, self._capacity = generation, room_for(form.size)
                self._data.clear()
                self._post_data()
            self._headers.popleft()
            port.pool.give_back([header])
            posted = self._data.popleft() if port.posts_ahead else self._posted(form.size)
            found, ready = port.receive(posted, form.size)
        except RuntimeError as e:
            what = str(wanted or self._next)
            if time.monotonic() - start >= timeout:
                raise CommunicationError(f"timed out after {timeout:.0f} s waiting for {what}") from e
            raise self._gone(e, what) from e
        return _Message(name, form.tree(found), ready)

    @property
    def _next(self) -> str:
        return f"the next message from rank {self.source}"

    def _gone(self, error: RuntimeError, what: str | None = None) -> CommunicationError:
        return CommunicationError(
            f"failed waiting for {what or self._next}: rank {self.source} no longer sends ({plain(error)})"
        )

    def listen(self, count: int) -> None:
        """Receive the next `count` messages in a thread."""
        if self.thread is None:
            self.thread = start_thread(self._run, f"receive from {self.source}", lambda: self.jobs.put(0))
        with self.transport.inbox.changed:
            self.listening += count
        self.jobs.put(count)

    def _run(self) -> None:
        no_limit = 30 * 86400.0
        try:
            while (count := self.jobs.get()) > 0:
                for _ in range(count):
                    self.post()
                    self.transport.deliver(self.take(no_limit), self)
        except CommunicationError as e:
            self.transport.fail(e)


def _maker(form: Form, device: torch.device) -> Callable[[int], Tensor]:
    """A function that allocates a buffer for the single tensor of a form."""
    ((dtype, shape),) = form.tensors
    return lambda size: torch.empty(shape, dtype=dtype, device=device)


def _nothing() -> None:
    """Host memory needs no preparation."""
