"""Lanes that take random times: what does not wait for what it needs shows. On the CPU they are threads, on CUDA streams."""

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

OPEN: weakref.WeakSet[ThreadLane] = weakref.WeakSet()
"""Lanes whose threads may be running; conftest.py closes them after each test."""


class ThreadLane:
    """A queue of work and a thread that does it, each piece after a random delay."""

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

    def do(self, work: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self.random.random() * self.delay)
            work()

        self.queue.put(late)

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def wait(self, mark: threading.Event) -> None:
        if not self.careless:
            self.queue.put(lambda: self._await(mark))

    def _await(self, mark: threading.Event) -> None:
        deadline = time.monotonic() + 30
        while not mark.wait(0.05) and not self.closed.is_set() and time.monotonic() < deadline:
            pass

    def finish(self) -> None:
        assert self.mark().wait(30)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread; work that is still queued is dropped."""
        self.closed.set()
        self.queue.put(None)
        self.thread.join()


class Here:
    """The thread that calls."""

    def __init__(self, careless: bool = False):
        self.careless = careless

    def do(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> threading.Event:
        event = threading.Event()
        event.set()
        return event

    def wait(self, mark: threading.Event) -> None:
        if not self.careless:
            assert mark.wait(30)

    def finish(self) -> None:
        pass


class SleepyLane:
    """A CUDA stream that sleeps a random time before each piece of work."""

    def __init__(self, lane: DeviceQueue, seed: int, delay: float, careless: bool):
        self.lane, self.random, self.delay, self.careless = lane, random.Random(seed), delay, careless
        self.mark, self.finish = lane.mark, lane.finish

    def do(self, work: Callable[[], object]) -> None:
        self.lane.do(lambda: torch.cuda._sleep(int(1e9 * self.random.random() * self.delay)))
        self.lane.do(work)

    def wait(self, mark: Any) -> None:
        if not self.careless:
            self.lane.wait(mark)


def slow_lanes(seed: int, device: torch.device, delay: float = 1e-3, careless: str = "") -> DeviceQueues:
    """Lanes of a device that take random times; the one named `careless` waits for nothing."""
    if device.type == "cpu":
        return thread_lanes(seed, delay, careless)
    lanes = make_queues(device)
    made = (
        SleepyLane(getattr(lanes, n), seed + i, delay, careless == n)
        for i, n in enumerate(("here", "incoming", "updating", "outgoing"))
    )
    return DeviceQueues(*made)


def thread_lanes(seed: int, delay: float = 1e-3, careless: str = "") -> DeviceQueues:
    """Lanes as threads; the one named `careless` waits for nothing."""
    made = [
        ThreadLane(seed + i, delay, careless=careless == n) for i, n in enumerate(("incoming", "updating", "outgoing"))
    ]
    return DeviceQueues(Here(careless == "here"), *made)
