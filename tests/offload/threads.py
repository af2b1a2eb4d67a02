"""Device queues with random delays, which expose a missing wait. On the CPU they are threads, on CUDA streams."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fourfold.offload.queues import DeviceQueue, DeviceQueues, make_queues

OPEN: weakref.WeakSet[ThreadQueue] = weakref.WeakSet()
"""Queues whose threads may be running; conftest.py closes them after each test."""


class ThreadQueue:
    """A queue and a thread that runs its work, each item after a random delay."""

    def __init__(self, seed: int, delay: float, *, careless: bool = False):
        self.random, self.delay, self.careless = random.Random(seed), delay, careless
        self.error: BaseException | None = None
        self.queue: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        OPEN.add(self)

    def _run(self) -> None:
        while (work := self.queue.get()) is not None and not self.closed.is_set():
            try:
                work()
            except BaseException as e:
                self.error = e

    def submit(self, work: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self.random.random() * self.delay)
            work()

        self.queue.put(late)

    def record(self) -> threading.Event:
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def wait(self, event: threading.Event) -> None:
        if not self.careless:
            self.queue.put(lambda: self._await(event))

    def _await(self, event: threading.Event) -> None:
        deadline = time.monotonic() + 30
        while not event.wait(0.05) and not self.closed.is_set() and time.monotonic() < deadline:
            pass

    def synchronize(self) -> None:
        if self.closed.is_set():  # an optimizer that outlives its test
            return
        assert self.record().wait(30)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread; work that is still queued is dropped."""
        self.closed.set()
        self.queue.put(None)
        self.thread.join()


class CallerQueue:
    """The calling thread."""

    def __init__(self, careless: bool = False):
        self.careless = careless

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> threading.Event:
        event = threading.Event()
        event.set()
        return event

    def wait(self, event: threading.Event) -> None:
        if not self.careless:
            assert event.wait(30)

    def synchronize(self) -> None:
        pass


class SleepyQueue:
    """A CUDA stream that sleeps a random time before each item."""

    def __init__(self, inner: DeviceQueue, seed: int, delay: float, careless: bool):
        self.inner, self.random, self.delay, self.careless = inner, random.Random(seed), delay, careless
        self.record, self.synchronize = inner.record, inner.synchronize

    def submit(self, work: Callable[[], object]) -> None:
        self.inner.submit(lambda: torch.cuda._sleep(int(1e9 * self.random.random() * self.delay)))
        self.inner.submit(work)

    def wait(self, event: Any) -> None:
        if not self.careless:
            self.inner.wait(event)


def slow_queues(seed: int, device: torch.device, delay: float = 1e-3, careless: str = "") -> DeviceQueues:
    """Queues of a device with random delays; the one named by `careless` ignores waits."""
    if device.type == "cpu":
        return thread_queues(seed, delay, careless)
    queues = make_queues(device)
    made = (
        SleepyQueue(getattr(queues, n), seed + i, delay, careless == n)
        for i, n in enumerate(("compute", "copy_in", "update", "copy_out"))
    )
    return DeviceQueues(*made)


def thread_queues(seed: int, delay: float = 1e-3, careless: str = "") -> DeviceQueues:
    """Queues that are threads; the one named by `careless` ignores waits."""
    made = [
        ThreadQueue(seed + i, delay, careless=careless == n) for i, n in enumerate(("copy_in", "update", "copy_out"))
    ]
    return DeviceQueues(CallerQueue(careless == "compute"), *made)
