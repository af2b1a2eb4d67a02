"""Messages without headers: both ends of an edge know the name, the form and the order of every message.

An ordered program determines the next message on an edge, and the plan determines its shape and dtype. So a receive is posted
into a buffer of exactly that form, and the tensor itself is sent: one transfer per message, without copies or parsing. On NCCL
nothing is sent over gloo, and only the computing thread starts transfers, since NCCL needs one launch order per device.

    post(name)      allocates a buffer and starts the receive
    take(name)      waits for it (CPU: blocks, with a timeout; CUDA: orders the current stream)
    put(name, x)    starts the send; x is kept alive until it has been sent

`blocking`: waiting for a transfer blocks the host (gloo); else it orders streams (NCCL).

[Note: the first step of a pipeline]
CUDA loads a kernel at its first launch, and that may wait until everything that runs in the process's context has ended. A
receive that was posted ahead runs until its message comes; if the message depends on the op whose kernel is being loaded (the
first gradient on the first forward), neither ends. So the first time that a program runs, a receive is posted only when its
message is needed: its sender then depends on nothing that this rank has yet to launch.

A sender whose tensor has another form raises `ValueError`: the plan's shape was wrong, and the receiver would misread the data.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.background import start_thread
from fourfold.errors import CommunicationError
from fourfold.ring import plain
from fourfold.runtime.sizes import INLINE, light_sends
from fourfold.runtime.wire import Form, Name, Pool, flatten

__all__ = ["DirectReceiver", "DirectSender", "form_of"]

TAG = 1  # headers use tag 0 on the same groups


def form_of(shape: tuple[int, ...], dtype: torch.dtype) -> Form:
    """The form of a message that is one tensor."""
    return Form(0, ((dtype, torch.Size(shape)),))


class DirectSender:
    """Sends tensors of one form to one rank, in order."""

    def __init__(
        self,
        form: Form,
        target: int,
        group: dist.ProcessGroup,
        peer: int,
        pool: Pool,
        failed: Callable[[CommunicationError], None],
        *,
        blocking: bool = True,
    ):
        ((self.dtype, self.shape),) = form.tensors
        self.target, self.group, self.peer, self.pool, self._failed = target, group, peer, pool, failed
        self._blocking = blocking
        self._most = light_sends(form.size) if form.size <= INLINE else 0
        self._held: deque[tuple[Tensor, Any]] = deque()  # in flight, waited for by the caller
        self._jobs: queue.SimpleQueue[tuple[Tensor, Any] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unsent = 0
        self._thread: threading.Thread | None = None

    def put(self, name: Name, value: Any) -> None:
        """Start sending; returns at once."""
        x = value if isinstance(value, Tensor) else _only(name, value)
        if x.shape != self.shape or x.dtype != self.dtype:
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)}; the receiver expects {self.dtype} {list(self.shape)}"
            )
        x = x.detach().contiguous()
        self.pool.borrow([x])
        try:
            self._held.append((x, self.group.send([x], self.peer, TAG)))
        except RuntimeError as e:
            raise self._gone(e) from e
        self._let_go()

    def _let_go(self) -> None:
        """Drop tensors that have been sent; gloo transfers can only be waited for, which a thread does."""
        if not self._blocking:
            while self._held and self._held[0][1].is_completed():
                self.pool.give_back([self._held.popleft()[0]])
            return
        while len(self._held) > self._most:
            if self._thread is None:
                self._thread = start_thread(self._run, f"sent to {self.target}", self.close)
            with self._idle:
                self._unsent += 1
            self._jobs.put(self._held.popleft())

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                x, work = job
                work.wait()
                self.pool.give_back([x])
                del job, x, work  # or they would live until the next message
                with self._idle:
                    self._unsent -= 1
                    self._idle.notify_all()
        except Exception as e:
            self._failed(self._gone(e))
            with self._idle:
                self._unsent = -1
                self._idle.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until everything has been sent, or the thread has failed; False: timed out."""
        deadline = time.monotonic() + timeout
        while self._held:
            x, work = self._held.popleft()
            try:
                if self._blocking:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                else:
                    work.wait()  # orders the stream
            except RuntimeError as e:
                if time.monotonic() >= deadline:
                    return False
                raise self._gone(e) from e
            self.pool.give_back([x])
        if not self._unsent:
            return True
        with self._idle:
            return self._idle.wait_for(lambda: self._unsent <= 0, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let the thread end."""
        self._jobs.put(None)

    def _gone(self, error: Exception) -> CommunicationError:
        return CommunicationError(f"rank {self.target} no longer takes messages ({plain(error)})")


class DirectReceiver:
    """Receives tensors of one form from one rank, in the order in which they are posted."""

    def __init__(
        self, form: Form, source: int, group: dist.ProcessGroup, peer: int, pool: Pool, *, blocking: bool = True
    ):
        self._blocking = blocking
        self.size = form.tensors[0][1].numel()
        self.source, self.group, self.peer, self.pool = source, group, peer, pool
        self._posted: deque[tuple[Name, Tensor, Any]] = deque()
        self._early: dict[Name, Tensor] = {}  # arrived before they were needed
        self._later: deque[Name] = deque()  # posted when they are needed

    def post(self, name: Name, *, later: bool = False) -> None:
        """Start receiving the next message; `later`: only when it is needed ([Note: the first step of a pipeline])."""
        if later:
            self._later.append(name)
            return
        buffer = self.pool.take(self.size)
        try:
            self._posted.append((name, buffer, self.group.recv([buffer], self.peer, TAG)))
        except RuntimeError as e:  # the connection is already closed
            raise self._gone(name, e) from e

    def take(self, name: Name, timeout: float) -> Tensor:
        """Wait for a message and return its tensor."""
        if name in self._early:
            return self._early.pop(name)
        start = time.monotonic()
        while True:
            if not self._posted:
                assert self._later, f"no receive is posted for {name}"
                self.post(self._later.popleft())
            found, buffer, work = self._posted.popleft()
            try:
                if self._blocking:
                    work.wait(timedelta(seconds=timeout))
                else:
                    work.wait()  # orders the current stream
            except RuntimeError as e:
                if time.monotonic() - start >= timeout:
                    raise CommunicationError(f"timed out after {timeout:.0f} s waiting for {name}") from e
                raise self._gone(name, e) from e
            if found == name:
                return buffer
            self._early[found] = buffer

    @property
    def left(self) -> list[Name]:
        """Messages that were posted or received but not used."""
        return [*(name for name, _, _ in self._posted), *self._early, *self._later]

    def _gone(self, name: Name, error: Exception) -> CommunicationError:
        return CommunicationError(f"failed waiting for {name}: rank {self.source} no longer sends ({plain(error)})")


def _only(name: Name, value: Any) -> Tensor:
    _, tensors = flatten(value)
    if len(tensors) != 1:
        raise ValueError(f"{name} has {len(tensors)} tensors; the receiver expects one")
    return tensors[0]
